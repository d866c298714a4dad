"""`SiteRecorder`: writes what the sites of a model show during the passes of one call.

A `PassObserver`. Invariant: it changes no bit of what it looks at, and none of its hooks outlives its block. Records
name rows by key and position; padding is never written. Shapes: n rows of a pass, s positions on this rank, R tokens.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from nemo_rl.errors import UserError
from nemo_rl.models.policy.microbatch import Microbatch
from nemo_rl.models.policy.recording.observer import OnBackward, nothing_follows
from nemo_rl.models.policy.recording.taps import Tap, Taps, Tokens
from nemo_rl.records.record import Place, TokenTable
from nemo_rl.records.selector import Selector
from nemo_rl.records.sites import SITES, Direction, SiteKind
from nemo_rl.records.writer import RecordWriter
from nemo_rl.torch_private import after_backward

__all__ = ["SiteRecorder"]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rows:
    """Where the tokens of a record lie in its tensor."""

    name: str
    """Of their table in the file."""
    at: tuple[torch.Tensor, ...]
    """Index of each token in the first two dimensions."""


@dataclass(kw_only=True, slots=True)
class _Pass:
    """One microbatch, from its forward pass to the end of its backward pass."""

    micro: Microbatch
    place: Place
    """Without kind and layer."""
    rows: dict[Tokens, _Rows] = field(default_factory=dict)
    seen: set[tuple[SiteKind, int | None]] = field(default_factory=set)
    """Sites that have been written; one that comes again is recomputed."""
    with_gradient: set[tuple[SiteKind, int | None]] = field(default_factory=set)
    """Sites whose gradient has been written."""


class SiteRecorder:
    """Looks on at one call.

    Args:
        keys: of the rows of the batch.
        writes_gradients: this rank writes the gradients of parameters, which all ranks have whole.
        on_refusal: called when the disk refuses, after which nothing is written; None raises instead.
    """

    def __init__(
        self,
        taps: Taps,
        writer: RecordWriter,
        selector: Selector,
        *,
        phase: str,
        keys: Sequence[str],
        writes_gradients: bool,
        on_refusal: Callable[[UserError], None] | None = None,
    ) -> None:
        self._taps, self._writer, self._selector = taps, writer, selector
        self._place = Place(kind=SiteKind.LOSS, phase=phase)
        self._keys, self._writes_gradients, self._on_refusal = keys, writes_gradients, on_refusal
        self._has_ended = False
        self._current: _Pass | None = None
        self._by_rows: dict[tuple[int, ...], _Pass] = {}
        self._count = 0
        # Gradients come on threads of the autograd engine.
        self._lock = threading.Lock()

    @contextmanager
    def attached(self) -> Iterator[SiteRecorder]:
        """Around the call: sites are reached inside, and nothing of that is left outside, also after an error."""
        with ExitStack() as stack:
            for tap in self._taps.taps:
                directions = [way for way in Direction if self._selector.takes(tap.kind, tap.layer, way)]
                if directions:
                    stack.callback(tap.attach(self._deliver_to(tap, directions)))
            try:
                yield self
            finally:
                self._current = None
                self._by_rows.clear()

    # What runners say.

    def update(self, number: int) -> None:
        """As in `PassObserver`."""
        self._place = replace(self._place, update=number)
        self._count = 0
        self._by_rows.clear()

    @contextmanager
    def pass_of(self, micro: Microbatch, *, backward_follows: bool = False) -> Iterator[OnBackward]:
        """As in `PassObserver`."""
        current = _Pass(micro=micro, place=replace(self._place, microbatch=self._count))
        self._count += 1
        self._current = self._by_rows[micro.rows] = current
        try:
            yield (lambda output: self._on_backward(current, output)) if backward_follows else nothing_follows
        finally:
            self._current = None

    def logprobs(self, micro: Microbatch, logprobs_nt: torch.Tensor) -> None:
        """As in `PassObserver`."""
        current = self._by_rows.get(micro.rows)
        if current is None or not micro.rows:
            return
        if self._selector.takes(SiteKind.LOGPROB):
            self._write_logprobs(current, logprobs_nt, Direction.FORWARD)
        if logprobs_nt.requires_grad and self._selector.takes(SiteKind.LOGPROB, direction=Direction.BACKWARD):
            logprobs_nt.register_hook(
                lambda grad: self._write_logprobs(current, grad / self._taps.loss_factor(), Direction.BACKWARD)
            )

    def loss(self, micro: Microbatch, loss: torch.Tensor) -> None:
        """As in `PassObserver`."""
        current = self._by_rows.get(micro.rows)
        if current is not None and self._selector.takes(SiteKind.LOSS):
            self._put(lambda: self._writer.tensor(replace(current.place, kind=SiteKind.LOSS), loss, tokens=None))

    def gradients(self) -> None:
        """As in `PassObserver`."""
        if SiteKind.GRAD not in self._selector.kinds():
            return
        for name, gradient in self._taps.gradients():
            if self._writes_gradients and self._selector.takes_parameter(name):
                place = replace(self._place, kind=SiteKind.GRAD, name=name)
                self._put(partial(self._writer.tensor, place, gradient, tokens=None))

    # Private parts.

    def _put(self, write: Callable[[], None]) -> None:
        with self._lock:
            if self._has_ended:
                return
            try:
                write()
            except UserError as error:
                if self._on_refusal is None:
                    raise
                self._has_ended = True
                self._on_refusal(error)

    def _on_backward(self, current: _Pass, output: torch.Tensor) -> None:
        """Layers that the backward pass of this output runs again belong to its microbatch."""

        def begin(_: torch.Tensor) -> None:
            self._current = current
            after_backward(self._leave)

        if output.requires_grad:
            output.register_hook(begin)

    def _leave(self) -> None:
        self._current = None

    def _deliver_to(self, tap: Tap, directions: Sequence[Direction]) -> Callable[[torch.Tensor], None]:
        def deliver(value: torch.Tensor) -> None:
            current = self._current
            if current is None or not current.micro.rows:
                return
            site = tap.kind, tap.layer
            if Direction.FORWARD in directions:
                place = replace(current.place, kind=tap.kind, layer=tap.layer, is_recomputed=site in current.seen)
                self._write(current, tap, place, value)
            current.seen.add(site)
            # A layer that is run again has other tensors: gradients reach those of one of both passes. A tensor made
            # without gradients may become the output of a checkpoint, where hooks that come later are never called.
            is_wanted = Direction.BACKWARD in directions and SITES[tap.kind].has_backward
            if is_wanted and torch.is_grad_enabled() and value.requires_grad:
                value.register_hook(partial(self._write_gradient, current, tap))

        return deliver

    def _write_gradient(self, current: _Pass, tap: Tap, gradient: torch.Tensor) -> None:
        site = tap.kind, tap.layer
        if site not in current.with_gradient:
            current.with_gradient.add(site)
            place = replace(current.place, kind=tap.kind, layer=tap.layer, direction=Direction.BACKWARD)
            self._write(current, tap, place, gradient / self._taps.loss_factor())

    def _write(self, current: _Pass, tap: Tap, place: Place, value: torch.Tensor) -> None:
        def write() -> None:
            rows = self._rows_of(current, tap.tokens)
            by_rows = tap.order.by_rows(value.detach(), current.micro.inputs.input_ids.shape[0])
            self._writer.tensor(place, by_rows[rows.at], tokens=rows.name, split=tap.split)

        self._put(write)

    def _write_logprobs(self, current: _Pass, values_nt: torch.Tensor, direction: Direction) -> None:
        micro = current.micro
        place = replace(current.place, kind=SiteKind.LOGPROB, direction=direction)
        at = micro.out_row_M, micro.out_column_M

        def write() -> None:
            name = self._writer.tokens(self._table(micro, *at, micro.ids_nt[at]))
            self._writer.tensor(place, values_nt.detach()[at], tokens=name)

        self._put(write)

    def _rows_of(self, current: _Pass, tokens: Tokens) -> _Rows:
        """Written once per pass and kind."""
        if tokens in current.rows:
            return current.rows[tokens]
        inputs = current.micro.inputs
        if tokens is Tokens.KEPT:
            # Of the positions whose logits are computed, those that somebody asked for in this row.
            at = inputs.row_m, inputs.kept_m
            where = inputs.row_m, inputs.keep_K[inputs.kept_m]
            row_R, column_R, ids_R = (part[where] for part in (inputs.row_ns, inputs.column_ns, inputs.input_ids))
        else:
            parts = inputs.row_ns, inputs.column_ns, inputs.input_ids
            if tokens is Tokens.CHUNK:
                index, count = self._taps.chunk
                row_ns, column_ns, ids_ns = (part.chunk(count, dim=1)[index] for part in parts)
            else:
                row_ns, column_ns, ids_ns = parts
            at = (row_ns >= 0).nonzero(as_tuple=True)  # type: ignore[assignment]
            row_R, column_R, ids_R = row_ns[at], column_ns[at], ids_ns[at]
        name = self._writer.tokens(self._table(current.micro, row_R, column_R, ids_R))
        rows = current.rows[tokens] = _Rows(name=name, at=at)
        return rows

    def _table(
        self, micro: Microbatch, row_R: torch.Tensor, position_R: torch.Tensor, token_R: torch.Tensor
    ) -> TokenTable:
        keys = tuple(self._keys[row] for row in micro.rows)
        return TokenTable(keys=keys, row_R=row_R.cpu(), position_R=position_R.cpu(), token_R=token_R.cpu())
