"""Adapters of fused layers: which layers of megatron-core hold them, how they are split, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Mapping

import pytest
import torch

from nemo_rl.config.backends import LoraConfig
from nemo_rl.config.policy import PolicyConfig
from nemo_rl.errors import ConfigError
from nemo_rl.models.adapters.lora import adapted_layers, adapter_infos
from nemo_rl.models.hf.loading import model_without_weights
from nemo_rl.models.megatron.architecture import Architecture
from nemo_rl.models.megatron.convert_table import adapted_linears, adapter_weights
from nemo_rl.models.policy.fit import check_planned_model_fits
from tests.helpers.megatron_models import FAMILIES, config_of, policy_config

RANK = 3


def lora_of(**values: object) -> LoraConfig:
    return LoraConfig(enabled=True, rank=RANK, **values)


def policy_of(lora: Mapping[str, object], **megatron: object) -> PolicyConfig:
    return policy_config(**megatron).model_copy(update={"lora": lora_of(**lora)})


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_table_has_names_shapes_and_order_of_the_hugging_face_model(family: str, size: int) -> None:
    config = config_of(family)
    layers = adapted_layers(model_without_weights(config, "unused"), lora_of())
    weights = adapter_weights(Architecture.of(config), layers, rank=RANK, size=size)
    found = {part.name: part.shape for weight in weights for part in weight.parts}
    infos = adapter_infos(layers, lora_of())
    assert list(found.items()) == [(name, info.shape) for name, info in infos.items()]
    assert len({weight.local for weight in weights}) == len(weights)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_parts_of_tensor_ranks_join_to_the_whole(size: int) -> None:
    """With two groups of key and value heads four ranks share them, and B is whole on each."""
    config = config_of("llama")
    layers = adapted_layers(model_without_weights(config, "unused"), lora_of())
    for weight in adapter_weights(Architecture.of(config), layers, rank=RANK, size=size):
        whole = torch.arange(weight.shape[0] * weight.shape[1]).view(weight.shape)
        parts = torch.stack([weight.split.shard(whole, rank=rank, size=size) for rank in range(size)])
        assert torch.equal(weight.split.join(parts), whole)
        is_shared = size == 4 and re.search("[qkv]_proj.B", weight.local)
        assert (weight.split.dim is None) == bool(
            is_shared or re.search(r"(linear_qkv|fc1)\..*A$|(proj|fc2)\.low.*B$", weight.local)
        )


def test_one_layer_holds_the_adapters_of_the_projections_that_it_fuses() -> None:
    config = config_of("qwen3")
    layers = adapted_layers(model_without_weights(config, "unused"), lora_of(targets=["q_proj", "v_proj", "down_proj"]))
    first, second, *_ = adapted_linears(Architecture.of(config), layers)
    assert first.module == "decoder.layers.0.self_attention.linear_qkv"
    assert [layer and layer.name.rpartition(".")[2] for layer in first.layers] == ["q_proj", None, "v_proj"]
    assert (second.module, second.splits_inputs) == ("decoder.layers.0.mlp.linear_fc2", True)


REFUSED = {
    "experts": (
        "qwen3_moe",
        policy_of({"targets": ["q_proj", "experts.down_proj"]}),
        r"policy\.lora\.targets: .*mlp\.experts\.down_proj.*policy\.dtensor_cfg\.enabled=true",
    ),
    "bias of the router": (
        "glm4_moe",
        policy_of({}, moe_router_bias_update_rate=0.01),
        r"moe_router_bias_update_rate: it changes the bias of routers.*set it to 0",
    ),
    "a stage without adapters": (
        "qwen3",
        policy_of({"targets": ["layers.0.mlp.up_proj", "layers.1.mlp.up_proj"]}, pipeline_model_parallel_size=2),
        r"policy\.lora\.targets: none of the layers 2 to 3, which are stage 1",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_have_an_adapter_is_refused_with_the_key(name: str) -> None:
    family, policy, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message):
        check_planned_model_fits(config_of(family), policy)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_takes_adapters_in_every_linear_layer(family: str) -> None:
    check_planned_model_fits(config_of(family), policy_of({}, pipeline_model_parallel_size=2))
