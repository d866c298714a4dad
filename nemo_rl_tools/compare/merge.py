"""`merge`: the records of one site on all ranks and in all microbatches as one tensor with named rows.

    parts of the last dimension --_whole_pieces--> pieces with all of it --_one_row_per_token--> rows in order

`match_samples` and `match_rows` find which sample and which rows of one side belong to which of the other. Invariant:
what comes out does not depend on how ranks shared the work. What several ranks hold must agree; where it does not, the
first is taken and the side gets a finding that names the ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from nemo_rl.records.reader import TensorRecord
from nemo_rl.records.sites import SiteKind
from nemo_rl_tools.compare.measurement import as_rows, row_stats, take_rows
from nemo_rl_tools.compare.side import POSITIONS, ComparedSite, Side
from nemo_rl_tools.verdict import Verdict

__all__ = ["MatchedRows", "Merged", "SampleMap", "match_rows", "match_samples", "merge"]

REPLICA_LIMIT = 1e-6
"""Limit of the relative difference of a row. Replicas are copies of one result, or were summed by one collective."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Merged:
    """A site of a side."""

    values: torch.Tensor
    """`[N, ...]`; a tensor without tokens has the rows of its first dimension, or one."""
    code_N: torch.Tensor | None
    """Ascending: of sample and position. None for a tensor without tokens."""
    token_N: torch.Tensor | None


@dataclass(frozen=True, kw_only=True, slots=True)
class _RowsPiece:
    rank: int
    code_R: torch.Tensor
    token_R: torch.Tensor
    values: torch.Tensor


def merge(site: ComparedSite, side: Side) -> Merged | None:
    """Merge the records of a site; return None where nothing can be used, for which the side's findings say why."""
    records = side.sites[site]
    if site.kind is SiteKind.LOSS:
        return _merge_loss(site, records, side)
    with_tokens = [record for record in records if record.table is not None]
    if not with_tokens:
        return _merge_whole(site, records, side)
    if len(with_tokens) < len(records):
        side.found(Verdict.CORRUPT, f"{site.label}: some of its records name their tokens, others do not")
    pieces = _whole_pieces(site, with_tokens, side)
    if len({piece.values.shape[1:] for piece in pieces}) > 1:
        shapes = sorted({str(list(piece.values.shape[1:])) for piece in pieces})
        side.found(Verdict.CORRUPT, f"{site.label}: rows of several shapes: {', '.join(shapes)}")
        return None
    return _one_row_per_token(site, pieces, side) if pieces else None


def _whole_pieces(site: ComparedSite, records: Sequence[TensorRecord], side: Side) -> list[_RowsPiece]:
    """Join the parts of the last dimension of equal tokens of a microbatch; copies of a part must agree."""
    parts: dict[tuple[int, str, int], dict[int, _RowsPiece]] = {}
    for record in records:
        tokens, values = side.tokens(record), side.load(record)
        if tokens is None or values is None:
            continue
        index, count = (0, 1) if record.split is None else (record.split.index, record.split.count)
        if values.dim() < (1 if count == 1 else 2) or len(values) != len(tokens.code_R) or not 0 <= index < count:
            text = f"{site.label}: rank {record.rank}: shape {list(values.shape)} is not of {len(tokens.code_R)} tokens"
            side.found(Verdict.CORRUPT, f"{text}, part {index + 1} of {count}")
            continue
        piece = _RowsPiece(rank=record.rank, code_R=tokens.code_R, token_R=tokens.token_R, values=values)
        held = parts.setdefault((record.place.microbatch, tokens.identity, count), {})
        first = held.setdefault(index, piece)
        if first is not piece:
            _check_copies(site, side, (first.rank, first.values), (record.rank, values))
    whole = []
    for (microbatch, _, count), held in parts.items():
        missing = sorted(set(range(count)) - set(held))
        first = next(iter(held.values()))
        if missing:
            text = f"{site.label}: microbatch {microbatch} of rank {first.rank} lacks parts {missing} of {count}"
            side.found(Verdict.INCOMPLETE, text)
            continue
        values = first.values if count == 1 else torch.cat([held[index].values for index in range(count)], dim=-1)
        whole.append(_RowsPiece(rank=first.rank, code_R=first.code_R, token_R=first.token_R, values=values))
    return whole


def _one_row_per_token(site: ComparedSite, pieces: Sequence[_RowsPiece], side: Side) -> Merged:
    """Sort by sample and position; a token that several pieces hold must be the same in all."""
    rank_N = torch.cat([torch.full_like(piece.code_R, piece.rank) for piece in pieces])
    code_N, order = torch.cat([piece.code_R for piece in pieces]).sort(stable=True)
    token_N = torch.cat([piece.token_R for piece in pieces])[order]
    values = take_rows(pieces[0].values if len(pieces) == 1 else torch.cat([p.values for p in pieces]), order)
    rank_N = rank_N[order]
    is_first = torch.ones_like(code_N, dtype=torch.bool)
    is_first[1:] = code_N[1:] != code_N[:-1]
    if not bool(is_first.all()):
        group_N = is_first.cumsum(0) - 1
        first_N = is_first.nonzero()[:, 0][group_N]
        copies = (~is_first).nonzero()[:, 0]
        firsts = first_N[copies]
        _check_tokens(site, side, (token_N[firsts], token_N[copies]), code_N[copies])
        bad = _differing(values[firsts], values[copies])
        if len(bad):
            code, ranks = (
                int(code_N[copies[bad[0]]]),
                sorted({int(rank_N[firsts[bad[0]]]), int(rank_N[copies[bad[0]]])}),
            )
            text = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} and {ranks[1]}"
            where = f"sample {side.key_of(code)!r}, position {code % POSITIONS}"
            side.found(
                Verdict.MISMATCH,
                f"{site.label}: replicas differ: {text} hold the same token, first {where}; {len(bad)} in all",
            )
    values = take_rows(values, is_first.nonzero()[:, 0])
    return Merged(values=values, code_N=code_N[is_first], token_N=token_N[is_first])


def _merge_whole(site: ComparedSite, records: Sequence[TensorRecord], side: Side) -> Merged | None:
    """Return a tensor without tokens, such as a gradient: copies or parts of one."""
    held: dict[int, tuple[int, torch.Tensor]] = {}
    count = 1
    for record in records:
        values = side.load(record)
        if values is None:
            continue
        count = 1 if record.split is None else record.split.count
        index = 0 if record.split is None else record.split.index
        first = held.setdefault(index, (record.rank, values))
        if first[1] is not values:
            _check_copies(site, side, first, (record.rank, values))
    if not held or set(held) != set(range(count)):
        side.found(Verdict.INCOMPLETE, f"{site.label}: {len(held)} of {count} parts are there")
        return None
    values = torch.cat([held[index][1] for index in range(count)], dim=-1) if count > 1 else held[0][1]
    values = values if values.dim() > 1 else values.reshape(1, -1)
    return Merged(values=values, code_N=None, token_N=None)


def _merge_loss(site: ComparedSite, records: Sequence[TensorRecord], side: Side) -> Merged | None:
    """Return the sum over data ranks and microbatches, which are shares of one batch; other ranks hold copies."""
    if not side.has_all_ranks:
        side.found(Verdict.INCOMPLETE, f"{site.label}: not compared: a sum over what is there is not the batch's loss")
        return None
    sizes = {axis: max(1, int(side.folder.manifest.layout.get(axis, 1))) for axis in ("tp", "cp", "dp")}
    stage_size = sizes["tp"] * sizes["cp"] * sizes["dp"]
    last = max(record.rank // stage_size for record in records)
    held: dict[tuple[int, int], tuple[int, torch.Tensor]] = {}
    for record in records:
        values = side.load(record)
        if values is None or record.rank // stage_size != last:
            continue
        if values.numel() != 1:
            side.found(
                Verdict.CORRUPT, f"{site.label}: rank {record.rank}: expected a number, got {list(record.shape)}"
            )
            continue
        data_rank = record.rank // (sizes["tp"] * sizes["cp"]) % sizes["dp"]
        # Ranks are read in their order: the one without tensor and context parts comes first.
        first = held.setdefault((data_rank, record.place.microbatch), (record.rank, values))
        if first[1] is not values:
            _check_copies(site, side, first, (record.rank, values))
    missing = sorted(set(range(sizes["dp"])) - {data_rank for data_rank, _ in held})
    if missing:
        side.found(Verdict.INCOMPLETE, f"{site.label}: not compared: no loss of data ranks {missing}")
        return None
    values = torch.stack([values.reshape(()).double() for _, values in held.values()]).sum()
    dtype = next(iter(held.values()))[1].dtype
    return Merged(values=values.to(dtype).reshape(1, 1), code_N=None, token_N=None)


def _check_copies(
    site: ComparedSite, side: Side, first: tuple[int, torch.Tensor], other: tuple[int, torch.Tensor]
) -> None:
    """Check that two ranks agree; `first` and `other` are a rank and its tensor."""
    (rank_a, a), (rank_b, b) = first, other
    ranks = f"ranks {rank_a} and {rank_b}" if rank_a != rank_b else f"records of rank {rank_a}"
    if a.shape != b.shape:
        text = f"replicas differ: {ranks} hold shapes {list(a.shape)} and {list(b.shape)}"
        side.found(Verdict.MISMATCH, f"{site.label}: {text}")
        return
    rows_a, rows_b = (value if value.dim() > 1 else value.reshape(-1, 1) for value in (a, b))
    bad = _differing(rows_a, rows_b)
    if len(bad):
        text = f"replicas differ: {ranks}, {len(bad)} of {len(rows_a)} rows, first {int(bad[0])}"
        side.found(Verdict.MISMATCH, f"{site.label}: {text}")


def _check_tokens(
    site: ComparedSite, side: Side, tokens: tuple[torch.Tensor, torch.Tensor], code_C: torch.Tensor
) -> None:
    bad = (tokens[0] != tokens[1]).nonzero()[:, 0]
    if len(bad):
        code, at = int(code_C[bad[0]]), int(bad[0])
        ids = f"{int(tokens[0][at])} and {int(tokens[1][at])}"
        where = f"sample {side.key_of(code)!r}, position {code % POSITIONS}"
        side.found(Verdict.MISMATCH, f"{site.label}: replicas differ: {where} is token {ids}")


def _differing(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return rows that are not copies; NaN is a copy of NaN."""
    stats = row_stats(as_rows(a), as_rows(b))
    limit = REPLICA_LIMIT**2 * torch.maximum(stats.squares_a, stats.squares_a.mean())
    return ((stats.squares_diff > limit) | (stats.num_broken > 0)).nonzero()[:, 0]


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
    """Rows of a site that both sides have: row `rows_a[i]` of A is row `rows_b[i]` of B. Of a tensor without tokens
    these are all there are."""

    rows_a: torch.Tensor
    rows_b: torch.Tensor
    code_M: torch.Tensor | None = None
    """Codes in numbers of side A; None for a tensor without tokens."""
    token_M: torch.Tensor | None = None
    token_b_M: torch.Tensor | None = None
    """Tokens of side B, like `token_M`."""
    only_a: Sequence[int] | torch.Tensor = ()
    """Codes of A's rows that B has not."""
    only_b: Sequence[int] | torch.Tensor = ()
    """Codes of B's, in B's numbers."""
    differing_tokens: Sequence[int] | torch.Tensor = ()
    """Matched rows whose token ids differ."""


def match_samples(a: Side, b: Side) -> SampleMap:
    """Match samples by key; where no key is on both sides, by the tokens of samples of which each side has one."""
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
    """Return rows of the same sample and position, in A's order."""
    if a.code_N is None or b.code_N is None or a.token_N is None or b.token_N is None:
        rows = torch.arange(len(a.values))
        return MatchedRows(rows_a=rows, rows_b=rows)
    number_N = samples.to_a[b.code_N // POSITIONS]
    is_known = number_N >= 0
    code_b = torch.where(is_known, number_N * POSITIONS + b.code_N % POSITIONS, -1)
    sorted_b, order_b = code_b.sort()
    at = torch.searchsorted(sorted_b, a.code_N).clamp(max=max(0, len(sorted_b) - 1))
    is_in_both = sorted_b[at] == a.code_N if len(sorted_b) else torch.zeros_like(a.code_N, dtype=torch.bool)
    rows_a = is_in_both.nonzero()[:, 0]
    rows_b = order_b[at[rows_a]] if len(rows_a) else rows_a
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
    """Return digest -> key, of digests that one key has."""
    counts = Counter(digests.values())
    return {digest: key for key, digest in digests.items() if counts[digest] == 1}
