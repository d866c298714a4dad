"""Refit on one node, bucket by bucket: through this run's object store, or through GPU memory that both sides share.

Invariant: a bucket is written only after every engine has read the one before it.
"""

from __future__ import annotations

from collections.abc import Callable

from nemo_rl.distributed.calls import Call, ask
from nemo_rl.errors import WorkerError
from nemo_rl.models.policy.workers.policy_worker import PolicyWorker
from nemo_rl.models.weight_sync.base import STAGE, WeightSync
from nemo_rl.models.weight_sync.buckets import RefitPlan
from nemo_rl.models.weight_sync.target import RefitTarget

__all__ = ["IpcWeightSync", "PayloadWeightSync"]


class PayloadWeightSync(WeightSync):
    """Buckets are objects of the run: Ray's store keeps them once per node, in one process they are handed over."""

    def _move(self, plan: RefitPlan, all_sent: Callable[[], None]) -> None:
        parties = self._parties
        num_buckets = parties.run_policy(ask(PolicyWorker.begin_refit, plan=plan, on_device=False))[0]
        parties.run_engines(ask(RefitTarget.begin_refit, plan=plan))
        for number in range(1, num_buckets + 1):
            call = Call(request=ask(PolicyWorker.next_bucket), stage=STAGE, timeout_s=parties.timeout_s)
            bucket = parties.policy.run_for_payload(call)
            if number == num_buckets:
                all_sent()
            parties.run_engines(ask(RefitTarget.load_bucket, bucket=bucket.stand_in()))


class IpcWeightSync(WeightSync):
    """Buckets stay on the GPU: each engine reads those of the policy worker on its own GPU by a CUDA-IPC handle."""

    buffer_is_on_device = True

    def _move(self, plan: RefitPlan, all_sent: Callable[[], None]) -> None:
        parties = self._parties
        num_buckets = parties.run_policy(ask(PolicyWorker.begin_refit, plan=plan, on_device=True))[0]
        by_device = {handle.device_id: handle for handle in parties.run_policy(ask(PolicyWorker.share_refit_buffer))}
        devices = parties.run_engines(ask(RefitTarget.report_device_id))
        alone = [f"engine {engine} on {device}" for engine, device in devices.items() if device not in by_device]
        if alone:
            raise WorkerError(
                f"no policy worker shares a GPU with {', '.join(alone)}; set policy.generation.refit_transport=payload",
                stage=STAGE,
            )
        parties.run_engines(
            {
                engine: ask(RefitTarget.begin_refit, plan=plan, handle=by_device[device])
                for engine, device in devices.items()
            }
        )
        for number in range(1, num_buckets + 1):
            parties.run_policy(ask(PolicyWorker.fill_bucket))
            if number == num_buckets:
                all_sent()
            parties.run_engines(ask(RefitTarget.load_bucket))
