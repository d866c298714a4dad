"""Steps and passes of every policy worker: scales, sums and checks over all ranks.

Called by the workers and their step runners. Invariant: all ranks pass through the same collectives in the same order;
of the ranks that share a data-parallel shard exactly one, its writer, contributes to a sum. Shapes: N rows, T tokens.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.layout import Coordinates, ParallelLayout
from nemo_rl.errors import NonFiniteError, name_some
from nemo_rl.models.head.logprobs import Sampling, TopTokens
from nemo_rl.models.policy.interfaces import (
    COMPUTED_FIELDS,
    POLICY_TOPK,
    UNFILTERED_LOGPROBS,
    DeferredMetrics,
    LossFunction,
    LossOutput,
    LossScale,
)
from nemo_rl.models.policy.microbatch import Microbatch, PassShape, row_names
from nemo_rl.models.policy.observer import PassObserver
from nemo_rl.utils.metrics import Reduction

__all__ = [
    "BatchForm",
    "PassResult",
    "RankInfo",
    "Runner",
    "StepNumbers",
    "StepOutcome",
    "all_reduce_sum",
    "check_same_plan",
    "computed_fields",
    "loss_columns",
    "loss_scales",
    "raise_together",
    "stored_fields",
    "sum_over_shards",
    "trained_tokens",
]

Microbatches = Sequence[Sequence[int]]
Keep = Callable[[Microbatch, Any], None]
"""Takes what a pass has found of a microbatch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankInfo:
    """The place of this rank in the job."""

    layout: ParallelLayout
    rank: int
    device: torch.device

    @property
    def is_writer(self) -> bool:
        return self.layout.is_writer(self.rank)

    @property
    def coordinates(self) -> Coordinates:
        return self.layout.coordinates(self.rank)

    @property
    def is_last_stage(self) -> bool:
        return self.coordinates.pp == self.layout.pp - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchForm:
    """The form in which rows become forward passes."""

    is_packed: bool
    shape: PassShape
    sampling: Sampling
    """Distribution of which log-probabilities are taken."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepOutcome:
    """The outcome of one global batch."""

    loss: float
    """Global loss, the same on every rank."""
    grad_norm: float
    """Global norm before clipping, the same on every rank; 0 in evaluation."""
    metrics: tuple[dict[str, Reduction], ...]
    """This rank's, one per microbatch; empty on ranks that do not see the loss."""


class Runner(ABC):
    """Runs the microbatches of one rank. Methods are collective: every rank calls them in the same order."""

    def __init__(self, layout: BatchForm, here: RankInfo, observer: PassObserver) -> None:
        self._layout, self._here, self._observer = layout, here, observer

    def logprobs(
        self,
        batch: BatchedDataDict,
        microbatches: Microbatches,
        select_NT: torch.Tensor,
        *,
        computed: Sequence[str] = (),
    ) -> torch.Tensor:
        """Return `[1, N, T]` float32 log-probabilities of the selected tokens, 0 elsewhere; `[2, N, T]` with
        `SQUARED_PROBS` in `computed`, the same of the tokens' whole distributions.

        Raises:
            NonFiniteError: on every rank, when any rank met NaN or inf; names the rows.
        """
        result = PassResult((1 + len(computed), *select_NT.shape), self._here.device)

        def keep(micro: Microbatch, found_cM: torch.Tensor) -> None:
            found = [micro.to_rows(part_M) for part_M in found_cM]
            self._observer.logprobs(micro, found[0])
            result.keep(micro, found)

        self._infer(batch, microbatches, select_NT, keep, computed=computed)
        return self._finite("log-probabilities", batch, result)

    def top_k(
        self, batch: BatchedDataDict, microbatches: Microbatches, select_NT: torch.Tensor, wanted: TopTokens
    ) -> torch.Tensor:
        """Return `[2, N, T, k + 1]` float32 as `selected_top_k` of the distribution that each selected token was drawn
        from; 0 elsewhere.

        Raises:
            NonFiniteError: on every rank, when any rank met NaN or inf; names the rows.
        """
        result = PassResult((2, *select_NT.shape, wanted.k + 1), self._here.device)

        def keep(micro: Microbatch, found_cM: torch.Tensor) -> None:
            result.keep(micro, [micro.to_rows(part_kM.T) for part_kM in found_cM.chunk(2)])

        self._infer(batch, microbatches, select_NT, keep, top_k=wanted)
        return self._finite("top-k log-probabilities", batch, result)

    def topk_logits(
        self, batch: BatchedDataDict, microbatches: Microbatches, *, k: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return values and ids `[N, T, k]` of the largest logits at each position, 0 in the padding."""
        ids_NT = batch.tensor("input_ids")
        values_NTk = torch.zeros(*ids_NT.shape, k, dtype=torch.float32)
        tokens_NTk = torch.zeros(*ids_NT.shape, k, dtype=torch.int64)

        def keep(micro: Microbatch, found: Sequence[torch.Tensor]) -> None:
            for i, (row, length) in enumerate(zip(micro.rows, micro.lengths, strict=True)):
                for whole_NTk, part in zip((values_NTk, tokens_NTk), found, strict=True):
                    whole_NTk[row, :length] = part[i, :length]

        self._infer(batch, microbatches, torch.zeros_like(ids_NT, dtype=torch.bool), keep, top_k=k)
        return values_NTk, tokens_NTk

    @abstractmethod
    def run(
        self,
        batch: BatchedDataDict,
        microbatches: Microbatches,
        loss_fn: LossFunction,
        scale: LossScale,
        *,
        is_training: bool,
    ) -> StepOutcome:
        """Run one global batch: with an optimizer step at its end when `is_training`, else without gradients.

        Raises:
            NonFiniteError: on every rank, when loss, log-probabilities or gradients are NaN or inf; weights and
                optimizer are as before.
        """

    # Parts of every runner.

    @abstractmethod
    def _infer(
        self,
        batch: BatchedDataDict,
        microbatches: Microbatches,
        select_NT: torch.Tensor,
        keep: Keep,
        *,
        computed: Sequence[str] = (),
        top_k: TopTokens | int | None = None,
    ) -> None:
        """Run passes without gradients, and keep what each microbatch with rows has found: what `selected_logprobs`
        gives, with `TopTokens` `selected_top_k`; with a number `top_k_logits` of rows that are not packed."""

    @abstractmethod
    def _drop_gradients(self) -> None: ...

    def _finite(self, what: str, batch: BatchedDataDict, result: PassResult) -> torch.Tensor:
        values, bad = result.read()
        raise_together(what, batch, bad, is_writer=self._here.is_writer)
        return values

    def _loss(
        self,
        micro: Microbatch,
        found_cM: torch.Tensor,
        loss_fn: LossFunction,
        scale: LossScale,
        numbers: StepNumbers,
    ) -> torch.Tensor:
        """Return the loss of a microbatch; without rows the sum of no token: zero, but connected to the parameters, so
        that this rank's collectives take place."""
        if not micro.rows:
            return found_cM.sum()
        found = [micro.to_rows(part_M) for part_M in found_cM]
        self._observer.logprobs(micro, found[0])
        columns = loss_columns(micro, found, computed_fields(loss_fn, self._layout.sampling))
        output = loss_fn(found[0], columns, scale=scale)
        self._observer.loss(micro, output)
        numbers.add(micro, found[0], output)
        return output.loss

    def _read(self, numbers: StepNumbers, batch: BatchedDataDict) -> tuple[float, tuple[dict[str, Reduction], ...]]:
        """Return the global loss, and the metrics of this rank; without gradients where a loss is NaN or inf."""
        total, metrics, bad = numbers.read()
        try:
            raise_together("the loss", batch, bad, is_writer=self._here.is_writer)
        except NonFiniteError:
            self._drop_gradients()
            raise
        [total] = sum_over_shards([total], is_writer=self._here.is_writer)
        return total, metrics

    def _refuse_norm(self, batch: BatchedDataDict, microbatches: Microbatches) -> NoReturn:
        """Raise for a gradient norm that is not finite. It is global: every rank comes here together."""
        rows = [row for microbatch in microbatches for row in microbatch]
        raise_together("the gradient norm, not in a loss; one of", batch, rows, is_writer=self._here.is_writer)
        raise AssertionError("a batch without rows has no gradient")


def trained_tokens(batch: BatchedDataDict) -> torch.Tensor:
    """Return `[N, T]` bool: tokens that have a weight in the loss."""
    mask_NT = batch.tensor("token_mask").bool() & (batch.tensor("sample_mask") > 0)[:, None]
    mask_NT[:, 0] = False
    columns = torch.arange(mask_NT.shape[1], device=mask_NT.device)
    return mask_NT & (columns < batch.tensor("input_lengths")[:, None])


def stored_fields(loss_fn: LossFunction) -> tuple[str, ...]:
    return tuple(name for name in loss_fn.input_fields if name not in COMPUTED_FIELDS)


def computed_fields(loss_fn: LossFunction, sampling: Sampling) -> tuple[str, ...]:
    """Return the names that the loss reads and a pass computes besides log-probabilities under `sampling`."""
    wanted = (name for name in COMPUTED_FIELDS if name in loss_fn.input_fields)
    return tuple(name for name in wanted if name != UNFILTERED_LOGPROBS or sampling.has_filter)


class PassResult:
    """Values that passes without a loss find of each row, on the device until they are read.

    Args:
        shape: `[c, N, T]` or `[c, N, T, k]`, zeros at first.
    """

    def __init__(self, shape: Sequence[int], device: torch.device) -> None:
        self._values = torch.zeros(*shape, dtype=torch.float32, device=device)

    def keep(self, micro: Microbatch, found: Sequence[torch.Tensor]) -> None:
        """Take what a microbatch has found, `[n, t, ...]` each."""
        for whole, part in zip(self._values, found, strict=False):
            whole[micro.row_index_n, : micro.width] = part

    def read(self) -> tuple[torch.Tensor, list[int]]:
        """Return the values on the CPU, and the rows with NaN or inf in the first part; waits for the device once."""
        values = self._values.cpu()
        is_bad_N = ~values[0].flatten(1).isfinite().all(1)
        return values, [row for row, is_bad in enumerate(is_bad_N.tolist()) if is_bad]


class StepNumbers:
    """Losses, metrics and checks of the microbatches of one global batch, on the device until they are read."""

    def __init__(self) -> None:
        self._micros: list[Microbatch] = []
        self._metrics: list[Mapping[str, Reduction]] = []
        self._numbers: list[torch.Tensor] = []

    def add(self, micro: Microbatch, logprobs_nt: torch.Tensor, output: LossOutput) -> None:
        deferred = [output.metrics.numbers] if isinstance(output.metrics, DeferredMetrics) else []
        parts = [logprobs_nt.detach().isfinite().all(1), output.loss.detach()[None], *deferred]
        self._micros.append(micro)
        self._metrics.append(output.metrics)
        self._numbers += [part.double() for part in parts]

    def read(self) -> tuple[float, tuple[dict[str, Reduction], ...], list[int]]:
        """Return the sum of the losses, the metrics of each microbatch, and the rows with NaN or inf: of a microbatch
        whose loss alone has them all rows. Waits for the device once."""
        numbers = iter(torch.cat(self._numbers).tolist() if self._numbers else ())
        total, read, bad = 0.0, list[dict[str, Reduction]](), list[int]()
        for micro, metrics in zip(self._micros, self._metrics, strict=True):
            are_finite = list(islice(numbers, len(micro.rows)))
            loss = next(numbers)
            total += loss
            own = [row for row, is_finite in zip(micro.rows, are_finite, strict=True) if not is_finite]
            bad += own or ([] if math.isfinite(loss) else micro.rows)
            if isinstance(metrics, DeferredMetrics):
                read.append(metrics.of_numbers(islice(numbers, len(metrics.numbers))))
            else:
                read.append(dict(metrics))
        return total, tuple(read), sorted(bad)


def loss_columns(micro: Microbatch, found: Sequence[torch.Tensor], computed: Sequence[str]) -> dict[str, torch.Tensor]:
    """Return the columns that the loss reads besides log-probabilities.

    Args:
        found: log-probabilities `[n, t]`, then the columns `computed`; of `POLICY_TOPK`, the last, K + 1 parts.
    """
    if POLICY_TOPK in computed:
        found = [*found[: len(computed)], torch.stack(list(found[len(computed) :]), dim=-1)]
    return {**micro.columns, **dict(zip(computed, found[1:], strict=True))}


def loss_scales(batch: BatchedDataDict, steps: Sequence[Microbatches], *, is_writer: bool) -> list[LossScale]:
    """Return weighted counts of every global batch, with one collective over all ranks; only writers look at the
    batch, which is on the CPU."""
    counts = [0.0] * (2 * len(steps))
    if is_writer:
        tokens_N = trained_tokens(batch).sum(1)
        # Rows without a token that counts may have any weight.
        weight_N = torch.where(tokens_N > 0, batch.tensor("sample_mask").double(), 0.0)
        for i, microbatches in enumerate(steps):
            rows = torch.tensor([row for rows in microbatches for row in rows], dtype=torch.int64)
            counts[2 * i : 2 * i + 2] = torch.stack([(tokens_N * weight_N)[rows].sum(), weight_N[rows].sum()]).tolist()
    total = all_reduce_sum(counts)
    return [
        LossScale(valid_tokens=total[i], valid_sequences=total[i + 1], is_first_update=i == 0)
        for i in range(0, len(total), 2)
    ]


def all_reduce_sum(values: Sequence[float]) -> list[float]:
    """Return sums over all ranks in float64 (collective). Numbers of the host travel by gloo: no GPU is waited for."""
    total = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(total)
    return total.tolist()


def sum_over_shards(values: Sequence[float], *, is_writer: bool) -> list[float]:
    """Return the sums of the writers' values, on every rank (collective over all ranks)."""
    return all_reduce_sum(values if is_writer else [0.0] * len(values))


def check_same_plan(microbatches_per_step: Sequence[int]) -> None:
    """Compare the number of passes over all ranks (collective): unequal numbers would leave a rank waiting for ever.

    Raises:
        ValueError: on every rank.
    """
    mine = torch.tensor([len(microbatches_per_step), sum(microbatches_per_step)])
    everywhere = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everywhere, mine)
    counts = [tuple(part.tolist()) for part in everywhere]
    if len(set(counts)) != 1:
        raise ValueError(
            "expected the same number of optimizer steps and microbatches on every rank, got "
            + ", ".join(f"rank {rank}: {steps} steps, {passes} passes" for rank, (steps, passes) in enumerate(counts))
            + "; give every rank its part of one plan (PackPlan.for_rank), or without a plan as many rows, in "
            "multiples of policy.train_micro_batch_size (policy.logprob_batch_size for log-probabilities)"
        )


def raise_together(what: str, batch: BatchedDataDict, rows: Sequence[int], *, is_writer: bool) -> None:
    """Compare bad rows over all ranks (collective).

    Raises:
        NonFiniteError: on every rank, when any rank has one; the writers name the samples.
    """
    if all_reduce_sum([float(len(rows))])[0] == 0:
        return
    raise NonFiniteError(f"NaN or inf in {what}: samples {name_some(_bad_samples(batch, rows, is_writer=is_writer))}")


def _bad_samples(batch: BatchedDataDict, rows: Sequence[int], *, is_writer: bool) -> list[str]:
    """Return the samples of all ranks (collective): of bad rows those whose columns have NaN or inf, if there are."""
    floats = [column for column in batch.values() if isinstance(column, torch.Tensor) and column.is_floating_point()]
    # Log-probabilities of tokens that cannot be are -inf.
    causes = [row for row in rows if not all((column[row] < math.inf).all() for column in floats)]
    everywhere: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everywhere, row_names(batch, causes or rows) if is_writer else [])
    return [f"{name} (rank {rank})" for rank, part in enumerate(everywhere) for name in part]
