"""`PassObserver`: what runners tell about their passes, and `SiteObserver`, which hands captured tensors to sinks.

Runners of both engines call a `PassObserver` in every pass; `HookObservers` makes it for one call of the worker.
Invariant: an observer changes no bit of what it looks at, and none of its hooks outlives its block. Sinks get rows by
key and position; padding is never shown. Shapes: n rows of a pass, s positions on this rank, R tokens.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Any

import torch

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.worker_pass import WorkerPass
from nemo_rl.models.policy.hooks import HookPoint, HookPoints, TokenPositions
from nemo_rl.models.policy.interfaces import LossOutput
from nemo_rl.models.policy.microbatch import Microbatch, row_names
from nemo_rl.records.record import DimSplit, RecordPlace, TokenTable
from nemo_rl.records.sites import SITES, Direction, SiteKind
from nemo_rl.torch_private import after_backward

__all__ = [
    "NO_HOOK_OBSERVERS",
    "NO_OBSERVER",
    "Capture",
    "HookObserver",
    "HookObservers",
    "OnBackward",
    "PassObserver",
    "PassRows",
    "SiteObserver",
    "SiteSink",
    "nothing_follows",
]

OnBackward = Callable[[torch.Tensor], None]
"""Takes the output of a forward pass whose backward pass comes later, with other microbatches in between."""


def nothing_follows(output: torch.Tensor) -> None:
    """Ignore the output of a forward pass."""


class PassObserver:
    """Observes the microbatches of one call on one rank; the base class ignores every event."""

    def parameters(self) -> None:
        """(collective) Take the weights, of which none has changed yet in this call."""

    def update(self, number: int) -> None:
        """Begin an optimizer step; its microbatches follow."""

    def pass_of(self, micro: Microbatch, *, backward_follows: bool = False) -> AbstractContextManager[OnBackward]:
        """Surround a forward pass, or a forward and its backward pass where no other microbatch comes between.

        Args:
            backward_follows: the backward pass comes later and recomputes layers; the runner hands the output of the
                forward pass to the yielded function, so that the recomputed tensors find their microbatch.
        """
        return nullcontext(nothing_follows)

    def logprobs(self, micro: Microbatch, logprobs_nt: torch.Tensor) -> None:
        """Take the log-probabilities of a microbatch's selected tokens, the same on all ranks that have them."""

    def loss(self, micro: Microbatch, output: LossOutput) -> None:
        """Take the loss of a microbatch, which is its share of the global batch."""

    def gradients(self) -> None:
        """(collective) Take the gradients of a global batch, complete, and neither clipped nor used yet."""


NO_OBSERVER = PassObserver()
"""The observer of calls of which nothing is kept."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PassRows:
    """The places of the tokens of a pass in a tensor `[n, s, ...]`."""

    number: int
    """Unique within the call."""
    at: tuple[torch.Tensor, ...]
    """Index of each of the R tokens in the first two dimensions."""
    table: TokenTable
    """Row, position and id of each."""
    is_whole: bool = False
    """Every place holds a token, and they are listed in the order of the tensor."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Capture:
    """A tensor that one hook point delivered during one pass on this rank."""

    place: RecordPlace
    value: torch.Tensor
    """`[n, s, ...]` where there are rows, a view of the model's own tensor: not to be changed. Else of any shape."""
    rows: PassRows | None = None
    split: DimSplit | None = None
    """This rank's part of the last dimension; None has all of it."""
    is_first: bool
    """True on the first of the ranks that have the very same tensor."""

    def tokens(self) -> torch.Tensor:
        """Return `[R, ...]` without padding; a view where there is none, else a copy."""
        assert self.rows is not None, "a tensor without tokens"
        return self.value.flatten(0, 1) if self.rows.is_whole else self.value[self.rows.at]


class SiteSink(ABC):
    """Keeps something of what is seen, and changes nothing."""

    @abstractmethod
    def takes(self, kind: SiteKind, layer: int | None, direction: Direction) -> bool:
        """Return whether the sink wants this site. For sites outside the layers every rank must return the same
        value, since they are gathered."""

    @abstractmethod
    def see(self, capture: Capture) -> None:
        """Take one tensor; called by one thread at a time."""


@dataclass(kw_only=True, slots=True)
class _MicrobatchPass:
    """One microbatch, from its forward pass to the end of its backward pass."""

    micro: Microbatch
    place: RecordPlace
    """Place of the pass, without kind and layer."""
    rows: dict[TokenPositions, PassRows] = field(default_factory=dict)
    seen: set[tuple[SiteKind, int | None]] = field(default_factory=set)
    """Sites that have been shown; one that comes again is recomputed."""
    with_gradient: set[tuple[SiteKind, int | None]] = field(default_factory=set)
    """Sites whose gradient has been shown."""


class SiteObserver(PassObserver):
    """Shows the sites of a model to the sinks of one call.

    Args:
        sinks: who keeps something; all of the same call.
        phase: pass of the worker.
        keys: of the rows of the batch.
    """

    def __init__(self, hook_points: HookPoints, sinks: Sequence[SiteSink], *, phase: str, keys: Sequence[str]) -> None:
        self._hook_points, self._sinks = hook_points, tuple(sinks)
        self._place = RecordPlace(kind=SiteKind.LOSS, phase=phase)
        self._keys = keys
        self._current: _MicrobatchPass | None = None
        self._by_rows: dict[tuple[int, ...], _MicrobatchPass] = {}
        self._count = 0
        self._numbers = count()
        # Gradients come on threads of the autograd engine.
        self._lock = threading.Lock()

    @contextmanager
    def attached(self) -> Iterator[SiteObserver]:
        """Surround the call: sites are reached inside, and nothing of that is left outside, also after an error."""
        with ExitStack() as stack:
            for hook_point in self._hook_points.hook_points:
                directions = [way for way in Direction if self._is_wanted(hook_point.kind, hook_point.layer, way)]
                if directions:
                    stack.callback(hook_point.attach(self._deliver_to(hook_point, directions)))
            try:
                yield self
            finally:
                self._current = None
                self._by_rows.clear()

    # Events of the runner.

    def parameters(self) -> None:
        if self._is_wanted(SiteKind.PARAM):
            self._show_named(SiteKind.PARAM, self._hook_points.weights())

    def update(self, number: int) -> None:
        self._place = replace(self._place, update=number)
        self._count = 0
        self._by_rows.clear()

    @contextmanager
    def pass_of(self, micro: Microbatch, *, backward_follows: bool = False) -> Iterator[OnBackward]:
        current = _MicrobatchPass(micro=micro, place=replace(self._place, microbatch=self._count))
        self._count += 1
        self._current = self._by_rows[micro.rows] = current
        if micro.rows and self._is_wanted(SiteKind.TOKENS):
            rows, is_first = self._rows_of(current, TokenPositions.ALL), self._hook_points.shows_inputs
            self._show(current.place, SiteKind.TOKENS, micro.inputs.input_ids, rows=rows, is_first=is_first)
        try:
            yield (lambda output: self._on_backward(current, output)) if backward_follows else nothing_follows
        finally:
            self._current = None

    def logprobs(self, micro: Microbatch, logprobs_nt: torch.Tensor) -> None:
        current = self._by_rows.get(micro.rows)
        if current is None or not micro.rows:
            return
        if self._is_wanted(SiteKind.LOGPROB):
            self._show_selected(current, SiteKind.LOGPROB, logprobs_nt)
        if logprobs_nt.requires_grad and self._is_wanted(SiteKind.LOGPROB, way=Direction.BACKWARD):
            logprobs_nt.register_hook(
                lambda grad: self._show_selected(current, SiteKind.LOGPROB, self._unscaled(grad), Direction.BACKWARD)
            )

    def loss(self, micro: Microbatch, output: LossOutput) -> None:
        current = self._by_rows.get(micro.rows)
        if current is None:
            return
        if self._is_wanted(SiteKind.LOSS):
            is_first = self._hook_points.shows_outputs
            self._show(current.place, SiteKind.LOSS, output.loss.detach(), is_first=is_first)
        if output.token_losses is not None and self._is_wanted(SiteKind.TOKEN_LOSS):
            self._show_selected(current, SiteKind.TOKEN_LOSS, output.token_losses)

    def gradients(self) -> None:
        if self._is_wanted(SiteKind.GRAD):
            self._show_named(SiteKind.GRAD, self._hook_points.gradients())

    # Private parts.

    def _is_wanted(self, kind: SiteKind, layer: int | None = None, way: Direction = Direction.FORWARD) -> bool:
        return any(sink.takes(kind, layer, way) for sink in self._sinks)

    def _show(
        self,
        at: RecordPlace,
        kind: SiteKind,
        value: torch.Tensor,
        *,
        is_first: bool,
        rows: PassRows | None = None,
        split: DimSplit | None = None,
        **more: Any,
    ) -> None:
        """Show a tensor to the sinks that take it.

        Args:
            at: place of the pass.
            more: what `RecordPlace` says of the tensor besides its kind.
        """
        place = replace(at, kind=kind, **more)
        capture = Capture(place=place, value=value, rows=rows, split=split, is_first=is_first)
        with self._lock:
            for sink in self._sinks:
                if sink.takes(kind, place.layer, place.direction):
                    sink.see(capture)

    def _show_named(self, kind: SiteKind, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        for name, value in tensors:
            self._show(self._place, kind, value, is_first=self._hook_points.shows_whole, name=name)

    def _on_backward(self, current: _MicrobatchPass, output: torch.Tensor) -> None:
        """Assign recomputed layers: those that the backward pass of this output runs again belong to its microbatch."""

        def begin(_: torch.Tensor) -> None:
            self._current = current
            after_backward(self._leave)

        if output.requires_grad:
            output.register_hook(begin)

    def _leave(self) -> None:
        self._current = None

    def _deliver_to(self, hook_point: HookPoint, directions: Sequence[Direction]) -> Callable[[torch.Tensor], None]:
        def deliver(value: torch.Tensor) -> None:
            current = self._current
            if current is None or not current.micro.rows:
                return
            site = hook_point.kind, hook_point.layer
            if Direction.FORWARD in directions:
                self._show_point(current, hook_point, value, is_recomputed=site in current.seen)
            current.seen.add(site)
            # A layer that is run again has other tensors: gradients reach those of one of both passes. A tensor made
            # without gradients may become the output of a checkpoint, where hooks that come later are never called.
            is_wanted = Direction.BACKWARD in directions and SITES[hook_point.kind].has_backward
            if is_wanted and torch.is_grad_enabled() and value.requires_grad:
                value.register_hook(partial(self._show_gradient, current, hook_point))

        return deliver

    def _show_gradient(self, current: _MicrobatchPass, hook_point: HookPoint, gradient: torch.Tensor) -> None:
        site = hook_point.kind, hook_point.layer
        if site not in current.with_gradient:
            current.with_gradient.add(site)
            self._show_point(current, hook_point, self._unscaled(gradient), direction=Direction.BACKWARD)

    def _unscaled(self, gradient: torch.Tensor) -> torch.Tensor:
        factor = self._hook_points.loss_factor()
        return gradient if factor == 1.0 else gradient / factor

    def _show_point(self, current: _MicrobatchPass, point: HookPoint, value: torch.Tensor, **more: Any) -> None:
        by_rows = point.order.by_rows(value.detach(), current.micro.inputs.input_ids.shape[0])
        rows, is_first = self._rows_of(current, point.tokens), self._hook_points.shows(point)
        more["layer"] = point.layer
        self._show(current.place, point.kind, by_rows, rows=rows, split=point.split, is_first=is_first, **more)

    def _show_selected(
        self,
        current: _MicrobatchPass,
        kind: SiteKind,
        values_nt: torch.Tensor,
        direction: Direction = Direction.FORWARD,
    ) -> None:
        """Show values of the tokens whose log-probability is wanted."""
        micro = current.micro
        at = micro.out_row_M, micro.out_column_M
        rows = PassRows(number=next(self._numbers), at=at, table=self._table(micro, *at, micro.ids_nt[at]))
        is_first = self._hook_points.shows_outputs
        self._show(current.place, kind, values_nt.detach(), rows=rows, is_first=is_first, direction=direction)

    def _rows_of(self, current: _MicrobatchPass, tokens: TokenPositions) -> PassRows:
        """Return the rows of a pass, made once per pass and kind."""
        if tokens in current.rows:
            return current.rows[tokens]
        inputs = current.micro.inputs
        if tokens is TokenPositions.KEPT:
            # The positions that this row asked for, among those whose logits are computed.
            at, is_whole = (inputs.row_m, inputs.kept_m), False
            where = inputs.row_m, inputs.keep_K[inputs.kept_m]
            row_R, column_R, ids_R = (part[where] for part in (inputs.row_ns, inputs.column_ns, inputs.input_ids))
        else:
            parts = inputs.row_ns, inputs.column_ns, inputs.input_ids
            if tokens is TokenPositions.CHUNK:
                index, num_chunks = self._hook_points.chunk
                row_ns, column_ns, ids_ns = (part.chunk(num_chunks, dim=1)[index] for part in parts)
            else:
                row_ns, column_ns, ids_ns = parts
            at = (row_ns >= 0).nonzero(as_tuple=True)  # type: ignore[assignment]
            row_R, column_R, ids_R = row_ns[at], column_ns[at], ids_ns[at]
            is_whole = len(row_R) == row_ns.numel()
        table = self._table(current.micro, row_R, column_R, ids_R)
        rows = PassRows(number=next(self._numbers), at=at, table=table, is_whole=is_whole)
        current.rows[tokens] = rows
        return rows

    def _table(
        self, micro: Microbatch, row_R: torch.Tensor, position_R: torch.Tensor, token_R: torch.Tensor
    ) -> TokenTable:
        keys = tuple(self._keys[row] for row in micro.rows)
        return TokenTable(keys=keys, row_R=row_R.cpu(), position_R=position_R.cpu(), token_R=token_R.cpu())


class HookObserver:
    """Keeps something of some calls; the base class keeps nothing."""

    def begin_call(self, phase: WorkerPass) -> SiteSink | None:
        """Return the sink of the call that begins, or None where nothing is kept of it."""
        return None

    def end_call(self, phase: WorkerPass) -> None:
        """End a call that a sink was made for, also one that ended by an error."""


class HookObservers:
    """The observers of one rank.

    Args:
        hook_points: the sites of the model; None where nobody looks on.
    """

    def __init__(self, hook_points: HookPoints | None = None, hook_observers: Sequence[HookObserver] = ()) -> None:
        self._hook_points, self._hook_observers = hook_points, tuple(hook_observers)

    @contextmanager
    def phase(self, phase: WorkerPass, batch: BatchedDataDict) -> Iterator[PassObserver]:
        sinks = {one: sink for one in self._hook_observers if (sink := one.begin_call(phase)) is not None}
        if self._hook_points is None or not sinks:
            yield NO_OBSERVER
            return
        keys = row_names(batch, range(batch.size))
        observer = SiteObserver(self._hook_points, tuple(sinks.values()), phase=phase.value, keys=keys)
        try:
            with observer.attached():
                yield observer
        finally:
            for one in sinks:
                one.end_call(phase)


NO_HOOK_OBSERVERS = HookObservers()
