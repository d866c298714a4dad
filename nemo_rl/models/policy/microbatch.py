"""From a batch and a pack plan to the inputs of forward passes, padded or packed, and back to `[N, T]`.

Called by the train step and the log-probability pass. Invariant: where a row lies (padded, packed, which microbatch)
changes only the layout of the pass, never which tokens are selected. Shapes: N rows of the batch, n rows of the
microbatch, T width of the batch, t longest row of the microbatch, S width of the pass, M selected tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.layout import ParallelLayout
from nemo_rl.distributed.packing import PackPlan, round_up
from nemo_rl.models.varlen_attention import Segments

__all__ = ["ForwardInputs", "Microbatch", "PassShape", "build_microbatch", "fixed_plan", "steps_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardInputs:
    """One forward pass of this rank: tokens in, and which tokens' log-probabilities out."""

    input_ids: torch.Tensor
    """`[n, s]` int64: this rank's positions of the pass."""
    position_ids: torch.Tensor
    """`[1, s]` int64, restarting with every sequence."""
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


@dataclass(frozen=True, kw_only=True, slots=True)
class PassShape:
    """What the layout of the ranks asks of a forward pass."""

    divisible_by: int = 1
    """The width of the pass is rounded up to a multiple."""
    sequence_multiple: int = 1
    """So is every sequence of a packed pass; divides `divisible_by`."""
    cp_size: int = 1
    cp_rank: int = 0
    context: dist.ProcessGroup | None = None

    @classmethod
    def of(
        cls, layout: ParallelLayout, *, rank: int, context: dist.ProcessGroup | None, configured_multiple: int
    ) -> PassShape:
        """Shape for a rank.

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
    lengths: tuple[int, ...]
    columns: dict[str, torch.Tensor]
    """`[n, t]` and `[n]`, cut to the longest row."""
    width: int
    """t, at least 1."""
    inputs: ForwardInputs
    out_row_M: torch.Tensor
    out_column_M: torch.Tensor

    def to_rows(self, values_M: torch.Tensor) -> torch.Tensor:
        """Selected values at their places in `[n, t]`, 0 elsewhere; differentiable."""
        zeros_nt = values_M.new_zeros(len(self.rows), self.width)
        return zeros_nt.index_put((self.out_row_M, self.out_column_M), values_M)


def fixed_plan(num_rows: int, *, rows_per_step: int, rows_per_microbatch: int, pad_to: int) -> PackPlan:
    """One rank's plan of consecutive rows.

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
    """The microbatches of each optimizer step of one rank's plan.

    Raises:
        ValueError: the plan is not of one rank, or does not name every row of the batch once.
    """
    if plan.num_ranks != 1:
        raise ValueError(f"expected one rank's view of the plan (plan.for_rank), got {plan.num_ranks} ranks")
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
) -> Microbatch:
    """Args:
    select_NT: `[N, T]` bool, tokens whose log-probability is wanted; position 0 never is.
    fields: columns that the loss reads.
    is_packed: lay the rows end to end in one row instead of padding them.
    """
    device = select_NT.device
    index = torch.tensor(list(rows), dtype=torch.int64, device=device)
    lengths = tuple(int(n) for n in batch.tensor("input_lengths")[index].tolist())
    width = max((1, *lengths))
    ids_nt = batch.tensor("input_ids")[index, :width].long()
    columns = {}
    for name in fields:
        column = batch.tensor(name)
        columns[name] = column[index, :width] if column.dim() > 1 else column[index]
    is_real_nt = torch.arange(width, device=device) < torch.tensor(lengths, device=device)[:, None]
    select_nt = select_NT[index, :width] & is_real_nt
    if len(rows):
        select_nt[:, 0] = False
    row_M, column_M = select_nt.nonzero(as_tuple=True)
    layout = _packed if is_packed else _padded
    whole = layout(ids_nt, lengths, row_M, column_M, shape)
    return Microbatch(
        rows=tuple(rows),
        lengths=lengths,
        columns=columns,
        width=width,
        inputs=_on_this_rank(whole, ids_nt[row_M, column_M], shape),
        out_row_M=row_M,
        out_column_M=column_M,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Pass:
    """The whole pass, before it is split over context ranks."""

    ids_nS: torch.Tensor
    position_S: torch.Tensor
    segment_lengths: tuple[int, ...]
    is_padding_nS: torch.Tensor
    row_M: torch.Tensor
    """Row of the pass of each selected token."""
    place_M: torch.Tensor
    """Position of the pass that predicts it."""


def _padded(
    ids_nt: torch.Tensor, lengths: Sequence[int], row_M: torch.Tensor, column_M: torch.Tensor, shape: PassShape
) -> _Pass:
    width = round_up(ids_nt.shape[1], shape.divisible_by)
    ids_nS = torch.nn.functional.pad(ids_nt, (0, width - ids_nt.shape[1])) if lengths else ids_nt.new_zeros(1, width)
    position_S = torch.arange(width, device=ids_nt.device)
    return _Pass(
        ids_nS=ids_nS,
        position_S=position_S,
        segment_lengths=(width,),
        is_padding_nS=position_S >= torch.tensor(lengths or (0,), device=ids_nt.device)[:, None],
        row_M=row_M,
        place_M=column_M - 1,
    )


def _packed(
    ids_nt: torch.Tensor, lengths: Sequence[int], row_M: torch.Tensor, column_M: torch.Tensor, shape: PassShape
) -> _Pass:
    device = ids_nt.device
    own = [round_up(length, shape.sequence_multiple) for length in lengths]
    # The tail that fills the width is a segment of its own: its positions restart at 0 as well.
    tail = round_up(max(sum(own), 1), shape.divisible_by) - sum(own)
    segments = tuple(length for length in (*own, tail) if length)
    ids_S = ids_nt.new_zeros(sum(segments))
    start_n = torch.tensor([0, *own], device=device).cumsum(0)[:-1]
    is_padding_S = torch.ones_like(ids_S, dtype=torch.bool)
    for i, length in enumerate(lengths):
        place = slice(int(start_n[i]), int(start_n[i]) + length)
        ids_S[place], is_padding_S[place] = ids_nt[i, :length], False
    return _Pass(
        ids_nS=ids_S[None],
        position_S=torch.cat([torch.arange(length, device=device) for length in segments]),
        segment_lengths=segments,
        is_padding_nS=is_padding_S[None],
        row_M=torch.zeros_like(row_M),
        place_M=start_n[row_M] + column_M - 1,
    )


def _on_this_rank(whole: _Pass, target_M: torch.Tensor, shape: PassShape) -> ForwardInputs:
    """This context rank's positions, and the selected tokens that they predict."""
    device = target_M.device
    segments = shape.segments(whole.segment_lengths, device=device)
    ids_ns, position_s, place_M = whole.ids_nS, whole.position_S, whole.place_M
    is_padding_ns = whole.is_padding_nS
    selected_m = torch.arange(len(place_M), device=device)
    if segments.cp_size > 1:
        mine_s = segments.local_positions()
        local_S = torch.full_like(whole.position_S, -1)
        local_S[mine_s] = torch.arange(len(mine_s), device=device)
        ids_ns, position_s, is_padding_ns = ids_ns[:, mine_s], position_s[mine_s], is_padding_ns[:, mine_s]
        selected_m = (local_S[place_M] >= 0).nonzero()[:, 0]
        place_M = local_S[place_M]
    # Logits are computed at the union of the positions that some row needs; at least one keeps the graph whole.
    keep_K, kept_m = torch.unique(place_M[selected_m], return_inverse=True)
    if not len(keep_K):
        keep_K = place_M.new_zeros(1)
    return ForwardInputs(
        input_ids=ids_ns,
        position_ids=position_s[None],
        is_padding_ns=is_padding_ns,
        segments=segments,
        num_selected=len(target_M),
        selected_m=selected_m,
        keep_K=keep_K,
        row_m=whole.row_M[selected_m],
        kept_m=kept_m,
        target_m=target_M[selected_m],
    )
