"""Microbatches: inputs of forward passes, padded or packed, out of a batch and a pack plan, and back to `[N, T]`.

Called by the train step and the log-probability pass. Invariant: where a row lies (padded, packed, which microbatch)
changes only the layout of the pass, never which tokens are selected. Shapes: N rows of the batch, n rows of the
microbatch, T width of the batch, t longest row of the microbatch, S width of the pass, M selected tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from dataclasses import fields as dataclass_fields
from itertools import accumulate
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.utils.rnn import pad_sequence

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.collectives import gather_along, reduce_from
from nemo_rl.distributed.layout import ParallelLayout
from nemo_rl.distributed.packing import PackPlan, round_up
from nemo_rl.models.attention.varlen import Segments
from nemo_rl.models.head.logits import SUPPORT, KeptSets, LazyLogits, decode_support
from nemo_rl.models.head.logprobs import Sampling, TopTokens, VocabShard, WantedLines, token_lines, top_k_logprobs
from nemo_rl.models.policy.interfaces import (
    ENTROPY,
    HOST_COLUMNS,
    POLICY_TOPK,
    SQUARED_PROBS,
    TOPK_IDS,
    UNFILTERED_LOGPROBS,
)

__all__ = [
    "ForwardInputs",
    "Microbatch",
    "PassPlaces",
    "PassShape",
    "build_microbatch",
    "fixed_plan",
    "row_names",
    "selected_logprobs",
    "selected_top_k",
    "steps_of",
    "top_k_logits",
]

KEYS_COLUMN = "keys"
"""Optional list column with the keys of the rows; errors then name keys instead of row numbers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardInputs:
    """One forward pass of this rank: tokens in, and which tokens' log-probabilities out."""

    input_ids: torch.Tensor
    """`[n, s]` int64: this rank's positions of the pass."""
    position_ids: torch.Tensor
    """`[1, s]` int64, restarting with every sequence; `[3, n, s]` with images and M-RoPE."""
    row_ns: torch.Tensor
    """`[n, s]` int64: row within the microbatch of the token at each position; -1 where none lies."""
    column_ns: torch.Tensor
    """`[n, s]` int64: its position in the row; 0 where none lies."""
    lengths: tuple[int, ...]
    """Tokens of each row of the microbatch, on all context ranks together."""
    is_padding_ns: torch.Tensor
    """`[n, s]` bool: positions that hold no token."""
    segments: Segments
    """Sequences in the whole pass, the same in each of the n rows."""
    num_selected: int
    """M, tokens whose log-probabilities are wanted, over all context ranks."""
    selected_m: torch.Tensor
    """`[m]` index into M of those that this rank's positions predict."""
    keep_K: torch.Tensor
    """`[K]` local positions whose logits are computed, the same for every row; at least one."""
    row_m: torch.Tensor
    """`[m]` row of each."""
    kept_m: torch.Tensor
    """`[m]` index into `keep_K` of the position that predicts it."""
    target_m: torch.Tensor
    """`[m]` the tokens."""
    kept: KeptSets | None = None
    """The sets that they were sampled from, where the batch has them."""
    extras: Mapping[str, tuple[torch.Tensor, ...]] = field(default_factory=dict)
    """Extra columns without a token axis, such as those of images: one tensor per row of the microbatch."""
    feature_ns: torch.Tensor | None = None
    """`[n, s]` int64: which feature of the rows' images stands at a position, -1 where a token does; None without
    columns of images."""
    topk_mK: torch.Tensor | None = None
    """Tokens at each position whose log-probabilities the loss compares, where the batch has them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PassShape:
    """The shape that the layout of the ranks asks of a forward pass."""

    divisible_by: int = 1
    """The width of the pass is rounded up to a multiple."""
    sequence_multiple: int = 1
    """Number that divides every sequence of a packed pass; divides `divisible_by`."""
    cp_size: int = 1
    cp_rank: int = 0
    context: dist.ProcessGroup | None = None

    @classmethod
    def of(
        cls, layout: ParallelLayout, *, rank: int, context: dist.ProcessGroup | None, configured_multiple: int
    ) -> PassShape:
        """Return shape for a rank.

        Args:
            context: group of its context axis; None for one rank.
            configured_multiple: `policy.make_sequence_length_divisible_by`.
        """
        return cls(
            divisible_by=layout.round_up_multiple(configured_multiple),
            sequence_multiple=layout.length_multiple,
            cp_size=layout.cp,
            cp_rank=layout.coordinates(rank).cp,
            context=context,
        )

    def segments(self, lengths: tuple[int, ...], *, device: torch.device) -> Segments:
        return Segments(lengths=lengths, cp_size=self.cp_size, cp_rank=self.cp_rank, group=self.context, device=device)


@dataclass(frozen=True, kw_only=True, slots=True)
class Microbatch:
    """Rows of one forward pass, with the way back to `[n, t]`."""

    rows: tuple[int, ...]
    """Indices into the batch; empty for a pass that only keeps this rank in step with the others."""
    row_index_n: torch.Tensor
    """The same, int64."""
    lengths: tuple[int, ...]
    ids_nt: torch.Tensor
    """`[n, t]` int64 tokens, of padding anything."""
    columns: dict[str, torch.Tensor]
    """`[n, t, ...]` and `[n]`, cut to the longest row."""
    width: int
    """t, at least 1."""
    inputs: ForwardInputs
    out_row_M: torch.Tensor
    out_column_M: torch.Tensor

    def to(self, device: torch.device) -> Microbatch:
        """Return the microbatch on the device; the copies run while the host goes on."""
        return self if device.type == "cpu" else _sent(self, device)

    def to_rows(self, values_M: torch.Tensor) -> torch.Tensor:
        """Return selected values at their places in `[n, t]`, 0 elsewhere; differentiable."""
        zeros_nt = values_M.new_zeros(len(self.rows), self.width, *values_M.shape[1:])
        return zeros_nt.index_put((self.out_row_M, self.out_column_M), values_M)


def fixed_plan(num_rows: int, *, rows_per_step: int, rows_per_microbatch: int, pad_to: int) -> PackPlan:
    """Return one rank's plan of consecutive rows.

    Raises:
        ValueError: the rows do not divide into steps.
    """
    if rows_per_step < 1 or num_rows % rows_per_step:
        raise ValueError(
            f"expected a multiple of {rows_per_step} rows per rank (global batch size / ranks), got {num_rows}; "
            "change policy.train_global_batch_size or the number of samples per step"
        )
    steps: list[int] = []
    microbatches: list[tuple[int, ...]] = []
    for first in range(0, num_rows, rows_per_step):
        last = first + rows_per_step
        part = [
            tuple(range(start, min(start + rows_per_microbatch, last)))
            for start in range(first, last, rows_per_microbatch)
        ]
        steps.append(len(part))
        microbatches += part
    return PackPlan(microbatches=(tuple(microbatches),), steps=tuple(steps), pad_to=pad_to)


def steps_of(plan: PackPlan, *, num_rows: int) -> list[tuple[tuple[int, ...], ...]]:
    """Return the microbatches of each optimizer step of one rank's plan.

    Raises:
        ValueError: the plan is not of one rank, or does not name every row of the batch once.
    """
    if plan.num_ranks != 1:
        raise ValueError(f"expected one rank's part of the plan (plan.for_rank), got {plan.num_ranks} ranks")
    if sorted(plan.rows_of_rank(0)) != list(range(num_rows)):
        raise ValueError(f"the plan names {len(plan.rows_of_rank(0))} rows, expected each of the {num_rows} rows once")
    if sum(plan.steps) != len(plan.microbatches[0]):
        raise ValueError(f"the plan's steps {plan.steps} do not add up to {len(plan.microbatches[0])} microbatches")
    return list(plan.iter_steps(0))


def build_microbatch(
    batch: BatchedDataDict,
    rows: Sequence[int],
    *,
    select_NT: torch.Tensor,
    fields: Sequence[str],
    is_packed: bool,
    shape: PassShape,
    device: torch.device | None = None,
) -> Microbatch:
    """Return the microbatch on the CPU: what is built there waits for no device. `Microbatch.to` sends it.

    Args:
        batch: on the CPU.
        select_NT: `[N, T]` bool on the CPU, tokens whose log-probability is wanted; position 0 never is.
        fields: columns that the loss reads; of those that differ in a dim without tokens, padded with 0.
        is_packed: lay the rows end to end in one row instead of padding them.
        device: of the pass; None means the CPU.
    """
    index = torch.tensor(rows, dtype=torch.int64)
    lengths = tuple(batch.tensor("input_lengths")[index].tolist())
    width = max((1, *lengths))
    ids_nt = batch.tensor("input_ids")[index, :width].numpy().astype(np.int64, copy=False)
    extras = _extra_rows(batch, rows)
    columns = {}
    for name in fields:
        if name in extras:
            columns[name] = pad_sequence(list(extras[name]), batch_first=True) if rows else torch.empty(0)
            continue
        column = batch.tensor(name)
        columns[name] = column[index, :width] if column.dim() > 1 else column[index]
    select_nt = select_NT[index, :width].numpy() & (np.arange(width) < np.array(lengths, dtype=np.int64)[:, None])
    select_nt[:, :1] = False
    row_M, column_M = select_nt.nonzero()
    places = PassPlaces.of(lengths, is_packed=is_packed, shape=shape, device=device or torch.device("cpu"))
    inputs = _on_this_rank(places, lengths, ids_nt, (row_M, column_M), shape)
    if SUPPORT in batch or TOPK_IDS in columns:
        inputs = _with_sets(inputs, batch, index, (ids_nt, row_M, column_M), columns.get(TOPK_IDS))
    if extras:
        inputs = replace(inputs, extras=extras)
    return Microbatch(
        rows=tuple(rows),
        row_index_n=index,
        lengths=lengths,
        ids_nt=torch.from_numpy(ids_nt),
        columns=columns,
        width=width,
        inputs=inputs,
        out_row_M=torch.from_numpy(row_M),
        out_column_M=torch.from_numpy(column_M),
    )


def _sent(part: Any, device: torch.device) -> Any:
    """Return the same with every tensor on the device; the copies run while the host goes on."""
    if isinstance(part, torch.Tensor):
        return part if part.device == device else part.pin_memory().to(device, non_blocking=True)
    if isinstance(part, tuple):
        return tuple(_sent(each, device) for each in part)
    if isinstance(part, dict):
        # Numbers that the loss reads one by one stay where reading them costs nothing.
        return {name: each if name in HOST_COLUMNS else _sent(each, device) for name, each in part.items()}
    if is_dataclass(part) and not isinstance(part, type):
        return replace(part, **{each.name: _sent(getattr(part, each.name), device) for each in dataclass_fields(part)})
    return part


def _extra_rows(batch: BatchedDataDict, rows: Sequence[int]) -> dict[str, tuple[torch.Tensor, ...]]:
    return {
        name: tuple(row for row in (column[at] for at in rows) if isinstance(row, torch.Tensor))
        for name, column in batch.items()
        if isinstance(column, list) and column and isinstance(column[0], torch.Tensor)
    }


def _with_sets(
    inputs: ForwardInputs,
    batch: BatchedDataDict,
    rows: torch.Tensor,
    scored: tuple[np.ndarray, np.ndarray, np.ndarray],
    topk_ntK: torch.Tensor | None,
) -> ForwardInputs:
    """Return the inputs with the sets of tokens that belong to each scored token, as far as the batch has them.

    Args:
        rows: of the batch in this microbatch.
        scored: tokens `[n, t]`, row within the microbatch of each scored one, and its position in the row.
    """
    ids_nt, row_M, column_M = (torch.from_numpy(part) for part in scored)
    places = row_M[inputs.selected_m], column_M[inputs.selected_m]
    kept = None
    if SUPPORT in batch:
        is_response_nt = batch.tensor("token_mask")[rows, : ids_nt.shape[1]].bool()
        kept = decode_support(batch.tensor(SUPPORT)[rows], ids_nt, is_response_nt, *places)
    return replace(inputs, kept=kept, topk_mK=None if topk_ntK is None else topk_ntK[places])


@dataclass(frozen=True, kw_only=True, slots=True)
class PassPlaces:
    """The places of the tokens of all rows in a pass of n rows, S positions wide; known from lengths alone."""

    row_nS: torch.Tensor
    """`[n, S]` int64: number of the row within the microbatch; -1 where no token lies."""
    column_nS: torch.Tensor
    """`[n, S]` int64: position of the token in its row; 0 where no token lies."""
    position_S: torch.Tensor
    """`[S]` int64, restarting with every sequence."""
    segments: Segments

    @classmethod
    def of(cls, lengths: Sequence[int], *, is_packed: bool, shape: PassShape, device: torch.device) -> PassPlaces:
        """Return places of the whole pass.

        Args:
            lengths: of the microbatch's rows.
            is_packed: rows lie end to end in one row instead of being padded.
        """
        layout = _packed_places if is_packed else _padded_places
        return layout(tuple(lengths), shape, device)

    def on_context_rank(self, rank: int) -> PassPlaces:
        """Return the positions that one context rank holds, in its order."""
        if self.segments.cp_size == 1:
            return self
        mine_s = self.segments.local_positions(rank)
        return PassPlaces(
            row_nS=self.row_nS[:, mine_s],
            column_nS=self.column_nS[:, mine_s],
            position_S=self.position_S[mine_s],
            segments=self.segments,
        )


def _padded_places(lengths: tuple[int, ...], shape: PassShape, device: torch.device) -> PassPlaces:
    width = round_up(max((1, *lengths)), shape.divisible_by)
    position_S = np.arange(width)
    is_real_nS = position_S < np.array(lengths or (0,))[:, None]
    return PassPlaces(
        row_nS=torch.from_numpy(np.where(is_real_nS, np.arange(len(is_real_nS))[:, None], -1)),
        column_nS=torch.from_numpy(np.where(is_real_nS, position_S, 0)),
        position_S=torch.from_numpy(position_S),
        segments=shape.segments((width,), device=device),
    )


def _packed_places(lengths: tuple[int, ...], shape: PassShape, device: torch.device) -> PassPlaces:
    own = [round_up(length, shape.sequence_multiple) for length in lengths]
    # The tail that fills the width is a segment of its own: its positions restart at 0 as well.
    tail = round_up(max(sum(own), 1), shape.divisible_by) - sum(own)
    segment_lengths = tuple(length for length in (*own, tail) if length)
    position_S = np.concatenate([np.arange(length) for length in segment_lengths])
    row_S, column_S = np.full_like(position_S, -1), np.zeros_like(position_S)
    for row, (start, length) in enumerate(zip(accumulate(own, initial=0), lengths, strict=False)):
        row_S[start : start + length] = row
        column_S[start : start + length] = position_S[start : start + length]
    return PassPlaces(
        row_nS=torch.from_numpy(row_S[None]),
        column_nS=torch.from_numpy(column_S[None]),
        position_S=torch.from_numpy(position_S),
        segments=shape.segments(segment_lengths, device=device),
    )


def _on_this_rank(
    places: PassPlaces,
    lengths: tuple[int, ...],
    ids_nt: np.ndarray,
    selected: tuple[np.ndarray, np.ndarray],
    shape: PassShape,
) -> ForwardInputs:
    """Return this context rank's positions, and the selected tokens that they predict, all on the CPU.

    Args:
        selected: row within the microbatch of each selected token, and its position in the row, both `[M]`.
    """
    row_M, column_M = selected
    local = places.on_context_rank(shape.cp_rank)
    row_nS, column_nS = local.row_nS.numpy(), local.column_nS.numpy()
    # Place of the token whose successor a position of this rank predicts.
    local_nt = np.full((max(1, len(ids_nt)), ids_nt.shape[1]), -1)
    pass_row_nt = np.zeros_like(local_nt)
    pass_row_R, local_R = (row_nS >= 0).nonzero()
    source_R = row_nS[pass_row_R, local_R], column_nS[pass_row_R, local_R]
    local_nt[source_R], pass_row_nt[source_R] = local_R, pass_row_R
    place_M = local_nt[row_M, column_M - 1]
    selected_m = (place_M >= 0).nonzero()[0]
    row_m, column_m = row_M[selected_m], column_M[selected_m]
    # Logits are computed at the union of the positions that some row needs; at least one keeps the graph whole.
    keep_K, kept_m = np.unique(place_M[selected_m], return_inverse=True)
    ids_ns = np.zeros_like(row_nS)
    ids_ns[pass_row_R, local_R] = ids_nt[source_R]
    return ForwardInputs(
        input_ids=torch.from_numpy(ids_ns),
        position_ids=local.position_S[None],
        row_ns=local.row_nS,
        column_ns=local.column_nS,
        lengths=lengths,
        is_padding_ns=torch.from_numpy(row_nS < 0),
        segments=places.segments,
        num_selected=len(row_M),
        selected_m=torch.from_numpy(selected_m),
        keep_K=torch.from_numpy(keep_K if len(keep_K) else np.zeros(1, dtype=np.int64)),
        row_m=torch.from_numpy(pass_row_nt[row_m, column_m - 1]),
        kept_m=torch.from_numpy(kept_m),
        target_m=torch.from_numpy(ids_nt[row_m, column_m]),
    )


def selected_logprobs(
    logits: LazyLogits,
    inputs: ForwardInputs,
    *,
    sampling: Sampling,
    shard: VocabShard | None,
    computed: Sequence[str] = (),
) -> torch.Tensor:
    """Return `[1, M]` float32, the same on every tensor and context rank (collective over both), differentiable.

    Args:
        logits: at `inputs.keep_K`, with dimensions n and K for M.
        shard: this rank's part of the vocabulary where the head is split.
        computed: `SQUARED_PROBS`, or some of `COMPUTED_FIELDS` in their order: a line more for each, and K + 1 lines
            for `POLICY_TOPK`.
    """
    lines = WantedLines(
        entropy=ENTROPY in computed,
        squares=SQUARED_PROBS in computed,
        unfiltered=UNFILTERED_LOGPROBS in computed,
        ids_MK=inputs.topk_mK.long() if POLICY_TOPK in computed and inputs.topk_mK is not None else None,
    )
    assert (POLICY_TOPK in computed) == (lines.ids_MK is not None), f"the batch has no column {TOPK_IDS}"
    logits = _at_selected(logits, inputs)
    found_cm = token_lines(logits, inputs.target_m, sampling=sampling, shard=shard, kept=inputs.kept, lines=lines)
    return _on_every_context_rank(found_cm, inputs)


def _at_selected(logits: LazyLogits, inputs: ForwardInputs) -> LazyLogits:
    """Return the logits at the selected positions: of a pass with one row all that are kept, in their order."""

    def select(values_nKd: torch.Tensor | None) -> torch.Tensor | None:
        if values_nKd is None:
            return None
        if len(values_nKd) == 1 and values_nKd.shape[1] == len(inputs.kept_m):
            return values_nKd.squeeze(0)
        return values_nKd[inputs.row_m, inputs.kept_m]

    hidden, weight, bias, narrow, wide = logits.tensors
    return logits.of((select(hidden), weight, bias, select(narrow), wide))


def selected_top_k(
    logits: LazyLogits, inputs: ForwardInputs, wanted: TopTokens, *, temperature: float, shard: VocabShard | None
) -> torch.Tensor:
    """Return `[2 (k + 1), M]` float32: the k most likely tokens' log-probabilities and a 0, which are finite, then
    their ids and the log-probability of all others together, at each selected token; the same on every tensor and
    context rank (collective over both), without gradient.

    Ids are exact in float32: vocabularies are smaller than 2^24.
    """
    logprobs_mk, ids_mk = top_k_logprobs(_at_selected(logits, inputs), wanted, temperature=temperature, shard=shard)
    top_km, rest_m = logprobs_mk[:, :-1].T, logprobs_mk[:, -1]
    return _on_every_context_rank(torch.cat([top_km, torch.zeros_like(rest_m)[None], ids_mk.T, rest_m[None]]), inputs)


def _on_every_context_rank(found_cm: torch.Tensor, inputs: ForwardInputs) -> torch.Tensor:
    """(collective) Return `[c, M]`: every context rank gets the tokens of all, so that a loss sees whole rows."""
    if inputs.segments.group is None:
        return found_cm
    places = torch.arange(len(found_cm), device=found_cm.device)[:, None], inputs.selected_m[None]
    zeros_cM = found_cm.new_zeros(len(found_cm), inputs.num_selected)
    return reduce_from(zeros_cM.index_put(places, found_cm), inputs.segments.group)


def top_k_logits(
    logits_nsV: torch.Tensor, segments: Segments, *, k: int, shard: VocabShard | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return values and ids `[n, S, k]` at every position (collective over tensor and context ranks)."""
    if shard is not None:
        logits_nsV = gather_along(logits_nsV, shard.group, dim=2)
    values, ids = logits_nsV.float().topk(k, dim=-1)
    if segments.group is None:
        return values, ids
    order = segments.row_order
    whole = [gather_along(part, segments.group, dim=1).index_select(1, order) for part in (values, ids)]
    return whole[0], whole[1]


def row_names(batch: BatchedDataDict, rows: Sequence[int]) -> list[str]:
    keys = batch.get(KEYS_COLUMN)
    return [str(keys[row]) for row in rows] if isinstance(keys, list) else [f"row {row}" for row in rows]
