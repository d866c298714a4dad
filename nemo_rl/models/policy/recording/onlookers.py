"""`Onlookers`: who looks on at the passes of a worker, brought together so that every site is reached once.

A part of the worker. Invariant: where nobody keeps anything of a call, no hook exists.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.worker_pass import WorkerPass
from nemo_rl.models.policy.recording.observer import NO_OBSERVER, PassObserver
from nemo_rl.models.policy.recording.sight import SiteSink
from nemo_rl.models.policy.recording.site_observer import SiteObserver
from nemo_rl.models.policy.recording.taps import Taps
from nemo_rl.models.policy.steps import row_names

__all__ = ["NO_ONLOOKERS", "Onlooker", "Onlookers"]


class Onlooker(Protocol):
    """Keeps something of some calls."""

    def begin_call(self, phase: WorkerPass) -> SiteSink | None:
        """What sees the sites of the call that begins; None: nothing is kept of it."""

    def end_call(self, phase: WorkerPass) -> None:
        """The call that a sink was made for has ended, also by an error."""


class Onlookers:
    """All of one rank.

    Args:
        taps: the sites of the model; None where nobody looks on.
    """

    def __init__(self, taps: Taps | None = None, onlookers: Sequence[Onlooker] = ()) -> None:
        self._taps, self._onlookers = taps, tuple(onlookers)

    @contextmanager
    def phase(self, phase: WorkerPass, batch: BatchedDataDict) -> Iterator[PassObserver]:
        """Around the passes of one call."""
        sinks = {one: sink for one in self._onlookers if (sink := one.begin_call(phase)) is not None}
        if self._taps is None or not sinks:
            yield NO_OBSERVER
            return
        keys = row_names(batch, range(batch.size))
        observer = SiteObserver(self._taps, tuple(sinks.values()), phase=phase.value, keys=keys)
        try:
            with observer.attached():
                yield observer
        finally:
            for one in sinks:
                one.end_call(phase)


NO_ONLOOKERS = Onlookers()
