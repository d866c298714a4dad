"""`WeightSync`: what every transport of a refit has in common, seen from the driver.

The trainer calls `sync` after each optimizer update. Invariant: when `sync` returns, every row that begins is sampled
from exactly this version; an engine that reports another one stops the run. Engines that were lost are replaced here.
Where engines serve adapters, frozen weights go once to each, and an adapter goes beside the one in use, which is left
only when all engines have got the next one and hold what was sent.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, TypeVar

from nemo_rl.config.generation import KEEPS_WEIGHTS
from nemo_rl.distributed.worker_groups import Call, Pending, Request, WorkerFleet, WorkerGroup, ask
from nemo_rl.errors import WorkerError, WorkerLost
from nemo_rl.models.generation.interfaces import BASE, EngineLoad, GenerationInterface
from nemo_rl.models.policy.workers.policy_worker import PolicyWorker
from nemo_rl.models.weight_sync.buckets import RefitPlan, bucket_bytes, most_bucket_bytes
from nemo_rl.models.weight_sync.delta_buckets import DeltaSchedule
from nemo_rl.models.weight_sync.receipt import Receipt, ReceiptSpec, RefitReport, Sent
from nemo_rl.models.weight_sync.receipt.check import Receipts
from nemo_rl.models.weight_sync.target import AcceptedRefit, RefitTarget

__all__ = ["RefitParties", "WeightSync"]

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

STAGE = "refit"
MOST_REFITS = 3
"""Refits to one version that may lose all engines; the last one ends the run."""
MOST_MERGE_LOSS = 0.1
"""Share of an adapter above which its loss in the engines' dtype is worth a warning."""
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
    max_bucket_bytes: int | None = None
    """Most bytes of a bucket, however much memory is free; None: `most_bucket_bytes`."""
    delta_full_every: int | None = None
    """Number of refits of which one is whole, while the others send what has changed; None where all are whole."""
    on_new_engines: Callable[[WorkerFleet], None] | None = None
    """Told when engines were replaced, before anybody samples from them."""
    one_by_one: bool = False
    """True where an engine gets its weights while the others go on sampling, if the transport can do so."""
    receipt: ReceiptSpec | None = None
    """Settings of the proof of each refit, or None without one."""
    sends_adapters: bool = False
    """True where engines hold the frozen weights, and a refit brings an adapter."""
    sleep_level: int = 0
    """Level at which engines sleep while the policy trains; 0: they keep their memory."""
    rows_finish: bool = False
    """True where running rows go on with the adapter that they began with, so that no engine stands still for another
    one."""

    def run_policy(
        self, request: Request[_T] | Sequence[Request[_T]], *, ranks: Sequence[int] | None = None
    ) -> list[_T]:
        return self.submit_policy(request, ranks=ranks).result()

    def submit_policy(
        self, request: Request[_T] | Sequence[Request[_T]], *, ranks: Sequence[int] | None = None
    ) -> Pending[list[_T]]:
        """Submit a request to the policy's workers, or one for each rank, without waiting."""
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
    num_slots = 1
    """Buckets that a buffer holds."""
    sends_to_all = False
    """True where a bucket goes to all engines or to none."""

    def __init__(self, parties: RefitParties) -> None:
        self._parties = parties
        self.engines_sleep = parties.sleep_level > 0
        """True where engines free their memory while the policy trains."""
        self._version = self._last_version = -1
        self._report: RefitReport | None = None
        self._deltas = None if parties.delta_full_every is None else DeltaSchedule(parties.delta_full_every)
        self._receipts = None if parties.receipt is None else Receipts(parties, parties.receipt)
        self._with_base: Mapping[int, int] = {}
        """Number -> incarnation of the engines that have the frozen weights."""
        self._warns_of_loss = True
        self._accepted: Mapping[int, AcceptedRefit] = {}
        self._asked: object = None
        """The offer that engines have accepted last, and their incarnations."""
        self._is_settled = False
        """False from an offer to the end of its refit."""
        self._is_asleep = False

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

    def sleep_engines(self) -> None:
        """Let the engines free their memory for the policy, until the next refit; nothing may be sampling."""
        self._sleep(self._parties.sleep_level)

    @contextmanager
    def engines_aside(self) -> Iterator[None]:
        """Let the engines free their memory inside the block, and have the same weights behind it."""
        if self._parties.sleep_level:
            self._sleep(KEEPS_WEIGHTS)
        yield
        if self._parties.sleep_level:
            self._parties.run_engines(ask(GenerationInterface.prepare_for_generation))
            self._is_asleep = False

    def _sleep(self, level: int) -> None:
        self._is_asleep = True
        reports = self._parties.run_engines(ask(GenerationInterface.sleep, level=level))
        for engine, report in reports.items():
            for rank, change in enumerate(report.ranks):
                logger.info("engine %d, rank %d sleeps at level %d: %s", engine, rank, report.level, change)

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
        sync = self._sync_adapter if self._parties.sends_adapters else self._sync
        for attempt in range(1, MOST_REFITS + 1):
            try:
                sync(version)
                return
            except WorkerLost as error:
                if len(self._parties.engines) or not self._parties.one_by_one or attempt == MOST_REFITS:
                    raise
                logger.warning("all engines are lost in a refit, which is begun again: %s", error)

    def _sync(self, version: int) -> None:
        started, parties = time.monotonic(), self._parties
        before, self._version, self._last_version = self._version, -1, version
        is_rolling = self._is_rolling
        if not is_rolling and not self._is_asleep:
            parties.run_engines(ask(GenerationInterface.finish_generation))
        self._is_asleep = False
        replaced = self._restart_failed()
        parties.run_policy(ask(PolicyWorker.offload_before_refit))
        self._prepare()
        plan = self._with_delta(self._negotiate(), version, before=before)
        all_sent = partial(self._open_receipt, has_new_engines=bool(replaced))
        if is_rolling:
            held = self._roll(plan, all_sent, version)
        else:
            held = self._move(plan, all_sent, parties.engines.numbers, version)
        ended = parties.submit_policy(ask(PolicyWorker.end_refit)).then(partial(self._joined, plan))
        self._make_room(ended)
        _check_versions(held, version)
        receipt, sent = self._close_receipt(version, ended), ended.result()[0]
        report = RefitReport(
            version=version,
            ms=0.0,
            bytes_dense=plan.num_bytes,
            bytes_sent=sent.num_bytes,
            receipt=receipt,
            merge_loss=sent.merge_loss,
        )
        self._end(report, started, has_new_engines=bool(replaced))

    def _restart_failed(self) -> tuple[int, ...]:
        """Start engines in place of lost ones; where they take turns with the policy, it makes room for them first."""
        parties = self._parties
        if parties.sleep_level and len(parties.engines) < parties.engines.size:
            parties.run_policy(ask(PolicyWorker.offload_after_refit))
        return parties.engines.restart_failed()

    def _make_room(self, ended: Pending[list[Sent]]) -> None:
        """Wait where engines need the policy's memory for what they take when they are woken."""
        if self.buffer_is_on_device or self._parties.sleep_level:
            ended.result()
        if self._parties.sleep_level:
            # It has scored the rows of a receipt, which it was asked to before.
            self._parties.run_policy(ask(PolicyWorker.offload_after_refit))

    def _end(self, report: RefitReport, started: float, *, has_new_engines: bool) -> None:
        """Keep the report of a refit that succeeded, and its time."""
        parties = self._parties
        if not parties.sleep_level:
            parties.run_policy(ask(PolicyWorker.offload_after_refit))
        self._version, self._is_settled = report.version, True
        if has_new_engines and parties.on_new_engines is not None:
            parties.on_new_engines(parties.engines)
        seconds = time.monotonic() - started - (0.0 if report.receipt is None else report.receipt.seconds)
        self._report = replace(report, ms=1e3 * seconds)
        logger.info(
            "refit to version %d: %.1f of %.1f MiB by %s, %.2f s",
            report.version,
            report.bytes_sent / MIB,
            report.bytes_dense / MIB,
            type(self).__name__,
            seconds,
        )
        if self._warns_of_loss and (report.merge_loss or 0.0) > MOST_MERGE_LOSS:
            self._warns_of_loss = False
            logger.warning(
                "policy.lora.serve=merged: the engines' dtype loses %.0f %% of the adapter's change of the weights, so "
                "that rows are sampled from other weights than are trained; set policy.lora.serve=native, or "
                "policy.generation.precision=float32",
                100 * (report.merge_loss or 0.0),
            )

    def _sync_adapter(self, version: int) -> None:
        """Bring an adapter beside what the engines sample with; all of them change over when every one has got it."""
        started, parties = time.monotonic(), self._parties
        self._version, self._last_version = -1, version
        replaced = self._restart_failed()
        if not parties.one_by_one:
            # Frees what the engines keep between rollouts; others stand still for the change alone, if at all.
            parties.run_engines(ask(GenerationInterface.finish_generation))
        parties.run_policy(ask(PolicyWorker.offload_before_refit))
        self._prepare()
        base_bytes = self._send_base()
        plan = self._negotiate("adapter")
        all_sent = partial(self._open_receipt, has_new_engines=bool(replaced))
        _check_versions(self._move(plan, all_sent, parties.engines.numbers, version), version)
        ended = parties.submit_policy(ask(PolicyWorker.end_refit)).then(partial(self._joined, plan))
        self._make_room(ended)
        use = partial(self._use_adapter, version)
        if self._receipts is not None:
            receipt: Receipt | None = self._receipts.close_adapter(version, ended, use)
        else:
            receipt = use()
        held = parties.run_engines(ask(RefitTarget.adapter_versions))
        report = RefitReport(
            version=version,
            ms=0.0,
            bytes_dense=base_bytes + plan.num_bytes,
            bytes_sent=base_bytes + ended.result()[0].num_bytes,
            receipt=receipt,
            num_adapters=max(map(len, held.values())),
        )
        self._end(report, started, has_new_engines=bool(replaced))

    def _send_base(self) -> int:
        """Bring the frozen weights to engines that have not got them, and return their bytes."""
        parties = self._parties
        incarnations = parties.engines.incarnations
        without = [number for number, own in incarnations.items() if self._with_base.get(number) != own]
        if not without:
            return 0
        to = list(incarnations) if self.sends_to_all else without
        parties.run_engines(dict.fromkeys(to, ask(GenerationInterface.finish_generation)))
        plan = self._negotiate()
        self._move(plan, _nothing, to, BASE)
        sent = self._joined(plan, parties.run_policy(ask(PolicyWorker.end_refit)))[0]
        if self._receipts is not None:
            self._receipts.sent_base(sent)
        self._with_base = incarnations
        return sent.num_bytes

    def _use_adapter(self, version: int) -> None:
        """Let all engines change over, and be ready to generate."""
        parties = self._parties
        if not parties.rows_finish:
            parties.run_engines(ask(GenerationInterface.finish_generation))
        _check_versions(parties.run_engines(ask(RefitTarget.use_adapter, version=version)), version)
        parties.run_engines(ask(GenerationInterface.prepare_for_generation))

    @property
    def _is_rolling(self) -> bool:
        return False

    def _roll(self, plan: RefitPlan, all_sent: Callable[[], None], version: int) -> dict[int, int]:
        """Bring every bucket into one engine after the other, each of which samples again before the next one stops;
        return engine -> version that it holds."""
        raise NotImplementedError(f"{type(self).__name__} sends to all engines at once")

    def _prepare(self) -> None:  # noqa: B027 - most transports need nothing
        """Get ready to move: called before every negotiation of a refit."""

    @abstractmethod
    def _move(self, plan: RefitPlan, all_sent: Callable[[], None], to: Collection[int], version: int) -> dict[int, int]:
        """Bring every bucket into engines, and end the refit there; return engine -> version that it holds.

        Args:
            all_sent: to be called once, when the policy has nothing left to send; engines may still be loading.
            to: numbers of the engines; all of them where `sends_to_all`.
        """

    def _joined(self, plan: RefitPlan, sent: list[Sent]) -> list[Sent]:
        """Return what the policy has sent, the first one for all of its ranks."""
        return sent

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
        held = {number: accepted.delta_base for number, accepted in self._accepted.items()}
        incarnations = self._parties.engines.incarnations
        return replace(
            plan,
            delta=self._deltas.next(version, before=before, slots=plan.slots, incarnations=incarnations, held=held),
        )

    def _negotiate(self, kind: Literal["weights", "adapter"] = "weights") -> RefitPlan:
        """Return the plan: names of the policy, dtypes of the engines, and portions that both can hold."""
        parties, on_device = self._parties, self.buffer_is_on_device
        offers = parties.run_policy(ask(PolicyWorker.offer_refit, kind=kind, on_device=on_device))
        offered, _ = offers[0]
        asked = (kind, on_device, tuple(offered.items()), tuple(parties.engines.incarnations.items()))
        # Engines that sleep wake up for it, and what a delta builds on may have gone; else it is known after a refit.
        is_known = asked == self._asked and self._is_settled and kind == "weights"
        if not is_known or parties.sleep_level or self._deltas is not None:
            accept = ask(RefitTarget.accept_refit, offered=offered, kind=kind, on_device=on_device)
            self._accepted, self._asked = parties.run_engines(accept), asked
        self._is_settled = False
        answers = [accepted.slots for accepted in self._accepted.values()]
        if any(slots != answers[0] for slots in answers):
            raise WorkerError("the engines hold weights of different dtypes; start them from one config", stage=STAGE)
        size = bucket_bytes(
            answers[0],
            free=min(*(free for _, free in offers), *(accepted.free_bytes for accepted in self._accepted.values())),
            ratio=parties.buffer_ratio / self.num_slots,
            most=parties.max_bucket_bytes or most_bucket_bytes(on_device=on_device),
        )
        return RefitPlan(slots=answers[0], bucket_bytes=size, kind=kind)


def _check_versions(held: Mapping[int, int], version: int) -> None:
    wrong = {engine: got for engine, got in held.items() if got != version}
    if wrong:
        raise WorkerError(f"expected weight version {version} in every engine, got {wrong}", stage=STAGE)


def _nothing() -> None:
    """Open no receipt."""
