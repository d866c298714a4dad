"""`ConversationLog`: a conversation as its messages, replies, results and times, for people and for replays.

    ConversationRecord -> ConversationLog -> column `conversation`, on the first row of the conversation
                                               |- readable rollouts               RolloutWorker.log_rollouts
                                               `- conversations.jsonl of a step   RolloutWorker.keep_conversations

The file has a header with the schemas of the tools and the clock of the chat template, then a line per conversation.
Invariant: reading back gives the same log; nothing is pickled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError

from nemo_rl.config.env import Ending
from nemo_rl.data.conversation import Message
from nemo_rl.errors import CheckpointError, shorten
from nemo_rl.experience.conversation_attempt import ConversationRecord, TurnRecord
from nemo_rl.jagged import nest, offsets_of
from nemo_rl.utils.files import FileFormat, check_format, read_plain, write_text

__all__ = [
    "CONVERSATION",
    "ConversationFile",
    "ConversationLog",
    "log_column",
    "logs_of_column",
    "turn_lines",
]

CONVERSATION = "conversation"
"""Column: JSON of a `ConversationLog` in UTF-8, on the first row of its conversation; other rows have none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ConversationLog:
    """One conversation without its tokens."""

    prompt: int
    """Number of the prompt in the training set."""
    seed: int
    """Seed of its row; that of a turn follows from it."""
    opening: tuple[Message, ...] = ()
    """Messages of the prompt; only in the first conversation of a group."""
    turns: tuple[TurnRecord, ...]
    ending: Ending
    reward: float
    error: str = ""
    num_attempts: int = 1
    is_scored: bool = True
    is_refill: bool = False
    seconds: float = 0.0

    @classmethod
    def of(cls, record: ConversationRecord, *, prompt: int, opening: Sequence[Message]) -> ConversationLog:
        return cls(
            prompt=prompt,
            seed=record.seed,
            opening=tuple(opening),
            turns=tuple(map(_rounded, record.turns)),
            ending=record.ending,
            reward=record.reward or 0.0,
            error=record.error,
            num_attempts=record.num_attempts,
            is_scored=record.is_scored,
            is_refill=record.is_refill,
            seconds=record.seconds,
        )


def _rounded(turn: TurnRecord) -> TurnRecord:
    """Return the turn with times in microseconds: no clock is better, and digits take room."""
    waited_s, sampled_s, tool_s = (round(seconds, 6) for seconds in _times(turn).values())
    return replace(turn, waited_s=waited_s, sampled_s=sampled_s, tool_s=tool_s)


def _times(turn: TurnRecord) -> dict[str, float]:
    return {"waited_s": turn.waited_s, "sampled_s": turn.sampled_s, "tool_s": turn.tool_s}


_LOG = TypeAdapter(ConversationLog)


def log_column(logs: Sequence[ConversationLog | None]) -> torch.Tensor:
    """Return jagged `[N, (bytes)]` uint8, empty where a row has no log."""
    parts = [b"" if log is None else _LOG.dump_json(log, ensure_ascii=True, exclude_defaults=True) for log in logs]
    joined = torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8) if any(parts) else torch.empty(0)
    return nest(joined.to(torch.uint8), torch.tensor([len(part) for part in parts]))


def logs_of_column(column: torch.Tensor) -> list[ConversationLog | None]:
    """Return the logs of `log_column`."""
    return [None if not text else _LOG.validate_json(text) for text in _texts(column)]


def turn_lines(log: ConversationLog) -> dict[str, Any]:
    """Return what readable rollouts say of a conversation, as JSON."""
    return {
        "turns": [_turn_line(turn) for turn in log.turns],
        **({"cause": log.error} if log.error else {}),
        **({"attempts": log.num_attempts} if log.num_attempts > 1 else {}),
        **({"left_out": True} if not log.is_scored else {}),
        "seconds": round(log.seconds, 4),
    }


def _turn_line(turn: TurnRecord) -> dict[str, Any]:
    """Return a turn with rounded times, without what is empty."""
    found = {name: value for name, value in asdict(turn).items() if value not in ((), [], {}, None)}
    if not turn.is_side:
        del found["is_side"]
    return found | {name: round(seconds, 4) for name, seconds in _times(turn).items()}


def _texts(column: torch.Tensor) -> list[bytes]:
    offsets, values = offsets_of(column).tolist(), bytes(column.values().numpy())
    return [values[start:end] for start, end in pairwise(offsets)]


@dataclass(frozen=True, kw_only=True, slots=True)
class ConversationFile:
    """The conversations of a step on disk, and what their messages are rendered with."""

    format: int = FileFormat.CONVERSATIONS.version
    schemas: tuple[Mapping[str, Any], ...] = ()
    """Schemas of the tools, as the chat template takes them."""
    now: datetime
    """The clock of the chat template."""
    logs: Mapping[str, ConversationLog] = field(default_factory=dict)
    """Logs by the keys of their first rows."""

    def write(self, path: Path) -> int:
        """Write the file and return its bytes."""
        header = {"format": self.format, "schemas": list(self.schemas), "now": self.now.isoformat()}
        lines = [
            {"key": key, **_LOG.dump_python(log, mode="json", exclude_defaults=True)} for key, log in self.logs.items()
        ]
        write_text(path, "".join(json.dumps(line) + "\n" for line in (header, *lines)))
        return path.stat().st_size

    @classmethod
    def read(cls, path: Path) -> ConversationFile:
        """Read the file.

        Raises:
            CheckpointError: it is not as it was written. UnsupportedFormat: it is of another version.
        """
        try:
            header, *lines = map(json.loads, read_plain(path).decode("utf-8").splitlines())
            check_format(FileFormat.CONVERSATIONS, header["format"], where=path)
            keys = [line.pop("key") for line in lines]
            return cls(
                schemas=tuple(header["schemas"]),
                now=datetime.fromisoformat(header["now"]),
                logs={key: _LOG.validate_python(line) for key, line in zip(keys, lines, strict=True)},
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError, ValidationError) as error:
            raise CheckpointError(
                f"{path}: expected the conversations of a kept step, got {shorten(str(error))}"
            ) from error
