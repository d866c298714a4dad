"""`check_template`: every way in which a conversation of a recipe can go on, rendered with the real template.

Called by preflight. Each way is a pattern of roles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from transformers import PreTrainedTokenizerBase

from nemo_rl.data.conversation import Message, ToolCall
from nemo_rl.data.thinking import THINK_END
from nemo_rl.data.turn_encoder import ANALYSIS, TurnEncoder
from nemo_rl.errors import DatasetError, ModelFolderError, NemoRLError, shorten

__all__ = ["PatternCheck", "RolePattern", "check_template", "role_patterns"]

Verdict = Literal["append", "seam", "new_row", "refused"]
PARALLEL_CALLS = 2
"""Calls of a turn in the pattern of parallel calls."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RolePattern:
    """A conversation up to a turn of the model, and what follows it."""

    name: str
    turn: Message
    new: tuple[Message, ...]
    is_cut: bool = False
    has_thoughts: bool = False
    is_needed: bool = True
    """False: a template that refuses it is no reason against a run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PatternCheck:
    """The finding on one pattern.

    Example:
        `tool result: seam ['\\n']`
    """

    name: str
    verdict: Verdict
    """`append`: the reply alone; `seam`: tokens that end the turn come before it; `new_row`: the template rewrites what
    the row holds; `refused`: it has no form for the pattern."""
    tokens: tuple[str, ...] = ()
    """Tokens of the seam; or those of the row that a fresh render has no more."""
    reason: str = ""
    """The template's error."""
    is_needed: bool = True

    def line(self) -> str:
        if self.verdict == "refused":
            return f"{self.name}: refused ({self.reason})"
        if self.verdict == "new_row":
            return f"{self.name}: new_row, the template drops {shorten(repr(''.join(self.tokens)))}"
        return f"{self.name}: {self.verdict}{f' {list(self.tokens)}' if self.tokens else ''}"


def role_patterns(
    *, tools: Sequence[str] = (), has_replies: bool = True, max_parallel_calls: int = 1, has_thoughts: bool = True
) -> tuple[RolePattern, ...]:
    """Return the patterns that a recipe can produce.

    Args:
        tools: names of the tools.
        has_replies: the environment answers with messages of a user.
        max_parallel_calls: calls of one turn.
        has_thoughts: the model may show its thoughts.
    """
    answer, user = Message(role="assistant", content="4"), Message(role="user", content="higher")
    found = []
    if has_replies:
        found += [
            RolePattern(name="user reply", turn=answer, new=(user,)),
            RolePattern(name="user reply to a cut turn", turn=answer, new=(user,), is_cut=True),
            RolePattern(name="user reply to thoughts", turn=answer, new=(user,), has_thoughts=True),
        ]
    if tools:
        calls = tuple(ToolCall(name=tools[n % len(tools)], arguments={"value": "2"}) for n in range(PARALLEL_CALLS))
        results = tuple(Message(role="tool", content="4", name=call.name) for call in calls)
        one, several = (Message(role="assistant", content="", calls=calls[:count]) for count in (1, PARALLEL_CALLS))
        told = (Message(role="tool", content="cut", name=tools[0]),)
        found += [
            RolePattern(name="tool result", turn=one, new=results[:1]),
            RolePattern(name="tool result without a call", turn=answer, new=told, is_needed=False),
            RolePattern(name="tool result to thoughts", turn=one, new=results[:1], has_thoughts=True),
        ]
        if max_parallel_calls > 1:
            found.append(RolePattern(name="parallel tool results", turn=several, new=results))
        if has_replies:
            found.append(RolePattern(name="tool result, then user", turn=one, new=(*results[:1], user)))
    return tuple(pattern for pattern in found if has_thoughts or not pattern.has_thoughts)


def check_template(
    encoder: TurnEncoder, tokenizer: PreTrainedTokenizerBase, patterns: Sequence[RolePattern]
) -> tuple[PatternCheck, ...]:
    """Return what the template makes of each pattern, and of a text with control tokens; the encoder must append."""
    found = [_check(encoder, tokenizer, pattern) for pattern in patterns]
    if patterns:
        found.append(_check(encoder, tokenizer, _with_control_tokens(tokenizer, patterns[-1])))
    return tuple(found)


def _check(encoder: TurnEncoder, tokenizer: PreTrainedTokenizerBase, pattern: RolePattern) -> PatternCheck:
    opening = [Message(role="user", content="2+2")]
    turn = pattern.turn
    sampled_text = turn.content
    if pattern.has_thoughts:
        sampled_text, turn = _thinking(encoder, turn)
    conversation = [*opening, turn]
    try:
        end = [] if pattern.is_cut else [encoder.end_token(conversation, pattern.new)]
        sampled = [*tokenizer(sampled_text, add_special_tokens=False)["input_ids"], *end]
        reply = encoder.extend(conversation, pattern.new, sampled=sampled, is_cut=pattern.is_cut)
        is_rewritten = encoder.rewrites(conversation, pattern.new, sampled=sampled)
        row = (*encoder.prompt(opening), *sampled, *reply.ids)
        tokens = _dropped(row, encoder.prompt([*conversation, *pattern.new])) if is_rewritten else ()
    except (DatasetError, ModelFolderError) as error:
        return PatternCheck(name=pattern.name, verdict="refused", reason=_cause(error), is_needed=pattern.is_needed)
    verdict: Verdict = "new_row" if is_rewritten else "seam" if reply.num_seam else "append"
    shown = tokens if is_rewritten else reply.ids[: reply.num_seam]
    texts = tuple(tokenizer.decode([token]) for token in shown)
    return PatternCheck(name=pattern.name, verdict=verdict, tokens=texts, is_needed=pattern.is_needed)


def _thinking(encoder: TurnEncoder, turn: Message) -> tuple[str, Message]:
    """Return a turn with thoughts, as text and as a message, in the form that the template knows."""
    if ANALYSIS.removesuffix("analysis") in encoder.template_text:
        final = "" if turn.calls else "<|start|>assistant<|channel|>final<|message|>"
        return f"{ANALYSIS}<|message|>2+2=4<|end|>{final}{turn.content}", turn
    text = f"<think>\n2+2=4\n{THINK_END}\n\n{turn.content}"
    return text, Message(role="assistant", content=text, calls=turn.calls)


def _with_control_tokens(tokenizer: PreTrainedTokenizerBase, pattern: RolePattern) -> RolePattern:
    text = f'a {tokenizer.eos_token} "b"\nc'
    new = (Message(role=pattern.new[0].role, content=text, name=pattern.new[0].name), *pattern.new[1:])
    name = f"{pattern.name}, with a control token in its text"
    return RolePattern(name=name, turn=pattern.turn, new=new, is_cut=pattern.is_cut, is_needed=False)


def _dropped(row: Sequence[int], fresh: Sequence[int]) -> tuple[int, ...]:
    """Return the tokens of the row between what both have at their start and at their end."""
    start = next((n for n, (a, b) in enumerate(zip(row, fresh, strict=False)) if a != b), min(len(row), len(fresh)))
    rest = zip(reversed(row[start:]), reversed(fresh[start:]), strict=False)
    num_same = next((n for n, (a, b) in enumerate(rest) if a != b), min(len(row), len(fresh)) - start)
    return tuple(row[start : len(row) - num_same])


def _cause(error: NemoRLError) -> str:
    inner = error.__cause__
    return shorten(str(inner) if inner is not None else str(error))
