"""`PolicyOptimizer`: megatron-core's optimizer and schedule as the Megatron worker uses them.

The worker calls `apply`, then `finish` per global batch, then `advance`. Invariant: a gradient that is not finite never
reaches a weight, on any rank. Dense weights and experts have an optimizer each; a rank whose stage has no experts holds
an empty one, so that all ranks pass through the same collectives.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from nemo_rl.config.policy import PolicyConfig
from nemo_rl.errors import ConfigError
from nemo_rl.models.hf.loading import DTYPES
from nemo_rl.models.megatron.cpu_compat import as_if_cuda
from nemo_rl.models.megatron.mcore import (
    USING_PYTORCH_OPTIMIZER,
    OptimizerConfig,
    OptimizerParamScheduler,
    clip_grad_by_total_norm_fp32,
    get_megatron_optimizer,
    get_standard_config_overrides,
    grads_for_norm,
)
from nemo_rl.models.megatron.setup import MegatronModel
from nemo_rl.models.policy.workers.base import HostBuffers
from nemo_rl.torch_private import norms_of

__all__ = ["PolicyOptimizer"]

STEP = "step"
"""Counts updates: torch's optimizers keep it per weight and on the CPU, the fused ones per group."""
ADAM_MOMENTS, SGD_MOMENTS = ("exp_avg", "exp_avg_sq"), ("momentum_buffer",)
SHARDING = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
"""Sharding of a checkpoint: any layout can read it, and names are those of Megatron-LM's own folders."""
MASTER = "master"
"""Name of the float32 weights that the optimizer of a half-precision model steps."""


class PolicyOptimizer:
    """Gradient norm, clipping, step and schedule over the whole job.

    Example:
        >>> optimizer = PolicyOptimizer(model, policy, num_steps=100)    # doctest: +SKIP
        >>> optimizer.apply()                                            # doctest: +SKIP
        1e-06
        >>> norm = optimizer.finish(); optimizer.advance()               # doctest: +SKIP
    """

    def __init__(self, model: MegatronModel, policy: PolicyConfig, *, num_steps: int) -> None:
        """(collective) Args:
        num_steps: training calls of the whole run, where a decay ends unless the config says so.

        Raises:
            ConfigError: megatron-core refuses the settings, or could not restore the state from a checkpoint.
        """
        section = policy.megatron_cfg.optimizer
        is_distributed = model.ddp.ddp_config.use_distributed_optimizer
        if is_distributed and (USING_PYTORCH_OPTIMIZER or section.optimizer != "adam"):
            raise ConfigError(
                "policy.megatron_cfg.optimizer.use_distributed_optimizer: only the Adam of Transformer Engine or apex "
                "can be restored from a checkpoint then, and neither is installed or chosen; set it to null or false"
            )
        self._model = model
        self._max_grad_norm = policy.max_grad_norm
        try:
            self._config = _optimizer_config(policy, is_distributed=is_distributed)
            overrides = {} if section.decay_norms_and_biases else get_standard_config_overrides(self._config)
            with as_if_cuda():
                self._chain = get_megatron_optimizer(
                    self._config, [model.ddp], config_overrides=overrides, use_gloo_process_groups=False
                )
            self._schedule = _schedule(self._chain, policy, num_steps=num_steps)
        except (AssertionError, ImportError, RuntimeError, ValueError) as error:
            raise ConfigError(
                f"policy.megatron_cfg.optimizer: megatron-core refuses these settings: {error}"
            ) from error
        self._parts: list[Any] = [part for part in self._chain.chained_optimizers if not part.is_stub_optimizer]
        self._updates_done = 0

    # The schedule.

    @property
    def calls_done(self) -> int:
        return int(self._schedule.num_steps)

    def apply(self) -> float:
        """Write learning rate and weight decay of the next call into the optimizer; return the learning rate."""
        self._schedule.step(0)
        return float(self._schedule.get_lr({}))

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for part in self._parts for group in part.param_groups]

    def advance(self) -> None:
        """(collective) Advance by one training call; every rank has the full weights after it."""
        self._schedule.num_steps += 1
        if self._config.overlap_param_gather:
            # Otherwise only the next forward pass would gather them, and an export comes first.
            self._model.ddp.start_param_sync(force_sync=True)

    def state_dict(self) -> dict[str, float]:
        """Return all that a resume of the schedule needs; the curve itself follows from the config."""
        return {"calls_done": float(self.calls_done)}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue the curve after as many calls."""
        self._schedule.num_steps = int(state["calls_done"])

    # The step.

    def zero_grad(self) -> None:
        self._model.ddp.zero_grad_buffer()
        self._chain.zero_grad()

    @torch.no_grad()
    def finish(self) -> float | None:
        """Clip and step (collective over all ranks), after `finalize_model_grads`; the gradients are gone then.

        Returns:
            The global norm before clipping, the same on every rank, or None if it is not finite: no step then.
        """
        with as_if_cuda():
            self._chain.prepare_grads()
            norm = self._grad_norm()
            is_finite = math.isfinite(norm)
            if is_finite:
                if self._max_grad_norm is not None:
                    self._clip(norm)
                self._chain.step_with_ready_grads()
                self._updates_done += 1
            self.zero_grad()
        return norm if is_finite else None

    def _grad_norm(self) -> float:
        """Return the 2-norm of the whole gradient: each optimizer over the ranks that hold its other parts (other ones
        for dense weights than for experts), then their sum."""
        total = 0.0
        for part in self._chain.chained_optimizers:
            grads = grads_for_norm(part)
            square = torch.zeros(1, dtype=torch.float64, device=self._device())
            if grads:
                square += torch.stack(norms_of(grads)).double().square().sum()
            dist.all_reduce(square, group=part.get_grad_stats_parallel_group())
            total += float(square)
        return math.sqrt(total)

    def _clip(self, norm: float) -> None:
        for part in self._parts:
            clip_grad_by_total_norm_fp32(
                part.get_parameters(),
                max_norm=self._max_grad_norm,
                total_norm=norm,
                use_decoupled_grad=self._config.use_precision_aware_optimizer_no_fp8_or_ds_fp8,
            )

    # The state.

    @property
    def updates_done(self) -> int:
        """Step so far: those that Adam's bias correction counts."""
        return self._updates_done

    def sharded_state_dict(self, model_state: dict[str, Any], *, is_loading: bool) -> dict[Any, Any]:
        """(collective) Return the state in megatron-core's terms: its parts know their place in the whole.

        Args:
            model_state: `sharded_state_dict` of the model, by whose tensors weights are found.
            is_loading: the tensors are to be overwritten.
        """
        self._make_state()
        # Without apex or Transformer Engine the state exists by now, and megatron-core could not make that of SGD.
        has_to_make_room = is_loading and self._config.use_distributed_optimizer
        with as_if_cuda():
            tree: dict[Any, Any] = self._chain.sharded_state_dict(
                model_state, is_loading=has_to_make_room, metadata=SHARDING
            )
        return tree

    def load_sharded_state_dict(self, tree: dict[Any, Any], *, updates_done: int) -> None:
        """Take what `sharded_state_dict` gave, with loaded tensors in it.

        Settings such as betas stay those of the config. `updates_done` is not in the tree, because a rank whose stage
        has no experts knows nothing of their optimizer's count.

        Raises:
            ValueError: the tree is of another optimizer.
        """
        chained = len(self._chain.chained_optimizers) > 1
        for part in tree.values() if chained else [tree]:
            inner = part.get("optimizer", part)
            for group in inner["param_groups"]:
                group.update({STEP: updates_done} if not USING_PYTORCH_OPTIMIZER else {})
            if "state" in inner:
                inner["state"]["common_step"] = torch.tensor(float(updates_done))
        with as_if_cuda(), torch.no_grad():
            self._chain.load_state_dict(tree)
        self._updates_done = updates_done

    def _make_state(self) -> None:
        """Make the state that the first step would make, so that there is something to save or to load into."""
        for part in self._parts:
            if self._config.use_distributed_optimizer or not USING_PYTORCH_OPTIMIZER:
                if part.init_state_fn is not None:
                    part.init_state_fn(part.optimizer, part.config)
                continue
            is_adam = self._config.optimizer == "adam"
            kinds = ADAM_MOMENTS if is_adam else SGD_MOMENTS if self._config.sgd_momentum else ()
            for weight in part.get_parameters():
                moments = part.optimizer.state[weight]
                for kind in kinds:
                    moments.setdefault(kind, torch.zeros_like(weight))
                if is_adam:
                    moments.setdefault(STEP, torch.tensor(0.0))

    def take_weights(self) -> None:
        """Step from the model's present weights: call it after they were changed from outside.

        Only an optimizer with float32 weights of its own has something to do.
        """
        self._chain.reload_model_params()

    def state_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield all that `move_state` moves, as `weight's name, dot, kind`; the model's own weights are not among
        it."""
        for name, kind, holder in self._state():
            yield f"{name}.{kind}", holder.data if kind == MASTER else holder[kind]

    def moments(self, kind: str) -> dict[str, torch.Tensor]:
        """Return this rank's state of one kind by megatron-core's name of the weight.

        Args:
            kind: `exp_avg`, `exp_avg_sq`, `momentum_buffer` or `master`.
        """
        suffix = f".{kind}"
        return {name.removesuffix(suffix): value for name, value in self.state_tensors() if name.endswith(suffix)}

    def move_state(self, device: torch.device, host: HostBuffers) -> None:
        """Move main weights and moments; `optimizer_cpu_offload` places its state itself."""
        if self._config.optimizer_cpu_offload:
            return
        held = [(kind, holder, holder.data if kind == MASTER else holder[kind]) for _, kind, holder in self._state()]
        leaving = [each for each in held if each[-1].device.type != device.type]
        moved = host.moved("optimizer", [value for *_, value in leaving], device)
        for (kind, holder, _), value in zip(leaving, moved, strict=True):
            if kind == MASTER:
                holder.data = value
            else:
                holder[kind] = value

    def _state(self) -> Iterator[tuple[str, str, Any]]:
        """Name of the weight, kind, and what holds it: the main weight itself, or the weight's dict of moments."""
        names: dict[int, str] = {}
        storages = set()
        for name, weight in self._model.module.named_parameters():
            main = vars(weight).get("main_param")
            names[id(weight if main is None else main)] = name
            storages.add(weight.untyped_storage().data_ptr())
        for part in self._parts:
            for number, weight in enumerate(part.get_parameters()):
                name = names.get(id(weight), f"shard_{number}")
                if weight.untyped_storage().data_ptr() not in storages:
                    yield name, MASTER, weight
                moments = part.optimizer.state.get(weight, {})
                for kind in [kind for kind, value in moments.items() if isinstance(value, torch.Tensor)]:
                    if kind != STEP:
                        yield name, kind, moments

    def _device(self) -> torch.device:
        return next(self._model.module.parameters()).device


def _optimizer_config(policy: PolicyConfig, *, is_distributed: bool) -> OptimizerConfig:
    section = policy.megatron_cfg.optimizer
    dtype = DTYPES[policy.precision]
    return OptimizerConfig(
        optimizer=section.optimizer,
        lr=section.lr,
        min_lr=section.min_lr,
        weight_decay=section.weight_decay,
        adam_beta1=section.adam_beta1,
        adam_beta2=section.adam_beta2,
        adam_eps=section.adam_eps,
        sgd_momentum=section.sgd_momentum,
        bf16=dtype is torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=is_distributed,
        overlap_param_gather=policy.megatron_cfg.distributed_data_parallel_config.overlap_param_gather,
        use_precision_aware_optimizer=section.use_precision_aware_optimizer,
        optimizer_cpu_offload=section.optimizer_cpu_offload,
        optimizer_offload_fraction=section.optimizer_offload_fraction,
    )


def _schedule(chain: Any, policy: PolicyConfig, *, num_steps: int) -> OptimizerParamScheduler:
    section, schedule = policy.megatron_cfg.optimizer, policy.megatron_cfg.scheduler
    # A constant one may stand over a recipe that has another.
    is_constant = schedule.weight_decay_incr_style == "constant"
    start, end = (None, None) if is_constant else (schedule.start_weight_decay, schedule.end_weight_decay)
    return OptimizerParamScheduler(
        chain,
        init_lr=schedule.lr_warmup_init,
        max_lr=section.lr,
        min_lr=section.min_lr,
        lr_warmup_steps=schedule.lr_warmup_iters,
        lr_decay_steps=schedule.decay_iters(num_steps),
        lr_decay_style=schedule.lr_decay_style,
        start_wd=section.weight_decay if start is None else start,
        end_wd=section.weight_decay if end is None else end,
        wd_incr_steps=num_steps,
        wd_incr_style=schedule.weight_decay_incr_style,
    )
