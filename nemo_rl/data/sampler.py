"""The stream of prompts: a function of the seed alone, and resumable at any position.

Called by the trainer, which holds numbers only; the prompts themselves stay in the rollout worker. Each draw has an
ordinal, its place in the stream, which decides the seeds of the rows that are sampled for it.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nemo_rl.errors import CheckpointError, DatasetError
from nemo_rl.utils.metrics import Reduction

__all__ = ["PromptSampler", "PromptStream", "SampledPrompt"]


@dataclass(frozen=True, slots=True)
class SampledPrompt:
    """One prompt of the stream."""

    ordinal: int
    """Its place in the stream, counted from 0 over all epochs."""
    prompt: int
    """Its number in the training set."""
    source: str = ""
    """Name of the source that has it; empty where there is one alone."""


class PromptStream(ABC):
    """A stream of prompts: a draw is a function of its ordinal."""

    notes_groups = False
    """True where the stream is told the rewards of each group, and has metrics."""

    @property
    @abstractmethod
    def is_exhausted(self) -> bool:
        """Return True when fewer prompts are left than the last draw took."""

    @abstractmethod
    def has(self, count: int) -> bool:
        """Return whether `next` would give so many."""

    @abstractmethod
    def next(self, count: int) -> list[SampledPrompt]:
        """Return the next `count` prompts.

        Raises:
            DatasetError: there are fewer.
        """

    @property
    @abstractmethod
    def ordinal(self) -> int:
        """Return the ordinal of the next draw."""

    def wanted(self, first: int, count: int) -> dict[str, int]:
        """Return how many of `count` groups that are trained are to be of each source, from the group `first` on."""
        return {"": count}

    def trained(self, tokens: Mapping[str, int], prompts: Mapping[str, int]) -> None:  # noqa: B027 - of one source all
        """Note the response tokens and the prompts of each source that a step has trained."""

    def note(self, draw: SampledPrompt, rewards: Sequence[float]) -> None:  # noqa: B027 - most draw whatever was scored
        """Note the rewards of a group that was sampled, whether it is trained or not; in the order of the groups."""

    def metrics(self) -> dict[str, Reduction]:
        """Return what the stream says of its draws since the last call."""
        return {}

    def next_for(self, missing: Mapping[str, int], count: int) -> list[SampledPrompt]:
        """Return the next `count` prompts, as `next` does, for groups that are missing.

        Args:
            missing: of each source.
        """
        return self.next(count)

    @abstractmethod
    def position_of(self, ordinal: int) -> dict[str, int]:
        """Return the entries of `state_dict` with which the next draw has this ordinal."""

    @abstractmethod
    def draw(self, ordinal: int) -> SampledPrompt:
        """Return the draw at any place of the stream."""

    def at(self, ordinal: int) -> SampledPrompt:
        """Return the draw at a place of the stream that has been passed.

        Raises:
            CheckpointError: the stream has not come so far.
        """
        if not 0 <= ordinal < self.ordinal:
            raise CheckpointError(f"data position: expected an ordinal that was drawn before, got {ordinal}")
        return self.draw(ordinal)

    @abstractmethod
    def state_dict(self) -> dict[str, object]:
        """Return the position of the next draw, and the meaning of that position."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Continue where `state_dict` was taken.

        Raises:
            CheckpointError: the state belongs to other data, another seed or order.
        """


CANDIDATES = "candidates"
"""Name, in the state of a stream with a curriculum, of the state of the stream whose draws it chooses among."""


def refuse_curriculum(state: Mapping[str, object]) -> None:
    """Refuse the state of a stream with a curriculum for one without.

    Raises:
        CheckpointError: it is one.
    """
    if CANDIDATES in state:
        raise CheckpointError(
            "data position: the checkpoint is of a run with data.curriculum, which decides what was drawn; resume with "
            "it, or start afresh with checkpointing.resume=false"
        )


class PromptSampler(PromptStream):
    """Draws prompt numbers `0 .. num_prompts - 1`, each once per epoch.

    Args:
        num_prompts: size of the training set.
        seed: the order of epoch e depends on this and e alone.
        shuffle: False keeps the dataset's order in every epoch.
        max_num_epochs: passes over the prompts; None never ends.

    Example:
        >>> sampler = PromptSampler(3, seed=0, shuffle=False)
        >>> [(draw.ordinal, draw.prompt) for draw in sampler.next(4)]
        [(0, 0), (1, 1), (2, 2), (3, 0)]
    """

    def __init__(self, num_prompts: int, *, seed: int, shuffle: bool = True, max_num_epochs: int | None = None) -> None:
        if num_prompts < 1:
            raise DatasetError(f"training prompts: expected at least one, got {num_prompts}; check data.train")
        self._num_prompts = num_prompts
        self._seed = seed
        self._shuffle = shuffle
        self._max_num_epochs = max_num_epochs
        self._epoch = 0
        self._position = 0
        self._batch_size = 1
        self._order = self._order_of(0)

    @property
    def epoch(self) -> int:
        """Return the number of passes begun, counted from 0."""
        return self._epoch

    @property
    def is_exhausted(self) -> bool:
        """Return True when the last epoch has fewer prompts left than the last draw took."""
        return self._num_left() < self._batch_size

    def has(self, count: int) -> bool:
        """Return whether `next` would give so many."""
        return self._num_left() >= count

    def next(self, count: int) -> list[SampledPrompt]:
        """Return the next `count` prompts; they may run over the end of an epoch.

        Raises:
            DatasetError: `max_num_epochs` leaves fewer than `count`.
        """
        if not self.has(count):
            raise DatasetError(
                f"training prompts: expected {count} more, got {self._num_left():.0f} of {self._num_prompts} prompts x "
                f"grpo.max_num_epochs {self._max_num_epochs}; lower grpo.num_prompts_per_step or raise max_num_epochs"
            )
        self._batch_size = count
        drawn: list[SampledPrompt] = []
        while len(drawn) < count:
            if self._position == self._num_prompts:
                self._epoch, self._position = self._epoch + 1, 0
                self._order = self._order_of(self._epoch)
            taken = self._order[self._position : self._position + count - len(drawn)]
            first = self.ordinal
            self._position += len(taken)
            drawn += [SampledPrompt(first + place, prompt) for place, prompt in enumerate(taken)]
        return drawn

    @property
    def ordinal(self) -> int:
        return self._epoch * self._num_prompts + self._position

    def position_of(self, ordinal: int) -> dict[str, int]:
        """Return the entries of `state_dict` with which the next draw has this ordinal."""
        epoch, position = divmod(ordinal, self._num_prompts)
        return {"epoch": epoch, "position": position}

    def draw(self, ordinal: int) -> SampledPrompt:
        """Return the draw at any place of the stream."""
        epoch, position = divmod(ordinal, self._num_prompts)
        return SampledPrompt(ordinal, self._order_of(epoch)[position])

    def state_dict(self) -> dict[str, object]:
        """Return the position of the next draw, and the meaning of that position."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "batch_size": self._batch_size,
            "num_prompts": self._num_prompts,
            "seed": self._seed,
            "shuffle": self._shuffle,
        }

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Continue where `state_dict` was taken.

        Raises:
            CheckpointError: the state belongs to another dataset size, seed or order.
        """
        refuse_curriculum(state)
        for name, mine in (("num_prompts", self._num_prompts), ("seed", self._seed), ("shuffle", self._shuffle)):
            if state.get(name) != mine:
                raise CheckpointError(
                    f"data position: {name}: the checkpoint has {state.get(name)!r}, this run {mine!r}; resume with "
                    "the same data and seed, or start afresh with checkpointing.resume=false"
                )
        position, epoch, batch_size = (state.get(name) for name in ("position", "epoch", "batch_size"))
        if not (isinstance(position, int) and isinstance(epoch, int) and isinstance(batch_size, int)):
            raise CheckpointError(f"data position: expected whole numbers, got {dict(state)!r}")
        if not (0 <= position <= self._num_prompts and epoch >= 0):
            raise CheckpointError(f"data position: expected 0..{self._num_prompts}, got epoch {epoch}, {position}")
        self._epoch, self._position, self._batch_size = epoch, position, batch_size
        self._order = self._order_of(epoch)

    def _num_left(self) -> float:
        if self._max_num_epochs is None:
            return float("inf")
        return self._max_num_epochs * self._num_prompts - self._epoch * self._num_prompts - self._position

    def _order_of(self, epoch: int) -> list[int]:
        order = list(range(self._num_prompts))
        if self._shuffle:
            random.Random(f"{self._seed}:{epoch}").shuffle(order)
        return order
