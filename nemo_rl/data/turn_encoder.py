"""The tokens between two turns of a conversation: what a user, a tool or an environment says, as the model reads it.

    row:  prompt | sampled turn | seam | reply + generation prompt | sampled turn | ...
          `prompt`                `- extend: one Continuation --'

Called by the loop of conversations. Invariant: a sampled token is never tokenized again. Only new messages are
rendered, behind an assistant turn that stands for the real one, and what follows that turn's end is appended.

How a turn has ended decides what is put behind it:

    last sampled token                                         inserted
    an end of turn that the template writes or names           what the template writes after an end (`\\n` in ChatML)
    another stop token (end of text), a stop string, a limit   the template's end of turn, then the same
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Literal

from transformers import PreTrainedTokenizerBase

from nemo_rl.data.chat_template import ChatTemplate, Form, Shape, placeholders, shape_of, template_text
from nemo_rl.data.conversation import Message, ToolCall
from nemo_rl.data.thinking import THINK_END, THINK_START
from nemo_rl.errors import ModelFolderError, boundary

__all__ = ["Continuation", "TurnEncoder"]

ANALYSIS = "<|channel|>analysis"
"""Begins thoughts in the channels of gpt-oss."""
ANY_TOOL = "tool"
"""Name of a called tool where neither calls nor results name one."""
MARK = "\n[... {} tokens left out ...]\n"
CHARACTERS_KEPT = 16
"""Characters for each token that may stay, at either end: of a longer text the rest is only counted."""
LEAST_KEPT = 4096
THOUGHTS = "THOUGHTS"
"""Suffix of the placeholder of a turn, for its thoughts."""
MOST_ENCODERS = 64
"""Most encoders with tools of programs that are kept."""
BLOCK = 8192
"""Characters that are counted at once: the time of a tokenizer may grow faster than a text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Continuation:
    """Tokens that follow a sampled turn.

    Example:
        After `4<|im_end|>` the reply "hi" gives `\\n<|im_start|>user\\nhi<|im_end|>\\n<|im_start|>assistant\\n`, of
        which the first token is the seam.
    """

    ids: tuple[int, ...]
    num_seam: int
    """Tokens at the start that end the turn before: an end token that was not sampled, and what the template puts
    behind it."""
    starts_row: bool = False
    """True: the template rewrites what the row holds; `ids` are the whole prompt of a new row."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Part:
    """New messages that are rendered together, behind a turn that calls some tools."""

    called: tuple[str, ...]
    new: tuple[Message, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Seam:
    """The place behind an assistant turn, in renders of some new messages."""

    dummy: tuple[Message, ...]
    form: Form
    """Its controls are those from the end token on."""
    marks: tuple[str, ...]
    """Texts of the dummy's assistant turn."""
    before_end: str
    """Text between the last of them and the end token."""
    end_id: int
    ends: frozenset[int]
    """End tokens that the template writes, with and without a message behind them."""
    num_seam: int
    begins_next: bool
    """True: turns have no end of their own, so that the end token is the one that begins the next message (GLM)."""

    def part(self, rendered: str) -> str:
        """Return what follows the turn, its end token first."""
        return rendered[_end_of_marks(rendered, self.marks) + len(self.before_end) :]


@dataclass(frozen=True, kw_only=True, slots=True)
class _TurnPlace:
    """The place of an assistant turn behind placeholders for the messages before it."""

    before: tuple[Message, ...]
    form: Form
    """Its controls are those of the turn."""
    opening: str
    """Text between the last message before and the turn: the generation prompt is its end."""

    def part(self, rendered: str) -> str:
        """Return the turn up to its end token."""
        behind = _end_of_marks(rendered, (self.before[-1].content,))
        return rendered[rendered.index(self.opening, behind) + len(self.opening) :].rstrip()


class TurnEncoder:
    """Makes the tokens of prompts and of replies; for one thread, with its own tokenizer, since those of
    transformers cannot be used by two at a time.

    Args:
        stop_ids: tokens that end a turn of the model.
        tools: schemas of the tools, in the form of OpenAI; the template prints them.
        now: the time that the template sees.
        history: `new_row` starts a new row where the template rewrites earlier turns; `append` keeps all tokens.

    Raises:
        ModelFolderError: the tokenizer has no chat template.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        stop_ids: Sequence[int],
        tools: Sequence[Mapping[str, object]] = (),
        now: datetime,
        history: Literal["append", "new_row"] = "append",
    ) -> None:
        if tokenizer.chat_template is None:
            raise ModelFolderError(
                f"tokenizer {tokenizer.name_or_path!r}: expected a chat template, which says how turns follow each "
                "other, got none; set policy.tokenizer.chat_template"
            )
        self.tokenizer, self._stop_ids = tokenizer, frozenset(stop_ids)
        self._history: Literal["append", "new_row"] = history
        self.template_text = template_text(tokenizer, has_tools=bool(tools))
        """The template; of several named ones that for these tools."""
        self._now, self.tools = now, tuple(tools)
        self._chat = ChatTemplate(tokenizer, now=now, tools=tools)
        self._others: dict[str, TurnEncoder] = {}
        self._seams: dict[tuple[Shape, Shape, bool], _Seam] = {}
        self._are_parted: dict[tuple[tuple[str, ...], Shape], bool] = {}
        self._rewrites: dict[tuple[object, ...], bool] = {}
        self._turn_places: dict[Shape, _TurnPlace] = {}

    @property
    def history(self) -> Literal["append", "new_row"]:
        return self._history

    @property
    def prints_tools(self) -> bool:
        """Return whether the template has a place for the schemas of tools."""
        return "tools" in self.template_text

    def with_tools(self, tools: Sequence[Mapping[str, object]]) -> TurnEncoder:
        """Return the encoder of conversations with these tools; the last ones are kept."""
        if list(tools) == list(self.tools):
            return self
        key = json.dumps(list(tools), sort_keys=True)
        if key not in self._others:
            if len(self._others) >= MOST_ENCODERS:
                self._others.clear()
            self._others[key] = TurnEncoder(
                self.tokenizer, stop_ids=tuple(self._stop_ids), tools=tools, now=self._now, history=self._history
            )
        return self._others[key]

    def prompt(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Return the tokens up to where the assistant begins.

        Raises:
            DatasetError: a text contains a control token and cannot be told from the template, or is lost in it.
            ModelFolderError: the template cannot render these messages.
        """
        with self._boundary("a prompt"):
            return self._chat.encode(messages)

    def written(self, *calls: ToolCall) -> tuple[int, ...]:
        """Return the tokens of a turn that makes these calls, as the template writes them, up to the end of the turn.

        Raises:
            ModelFolderError: the template has no form for it.
        """
        messages = [Message(role="user", content="2+2"), Message(role="assistant", content="", calls=calls)]
        with self._boundary("a call"):
            form, opening = self._chat.form(shape_of(messages), generation_prompt=False), messages[:1]
            whole = self._chat.render(messages, form, generation_prompt=False)
            for generation_prompt in (True, False):
                before = self._chat.render(opening, form, generation_prompt=generation_prompt)
                if whole.startswith(before):
                    whole = whole[len(before) :]
                    break
            return tuple(self._chat.tokens.rendered(whole.rstrip()))

    def turn(self, before: Sequence[Message], message: Message) -> tuple[int, ...]:
        """Return the tokens that a model samples to say `message` behind `before`: what the template writes after its
        generation prompt, up to and with the token that ends the turn.

        Raises:
            DatasetError: a text is lost in the template.
            ModelFolderError: the template cannot render the messages, begins the turn otherwise than a generation
                prompt does, or ends it with a token at which the model does not stop.
        """
        assert before and message.role == "assistant", "a turn of the assistant follows other messages"
        with self._boundary("a turn of the assistant"):
            place = self._turn_place(shape_of([*before, message]))
            ids = self._chat.encode_part(
                [*place.before, message],
                place.form,
                generation_prompt=False,
                part=place.part,
                after=len(place.before),
                keeps_turns=True,
            )
            if ids and ids[-1] in self._stop_ids:
                return ids
            names = tuple(call.name for call in message.calls)[:1]
            following = Message(role="tool" if names else "user", content="")
            seam = self._seam([*before, message], _Part(called=names, new=(following,)), generation_prompt=True)
            if seam.begins_next:
                return (*ids, seam.end_id)
            raise ModelFolderError(
                f"tokenizer {self.tokenizer.name_or_path!r}: the chat template ends a turn of the assistant with "
                f"{self.tokenizer.decode(list(ids[-1:]))!r}, at which the model does not stop; expected one of "
                f"{self.tokenizer.decode(sorted(self._stop_ids))!r}; set policy.generation.stop_token_ids"
            )

    def _turn_place(self, shape: Shape) -> _TurnPlace:
        if shape not in self._turn_places:
            form, messages = self._chat.form(shape, generation_prompt=False), placeholders(shape)
            before = tuple(messages[:-1])
            prompt = self._chat.render(before, form, generation_prompt=True)
            opening = prompt[_end_of_marks(prompt, (before[-1].content,)) :]
            whole = self._chat.render(messages, form, generation_prompt=False)
            behind = whole[_end_of_marks(whole, (before[-1].content,)) :]
            if not behind.startswith(opening):
                raise ModelFolderError(
                    f"tokenizer {self.tokenizer.name_or_path!r}: the chat template writes {behind[:60]!r} before the "
                    f"text of an assistant, and {opening!r} where a model is to go on, so that what it would sample is "
                    "not known; set policy.tokenizer.chat_template"
                )
            place = _TurnPlace(before=before, form=form, opening=opening)
            tokens = self._chat.tokens
            controls = tokens.controls_in(tokens.rendered(place.part(whole)))
            self._turn_places[shape] = replace(place, form=replace(form, controls=controls))
        return self._turn_places[shape]

    def extend(
        self, conversation: Sequence[Message], new: Sequence[Message], *, sampled: Sequence[int], is_cut: bool
    ) -> Continuation:
        """Return the tokens between the last turn and the next one.

        Args:
            conversation: all messages up to the last assistant's.
            new: messages of users or tools that follow it.
            sampled: tokens of the last turn.
            is_cut: a limit of tokens ended it.

        Raises:
            DatasetError: a new text contains a control token and cannot be told from the template, or is lost in it.
            ModelFolderError: the template cannot render these messages.
        """
        assert conversation and conversation[-1].role == "assistant", "a turn of the assistant comes before a reply"
        assert new and all(message.role in ("user", "tool") for message in new), "a reply is of users and tools"
        with self._boundary("a reply"):
            if self._history == "new_row" and self.rewrites(conversation, new, sampled=sampled):
                return Continuation(ids=self._chat.encode([*conversation, *new]), num_seam=0, starts_row=True)
            is_ended = self.is_ended(conversation, new, sampled=sampled, is_cut=is_cut)
            return self._append(conversation, new, is_ended=is_ended)

    def _append(self, conversation: Sequence[Message], new: Sequence[Message], *, is_ended: bool) -> Continuation:
        parts = self._parts(conversation, new)
        rest: list[int] = []
        for number, part in enumerate(parts):
            rest += self._after_end(conversation, part, number=number, generation_prompt=number == len(parts) - 1)
        seam = self._seam(conversation, parts[0], generation_prompt=len(parts) == 1)
        if is_ended:
            return Continuation(ids=tuple(rest), num_seam=seam.num_seam)
        return Continuation(ids=(seam.end_id, *rest), num_seam=seam.num_seam + 1)

    def _parts(self, conversation: Sequence[Message], new: Sequence[Message]) -> list[_Part]:
        """Return the new messages as one part, or each result as that of one call where the template has no form for
        several calls of a turn."""
        called = _called(conversation[-1], new)
        whole = _Part(called=called, new=tuple(new))
        if len(called) < 2:
            return [whole]
        key = (called, shape_of(new))
        if key not in self._are_parted:
            try:
                self._seam(conversation, whole, generation_prompt=True)
            except ModelFolderError:
                self._are_parted[key] = True
            else:
                self._are_parted[key] = False
        if not self._are_parted[key]:
            return [whole]
        singles = [_Part(called=(name,), new=(new[number],)) for number, name in enumerate(called)]
        last = len(called) - 1
        return [*singles[:last], _Part(called=called[last:], new=tuple(new[last:]))]

    def _after_end(
        self, conversation: Sequence[Message], part: _Part, *, number: int, generation_prompt: bool
    ) -> tuple[int, ...]:
        seam = self._seam(conversation, part, generation_prompt=generation_prompt)
        num_before = sum(len(message.calls) for message in conversation[:-1])
        given = [call.id for call in conversation[-1].calls][number:]
        called = seam.dummy[-1].calls
        calls = tuple(replace(call, id=own) for call, own in zip(called, given, strict=False))
        last = replace(seam.dummy[-1], calls=(*calls, *called[len(calls) :]))
        ids = self._chat.encode_part(
            [*seam.dummy[:-1], last, *part.new],
            replace(seam.form, first_call=num_before + number),
            generation_prompt=generation_prompt,
            part=seam.part,
            after=len(seam.dummy),
        )
        return ids[ids.index(seam.end_id) + (0 if seam.begins_next and number else 1) :]

    def is_ended(
        self, conversation: Sequence[Message], new: Sequence[Message], *, sampled: Sequence[int], is_cut: bool
    ) -> bool:
        """Return whether the last sampled token ends a turn as the template means it: it writes the token there, or
        names it and the model has stopped at it."""
        if not sampled:
            return False
        last, parts = sampled[-1], self._parts(conversation, new)
        seam = self._seam(conversation, parts[0], generation_prompt=len(parts) == 1)
        if seam.begins_next:
            return last == seam.end_id
        is_named = last in self._stop_ids and self.tokenizer.decode([last]) in self.template_text
        if is_named and not is_cut:
            return True
        return last in seam.ends

    def end_token(self, conversation: Sequence[Message], new: Sequence[Message]) -> int:
        """Return the token with which the template ends the last turn once the new messages follow."""
        parts = self._parts(conversation, new)
        return self._seam(conversation, parts[0], generation_prompt=len(parts) == 1).end_id

    # ---- seams

    def _seam(self, conversation: Sequence[Message], part: _Part, *, generation_prompt: bool) -> _Seam:
        has_system = conversation[0].role == "system"
        before: Shape = (*((("system", ()),) if has_system else ()), ("user", ()), ("assistant", part.called))
        key = (before, shape_of(part.new), generation_prompt)
        if key not in self._seams:
            self._seams[key] = self._make_seam(*key)
        return self._seams[key]

    def _make_seam(self, before: Shape, new: Shape, generation_prompt: bool) -> _Seam:
        form = self._chat.form((*before, *new), generation_prompt=generation_prompt)
        messages = placeholders((*before, *new))
        dummy = messages[: len(before)]
        last = dummy[-1]
        marks = (last.content, *(str(call.arguments["value"]) for call in last.calls))
        alone = self._chat.render(dummy, form, generation_prompt=False)
        whole = self._chat.render(messages, form, generation_prompt=generation_prompt)
        after_alone, after_whole = alone[_end_of_marks(alone, marks) :], whole[_end_of_marks(whole, marks) :]
        tokens = self._chat.tokens
        controls = tokens.controls_in(tokens.rendered(after_alone))
        end_alone = self.tokenizer.decode([controls[-1]]).strip() if controls else ""
        place = after_alone.rfind(end_alone)
        before_end, rest_alone = after_alone[:place], after_alone[place + len(end_alone) :]
        begins_next = self._begins_next(after_alone, after_whole, controls)
        if begins_next:
            before_end, rest_alone = after_alone, ""
        ids = tokens.rendered(after_whole[len(before_end) :])
        if not (controls or begins_next) or not after_whole.startswith(before_end) or ids[0] not in tokens.control_ids:
            raise ModelFolderError(
                f"tokenizer {self.tokenizer.name_or_path!r}: the chat template ends no assistant turn with a control "
                f"token, so that a reply cannot be appended: it writes {after_whole[:40]!r} behind the text of one, "
                f"and {after_alone[:40]!r} at the end; set policy.tokenizer.chat_template"
            )
        end = self.tokenizer.decode([ids[0]])
        own = tokens.rendered(end + rest_alone)[1:]
        num_seam = next((n for n, (a, b) in enumerate(zip(own, ids[1:], strict=False)) if a != b), len(own))
        return _Seam(
            dummy=tuple(dummy),
            form=replace(form, controls=tokens.controls_in(ids)),
            marks=marks,
            before_end=before_end,
            end_id=ids[0],
            ends=frozenset({ids[0]} if begins_next else {ids[0], controls[-1]}),
            num_seam=num_seam,
            begins_next=begins_next,
        )

    def _begins_next(self, after_alone: str, after_whole: str, controls: Sequence[int]) -> bool:
        """Return whether the model ends a turn with the token that begins the next message: the template writes that
        right behind the turn, and no stop token before it."""
        if not after_whole.startswith(after_alone) or (controls and controls[-1] in self._stop_ids):
            return False
        following = self._chat.tokens.rendered(after_whole[len(after_alone) :])
        return bool(following) and following[0] in self._stop_ids

    # ---- history

    def rewrites(self, conversation: Sequence[Message], new: Sequence[Message], *, sampled: Sequence[int]) -> bool:
        """Return whether the template writes earlier turns otherwise once the new messages follow, such as without
        their thoughts. How it writes calls, and white space, is no such change: those were sampled."""
        decoded = self.tokenizer.decode(list(sampled))
        last = len(conversation) - 1
        kinds = tuple(_kind(m, decoded if i == last else "") for i, m in enumerate(conversation))
        key = (kinds, shape_of(conversation), shape_of(new))
        if key not in self._rewrites:
            try:
                self._rewrites[key] = self.lost_texts(conversation, new, kinds) is not None
            except ModelFolderError:
                # It has no form for the whole conversation, such as for parallel calls; their results are appended.
                self._rewrites[key] = False
        return self._rewrites[key]

    def lost_texts(
        self, conversation: Sequence[Message], new: Sequence[Message], kinds: Sequence[str] | None = None
    ) -> tuple[str, str] | None:
        """Return what the row holds and what a fresh render has in its place, from where they differ; None where it
        has all of it. Texts are replaced by placeholders."""
        kinds = [_kind(message, "") for message in conversation] if kinds is None else kinds
        shape = shape_of([*conversation, *new])
        form, marked = self._chat.form(shape), placeholders(shape)
        messages = [_with_thoughts(m, kind) for m, kind in zip(marked, kinds, strict=False)]
        messages += marked[len(conversation) :]
        thoughts = {n: marked[n].content + THOUGHTS for n, kind in enumerate(kinds) if kind == _CHANNELS}
        last = len(conversation) - 1
        opening = self._chat.render(messages[:last], form, thoughts=thoughts)
        fresh = self._chat.render(messages, form, thoughts=thoughts)
        if not fresh.startswith(opening):
            same = next((n for n, (a, b) in enumerate(zip(opening, fresh, strict=False)) if a != b), len(fresh))
            return opening[same:], fresh[same:]
        following = fresh[len(opening) :]
        of_turn = _wanted(marked[last].content, kinds[last], has_calls=bool(marked[last].calls))
        # The text alone is a part of its thoughts.
        wanted = [part for part in of_turn if part not in following.replace(of_turn[0], "", int(part != of_turn[0]))]
        if not wanted and kinds[last] == _PLAIN and not marked[last].calls:
            # Text that the template puts in front of a turn was not there when it was sampled; a channel's name was.
            before = following.partition(of_turn[0])[0].strip()
            wanted = of_turn if before and not before.startswith("<|") else []
        return (wanted[0], following) if wanted else None

    # ---- cuts and checks

    def cut_text(self, text: str, max_tokens: int) -> tuple[str, bool]:
        """Return the text with at most so many tokens, and whether its middle was left out, as the text then says.

        What is no Unicode text is replaced by question marks. Where the limit is below the tokens of the mark, the mark
        alone is left.
        """
        text = text.encode("utf-8", "replace").decode("utf-8")
        window = max(LEAST_KEPT, max_tokens * CHARACTERS_KEPT)
        middle = text[window:-window] if len(text) > 2 * window else ""
        first, second = (text[:window], text[-window:]) if middle else (text, "")
        num_middle = sum(len(self._count(middle[at : at + BLOCK])) for at in range(0, len(middle), BLOCK))
        heads, tails = self._count(first), self._count(second) if middle else []
        total = len(heads) + num_middle + len(tails)
        if total <= max_tokens:
            return text, False
        tails = tails or heads
        second = second or first
        keep = max_tokens - len(self._count(MARK.format(total)))
        while keep > 0:
            head, tail = min((keep + 1) // 2, len(heads)), min(keep // 2, len(tails))
            end = heads[head - 1][1]
            start = tails[len(tails) - tail][0] if tail else len(second)
            cut = first[:end] + MARK.format(total - head - tail) + second[start:]
            excess = len(self._count(cut)) - max_tokens
            if excess <= 0:
                return cut, True
            keep -= excess
        return MARK.format(total).strip(), True

    def _count(self, text: str) -> list[tuple[int, int]]:
        """Return where each token of a foreign text begins and ends."""
        if self.tokenizer.is_fast:
            given = self.tokenizer(
                text, add_special_tokens=False, split_special_tokens=True, return_offsets_mapping=True, verbose=False
            )
            return list(given["offset_mapping"])
        ids = self._chat.tokens.foreign(text, is_first=False)
        ends = [round(len(text) * (number + 1) / len(ids)) for number in range(len(ids))]
        return list(zip([0, *ends[:-1]], ends, strict=True))

    def mismatch(self, messages: Sequence[Message], inserted: Sequence[Sequence[int]]) -> str | None:
        """Return where the control tokens of a row's inserted tokens are other than those of a fresh render of the same
        messages, or None, also where the template has no form for them. It renders the conversation once for each turn:
        for tests and checks.

        Args:
            messages: of the row, the last one of the assistant.
            inserted: the row's tokens before each of its turns, the prompt first.
        """
        turns = [number for number, message in enumerate(messages) if message.role == "assistant"][-len(inserted) :]
        for number, (turn, ids) in enumerate(zip(turns, inserted, strict=True)):
            try:
                fresh = self._boundaries(self._chat.encode(messages[:turn]))
            except ModelFolderError:
                return None
            mine = self._boundaries(ids)
            if mine != (fresh if number == 0 else fresh[len(fresh) - len(mine) :]):
                decoded = [self.tokenizer.decode(list(part)) for part in (fresh, mine)]
                return (
                    f"before turn {number}: expected the control tokens {decoded[0]!r} at its end, got {decoded[1]!r}"
                )
        return None

    def _boundaries(self, ids: Sequence[int]) -> list[int]:
        ends = frozenset().union(*(seam.ends for seam in self._seams.values()))
        first = min(ends, default=-1)
        return [first if token in ends else token for token in self._chat.tokens.controls_in(ids)]

    def _boundary(self, what: str) -> AbstractContextManager[None]:
        return boundary(ModelFolderError, f"tokenizer {self.tokenizer.name_or_path!r}: {what} has no tokens")


def _called(last: Message, new: Sequence[Message]) -> tuple[str, ...]:
    """Return the tools that the dummy turn calls: as many as there are results at once, with the names of the calls."""
    results = [message for message in new if message.role == "tool"] if new[0].role == "tool" else []
    names = [call.name for call in last.calls]
    fallback = names[0] if names else ANY_TOOL
    return tuple(
        message.name or (names[number] if number < len(names) else fallback) for number, message in enumerate(results)
    )


def _end_of_marks(rendered: str, marks: Sequence[str]) -> int:
    """Return the place behind the last of the marks; raise ModelFolderError where none is there."""
    ends = [rendered.rfind(mark) + len(mark) for mark in marks if mark in rendered]
    if not ends:
        raise ModelFolderError("the chat template leaves out an assistant turn; set policy.tokenizer.chat_template")
    return max(ends)


_PLAIN, _THINKS, _ENDS_THOUGHTS, _CHANNELS, _SILENT = "plain", "thinks", "ends thoughts", "channels", "silent"


def _kind(message: Message, decoded: str) -> str:
    """Return how a turn shows its thoughts: `decoded` are its sampled tokens where they are at hand."""
    if message.role != "assistant":
        return _PLAIN
    if ANALYSIS in decoded:
        return _CHANNELS
    text = message.content
    if THINK_END in text or THINK_END in decoded:
        return _THINKS if THINK_START in text or THINK_START in decoded else _ENDS_THOUGHTS
    return _PLAIN if text.strip() else _SILENT


def _with_thoughts(message: Message, kind: str) -> Message:
    text = message.content
    if kind == _SILENT:
        return replace(message, content="")
    if kind in (_THINKS, _ENDS_THOUGHTS):
        start = f"{THINK_START}\n" if kind == _THINKS else ""
        return replace(message, content=f"{start}{text}{THOUGHTS}\n{THINK_END}\n\n{text}")
    return message


def _wanted(text: str, kind: str, *, has_calls: bool) -> list[str]:
    """Return the texts that a fresh render must have of a turn whose placeholder is `text`."""
    if kind in (_THINKS, _ENDS_THOUGHTS):
        return [text + THOUGHTS, text]
    if kind == _CHANNELS:
        return [text + THOUGHTS] if has_calls else [text + THOUGHTS, text]
    return [] if kind == _SILENT else [text]
