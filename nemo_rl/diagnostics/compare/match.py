"""Which sample of one side is which of the other, and which rows of a site belong together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from nemo_rl.diagnostics.compare.merge import Merged
from nemo_rl.diagnostics.compare.side import POSITIONS, Side

__all__ = ["MatchedRows", "SampleMap", "match_rows", "match_samples"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleMap:
    """Samples of B as numbered on side A."""

    to_a: torch.Tensor
    """`[samples of B + 1]` number on side A, -1 for none."""
    num_common: int
    is_by_tokens: bool
    """Keys have nothing in common; samples of equal tokens were taken for the same."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MatchedRows:
    """Rows of a site that both sides have: row `rows_a[i]` of A is row `rows_b[i]` of B."""

    rows_a: torch.Tensor
    rows_b: torch.Tensor
    code_M: torch.Tensor | None
    """In numbers of side A; None for a tensor without tokens, whose rows are all there."""
    token_M: torch.Tensor | None
    only_a: torch.Tensor
    """Codes of A's rows that B has not."""
    only_b: torch.Tensor
    """Codes of B's, in B's numbers."""
    differing_tokens: torch.Tensor
    """Matched rows whose token ids differ."""
    token_b_M: torch.Tensor | None
    """As `token_M`, of B."""


def match_samples(a: Side, b: Side) -> SampleMap:
    """By key; where no key is on both sides, by the tokens of samples of which each side has one."""
    pairs: Mapping[str, str] = {key: key for key in b.samples if key in a.samples}
    is_by_tokens = not pairs and bool(a.samples) and bool(b.samples)
    if is_by_tokens:
        unique_a, unique_b = _unique(a.sequences()), _unique(b.sequences())
        pairs = {unique_b[digest]: key for digest, key in unique_a.items() if digest in unique_b}
    to_a = torch.full((len(b.samples) + 1,), -1, dtype=torch.int64)
    for key_b, key_a in pairs.items():
        to_a[b.samples[key_b]] = a.samples[key_a]
    return SampleMap(to_a=to_a, num_common=len(pairs), is_by_tokens=is_by_tokens)


def match_rows(a: Merged, b: Merged, samples: SampleMap) -> MatchedRows:
    """Rows of the same sample and position, in A's order."""
    nothing = torch.zeros(0, dtype=torch.int64)
    if a.code_N is None or b.code_N is None or a.token_N is None or b.token_N is None:
        rows = torch.arange(len(a.values))
        return MatchedRows(
            rows_a=rows,
            rows_b=rows,
            code_M=None,
            token_M=None,
            token_b_M=None,
            only_a=nothing,
            only_b=nothing,
            differing_tokens=nothing,
        )
    number_N = samples.to_a[b.code_N // POSITIONS]
    is_known = number_N >= 0
    code_b = torch.where(is_known, number_N * POSITIONS + b.code_N % POSITIONS, -1)
    sorted_b, order_b = code_b.sort()
    at = torch.searchsorted(sorted_b, a.code_N).clamp(max=max(0, len(sorted_b) - 1))
    is_in_both = sorted_b[at] == a.code_N if len(sorted_b) else torch.zeros_like(a.code_N, dtype=torch.bool)
    rows_a = is_in_both.nonzero()[:, 0]
    rows_b = order_b[at[rows_a]] if len(rows_a) else nothing
    is_only_b = torch.ones_like(b.code_N, dtype=torch.bool)
    is_only_b[rows_b] = False
    return MatchedRows(
        rows_a=rows_a,
        rows_b=rows_b,
        code_M=a.code_N[rows_a],
        token_M=a.token_N[rows_a],
        token_b_M=b.token_N[rows_b],
        only_a=a.code_N[~is_in_both],
        only_b=b.code_N[is_only_b],
        differing_tokens=(a.token_N[rows_a] != b.token_N[rows_b]).nonzero()[:, 0],
    )


def _unique(digests: Mapping[str, str]) -> Mapping[str, str]:
    """Digest -> key, of digests that one key has."""
    counts = Counter(digests.values())
    return {digest: key for key, digest in digests.items() if counts[digest] == 1}
