"""Supervised training on the trainer of GRPO: the parts that stand where rollouts, engines and rewards stand.

    FinishedWorker   rows of finished conversations, as columns of a rollout         (nemo_rl/experience)
    finished_rows    the driver's parts:
      FinishedHandle   calls that worker; measures held-out rows with the policy
      NoEngines        the refit of a run without engines

Called by `setup` where `sft.enabled` is set, from `MasterConfig.as_supervised`; imported only then.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import torch

from nemo_rl.algorithms.grpo import plan_rows
from nemo_rl.algorithms.grpo_sync import RowParts
from nemo_rl.algorithms.stages.columns import StageColumns, written_fields
from nemo_rl.algorithms.stages.stage import StepState
from nemo_rl.algorithms.start import RunProcesses
from nemo_rl.algorithms.step_metrics import step_metrics
from nemo_rl.algorithms.token_work import row_sums
from nemo_rl.config.data import MAIN_SET
from nemo_rl.config.policy import PolicyConfig
from nemo_rl.config.schema import MasterConfig
from nemo_rl.data_plane.batch_meta import RowMapOutput
from nemo_rl.data_plane.factory import open_step
from nemo_rl.data_plane.interfaces import DataPlaneClient
from nemo_rl.data_plane.keys import keys_of_groups, new_group_ids
from nemo_rl.distributed.worker_groups import WorkerFleet, WorkerGroup, ask
from nemo_rl.distributed.worker_pass import RowPass, WorkerPass
from nemo_rl.experience.evaluation.evaluator import EvaluationTask, ValidationResult
from nemo_rl.experience.finished_worker import FinishedWorker
from nemo_rl.experience.rollout_handle import RolloutHandle
from nemo_rl.experience.rollout_records import GroupRequest
from nemo_rl.models.policy.tq_policy import TQPolicy
from nemo_rl.models.policy.workers.tq_worker import TQWorker
from nemo_rl.models.weight_sync.base import RefitParties, WeightSync
from nemo_rl.models.weight_sync.buckets import RefitPlan

__all__ = ["FinishedHandle", "HeldOutLoss", "NoEngines", "finished_rows"]

HELD_OUT = "validation"
"""Partition of held-out rows."""
SAMPLERS, REWARDS = "rollout/", ("/reward", "/reward_std")
"""Beginning of the names of metrics of samplers, and ends of those of rewards; there are neither."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOutLoss(ValidationResult):
    """The loss of held-out rows."""

    sets: Mapping[str, object] = field(default_factory=dict)  # type: ignore[assignment]
    losses: Mapping[str, tuple[float, int]]
    """Mean loss over the trained tokens of a set, and their number, by the name of the set."""

    @property
    def reward(self) -> float:
        """Return the loss of the main set, which stands where a validation of rollouts has its reward."""
        return self.losses[MAIN_SET][0]

    def metrics(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for name, (loss, tokens) in self.losses.items():
            area = "val" if name == MAIN_SET else f"val/{name}"
            found |= {f"{area}/loss": loss, f"{area}/tokens": float(tokens)}
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLoss:
    """`RowFunction`: the sum of the losses of the trained tokens of a row, and their number."""

    @property
    def input_fields(self) -> tuple[str, ...]:
        return ("token_mask", WorkerPass.PREV_LOGPROBS.column)

    def __call__(self, batch: Mapping[str, torch.Tensor]) -> RowMapOutput:
        mask_NT = batch["token_mask"].bool()
        loss_N = row_sums(-batch[WorkerPass.PREV_LOGPROBS.column], mask_NT)
        return RowMapOutput(numbers={"loss": loss_N, "tokens": mask_NT.sum(1).double()})


class FinishedHandle(RolloutHandle):
    """The driver's side of a `FinishedWorker`, with the policy that measures held-out rows."""

    def measure_with(
        self, policy: TQPolicy, settings: PolicyConfig, client: DataPlaneClient, columns: tuple[StageColumns, ...]
    ) -> None:
        """Measure held-out rows by this policy from here on.

        Args:
            columns: of the stages of a step.
        """
        self._policy, self._settings, self._client = policy, settings, client
        self._fields = [*written_fields(columns), WorkerPass.PREV_LOGPROBS.column]
        self._held_out = self._run(ask(FinishedWorker.held_out), "rollout setup")
        most = max((len(numbers) for numbers in self._held_out.values()), default=0)
        if most:
            client.register_partition(HELD_OUT, list(dict.fromkeys(self._fields)), most, ())

    def validate(self, task: EvaluationTask) -> ValidationResult:
        """Return the loss of the first rows of each held-out set."""
        return HeldOutLoss(losses={name: self._loss(rows[: task.max_prompts]) for name, rows in self._held_out.items()})

    def _loss(self, numbers: range) -> tuple[float, int]:
        uids = new_group_ids(len(numbers))
        groups = [GroupRequest(uid=uid, prompt=number, seed=0) for uid, number in zip(uids, numbers, strict=True)]
        with open_step(self._client, HELD_OUT, keys_of_groups(uids, 1)):
            first, *others = [
                pending.result() for pending in self.submit_groups(groups, version=None, partition_id=HELD_OUT)
            ]
            meta = first.concat(*others).meta
            plan = plan_rows(meta.sequence_lengths or (), self._settings, layout=self._policy.layout)
            scored = self._policy.get_logprobs_from_meta(meta, plan)
            found = self._policy.submit_map_rows(scored, plan, TokenLoss(), stage=RowPass.MEASURE).result().by_row()
        self._policy.run(ask(TQWorker.end_step), "validation")
        # Sums of floats that do not depend on which rank has which row.
        total, tokens = math.fsum(found["loss"].tolist()), int(found["tokens"].sum())
        return total / max(1, tokens), tokens


def finished_rows(
    config: MasterConfig,
    processes: RunProcesses,
    policy: TQPolicy,
    client: DataPlaneClient,
    columns: tuple[StageColumns, ...],
    *,
    report: Callable[[str], None],
) -> RowParts:
    """Return the parts of a supervised run that stand where those of rollouts are in GRPO.

    Args:
        columns: of the stages of a step.
        report: gets lines for the person at the terminal.
    """
    timeout_s = config.cluster.stage_timeout_s
    rollout = FinishedHandle(processes.rollout, timeout_s=timeout_s, report=report)
    rollout.setup_data_plane(client.address)
    rollout.measure_with(policy, config.policy, client, columns)
    weight_sync = NoEngines(processes.policy, timeout_s=timeout_s)
    return RowParts(rollout=rollout, weight_sync=weight_sync, step_metrics=supervised_metrics)


class NoEngines(WeightSync):
    """The refit of a run without engines: it counts versions."""

    def __init__(self, policy: WorkerGroup, *, timeout_s: float) -> None:
        super().__init__(RefitParties(policy=policy, engines=WorkerFleet([]), timeout_s=timeout_s))

    def sync(self, version: int) -> None:
        """Note that the policy has this version."""
        self._version = self._last_version = version

    def _move(self, plan: RefitPlan, all_sent: Callable[[], None], to: Collection[int], version: int) -> dict[int, int]:
        raise AssertionError("there is no engine to move weights to")


def supervised_metrics(step: StepState) -> dict[str, float]:
    """Return the metrics of a step, without those of rewards and samplers."""
    found = step_metrics(step)
    return {name: found[name] for name in found if not (name.startswith(SAMPLERS) or name.endswith(REWARDS))}
