"""`BatchSource`: where the batches of a trainer come from, and the two that sample while the trainer waits.

    GRPOTrainer.step
      `- BatchSource.next             a step whose rows are in the data plane
           |- SyncBatches             one rollout: every group of the step at once
           `- DynamicBatches          rounds of rollouts until enough groups can teach something (DAPO, 2503.14476)

The unit is the group, which is never split. Invariant: the rows of the step that `next` returns are the caller's to
clear; all others are the source's, which clears them after its own error and in `close`. A group is a function of
the run's seed, its ordinal in the stream of prompts and the weights, so a prompt that is requeued keeps its ordinal.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from nemo_rl.algorithms.async_selection import Frontier
from nemo_rl.algorithms.grpo import counted_rows, score_rows
from nemo_rl.algorithms.stages.columns import PARTITION, ROLLOUT
from nemo_rl.algorithms.stages.stage import StepState, begin_step, trained_of_sources
from nemo_rl.config.grpo import GRPOConfig
from nemo_rl.data.sampler import PromptStream, SampledPrompt
from nemo_rl.data_plane.client.link import CLEAR, stage_context
from nemo_rl.data_plane.factory import cleared_after_error
from nemo_rl.data_plane.interfaces import DataPlaneClient
from nemo_rl.errors import CheckpointError, UserError
from nemo_rl.experience.rollout_handle import RolloutHandle
from nemo_rl.experience.rollout_records import GroupRequest, RolloutResult
from nemo_rl.experience.rollouts import row_seeds
from nemo_rl.utils.metrics import Mean, Reduction, Sum, merge_metrics
from nemo_rl.utils.r3_trace import trace_retired

__all__ = [
    "BatchSource",
    "DynamicBatches",
    "RolloutParts",
    "SyncBatches",
    "group_request",
    "is_informative",
    "note_group",
    "step_of_groups",
]

DROPPED = "not trained: equal rewards in its group (grpo.use_dynamic_sampling)"
REQUEUED = "not trained: prompt requeued (checkpoint or end of run)"
REQUEUED_STATE = "redrawn_ordinals"
"""Name in a checkpoint's state."""
OLDER_STATE = "redrawn_prompts"
"""Name in checkpoints that held numbers of prompts instead of ordinals."""


class NoStepLeft(Exception):
    """No other step comes: the last groups of the last epoch left while a step waited for them, or a signal has asked
    for the end of the run."""


class BatchSource(ABC):
    """A stream of steps whose rows are in the data plane.

    Example:
        >>> step = source.next(1)                                     # doctest: +SKIP
        >>> with open_step(client, step.partition, step.keys):        # doctest: +SKIP
        ...     step = train(step)
    """

    samples_ahead = False
    """True where groups of later steps are sampled while a step is trained."""
    unfinished: StepState | None = None
    """The step that `next` has begun and not returned, as far as it is known."""

    @abstractmethod
    def next(self, number: int) -> StepState:
        """Return the step `number`, counted from 1; its rows are in the data plane.

        Raises:
            UserError: the data or the recipe cannot give a step. WorkerError: a worker failed. No row of it is left.
            NoStepLeft: `is_exhausted` has become True meanwhile, or `interrupt.is_noticed`.
        """

    @property
    @abstractmethod
    def is_exhausted(self) -> bool:
        """True when the last epoch cannot fill another step."""

    @property
    @abstractmethod
    def num_waiting_rows(self) -> int:
        """Rows in the data plane that wait for a later step."""

    def lost_rows(self, owners: Mapping[str, str]) -> list[str]:
        """Return the keys of rows that are alive between two steps and belong to no group that waits.

        Args:
            owners: key -> client that put it, of all rows that are alive.
        """
        return list(owners) if len(owners) != self.num_waiting_rows else []

    @abstractmethod
    def trained(self, step: StepState) -> None:
        """The update of a step is done, and its rows are cleared."""

    @abstractmethod
    def updated(self, version: int, *, weights: str | None) -> None:
        """The engines hold new weights: at the start of a run and after each step.

        Args:
            weights: digest of the weights that the engines were sent; None where refits are not proved.
        """

    @abstractmethod
    def state_dict(self) -> dict[str, object]:
        """Return what a checkpoint needs to go on from here. Prompts whose rows wait are sampled again after it."""

    @abstractmethod
    def save_into(self, folder: Path) -> None:
        """Write what `state_dict` does not hold into the folder of a checkpoint."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, object], *, step: int, folder: Path) -> None:
        """Go on where `state_dict` was taken.

        Args:
            state: may have other entries.
            step: the last one that was trained.
            folder: as in `save_into`.

        Raises:
            CheckpointError: the state belongs to other data, or to a run with other seeds.
        """

    @abstractmethod
    def frontier(self) -> Frontier:
        """Return the prompts that are settled: a run that is resumed from here does not ask for them again."""

    def settle(self, saved: int | None) -> None:
        """Let go of what no resumed run asks for; after each step.

        Args:
            saved: the newest step whose checkpoint is whole; None before there is one.
        """
        return

    def run_is_done(self) -> None:
        """Let go of everything that a resumed run could ask for: there is none."""
        return

    @abstractmethod
    def close(self) -> None:
        """Clear the rows that wait. Idempotent."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutParts:
    """Everything that a source needs to have groups sampled."""

    config: GRPOConfig
    client: DataPlaneClient
    rollout: RolloutHandle
    sampler: PromptStream
    """Drawn from by the source alone."""
    weight_version: Callable[[], int]
    """Version of the weights that the engines hold."""
    rows_per_conversation: int = 1
    """Most rows of one sample of a prompt."""

    @property
    def rows_per_group(self) -> int:
        """Return the most rows of one group."""
        return self.config.num_generations_per_prompt * self.rows_per_conversation


class SyncBatches(BatchSource):
    """Every step is sampled when it is asked for, from the weights that it then updates."""

    def __init__(self, parts: RolloutParts) -> None:
        self._parts = parts

    def next(self, number: int) -> StepState:
        started, config = time.perf_counter(), self._parts.config
        step = self._begin(number, self._parts.sampler.next(config.num_prompts_per_step))
        self.unfinished = step
        with cleared_after_error(self._parts.client, step.partition, step.keys):
            groups = self._sample(step)
        self.unfinished = None
        return with_rows(step, groups, started=started)

    @property
    def is_exhausted(self) -> bool:
        return self._parts.sampler.is_exhausted

    @property
    def num_waiting_rows(self) -> int:
        return 0

    def state_dict(self) -> dict[str, object]:
        return {"sampler": self._parts.sampler.state_dict(), "dynamic_sampling": {}}

    def load_state_dict(self, state: Mapping[str, object], *, step: int, folder: Path) -> None:
        ahead = _section(state, "async").get("done")
        if ahead:
            raise CheckpointError(
                f"async: the checkpoint is of an asynchronous run that trained prompts ahead of others ({ahead!r}); "
                "resume it with grpo.async.enabled=true, or start afresh with checkpointing.resume=false"
            )
        self._parts.sampler.load_state_dict(_section(state, "sampler"))

    def save_into(self, folder: Path) -> None:
        """Do nothing: no group is kept."""

    def trained(self, step: StepState) -> None:
        if step.drawn[0].source:
            self._parts.sampler.trained(*trained_of_sources(step))

    def updated(self, version: int, *, weights: str | None) -> None:
        """Do nothing: nothing is sampled before `next`."""

    def frontier(self) -> Frontier:
        return Frontier(next_ordinal=self._parts.sampler.ordinal)

    def close(self) -> None:
        """Do nothing: no row waits."""

    def _begin(self, number: int, drawn: Sequence[SampledPrompt]) -> StepState:
        return begin_step(number, drawn, group_size=self._parts.rows_per_group, version=self._parts.weight_version())

    def _sample(self, step: StepState) -> list[RolloutResult]:
        """Have the groups of a step sampled; return them in the order of their draws."""
        seed, oldest = self._parts.config.seed, step.policy_version
        requests = [
            group_request(draw, uid, seed=seed, oldest_version=oldest)
            for uid, draw in zip(step.uids, step.drawn, strict=True)
        ]
        pending = self._parts.rollout.submit_groups(requests, version=step.weight_version, partition_id=step.partition)
        groups = [group.result() for group in pending]
        return noted(self._parts.sampler, step.drawn, groups) if self._parts.sampler.notes_groups else groups


class DynamicBatches(SyncBatches):
    """Steps of groups whose rewards are not all equal: rounds of rollouts until there are enough.

    The first groups are the step's. Those beyond are carried: their rows stay in the data plane for the next step, and
    are cleared before a checkpoint and at the end of the run. Their prompts are then drawn again, ahead of new ones, so
    a resumed run samples what one that was left alone samples.
    """

    def __init__(self, parts: RolloutParts) -> None:
        super().__init__(parts)
        self._carried: list[RolloutResult] = []
        self._draw_of: dict[str, SampledPrompt] = {}
        """Draws of the groups that are alive, by uid."""
        self._requeued: list[SampledPrompt] = []
        self._has_begun = False

    def next(self, number: int) -> StepState:
        started, config, rounds = time.perf_counter(), self._parts.config, _Rounds()
        step, groups = self._begin(number, ()), self._carried
        self.unfinished, self._carried, self._has_begun = step, [], True
        live = {key for group in groups for key in group.meta.keys}
        with cleared_after_error(self._parts.client, PARTITION, live):
            while not groups or (self._missing(number, groups) and self._has_a_round()):
                if rounds.count == config.dynamic_sampling_max_gen_batches:
                    raise UserError(self._too_few(number, groups, rounds))
                groups = groups + self._round(number, rounds, live, groups)
        # At the end of the last epoch there may be fewer.
        chosen, carried = self._parted(number, groups)
        # The metrics of carried groups are those of rounds that this step has counted.
        self._carried = [replace(group, metrics={}, printed=()) for group in carried]
        self.unfinished = None
        draws = [self._draw_of.pop(group.group_uids[0]) for group in chosen]
        keys = tuple(key for group in chosen for key in group.meta.keys)
        uids = tuple(group.group_uids[0] for group in chosen)
        step = replace(step, drawn=tuple(draws), uids=uids, keys=keys, weight_version=None)
        done = with_rows(step, chosen, started=started)
        metrics = rounds.metrics(carried=self.num_waiting_rows)
        return replace(done, rolled=replace(done.rows, metrics=metrics))

    @property
    def is_exhausted(self) -> bool:
        """True when the remaining prompts of the last epoch, and those of carried groups, are too few for a round.

        Before the first step it is False: the draw itself says what is too small. `state_dict` does not change it.
        """
        num_again = len(self._requeued) + len(self._carried)
        return self._has_begun and not self._parts.sampler.has(self._parts.config.prompts_per_round - num_again)

    @property
    def num_waiting_rows(self) -> int:
        return sum(len(group.meta) for group in self._carried)

    def state_dict(self) -> dict[str, object]:
        self.close()
        requeued = [draw.ordinal for draw in self._requeued]
        return {**super().state_dict(), "dynamic_sampling": {REQUEUED_STATE: requeued}}

    def load_state_dict(self, state: Mapping[str, object], *, step: int, folder: Path) -> None:
        super().load_state_dict(state, step=step, folder=folder)
        found = _section(state, "dynamic_sampling")
        if found.get(OLDER_STATE):
            raise CheckpointError(
                f"{OLDER_STATE}: the checkpoint was written when seeds of rows came from the step, and lists prompts "
                "to draw again without their places in the stream; resume it with the version that wrote it, or start "
                "afresh with checkpointing.resume=false"
            )
        ordinals = found.get(REQUEUED_STATE, [])
        if not isinstance(ordinals, list) or not all(isinstance(ordinal, int) for ordinal in ordinals):
            raise CheckpointError(f"{REQUEUED_STATE}: expected a list of ordinals, got {ordinals!r}")
        self._requeued = [self._parts.sampler.at(ordinal) for ordinal in ordinals]
        self._has_begun = True

    def frontier(self) -> Frontier:
        again = {draw.ordinal for draw in self._requeued}
        again |= {self._draw_of[group.group_uids[0]].ordinal for group in self._carried}
        end = self._parts.sampler.ordinal
        first = min(again, default=end)
        return Frontier(next_ordinal=first, done=tuple(each for each in range(first, end) if each not in again))

    def close(self) -> None:
        carried, self._carried = self._carried, []
        self._requeued += [self._draw_of.pop(group.group_uids[0]) for group in carried]
        self._clear([key for group in carried for key in group.meta.keys], REQUEUED)

    def _parted(self, number: int, groups: Sequence[RolloutResult]) -> tuple[list[RolloutResult], list[RolloutResult]]:
        """Return the first groups that the step takes of each source, and those beyond."""
        left = self._wanted(number)
        chosen, beyond = list[RolloutResult](), list[RolloutResult]()
        for group in groups:
            source = self._draw_of[group.group_uids[0]].source
            (chosen if left[source] > 0 else beyond).append(group)
            left[source] -= 1
        return (chosen, beyond) if chosen else (list(groups), [])

    def _missing(self, number: int, groups: Sequence[RolloutResult]) -> dict[str, int]:
        """Return how many groups of each source the step lacks; none of those that it does not lack."""
        left = self._wanted(number)
        for group in groups:
            left[self._draw_of[group.group_uids[0]].source] -= 1
        return {source: count for source, count in left.items() if count > 0}

    def _wanted(self, number: int) -> dict[str, int]:
        count = self._parts.config.num_prompts_per_step
        return self._parts.sampler.wanted((number - 1) * count, count)

    def _round(
        self, number: int, rounds: _Rounds, live: set[str], kept_before: Sequence[RolloutResult]
    ) -> list[RolloutResult]:
        """Have one round of groups sampled and return those that are kept; the rows of the others are cleared."""
        config = self._parts.config
        part = self._begin(number, self._next_prompts(self._missing(number, kept_before), config.prompts_per_round))
        live.update(part.keys)
        groups = self._sample(part)
        kept = [group for group in groups if is_informative(group, config)]
        rounds.add(groups, num_kept=len(kept))
        if not kept and not kept_before and not self._has_a_round():
            # The last epoch ends as without dynamic sampling: a step of zero-variance groups updates nothing.
            kept = groups
        self._draw_of |= dict(zip(part.uids, part.drawn, strict=True))
        uids = {group.group_uids[0] for group in kept}
        dropped = [key for group in groups if group.group_uids[0] not in uids for key in group.meta.keys]
        self._clear(dropped, DROPPED)
        live.difference_update(dropped)
        for uid in part.uids:
            if uid not in uids:
                self._draw_of.pop(uid)
        return kept

    def _clear(self, keys: Sequence[str], reason: str) -> None:
        if keys:
            with stage_context(CLEAR):
                self._parts.client.kv_clear(list(keys), PARTITION, reason=reason)
            trace_retired(keys=keys, reason=reason)

    def _next_prompts(self, missing: Mapping[str, int], count: int) -> list[SampledPrompt]:
        again, self._requeued = self._requeued[:count], self._requeued[count:]
        return again + (self._parts.sampler.next_for(missing, count - len(again)) if len(again) < count else [])

    def _has_a_round(self) -> bool:
        return self._parts.sampler.has(self._parts.config.prompts_per_round - len(self._requeued))

    def _too_few(self, number: int, groups: Sequence[RolloutResult], rounds: _Rounds) -> str:
        config, chosen = self._parts.config, self._parted(number, groups)[0]
        lacks = [f"{count} of data.train.{name}" for name, count in self._missing(number, groups).items() if name]
        sampled = f"{rounds.count} rounds of {config.prompts_per_round} prompts"
        sampled += f" ({', '.join(lacks)} are missing)" if lacks else ""
        return too_few_groups(number, len(chosen), config, sampled=sampled, reward=rounds.reward.value)


def too_few_groups(number: int, num_groups: int, config: GRPOConfig, *, sampled: str, reward: float) -> str:
    """Return the error of a step whose groups nearly all have equal rewards.

    Args:
        reward: mean of the groups that were sampled.
    """
    return (
        f"grpo.dynamic_sampling_max_gen_batches: after {sampled} step {number} has {num_groups} of "
        f"{config.num_prompts_per_step} groups whose rewards are not all equal (mean reward {reward:.3g}): the prompts "
        "are too easy or too hard for this model, or the reward is constant. Take others, raise it, or set "
        "grpo.use_dynamic_sampling=false"
    )


def is_informative(group: RolloutResult, config: GRPOConfig) -> bool:
    """Return whether the rewards of a group are not all equal, compared exactly."""
    is_trained = score_rows(group.sample_stats, group.group_uids, config, per_token=True).is_trained_group
    # Rows whose reward is None are in no group that is trained.
    return bool(is_trained.any() if group.sample_stats.leaves_none else is_trained.all())


@dataclass(slots=True)
class _Rounds:
    count: int = 0
    reward: Mean = field(default_factory=lambda: Mean(0.0, 0.0))
    kept: Mean = field(default_factory=lambda: Mean(0.0, 0.0))
    sampled: list[Mapping[str, Reduction]] = field(default_factory=list)
    """Metrics of each round, of all groups that it has sampled."""

    def add(self, groups: Sequence[RolloutResult], *, num_kept: int) -> None:
        rows = groups[0].concat(*groups[1:])
        counted = counted_rows(rows.sample_stats, rows.group_uids)
        self.count += 1
        self.reward = self.reward.merge(Mean(float(counted.rewards.sum()), float(len(counted))))
        self.kept = self.kept.merge(Mean(float(num_kept), float(len(groups))))
        self.sampled.append(rows.metrics)

    def metrics(self, *, carried: int) -> dict[str, Reduction]:
        """Return what a run logs under `rollout/`; a step that only took carried groups leaves some out."""
        counts: dict[str, Reduction] = {
            "sampling_rounds": Sum(float(self.count)),
            "carried_rows": Sum(float(carried)),
        }
        shares = {"sampled_reward": self.reward, "informative_share": self.kept} if self.count else {}
        return {**merge_metrics(self.sampled), **counts, **shares}


def group_request(draw: SampledPrompt, uid: str, *, seed: int, name: str = "", oldest_version: int = 0) -> GroupRequest:
    """Return the request for the group of a prompt; its rows depend on the run's seed and the ordinal alone."""
    first = row_seeds(seed, "group", draw.ordinal, count=1)[0]
    return GroupRequest(
        uid=uid, prompt=draw.prompt, seed=first, ordinal=draw.ordinal, oldest_version=oldest_version, name=name
    )


def step_of_groups(
    number: int, drawn: Sequence[SampledPrompt], groups: Sequence[RolloutResult], *, started: float
) -> StepState:
    """Return a step of groups that were sampled before it, from weights of any version.

    Args:
        drawn: prompts of the groups, in their order.
        started: as in `with_rows`.
    """
    step = StepState(
        number=number,
        partition=PARTITION,
        drawn=tuple(drawn),
        uids=tuple(group.group_uids[0] for group in groups),
        keys=tuple(key for group in groups for key in group.meta.keys),
        weight_version=None,
        policy_version=number - 1,
    )
    return with_rows(step, groups, started=started)


def with_rows(step: StepState, groups: Sequence[RolloutResult], *, started: float) -> StepState:
    """Return the step with the rows of its groups, at least one, whose rollout `started` at that `perf_counter`."""
    rolled = groups[0].concat(*groups[1:])
    return replace(step, rolled=rolled, stage_seconds={ROLLOUT: time.perf_counter() - started})


def noted(stream: PromptStream, drawn: Sequence[SampledPrompt], groups: Sequence[RolloutResult]) -> list[RolloutResult]:
    """Tell the stream the rewards of groups, in their order; return them, the first one with the stream's metrics."""
    for draw, group in zip(drawn, groups, strict=True):
        note_group(stream, draw, group)
    first, *others = groups
    return [replace(first, metrics={**first.metrics, **stream.metrics()}), *others]


def note_group(stream: PromptStream, draw: SampledPrompt, group: RolloutResult) -> None:
    """Tell the stream the rewards of a group, one for each conversation that was scored."""
    counted = counted_rows(group.sample_stats, group.group_uids)
    is_scored = slice(None) if counted.conversations is None else ~counted.conversations.is_void
    stream.note(draw, counted.rewards[is_scored].tolist())


def _section(state: Mapping[str, object], name: str) -> Mapping[str, object]:
    found = state.get(name, {})
    if not isinstance(found, Mapping):
        raise CheckpointError(f"{name}: expected an object, got {type(found).__name__}")
    return found
