"""The record of one row of a conversation, as its tokens: what was sampled, and what was put between.

    prompt | turn 0 | seam, reply | turn 1 | ...      ids
           | mask   |             | mask   |          mask, logprobs

Called by the loop of conversations; columns and logs are built from it. Invariant: a sampled token stands where it was
sampled, behind exactly the tokens that the engine has seen, with its own log-probability.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch

from nemo_rl.errors import WorkerError
from nemo_rl.routes.shape import RecordedRoutes

__all__ = ["Inserted", "TokenRow", "routes_of_rows"]


class Inserted(StrEnum):
    """The kind of tokens that were not sampled."""

    PROMPT = "prompt"
    SEAM = "seam"
    """They end the turn before: an end token that was not sampled, and what the template puts behind it."""
    REPLY = "reply"
    """Text of a user, a tool or the environment, with the template around it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InsertedTokens:
    """A span of tokens that were not sampled."""

    start: int
    """Position in the row."""
    length: int
    kind: Inserted


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnTokens:
    """The span of one sampled turn."""

    start: int
    """Position in the row."""
    length: int
    number: int
    """Number of the turn in the conversation, of which other turns may be in other rows."""
    version_spans: tuple[tuple[int, int], ...]
    """Spans (first token of the turn, version of the weights); the first begins at 0."""
    cached_tokens: int | None = None
    """Tokens before it that a prefix cache had; None: there is no such cache."""
    truncated: bool = False
    """A limit of tokens ended it."""
    routes: RecordedRoutes | None = None
    """Routes of experts of the tokens before it and of its own."""


class TokenRow:
    """One row of a conversation; grows by turns and by what is put between them.

    Args:
        prompt_ids: tokens before the first turn; at least one.

    Example:
        >>> row = TokenRow((1, 2))
        >>> row.add_turn((7, 8), torch.tensor([-0.5, -0.25]), version_spans=((0, 3),))
        >>> row.insert((4, 5, 6), num_seam=1)
        >>> row.add_turn((9,), torch.tensor([-1.0]), version_spans=((0, 3),), reward=1.0)
        >>> row.ids, [turn.start for turn in row.turns], row.num_sampled, row.version_spans
        ((1, 2, 7, 8, 4, 5, 6, 9), [2, 7], 3, ((0, 3),))
    """

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        self._ids: list[int] = []
        self._turns: list[TurnTokens] = []
        self._logprobs: list[torch.Tensor] = []
        self._support: list[torch.Tensor | None] = []
        self._rewards: list[float] = []
        self._inserted: list[InsertedTokens] = []
        self._insert(prompt_ids, Inserted.PROMPT)
        if not prompt_ids:
            raise WorkerError("expected a prompt of at least one token in a row, got none", stage="rollout")

    # ---- what is in it

    @property
    def ids(self) -> tuple[int, ...]:
        """All tokens; the prompt of the next turn."""
        return tuple(self._ids)

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def turns(self) -> tuple[TurnTokens, ...]:
        """Spans of the sampled turns, in order."""
        return tuple(self._turns)

    @property
    def inserted(self) -> tuple[InsertedTokens, ...]:
        """Spans of the other tokens, in order."""
        return tuple(self._inserted)

    @property
    def rewards(self) -> tuple[float, ...]:
        return tuple(self._rewards)

    @property
    def num_sampled(self) -> int:
        return sum(turn.length for turn in self._turns)

    @property
    def sampled_tokens(self) -> tuple[int, ...]:
        return tuple(token for number in range(len(self._turns)) for token in self.turn_ids(number))

    @property
    def context_tokens(self) -> tuple[int, ...]:
        return tuple(token for span in self._inserted for token in self._ids[span.start : span.start + span.length])

    @property
    def ids_behind_prompt(self) -> tuple[int, ...]:
        """Tokens from the first turn on."""
        return tuple(self._ids[self._inserted[0].length :])

    @property
    def mask(self) -> torch.Tensor:
        """`[T]` bool, sampled tokens."""
        found = torch.zeros(len(self._ids), dtype=torch.bool)
        for turn in self._turns:
            found[turn.start : turn.start + turn.length] = True
        return found

    @property
    def sampled_logprobs(self) -> torch.Tensor:
        """`[num_sampled]` float32."""
        return torch.cat(self._logprobs) if self._logprobs else torch.empty(0)

    @property
    def logprobs(self) -> torch.Tensor:
        """`[T]` float32, 0 on tokens that were not sampled."""
        found = torch.zeros(len(self._ids))
        found[self.mask] = self.sampled_logprobs
        return found

    @property
    def support(self) -> torch.Tensor | None:
        """Sampling masks of all sampled tokens end to end, uint8; None where the engine has recorded none.

        Raises:
            WorkerError: some turns have them and some have not.
        """
        given = [part for part in self._support if part is not None]
        if len(given) not in (0, len(self._turns)):
            raise WorkerError(
                f"expected sampling masks of all {len(self._turns)} turns of a row or of none, got {len(given)}; "
                "engines must record alike",
                stage="rollout",
            )
        return torch.cat(given) if given else None

    @property
    def version_spans(self) -> tuple[tuple[int, int], ...]:
        """Spans (first of the sampled tokens, counted over all turns; version of the weights)."""
        found: list[tuple[int, int]] = []
        before = 0
        for turn in self._turns:
            for first, version in turn.version_spans:
                if not found or found[-1][1] != version:
                    found.append((before + first, version))
            before += turn.length
        return tuple(found)

    def turn_ids(self, number: int) -> tuple[int, ...]:
        turn = self._turns[number]
        return tuple(self._ids[turn.start : turn.start + turn.length])

    def before_turns(self) -> Iterator[tuple[int, ...]]:
        """Yield the tokens that were inserted before each turn, the prompt first."""
        place = 0
        for turn in self._turns:
            yield tuple(self._ids[place : turn.start])
            place = turn.start + turn.length

    # ---- growing

    def add_turn(
        self,
        token_ids: Sequence[int],
        logprobs: torch.Tensor,
        *,
        version_spans: Sequence[tuple[int, int]],
        number: int | None = None,
        cached_tokens: int | None = None,
        truncated: bool = False,
        support: torch.Tensor | None = None,
        routes: RecordedRoutes | None = None,
        reward: float = 0.0,
    ) -> None:
        """Append a sampled turn.

        Args:
            logprobs: `[len(token_ids)]`.
            version_spans: spans (first token of the turn, version).
            number: of the turn in the conversation; None counts those of the row.
            support: sampling masks, as in `GenerationOutput.support`.
            routes: routes of experts, of one row.
            reward: known at once only by a caller that has scored it; see `set_reward`.

        Raises:
            WorkerError: there is no token, another number of log-probabilities, spans out of order, or no token was
                inserted since the turn before.
        """
        firsts = [first for first, _ in version_spans]
        problem = None
        if not token_ids:
            problem = "at least one token, got none"
        elif logprobs.shape != (len(token_ids),):
            problem = f"{len(token_ids)} log-probabilities, got a tensor {list(logprobs.shape)}"
        elif firsts[:1] != [0] or firsts != sorted(set(firsts)) or firsts[-1] >= len(token_ids):
            problem = f"version spans from token 0 on, in order and within {len(token_ids)} tokens, got {version_spans}"
        elif self._turns and self._turns[-1].start + self._turns[-1].length == len(self._ids):
            problem = "a reply since the turn before, got none"
        if problem is not None:
            raise WorkerError(f"turn {len(self._turns)} of a row: expected {problem}", stage="rollout")
        self._turns.append(
            TurnTokens(
                start=len(self._ids),
                length=len(token_ids),
                number=len(self._turns) if number is None else number,
                version_spans=tuple(version_spans),
                cached_tokens=cached_tokens,
                truncated=truncated,
                routes=routes,
            )
        )
        self._ids += token_ids
        self._logprobs.append(logprobs.detach().float().cpu())
        self._support.append(support)
        self._rewards.append(reward)

    def insert(self, ids: Sequence[int], *, num_seam: int) -> None:
        """Append what follows a turn.

        Args:
            num_seam: tokens at its start that end the turn; as in `Continuation`.

        Raises:
            WorkerError: there is no turn that it could follow.
        """
        if not self._turns or not 0 <= num_seam <= len(ids):
            raise WorkerError(
                f"expected tokens behind a turn, at most {len(ids)} of them a seam, got {len(self._turns)} turns and "
                f"a seam of {num_seam}",
                stage="rollout",
            )
        self._insert(ids[:num_seam], Inserted.SEAM)
        self._insert(ids[num_seam:], Inserted.REPLY)

    def set_reward(self, turn: int, reward: float) -> None:
        self._rewards[turn] = reward

    def drop_open_reply(self) -> None:
        """Forget what was inserted behind the last turn, where no other one follows: nothing is trained on it."""
        if self._turns:
            end = self._turns[-1].start + self._turns[-1].length
            del self._ids[end:]
            self._inserted = [span for span in self._inserted if span.start < end]

    def _insert(self, ids: Sequence[int], kind: Inserted) -> None:
        if ids:
            self._inserted.append(InsertedTokens(start=len(self._ids), length=len(ids), kind=kind))
            self._ids += ids

    def check(self) -> None:
        """Check that spans of turns and of inserted tokens cover the row once, in order, for tests and checks.

        Raises:
            AssertionError: they do not.
        """
        turns = [(turn.start, turn.length) for turn in self._turns]
        spans = sorted([*turns, *((span.start, span.length) for span in self._inserted)])
        place = 0
        for start, length in spans:
            assert start == place, f"tokens {place} to {start} of a row are in no span, or in two"
            place += length
        assert place == len(self._ids), f"spans end at {place}, the row at {len(self._ids)}"
        assert int(self.mask.sum()) == len(self.sampled_logprobs) == self.num_sampled, (
            "log-probabilities are not aligned"
        )
        assert len(self._rewards) == len(self._turns) == len(self._support), "turns are not aligned"


def routes_of_rows(rows: Sequence[TokenRow]) -> list[RecordedRoutes]:
    """Return of each turn the routes of all rows, as `place_routes` takes them; none where no turn has recorded any."""
    recorded = [[turn.routes for turn in row.turns] for row in rows]
    first = next((routes for of_row in recorded for routes in of_row if routes is not None), None)
    if first is None:
        return []
    nothing = torch.zeros(1, dtype=torch.int64)
    empty = RecordedRoutes(ids=first.ids[:0], starts=nothing, lengths=nothing, shape=first.shape)
    found = []
    for number in range(max(map(len, recorded))):
        parts = [(of_row[number] if number < len(of_row) else None) or empty for of_row in recorded]
        found.append(
            RecordedRoutes(
                ids=torch.cat([part.ids for part in parts]),
                starts=torch.cat([part.starts for part in parts]),
                lengths=torch.cat([part.lengths for part in parts]),
                shape=first.shape,
            )
        )
    return found
