"""Model folders that are missing, incomplete or unreadable."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from nemo_rl.algorithms.losses.policy_loss import PolicyLoss
from nemo_rl.config.loss import LossConfig
from nemo_rl.errors import ModelFolderError
from nemo_rl.models.hf.loading import load_causal_lm, load_model_config, named_weights
from tests.helpers.megatron_models import hf_model, tokens
from tests.helpers.model_families import write_with_tokenizer
from tests.helpers.tiny_model import VOCAB, tiny_batch, tiny_model, tiny_policy, tiny_worker


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_model().save_pretrained(str(tmp_path))
    return tmp_path


def test_a_saved_model_loads_with_the_same_weights(folder: Path) -> None:
    expected = dict(named_weights(tiny_model()))
    loaded = dict(named_weights(load_causal_lm(folder)))
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], weight) for name, weight in expected.items())


@pytest.mark.parametrize(("size", "dtype"), [(22, torch.float32), (20, torch.bfloat16), (24, torch.bfloat16)])
def test_experts_of_any_size_run_in_worker_and_engine(size: int, dtype: torch.dtype, tmp_path: Path) -> None:
    model = hf_model("qwen3_moe", moe_intermediate_size=size, num_hidden_layers=1, mlp_only_layers=[], vocab_size=VOCAB)
    write_with_tokenizer(tmp_path, model)
    precision = str(dtype).removeprefix("torch.")
    engine = load_causal_lm(tmp_path, dtype=dtype)
    assert (engine.config._experts_implementation == "grouped_mm") == (size == 24)
    assert engine(input_ids=tokens(), use_cache=False).logits.isfinite().all()
    worker = tiny_worker(tiny_policy(tmp_path, precision=precision))
    try:
        assert worker.train(tiny_batch(8), PolicyLoss(config=LossConfig()), gbs=8, mbs=4).grad_norm[0] > 0
    finally:
        worker.shutdown()


def test_tied_weights_are_named_once(folder: Path) -> None:
    names = [name for name, _ in named_weights(load_causal_lm(folder))]
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names


def test_a_missing_folder_names_the_setting(tmp_path: Path) -> None:
    with pytest.raises(ModelFolderError, match=r"no such folder; set policy\.model_name"):
        load_causal_lm(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("gone", "message"), [("config.json", "config.json, which is missing"), ("model.safetensors", "expected weights")]
)
def test_an_incomplete_folder_names_what_is_missing(folder: Path, gone: str, message: str) -> None:
    (folder / gone).unlink()
    with pytest.raises(ModelFolderError, match=message):
        load_causal_lm(folder)


def test_a_missing_weight_is_named_instead_of_made_up(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelFolderError, match=r"model\.norm\.weight"):
        load_causal_lm(folder)


def test_a_truncated_weight_file_is_a_folder_error(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:100])
    with pytest.raises(ModelFolderError, match="cannot be loaded"):
        load_causal_lm(folder)


@pytest.mark.parametrize("text", ["not json", json.dumps({"model_type": "no_such_model"})])
def test_an_unreadable_config_is_a_folder_error(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(ModelFolderError, match=r"config\.json cannot be read"):
        load_model_config(folder)


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("starter_sort", "`make demo`"),
        ("starter_sort_moe", "`make learn-sort-moe`, or by `python examples/make_starter.py --out {path} --experts 8`"),
        (
            "starter_chain_sum",
            "`make learn-chain-sum`, or by `python examples/make_starter.py --out {path} --task chain_sum`",
        ),
        ("starter_guess", "`make learn-guess`, or by `python examples/make_starter.py --out {path} --task guess`"),
    ],
)
def test_a_starter_that_is_missing_names_what_makes_it(tmp_path: Path, name: str, command: str) -> None:
    with pytest.raises(ModelFolderError) as caught:
        load_model_config(tmp_path / name)
    assert command.format(path=tmp_path / name) in str(caught.value)
