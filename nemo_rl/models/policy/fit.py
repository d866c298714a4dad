"""Checks that a model can run as configured: attention and parallel sizes against its architecture.

Called by the driver with the model folder, before it starts a worker, and by each DTensor worker with the model.
Invariant: what is accepted here runs with the numbers of one process; the rest is refused with its reason.
"""

from __future__ import annotations

import torch
from transformers import PretrainedConfig, PreTrainedModel

from nemo_rl.config.policy import PolicyConfig
from nemo_rl.errors import ConfigError, ModelFolderError, boundary
from nemo_rl.models.adapters.lora import adapted_layers
from nemo_rl.models.dtensor.rope import long_rope_start, rope_problem
from nemo_rl.models.dtensor.tensor_parallel import check_plan, plan_of
from nemo_rl.models.hf.loading import load_model_config, model_without_weights
from nemo_rl.models.hf.modules import HFRouters
from nemo_rl.models.megatron import architecture
from nemo_rl.models.megatron.convert_table import check_adapters_fit
from nemo_rl.models.vision import family_of
from nemo_rl.routes.shape import MAX_EXPERTS

__all__ = ["attention_problem", "check_model_fits", "check_planned_model_fits", "check_policy_fits"]


RECURRENT = frozenset({"linear_attention", "conv", "mamba", "recurrent"})
"""Kinds of layers that know sequences by where a row begins, and nothing else."""


def check_model_fits(model: PreTrainedModel, config: PolicyConfig) -> None:
    """Compare a model, with or without weights, with packing and parallel sizes.

    Raises:
        ConfigError: the model cannot run as configured.
    """
    sizes, problem = config.dtensor_cfg, attention_problem(model)
    if config.vision.freeze_tower and family_of(model.config) is None:
        raise ConfigError(
            f"policy.vision.freeze_tower: true, and {model.config.model_type!r} has no vision tower that is known "
            "here; set it to false"
        )
    positions = rope_problem(model.config)
    if positions is not None:
        raise ConfigError(
            f"policy.model_name: this {model.config.model_type!r} {positions}; log-probabilities would depend on the "
            "batching. Take a model whose rope_type is default, linear, llama3, longrope or yarn"
        )
    if problem is not None and (sizes.context_parallel_size > 1 or config.sequence_packing.is_on):
        is_context = sizes.context_parallel_size > 1
        key = "dtensor_cfg.context_parallel_size" if is_context else "sequence_packing.enabled"
        raise ConfigError(
            f"policy.{key}: {model.config.model_type!r} {problem}, which neither packing nor context parallelism can "
            "serve; set policy.dtensor_cfg.context_parallel_size=1 and policy.sequence_packing.enabled=false"
        )
    if sizes.tensor_parallel_size > 1:
        size = sizes.tensor_parallel_size
        plan = plan_of(model, custom=sizes.custom_parallel_plan, tp=size, sequence_parallel=sizes.sequence_parallel)
        check_plan(model, plan, size=size)
    if config.lora.enabled:
        _check_adapters_fit(model, config)


def _check_adapters_fit(model: PreTrainedModel, config: PolicyConfig) -> None:
    sizes, dropout = config.dtensor_cfg, config.lora.dropout
    for key, size, reason in (
        (
            "tensor_parallel_size",
            sizes.tensor_parallel_size,
            "where inputs of a layer are split, ranks that draw alike would drop the same places of different features",
        ),
        (
            "context_parallel_size",
            sizes.context_parallel_size,
            "ranks that share a sequence draw for themselves, so that numbers would depend on how it is cut",
        ),
    ):
        if dropout and size > 1:
            raise ConfigError(
                f"policy.lora.dropout: {dropout} with policy.dtensor_cfg.{key}={size}: {reason}; set one of them back "
                "(dropout=0 or a size of 1)"
            )
    adapted_layers(model, config.lora)


def attention_problem(model: PreTrainedModel) -> str | None:
    """Return why our attention over segments cannot stand in for the model's own, or None where it can."""
    kinds = {str(kind) for kind in model.config.get_text_config().to_dict().get("layer_types") or ()}
    if kinds & RECURRENT or any(isinstance(module, torch.nn.Conv1d) for module in model.modules()):
        return "has layers that carry values along a row outside of attention (convolutions, states)"
    if any(type(module).__name__.endswith("Indexer") for module in model.modules()):
        return "has an indexer that chooses the keys of each token by a mask of whole rows"
    return None if model._supports_attention_backend else "brings its own attention"


def check_policy_fits(config: PolicyConfig) -> None:
    """Read the config of the model folder only; imports no training engine.

    The engines of the rollout are Hugging Face models, whichever worker trains.

    Raises:
        ModelFolderError: the folder is missing, unreadable or of another kind of model.
        ConfigError: the model cannot run as configured.
    """
    check_planned_model_fits(load_model_config(config.model_name), config)


def check_planned_model_fits(given: PretrainedConfig, config: PolicyConfig) -> None:
    """Check the same for an architecture whose folder need not be here; raises as `check_policy_fits`."""
    model = model_without_weights(given, config.model_name)
    with boundary(ModelFolderError, f"model folder {config.model_name!r}: config.json"):
        if config.megatron_cfg.enabled:
            if family_of(given) is not None:
                raise ConfigError(
                    f"policy.model_name: {given.model_type!r} has a vision tower, and the Megatron worker trains "
                    "models of text alone; set policy.megatron_cfg.enabled=false and policy.dtensor_cfg.enabled=true"
                )
            shape = architecture.Architecture.of(given)
            architecture.check_fits(shape, config)
            if config.lora.enabled:
                check_adapters_fit(shape, adapted_layers(model, config.lora), config)
        else:
            check_model_fits(model, config)
    _check_rollouts_have_one_rope(model, config)
    if config.router_replay.enabled:
        _check_routes_can_be_replayed(model)


def _check_rollouts_have_one_rope(model: PreTrainedModel, config: PolicyConfig) -> None:
    """Refuse rows that need two kinds of positions: an engine keeps the keys of a row that grows beyond the short
    frequencies; training gives all its tokens the long ones."""
    start, longest = long_rope_start(model.config), config.max_total_sequence_length
    if start is not None and longest > start:
        raise ConfigError(
            f"policy.max_total_sequence_length: {model.config.model_type!r} has other positions (rope_type 'longrope') "
            f"in rows of more than {start} tokens, which engines cannot change in the middle of a row; expected at "
            f"most {start}, got {longest}"
        )


def _check_routes_can_be_replayed(model: PreTrainedModel) -> None:
    """Refuse models whose routers cannot take routes: engines and the DTensor worker find routers in the model; the
    Megatron worker knows no other kinds."""
    routers = HFRouters(model)
    if routers.num_experts > MAX_EXPERTS:
        raise ConfigError(
            f"policy.router_replay.enabled: ids of experts travel in at most 16 bits, {model.config.model_type!r} has "
            f"{routers.num_experts} experts, expected at most {MAX_EXPERTS}; set it to false"
        )
