"""`examples/make_trait_vector.py`: the vector of two sets of texts, against a slow way of finding it."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from nemo_rl.data.tokenizer import load_tokenizer
from nemo_rl.models.hf.loading import load_causal_lm
from nemo_rl.models.policy.trace_parts import Vectors
from tests.helpers.tiny_model import write_tiny_folder

SCRIPT = Path(__file__).parents[3] / "examples" / "make_trait_vector.py"
WITH, WITHOUT = ["1 2 3", "3 2 1 4 5", "9 9"], ["sort", "user 7"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trait")
    write_tiny_folder(folder / "model")
    (folder / "with.txt").write_text("\n".join(WITH) + "\n\n")
    (folder / "without.txt").write_text("\n".join(WITHOUT))
    return folder


def make(monkeypatch, folder: Path, out: str, *more: str, **files: str) -> int:
    """Exit code."""
    paths = {"with": "with.txt", "without": "without.txt", "model": "model"} | files
    options = [word for name, path in paths.items() for word in (f"--{name}", str(folder / path))]
    monkeypatch.setattr("sys.argv", [str(SCRIPT), *options, "--out", str(folder / out), *more])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    return int(ended.value.code or 0)


def slow_mean(folder: Path, texts: list[str], *, last: bool) -> torch.Tensor:
    """One text after the other, without padding; all but the last layer from what the model gives out."""
    model, tokenizer = load_causal_lm(folder / "model"), load_tokenizer(folder / "model")
    rows = []
    for text in texts:
        kept = []
        hook = model.model.norm.register_forward_pre_hook(lambda _, given, kept=kept: kept.append(given[0]))
        with torch.no_grad():
            states = model(input_ids=torch.tensor([tokenizer(text)["input_ids"]]), output_hidden_states=True)
        hook.remove()
        layers = torch.stack([*states.hidden_states[1:-1], kept[0]]).double()[:, 0]
        rows.append(layers[:, -1] if last else layers.mean(1))
    return torch.stack(rows).mean(0)


@pytest.mark.parametrize("tokens", ["last", "all"])
def test_vector_is_the_normalised_difference_of_means(tokens, folder, monkeypatch) -> None:
    assert make(monkeypatch, folder, f"vectors/{tokens}.safetensors", "--tokens", tokens, "--batch", "2") == 0
    path = folder / "vectors" / f"{tokens}.safetensors"
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
        vector = file.get_tensor("vector")
    difference = slow_mean(folder, WITH, last=tokens == "last") - slow_mean(folder, WITHOUT, last=tokens == "last")
    expected = difference / difference.norm(dim=-1, keepdim=True)
    assert vector.shape == (2, 32) and vector.dtype == torch.float32
    # float32 passes of other shapes: sums in another order.
    torch.testing.assert_close(vector.double(), expected, atol=2e-5, rtol=0)
    assert (metadata["num_with"], metadata["num_without"], metadata["tokens"]) == ("3", "2", tokens)
    assert metadata["model"] == str(folder / "model")


def test_ranks_can_load_it(folder, monkeypatch) -> None:
    assert make(monkeypatch, folder, "vectors/trait_1.safetensors") == 0
    row = Vectors(folder / "vectors").of_layer("trait_1", 1, size=32)
    assert row.norm().item() == pytest.approx(1.0, abs=1e-5)


def test_what_the_user_can_mend_ends_with_exit_code_2(folder, monkeypatch, caplog) -> None:
    (folder / "empty.txt").write_text("\n\n")
    (folder / "binary.txt").write_bytes(b"\xff\xfe\x00")
    (folder / "long.txt").write_text("1 " * 400)
    for said, out, files in (
        ("expected a name of letters", "v.pt", {}),
        ("expected a name of letters", "a b.safetensors", {}),
        ("at least one line of text", "v.safetensors", {"with": "empty.txt"}),
        ("one text per line", "v.safetensors", {"with": "binary.txt"}),
        ("one text per line", "v.safetensors", {"without": "nowhere.txt"}),
        ("no such folder", "v.safetensors", {"model": "nowhere"}),
        ("expected 1 to 128 tokens", "v.safetensors", {"with": "long.txt"}),
        ("are the texts the same", "v.safetensors", {"without": "with.txt"}),
    ):
        caplog.clear()
        assert make(monkeypatch, folder, out, **files) == 2
        assert said in caplog.text and "Traceback" not in caplog.text
        assert not (folder / out).exists()
