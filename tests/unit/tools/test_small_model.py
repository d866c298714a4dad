"""A small model has its family's switches, sizes that the axes divide, and no weight that hides a mistake."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from nemo_rl.config.policy import ParallelSizes
from nemo_rl.data.tokenizer import load_tokenizer
from nemo_rl.errors import UserError
from nemo_rl.models.hf.loading import load_causal_lm
from nemo_rl.models.hf.tiny_model import WIDE, small_model_config, write_small_model
from nemo_rl.models.megatron.architecture import Architecture
from nemo_rl_tools.known_models import planned_model_config

TWO = ParallelSizes(tensor=2, pipeline=2, context=2, expert=2, expert_tensor=1)
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0}}
    | {"num_key_value_heads": 8, "attention_bias": True},
    "qwen2": {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 20},
    "qwen3": {"tie_word_embeddings": True, "head_dim": 128},
    "qwen3_moe": {"mlp_only_layers": [0, 3], "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True},
    "mixtral": {"num_local_experts": 8, "sliding_window": 4096},
    "glm4_moe": {"first_k_dense_replace": 3, "n_routed_experts": 128, "use_qk_norm": True, "topk_group": 1},
    "gemma3_text": {"num_hidden_layers": 26},
    "phi3": {
        "rope_parameters": {
            **{"rope_type": "longrope", "rope_theta": 1e4, "factor": 32.0, "original_max_position_embeddings": 4096},
            **{"short_factor": [1.0] * 48, "long_factor": [2.0] * 48},
        },
        **{"num_attention_heads": 32, "hidden_size": 3072},
    },
    "deepseek_v3": {},
}
LLAMA3 = {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
KEPT = ("tie_word_embeddings", "attention_bias", "use_qk_norm", "norm_topk_prob", "use_sliding_window", "hidden_act")


def real(family: str) -> PretrainedConfig:
    given = dict(FAMILIES[family])
    if family == "llama":
        given["rope_parameters"] = {**given["rope_parameters"], **LLAMA3}
    config: PretrainedConfig = AutoConfig.for_model(family, **given)
    return config


@pytest.mark.parametrize("family", FAMILIES)
def test_a_small_model_of_every_family_keeps_its_switches(family: str) -> None:
    large = real(family)
    small = small_model_config(large, TWO, real_sizes=TWO, vocab_size=320)
    assert type(small) is type(large)
    before, after = large.to_dict(), small.to_dict()
    assert {name: after.get(name) for name in KEPT} == {name: before.get(name) for name in KEPT}
    assert set(before.get("layer_types") or ()) == set(after.get("layer_types") or ())
    for name in ("rope_type", "type"):
        assert (after.get("rope_parameters") or {}).get(name) == (before.get("rope_parameters") or {}).get(name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(small)
    assert sum(weight.numel() for weight in model.parameters()) < 2_000_000


def test_axes_divide_what_they_split() -> None:
    shape = Architecture.of(small_model_config(real("qwen3_moe"), TWO, real_sizes=TWO, vocab_size=320))
    assert shape.mixture is not None
    counts = (shape.num_heads, shape.num_groups, shape.num_layers, shape.mixture.num_experts, shape.vocab_size)
    assert [count % 2 for count in counts] == [0] * len(counts)
    assert True in shape.expert_layers and False in shape.expert_layers


@pytest.mark.parametrize(("tensor", "groups"), [(2, 2), (8, 2), (16, 1)])
def test_key_value_heads_that_tensor_ranks_share_stay_shared(tensor: int, groups: int) -> None:
    large = planned_model_config("Llama-3.1-8B")
    small = small_model_config(large, TWO, real_sizes=ParallelSizes(tensor=tensor), vocab_size=320)
    assert small.num_key_value_heads == groups


@pytest.mark.parametrize("name", ["Llama-3.1-8B", "Qwen2.5-7B"])
def test_heads_of_a_wide_model_are_those_that_vllm_takes(name: str) -> None:
    """Both make up the residual stream; a Qwen2.5 says no size of a head."""
    small = small_model_config(planned_model_config(name), TWO, real_sizes=TWO, vocab_size=320, hidden=WIDE)
    size = getattr(small, "head_dim", None) or small.hidden_size // small.num_attention_heads
    assert (small.hidden_size, size) == (128, 32)


def test_the_folder_has_a_tokenizer_and_weights_of_which_none_is_one_or_zero(tmp_path: Path) -> None:
    written = write_small_model(tmp_path / "model", planned_model_config("Qwen2.5-7B"), TWO, real_sizes=TWO)
    model = load_causal_lm(written.folder)
    assert written.num_layers == model.config.num_hidden_layers == 4
    flat = torch.cat([weight.detach().flatten() for weight in model.parameters()])
    # The padding token's row apart, of which Hugging Face makes zeros.
    assert not ((flat == 1) | (flat == 0)).sum() > model.config.hidden_size
    tokenizer = load_tokenizer(written.folder)
    (tmp_path / "opened").touch()
    assert {path.stat().st_mode for path in written.folder.iterdir()} == {(tmp_path / "opened").stat().st_mode}
    assert tokenizer.decode(tokenizer.encode("sort 123")) == "sort 123" and len(tokenizer) <= model.config.vocab_size


def test_a_model_that_is_no_plain_decoder_is_refused() -> None:
    with pytest.raises(UserError, match="has no layers, and cannot be made small here"):
        small_model_config(AutoConfig.for_model("prophetnet"), TWO, real_sizes=TWO, vocab_size=320)
