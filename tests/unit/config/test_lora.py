"""Settings of adapters: the scale, and what is allowed and seldom meant."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemo_rl.config.backends import LoraConfig
from nemo_rl.config.policy import LEAST_RATE, adapter_warnings
from nemo_rl.config.schema import MasterConfig
from tests.helpers.runs import load_recipe, write_recipe

ADAPTERS = {"policy.lora.enabled": "true"}
MEGATRON = {
    "policy.dtensor_cfg.enabled": "false",
    "policy.megatron_cfg.enabled": "true",
    "policy.optimizer": "null",
    "policy.dynamic_batching.enabled": "false",
}


def recipe(tmp_path: Path, changes: dict[str, str]) -> MasterConfig:
    return load_recipe(write_recipe(tmp_path, Path("model")), changes)


def warned(tmp_path: Path, changes: dict[str, str]) -> str:
    """The only warning."""
    [line] = adapter_warnings(recipe(tmp_path, {**ADAPTERS, **changes}).policy)
    return line


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"policy.lora.serve": "merged"},
        {"policy.lora.serve": "merged", "policy.precision": "bfloat16", "policy.generation.precision": "float32"},
        {"policy.optimizer.kwargs.lr": f"{LEAST_RATE:g}"},
        {"policy.precision": "bfloat16"},
    ],
)
def test_a_usual_recipe_with_adapters_has_no_warning(tmp_path: Path, changes: dict[str, str]) -> None:
    assert adapter_warnings(recipe(tmp_path, {**ADAPTERS, **changes}).policy) == []


def test_a_recipe_without_adapters_has_no_warning(tmp_path: Path) -> None:
    assert adapter_warnings(recipe(tmp_path, {"policy.optimizer.kwargs.lr": "1e-7"}).policy) == []


def test_the_rate_of_full_training_is_named_with_its_key(tmp_path: Path) -> None:
    line = warned(tmp_path, {"policy.optimizer.kwargs.lr": "1e-6"})
    assert line.startswith("policy.optimizer.kwargs.lr: 1e-06 is a rate for all weights") and "below 5e-06" in line


def test_the_rate_of_megatron_is_named_with_its_own_key(tmp_path: Path) -> None:
    line = warned(tmp_path, {**MEGATRON, "policy.megatron_cfg.optimizer.lr": "4.9e-6"})
    assert line.startswith("policy.megatron_cfg.optimizer.lr: 4.9e-06 is a rate")
    assert not adapter_warnings(
        recipe(tmp_path, {**ADAPTERS, **MEGATRON, "policy.megatron_cfg.optimizer.lr": "1e-4"}).policy
    )


@pytest.mark.parametrize(
    "changes", [{"policy.precision": "bfloat16"}, {"policy.generation.precision": "bfloat16"}], ids=["policy", "engine"]
)
def test_merged_weights_in_16_bit_are_said_to_lose_a_part(tmp_path: Path, changes: dict[str, str]) -> None:
    line = warned(tmp_path, {"policy.lora.serve": "merged", **changes})
    assert line.startswith("policy.lora.serve: merged weights in bfloat16 lose") and "native loses nothing" in line


def test_dropout_is_said_to_move_the_first_ratios(tmp_path: Path) -> None:
    line = warned(tmp_path, {"policy.lora.dropout": "0.1"})
    assert line.startswith("policy.lora.dropout: 0.1 in training alone")


def test_several_warnings_are_a_line_each(tmp_path: Path) -> None:
    changes = {"policy.optimizer.kwargs.lr": "1e-6", "policy.lora.serve": "merged", "policy.precision": "bfloat16"}
    lines = adapter_warnings(recipe(tmp_path, {**ADAPTERS, **changes, "policy.lora.dropout": "0.1"}).policy)
    assert [line.partition(":")[0] for line in lines] == [
        "policy.optimizer.kwargs.lr",
        "policy.lora.serve",
        "policy.lora.dropout",
    ]


def test_the_scale_divides_alpha_by_the_rank_or_by_its_root() -> None:
    assert LoraConfig(rank=16, alpha=8).scale == 0.5
    assert LoraConfig(rank=16, alpha=8, rslora=True).scale == 2.0


def test_adapters_are_native_where_engines_hold_them() -> None:
    assert LoraConfig(enabled=True).is_native
    assert not LoraConfig().is_native and not LoraConfig(enabled=True, serve="merged").is_native
