"""What the Megatron worker takes and what it refuses is said from a model's config alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from transformers import Gemma2Config, GptOssConfig, PretrainedConfig

from nemo_rl.errors import ConfigError
from nemo_rl.models.megatron.architecture import SUPPORTED, Architecture, Mixture, check_fits
from nemo_rl.models.policy.fit import check_policy_fits
from tests.helpers.megatron_models import FAMILIES, config_of, policy_config

DENSE = (False,) * 4
EVERYWHERE = (True,) * 4
EXPECTED: dict[str, dict[str, object]] = {
    "llama": {"head_dim": 8, "intermediate_size": 48},
    "mistral": {"windows": (10,) * 4},
    "mixtral": {
        "windows": (None,) * 4,
        "expert_layers": EVERYWHERE,
        "mixture": Mixture(num_experts=4, top_k=2, intermediate_size=48),
    },
    "qwen2": {"has_qkv_bias": True, "is_tied": False},
    "qwen3": {"has_head_norms": True, "head_dim": 12, "is_tied": True},
    "qwen3_moe": {
        "has_head_norms": True,
        "expert_layers": (True, False, True, True),
        "mixture": Mixture(num_experts=8, top_k=2, intermediate_size=24),
    },
    "glm4_moe": {
        "has_head_norms": True,
        "has_qkv_bias": True,
        "expert_layers": (False, True, True, True),
        "mixture": Mixture(
            num_experts=8,
            top_k=4,
            intermediate_size=24,
            score="sigmoid",
            scaling=1.5,
            num_groups=4,
            top_groups=2,
            shared_intermediate_size=48,
        ),
    },
}
"""What is special to a family in `config_of`; the rest is below."""
PLAIN: dict[str, object] = {
    "num_layers": 4,
    "hidden_size": 32,
    "num_heads": 4,
    "num_groups": 2,
    "vocab_size": 96,
    "has_qkv_bias": False,
    "has_head_norms": False,
    "windows": (None,) * 4,
    "expert_layers": DENSE,
    "mixture": None,
}


def problems(family: str, *, changes: Mapping[str, object] | None = None, **megatron: object) -> list[str]:
    """Every line of the refusal of a model under these settings."""
    shape = Architecture.of(config_of(family, **(changes or {})))
    with pytest.raises(ConfigError) as caught:
        check_fits(shape, policy_config(**megatron))
    return str(caught.value).split("; policy.megatron_cfg.")


def test_all_families_are_known_here() -> None:
    assert set(SUPPORTED) == set(FAMILIES) == set(EXPECTED)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_architecture_is_that_of_the_config(family: str) -> None:
    shape = Architecture.of(config_of(family))
    assert {name: getattr(shape, name) for name in PLAIN | EXPECTED[family]} == PLAIN | EXPECTED[family]
    check_fits(shape, policy_config())


def test_some_layers_have_a_window_and_experts_keep_their_weights() -> None:
    window = {"use_sliding_window": True, "sliding_window": 10, "max_window_layers": 3}
    assert Architecture.of(config_of("qwen2", **window)).windows == (None, None, None, 10)
    assert Architecture.of(config_of("qwen3", **window)).windows == (None, None, None, 10)
    assert Architecture.of(config_of("qwen3_moe", sliding_window=10, use_sliding_window=True)).windows == (10,) * 4
    assert Architecture.of(config_of("qwen3_moe", sliding_window=10)).windows == (None,) * 4
    mixture = Architecture.of(config_of("qwen3_moe", norm_topk_prob=False, decoder_sparse_step=2, mlp_only_layers=[]))
    assert mixture.mixture is not None and not mixture.mixture.normalises
    assert mixture.expert_layers == (False, True, False, True)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen3_moe", {"num_experts": 0}),
        ("qwen3_moe", {"mlp_only_layers": [0, 1, 2, 3]}),
        ("glm4_moe", {"first_k_dense_replace": 4}),
    ],
)
def test_a_mixture_without_a_layer_of_experts_is_a_dense_model(family: str, changes: dict[str, object]) -> None:
    shape = Architecture.of(config_of(family, **changes))
    assert shape.mixture is None and shape.expert_layers == DENSE
    assert "has no experts" in problems(family, changes=changes, expert_model_parallel_size=2)[0]


def test_keys_that_hugging_face_ignores_are_ignored() -> None:
    # Folders that were converted from another family keep some of its keys.
    left_over = {"sliding_window": 10, "use_qk_norm": True}
    assert Architecture.of(config_of("llama", **left_over)) == Architecture.of(config_of("llama"))
    assert Architecture.of(config_of("mistral", attention_bias=True)) == Architecture.of(config_of("mistral"))


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
REFUSED: dict[str, tuple[str, dict[str, object], str]] = {
    "bias of the output": ("llama", {"attention_bias": True}, "output projection (attention_bias)"),
    "biases of the layers": ("llama", {"mlp_bias": True}, "feed-forward layers (mlp_bias)"),
    "activation": ("qwen2", {"hidden_act": "gelu"}, "hidden_act 'gelu' (expected silu)"),
    "groups": ("glm4_moe", {"num_experts_per_tok": 3}, "not scored by two experts each"),
    "unequal groups": ("glm4_moe", {"n_group": 3}, "experts that do not divide into 3 groups"),
    "few groups": (
        "glm4_moe",
        {"n_group": 2, "topk_group": 4, "num_experts_per_tok": 8},
        "fewer groups than are chosen",
    ),
    "scores": ("glm4_moe", {"norm_topk_prob": False}, "not normalised (norm_topk_prob)"),
    "one expert": ("mixtral", {"num_experts_per_tok": 1}, "one expert per token with a normalised weight"),
    "noise": ("mixtral", {"router_jitter_noise": 0.1}, "noise before the routers (router_jitter_noise)"),
    "dynamic positions": (
        "llama",
        {"rope_parameters": DYNAMIC},
        "rope_type 'dynamic' (expected default, linear, llama3, yarn)",
    ),
    "positions of a part": (
        "qwen3",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        "positions in a part of each head (partial_rotary_factor 0.5)",
    ),
    "scaled positions of a part": (
        "glm4_moe",
        {"rope_parameters": YARN | {"partial_rotary_factor": 0.5}},
        "scaled positions (attention_factor 1.139) in a part of each head",
    ),
    "factor": ("llama", {"rope_parameters": YARN | {"factor": "four"}}, "unreadable rope_parameters (TypeError"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_part_without_counterpart_is_refused_with_the_way_out(name: str) -> None:
    family, changes, text = REFUSED[name]
    with pytest.raises(ConfigError) as caught:
        Architecture.of(config_of(family, **changes))
    assert text in str(caught.value)
    assert str(caught.value).startswith(f"policy.model_name: this {family!r} has ")
    assert str(caught.value).endswith("policy.megatron_cfg.enabled=false and policy.dtensor_cfg.enabled=true for it")


def test_all_parts_without_counterpart_come_at_once() -> None:
    changes = {"attention_bias": True, "mlp_bias": True, "rope_parameters": DYNAMIC}
    with pytest.raises(ConfigError, match=r"\(mlp_bias\) and .*\(attention_bias\) and .*'dynamic'"):
        Architecture.of(config_of("llama", **changes))


@pytest.mark.parametrize("config", [Gemma2Config(), GptOssConfig(num_hidden_layers=2)], ids=["gemma2", "gpt_oss"])
def test_another_family_is_refused_with_those_that_are_known(config: PretrainedConfig) -> None:
    with pytest.raises(ConfigError) as caught:
        Architecture.of(config)
    assert f"trains {', '.join(SUPPORTED)}; got {config.model_type!r}" in str(caught.value)


SIZES: dict[str, tuple[str, dict[str, object], list[str]]] = {
    "heads, vocabulary and rows": (
        "llama",
        {"tensor_model_parallel_size": 5},
        [
            "tensor_model_parallel_size: 4 attention heads do not divide by 5",
            "tensor_model_parallel_size: 2 key-value heads do not divide by 5",
            "tensor_model_parallel_size: 48 rows of the feed-forward layers do not divide by 5",
            "tensor_model_parallel_size: 96 tokens in the vocabulary do not divide by 5; set a divisor of 96, or "
            "resize the embeddings in the model folder to 100",
        ],
    ),
    "experts": (
        "glm4_moe",
        {"expert_model_parallel_size": 3, "expert_tensor_parallel_size": 5, "moe_router_bias_update_rate": 0.1},
        [
            "expert_model_parallel_size: 8 experts do not divide by 3",
            "expert_tensor_parallel_size: 24 rows of an expert do not divide by 5",
        ],
    ),
    "experts on tensor ranks": (
        "mixtral",
        {"tensor_model_parallel_size": 2, "moe_router_bias_update_rate": 0.1},
        [
            "sequence_parallel: experts under tensor parallelism need it; expected true, got false",
            "moe_router_bias_update_rate: the router of 'mixtral' has no bias to update",
        ],
    ),
    "stages": (
        "llama",
        {"pipeline_model_parallel_size": 3},
        [
            "pipeline_model_parallel_size: 4 layers do not divide over 3 stages; set "
            "num_layers_in_first_pipeline_stage or num_layers_in_last_pipeline_stage"
        ],
    ),
    "unequal stages": (
        "llama",
        {
            "pipeline_model_parallel_size": 4,
            "num_layers_in_first_pipeline_stage": 1,
            "num_layers_in_last_pipeline_stage": 2,
        },
        [
            "num_layers_in_first_pipeline_stage: 1 of 4 layers leave no equal numbers of them for the others of 4 "
            "stages",
            "num_layers_in_last_pipeline_stage: 2 of 4 layers leave no equal numbers of them for the others of 4 "
            "stages",
        ],
    ),
    "no experts": (
        "qwen3",
        {
            "expert_model_parallel_size": 2,
            "expert_tensor_parallel_size": 2,
            "freeze_moe_router": True,
            "moe_router_load_balancing_type": "aux_loss",
            "moe_aux_loss_coeff": 0.1,
            "moe_router_bias_update_rate": 0.1,
            "moe_token_dispatcher_type": "allgather",
        },
        [
            "expert_model_parallel_size: 'qwen3' has no experts; expected 1, got 2",
            "expert_tensor_parallel_size: 'qwen3' has no experts; expected 1, got 2",
            "freeze_moe_router: 'qwen3' has no experts; leave it out",
            "moe_router_load_balancing_type: 'qwen3' has no experts; leave it out",
            "moe_aux_loss_coeff: 'qwen3' has no experts; leave it out",
            "moe_token_dispatcher_type: 'qwen3' has no experts; leave it out",
            "moe_router_bias_update_rate: the router of 'qwen3' has no bias to update",
        ],
    ),
    "runs of recomputed layers": (
        "llama",
        {"activation_checkpointing": True, "recompute_num_layers": 3},
        ["recompute_num_layers: runs of 3 layers do not divide a pipeline stage of 4"],
    ),
    "recomputed layers": (
        "llama",
        {
            "activation_checkpointing": True,
            "recompute_method": "block",
            "recompute_num_layers": 3,
            "pipeline_model_parallel_size": 2,
        },
        ["recompute_num_layers: 3 is more than the 2 layers of a pipeline stage"],
    ),
    "recomputed parts": (
        "mixtral",
        {
            "activation_checkpointing": True,
            "recompute_granularity": "selective",
            "recompute_modules": ["core_attn", "mlp", "moe", "shared_experts"],
        },
        [
            "recompute_modules: 'mixtral' has no part 'mlp' to recompute",
            "recompute_modules: 'mixtral' has no part 'shared_experts' to recompute",
        ],
    ),
}


@pytest.mark.parametrize("name", SIZES)
def test_all_settings_that_do_not_fit_come_at_once_by_their_keys(name: str) -> None:
    family, settings, expected = SIZES[name]
    found = problems(family, **settings)
    assert found[0].startswith("policy.megatron_cfg.")
    assert [line.removeprefix("policy.megatron_cfg.") for line in found] == expected


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        # More ranks than key-value heads, which they share.
        ("llama", {"tensor_model_parallel_size": 4}),
        ("llama", {"pipeline_model_parallel_size": 4}),
        ("llama", {"pipeline_model_parallel_size": 2, "num_layers_in_first_pipeline_stage": 1}),
        ("llama", {"pipeline_model_parallel_size": 2, "num_layers_in_last_pipeline_stage": 3}),
        (
            "llama",
            {
                "pipeline_model_parallel_size": 3,
                "num_layers_in_first_pipeline_stage": 1,
                "num_layers_in_last_pipeline_stage": 1,
                "activation_checkpointing": True,
                "recompute_method": "block",
                "recompute_num_layers": 2,
            },
        ),
        ("glm4_moe", {"tensor_model_parallel_size": 2, "sequence_parallel": True, "expert_model_parallel_size": 8}),
        ("glm4_moe", {"moe_router_bias_update_rate": 0.1, "freeze_moe_router": True}),
        ("llama", {"activation_checkpointing": True, "recompute_num_layers": 2}),
    ],
)
def test_settings_that_fit_are_taken(family: str, settings: dict[str, object]) -> None:
    check_fits(Architecture.of(config_of(family)), policy_config(**settings))


def test_rows_of_dense_layers_count_only_where_there_are_some() -> None:
    sizes = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    odd = {"intermediate_size": 47, "mlp_only_layers": []}
    check_fits(Architecture.of(config_of("qwen3_moe", **odd)), policy_config(**sizes))
    [line] = problems("qwen3_moe", changes={"intermediate_size": 47}, **sizes)
    assert "47 rows of the feed-forward layers" in line


def test_the_folder_of_a_policy_is_what_is_checked(tmp_path: Path) -> None:
    config_of("mistral").save_pretrained(str(tmp_path))
    (tmp_path / "model.safetensors").touch()
    settings = policy_config(tensor_model_parallel_size=3).model_copy(update={"model_name": str(tmp_path)})
    with pytest.raises(ConfigError, match="4 attention heads do not divide by 3"):
        check_policy_fits(settings)
