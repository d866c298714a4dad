"""`DTensorPolicyWorker`: one rank of a Hugging Face policy under FSDP2, in plain Python without Ray.

Created by the worker group or a test, in a process whose default process group exists (for one rank it is made here).
Invariant: methods marked collective in the `PolicyWorker` protocol are called on every rank in the same order, and
weights, optimizer and learning rate depend on the global batches alone, not on their split into ranks or microbatches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from nemo_rl.config.policy import PolicyConfig
from nemo_rl.data.tokenizer import load_tokenizer
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.collectives import RankSpec, init_process_group
from nemo_rl.distributed.layout import ParallelLayout
from nemo_rl.distributed.packing import PackPlan
from nemo_rl.distributed.parallel_groups import ParallelGroups
from nemo_rl.models.dtensor import checkpoint
from nemo_rl.models.dtensor.learning_rate import LearningRate
from nemo_rl.models.dtensor.microbatch import PassShape, fixed_plan, steps_of
from nemo_rl.models.dtensor.optim import LossScaler, build_optimizer
from nemo_rl.models.dtensor.parallelize import parallelize
from nemo_rl.models.dtensor.train_step import (
    BatchLayout,
    OptimizerStep,
    StepRunner,
    check_same_plan,
    trained_tokens,
)
from nemo_rl.models.loading import load_causal_lm, named_weights
from nemo_rl.models.logprobs import SamplingView
from nemo_rl.models.policy.interfaces import LossFunction, LossScale, TensorInfo, TrainResult
from nemo_rl.models.policy.workers.base import WorkerState
from nemo_rl.models.policy.workers.refit_source import RefitSource
from nemo_rl.utils.flops import TransformerShape, theoretical_tflops, transformer_flops

__all__ = ["DTensorPolicyWorker"]

# Token-mask column: where a batch has it, only these tokens' log-probabilities are computed.
TOKEN_MASK = "token_mask"


class DTensorPolicyWorker(RefitSource):
    """Implements `PolicyWorker`; states and device questions are in `LifeCycle`. Starts ready for training.

    Example:
        >>> worker = DTensorPolicyWorker(config, rank=0, world_size=1, num_steps=10,
        ...                              collective_timeout_s=60, seed=0)          # doctest: +SKIP
        >>> worker.train(batch, ClippedPGLoss(config=LossConfig())).loss           # doctest: +SKIP
        (0.0123,)
    """

    def __init__(
        self,
        config: PolicyConfig,
        *,
        rank: int,
        world_size: int,
        num_steps: int,
        collective_timeout_s: float,
        seed: int,
        keep_reference: bool = False,
        device: str | None = None,
        layout: ParallelLayout | None = None,
    ) -> None:
        """Args:
        num_steps: training calls of the whole run, for the learning-rate schedule.
        collective_timeout_s: deadline of a collective in a process group made here; the caller's keeps its own.
        keep_reference: keep the initial weights on the CPU, for `use_reference_model`.
        device: None takes the current CUDA device where there is one.
        layout: of the ranks; None takes what the config says of so many.

        Raises:
            ModelFolderError: model or tokenizer folder is missing or incomplete.
            ConfigError: the model cannot run in this layout.
        """
        self.config, self.rank, self.world_size = config, rank, world_size
        self._tokenizer = load_tokenizer(
            config.tokenizer.name or config.model_name, chat_template=config.tokenizer.chat_template
        )
        hf = load_causal_lm(config.model_name)
        self.device = _pick_device(device)
        owns_group = _ensure_process_group(rank, world_size, collective_timeout_s, self.device)
        try:
            self.layout = layout or ParallelLayout.of_policy(config, world_size=world_size)
            # Tensor parallel ranks hold the same activations, so they must drop the same ones.
            torch.manual_seed(seed + rank // self.layout.tp)
            self._groups = ParallelGroups.build(self.layout, rank=rank, device=self.device)
            self._flops_shape = TransformerShape.from_config(hf.config.to_dict())
            self._model = parallelize(hf, groups=self._groups, config=config)
            self._optimizer = build_optimizer(config.optimizer, self._model.parameters())
            self._learning_rate = LearningRate(config.scheduler, self._optimizer, num_steps=num_steps)
            self._scaler = LossScaler(precision=config.precision)
            self._start_life_cycle(keep_reference=keep_reference, owns_group=owns_group)
        except BaseException:
            # The next worker of this process makes its own.
            if owns_group:
                dist.destroy_process_group()
            raise

    # Training and log-probabilities.

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
        """(collective) One optimizer step per global batch over this rank's rows.

        Args:
            eval_mode: loss and metrics only; weights, optimizer and schedule stay.
            gbs: rows per optimizer step over all ranks; null uses `policy.train_global_batch_size`.
            mbs: rows per microbatch; null uses `policy.train_micro_batch_size`.
            plan: this rank's view (`PackPlan.for_rank`), in indices into `batch`; overrides both.

        Raises:
            NonFiniteError: on every rank; names the samples.
        """
        self._require("train", WorkerState.TRAINING, *([WorkerState.LOGPROBS] if eval_mode else []))
        if self._is_reference_in_use:
            raise RuntimeError("train: the reference weights are in place; leave use_reference_model first")
        if plan is None:
            rows_per_step = (gbs or self.config.train_global_batch_size) / self.layout.dp
            plan = self._fixed_plan(batch, rows_per_step, mbs or self.config.train_micro_batch_size)
        steps = steps_of(plan, num_rows=batch.size)
        check_same_plan([len(microbatches) for microbatches in steps], device=self.device)
        batch = batch.to(self.device)
        learning_rate = self._learning_rate.apply()
        stepper = OptimizerStep(
            self._model, self._optimizer, self._scaler, groups=self._groups, max_grad_norm=self.config.max_grad_norm
        )
        scales = _loss_scales(batch, steps, groups=self._groups, device=self.device)
        runner = self._runner(plan)
        outcomes = [
            runner.run(batch, microbatches, loss_fn, scale, None if eval_mode else stepper)
            for microbatches, scale in zip(steps, scales, strict=True)
        ]
        if not eval_mode:
            self._learning_rate.advance()
        lengths = [int(n) for n in batch.tensor("input_lengths").tolist()]
        return TrainResult(
            loss=tuple(outcome.loss for outcome in outcomes),
            grad_norm=tuple(outcome.grad_norm for outcome in outcomes),
            rank=self.rank,
            metrics=tuple(metrics for outcome in outcomes for metrics in outcome.metrics),
            total_flops=transformer_flops(self._flops_shape, lengths, with_backward=not eval_mode),
            theoretical_tflops=theoretical_tflops(self._device_side.name, dtype=self.config.precision),
            learning_rate=learning_rate,
            num_tokens=sum(lengths),
        )

    def get_logprobs(
        self, batch: BatchedDataDict, *, mbs: int | None = None, plan: PackPlan | None = None
    ) -> torch.Tensor:
        """(collective) `[N, T]` float32 on the CPU under the distribution that was sampled from.

        Computed for the tokens of `token_mask` where the batch has that column, else for all; 0 elsewhere.
        """
        self._require("get_logprobs", WorkerState.TRAINING, WorkerState.LOGPROBS)
        plan = plan or self._inference_plan(batch, mbs)
        microbatches = [rows for step in steps_of(plan, num_rows=batch.size) for rows in step]
        check_same_plan([len(microbatches)], device=self.device)
        batch = batch.to(self.device)
        if TOKEN_MASK in batch:
            select_NT = batch.tensor(TOKEN_MASK).bool()
        else:
            select_NT = torch.ones_like(batch.tensor("input_ids"), dtype=torch.bool)
        return self._runner(plan).logprobs(batch, microbatches, select_NT).cpu()

    def get_reference_policy_logprobs(
        self, batch: BatchedDataDict, *, mbs: int | None = None, plan: PackPlan | None = None
    ) -> torch.Tensor:
        """(collective) As `get_logprobs` under the reference weights."""
        with self.use_reference_model():
            return self.get_logprobs(batch, mbs=mbs, plan=plan)

    def get_topk_logits(
        self, batch: BatchedDataDict, *, k: int, mbs: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(collective) The k largest logits at each position, which predict the next token, and their ids.

        Values `[N, T, k]` float32 and ids `[N, T, k]` int64 on the CPU, without temperature; 0 in the padding.
        """
        self._require("get_topk_logits", WorkerState.TRAINING, WorkerState.LOGPROBS)
        plan = self._inference_plan(batch, mbs)
        check_same_plan([len(plan.microbatches[0])], device=self.device)
        values, ids = self._runner(plan).topk_logits(batch.to(self.device), plan.microbatches[0], k=k)
        return values.cpu(), ids.cpu()

    # Refit and checkpoints.

    def prepare_refit_info(self) -> dict[str, TensorInfo]:
        """Name, shape and dtype of every weight in HF naming, in export order."""
        return {
            name: TensorInfo(shape=tuple(weight.shape), dtype=str(weight.dtype).removeprefix("torch."))
            for name, weight in named_weights(self._model.hf)
        }

    def export_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(collective) Full CPU weights in HF naming, one at a time, on every rank."""
        self._require("export_weights", WorkerState.TRAINING, WorkerState.LOGPROBS, WorkerState.REFIT)
        yield from checkpoint.export(self._model)

    def save_checkpoint(self, *, weights: Path, optimizer: Path | None, tokenizer: Path | None) -> None:
        """(collective) HF folder at `weights`; optimizer, schedule and random state at `optimizer`."""
        with self._ready_for_training():
            checkpoint.save_weights(self._model, weights)
            if tokenizer is not None:
                checkpoint.save_tokenizer(self._tokenizer, tokenizer)
            if optimizer is not None:
                trainer_state = {
                    **self._learning_rate.state_dict(),
                    "loss_scale": self._scaler.scale,
                    "loss_scale_clean_steps": float(self._scaler.clean_steps),
                }
                checkpoint.save_optimizer(self._model, self._optimizer, trainer_state, optimizer)

    def load_checkpoint(self, *, weights: Path, optimizer: Path | None) -> None:
        """(collective) Continues from a checkpoint of any number of ranks; the reference stays the initial model."""
        with self._ready_for_training():
            checkpoint.load_weights(self._model, weights)
            if optimizer is not None:
                trainer_state = checkpoint.load_optimizer(self._model, self._optimizer, optimizer)
                self._learning_rate.load_state_dict(trainer_state)
                self._scaler.scale = trainer_state["loss_scale"]
                self._scaler.clean_steps = int(trainer_state["loss_scale_clean_steps"])

    # Private parts.

    def _runner(self, plan: PackPlan) -> StepRunner:
        return StepRunner(self._model, _layout(self.config, self._groups, is_packed=plan.packed), self._groups)

    def _fixed_plan(self, batch: BatchedDataDict, rows_per_step: float, mbs: int) -> PackPlan:
        if rows_per_step != int(rows_per_step):
            raise ValueError(
                f"a global batch of {int(rows_per_step * self.layout.dp)} samples does not divide by "
                f"{self.layout.dp} data-parallel ranks; change policy.train_global_batch_size"
            )
        plan = fixed_plan(
            batch.size,
            rows_per_step=int(rows_per_step),
            rows_per_microbatch=mbs,
            pad_to=batch.tensor("input_ids").shape[1],
        )
        return replace(plan, packed=self.config.sequence_packing.enabled)

    def _inference_plan(self, batch: BatchedDataDict, mbs: int | None) -> PackPlan:
        rows = mbs or self.config.logprob_batch_size or self.config.train_micro_batch_size
        return self._fixed_plan(batch, max(1, batch.size), rows)


def _layout(config: PolicyConfig, groups: ParallelGroups, *, is_packed: bool) -> BatchLayout:
    generation = config.generation
    return BatchLayout(
        is_packed=is_packed,
        shape=PassShape.of(groups, configured_multiple=config.make_sequence_length_divisible_by),
        # Greedy rollouts have no distribution of their own; the model's is taken.
        view=SamplingView(temperature=generation.temperature or 1.0, top_k=generation.top_k, top_p=generation.top_p),
    )


def _ensure_process_group(rank: int, world_size: int, timeout_s: float, device: torch.device) -> bool:
    """Makes a one-rank group where none exists; True if it did."""
    if dist.is_initialized():
        if (dist.get_rank(), dist.get_world_size()) != (rank, world_size):
            raise ValueError(
                f"expected rank {rank} of {world_size} as in the process group, which says "
                f"{dist.get_rank()} of {dist.get_world_size()}"
            )
        return False
    if world_size != 1:
        raise RuntimeError(f"rank {rank} of {world_size}: initialise the default process group before the worker")
    init_process_group(RankSpec(rank=0, world_size=1), device=device, timeout_s=timeout_s)
    return True


def _pick_device(name: str | None) -> torch.device:
    if name is not None:
        return torch.device(name)
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _loss_scales(
    batch: BatchedDataDict, steps: list[tuple[tuple[int, ...], ...]], *, groups: ParallelGroups, device: torch.device
) -> list[LossScale]:
    """Global counts of every optimizer step, with one collective."""
    tokens_N = trained_tokens(batch).sum(1)
    counts: list[float] = []
    for microbatches in steps:
        rows = torch.tensor([row for rows in microbatches for row in rows], dtype=torch.int64, device=device)
        counts += [float(tokens_N[rows].sum()), float((tokens_N[rows] > 0).sum())]
    total = groups.sum_over_data(counts, device=device)
    return [LossScale(valid_tokens=total[i], valid_sequences=total[i + 1]) for i in range(0, len(total), 2)]
