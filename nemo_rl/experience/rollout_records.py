"""Records of rollouts: what a rollout worker is asked for, what it has loaded, and the rows that it returns.

They cross between the driver and its rollout workers: numbers of prompts, metas and per-row scalars, never a token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from nemo_rl.data_plane.chunks.wire import Counted, object_bytes
from nemo_rl.data_plane.interfaces import KVBatchMeta
from nemo_rl.data_plane.keys import group_uids
from nemo_rl.experience.payload import SampleStats
from nemo_rl.models.generation.schedule import ScheduleEntry
from nemo_rl.utils.metrics import Reduction, merge_metrics

__all__ = ["WEIGHT_VERSION", "GroupRequest", "RolloutInfo", "RolloutResult"]

WEIGHT_VERSION = "weight_version"
"""Tag of every row: the version of the weights that drew its oldest token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutInfo:
    """The data that the rollout worker has loaded."""

    num_train_prompts: tuple[int, ...]
    """Of each source, in the order of the recipe; they are numbered through."""
    num_val_prompts: int
    num_skipped_prompts: int
    """Prompts longer than `data.max_input_seq_length`, left out."""
    skipped: tuple[str, ...] = ()
    """The first of them, for people."""
    identity: Mapping[str, str] = field(default_factory=dict)
    """Digests of the data, by the dotted paths of their sections, of tokenizer, chat template and reward."""
    prints_the_date: bool = False
    """True when the chat template says when the run was started."""
    remarks: tuple[str, ...] = ()
    """Lines about rows that are unlike the others, for the user."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupRequest:
    """One group to be sampled: `grpo.num_generations_per_prompt` responses to one prompt."""

    uid: str
    """Names the group; its rows' keys begin with it."""
    prompt: int
    """Number in the training set."""
    seed: int
    """Seed of the first row; row i has `seed + i`."""
    ordinal: int = -1
    """Place of the prompt in the stream of prompts; -1 outside of it."""
    oldest_version: int = 0
    """Smallest version of the weights that may have sampled it, where it is not sampled anew."""
    name: str = ""
    """Name in the schedule of an asynchronous run: ordinal and attempt, which no other run of the seed changes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutResult(Counted):
    """Rows of whole groups, already in the data plane."""

    meta: KVBatchMeta
    sample_stats: SampleStats
    metrics: dict[str, Reduction] = field(default_factory=dict)
    printed: tuple[str, ...] = ()
    """Lines of the reward for the person at the terminal."""
    schedule: tuple[ScheduleEntry, ...] = ()
    """Events of the engines' batches since the last result; empty without asynchronous batches."""

    _counted: int = field(default=0, init=False, repr=False, compare=False)
    """Bytes of its message, where the worker has counted them."""

    def counted(self) -> RolloutResult:
        """Return this result, which knows its bytes from here on: workers count, not the one driver of all."""
        object.__setattr__(self, "_counted", self.num_bytes())
        return self

    def num_bytes(self) -> int:
        """About the bytes of this result in a message to another process."""
        return self._counted or object_bytes((self.meta, self.sample_stats, self.metrics, self.printed, self.schedule))

    @property
    def group_uids(self) -> tuple[str, ...]:
        return group_uids(self.meta.keys)

    @property
    def weight_versions(self) -> np.ndarray:
        """`[N]` int64, the version of the weights that sampled each row, by its tag."""
        return np.asarray(self.meta.tag_values(WEIGHT_VERSION), dtype=np.int64)

    def select(self, rows: Sequence[int]) -> RolloutResult:
        """The rows at `rows`, in that order; the metrics stay those of the whole rollout."""
        return replace(self, meta=self.meta.subset(rows), sample_stats=self.sample_stats.select(rows))

    def concat(self, *others: RolloutResult) -> RolloutResult:
        """Rows of this one, then those of the others, also of other steps."""
        if not others:
            return self
        parts = (self, *others)
        return RolloutResult(
            meta=self.meta.concat(*(other.meta for other in others)),
            sample_stats=self.sample_stats.concat(*(other.sample_stats for other in others)),
            metrics=merge_metrics(part.metrics for part in parts),
            printed=tuple(line for part in parts for line in part.printed),
            schedule=tuple(entry for part in parts for entry in part.schedule),
        )
