"""Seams between the driver, the policy workers and the loss."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.packing import PackPlan
from nemo_rl.utils.metrics import Reduction

__all__ = ["LossFunction", "LossOutput", "LossScale", "PolicyWorker", "TensorInfo", "TrainResult"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LossScale:
    """Counts over the whole global batch (all ranks, all microbatches of one optimizer step)."""

    valid_tokens: float
    """Sum of token_mask * sample_mask over the tokens that are predicted (position 0 never is)."""
    valid_sequences: float
    """Sum of sample_mask over rows with at least one valid token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LossOutput:
    """One microbatch's part of the global loss."""

    loss: torch.Tensor
    """Scalar, already divided by the global count: the sum over microbatches and ranks is the loss."""
    metrics: dict[str, Reduction] = field(default_factory=dict)


class LossFunction(Protocol):
    """Sent by the driver to the workers; must be picklable. Workers never import a loss."""

    @property
    def input_fields(self) -> tuple[str, ...]:
        """Columns read from the batch."""

    def __call__(
        self, token_logprobs: torch.Tensor, batch: Mapping[str, torch.Tensor], *, scale: LossScale
    ) -> LossOutput:
        """Args:
        token_logprobs: `[N, T]` float32, log pi(token t | tokens < t) at position t, position 0 is 0.
        batch: columns of the same rows, `[N, T]` or `[N]`.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainResult:
    """What one rank returns from `train`."""

    loss: tuple[float, ...]
    """Global loss of each optimizer step (the same on every rank)."""
    grad_norm: tuple[float, ...]
    """Global gradient norm before clipping, one per optimizer step (the same on every rank)."""
    rank: int
    metrics: tuple[dict[str, Reduction], ...]
    """This rank's metrics, one dict per microbatch; merge them over ranks and microbatches."""
    total_flops: float
    """Floating-point operations of this rank's forward and backward passes."""
    theoretical_tflops: float
    """Peak TFLOP/s of this rank's device; 0 when it is not known."""
    learning_rate: float
    num_tokens: int
    """Tokens this rank trained on, padding excluded."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorInfo:
    """Shape and dtype of an exported weight."""

    shape: tuple[int, ...]
    dtype: str


class PolicyWorker(Protocol):
    """One rank of the policy. Methods marked (collective) must be called on every rank in the same order."""

    rank: int

    def train(
        self,
        batch: BatchedDataDict,
        loss_fn: LossFunction,
        *,
        eval_mode: bool = False,
        gbs: int | None = None,
        mbs: int | None = None,
        plan: PackPlan | None = None,
    ) -> TrainResult:
        """(collective) One optimizer step per global batch; `plan` overrides `gbs` and `mbs`.

        `eval_mode` computes loss and metrics and leaves the weights as they are.
        """

    def get_logprobs(
        self, batch: BatchedDataDict, *, mbs: int | None = None, plan: PackPlan | None = None
    ) -> torch.Tensor:
        """(collective) `[N, T]` float32, position 0 is 0, padding is 0; all 0 before the last pipeline stage."""

    def get_reference_policy_logprobs(
        self, batch: BatchedDataDict, *, mbs: int | None = None, plan: PackPlan | None = None
    ) -> torch.Tensor:
        """(collective) As `get_logprobs` under the reference weights."""

    def get_topk_logits(
        self, batch: BatchedDataDict, *, k: int, mbs: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(collective) Values `[N, T, k]` float32 and ids `[N, T, k]` int64; all 0 before the last pipeline stage."""

    def use_reference_model(self) -> AbstractContextManager[None]:
        """(collective) Swaps the reference weights in; restores the policy's on exit, also after an error."""

    def prepare_for_lp_inference(self) -> None: ...
    def prepare_for_training(self) -> None: ...
    def offload_before_refit(self) -> None: ...
    def offload_after_refit(self) -> None: ...

    def prepare_refit_info(self) -> dict[str, TensorInfo]:
        """Name, shape and dtype of every weight in HF naming, in export order."""

    def export_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(collective) Full CPU weights in HF naming, one at a time, on every rank."""

    def save_checkpoint(self, *, weights: Path, optimizer: Path | None, tokenizer: Path | None) -> None:
        """(collective) HF folder at `weights`, sharded optimizer state at `optimizer`."""

    def load_checkpoint(self, *, weights: Path, optimizer: Path | None) -> None:
        """(collective)"""

    def reset_peak_memory_stats(self) -> None: ...
    def get_gpu_info(self) -> dict[str, object]: ...
    def report_device_id(self) -> str: ...
    def start_gpu_profiling(self) -> None: ...
    def stop_gpu_profiling(self) -> None: ...
    def is_alive(self) -> bool: ...
    def shutdown(self) -> None: ...
