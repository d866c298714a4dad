"""Shapes of known models are those of the published weights, and a folder or a file decides over them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from nemo_rl.config.policy import ParallelSizes
from nemo_rl.errors import ModelFolderError
from nemo_rl.models.hf.tiny_model import small_model_config
from nemo_rl_tools.known_models import KNOWN_MODELS, planned_model_config
from nemo_rl_tools.plan.setting import Model

IN_RECIPES = ("Qwen2.5-1.5B", "Llama-3.1-8B", "Qwen3-30B-A3B")
PUBLISHED = {
    "Qwen2.5-0.5B": 494_032_768,
    "Qwen2.5-1.5B": 1_543_714_304,
    "Qwen2.5-3B": 3_085_938_688,
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen2.5-32B": 32_763_876_352,
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-1.7B": 1_720_574_976,
    "Qwen3-4B": 4_022_468_096,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-14B": 14_768_307_200,
    "Qwen3-32B": 32_762_123_264,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Qwen3-235B-A22B": 235_093_634_560,
    "Llama-3.2-1B": 1_235_814_400,
    "Llama-3.1-8B": 8_030_261_248,
    "Llama-3.1-70B": 70_553_706_496,
    "Llama-3.2-3B": 3_212_749_824,
    "Llama-3.3-70B": 70_553_706_496,
    # Of the folders that `make demo` and `make learn-sort-moe` write.
    "starter_sort": 434_944,
    "teacher_sort": 434_944,
    "starter_sort_moe": 514_880,
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in IN_RECIPES else pytest.mark.full) for name in KNOWN_MODELS]
)
def test_a_known_model_has_as_many_parameters_as_were_published(name: str) -> None:
    config = planned_model_config(f"models/{name}-Instruct")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == PUBLISHED[name]


SIZES = {
    *(
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
    ),
    *("moe_intermediate_size", "num_experts", "num_local_experts", "num_experts_per_tok", "layer_types"),
}
"""Checked by the number of parameters."""
QWEN_ROPE = {"rope_theta": 1e6, "rope_type": "default"}
QWEN2 = {"rope_parameters": QWEN_ROPE, "bos_token_id": 151643, "eos_token_id": 151643}
QWEN2_CHAT = {**QWEN2, "eos_token_id": 151645}
QWEN3 = {**QWEN2_CHAT, "max_position_embeddings": 40960}
TIED = {"tie_word_embeddings": True}


def llama(factor: float, eos: object = 128001) -> dict[str, object]:
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return {
        **{"vocab_size": 128256, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5},
        **{"bos_token_id": 128000, "eos_token_id": eos},
        "rope_parameters": {**rope, "original_max_position_embeddings": 8192},
    }


STARTER = {"vocab_size": 320, "max_position_embeddings": 2048, **TIED}
CHAT_EOS = [128001, 128008, 128009]
DEVIATIONS: dict[str, dict[str, object]] = {
    "Qwen2.5-0.5B": {**QWEN2, **TIED},
    "Qwen2.5-1.5B": {**QWEN2, **TIED, "max_position_embeddings": 131072},
    "Qwen2.5-3B": {**QWEN2, **TIED},
    "Qwen2.5-7B": {**QWEN2, "vocab_size": 152064, "max_position_embeddings": 131072},
    "Qwen2.5-32B": {**QWEN2, "vocab_size": 152064, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5},
    **{f"Qwen3-{size}": {**QWEN3, **TIED} for size in ("0.6B", "1.7B", "4B")},
    **{f"Qwen3-{size}": QWEN3 for size in ("8B", "14B", "32B")},
    **{f"Qwen3-{size}": {**QWEN3, "norm_topk_prob": True} for size in ("30B-A3B", "235B-A22B")},
    "Llama-3.1-8B": llama(8.0),
    "Llama-3.1-70B": llama(8.0),
    "Llama-3.2-1B": {**llama(32.0), **TIED},
    "Llama-3.2-3B": {**llama(32.0), **TIED},
    "Llama-3.3-70B": llama(8.0),
    "starter_sort": STARTER,
    "teacher_sort": STARTER,
    "starter_sort_moe": {**STARTER, "norm_topk_prob": True},
    "Qwen2.5-7B-Instruct": {**QWEN2_CHAT, "vocab_size": 152064},
    "Qwen3-8B-Base": QWEN2,
    "Llama-3.2-3B-Instruct": {**llama(32.0, CHAT_EOS), **TIED},
    "Llama-3.3-70B-Instruct": llama(8.0, CHAT_EOS),
}
"""What the published config.json has otherwise than its class by default, besides sizes."""


@pytest.mark.parametrize("name", [*KNOWN_MODELS, *(name for name in DEVIATIONS if name not in KNOWN_MODELS)])
def test_a_known_model_deviates_from_its_class_as_published(name: str) -> None:
    config = planned_model_config(f"makers/{name}")
    default = type(config)().to_dict()
    found = {key: value for key, value in config.to_dict().items() if default.get(key) != value and key not in SIZES}
    assert found == DEVIATIONS[name]


@pytest.mark.parametrize(
    ("family", "given", "heads", "width"),
    [
        ("gpt2", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_inner": 96}, 4, 96),
        ("bloom", {"hidden_size": 64, "n_layer": 2, "n_head": 4}, 4, 256),
        ("mpt", {"d_model": 64, "n_layers": 2, "n_heads": 4}, 4, 256),
        ("gpt_neo", {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "attention_types": [[["global"], 2]]}, 4, 256),
        ("opt", {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 128}, 4, 128),
        ("falcon", {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}, 1, 256),
    ],
)
def test_sizes_with_other_names_are_planned_and_made_small(family, given, heads, width):
    config = AutoConfig.for_model(family, vocab_size=384, **given)
    shape = Model(config).flops_shape
    assert (shape.hidden_size, shape.num_layers, shape.num_heads, shape.num_kv_heads) == (64, 2, 4, heads)
    assert shape.mlp_size == width
    one = ParallelSizes()
    small = small_model_config(config, one, real_sizes=one, vocab_size=320)
    assert (small.num_hidden_layers, small.hidden_size, small.vocab_size) == (2, 64, 320)


@pytest.mark.parametrize("family", ["mamba", "rwkv"])
def test_what_is_no_plain_decoder_is_refused_by_its_type(family: str) -> None:
    with pytest.raises(ModelFolderError, match=f"{family}.*no plain decoder.*num_attention_heads"):
        Model(AutoConfig.for_model(family))


def test_a_given_config_decides(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "qwen3", "hidden_size": 77}))
    assert planned_model_config("Qwen3-8B", given=path).hidden_size == 77
    assert planned_model_config("Qwen3-8B", given=tmp_path).hidden_size == 77


def test_what_is_not_known_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFolderError, match="neither a folder here nor a model whose shape is known"):
        planned_model_config("models/Nobody-1B")
    with pytest.raises(ModelFolderError, match="expected a config.json"):
        planned_model_config("Qwen3-8B", given=tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelFolderError, match="cannot be read"):
        planned_model_config("Qwen3-8B", given=tmp_path)
