"""`RolloutRow`: one row of readable rollouts, as `rollouts/step_N.jsonl` has it, and the pieces of its text.

A line without tokens is a row all the same: files of earlier versions have texts, reward and advantage alone. A
`TokenPiece` is the smallest part of a row's text that can have a colour: a token, or the tokens that make up one
character, which are as far apart as the worst of them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any

from nemo_rl.data_plane.keys import group_uid
from nemo_rl.errors import UserError, boundary
from nemo_rl.utils.console import printable
from nemo_rl.utils.files import read_plain
from nemo_rl.utils.rollout_file import PROMPT_SOURCE
from nemo_rl_tools.rollouts.turns import RowTime, RowTurn, SaidText

__all__ = [
    "BOUNDS",
    "Grade",
    "RolloutRow",
    "RowTokens",
    "TokenPiece",
    "difference_text",
    "grade_of",
    "legend",
    "pieces_of",
    "read_rows",
    "shared_reason",
    "signed",
]

EARLIER = "a file of an earlier version"
"""The reason for a row without tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowTokens:
    """The columns of one row, all of the same length."""

    ids: Sequence[int]
    texts: Sequence[str]
    """Empty for a token that ends inside a character: the last token of the character has it."""
    mask: Sequence[bool]
    generation_logprobs: Sequence[float | None]
    """Log-probabilities of the rollout; None outside the mask."""
    prev_logprobs: Sequence[float | None] | None
    """Log-probabilities of the trainer before its update; None where it made none."""

    def __post_init__(self) -> None:
        columns = (self.texts, self.mask, self.generation_logprobs, self.prev_logprobs)
        lengths = [len(self.ids), *(len(column) for column in columns if column is not None)]
        if len(set(lengths)) > 1:
            raise ValueError(f"expected token columns of one length, got {lengths}")

    @property
    def num_prompt(self) -> int:
        """Tokens in front of the first that is trained; all where none is."""
        return next((at for at, kept in enumerate(self.mask) if kept), len(self.mask))

    def difference(self, at: int) -> float | None:
        """Return log-probability of the rollout less that of the trainer; None where one of them is missing."""
        ours = self.generation_logprobs[at]
        theirs = None if self.prev_logprobs is None else self.prev_logprobs[at]
        return None if ours is None or theirs is None else ours - theirs

    def differences(self) -> list[float]:
        found = (self.difference(at) for at in range(len(self.ids)))
        return [value for value in found if value is not None]


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutRow:
    """One sample."""

    key: str
    group: str
    source: str = ""
    """Name of the source of its prompt; empty where there is one alone."""
    prompt: str
    response: str
    messages: tuple[SaidText, ...] = ()
    """Messages of the prompt; none where the file does not say."""
    answer: str | None = None
    """The gold answer; None without one, or where the file does not say."""
    reward: float
    components: Mapping[str, float | None] = field(default_factory=dict)
    """Parts of the reward; None for one that was not scored."""
    extras: Mapping[str, str] = field(default_factory=dict)
    """Extra columns of the run, as JSON."""
    advantage: float | None = None
    finish_reason: str
    """`stop` or `length`, of a conversation its ending; `?` where the file does not say."""
    response_tokens: int | None = None
    sample_mask: float | None = None
    """Weight of the row in the loss; None where the file does not say."""
    no_weight: str | None = None
    """The reason for a weight of 0; None where it is not 0, or the file does not say."""
    weight_version: int | None = None
    tokens: RowTokens | None = None
    no_prev_logprobs: str | None = None
    """The reason for missing log-probabilities of the trainer; None where there are some."""
    turns: tuple[RowTurn, ...] = ()
    """Turns of the conversation that begins in this row; none of single turns."""
    cause: str = ""
    """The failure that ended the conversation."""
    num_attempts: int = 1
    seconds: float | None = None
    """Seconds of the whole conversation."""

    @property
    def is_right(self) -> bool:
        """True where the component `correct`, or the reward where there is none, is above 0."""
        correct = self.components.get("correct")
        return (self.reward if correct is None else correct) > 0

    @property
    def time(self) -> RowTime:
        """Return where the time of the conversation has gone; what no turn accounts for is waiting."""
        of_turns = [turn.time for turn in self.turns]
        engine, tool = sum(time.engine for time in of_turns), sum(time.tool for time in of_turns)
        rest = (self.seconds or 0.0) - engine - tool
        return RowTime(engine=engine, tool=tool, waiting=max(sum(time.waiting for time in of_turns), rest))

    def of_conversation(self) -> list[str]:
        """Return what is known of the conversation as a whole, for people; nothing of single turns."""
        if not self.turns and not self.cause:
            return []
        return [
            f"{len(self.turns)} turns",
            *([f"{self.num_attempts} attempts"] if self.num_attempts > 1 else []),
            *([f"cause: {self.cause}"] if self.cause else []),
            *([self.time.text()] if self.turns else []),
        ]

    @property
    def left_out(self) -> str:
        """The remark that the row is not trained, and why; empty where it is."""
        return f"not trained ({self.no_weight or 'sample mask 0'})" if self.sample_mask == 0 else ""

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> RolloutRow:
        """Parse a line of the file.

        Raises:
            KeyError, TypeError, ValueError: it is none.
        """
        key, has_tokens = str(record["key"]), "token_ids" in record
        is_truncated = record.get("truncated")
        by_truncation = "?" if is_truncated is None else "length" if is_truncated else "stop"
        components = dict(record.get("components") or {})
        return cls(
            key=key,
            group=str(record.get("group", group_uid(key))),
            source=str(record.get(PROMPT_SOURCE, "")),
            prompt=str(record["prompt"]),
            response=str(record["response"]),
            messages=tuple(SaidText(who=str(m["role"]), text=str(m["content"])) for m in record.get("messages") or ()),
            answer=None if record.get("answer") is None else str(record["answer"]),
            reward=float(record["reward"]),
            components={str(name): _number(part) for name, part in components.items()},
            extras={str(name): json.dumps(value) for name, value in dict(record.get("extras") or {}).items()},
            advantage=_number(record.get("advantage")),
            finish_reason=str(record.get("finish_reason", by_truncation)),
            response_tokens=None if record.get("response_tokens") is None else int(record["response_tokens"]),
            sample_mask=_number(record.get("sample_mask")),
            no_weight=None if record.get("no_weight") is None else str(record["no_weight"]),
            weight_version=None if record.get("weight_version") is None else int(record["weight_version"]),
            tokens=_tokens(record) if has_tokens else None,
            no_prev_logprobs=_why_none(record) if has_tokens else EARLIER,
            turns=tuple(RowTurn.from_record(number, turn) for number, turn in enumerate(record.get("turns") or ())),
            cause=str(record.get("cause", "")),
            num_attempts=int(record.get("attempts", 1)),
            seconds=_number(record.get("seconds")),
        )


def read_rows(path: Path) -> list[RolloutRow]:
    """Return all rows of a file, in its order.

    Raises:
        UserError: it cannot be read, or a line is no row.
    """
    with boundary(UserError, f"{path}: expected readable rollouts"):
        lines = read_plain(path).decode("utf-8").split("\n")
    rows = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            with boundary(UserError, f"{path}: line {number}: expected a row of readable rollouts"):
                rows.append(RolloutRow.from_record(json.loads(line)))
    if not rows:
        raise UserError(f"{path}: expected readable rollouts, got an empty file")
    return rows


def _why_none(record: Mapping[str, Any]) -> str | None:
    if record["prev_logprobs"] is not None:
        return None
    return str(record.get("no_prev_logprobs") or "the file does not say why")


def _tokens(record: Mapping[str, Any]) -> RowTokens:
    prev = record["prev_logprobs"]
    return RowTokens(
        ids=[int(token) for token in record["token_ids"]],
        texts=[str(text) for text in record["token_texts"]],
        mask=[bool(kept) for kept in record["token_mask"]],
        generation_logprobs=[_number(value) for value in record["generation_logprobs"]],
        prev_logprobs=None if prev is None else [_number(value) for value in prev],
    )


def _number(value: Any) -> float | None:
    """Parse a number, or `NaN` and `-inf`, which are written as texts."""
    return None if value is None else float(value)


BOUNDS = (0.05, 0.5)
"""Bounds of the grades: probabilities 5 % apart, which low precision explains, and 65 %, which it does not."""
WHY_SHOWN = 200
"""Characters of a reason that the file gives."""


class Grade(IntEnum):
    """The distance of rollout and trainer on a token."""

    CLOSE = 0
    APART = 1
    FAR = 2

    @property
    def mark(self) -> str:
        """Says the grade without colour."""
        return " ~^"[self]


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenPiece:
    """Text of one token, or of the tokens of one character."""

    text: str
    is_masked: bool
    """True for a token that is not trained: an environment said so, or it lies behind the end."""
    grade: Grade | None
    """The grade, or None without both log-probabilities."""
    tokens: tuple[int, ...]
    """Places in the row."""


def grade_of(difference: float | None) -> Grade | None:
    """Return the grade of a difference; one that is not finite is far."""
    if difference is None:
        return None
    if not math.isfinite(difference):
        return Grade.FAR
    return Grade(sum(abs(difference) > bound for bound in BOUNDS))


def pieces_of(tokens: RowTokens) -> Iterator[TokenPiece]:
    """Yield the response of a row: from the first token that is trained to its end."""
    waiting: list[int] = []
    last = len(tokens.ids) - 1
    for at in range(tokens.num_prompt, len(tokens.ids)):
        waiting.append(at)
        if tokens.texts[at] == "" and at < last:
            continue
        grades = [grade for place in waiting if (grade := grade_of(tokens.difference(place))) is not None]
        yield TokenPiece(
            text=tokens.texts[at],
            is_masked=not any(tokens.mask[place] for place in waiting),
            grade=max(grades, default=None),
            tokens=tuple(waiting),
        )
        waiting = []


def difference_text(rows: Iterable[RolloutRow]) -> str:
    """Return how far apart the tokens of the rows are, or why it is not known."""
    of_rows = list(rows)
    found = [abs(value) for row in of_rows if row.tokens is not None for value in row.tokens.differences()]
    if not found:
        reasons = dict.fromkeys(row.no_prev_logprobs for row in of_rows if row.no_prev_logprobs)
        why = printable("; ".join(reasons), limit=WHY_SHOWN) or "no token is trained"
        return f"no log-probabilities of the trainer: {why}"
    num_far = sum(grade_of(value) is Grade.FAR for value in found)
    far = f", {num_far} of {len(found)} tokens far" if num_far else f" over {len(found)} tokens"
    return f"|rollout - trainer| mean {sum(found) / len(found):.2g}, max {max(found):.2g}{far}"


def shared_reason(rows: Iterable[RolloutRow]) -> str | None:
    texts = {difference_text([row]) for row in rows if row.tokens is None or not row.tokens.differences()}
    has_difference = any(row.tokens is not None and row.tokens.differences() for row in rows)
    return texts.pop() if len(texts) == 1 and not has_difference else None


def legend() -> str:
    low, high = BOUNDS
    return (
        f"marks: log-probabilities apart by more than {low} ({Grade.APART.mark}), {high} ({Grade.FAR.mark}); "
        "not trained (-)"
    )


def signed(value: float | None) -> str:
    return "none" if value is None else f"{value:+.4g}"
