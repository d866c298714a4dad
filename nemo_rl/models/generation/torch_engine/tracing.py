"""The embedded engine is observed while it decodes: `DecodeTracing` shows it to the tracer's hub, `DecodeRecording`
writes it in the format of the workers' records. Both are parts of `TorchEngine`.

The driver says which step begins and what is watched in it, before the rollout of the step, and asks only where a watch
names the phase `generation`. One step is one phase, whatever the number of requests. Invariant: without a `TraceSpec`
nothing is shown, and whatever becomes of the hub, the same tokens are sampled; no hook outlives its block, and padding
is never shown. Rows count from 0 in the order of the request, positions from the start of the prompt. A prompt runs
once for all rows of a batch that have it: the first of these rows shows it, the others begin with their first response
token. Shapes: P distinct prompts, W their width, N rows of a batch, B live rows, R tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count

import torch
from transformers import PreTrainedModel

from nemo_rl.models.generation.interfaces import GenerationOutput, GenerationRequest, traced_row
from nemo_rl.models.generation.recording import NEVER_IN_DECODING, engine_manifest, response_rows, write_logprobs
from nemo_rl.models.generation.torch_engine.decode import NO_OBSERVER, DecodeObserver
from nemo_rl.models.hf.modules import HFSites
from nemo_rl.models.policy.hooks import HookPoint, TokenPositions
from nemo_rl.models.policy.observer import Capture, PassRows, SiteSink
from nemo_rl.models.policy.recording import RecordSpec, StepRecords
from nemo_rl.models.policy.tracing import TracedPhases, TraceSink, TraceSpec
from nemo_rl.records.record import RecordManifest, RecordPlace, TokenTable
from nemo_rl.records.sites import Direction, SiteKind
from nemo_rl.tracer.link import BufferedSender
from nemo_rl.tracer.protocol import RankGroup
from nemo_rl.tracer.watch import GENERATION

__all__ = ["NO_SITES", "DecodeRecording", "DecodeTracing", "ObservedRequest", "RequestSites"]


class ObservedRequest:
    """Tells all the observers of a request of its batches; without any nothing is kept of it."""

    def __init__(self, *observers: ObservedRequest) -> None:
        self._observers = observers

    def batch(self, rows: Sequence[int]) -> DecodeObserver:
        """Return the observer of a batch.

        Args:
            rows: number of each row of the batch in the request.
        """
        found = [one for each in self._observers if (one := each.batch(rows)) is not NO_OBSERVER]
        return _Observers(found) if found else NO_OBSERVER


NO_SITES = ObservedRequest()


class _Observers(DecodeObserver):
    def __init__(self, observers: Sequence[DecodeObserver]) -> None:
        self._observers = observers

    def prompts(self, ids_PW: torch.Tensor, mask_PW: torch.Tensor, row_slot_N: torch.Tensor) -> None:
        for observer in self._observers:
            observer.prompts(ids_PW, mask_PW, row_slot_N)

    def turn(self, token_B: torch.Tensor, live_B: torch.Tensor) -> None:
        for observer in self._observers:
            observer.turn(token_B, live_B)


@dataclass(frozen=True, kw_only=True, slots=True)
class _DecodePass:
    """The forward pass that runs, or is about to."""

    num_rows: int
    rows: Mapping[TokenPositions, PassRows]


class RequestSites(ObservedRequest):
    """Shows the sites of one request.

    Args:
        hook_points: of the model, all of it on this process.
        name_of: name of a row by its number in the request.
        numbers: of the tables of tokens; unique for the sink.
        between_passes: called before every forward pass.
    """

    def __init__(
        self,
        hook_points: Sequence[HookPoint],
        sink: SiteSink,
        *,
        phase: str,
        name_of: Callable[[int], str],
        numbers: Iterator[int],
        between_passes: Callable[[], None],
    ) -> None:
        self._hook_points, self._sink, self._phase = tuple(hook_points), sink, phase
        self._name_of, self._numbers, self._between_passes = name_of, numbers, between_passes
        self._current: _DecodePass | None = None

    @contextmanager
    def attached(self) -> Iterator[RequestSites]:
        """Surround the request: sites are reached inside, and nothing of that is left outside, also after an error."""
        with ExitStack() as stack:
            for hook_point in self._hook_points:
                if self._sink.takes(hook_point.kind, hook_point.layer, Direction.FORWARD):
                    stack.callback(hook_point.attach(self._deliver_to(hook_point)))
            try:
                yield self
            finally:
                self._current = None

    def batch(self, rows: Sequence[int]) -> DecodeObserver:
        return _BatchSites(self, tuple(map(self._name_of, rows)))

    def pass_follows(self, ids: torch.Tensor, *, every: PassRows, kept: PassRows) -> None:
        """Announce a pass: the hook points deliver tensors of these tokens from here on.

        Args:
            ids: `[n, s]` what is fed.
            every: the tokens of the pass.
            kept: those whose logits are computed.
        """
        self._between_passes()
        rows = {TokenPositions.ALL: every, TokenPositions.KEPT: kept}
        self._current = _DecodePass(num_rows=len(ids), rows=rows)
        if self._sink.takes(SiteKind.TOKENS, None, Direction.FORWARD):
            place = RecordPlace(kind=SiteKind.TOKENS, phase=self._phase)
            self._sink.see(Capture(place=place, value=ids, rows=every, is_first=True))

    def pass_rows(self, table: TokenTable, at: tuple[torch.Tensor, ...], *, is_whole: bool) -> PassRows:
        return PassRows(number=next(self._numbers), at=at, table=table, is_whole=is_whole)

    def _deliver_to(self, hook_point: HookPoint) -> Callable[[torch.Tensor], None]:
        place = RecordPlace(kind=hook_point.kind, layer=hook_point.layer, phase=self._phase)

        def deliver(value: torch.Tensor) -> None:
            current = self._current
            if current is not None:
                by_rows = hook_point.order.by_rows(value.detach(), current.num_rows)
                self._sink.see(Capture(place=place, value=by_rows, rows=current.rows[hook_point.tokens], is_first=True))

        return deliver


class _BatchSites(DecodeObserver):
    def __init__(self, sites: RequestSites, names: tuple[str, ...]) -> None:
        self._sites, self._names = sites, names
        self._next_N = torch.empty(0)
        """Position of the next token of each row."""

    def prompts(self, ids_PW: torch.Tensor, mask_PW: torch.Tensor, row_slot_N: torch.Tensor) -> None:
        ids_PW, slots = ids_PW.cpu(), row_slot_N.tolist()
        is_token_PW = mask_PW.cpu().bool()
        first = {slot: row for row, slot in reversed([*enumerate(slots)])}
        first_P = torch.tensor([first[slot] for slot in range(len(ids_PW))])
        length_P = is_token_PW.sum(1)
        self._next_N = length_P[torch.tensor(slots)]
        slot_R, column_R = at = is_token_PW.nonzero(as_tuple=True)
        every = self._table(first_P[slot_R], (is_token_PW.cumsum(1) - 1)[at], ids_PW[at])
        kept = self._table(first_P, length_P - 1, ids_PW[:, -1])
        self._sites.pass_follows(
            ids_PW,
            every=self._sites.pass_rows(every, (slot_R, column_R), is_whole=bool(is_token_PW.all())),
            kept=self._sites.pass_rows(kept, _column(len(ids_PW)), is_whole=True),
        )

    def turn(self, token_B: torch.Tensor, live_B: torch.Tensor) -> None:
        row_B, token_B = live_B.cpu(), token_B.cpu()
        table = self._table(row_B, self._next_N[row_B], token_B)
        self._next_N[row_B] += 1
        rows = self._sites.pass_rows(table, _column(len(row_B)), is_whole=True)
        self._sites.pass_follows(token_B[:, None], every=rows, kept=rows)

    def _table(self, row_R: torch.Tensor, position_R: torch.Tensor, token_R: torch.Tensor) -> TokenTable:
        return TokenTable(keys=self._names, row_R=row_R, position_R=position_R, token_R=token_R)


def _column(num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the places of tensors `[n, 1, ...]`, in order."""
    return torch.arange(num_rows), torch.zeros(num_rows, dtype=torch.int64)


NOT_IN_DECODING = "decoding computes no loss and no gradients, and takes log-probabilities of what it draws alone"


class DecodeTracing(TracedPhases):
    """Shows the sites of a model while it decodes. Rows whose tokens are shown one by one have the names that
    `traced_row` gives.

    Args:
        number: of the engine.
        num_engines: of the run.
    """

    def __init__(self, spec: TraceSpec, model: PreTrainedModel, *, number: int, num_engines: int) -> None:
        sites = HFSites(model)
        sites.cannot(NOT_IN_DECODING, SiteKind.LOGPROB, *NEVER_IN_DECODING)
        self._hook_points, self._number = tuple(sites.hook_points), number
        super().__init__(
            spec,
            group=RankGroup.GENERATION,
            rank=number,
            world=num_engines,
            axes={"engine": number},
            unobserved=sites.unobserved,
        )
        self._sink: TraceSink | None = None
        self._gathered = BufferedSender(self.link, name="")
        self._num_rows, self._numbers = 0, count()
        """Rows of the step's requests so far, and the numbers of their token tables."""

    def begin(self, step: int, *, watches: Sequence[str], keys: Sequence[str]) -> None:
        self.end()
        super().begin(step, watches=watches, keys=keys)
        self._gathered = BufferedSender(self.link, name=f"{step}.{GENERATION}")
        self._sink = self.begin_phase(GENERATION, outlet=self._gathered)
        self._num_rows, self._numbers = 0, count()

    def end(self) -> None:
        if self._sink is not None:
            self._gathered.flush()
            self.end_phase(GENERATION)
        self._sink = None
        super().end()

    @contextmanager
    def request(self, num_rows: int) -> Iterator[ObservedRequest]:
        """Surround one request of so many rows, which are numbered through all requests of a step; an error inside it
        ends the step."""
        if self._sink is None:
            yield NO_SITES
            return
        first, self._num_rows = self._num_rows, self._num_rows + num_rows
        sites = RequestSites(
            self._hook_points,
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


class DecodeRecording(StepRecords):
    """The recording of one embedded engine.

    Args:
        number: of the engine.
        num_engines: of the run.
    """

    def __init__(self, spec: RecordSpec, model: PreTrainedModel, *, number: int, num_engines: int) -> None:
        super().__init__(spec, rank=number, of=f" of engine {number}")
        self._num_engines, self._sites = num_engines, HFSites(model)
        self._sites.cannot(NOT_IN_DECODING, *NEVER_IN_DECODING)

    def begin(self, step: int) -> None:
        """Begin a step, to which the requests that follow belong."""
        self.end()
        self._open(step, self._manifest)

    @contextmanager
    def request(self, keys: Sequence[str]) -> Iterator[ObservedRequest]:
        """Surround one request, whose rows have these keys; without keys it is not recorded. An error inside it leaves
        the files of the step without their end."""
        sink = self._sink()
        if sink is None or not keys:
            yield NO_SITES
            return
        sites = RequestSites(
            self._sites.hook_points,
            sink,
            phase=GENERATION,
            name_of=lambda row: keys[row],
            numbers=count(),
            between_passes=lambda: None,
        )
        try:
            with sites.attached():
                yield sites
        except BaseException:
            self.end(is_complete=False)
            raise

    def output(self, request: GenerationRequest, output: GenerationOutput) -> None:
        if self._writer is None or not request.keys:
            return
        if self._selector.takes(SiteKind.LOGPROB, None, Direction.FORWARD):
            with self._excused():
                write_logprobs(self._writer, response_rows(request, output), output.logprobs)

    def _manifest(self) -> RecordManifest:
        sites = [(point.kind, point.layer) for point in self._sites.hook_points]
        layout = {"tp": 1, "world": self._num_engines}
        return engine_manifest(self._spec, layout=layout, sites=sites, unobserved=self._sites.unobserved)
