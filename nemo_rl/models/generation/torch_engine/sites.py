"""`RequestSites`: brings what the sites of the engine's model show while a request is decoded to a `SiteSink`.

Made by `EngineTracing`. Invariant: it changes no bit of what it looks at, and none of its hooks outlives its block;
padding is never shown. Rows count from 0 in the order of the request, positions from the start of the prompt. A prompt
runs once for all rows of a batch that have it: the first of these rows shows it, the others begin with their first
response token. Shapes: P distinct prompts, W their width, N rows of a batch, B live rows, R tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch

from nemo_rl.models.generation.torch_engine.observer import NO_OBSERVER, DecodeObserver
from nemo_rl.models.policy.hooks import Tap, Tokens
from nemo_rl.models.policy.observer import PassRows, Sight, SiteSink
from nemo_rl.records.record import Place, TokenTable
from nemo_rl.records.sites import Direction, SiteKind

__all__ = ["NO_SITES", "ObservedRequest", "RequestSites"]


class ObservedRequest:
    """A request at which nobody looks."""

    def batch(self, rows: Sequence[int]) -> DecodeObserver:
        """Of a batch.

        Args:
            rows: number of each row of the batch in the request.
        """
        return NO_OBSERVER


NO_SITES = ObservedRequest()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Pass:
    """The forward pass that runs, or is about to."""

    num_rows: int
    rows: Mapping[Tokens, PassRows]


class RequestSites(ObservedRequest):
    """One request.

    Args:
        taps: of the model, all of it on this process.
        name_of: name of a row by its number in the request.
        numbers: of the tables of tokens; unique for the sink.
        between_passes: called before every forward pass.
    """

    def __init__(
        self,
        taps: Sequence[Tap],
        sink: SiteSink,
        *,
        phase: str,
        name_of: Callable[[int], str],
        numbers: Iterator[int],
        between_passes: Callable[[], None],
    ) -> None:
        self._taps, self._sink, self._phase = tuple(taps), sink, phase
        self._name_of, self._numbers, self._between_passes = name_of, numbers, between_passes
        self._current: _Pass | None = None

    @contextmanager
    def attached(self) -> Iterator[RequestSites]:
        """Around the request: sites are reached inside, and nothing of that is left outside, also after an error."""
        with ExitStack() as stack:
            for tap in self._taps:
                if self._sink.takes(tap.kind, tap.layer, Direction.FORWARD):
                    stack.callback(tap.attach(self._deliver_to(tap)))
            try:
                yield self
            finally:
                self._current = None

    def batch(self, rows: Sequence[int]) -> DecodeObserver:
        """As in `ObservedRequest`."""
        return _BatchSites(self, tuple(map(self._name_of, rows)))

    def pass_follows(self, ids: torch.Tensor, *, every: PassRows, kept: PassRows) -> None:
        """What the taps deliver from here on is of these tokens.

        Args:
            ids: `[n, s]` what is fed.
            every: the tokens of the pass.
            kept: those whose logits are computed.
        """
        self._between_passes()
        rows = {Tokens.ALL: every, Tokens.KEPT: kept}
        self._current = _Pass(num_rows=len(ids), rows=rows)
        if self._sink.takes(SiteKind.TOKENS, None, Direction.FORWARD):
            place = Place(kind=SiteKind.TOKENS, phase=self._phase)
            self._sink.see(Sight(place=place, value=ids, rows=every, is_first=True))

    def pass_rows(self, table: TokenTable, at: tuple[torch.Tensor, ...], *, is_whole: bool) -> PassRows:
        """With a number of its own."""
        return PassRows(number=next(self._numbers), at=at, table=table, is_whole=is_whole)

    def _deliver_to(self, tap: Tap) -> Callable[[torch.Tensor], None]:
        place = Place(kind=tap.kind, layer=tap.layer, phase=self._phase)

        def deliver(value: torch.Tensor) -> None:
            current = self._current
            if current is not None:
                by_rows = tap.order.by_rows(value.detach(), current.num_rows)
                self._sink.see(Sight(place=place, value=by_rows, rows=current.rows[tap.tokens], is_first=True))

        return deliver


class _BatchSites:
    """One batch of a request."""

    def __init__(self, sites: RequestSites, names: tuple[str, ...]) -> None:
        self._sites, self._names = sites, names
        self._next_N = torch.empty(0)
        """Position of the next token of each row."""

    def prompts(self, ids_PW: torch.Tensor, mask_PW: torch.Tensor, row_slot_N: torch.Tensor) -> None:
        """As in `DecodeObserver`."""
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
        """As in `DecodeObserver`."""
        row_B, token_B = live_B.cpu(), token_B.cpu()
        table = self._table(row_B, self._next_N[row_B], token_B)
        self._next_N[row_B] += 1
        rows = self._sites.pass_rows(table, _column(len(row_B)), is_whole=True)
        self._sites.pass_follows(token_B[:, None], every=rows, kept=rows)

    def _table(self, row_R: torch.Tensor, position_R: torch.Tensor, token_R: torch.Tensor) -> TokenTable:
        return TokenTable(keys=self._names, row_R=row_R, position_R=position_R, token_R=token_R)


def _column(num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The places of tensors `[n, 1, ...]`, in order."""
    return torch.arange(num_rows), torch.zeros(num_rows, dtype=torch.int64)
