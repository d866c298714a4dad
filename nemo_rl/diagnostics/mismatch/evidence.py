"""What the tokens themselves say of the part that no change has removed, and which of them are furthest apart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from nemo_rl.diagnostics.mismatch.tokens import StepTokens
from nemo_rl.models.logprobs import k3

__all__ = ["Evidence", "FarToken", "far_tokens", "look_at"]

SHOWN_TOKENS = 8
CONTEXT = 6
"""Tokens before one that is shown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """Where in the rows a difference is."""

    first_tokens: float
    """Mean k3 of the first sampled token of each row."""
    early: float
    """Of the first third of each row's sampled tokens."""
    late: float
    """Of the last third."""
    top_share: float
    """Of the sum, in the 1 % of tokens that are furthest apart."""

    @property
    def text(self) -> str:
        grows = "grows along the row" if self.late > GROWTH * max(self.early, self.first_tokens) else "is everywhere"
        return (
            f"it {grows}: {self.first_tokens:.3g} at the first token of a row, {self.early:.3g} in the first third, "
            f"{self.late:.3g} in the last; {self.top_share:.0%} of it in 1 % of the tokens"
        )


GROWTH = 3.0
"""Late to early, beyond which a difference grows along the row."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FarToken:
    """One token."""

    key: str
    position: int
    """In its row."""
    text: str
    before: str
    """Text of the tokens before it."""
    rollout: float
    trainer: float

    @property
    def apart(self) -> float:
        return self.trainer - self.rollout


def look_at(tokens: StepTokens, logprobs_M: torch.Tensor) -> Evidence:
    """Of log-probabilities against those of the rollout."""
    each_M = k3((logprobs_M - tokens.rollout_M).double()).nan_to_num(0.0)
    row_M, column_M = tokens.row_M, tokens.column_M
    counts_N = torch.bincount(row_M, minlength=len(tokens.rows))
    first_N = torch.full((len(tokens.rows),), tokens.ids_NT.shape[1]).scatter_reduce(0, row_M, column_M, "amin")
    place_M = (column_M - first_N[row_M]).double() / counts_N[row_M].clamp(min=1)
    ranked = each_M.sort(descending=True).values
    top = ranked[: max(1, len(ranked) // 100)].sum()
    return Evidence(
        first_tokens=_mean(each_M[column_M == first_N[row_M]]),
        early=_mean(each_M[place_M < 1 / 3]),
        late=_mean(each_M[place_M >= 2 / 3]),
        top_share=float(top / ranked.sum()) if float(ranked.sum()) else 0.0,
    )


def far_tokens(
    tokens: StepTokens, logprobs_M: torch.Tensor, decode: Callable[[list[int]], str]
) -> tuple[FarToken, ...]:
    """The tokens with the largest |d|, one of each row."""
    apart_M = (logprobs_M - tokens.rollout_M).abs().nan_to_num(0.0)
    row_M, column_M = tokens.row_M, tokens.column_M
    found: dict[int, FarToken] = {}
    for place in apart_M.argsort(descending=True).tolist():
        row, column = int(row_M[place]), int(column_M[place])
        if row in found:
            continue
        ids = tokens.ids_NT[row].tolist()
        found[row] = FarToken(
            key=tokens.keys[row],
            position=column,
            text=decode(ids[column : column + 1]),
            before=decode(ids[max(0, column - CONTEXT) : column]),
            rollout=float(tokens.rollout_M[place]),
            trainer=float(logprobs_M[place]),
        )
        if len(found) == SHOWN_TOKENS:
            break
    return tuple(found.values())


def _mean(values: torch.Tensor) -> float:
    return float(values.mean()) if len(values) else 0.0
