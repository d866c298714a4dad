"""A small recipe of another framework, and what its import gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nemo_rl.config.load import load_config
from nemo_rl.config.yaml_text import yaml_line
from nemo_rl_tools.recipe_import import Imported, to_recipe
from nemo_rl_tools.recipe_import.keys import Fate

SMALL: dict[str, Any] = {
    "grpo": {"num_prompts_per_step": 8, "num_generations_per_prompt": 4},
    "policy": {
        "model_name": "models/x",
        "train_global_batch_size": 32,
        "max_total_sequence_length": 512,
        "generation": {"backend": "vllm", "max_new_tokens": 512},
    },
    "data": {"max_input_seq_length": 512, "train": {"data_path": "data/x.jsonl", "input_key": "q"}, "validation": None},
    "cluster": {"gpus_per_node": 1, "num_nodes": 1},
    "checkpointing": {"metric_name": "train:reward"},
}


def write(folder: Path, tree: dict[str, Any], name: str = "recipe.yaml") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(yaml_line(tree), encoding="utf-8")
    return path


def merged(changes: dict[str, Any], base: dict[str, Any] | None = None) -> dict[str, Any]:
    result = dict(SMALL if base is None else base)
    for name, value in changes.items():
        below = result.get(name)
        result[name] = merged(value, below) if isinstance(value, dict) and isinstance(below, dict) else value
    return result


def loaded(folder: Path, imported: Imported) -> Any:
    path = folder / "ours.yaml"
    path.write_text(to_recipe(imported), encoding="utf-8")
    return load_config(path)


def fates_of(imported: Imported, key: str) -> set[Fate]:
    return {outcome.fate for outcome in imported.outcomes if outcome.key == key}
