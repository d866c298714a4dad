"""Checks that a model can run as configured: attention and parallel sizes against its architecture.

Called by the driver with the model folder, before it starts a worker, and by each DTensor worker with the model.
Invariant: what is accepted here runs with the numbers of one process; the rest is refused with its reason.
"""

from __future__ import annotations

from transformers import PretrainedConfig, PreTrainedModel

from nemo_rl.config.policy import PolicyConfig
from nemo_rl.errors import ConfigError, ModelFolderError, boundary
from nemo_rl.models.adapters.lora import adapted_layers
from nemo_rl.models.dtensor.fit import check_model_fits
from nemo_rl.models.dtensor.rope import long_rope_start
from nemo_rl.models.hf.loading import load_model_config, model_without_weights
from nemo_rl.models.hf.modules import HFRouters
from nemo_rl.models.megatron import architecture
from nemo_rl.models.megatron.convert_table import check_adapters_fit
from nemo_rl.models.vision import family_of
from nemo_rl.routes.shape import MAX_EXPERTS

__all__ = ["check_planned_model_fits", "check_policy_fits"]


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
