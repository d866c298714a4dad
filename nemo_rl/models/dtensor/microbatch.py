"""From a batch and a pack plan to the inputs of forward passes, padded or packed, and back to `[N, T]`.

Called by the train step and the log-probability pass. Invariant: where a row lies (padded, packed, which microbatch)
changes only the layout of the pass, never which tokens are selected. Shapes: N rows of the batch, n rows of the
microbatch, T width of the batch, t longest row of the microbatch, S width of the pass, M selected tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.packing import PackPlan, round_up
from nemo_rl.models.dtensor.parallelize import ForwardInputs

__all__ = ["Microbatch", "build_microbatch", "fixed_plan", "steps_of"]


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
    divisible_by: int,
) -> Microbatch:
    """Args:
    select_NT: `[N, T]` bool, tokens whose log-probability is wanted; position 0 never is.
    fields: columns that the loss reads.
    is_packed: lay the rows end to end in one row instead of padding them.
    divisible_by: the width of the pass is rounded up to a multiple.
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
    return Microbatch(
        rows=tuple(rows),
        lengths=lengths,
        columns=columns,
        width=width,
        inputs=layout(ids_nt, lengths, row_M, column_M, divisible_by),
        out_row_M=row_M,
        out_column_M=column_M,
    )


def _padded(
    ids_nt: torch.Tensor, lengths: Sequence[int], row_M: torch.Tensor, column_M: torch.Tensor, divisible_by: int
) -> ForwardInputs:
    width = round_up(ids_nt.shape[1], divisible_by)
    ids_nS = torch.nn.functional.pad(ids_nt, (0, width - ids_nt.shape[1]))
    if not len(lengths):
        ids_nS = ids_nt.new_zeros(1, width)
    # Logits are computed at the union of the positions that some row needs; at least one keeps the graph whole.
    keep_K, kept_M = torch.unique(column_M - 1, return_inverse=True)
    if not len(keep_K):
        keep_K = column_M.new_zeros(1)
    target_M = ids_nt[row_M, column_M]
    return ForwardInputs(
        input_ids=ids_nS, position_ids=None, keep_K=keep_K, row_M=row_M, kept_M=kept_M, target_M=target_M
    )


def _packed(
    ids_nt: torch.Tensor, lengths: Sequence[int], row_M: torch.Tensor, column_M: torch.Tensor, divisible_by: int
) -> ForwardInputs:
    device = ids_nt.device
    total = sum(lengths)
    # The tail that fills the width is a segment of its own: its positions restart at 0 as well.
    tail = round_up(max(total, 1), divisible_by) - total
    segments = [length for length in (*lengths, tail) if length]
    pieces = [ids_nt[i, :length] for i, length in enumerate(lengths)]
    ids_S = torch.cat([*pieces, ids_nt.new_zeros(tail)])
    position_S = torch.cat([torch.arange(length, device=device) for length in segments])
    start_n = torch.tensor([0, *lengths], device=device).cumsum(0)[:-1] if lengths else row_M.new_zeros(0)
    place_M = start_n[row_M] + column_M
    keep_K = place_M - 1 if len(place_M) else row_M.new_zeros(1)
    return ForwardInputs(
        input_ids=ids_S[None],
        position_ids=position_S[None],
        keep_K=keep_K,
        row_M=torch.zeros_like(row_M),
        kept_M=torch.arange(len(place_M), device=device),
        target_M=ids_nt[row_M, column_M],
    )
