"""What a resumed run and a replay compare with the run that came before."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path

import pytest

from nemo_rl.algorithms import run_folder
from nemo_rl.algorithms.run_folder import (
    exported_dtype,
    identity_state,
    model_digest,
    model_dtype,
    run_start,
    same_or_refused,
)
from nemo_rl.errors import CheckpointError
from tests.helpers.tiny_model import write_tiny_folder

BEFORE = {"data.train": "a", "data.validation": "b", "model": "c", "tokenizer": "d", "template": "e", "reward": "f"}
STATE = identity_state(datetime(2025, 1, 2, 3, 4, 5), BEFORE, dtype="bfloat16")


@pytest.mark.parametrize(
    ("changed", "word"),
    [
        ({"data.train": "x"}, "data"),
        ({"data.validation": "x"}, "data"),
        ({"data.validation_sets.more": "x"}, "data"),
        ({"model": "x"}, "model"),
        ({"tokenizer": "x"}, "tokenizer"),
        ({"template": "x"}, "template"),
        ({"reward": "x"}, "reward"),
    ],
)
def test_a_part_that_differs_is_refused_by_name_unless_it_is_allowed(changed: dict[str, str], word: str) -> None:
    (name,) = changed
    with pytest.raises(CheckpointError, match=rf"step_1: .*other {name}:.*allow_changed=\[{word}\]"):
        same_or_refused(STATE, BEFORE | changed, allowed=(), where="step_1")
    same_or_refused(STATE, BEFORE | changed, allowed=(word,), where="step_1")
    others = {"data", "model", "tokenizer", "template", "reward"} - {word}
    with pytest.raises(CheckpointError, match=name):
        same_or_refused(STATE, BEFORE | changed, allowed=tuple(others), where="step_1")


def test_a_set_that_is_gone_differs_and_what_is_not_known_yet_does_not() -> None:
    without = {name: value for name, value in BEFORE.items() if name != "data.validation"}
    with pytest.raises(CheckpointError, match=r"other data\.validation:"):
        same_or_refused(STATE, without, allowed=(), where="step_1")
    same_or_refused(STATE, {"reward": "f"}, allowed=(), where="step_1")
    same_or_refused({}, {"reward": "other"}, allowed=(), where="an older checkpoint")


def test_the_first_start_survives_the_way_through_a_checkpoint() -> None:
    state = json.loads(json.dumps(STATE))
    assert run_start(state, where="step_1") == datetime(2025, 1, 2, 3, 4, 5)
    assert run_start({}, where="step_1") is None
    state["run"]["started"] = "yesterday"
    with pytest.raises(CheckpointError, match="step_1: time of the run's first start"):
        run_start(state, where="step_1")


@pytest.mark.parametrize("limit", [2**30, 2**10])
def test_the_digest_of_a_model_is_of_its_weights_and_config(tmp_path, monkeypatch, limit):
    monkeypatch.setattr(run_folder, "MODEL_BYTES", limit)
    monkeypatch.setattr(run_folder, "BLOCK_BYTES", 256)
    folder = write_tiny_folder(tmp_path / "model")
    first = model_digest(folder)
    assert model_digest(folder.rename(tmp_path / "moved")) == first
    folder = tmp_path / "moved"
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"transformers_version": "0.0", "dtype": "float16"}))
    assert model_digest(folder) == first
    (folder / "config.json").write_text(json.dumps(config | {"rope_theta": 5.0}))
    assert model_digest(folder) != first
    (folder / "config.json").write_text(json.dumps(config))
    weights = bytearray((folder / "model.safetensors").read_bytes())
    weights[-len(weights) // 2 :] = bytes(byte ^ 1 for byte in weights[-len(weights) // 2 :])
    (folder / "model.safetensors").write_bytes(weights)
    assert model_digest(folder) != first


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_the_dtype_of_a_model_is_what_its_config_says(tmp_path: Path, key: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({key: "float16"}))
    assert model_dtype(tmp_path) == "float16"
    (tmp_path / "config.json").write_text("{}")
    assert model_dtype(tmp_path) is None
    assert exported_dtype(STATE) == "bfloat16" and exported_dtype({}) is None
