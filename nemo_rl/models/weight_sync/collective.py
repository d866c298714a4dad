"""Refit by broadcast: policy rank 0 and all engines are one process group, and every bucket goes to all at once.

Invariant: both sides are called at the same time, and when either fails the error that caused it is raised.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from nemo_rl.distributed.calls import ask
from nemo_rl.models.policy.workers.policy_worker import PolicyWorker
from nemo_rl.models.weight_sync.base import RefitParties, WeightSync
from nemo_rl.models.weight_sync.buckets import RefitPlan
from nemo_rl.models.weight_sync.refit_group import RefitGroupSpec
from nemo_rl.models.weight_sync.target import RefitTarget

__all__ = ["BroadcastWeightSync", "choose_backend"]

LOST = "lost the others"
"""In the text of an error that another member's failure causes."""


class BroadcastWeightSync(WeightSync):
    """The group is made at the first sync and lives as long as its members; when one was replaced, it is made anew.

    Args:
        address: of the machine of policy rank 0, as the engines reach it.
    """

    def __init__(self, parties: RefitParties, *, address: str) -> None:
        super().__init__(parties)
        self._address = address
        self._members: Mapping[int, int] = {}

    def _negotiate(self) -> RefitPlan:
        members = self._parties.engines.births
        if members != self._members:
            self.buffer_is_on_device = self._join() == "nccl"
            self._members = members
        return super()._negotiate()

    def _move(self, plan: RefitPlan, all_sent: Callable[[], None]) -> None:
        parties = self._parties
        parties.run_policy(ask(PolicyWorker.begin_refit, plan=plan, on_device=self.buffer_is_on_device))
        parties.run_engines(ask(RefitTarget.begin_refit, plan=plan))
        _both(
            lambda: parties.run_policy(ask(PolicyWorker.broadcast_weights)),
            lambda: parties.run_engines(ask(RefitTarget.receive_weights)),
        )
        all_sent()

    def _join(self) -> str:
        parties = self._parties
        sender = parties.run_policy(ask(PolicyWorker.report_device_id), ranks=[0])
        devices = parties.run_engines(ask(RefitTarget.report_device_id))
        backend = choose_backend([*sender, *devices.values()])
        world_size = 1 + len(devices)
        opening = ask(
            PolicyWorker.open_refit_store, address=self._address, world_size=world_size, timeout_s=parties.timeout_s
        )
        port = parties.run_policy(opening, ranks=[0])[0]

        def member(rank: int) -> RefitGroupSpec:
            return RefitGroupSpec(
                address=self._address,
                port=port,
                rank=rank,
                world_size=world_size,
                backend=backend,
                timeout_s=parties.timeout_s,
            )

        engines = {
            engine: ask(RefitTarget.join_refit_group, spec=member(1 + place)) for place, engine in enumerate(devices)
        }
        _both(
            lambda: parties.run_policy(ask(PolicyWorker.join_refit_group, spec=member(0)), ranks=[0]),
            lambda: parties.run_engines(engines),
        )
        return backend


def choose_backend(devices: Sequence[str]) -> str:
    """`nccl` where every member has a GPU of its own, which NCCL wants; else `gloo` over CPU buffers."""
    is_distinct = len(set(devices)) == len(devices)
    return "nccl" if is_distinct and all(device.startswith("GPU-") for device in devices) else "gloo"


def _both(send: Callable[[], object], receive: Callable[[], object]) -> None:
    """Runs both sides at once; of two failures raises the one that is not the other's consequence."""
    with ThreadPoolExecutor(max_workers=2, thread_name_prefix="refit") as pool:
        sides = [pool.submit(send), pool.submit(receive)]
        failures = [error for error in (side.exception() for side in sides) if error is not None]
    causes = [error for error in failures if LOST not in str(error)]
    for error in causes or failures:
        raise error
