"""`RolloutHandle`: the driver's side of the rollout workers, one or several.

Every call of the driver to a `RolloutWorker` goes through it. Invariant: numbers of prompts, metas and per-row scalars
pass here, never a token.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from pathlib import Path
from threading import RLock, Thread
from typing import TypeVar, cast

from nemo_rl.config.data_plane import DurableConfig
from nemo_rl.data_plane.address import DataPlaneAddress
from nemo_rl.data_plane.chunks.wire import message_bytes
from nemo_rl.data_plane.client.operation_counts import Totals
from nemo_rl.data_plane.interfaces import KVBatchMeta, Tags
from nemo_rl.distributed.abort import RootCause
from nemo_rl.distributed.worker_groups import Call, Pending, Request, WorkerFleet, ask
from nemo_rl.errors import WorkerError, WorkerLate, WorkerLost
from nemo_rl.experience.evaluation.evaluator import EvaluationTask, ValidationResult
from nemo_rl.experience.rollout_records import GroupRequest, RolloutInfo, RolloutResult
from nemo_rl.experience.rollout_worker import RolloutWorker

__all__ = ["RolloutHandle"]

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

KNOWN_VERSIONS = 64
"""Weights whose digests are kept: more than any row may be behind."""
MOST_ATTEMPTS = 3
"""Times that a call is made which loses its worker, where lost workers are replaced."""


class RolloutHandle:
    """The driver's side of the rollout workers, one or several; all of them hold the same prompts.

    Args:
        workers: each a `RolloutWorker`. What needs one of them is asked of the first that is there.
        timeout_s: deadline of one stage.
        report: gets lines for the person at the terminal.
        waits: whether `submit_groups` may sample in the calling thread, where the worker is in this process.
    """

    def __init__(
        self, workers: WorkerFleet, *, timeout_s: float, report: Callable[[str], None], waits: bool = True
    ) -> None:
        self._workers, self._timeout_s, self._report, self._waits = workers, timeout_s, report, waits
        self._address: DataPlaneAddress | None = None
        self._engines: WorkerFleet | None = None
        self._durable: tuple[DurableConfig, str] | None = None
        self.weights: dict[int, str] = {}
        """Version -> digest of the last weights of the engines, where finished groups are kept in files."""
        self._replacing = RLock()
        """Held while lost workers are replaced, so that nobody is asked who is not set up."""
        self._next = 0
        """Counts parts of `submit_groups`: workers take turns."""
        self.driver_bytes = 0
        """Bytes of prompt numbers, metas and row scalars that this driver has sent or received so far."""

    def describe(self) -> RolloutInfo:
        return self._run(ask(RolloutWorker.describe), "rollout setup")

    def setup_data_plane(self, address: DataPlaneAddress) -> None:
        self._address = address
        self._run_all(ask(RolloutWorker.setup_data_plane, address=address), "data plane setup")

    def open_durable(self, config: DurableConfig, identity: str) -> None:
        """Keep finished groups in files, and use those that are there; see `DurableGroups`."""
        self._durable = config, identity
        self._run_all(ask(RolloutWorker.open_durable, config=config, identity=identity), "data plane setup")

    def know_weights(self, weights: Mapping[int, str]) -> None:
        """Tell the digests of weights by version; without files of finished groups nothing is done."""
        if self._durable is None:
            return
        self.weights = dict(sorted({**self.weights, **weights}.items())[-KNOWN_VERSIONS:])
        self._run_all(ask(RolloutWorker.know_weights, weights=dict(weights)), "refit")

    def settle_durable(self, below: int, done: Sequence[int] = ()) -> None:
        """Forget stored groups that nobody asks for any more; see `DurableGroups.settle`."""
        if self._durable is not None:
            self._run_all(ask(RolloutWorker.settle_durable, below=below, done=list(done)), "durable groups")

    def remove_durable(self) -> None:
        """Remove the files of finished groups: the run is done."""
        if self._durable is not None:
            self._durable = None
            self._run_all(ask(RolloutWorker.remove_durable), "durable groups")

    def durable_ordinals(self) -> dict[int, int]:
        """Return the ordinals of stored groups with the oldest version of their weights."""
        return {} if self._durable is None else self._run(ask(RolloutWorker.durable_ordinals), "resume")

    def restore_groups(self, groups: Sequence[GroupRequest], *, partition_id: str) -> list[RolloutResult]:
        """Put stored groups into the data plane; return the rows of those that there are."""
        request = ask(RolloutWorker.restore_groups, groups=list(groups), partition_id=partition_id)
        return self._run(request, "resume")[0]

    def use_engines(self, engines: WorkerFleet) -> None:
        """Use these engines from here on; see `RolloutWorker.use_engines`."""
        self._engines = engines
        self._run_all(ask(RolloutWorker.use_engines, engines=engines.copy()), "refit")

    def replace_lost(self) -> tuple[int, ...]:
        """Start workers anew that were lost; return their numbers. Groups that these had are lost with them."""
        with self._replacing:
            started = self._workers.restart_failed()
            for number in started:
                assert self._address is not None, "setup_data_plane comes first"
                try:
                    self._run_one(
                        number, ask(RolloutWorker.setup_data_plane, address=self._address), "data plane setup"
                    )
                    if self._durable is not None:
                        config, identity = self._durable
                        opened = ask(RolloutWorker.open_durable, config=config, identity=identity)
                        self._run_one(number, opened, "data plane setup")
                        known = ask(RolloutWorker.know_weights, weights=self.weights)
                        self._run_one(number, known, "data plane setup")
                    if self._engines is not None:
                        self._run_one(number, ask(RolloutWorker.use_engines, engines=self._engines.copy()), "refit")
                except WorkerLost as error:
                    logger.warning("rollout worker %d is lost again: %s", number, error)
        return started

    def submit_groups(
        self, groups: Sequence[GroupRequest], *, version: int | None, partition_id: str, engine: int | None = None
    ) -> list[Pending[RolloutResult]]:
        """Have groups sampled, scored and written; the result of each is there when its rows are in the data plane.

        Groups of one call share batches of the engines, and which they share depends on the call alone. Where the
        driver waits for a step, all workers do their parts of it: bits are equal whatever their number. Version and
        engine are as in `RolloutWorker.rollout`.
        """
        futures, numbers = {group.uid: Future[RolloutResult]() for group in groups}, self._numbers("rollout")
        if not self._waits or engine is not None:
            # Steps that are sampled ahead have several calls at a time: workers take turns.
            numbers, self._next = (numbers[self._next % len(numbers)],), self._next + 1
        running = set(numbers)

        def receive(number: int, call: Call[Iterator[tuple[RolloutResult, ...] | RootCause]]) -> None:
            try:
                for results in self._workers.stream_one(number, call):
                    if isinstance(results, RootCause):
                        raise results.to_error()
                    for result in results:
                        futures[result.group_uids[0]].set_result(result)
                running.discard(number)
                if not running:
                    raise WorkerError("the group was aborted", stage="rollout")
            except Exception as error:  # noqa: BLE001 - raised by the results that have not come
                for future in futures.values():
                    with suppress(InvalidStateError):
                        future.set_exception(error)

        for place, number in enumerate(numbers):
            request = ask(
                RolloutWorker.rollout,
                groups=list(groups),
                version=version,
                partition_id=partition_id,
                engine=engine,
                share=(place, len(numbers)),
            )
            call = Call(request=request, stage="rollout", timeout_s=self._timeout_s)
            if self._waits and self._workers.is_local(number):
                receive(number, call)
            else:
                Thread(target=receive, args=(number, call), name="rollout results", daemon=True).start()
            self.driver_bytes += message_bytes(groups)
        return [self._pending(future) for future in futures.values()]

    def submit_group(self, group: GroupRequest, *, version: int | None, partition_id: str) -> Pending[RolloutResult]:
        """Have one group sampled by itself; see `submit_groups`."""
        return self.submit_groups([group], version=version, partition_id=partition_id)[0]

    def abort(self, names: Sequence[str], *, timeout_s: float | None = None) -> None:
        """Take running groups out of the engines; see `RolloutWorker.abort`.

        Args:
            timeout_s: None: that of a stage.

        Raises:
            WorkerLate: lost workers are still being replaced then.
        """
        limit_s = timeout_s or self._timeout_s
        if not self._replacing.acquire(timeout=limit_s):
            raise WorkerLate(f"no worker took it within {limit_s:g} s: lost ones are being replaced", stage="rollout")
        numbers = self._workers.numbers
        self._replacing.release()
        # The groups of lost workers are lost with them.
        if numbers:
            request = ask(RolloutWorker.abort, names=tuple(names))
            self._workers.run_one(numbers[0], Call(request=request, stage="rollout", timeout_s=limit_s))

    def waiting(self, names: Sequence[str]) -> list[str]:
        """Return what conversations of running groups wait for; see `RolloutWorker.waiting`."""
        found = self._run_all(ask(RolloutWorker.waiting, names=tuple(names)), "rollout")
        return [text for texts in found.values() for text in texts]

    def _pending(self, future: Future[RolloutResult]) -> Pending[RolloutResult]:
        def result() -> RolloutResult:
            found = future.result()
            self.driver_bytes += message_bytes(found)
            self._show(found.printed)
            return found

        return Pending(result, ready=lambda: cast("Future[None]", future))

    def validate(self, task: EvaluationTask) -> ValidationResult:
        """Measures the held-out prompts; see `RolloutWorker.validate`."""
        result = self._run(ask(RolloutWorker.validate, task=task), "validation")
        self._show(result.printed)
        return result

    def begin_validation(self, task: EvaluationTask) -> Pending[ValidationResult]:
        """Measure the held-out prompts beside everything else that the worker does."""
        future, numbers = Future[ValidationResult](), self._numbers("validation")
        request = ask(RolloutWorker.validate_apart, task=task)
        call = Call(request=request, stage="validation", timeout_s=self._timeout_s)

        def receive() -> None:
            try:
                future.set_result(next(self._workers.stream_one(numbers[0], call)))
            except Exception as error:  # noqa: BLE001 - raised by the result
                future.set_exception(error)

        def result() -> ValidationResult:
            found = future.result()
            self._show(found.printed)
            return found

        Thread(target=receive, name="validation", daemon=True).start()
        return Pending(result, ready=lambda: cast("Future[None]", future))

    def submit_log_rollouts(
        self, meta: KVBatchMeta, *, scored: KVBatchMeta | None, path: Path, records: Sequence[Mapping[str, object]]
    ) -> Pending[None]:
        """Writes rows for people; see `RolloutWorker.log_rollouts`."""
        self.driver_bytes += message_bytes((meta, scored, records))
        request = ask(RolloutWorker.log_rollouts, meta=meta, scored=scored, path=path, records=records)
        return self._submit(request, "log")

    def submit_keep_columns(self, meta: KVBatchMeta, *, fields: Sequence[str], path: Path) -> Pending[int]:
        """Writes columns to a file; see `RolloutWorker.keep_columns`."""
        return self._submit(ask(RolloutWorker.keep_columns, meta=meta, fields=list(fields), path=path), "keep")

    def submit_keep_conversations(self, meta: KVBatchMeta, *, path: Path) -> Pending[int]:
        """Write the replies of conversations to a file; see `RolloutWorker.keep_conversations`."""
        return self._submit(ask(RolloutWorker.keep_conversations, meta=meta, path=path), "keep")

    def restore_columns(
        self, keys: Sequence[str], *, partition_id: str, tags: Sequence[Tags], path: Path
    ) -> KVBatchMeta:
        """Write rows of a file under new keys; see `RolloutWorker.restore_columns`."""
        request = ask(
            RolloutWorker.restore_columns, keys=list(keys), partition_id=partition_id, tags=list(tags), path=path
        )
        return self._run(request, "resume")

    def data_plane_snapshots(self) -> list[Totals]:
        """Return the counters of each worker's client since the last call."""
        return list(self._run_all(ask(RolloutWorker.data_plane_snapshot), "metrics").values())

    def shutdown(self) -> None:
        self._workers.shutdown()

    def _run(self, request: Request[_T], stage: str) -> _T:
        return self._submit(request, stage).result()

    def _run_all(self, request: Request[_T], stage: str) -> dict[int, _T]:
        def run() -> dict[int, _T]:
            with self._replacing:
                return self._workers.run(request, stage=stage, timeout_s=self._timeout_s)

        return self._surviving(run)

    def _run_one(self, number: int, request: Request[_T], stage: str) -> _T:
        return self._workers.run_one(number, Call(request=request, stage=stage, timeout_s=self._timeout_s))

    def _show(self, lines: Sequence[str]) -> None:
        for line in lines:
            self._report(f"reward: {line}")

    def _submit(self, request: Request[_T], stage: str) -> Pending[_T]:
        """Ask the first worker that is there; another one where it is lost meanwhile and may be replaced."""
        call = Call(request=request, stage=stage, timeout_s=self._timeout_s)

        def submit() -> Pending[_T]:
            return self._workers.submit_one(self._numbers(stage)[0], call)

        pending = [self._surviving(submit)]

        def result() -> _T:
            return (pending.pop() if pending else submit()).result()

        return pending[0].after(lambda: self._surviving(result))

    def _numbers(self, stage: str) -> tuple[int, ...]:
        """Return the numbers of the workers that are there, which is at least one."""
        with self._replacing:
            if not self._workers.numbers and not self._waits:
                self.replace_lost()
            numbers = self._workers.numbers
        if not numbers:
            raise self._workers.none_left(stage)
        return numbers

    def _surviving(self, action: Callable[[], _T]) -> _T:
        """Return what the action returns; where lost workers are replaced it may be done again."""
        for attempt in range(1, MOST_ATTEMPTS + 1):
            try:
                return action()
            except WorkerLost:
                if self._waits or attempt == MOST_ATTEMPTS:
                    raise
                self.replace_lost()
        raise AssertionError("the last attempt returns or raises")
