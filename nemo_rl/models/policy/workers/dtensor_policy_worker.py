"""`DTensorPolicyWorker`: one rank of a Hugging Face policy under FSDP2, in plain Python without Ray.

Created by the worker group or a test, in a process whose default process group exists (for one rank it is made here).
Invariant: methods marked collective in the `PolicyWorker` protocol are called on every rank in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from nemo_rl.config.policy import PolicyConfig
from nemo_rl.data_plane.route_shape import RouteShape
from nemo_rl.distributed.layout import ParallelLayout
from nemo_rl.distributed.parallel_groups import ParallelGroups
from nemo_rl.models.checkpoint_folder import save_tokenizer
from nemo_rl.models.dtensor import checkpoint
from nemo_rl.models.dtensor.learning_rate import LearningRate
from nemo_rl.models.dtensor.optim import LossScaler, build_optimizer
from nemo_rl.models.dtensor.parallelize import full_weight, parallelize
from nemo_rl.models.dtensor.train_step import OptimizerStep, StepRunner
from nemo_rl.models.hf_routers import HFRouters
from nemo_rl.models.loading import load_causal_lm, named_weights
from nemo_rl.models.policy.interfaces import TensorInfo
from nemo_rl.models.policy.route_replay import RouteReplayer
from nemo_rl.models.policy.steps import BatchLayout
from nemo_rl.models.policy.worker_replay import StageReplay, WorkerReplay
from nemo_rl.models.policy.workers.base import (
    Placement,
    WorkerState,
    check_placement,
    move_model,
    move_optimizer_state,
    optimizer_tensors,
    placement_of,
)
from nemo_rl.models.policy.workers.training_worker import TrainingWorker, ensure_process_group, pick_device
from nemo_rl.utils.flops import TransformerShape
from nemo_rl.utils.r3_trace_env import router_replay_validate_enabled

__all__ = ["DTensorPolicyWorker"]


class DTensorPolicyWorker(TrainingWorker):
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
        self._load_tokenizer()
        hf = load_causal_lm(config.model_name)
        self.device = pick_device(device)
        owns_group = ensure_process_group(rank, world_size, collective_timeout_s, self.device)
        try:
            self.layout = layout or ParallelLayout.of_policy(config, world_size=world_size)
            # Tensor parallel ranks hold the same activations, so they must drop the same ones.
            torch.manual_seed(seed + rank // self.layout.tp)
            self._groups = ParallelGroups.build(self.layout, rank=rank, device=self.device)
            self._flops_shape = TransformerShape.from_config(hf.config.to_dict())
            self._model = parallelize(hf, groups=self._groups, config=config)
            self._replay = self._start_replay() if config.router_replay.enabled else None
            self._optimizer = build_optimizer(config.optimizer, self._model.parameters())
            self._schedule: LearningRate = LearningRate(config.scheduler, self._optimizer, num_steps=num_steps)
            self._scaler = LossScaler(precision=config.precision)
            self._context = self._groups.context
            self._start_life_cycle(keep_reference=keep_reference, owns_group=owns_group)
        except BaseException:
            # The next worker of this process makes its own.
            if owns_group:
                dist.destroy_process_group()
            raise

    def _start_replay(self) -> WorkerReplay:
        """(collective over the job)"""
        routers = HFRouters(self._model.hf)
        replayer = RouteReplayer(
            routers.layers,
            top_k=routers.top_k,
            num_experts=routers.num_experts,
            validates=router_replay_validate_enabled(),
        )
        return WorkerReplay(
            replayer,
            shape=RouteShape(layers=routers.layers, top_k=routers.top_k, num_experts=routers.num_experts),
            layout=self.layout,
            rank=self.rank,
            routing=lambda asked: routers.choosing(lambda layer, own: asked.choose(layer, lambda: own)),
        )

    def _runner(self, layout: BatchLayout, replay: StageReplay | None = None) -> StepRunner:
        step = OptimizerStep(
            self._model, self._optimizer, self._scaler, groups=self._groups, max_grad_norm=self.config.max_grad_norm
        )
        return StepRunner(self._model, layout, self._groups, step, replay)

    # The model between its stages.

    def _weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        return named_weights(self._model.hf)

    def _whole_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, weight in named_weights(self._model.hf):
            # With CPU offload the shards are on the CPU, but are gathered on the device.
            yield name, full_weight(weight.to(self.device))

    def _drop_gradients(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)

    def _move(self, placement: Placement) -> None:
        move_model(self._model, placement, self.device)
        move_optimizer_state(self._optimizer, self.device if placement.optimizer else torch.device("cpu"))

    def _placement(self, state: WorkerState) -> Placement:
        return placement_of(state, cpu_offload=self.config.dtensor_cfg.cpu_offload)

    def _check_placement(self) -> None:
        check_placement(
            self._placement(self._state),
            model=self._model,
            optimizer=optimizer_tensors(self._optimizer),
            device=self.device,
        )

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
                save_tokenizer(self._tokenizer, tokenizer)
            if optimizer is not None:
                trainer_state = {
                    **self._schedule.state_dict(),
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
                self._schedule.load_state_dict(trainer_state)
                self._scaler.scale = trainer_state["loss_scale"]
                self._scaler.clean_steps = int(trainer_state["loss_scale_clean_steps"])
