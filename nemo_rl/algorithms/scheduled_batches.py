"""`ScheduledBatches`: the batches of an asynchronous run once more, from its schedule.

Used by `nemo-rl compare RUN replay --to N`. Engines follow their scripts (`EngineSpec.script`), so the batch of each
turn is that of the run; here every group is handed to the engine that had it, before the weights change after which the
run's engine had it too. Invariant: a step has the groups of the run's step, in its order.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nemo_rl.algorithms.async_groups import Frontier
from nemo_rl.algorithms.batches import BatchSource, RolloutParts, group_request, step_of_groups
from nemo_rl.algorithms.schedule_file import RunSchedule
from nemo_rl.algorithms.stages.columns import PARTITION
from nemo_rl.algorithms.stages.state import StepState
from nemo_rl.data.sampler import SampledPrompt
from nemo_rl.data_plane.client.link import CLEAR, stage_context
from nemo_rl.data_plane.keys import group_uid, keys_of_groups, new_group_ids
from nemo_rl.distributed.calls import Pending
from nemo_rl.errors import CheckpointError, name_some
from nemo_rl.experience.rollout_records import RolloutResult

__all__ = ["ScheduledBatches"]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Submitted:
    draw: SampledPrompt
    uid: str
    pending: Pending[RolloutResult]


class ScheduledBatches(BatchSource):
    """Steps as a run had them.

    Args:
        last_step: the last one that is done again.
    """

    def __init__(self, parts: RolloutParts, schedule: RunSchedule, *, last_step: int) -> None:
        self._parts, self._schedule, self._last_step = parts, schedule, last_step
        self._submitted: dict[str, _Submitted] = {}
        self._names = {name for step in range(1, last_step + 1) for name in schedule.steps.get(step, ())}
        """Groups that are trained; the others are sampled alone, since they were in the same batches."""
        self._step = 0
        self.digests: dict[int, str] = {}
        """Version -> digest of the weights, as far as they came."""

    def next(self, number: int) -> StepState:
        started, names = time.perf_counter(), self._schedule.steps.get(number)
        missing = [name for name in names or () if name not in self._submitted]
        if names is None or missing:
            raise CheckpointError(
                f"step {number}: the schedule does not say where its groups were sampled: "
                f"{name_some(missing) or 'none'}; the run had ended before it, or lines of schedule.jsonl are missing"
            )
        chosen = [self._submitted.pop(name) for name in names]
        groups = [each.pending.result() for each in chosen]
        return step_of_groups(number, [each.draw for each in chosen], groups, started=started)

    def trained(self, step: StepState) -> None:
        self._step = step.number

    def updated(self, version: int, *, weights: str | None) -> None:
        if weights is not None:
            self.digests[version] = weights
        if version >= self._last_step:
            return
        for engine in self._schedule.scripts:
            held, found = -1, list[str]()
            for entry in self._schedule.scripts[engine]:
                if entry.kind == "swap" and entry.version is not None:
                    held = entry.version
                elif entry.kind == "join" and held == version:
                    found += entry.groups
            self._submit(engine, found)

    def frontier(self) -> Frontier:
        return Frontier()

    @property
    def is_exhausted(self) -> bool:
        return self._step >= self._last_step

    @property
    def num_waiting_rows(self) -> int:
        # Rows come and go beside the steps; `lost_rows` knows whose they are.
        return -1

    def lost_rows(self, owners: Mapping[str, str]) -> list[str]:
        uids = {each.uid for each in self._submitted.values()}
        return [key for key in owners if group_uid(key) not in uids]

    def save_into(self, folder: Path) -> None:
        raise CheckpointError("a replay saves no checkpoint")

    def state_dict(self) -> dict[str, object]:
        raise CheckpointError("a replay saves no checkpoint")

    def load_state_dict(self, state: Mapping[str, object], *, step: int, folder: Path) -> None:
        raise CheckpointError("a replay resumes from no checkpoint")

    def close(self) -> None:
        left, self._submitted = list(self._submitted.values()), {}
        keys = keys_of_groups([each.uid for each in left], self._parts.rows_per_group)
        if keys:
            with stage_context(CLEAR):
                self._parts.client.kv_clear(list(keys), PARTITION, reason="the replay ended")

    def _submit(self, engine: int, names: Sequence[str]) -> None:
        if not names:
            return
        draws = [self._parts.sampler.draw(int(name.split(".")[0])) for name in names]
        uids = new_group_ids(len(names))
        requests = [
            group_request(draw, uid, seed=self._parts.config.seed, name=name)
            for name, draw, uid in zip(names, draws, uids, strict=True)
        ]
        pending = self._parts.rollout.submit_groups(requests, version=None, partition_id=PARTITION, engine=engine)
        for request, draw, each in zip(requests, draws, pending, strict=True):
            self._submitted[request.name] = _Submitted(draw=draw, uid=request.uid, pending=each)
