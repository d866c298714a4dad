"""Shapes of known models are those of the published weights, and a folder or a file decides over them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from nemo_rl.cluster.known_models import KNOWN_MODELS, planned_model_config
from nemo_rl.errors import ModelFolderError

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
    # Of the folders that `make demo` and `make learn-sort-moe` write.
    "starter_sort": 434_944,
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
