"""What a model cannot run in is said before anything is started, from its config alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    CodeGenConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    PhimoeConfig,
    PretrainedConfig,
)

from nemo_rl.config.backends import DTensorConfig, MegatronConfig
from nemo_rl.config.policy import PolicyConfig, RouterReplayConfig, SequencePackingConfig
from nemo_rl.errors import ConfigError, ModelFolderError
from nemo_rl.models.dtensor.tensor_parallel import plan_of
from nemo_rl.models.policy.fit import check_policy_fits
from tests.helpers.model_families import FAMILY_SIZES, LONG_ROPE, config_of
from tests.helpers.tiny_model import tiny_policy


def folder_of(config: PretrainedConfig, folder: Path) -> Path:
    """A folder whose weights are never read."""
    config.save_pretrained(str(folder))
    (folder / "model.safetensors").touch()
    return folder


def policy(folder: Path, *, packed: bool = False, **sizes: object) -> PolicyConfig:
    return tiny_policy(
        folder, dtensor_cfg=DTensorConfig(**sizes), sequence_packing=SequencePackingConfig(enabled=packed)
    )


SMALL = {**FAMILY_SIZES, "hidden_size": 64, "head_dim": 16}
CAPPED = Gemma2Config(**SMALL)
OWN_ATTENTION = CodeGenConfig(vocab_size=320, n_embd=32, n_layer=2, n_head=4)
GROWING = LlamaConfig(**FAMILY_SIZES, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})
SCALED = LONG_ROPE | {"short_mscale": 1.0, "long_mscale": 1.1}
PHIMOE = PhimoeConfig(**FAMILY_SIZES, num_local_experts=2, rope_parameters=SCALED)
LAYERS = {"full_attention": LONG_ROPE, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
BY_LAYER = Gemma3TextConfig(**FAMILY_SIZES, head_dim=8, rope_parameters=LAYERS)
SINKS = GptOssConfig(**SMALL, num_local_experts=2, num_experts_per_tok=1)
REFUSED = {
    "heads": (config_of("llama"), {"tensor_parallel_size": 3}, "num_attention_heads=4 of 'llama' does not divide by 3"),
    "key heads": (config_of("qwen2"), {"tensor_parallel_size": 4}, "num_key_value_heads=2 of 'qwen2'"),
    "vocabulary": (
        MistralConfig(**{**FAMILY_SIZES, "vocab_size": 321}, head_dim=8, sliding_window=None),
        {"tensor_parallel_size": 2},
        "321 outputs of lm_head do not divide by 2 ranks; use a divisor of 321",
    ),
    "plan": (
        config_of("qwen3"),
        {"tensor_parallel_size": 2, "custom_parallel_plan": {"model.layers.*.mpl": "block"}},
        "'model.layers.*.mpl' matches no module of Qwen3ForCausalLM",
    ),
    "style": (
        config_of("qwen3"),
        {"tensor_parallel_size": 2, "custom_parallel_plan": {"lm_head": "diagonal"}},
        "'lm_head': unknown style 'diagonal'; known are",
    ),
    "sequences": (
        config_of("mistral"),
        {"tensor_parallel_size": 2, "sequence_parallel": True},
        "policy.dtensor_cfg.sequence_parallel: 'mistral' has no plan for it (known: llama, qwen2",
    ),
    "its own attention and packing": (
        OWN_ATTENTION,
        {"packed": True},
        "policy.sequence_packing.enabled: 'codegen' brings its own attention",
    ),
    "its own attention and context": (
        OWN_ATTENTION,
        {"context_parallel_size": 2},
        "policy.dtensor_cfg.context_parallel_size: 'codegen' brings its own attention",
    ),
    "positions that grow": (GROWING, {}, "has positions of rope_type 'dynamic', whose frequencies grow with the"),
    "positions of its own": (PHIMOE, {}, "rope_type 'longrope' with its own rule for the longest row"),
    "positions of layers": (BY_LAYER, {}, "rope_type 'longrope' with its own rule for the longest row"),
    "positions of rollouts": (config_of("longrope"), {}, "in rows of more than 16 tokens"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_run_is_refused_with_its_reason(name: str, tmp_path: Path) -> None:
    config, sizes, text = REFUSED[name]
    with pytest.raises(ConfigError) as caught:
        check_policy_fits(policy(folder_of(config, tmp_path), **sizes))
    assert text in str(caught.value)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3_moe"])
def test_families_fit_every_axis(family: str, tmp_path: Path) -> None:
    folder = folder_of(config_of(family), tmp_path)
    check_policy_fits(
        policy(folder, packed=True, tensor_parallel_size=2, context_parallel_size=2, sequence_parallel=True)
    )


def test_a_model_brings_its_own_plan(tmp_path: Path) -> None:
    gemma = GemmaConfig(**{**FAMILY_SIZES, "hidden_size": 64}, head_dim=16)
    check_policy_fits(policy(folder_of(gemma, tmp_path), tensor_parallel_size=2))


def test_a_window_serves_packing_and_context(tmp_path: Path) -> None:
    config = config_of("mistral")
    assert config.sliding_window is not None
    check_policy_fits(policy(folder_of(config, tmp_path), packed=True, context_parallel_size=2))


@pytest.mark.parametrize("config", [CAPPED, SINKS], ids=["capped scores", "sinks"])
def test_scores_that_no_kernel_has_serve_packing_and_context(config: PretrainedConfig, tmp_path: Path) -> None:
    check_policy_fits(policy(folder_of(config, tmp_path), packed=True, context_parallel_size=2))


def test_another_kind_of_model_is_refused(tmp_path: Path) -> None:
    bert = BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    with torch.no_grad(), pytest.raises((ModelFolderError, ConfigError)) as caught:
        check_policy_fits(policy(folder_of(bert, tmp_path), tensor_parallel_size=2))
    assert "bert" in str(caught.value)


def replayed(folder: Path, *, by_megatron: bool = False) -> PolicyConfig:
    return tiny_policy(
        folder,
        dtensor_cfg=DTensorConfig(enabled=not by_megatron),
        megatron_cfg=MegatronConfig(enabled=by_megatron),
        router_replay=RouterReplayConfig(enabled=True),
    )


@pytest.mark.parametrize("by_megatron", [False, True])
def test_routes_are_replayed_in_a_mixture_of_experts_only(by_megatron: bool, tmp_path: Path) -> None:
    check_policy_fits(replayed(folder_of(config_of("qwen3_moe"), tmp_path / "moe"), by_megatron=by_megatron))
    with pytest.raises(ConfigError, match=r"policy.router_replay.enabled: 'qwen3' has no routed experts"):
        check_policy_fits(replayed(folder_of(config_of("qwen3"), tmp_path / "dense"), by_megatron=by_megatron))


def test_routers_that_are_not_known_are_refused(tmp_path: Path) -> None:
    folder = folder_of(SINKS, tmp_path)
    check_policy_fits(policy(folder))
    with pytest.raises(ConfigError, match=r"policy.router_replay.enabled: the routers of 'gpt_oss' are not known"):
        check_policy_fits(replayed(folder))


def test_more_experts_than_ids_can_name_are_refused(tmp_path: Path) -> None:
    config = config_of("qwen3_moe")
    config.num_experts = 32767
    check_policy_fits(replayed(folder_of(config, tmp_path / "most")))
    config.num_experts = 32768
    with pytest.raises(ConfigError, match="has 32768 experts, expected at most 32767"):
        check_policy_fits(replayed(folder_of(config, tmp_path / "more")))


@pytest.fixture
def plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of the user's."""
    (tmp_path / "my_plans.py").write_text(
        "PLAN = {'model.layers.*.mlp.gate_proj': 'colwise', 'model.layers.*.mlp.up_proj': 'colwise',"
        " 'model.layers.*.mlp.down_proj': 'rowwise'}\n"
        "ODD = {'lm_head': 'diagonal'}\nLISTED = ['lm_head']\nOBJECTS = {'lm_head': object()}\n"
    )
    (tmp_path / "broken_plans.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.parametrize("name", ["my_plans:PLAN", "my_plans.PLAN"])
def test_a_parallel_plan_may_be_imported(name: str, plans: None, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(config_of("qwen3"))
    found = plan_of(model, custom=name, tp=2, sequence_parallel=False)
    assert found["model.layers.*.mlp.down_proj"] == "rowwise" and len(found) == 3
    folder = folder_of(config_of("qwen3"), tmp_path / "model")
    check_policy_fits(policy(folder, tensor_parallel_size=2, custom_parallel_plan=name))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("my_plans:NONE", "module 'my_plans' has no 'NONE'"),
        ("no_plans.PLAN", "'no_plans.PLAN' cannot be imported: ModuleNotFoundError"),
        ("broken_plans:PLAN", "cannot be imported: ZeroDivisionError"),
        ("my_plans:LISTED", "expected a dictionary, pattern of module names -> name of a style such as 'colwise', got"),
        ("my_plans:OBJECTS", "name the style instead of its object"),
        ("my_plans:ODD", "'lm_head': unknown style 'diagonal'; known are"),
    ],
)
def test_an_imported_plan_that_is_none_is_refused_with_its_reason(name, said, plans, tmp_path):
    folder = folder_of(config_of("qwen3"), tmp_path / "model")
    with pytest.raises(ConfigError) as caught:
        check_policy_fits(policy(folder, tensor_parallel_size=2, custom_parallel_plan=name))
    assert said in str(caught.value)


@pytest.mark.parametrize("name", ["PLAN", "my plans:PLAN", "../plans.py:PLAN", "a:b:c", ""])
def test_what_is_no_import_path_is_no_plan(name: str) -> None:
    with pytest.raises(ValidationError):
        DTensorConfig(tensor_parallel_size=2, custom_parallel_plan=name)
