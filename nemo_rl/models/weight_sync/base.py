"""`WeightSync`: what every transport of a refit has in common, seen from the driver.

The trainer calls `sync` after each optimizer update. Invariant: when `sync` returns, every engine samples from exactly
this version; an engine that reports another one stops the run. Engines that were lost are replaced here.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from nemo_rl.distributed.calls import Call, Pending, Request, ask
from nemo_rl.distributed.worker_fleet import WorkerFleet
from nemo_rl.distributed.worker_groups import WorkerGroup
from nemo_rl.errors import WorkerError, WorkerLost
from nemo_rl.models.generation.interfaces import EngineLoad, GenerationInterface
from nemo_rl.models.policy.workers.policy_worker import PolicyWorker
from nemo_rl.models.weight_sync.buckets import MAX_BUCKET_BYTES, RefitPlan, bucket_bytes
from nemo_rl.models.weight_sync.delta_buckets import DeltaSchedule
from nemo_rl.models.weight_sync.receipt import Receipt, ReceiptSpec, RefitReport, Sent
from nemo_rl.models.weight_sync.receipt.check import Receipts
from nemo_rl.models.weight_sync.target import RefitTarget

__all__ = ["RefitParties", "WeightSync"]

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

STAGE = "refit"
MOST_REFITS = 3
"""Refits to one version that may lose all engines; the last one ends the run."""
MIB = 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class RefitParties:
    """The workers and engines of a refit, and the memory that it may use."""

    policy: WorkerGroup
    engines: WorkerFleet
    timeout_s: float
    """Deadline of each call."""
    buffer_ratio: float = 0.3
    """Most of the free memory that a buffer takes."""
    max_bucket_bytes: int = MAX_BUCKET_BYTES
    """Most bytes of a bucket, however much memory is free."""
    delta_full_every: int | None = None
    """Number of refits of which one is whole, while the others send what has changed; None where all are whole."""
    on_new_engines: Callable[[WorkerFleet], None] | None = None
    """Told when engines were replaced, before anybody samples from them."""
    one_by_one: bool = False
    """True where an engine gets its weights while the others go on sampling, if the transport can do so."""
    receipt: ReceiptSpec | None = None
    """Settings of the proof of each refit, or None without one."""

    def run_policy(self, request: Request[_T], *, ranks: Sequence[int] | None = None) -> list[_T]:
        return self.submit_policy(request, ranks=ranks).result()

    def submit_policy(self, request: Request[_T], *, ranks: Sequence[int] | None = None) -> Pending[list[_T]]:
        """Submit a request to the policy's workers without waiting."""
        return self.policy.submit(Call(request=request, stage=STAGE, timeout_s=self.timeout_s, ranks=ranks))

    def run_engines(self, request: Request[_T] | Mapping[int, Request[_T]]) -> dict[int, _T]:
        """Return results by the number of the engine; one that is lost has none."""
        return self.engines.run(request, stage=STAGE, timeout_s=self.timeout_s)

    def run_engine(self, number: int, request: Request[_T]) -> _T:
        """Return the result of one engine.

        Raises:
            WorkerLost: it is lost, and the others go on.
        """
        return self.engines.run_one(number, Call(request=request, stage=STAGE, timeout_s=self.timeout_s))


class WeightSync(ABC):
    """Moves weights from a policy into generation engines."""

    buffer_is_on_device = False
    """True where buckets are on the workers' devices, else they are on the CPU."""

    def __init__(self, parties: RefitParties) -> None:
        self._parties = parties
        self._version = self._last_version = -1
        self._report: RefitReport | None = None
        self._deltas = None if parties.delta_full_every is None else DeltaSchedule(parties.delta_full_every)
        self._receipts = None if parties.receipt is None else Receipts(parties, parties.receipt)

    @property
    def version(self) -> int:
        """Return version in the engines; -1 before the first sync, and after one that failed."""
        return self._version

    @property
    def report(self) -> RefitReport | None:
        """Return the report of the last refit that succeeded."""
        return self._report

    def take_loads(self) -> dict[int, EngineLoad]:
        """Return what each engine has done since the last call, by its number."""
        return self._parties.run_engines(ask(GenerationInterface.take_load))

    def restart_engines(self) -> None:
        """Start engines in place of lost ones, and bring the weights of the last refit to all."""
        self.sync(self._last_version)

    def sync(self, version: int) -> None:
        """Move all weights, and check that every engine answers with `version`, and samples from them.

        Where engines get their weights one by one, others are started when all are lost meanwhile.

        Raises:
            WorkerError: an engine could not load the weights, or holds another version.
            RefitMismatch: an engine does not sample from them.
        """
        for attempt in range(1, MOST_REFITS + 1):
            try:
                self._sync(version)
                return
            except WorkerLost as error:
                if len(self._parties.engines) or not self._parties.one_by_one or attempt == MOST_REFITS:
                    raise
                logger.warning("all engines are lost in a refit, which is begun again: %s", error)

    def _sync(self, version: int) -> None:
        started, parties = time.monotonic(), self._parties
        before, self._version, self._last_version = self._version, -1, version
        is_rolling = self._is_rolling
        if not is_rolling:
            parties.run_engines(ask(GenerationInterface.finish_generation))
        replaced = parties.engines.restart_failed()
        parties.run_policy(ask(PolicyWorker.offload_before_refit))
        plan = self._with_delta(self._negotiate(), version, before=before)
        all_sent = partial(self._open_receipt, has_new_engines=bool(replaced))
        if is_rolling:
            held = self._roll(plan, all_sent, version)
        else:
            self._move(plan, all_sent)
            held = parties.run_engines(ask(RefitTarget.finish_refit, version=version))
        ended = parties.submit_policy(ask(PolicyWorker.end_refit))
        if self.buffer_is_on_device:
            # Engines may need this memory when they wake up.
            ended.result()
        wrong = {engine: got for engine, got in held.items() if got != version}
        if wrong:
            raise WorkerError(f"expected weight version {version} in every engine, got {wrong}", stage=STAGE)
        receipt = self._close_receipt(version, ended)
        sent = ended.result()[0].num_bytes
        parties.run_policy(ask(PolicyWorker.offload_after_refit))
        self._version = version
        if replaced and parties.on_new_engines is not None:
            parties.on_new_engines(parties.engines)
        seconds = time.monotonic() - started - (0.0 if receipt is None else receipt.seconds)
        self._report = RefitReport(
            version=version, ms=1e3 * seconds, bytes_dense=plan.num_bytes, bytes_sent=sent, receipt=receipt
        )
        logger.info(
            "refit to version %d: %.1f of %.1f MiB in %d buckets by %s, %.2f s",
            version,
            sent / MIB,
            plan.num_bytes / MIB,
            len(plan.buckets()),
            type(self).__name__,
            seconds,
        )

    @property
    def _is_rolling(self) -> bool:
        """True when engines get their weights one after the other."""
        return False

    def _roll(self, plan: RefitPlan, all_sent: Callable[[], None], version: int) -> dict[int, int]:
        """Bring every bucket into one engine after the other, each of which samples again before the next one stops.

        Returns:
            Number of each engine -> version that it holds.
        """
        raise NotImplementedError(f"{type(self).__name__} sends to all engines at once")

    @abstractmethod
    def _move(self, plan: RefitPlan, all_sent: Callable[[], None]) -> None:
        """Bring every bucket into every engine.

        Args:
            all_sent: to be called once, when the policy has nothing left to send; engines may still be loading.
        """

    def _open_receipt(self, *, has_new_engines: bool) -> None:
        if self._receipts is not None:
            self._receipts.open(has_new_engines=has_new_engines)

    def _close_receipt(self, version: int, ended: Pending[list[Sent]]) -> Receipt | None:
        """Make the engines ready to generate, and return their receipt where refits are proved."""
        if self._receipts is not None:
            return self._receipts.close(version, ended)
        self._parties.run_engines(ask(GenerationInterface.prepare_for_generation))
        return None

    def _with_delta(self, plan: RefitPlan, version: int, *, before: int) -> RefitPlan:
        """Return the plan, of what has changed since version `before` where that is to be trusted."""
        if self._deltas is None:
            return plan
        held = self._parties.run_engines(ask(RefitTarget.delta_base))
        incarnations = self._parties.engines.incarnations
        return replace(
            plan,
            delta=self._deltas.next(version, before=before, slots=plan.slots, incarnations=incarnations, held=held),
        )

    def _negotiate(self) -> RefitPlan:
        """Return the plan: names of the policy, dtypes of the engines, and portions that both can hold."""
        parties, on_device = self._parties, self.buffer_is_on_device
        infos = parties.run_policy(ask(PolicyWorker.prepare_refit_info), ranks=[0])[0]
        offered = {name: info.shape for name, info in infos.items()}
        answers = list(parties.run_engines(ask(RefitTarget.match_refit, offered=offered)).values())
        if len(set(answers)) > 1:
            raise WorkerError("the engines hold weights of different dtypes; start them from one config", stage=STAGE)
        free = [
            *parties.run_policy(ask(PolicyWorker.refit_free_bytes, on_device=on_device)),
            *parties.run_engines(ask(RefitTarget.refit_free_bytes, on_device=on_device)).values(),
        ]
        size = bucket_bytes(answers[0], free=min(free), ratio=parties.buffer_ratio, most=parties.max_bucket_bytes)
        return RefitPlan(slots=answers[0], bucket_bytes=size)
