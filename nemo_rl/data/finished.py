"""Finished conversations as rows of tokens: what supervised training trains on.

    row of a file -- finished_conversation --> messages, tools -- encode_conversation --> tokens and trained turns
    row of readable rollouts ------------------------------------------------------------> the tokens that were sampled

Called by the worker of supervised training and by preflight. Invariant: the tokens are those of a rollout in which the
assistant has said the same: prompts, seams and replies come from the `TurnEncoder` of rollouts, and trained are the
tokens that an engine would have sampled, the end of each turn with them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise

from transformers import PreTrainedTokenizerBase

from nemo_rl.config.data import DataConfig, DatasetConfig
from nemo_rl.data.conversation import Message, Role, ToolCall
from nemo_rl.data.datasets import DIGEST_BYTES, MISSING, Prompt, RowProblems, json_value, raw_prompts, value_at
from nemo_rl.data.messages import messages_of, prompt_messages
from nemo_rl.data.sources import file_rows
from nemo_rl.data.thinking import THINK_END, THINK_START
from nemo_rl.data.turn_encoder import TurnEncoder
from nemo_rl.errors import NAMES_SHOWN, DatasetError, ModelFolderError, shorten

__all__ = [
    "Conversation",
    "FinishedRow",
    "FinishedSet",
    "encode_conversation",
    "finished_conversation",
    "finished_encoder",
    "load_finished",
]

DEFAULT_INPUT = DatasetConfig.model_fields["input_key"].default
CONVERSATIONS = ("messages", "conversations")
"""Columns with a whole conversation, as OpenAI and ShareGPT name them."""
_ROLES: Mapping[object, Role] = {
    **{"system": "system", "developer": "system", "user": "user", "human": "user"},
    **{"assistant": "assistant", "gpt": "assistant", "function_call": "assistant"},
    **{"tool": "tool", "function": "tool", "observation": "tool"},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedRow:
    """One row to train on.

    Example:
        `FinishedRow(ids=(1, 2, 7, 8, 4, 9), turns=((2, 2), (5, 1)), prompt=...)` trains on 7, 8 and 9.
    """

    ids: tuple[int, ...]
    turns: tuple[tuple[int, int], ...]
    """Spans of trained tokens: position of the first one and their number, in order; at least one."""
    prompt: Prompt
    """Its messages and place, for people."""

    @property
    def num_trained(self) -> int:
        return sum(length for _, length in self.turns)


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedSet:
    """The rows of one source."""

    rows: tuple[FinishedRow, ...]
    num_overlong: int
    """Rows longer than `policy.max_total_sequence_length`, left out."""
    skipped: tuple[str, ...]
    """The first of them, for people."""
    digest: str
    remarks: tuple[str, ...]
    """Lines about the source for the user."""
    prompts: frozenset[str]
    """Says what its conversations ask, as `_opening_of` has it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """A finished conversation of a file."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, object], ...] = ()
    untrained: frozenset[int] = frozenset()
    """Numbers of the assistant's messages with `weight: 0`."""


def load_finished(
    data: DataConfig,
    encoder: TurnEncoder,
    *,
    max_length: int,
    min_reward: float | None = None,
    max_rows: int | None = None,
) -> dict[str, FinishedSet]:
    """Return the rows of every source by the dotted path of its section, those of training first; a conversation that
    begins as a held-out one is not trained on.

    Args:
        max_length: most tokens of a row; longer ones are counted, or refused with `data.overlong_prompts: error`.
        min_reward: least reward of rows that are readable rollouts.
        max_rows: rows read of each source; None reads all.

    Raises:
        DatasetError: a source is missing, malformed or empty, or has rows that cannot be used.
        ModelFolderError: the chat template has no form for the conversations.
    """
    held_out: dict[str, FinishedSet] = {}
    exclude: set[str] = set()
    found: dict[str, FinishedSet] = {}
    for name, source in data.held_out.items():
        reader = _Reader(source, encoder, data, data.held_out_key(name), max_length, min_reward)
        held_out[data.held_out_key(name)] = read = reader.read(frozenset(), max_rows)
        exclude |= read.prompts
    for where, source in data.sources.items():
        found[where] = _Reader(source, encoder, data, where, max_length, min_reward).read(exclude, max_rows)
    return found | held_out


class _Reader:
    """Reads one source."""

    def __init__(
        self,
        cfg: DatasetConfig,
        encoder: TurnEncoder,
        data: DataConfig,
        where: str,
        max_length: int,
        min_reward: float | None,
    ) -> None:
        self._cfg, self._encoder, self._where = cfg, encoder, where
        self._max_length, self._refuses_long = max_length, data.overlong_prompts == "error"
        self._min_reward = min_reward
        self._problems = RowProblems(where)
        self._rows: list[FinishedRow] = []
        self._skipped: list[str] = []
        self._remarks: list[str] = []
        self._prompts: set[str] = set()
        self._sampled: set[tuple[int, ...]] = set()
        self._counts = dict.fromkeys(("overlong", "held out", "low", "cut", "again"), 0)
        around = [cfg.system_prompt, cfg.prompt_template, encoder.template_text]
        self._digest = hashlib.blake2b(json.dumps(around).encode(), digest_size=DIGEST_BYTES)

    def read(self, exclude: Collection[str], max_rows: int | None) -> FinishedSet:
        num_read = 0
        for place, row in self._given():
            if num_read == max_rows:
                break
            num_read += 1
            try:
                self._take(place, row, exclude)
            except DatasetError as error:
                self._problems.add("that are no finished conversation", f"{place}: {error}")
            except ModelFolderError as error:
                raise ModelFolderError(f"{self._where}: {place}: {error}") from error
        self._problems.check(num_read)
        counts = self._counts
        told = {
            f"longer than policy.max_total_sequence_length={self._max_length}, left out": counts["overlong"],
            "that also occur in validation, left out": counts["held out"],
            f"with a reward below sft.min_reward={self._min_reward}, left out": counts["low"],
            "truncated, left out": counts["cut"],
            "with the tokens of another one, left out": counts["again"],
        }
        left_out = [f"{count} rows {what}" for what, count in told.items() if count]
        trained = sum(row.num_trained for row in self._rows)
        if not self._rows:
            raise DatasetError(f"{self._where}: no row is left of {num_read} read: {'; '.join(left_out) or 'none'}")
        line = f"{self._where}: {num_read} read, {len(self._rows)} rows, {trained} trained tokens"
        return FinishedSet(
            rows=tuple(self._rows),
            num_overlong=counts["overlong"],
            skipped=tuple(self._skipped),
            digest=self._digest.hexdigest(),
            remarks=(*self._remarks, "; ".join([line, *left_out])),
            prompts=frozenset(self._prompts),
        )

    def _given(self) -> Iterator[tuple[str, Mapping[str, object] | Conversation]]:
        rows = file_rows(self._cfg, self._where)
        if rows is not None:
            for place, row, remark in rows:
                self._remarks += [f"{self._where}: {remark}"] if remark else []
                yield place, row
            return
        for number, raw in enumerate(raw_prompts(self._cfg, self._where)):
            place = f"{self._where}: prompt {number}" + (f" ({raw.place})" if raw.place else "")
            asked = _asked(raw.text, self._cfg, history=raw.history)
            yield place, Conversation(messages=(*asked, Message(role="assistant", content=str(raw.answer))))

    def _take(self, place: str, row: Mapping[str, object] | Conversation, exclude: Collection[str]) -> None:
        if isinstance(row, Mapping) and "token_ids" in row and "token_mask" in row:
            self._take_sampled(place, row)
            return
        given = row if isinstance(row, Conversation) else finished_conversation(row, self._cfg)
        opening = _opening_of(given.messages)
        if opening in exclude:
            self._counts["held out"] += 1
            return
        self._prompts.add(opening)
        for ids, turns in encode_conversation(given, self._encoder):
            self._add(place, ids, turns, given.messages)

    def _take_sampled(self, place: str, row: Mapping[str, object]) -> None:
        """Take the tokens of a row of readable rollouts, as they were sampled."""
        ids, mask, reward = row["token_ids"], row["token_mask"], row.get("reward")
        if not (isinstance(ids, list) and isinstance(mask, list) and isinstance(reward, int | float)):
            raise DatasetError("expected a row of readable rollouts with token_ids, token_mask and reward")
        if self._min_reward is None:
            raise DatasetError("is a sampled rollout; set sft.min_reward to the least reward of those to train on")
        turns = _spans([bool(kept) for kept in mask])
        first = turns[0][0] if turns else len(ids)
        if self._encoder.tokenizer.decode(ids[:first]) != row.get("prompt"):
            raise DatasetError("its tokens are not those of its text; it was sampled with another tokenizer")
        if reward < self._min_reward:
            self._counts["low"] += 1
        elif row.get("truncated"):
            self._counts["cut"] += 1
        elif tuple(ids) in self._sampled:
            self._counts["again"] += 1
        else:
            self._sampled.add(tuple(ids))
            said = Message(role="assistant", content=str(row.get("response")))
            self._add(place, tuple(ids), turns, (Message(role="user", content=str(row["prompt"])), said))

    def _add(
        self, place: str, ids: tuple[int, ...], turns: Sequence[tuple[int, int]], messages: Sequence[Message]
    ) -> None:
        if not turns:
            raise DatasetError("no token of it would be trained; leave it out")
        if len(ids) > self._max_length:
            if self._refuses_long:
                raise DatasetError(
                    f"has {len(ids)} tokens, policy.max_total_sequence_length allows {self._max_length}; raise it, or "
                    "set data.overlong_prompts=skip"
                )
            self._counts["overlong"] += 1
            if len(self._skipped) < NAMES_SHOWN:
                self._skipped.append(f"{place} with {len(ids)} tokens")
            return
        asked, said = messages[:-1], messages[-1].content
        number = len(self._rows)
        text = next((message.content for message in reversed(asked) if message.role == "user"), "")
        prompt = Prompt(index=number, text=text, answer=said, ids=(), place=place, messages=tuple(asked))
        self._rows.append(FinishedRow(ids=ids, turns=tuple(turns), prompt=prompt))
        self._digest.update(json.dumps([ids, list(turns)]).encode() + b"\n")


def _spans(mask: Sequence[bool]) -> list[tuple[int, int]]:
    """Return first position and length of each run of trained tokens."""
    starts = [place for place, kept in enumerate(mask) if kept and not (place and mask[place - 1])]
    ends = [place + 1 for place, kept in enumerate(mask) if kept and not (place + 1 < len(mask) and mask[place + 1])]
    return [(start, end - start) for start, end in zip(starts, ends, strict=True)]


def encode_conversation(
    given: Conversation, encoder: TurnEncoder
) -> list[tuple[tuple[int, ...], list[tuple[int, int]]]]:
    """Return tokens and trained spans of the rows of a conversation: several where the template rewrites earlier turns
    once others follow.

    Raises:
        DatasetError: its roles follow each other as in no conversation, or a text is lost in the template.
        ModelFolderError: the chat template has no form for it.
    """
    messages, turns = given.messages, [n for n, said in enumerate(given.messages) if said.role == "assistant"]
    _check_roles(messages)
    encoder = encoder.with_tools(given.tools)
    ids, spans = list(encoder.prompt(messages[: turns[0]])), list[tuple[int, int]]()
    rows: list[tuple[tuple[int, ...], list[tuple[int, int]]]] = []
    for number, following in zip(turns, [*turns[1:], None], strict=True):
        sampled = encoder.turn(messages[:number], messages[number])
        if number not in given.untrained:
            spans.append((len(ids), len(sampled)))
        ids += sampled
        if following is None:
            break
        said, new = messages[: number + 1], messages[number + 1 : following]
        more = encoder.extend(said, new, sampled=sampled, is_cut=False)
        if more.starts_row:
            rows += [(tuple(ids), spans)] if spans else []
            ids, spans = list(more.ids), []
        else:
            ids += more.ids
    if spans or not rows:
        rows.append((tuple(ids), spans))
    return rows


def _check_roles(messages: Sequence[Message]) -> None:
    roles = [message.role for message in messages]
    problem = None
    if "assistant" not in roles:
        problem = "a message of the assistant"
    elif not {"user", "tool"} & set(roles[: roles.index("assistant")]):
        problem = "a message of the user before the first one of the assistant"
    elif "system" in roles[1:]:
        problem = "one system message, at the start"
    elif any(first == second == "assistant" for first, second in pairwise(roles)):
        problem = "a message between two of the assistant"
    elif roles[-1] != "assistant":
        problem = "a last message of the assistant"
    if problem is not None:
        raise DatasetError(f"expected {problem}, got roles {', '.join(roles)}; mend the row or leave it out")


# ---- rows of files


def finished_conversation(row: Mapping[str, object], cfg: DatasetConfig) -> Conversation:
    """Return the conversation of a row, in the first of these forms that it has: `input_key` and `output_key`, where
    the recipe sets `input_key`; a column of `CONVERSATIONS`; `instruction`, `input` and `output` of Alpaca; `prompt`
    and `completion` of TRL; the columns `input` and `output`.

    Raises:
        DatasetError: it has none of them, or one that is malformed.
    """
    tools = _tools(row.get("tools"))
    keys: list[tuple[str, str]] = [(cfg.input_key, cfg.output_key)]
    if cfg.input_key == DEFAULT_INPUT:
        whole = next((name for name in CONVERSATIONS if isinstance(row.get(name), list | tuple)), None)
        if whole is not None:
            return _of_messages(row[whole], cfg, tools, system=row.get("system"))
        if isinstance(row.get("instruction"), str):
            return _of_alpaca(row, cfg, tools)
        keys.insert(0, ("prompt", "completion"))
    for input_key, output_key in keys:
        asked, said = value_at(row, input_key), value_at(row, output_key)
        if asked is not MISSING and (said is not MISSING or isinstance(asked, list | tuple)):
            return _of_pair(asked, None if said is MISSING else said, cfg, tools)
    raise DatasetError(
        f"expected messages, prompt and completion, or {cfg.input_key!r} and {cfg.output_key!r}, got "
        f"{shorten(str(sorted(row)))}; set input_key and output_key"
    )


def _of_pair(asked: object, said: object, cfg: DatasetConfig, tools: tuple[Mapping[str, object], ...]) -> Conversation:
    answer = [{"role": "assistant", "content": said}] if isinstance(said, str) else said
    if isinstance(asked, list | tuple) and said is None:
        return _of_messages(asked, cfg, tools)
    if isinstance(answer, list | tuple) and isinstance(asked, list | tuple):
        return _of_messages([*asked, *answer], cfg, tools)
    if isinstance(answer, list | tuple) and isinstance(asked, str):
        behind = _of_messages(answer, cfg, tools, has_system=False)
        before = _asked(asked, cfg)
        untrained = frozenset(number + len(before) for number in behind.untrained)
        return Conversation(messages=(*before, *behind.messages), tools=tools, untrained=untrained)
    raise DatasetError(f"expected a text or messages as prompt and answer, got {shorten(repr((asked, said)))}")


def _of_alpaca(row: Mapping[str, object], cfg: DatasetConfig, tools: tuple[Mapping[str, object], ...]) -> Conversation:
    said, more = row.get("output"), row.get("input")
    if not isinstance(said, str):
        raise DatasetError(f"'output': expected a text beside 'instruction', got {shorten(repr(said))}")
    history: list[Message] = []
    before = row.get("history") or []
    if not isinstance(before, list | tuple):
        raise DatasetError(f"'history': expected pairs of texts, got {shorten(repr(before))}")
    if isinstance(row.get("system"), str) and row["system"]:
        history.append(Message(role="system", content=str(row["system"])))
    for pair in before:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise DatasetError(f"'history': expected pairs of texts, got {shorten(repr(pair))}")
        history += [Message(role="user", content=str(pair[0])), Message(role="assistant", content=str(pair[1]))]
    text = "\n\n".join(part for part in (str(row["instruction"]), more) if isinstance(part, str) and part)
    asked = _asked(text, cfg, history=history)
    return Conversation(messages=(*asked, Message(role="assistant", content=said)), tools=tools)


def _asked(text: object, cfg: DatasetConfig, *, history: Sequence[Message] = ()) -> list[Message]:
    if not isinstance(text, str) or not text.strip():
        raise DatasetError(f"{cfg.input_key!r}: expected a text, got {shorten(repr(text))}")
    return prompt_messages(text, system_prompt=cfg.system_prompt, prompt_template=cfg.prompt_template, history=history)


def _of_messages(
    given: object,
    cfg: DatasetConfig,
    tools: tuple[Mapping[str, object], ...],
    *,
    system: object = None,
    has_system: bool = True,
) -> Conversation:
    assert isinstance(given, list | tuple)
    messages: list[Message] = []
    untrained: set[int] = set()
    names: dict[object, str] = {}
    for number, item in enumerate(given):
        if not isinstance(item, Mapping):
            raise DatasetError(f"message {number}: expected role and content, got {shorten(repr(item))}")
        if item.get("weight") not in {None, 0, 1}:
            raise DatasetError(f"message {number}: expected a weight of 0 or 1, got {item['weight']!r}")
        if item.get("weight") == 0:
            untrained.add(number)
        messages.append(_message(item, number, names))
    text = system if isinstance(system, str) and system else cfg.system_prompt
    if has_system and text and (not messages or messages[0].role != "system"):
        messages.insert(0, Message(role="system", content=text))
        untrained = {number + 1 for number in untrained}
    if has_system and cfg.prompt_template != "{input}":
        raise DatasetError("prompt_template has no place in messages; write it into them, or leave it out")
    return Conversation(messages=tuple(messages), tools=tools, untrained=frozenset(untrained))


def _message(item: Mapping[str, object], number: int, names: dict[object, str]) -> Message:
    """Return one message.

    Args:
        names: of the tools by the ids of the calls so far.
    """
    said, given = item.get("role", item.get("from")), item.get("tool_calls") or ()
    role, content = _ROLES.get(said), item.get("content", item.get("value"))
    if role is None:
        raise DatasetError(
            f"message {number}: expected a role of system, user, assistant or tool, got {shorten(repr(said))}"
        )
    if said == "function_call":
        given, content = [{"function": _json(content, number)}], ""
    if isinstance(content, list | tuple):
        try:
            [plain], pictures = messages_of([{"role": "user", "content": content}])
        except ValueError as error:
            raise DatasetError(f"message {number}: {error}") from error
        if pictures:
            raise DatasetError(f"message {number}: has a picture, and supervised training is of text; leave it out")
        content = plain.content
    content = "" if content is None and given else content
    if not isinstance(content, str) or not isinstance(given, list | tuple):
        raise DatasetError(f"message {number}: expected a text, got {shorten(repr(content))}")
    if given and role != "assistant":
        raise DatasetError(f"message {number}: has calls of tools, which only the assistant makes")
    calls = tuple(_call(call, number) for call in given)
    for call, raw in zip(calls, given, strict=True):
        names[raw.get("id")] = call.name
    thoughts = item.get("reasoning_content") or item.get("reasoning")
    if role == "assistant" and isinstance(thoughts, str):
        content = f"{THINK_START}\n{thoughts}\n{THINK_END}\n\n{content}"
    name = item.get("name") or names.get(item.get("tool_call_id")) if role == "tool" else None
    return Message(role=role, content=content, calls=calls, name=None if name is None else str(name))


def _call(given: object, number: int) -> ToolCall:
    function = given.get("function", given) if isinstance(given, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    arguments = function.get("arguments", {}) if isinstance(function, Mapping) else None
    arguments = _json(arguments, number) if isinstance(arguments, str) else arguments
    if not isinstance(name, str) or not isinstance(arguments, Mapping):
        raise DatasetError(
            f"message {number}: expected calls of a function with name and arguments, got {shorten(repr(given))}"
        )
    return ToolCall(name=name, arguments={str(key): value for key, value in arguments.items()})


def _json(text: object, number: int) -> Mapping[str, object]:
    try:
        found = json.loads(text) if isinstance(text, str) else text
    except ValueError as error:
        raise DatasetError(f"message {number}: a call that is no JSON: {error}") from error
    if not isinstance(found, Mapping):
        raise DatasetError(f"message {number}: expected a JSON object of a call, got {shorten(repr(text))}")
    return found


def _tools(given: object) -> tuple[Mapping[str, object], ...]:
    found = json.loads(given) if isinstance(given, str) and given.strip() else given
    if not found:
        return ()
    if not isinstance(found, list | tuple) or not all(isinstance(tool, Mapping) for tool in found):
        raise DatasetError(f"'tools': expected a list of schemas in the form of OpenAI, got {shorten(repr(given))}")
    # datasets writes null for what other rows have.
    return tuple(json.loads(json.dumps(json_value(tool))) for tool in found)


def _opening_of(messages: Sequence[Message]) -> str:
    """Return the messages before the first one of the assistant, as one text."""
    roles = [message.role for message in messages]
    end = roles.index("assistant") if "assistant" in roles else len(roles)
    return json.dumps([[message.role, message.content] for message in messages[:end] if message.role != "system"])


def finished_encoder(
    tokenizer: PreTrainedTokenizerBase, *, stop_ids: Sequence[int], now: datetime | None
) -> TurnEncoder:
    """Return the encoder of rollouts, which begins a new row where the template rewrites earlier turns."""
    return TurnEncoder(tokenizer, stop_ids=stop_ids, now=now or datetime.now(), history="new_row")
