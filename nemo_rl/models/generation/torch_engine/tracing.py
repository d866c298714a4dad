"""`EngineTracing`: what the embedded engine shows to the tracer's hub of its decoding; a part of `TorchEngine`.

The driver says which step begins and what is watched in it, before the rollout of the step, and asks only where a watch
names the phase `generation`. One step is one phase, whatever the number of requests. Invariant: without a `TraceSpec`
nothing is shown, and whatever becomes of the hub, the same tokens are sampled.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count

from transformers import PreTrainedModel

from nemo_rl.models.generation.interfaces import traced_row
from nemo_rl.models.generation.torch_engine.sites import NO_SITES, ObservedRequest, RequestSites
from nemo_rl.models.hf_sites import HFSites
from nemo_rl.models.policy.tracing import GroupPlace, TracedPhases, TraceSink, TraceSpec
from nemo_rl.records.sites import SiteKind
from nemo_rl.tracer.link import Gathered
from nemo_rl.tracer.protocol import Group
from nemo_rl.tracer.watch import GENERATION

__all__ = ["NO_TRACING", "DecodeTracing", "EngineTracing"]

NOT_IN_DECODING = "decoding computes no loss and no gradients, and takes log-probabilities of what it draws alone"


class EngineTracing:
    """Shows nothing."""

    def begin(self, step: int, *, watches: Sequence[str], keys: Sequence[str]) -> None:
        """The requests that follow belong to this step.

        Args:
            watches: texts of a `Plan`.
            keys: rows whose tokens are shown one by one, as `traced_row` names them.
        """

    def end(self) -> None:
        """No request of the step follows. Idempotent."""

    def close(self) -> None:
        """Sends what waits, within a deadline. Idempotent."""

    @contextmanager
    def request(self, num_rows: int) -> Iterator[ObservedRequest]:
        """Around one request of so many rows; an error inside it ends the step."""
        yield NO_SITES


NO_TRACING = EngineTracing()


class DecodeTracing(EngineTracing):
    """Shows the sites of a model.

    Args:
        number: of the engine.
        num_engines: of the run.
    """

    def __init__(self, spec: TraceSpec, model: PreTrainedModel, *, number: int, num_engines: int) -> None:
        sites = HFSites(model)
        sites.cannot(
            NOT_IN_DECODING, SiteKind.LOGPROB, SiteKind.TOKEN_LOSS, SiteKind.LOSS, SiteKind.GRAD, SiteKind.PARAM
        )
        self._taps, self._number = tuple(sites.taps), number
        place = GroupPlace(group=Group.GENERATION, rank=number, world=num_engines, axes={"engine": number})
        self._phases = TracedPhases(spec, place, unobserved=sites.unobserved)
        self._sink: TraceSink | None = None
        self._gathered = Gathered(self._phases.link, name="")
        self._num_rows, self._numbers = 0, count()
        """Of the requests of the step so far, and of their tables of tokens."""

    def begin(self, step: int, *, watches: Sequence[str], keys: Sequence[str]) -> None:
        """As in `EngineTracing`."""
        self.end()
        self._phases.begin(step, watches=watches, keys=keys)
        self._gathered = Gathered(self._phases.link, name=f"{step}.{GENERATION}")
        self._sink = self._phases.begin_phase(GENERATION, outlet=self._gathered)
        self._num_rows, self._numbers = 0, count()

    def end(self) -> None:
        """As in `EngineTracing`."""
        if self._sink is not None:
            self._gathered.flush()
            self._phases.end_phase(GENERATION)
        self._sink = None
        self._phases.end()

    def close(self) -> None:
        """As in `EngineTracing`."""
        self.end()
        self._phases.close()

    @contextmanager
    def request(self, num_rows: int) -> Iterator[ObservedRequest]:
        """As in `EngineTracing`. Rows are numbered through all requests of a step."""
        if self._sink is None:
            yield NO_SITES
            return
        first, self._num_rows = self._num_rows, self._num_rows + num_rows
        sites = RequestSites(
            self._taps,
            self._sink,
            phase=GENERATION,
            name_of=lambda row: traced_row(self._number, first + row),
            numbers=self._numbers,
            between_passes=self._gathered.between_passes,
        )
        try:
            with sites.attached():
                yield sites
        except BaseException:
            # The run ends with this error: what was seen up to it says where it came from.
            self.end()
            raise
