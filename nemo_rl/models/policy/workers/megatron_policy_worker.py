"""`MegatronPolicyWorker`: one rank of a policy on megatron-core, in plain Python without Ray.

Created by the worker group or a test, in a process whose default process group exists (for one rank it is made here).
Invariant: methods marked collective in the `PolicyWorker` protocol are called on every rank in the same order, and give
the numbers of the DTensor worker.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist

from nemo_rl.config.policy import PolicyConfig
from nemo_rl.data_plane.route_shape import RouteShape
from nemo_rl.distributed.layout import ParallelLayout
from nemo_rl.errors import ModelFolderError
from nemo_rl.models.checkpoint_folder import complete_or_nothing, raise_together, save_tokenizer
from nemo_rl.models.hf_folder import open_weights, write_folder
from nemo_rl.models.loading import DTYPES, load_model_config
from nemo_rl.models.megatron import checkpoint
from nemo_rl.models.megatron.architecture import Architecture, check_fits
from nemo_rl.models.megatron.convert import export_weights, load_weights, weight_infos
from nemo_rl.models.megatron.mcore import parallel_state
from nemo_rl.models.megatron.optim import PolicyOptimizer
from nemo_rl.models.megatron.router_replay import attach_replay
from nemo_rl.models.megatron.setup import build_model, destroy_parallel, forget_last_pass, initialize_parallel
from nemo_rl.models.megatron.train_step import PipelineRunner, RankView
from nemo_rl.models.policy.interfaces import TensorInfo
from nemo_rl.models.policy.steps import BatchLayout
from nemo_rl.models.policy.worker_replay import StageReplay, WorkerReplay
from nemo_rl.models.policy.workers.base import Placement, WorkerState, check_placement, placement_of
from nemo_rl.models.policy.workers.training_worker import TrainingWorker, ensure_process_group, pick_device
from nemo_rl.utils.flops import TransformerShape
from nemo_rl.utils.r3_trace_env import router_replay_validate_enabled

__all__ = ["MegatronPolicyWorker"]


class MegatronPolicyWorker(TrainingWorker):
    """Implements `PolicyWorker`; states and device questions are in `LifeCycle`. Starts ready for training.

    With pipeline parallelism only the last stage computes log-probabilities; results are zeros elsewhere.
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
        """(collective) Args:
        num_steps: training calls of the whole run, for the learning-rate schedule.
        collective_timeout_s: deadline of a collective.
        keep_reference: keep the initial weights on the CPU, for `use_reference_model`.
        device: None takes the current CUDA device where there is one.
        layout: of the ranks; None takes what the config says of so many.

        Raises:
            ModelFolderError: model or tokenizer folder is missing or incomplete.
            ConfigError: the model cannot run in this layout.
        """
        self.config, self.rank, self.world_size = config, rank, world_size
        self._load_tokenizer()
        self._hf_config = load_model_config(config.model_name)
        check_fits(Architecture.of(self._hf_config), config)
        source = open_weights(Path(config.model_name), self._hf_config)
        self.device = pick_device(device)
        owns_group = ensure_process_group(rank, world_size, collective_timeout_s, self.device)
        try:
            self.layout = layout or ParallelLayout.of_policy(config, world_size=world_size)
            # Tensor parallel ranks hold the same activations, so they must drop the same ones.
            torch.manual_seed(seed + rank // self.layout.tp)
            initialize_parallel(config, timeout_s=collective_timeout_s, seed=seed)
            self._context = parallel_state.get_context_parallel_group() if self.layout.cp > 1 else None
            self._flops_shape = TransformerShape.from_config(self._hf_config.to_dict())
            self._model = build_model(self._hf_config, config, device=self.device)
            load_weights(self._model, source)
            self._replay = self._start_replay() if config.router_replay.enabled else None
            self._optimizer = PolicyOptimizer(self._model, config, num_steps=num_steps)
            self._schedule: PolicyOptimizer = self._optimizer
            self._start_life_cycle(keep_reference=keep_reference, owns_group=owns_group)
        except BaseException:
            destroy_parallel()
            # The next worker of this process makes its own.
            if owns_group:
                dist.destroy_process_group()
            raise

    def shutdown(self) -> None:
        """Ends the process groups that were made here. Idempotent."""
        if not self._is_shut_down:
            forget_last_pass(self._model)
            destroy_parallel()
        super().shutdown()

    def _runner(self, layout: BatchLayout, replay: StageReplay | None = None) -> PipelineRunner:
        view = RankView(layout=self.layout, rank=self.rank, device=self.device)
        return PipelineRunner(self._model, layout, view, self._optimizer, replay)

    def _start_replay(self) -> WorkerReplay:
        """(collective over the job)"""
        replayer = attach_replay(self._model, validates=router_replay_validate_enabled())
        mixture = self._model.shape.mixture
        assert mixture is not None
        return WorkerReplay(
            replayer,
            shape=RouteShape(
                layers=tuple(i for i, has_experts in enumerate(self._model.shape.expert_layers) if has_experts),
                top_k=mixture.top_k,
                num_experts=mixture.num_experts,
            ),
            layout=self.layout,
            rank=self.rank,
            routing=lambda _: nullcontext(),
            positions_first=True,
            chunks_tokens=self.layout.sequence_parallel,
        )

    # The model between its stages.

    def _weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._model.module.named_parameters()
        yield from self._model.module.named_buffers()

    def _whole_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        return export_weights(self._model)

    def _drop_gradients(self) -> None:
        self._optimizer.zero_grad()

    def _move(self, placement: Placement) -> None:
        target = self.device if placement.weights else torch.device("cpu")
        for buffer in (*self._model.ddp.buffers, *self._model.ddp.expert_parallel_buffers):
            # Gradients live in buffers of their own; with a distributed optimizer the weights do, too.
            move = buffer.reload_from_cpu if placement.weights else buffer.offload_to_cpu
            move(move_params=True, move_grads=False)
            move = buffer.reload_from_cpu if placement.has_gradients else buffer.offload_to_cpu
            move(move_params=False, move_grads=True)
        if not self._model.ddp.ddp_config.use_distributed_optimizer:
            for _, weight in self._weights():
                weight.data = weight.data.to(target)
        self._optimizer.move_state(self.device if placement.optimizer else torch.device("cpu"))

    def _placement(self, state: WorkerState) -> Placement:
        return placement_of(state, cpu_offload=False)

    def _check_placement(self) -> None:
        placement = self._placement(self._state)
        if self._model.ddp.ddp_config.use_distributed_optimizer:
            # Its weights are views of a buffer that is freed in place: their device does not change.
            return
        state = self._optimizer.state_tensors() if not self.config.megatron_cfg.optimizer.optimizer_cpu_offload else ()
        check_placement(placement, model=self._model.module, optimizer=state, device=self.device)

    # Refit and checkpoints.

    def prepare_refit_info(self) -> dict[str, TensorInfo]:
        """Name, shape and dtype of every weight in HF naming, in export order."""
        return weight_infos(self._hf_config, DTYPES[self.config.precision])

    def export_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(collective) Full CPU weights in HF naming, one at a time, on every rank, as copies."""
        self._require("export_weights", WorkerState.TRAINING, WorkerState.LOGPROBS, WorkerState.REFIT)
        for name, weight in export_weights(self._model):
            yield name, weight.to("cpu")

    def save_checkpoint(self, *, weights: Path, optimizer: Path | None, tokenizer: Path | None) -> None:
        """(collective) HF folder at `weights`; optimizer, schedule and random state at `optimizer`."""
        with self._ready_for_training():
            pending = None
            if optimizer is not None:
                pending = checkpoint.save_optimizer(
                    self._model,
                    self._optimizer,
                    self._optimizer.state_dict(),
                    optimizer,
                    is_async=self.config.megatron_cfg.async_save,
                )
            self._save_weights(weights)
            if tokenizer is not None:
                save_tokenizer(self._tokenizer, tokenizer)
            if pending is not None:
                pending.finish()

    def _save_weights(self, folder: Path) -> None:
        with complete_or_nothing(folder) as target:
            exported = export_weights(self._model)
            if self.rank == 0:
                write_folder(target, self._hf_config, exported)
            for _ in exported:
                # Every rank takes part in gathering what rank 0 writes.
                pass

    def load_checkpoint(self, *, weights: Path, optimizer: Path | None) -> None:
        """(collective) Continues from a checkpoint of any layout; the reference stays the initial model."""
        with self._ready_for_training():
            self._load_weights(weights)
            self._optimizer.take_weights()
            if optimizer is not None:
                self._optimizer.load_state_dict(checkpoint.load_optimizer(self._model, self._optimizer, optimizer))

    def _load_weights(self, folder: Path) -> None:
        problem = None
        try:
            load_weights(self._model, open_weights(folder, self._hf_config))
        except ModelFolderError as error:
            problem = str(error)
        raise_together(problem, folder, doing="read")
