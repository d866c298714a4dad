"""Kept sets: the tokens that top-k and top-p left of the vocabulary, as the engine that sampled had them.

Recorded by the embedded engine, read by the policy worker's passes. On the wire a row is one run of int32: the sets of
its response tokens in order, each set its ids plus one, the first of them negative, so that sets need no lengths and 0
is what fills a row up. Invariant: what is read is the recorded set, whatever the trainer's own logits are.

Shapes: E ids, B live rows, V vocabulary, N rows, n rows of a microbatch, S ids of its longest row, t tokens of its
longest row, m scored tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nemo_rl.errors import FieldNotProduced

__all__ = ["SUPPORT", "KeptSets", "SupportRecorder", "decode_support"]

SUPPORT = "sampling_support"
"""Name of the column."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptSets:
    """The kept set of each scored token, as pairs of its number and an id, in the order of the numbers."""

    place_E: torch.Tensor
    """int64, numbers of the scored tokens."""
    token_E: torch.Tensor
    """int64 ids."""

    def fill(self, scores: torch.Tensor, rows: slice, *, first: int) -> torch.Tensor:
        """The scores of `rows`, -inf outside their sets.

        Args:
            first: token of the first column; ids before it or behind the last one are another rank's.
        """
        borders = torch.tensor([rows.start, rows.stop], device=self.place_E.device)
        start, stop = torch.searchsorted(self.place_E, borders).tolist()
        place, column = self.place_E[start:stop] - rows.start, self.token_E[start:stop] - first
        is_here = (column >= 0) & (column < scores.shape[-1])
        kept = torch.zeros_like(scores, dtype=torch.bool)
        kept[place[is_here], column[is_here]] = True
        return scores.masked_fill(~kept, float("-inf"))


class SupportRecorder:
    """Takes the kept sets of one batch of rows, turn by turn."""

    def __init__(self) -> None:
        self._turns: list[tuple[torch.Tensor, torch.Tensor]] = []

    def add_turn(self, kept_BV: torch.Tensor, live_B: torch.Tensor) -> None:
        """Args:
        kept_BV: bool, at least one token of each row.
        live_B: numbers of the rows.
        """
        row_E, token_E = kept_BV.nonzero(as_tuple=True)
        is_first_E = torch.ones_like(row_E, dtype=torch.bool)
        is_first_E[1:] = row_E[1:] != row_E[:-1]
        code_E = torch.where(is_first_E, -1 - token_E, token_E + 1).to(torch.int32)
        self._turns.append((live_B[row_E].cpu(), code_E.cpu()))

    def rows(self, count: int) -> tuple[torch.Tensor, ...]:
        """Each row's sets, end to end."""
        row_E = torch.cat([row for row, _ in self._turns])
        code_E = torch.cat([codes for _, codes in self._turns])
        return code_E[row_E.argsort(stable=True)].split(row_E.bincount(minlength=count).tolist())


def decode_support(
    support_nS: torch.Tensor, is_response_nt: torch.Tensor, row_m: torch.Tensor, column_m: torch.Tensor
) -> KeptSets:
    """The sets of the scored tokens of a microbatch.

    Args:
        support_nS: int32, filled up with 0.
        is_response_nt: bool, tokens that were sampled.
        row_m: row of each scored token.
        column_m: its position in the row.

    Raises:
        FieldNotProduced: a row has not one set for each sampled token, or a scored token was not sampled.
    """
    is_id_nS, is_first_nS = support_nS != 0, support_nS < 0
    sets_n, sampled_n = is_first_nS.sum(1), is_response_nt.sum(1)
    if not torch.equal(sets_n, sampled_n) or not bool(is_response_nt[row_m, column_m].all()):
        raise FieldNotProduced(
            f"{SUPPORT}: expected one kept set for every sampled token, {sampled_n.tolist()} of them in the rows of a "
            f"microbatch, and no other tokens to be scored; got {sets_n.tolist()} sets. Rows and sets must come from "
            "the same rollout, and token_mask must mark the sampled tokens alone"
        )
    count_nt = is_response_nt.cumsum(1) - 1
    place_nt = row_m.new_full((len(support_nS), max(1, is_response_nt.shape[1])), -1)
    place_nt[row_m, count_nt[row_m, column_m]] = torch.arange(len(row_m), device=row_m.device)
    row_E, where_E = is_id_nS.nonzero(as_tuple=True)
    number_nS = is_first_nS.cumsum(1) - 1
    place_E = place_nt[row_E, number_nS[row_E, where_E]]
    token_E = support_nS[row_E, where_E].long().abs() - 1
    is_scored_E = place_E >= 0
    place_E, token_E = place_E[is_scored_E], token_E[is_scored_E]
    order = place_E.argsort(stable=True)
    return KeptSets(place_E=place_E[order], token_E=token_E[order])
