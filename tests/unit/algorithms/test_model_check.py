"""The model check: families that run have their own numbers in every way, and what has others is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, PretrainedConfig

from nemo_rl.algorithms.preflight.model_check import Found, check_config, check_model, difference, packs, trials_of
from nemo_rl.config.backends import DTensorConfig
from nemo_rl.config.load import load_config
from nemo_rl.config.policy import PolicyConfig, SequencePackingConfig
from nemo_rl.config.rules.policy import packing_decided
from nemo_rl.errors import ConfigError
from nemo_rl.records.sites import SiteKind
from tests.helpers.model_families import write_family
from tests.repo import model_support

PACKED, TENSOR, CONTEXT, ENGINE, SAVED = "packed", "TP 2", "CP 2", "engine", "saved"
RECIPE = Path(__file__).parents[3] / "configs" / "grpo_sort_cpu.yaml"
MIXTURE = {"num_local_experts": 8, "num_experts_per_tok": 2}
HYBRID = {"layer_types": ["linear_attention", "full_attention"] * 2, "num_hidden_layers": 4}
RIGHT: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    # Embeddings that are scaled where they are looked up, scores that are capped, sinks.
    "gemma": ((TENSOR,), {}),
    "gemma2": ((PACKED, TENSOR), {"num_hidden_layers": 4}),
    "gpt_oss": ((PACKED, CONTEXT), {}),
    # Windows that only the mask knows.
    "qwen2_moe": ((PACKED,), {"use_sliding_window": True, "max_window_layers": 1}),
    "exaone4": ((PACKED, ENGINE), {"sliding_window": 4096}),
    "llama4_text": (("padded",), {"attention_chunk_size": 4096, "num_hidden_layers": 4, "num_experts_per_tok": 1}),
    # Files that name experts, or the block that they are in, otherwise than the module does.
    "phimoe": ((SAVED,), MIXTURE),
    "jamba": ((SAVED, "padded"), {}),
    "lfm2_moe": ((SAVED, ENGINE), {"layer_types": ["conv", "full_attention"] * 16}),
    # Dropout under other names, sizes under other names.
    "gpt2": ((PACKED, ENGINE), {"resid_pdrop": 0.2, "embd_pdrop": 0.2}),
    "bloom": (("padded", ENGINE), {"hidden_dropout": 0.2, "attention_dropout": 0.2}),
    "phi": ((PACKED,), {"resid_pdrop": 0.2}),
    # States beside keys and values in the cache.
    "qwen3_next": ((ENGINE,), HYBRID),
}
WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "zaya": (PACKED, {}, "has layers that carry values along a row outside of attention"),
    "bert-generation": (
        "padded",
        {},
        "has other numbers padded in one worker than in Hugging Face: log-probabilities differ",
    ),
    "bert": ("padded", {}, "has other numbers padded in one worker than in Hugging Face"),
    "electra": (ENGINE, {}, "has other numbers in the embedded engine than in Hugging Face"),
    "deepseek_v32": (PACKED, {}, "has an indexer that chooses the keys of each token"),
    "glm_moe_dsa": (CONTEXT, {}, "has an indexer that chooses the keys of each token"),
    "bamba": (PACKED, {}, "has layers that carry values along a row outside of attention"),
    "recurrent_gemma": (CONTEXT, {}, "has layers that carry values along a row outside of attention"),
    "openai-gpt": (ENGINE, {}, "cannot run in the embedded engine"),
    "deepseek_v4": (SAVED, {}, "cannot run after saving"),
}


def lines_of(model_type: str, ways: tuple[str, ...], given: dict[str, Any]) -> list[str]:
    config: PretrainedConfig = AutoConfig.for_model(model_type, **given)
    trials = model_support.trials()
    return check_config(config, [trials[way] for way in ways])


@pytest.mark.parametrize("model_type", RIGHT)
def test_a_family_has_its_own_numbers_in_every_way_that_it_runs(model_type: str) -> None:
    assert lines_of(model_type, *RIGHT[model_type]) == []


@pytest.mark.parametrize("model_type", WRONG)
def test_what_a_family_cannot_do_is_named(model_type: str) -> None:
    way, given, text = WRONG[model_type]
    [line] = lines_of(model_type, (way,), given)
    assert text in line and f"'{model_type}'" in line


def test_a_difference_is_named_by_the_first_site_that_has_it() -> None:
    logprobs = torch.zeros(126, dtype=torch.float64)
    sites = {(SiteKind.LAYER_OUT, 1): torch.ones(126, 4), (SiteKind.ATTN_OUT, 1): torch.ones(126, 4)}
    expected = Found(logprobs=logprobs, sites=sites)
    apart = {at: value * 2 for at, value in sites.items()}
    assert difference(Found(logprobs=logprobs, sites=apart), expected) is None
    text = difference(Found(logprobs=logprobs + 0.5, sites=apart), expected)
    assert text == "log-probabilities differ by up to 0.5 (first at attn.out of layer 1, relative difference 1)"


def test_a_random_training_pass_and_a_wrong_gradient_are_found() -> None:
    logprobs, grad = torch.zeros(126, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    expected = Found(logprobs=logprobs, loss=1.0, gradients={"a": grad, "b": grad})
    assert "is random in training" in str(difference(Found(logprobs=logprobs, loss=1.1), expected))
    wrong = Found(logprobs=logprobs, loss=1.0, gradients={"a": grad, "b": grad * 1.5})
    assert difference(wrong, expected) == "the gradient of b differs by 0.5 of its norm"


def test_a_plan_that_gives_other_numbers_is_refused() -> None:
    """A plan of the user's own that adds up what is whole already."""
    plan = {"model.layers.*.mlp.down_proj": "rowwise", "model.layers.*.mlp.up_proj": "colwise"}
    config = PolicyConfig(
        model_name="model", dtensor_cfg=DTensorConfig(tensor_parallel_size=2, custom_parallel_plan=plan)
    )
    [trial] = [trial for trial in trials_of(config) if trial.key == "dtensor_cfg.tensor_parallel_size"]
    [line] = check_config(AutoConfig.for_model("llama"), [trial])
    assert line.startswith("policy.dtensor_cfg.tensor_parallel_size: 'llama' cannot run tensor parallel")


def test_rows_are_packed_where_the_recipe_leaves_it_open_and_the_model_keeps_its_numbers(tmp_path, caplog):
    def decided(kind: str, changes: tuple[str, ...] = ()) -> PolicyConfig:
        folder = tmp_path / kind
        AutoConfig.for_model(kind, architectures=[f"{kind.title()}ForCausalLM"]).save_pretrained(folder)
        save_file({"weight": torch.zeros(1)}, folder / "model.safetensors")
        given = ("policy.dynamic_batching.enabled=false", f"policy.model_name={folder}", *changes)
        return packing_decided(load_config(RECIPE, given), fits=packs).policy

    packed = decided("qwen3", ("policy.sequence_packing.train_mb_tokens=40",)).sequence_packing
    assert packed.enabled is True and packed.is_on
    assert (packed.train_mb_tokens, packed.logprob_mb_tokens) == (48, 8192), "a cap holds the longest sequence"
    for mine in ("policy.train_micro_batch_size=2", "policy.dynamic_batching.enabled=true"):
        assert decided("qwen3", (mine,)).sequence_packing.enabled is False
    assert caplog.text == ""
    assert decided("bamba").sequence_packing.enabled is False
    assert "rows are not packed" in caplog.text and "carry values along a row" in caplog.text
    with pytest.raises(ConfigError, match="expected a multiple of 24"):
        decided("bamba", ("policy.train_global_batch_size=4", "cluster.cpu_workers_per_node=6"))


def test_a_check_that_has_passed_is_not_made_again_until_something_changes(tmp_path: Path) -> None:
    folder = write_family(tmp_path / "model", "qwen3")
    config = PolicyConfig(model_name=str(folder), sequence_packing=SequencePackingConfig(enabled=False))
    assert check_model(config, cache=tmp_path / "cache") == []
    [kept] = (tmp_path / "cache").iterdir()
    before = kept.stat().st_mtime_ns
    assert check_model(config, cache=tmp_path / "cache") == [] and kept.stat().st_mtime_ns == before
    packed = config.model_copy(update={"sequence_packing": SequencePackingConfig(enabled=True)})
    assert check_model(packed, cache=tmp_path / "cache") == []
    assert len(list((tmp_path / "cache").iterdir())) == 2
