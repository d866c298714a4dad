"""The wrapper of megatron-core: what this package uses of it, imported once and in an order that works without CUDA.

Invariant: no other module imports `megatron`, so the adaptation of `cpu_compat` is in place before any of it runs.
"""

from __future__ import annotations

import importlib
import logging
import warnings
from typing import Any

import torch

from nemo_rl.models.megatron.cpu_compat import importing

with importing(), warnings.catch_warnings():
    # Silence hints at Transformer Engine and apex, which are optional here.
    warnings.simplefilter("ignore")
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing import exchange_utils
    from megatron.core.dist_checkpointing.core import CheckpointingConfig, CheckpointingException, save_config
    from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedBase, ShardedObject
    from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
    from megatron.core.dist_checkpointing.strategies import (
        filesystem_async,
        fully_parallel,
        state_dict_saver,
    )
    from megatron.core.dist_checkpointing.strategies import torch as torch_strategy
    from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_local_spec,
        get_gpt_layer_with_transformer_engine_spec,
    )
    from megatron.core.optimizer import (
        USING_PYTORCH_OPTIMIZER,
        OptimizerConfig,
        get_megatron_optimizer,
        get_standard_config_overrides,
    )
    from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.mappings import (
        copy_to_tensor_model_parallel_region,
        gather_from_sequence_parallel_region,
        reduce_from_tensor_model_parallel_region,
        reduce_scatter_to_sequence_parallel_region,
    )
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, model_parallel_cuda_manual_seed
    from megatron.core.transformer import ModuleSpec, TransformerConfig
    from megatron.core.transformer.mlp import MLP
    from megatron.core.transformer.module import Float16Module, MegatronModule
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.moe.router import TopKRouter
    from megatron.core.transformer.moe.router_replay import RouterReplay
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
    from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

    try:
        from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
    except ModuleNotFoundError:  # 0.16 has a dict of dicts in `moe_utils` instead.
        get_moe_metrics_tracker = None
    else:
        # `get_megatron_optimizer` would import it, after the adaptation.
        importlib.import_module("megatron.core.models.mimo.optimizer")

__all__ = [
    "COMMON_STATE_FNAME",
    "MLP",
    "USING_PYTORCH_OPTIMIZER",
    "CheckpointingConfig",
    "CheckpointingException",
    "DistributedDataParallel",
    "DistributedDataParallelConfig",
    "Float16Module",
    "GPTModel",
    "LocalNonpersistentObject",
    "MegatronModule",
    "MoELayer",
    "ModuleSpec",
    "OptimizerConfig",
    "OptimizerParamScheduler",
    "PackedSeqParams",
    "ProcessGroupCollection",
    "RouterReplay",
    "ShardedBase",
    "ShardedObject",
    "TopKRouter",
    "TransformerBlockSubmodules",
    "TransformerConfig",
    "clear_router_losses",
    "clip_grad_by_total_norm_fp32",
    "copy_to_tensor_model_parallel_region",
    "dist_checkpointing",
    "exchange_utils",
    "filesystem_async",
    "finalize_model_grads",
    "fully_parallel",
    "gather_from_sequence_parallel_region",
    "get_cuda_rng_tracker",
    "get_forward_backward_func",
    "get_gpt_layer_local_spec",
    "get_gpt_layer_with_transformer_engine_spec",
    "get_megatron_optimizer",
    "get_num_layers_to_build",
    "get_standard_config_overrides",
    "get_transformer_layer_offset",
    "grads_for_norm",
    "make_sharded_tensors_for_checkpoint",
    "model_parallel_cuda_manual_seed",
    "parallel_state",
    "reduce_from_tensor_model_parallel_region",
    "reduce_scatter_to_sequence_parallel_region",
    "router_losses",
    "save_config",
    "save_preprocess",
    "state_dict_saver",
    "torch_strategy",
]

ANNOUNCING = ("models.gpt.gpt_model", "dist_checkpointing.strategies.common", "dist_checkpointing.strategies.torch")
"""Modules of megatron-core 0.19 that log what later releases will drop: nothing that a user can act on."""


for _name in ANNOUNCING:
    logging.getLogger(f"megatron.core.{_name}").addFilter(
        lambda record: "deprecated" not in record.getMessage().lower()
    )


def clear_router_losses() -> None:
    """Set the sums of `router_losses` to 0."""
    if get_moe_metrics_tracker is None:
        moe_utils.clear_aux_losses_tracker()
    else:
        get_moe_metrics_tracker().clear()


def router_losses() -> list[torch.Tensor]:
    """Return per kind of loss `[layers of the model]`: what this rank's routers added up since the last clearing."""
    if get_moe_metrics_tracker is None:
        return [record["values"] for record in moe_utils.get_moe_layer_wise_logging_tracker().values()]
    return [entry.values for entry in get_moe_metrics_tracker().metrics.values()]


def grads_for_norm(part: Any) -> list[torch.Tensor]:
    """Return the gradients of this rank that count for the norm of an optimizer: of no weight that another rank
    counts."""
    named = "get_grads_for_grad_norm" if "get_grads_for_grad_norm" in dir(part) else "get_main_grads_for_grad_norm"
    return getattr(part, named)()
