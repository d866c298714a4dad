"""Weights of Hugging Face folders, read one at a time and written in shards, against transformers' own."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GenerationConfig

from nemo_rl.errors import ModelFolderError
from nemo_rl.models.hf.files import CODES
from nemo_rl.models.hf.folder import WeightSource, open_weights
from nemo_rl.models.hf.loading import named_weights
from nemo_rl.models.hf.writing import ModelDescription, cast_folder, write_folder
from nemo_rl.models.policy.interfaces import TensorInfo
from tests.helpers.megatron_models import FAMILIES, hf_model, tokens

SMALL = {"num_hidden_layers": 2, "vocab_size": 64}
WITH_EXPERTS = ("mixtral", "qwen3_moe", "glm4_moe")
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def small_model(family: str) -> torch.nn.Module:
    return hf_model(family, **SMALL)


def described(model: torch.nn.Module, generation: GenerationConfig | None = None) -> ModelDescription:
    infos = {name: info(weight) for name, weight in named_weights(model)}
    return ModelDescription(config=model.config, infos=infos, generation_config=generation)


def info(weight: torch.Tensor) -> TensorInfo:
    return TensorInfo(shape=tuple(weight.shape), dtype=str(weight.dtype).removeprefix("torch."))


def read_all(source: WeightSource) -> dict[str, torch.Tensor]:
    weights = {name: source.get(name) for name in source.names()}
    assert {name: tuple(weight.shape) for name, weight in weights.items()} == {
        name: source.shape(name) for name in source.names()
    }
    return weights


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name, weight in found.items() if not torch.equal(weight, expected[name])] == []


def change_file(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    weights = load_file(folder / SINGLE)
    change(weights)
    save_file(weights, folder / SINGLE, metadata={"format": "pt"})


@pytest.mark.parametrize("shards", [None, "20KB"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_of_transformers_is_read_under_the_names_of_the_module(tmp_path, family, shards):
    model = small_model(family)
    model.save_pretrained(str(tmp_path), **({"max_shard_size": shards} if shards else {}))
    assert (tmp_path / INDEX).is_file() is (shards is not None)
    assert_same(read_all(open_weights(tmp_path, model.config)), dict(named_weights(model)))


@pytest.mark.parametrize("family", WITH_EXPERTS)
def test_experts_may_be_stored_together(tmp_path: Path, family: str) -> None:
    model = small_model(family)
    model.save_pretrained(str(tmp_path))
    save_file(dict(named_weights(model)), tmp_path / SINGLE, metadata={"format": "pt"})
    assert_same(read_all(open_weights(tmp_path, model.config)), dict(named_weights(model)))


def test_the_order_of_the_index_does_not_matter(tmp_path: Path) -> None:
    model = hf_model("mixtral", **SMALL, num_local_experts=12)
    model.save_pretrained(str(tmp_path), max_shard_size="20KB")
    index = json.loads((tmp_path / INDEX).read_text())
    index["weight_map"] = dict(reversed(index["weight_map"].items()))
    (tmp_path / INDEX).write_text(json.dumps(index))
    assert_same(read_all(open_weights(tmp_path, model.config)), dict(named_weights(model)))


def test_a_single_file_goes_before_an_index(tmp_path: Path) -> None:
    hf_model("llama", seed=1, **SMALL).save_pretrained(str(tmp_path), max_shard_size="20KB")
    model = small_model("llama")
    save_file(dict(named_weights(model)), tmp_path / SINGLE, metadata={"format": "pt"})
    assert_same(read_all(open_weights(tmp_path, model.config)), dict(named_weights(model)))
    assert_same(dict(named_weights(AutoModelForCausalLM.from_pretrained(tmp_path))), dict(named_weights(model)))


def test_rows_are_read_without_the_others(tmp_path: Path) -> None:
    model = small_model("qwen3_moe")
    model.save_pretrained(str(tmp_path))
    source = open_weights(tmp_path, model.config)
    for name in ("model.layers.0.mlp.experts.down_proj", "model.embed_tokens.weight"):
        assert torch.equal(source.get(name, rows=slice(2, 4)), model.state_dict()[name][2:4])


def test_pickles_are_refused_with_the_command_that_converts_them(tmp_path: Path) -> None:
    model = small_model("mixtral")
    model.save_pretrained(str(tmp_path))
    torch.save(load_file(tmp_path / SINGLE), tmp_path / "pytorch_model.bin")
    (tmp_path / SINGLE).unlink()
    with pytest.raises(ModelFolderError, match=r"got pickles .*from transformers import") as caught:
        open_weights(tmp_path, model.config)
    # The command does what it says.
    code = str(caught.value).partition('python -c "')[2].removesuffix('"')
    exec(compile(code, "the command", "exec"), {})
    assert_same(read_all(open_weights(tmp_path, model.config)), dict(named_weights(model)))


def test_layers_that_only_predict_ahead_and_old_buffers_are_left_out(tmp_path: Path) -> None:
    model = small_model("glm4_moe")
    model.save_pretrained(str(tmp_path))
    extras = ("model.layers.2.eh_proj.weight", "model.layers.0.self_attn.rotary_emb.inv_freq")
    change_file(tmp_path, lambda weights: weights.update({name: torch.zeros(2) for name in extras}))
    assert open_weights(tmp_path, model.config).names() == dict(named_weights(model)).keys()


def test_a_tied_head_is_left_out_unless_it_differs(tmp_path: Path) -> None:
    model = small_model("qwen3")
    model.save_pretrained(str(tmp_path))
    change_file(
        tmp_path, lambda weights: weights.update({"lm_head.weight": weights["model.embed_tokens.weight"].clone()})
    )
    assert "lm_head.weight" not in open_weights(tmp_path, model.config).names()
    change_file(tmp_path, lambda weights: weights["lm_head.weight"].add_(1))
    with pytest.raises(ModelFolderError, match=r"lm_head\.weight differs .* set tie_word_embeddings to false"):
        open_weights(tmp_path, model.config)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_written_folder_is_what_transformers_writes(tmp_path: Path, family: str) -> None:
    model = small_model(family)
    model.save_pretrained(str(tmp_path / "theirs"))
    write_folder(tmp_path / "ours", described(model, model.generation_config), named_weights(model))
    assert sorted(path.name for path in (tmp_path / "ours").iterdir()) == sorted(
        path.name for path in (tmp_path / "theirs").iterdir()
    )
    assert (tmp_path / "ours" / SINGLE).read_bytes() == (tmp_path / "theirs" / SINGLE).read_bytes()
    for file in ("config.json", "generation_config.json"):
        ours, theirs = (json.loads((tmp_path / side / file).read_text()) for side in ("ours", "theirs"))
        assert ours == theirs


@pytest.mark.parametrize("family", ["qwen3", *WITH_EXPERTS])
def test_shards_load_without_a_missing_or_unexpected_weight(tmp_path: Path, family: str) -> None:
    model = small_model(family)
    write_folder(tmp_path, described(model), named_weights(model), max_shard_bytes=20_000)
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert all((tmp_path / file).stat().st_size < 20_000 + 6_000 for file in files[1:])
    loaded, report = AutoModelForCausalLM.from_pretrained(str(tmp_path), output_loading_info=True)
    assert not any(report.values())
    tokens_NS = tokens(2, 8, vocab_size=64)
    with torch.no_grad():
        assert torch.equal(loaded(tokens_NS).logits, model(tokens_NS).logits)


def test_a_written_folder_says_its_precision(tmp_path: Path) -> None:
    model = hf_model("glm4_moe", dtype=torch.bfloat16, **SMALL)
    model.config.dtype = torch.float32
    write_folder(tmp_path, described(model, GenerationConfig(eos_token_id=7)), named_weights(model))
    loaded = AutoModelForCausalLM.from_pretrained(str(tmp_path), dtype="auto")
    assert_same(dict(named_weights(loaded)), dict(named_weights(model)))
    assert loaded.get_parameter("model.norm.weight").dtype is torch.bfloat16
    assert loaded.generation_config.eos_token_id == 7
    assert model.config.dtype is torch.float32


def test_a_weight_is_written_before_the_next_is_asked_for(tmp_path: Path) -> None:
    alive = []

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        for number in reversed(range(40)):
            weight = torch.full((1000,), float(number))
            alive.append(weakref.ref(weight))
            yield f"w{number}", weight
            weight.zero_()
            del weight
            # What was just given may still have a name, and nothing before it.
            assert sum(given() is not None for given in alive) <= 1

    infos = {f"w{number}": info(torch.zeros(1000)) for number in range(40)}
    model = ModelDescription(config=small_model("llama").config, infos=infos)
    write_folder(tmp_path, model, weights(), max_shard_bytes=16_000)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert [load_file(file)[f"w{4 * number}"][0] for number, file in enumerate(files)] == list(range(0, 40, 4))


def test_the_weights_are_taken_to_their_end_also_when_writing_fails(tmp_path: Path) -> None:
    taken = []

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(4):
            taken.append(number)
            yield f"w{number}", torch.zeros(8)

    (tmp_path / "file").write_text("in the way")
    infos = {f"w{number}": info(torch.zeros(8)) for number in range(4)}
    with pytest.raises(OSError, match="file"):
        write_folder(tmp_path / "file", ModelDescription(config=small_model("llama").config, infos=infos), weights())
    assert taken == [0, 1, 2, 3]


def test_the_bytes_of_a_file_are_those_of_safetensors(tmp_path: Path) -> None:
    """Whatever the dtypes: they decide the order in which tensors lie in a file."""
    draw = torch.Generator().manual_seed(0)
    weights = {
        f"{letter}.{dtype}": torch.randint(0, 2, shape, generator=draw).to(dtype)
        for letter, shape in (("b", (3, 5)), ("a", ()), ("z.\u00e9", (0, 4)))
        for dtype in CODES
    }
    save_file(weights, tmp_path / "theirs", metadata={"format": "pt"})
    infos = {name: info(weight) for name, weight in weights.items()}
    write_folder(tmp_path, ModelDescription(config=small_model("llama").config, infos=infos), iter(weights.items()))
    assert (tmp_path / SINGLE).read_bytes() == (tmp_path / "theirs").read_bytes()


def truncate(folder: Path) -> None:
    file = max(folder.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-100])


def lose_a_shard(folder: Path) -> None:
    max(folder.glob("*.safetensors")).unlink()


def break_the_index(folder: Path) -> None:
    (folder / INDEX).write_text("{")


def lose_an_indexed_weight(folder: Path) -> None:
    file = max(folder.glob("*.safetensors"))
    weights = load_file(file)
    save_file(dict(list(weights.items())[1:]), file, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, r"model-(\d+)-of-\1\.safetensors cannot be read"),
        (lose_a_shard, r"model-(\d+)-of-\1\.safetensors cannot be read"),
        (break_the_index, r"model\.safetensors\.index\.json cannot be read"),
        (lose_an_indexed_weight, r"model-(\d+)-of-\1\.safetensors lacks .*which model\.safetensors\.index\.json lists"),
    ],
)
def test_a_damaged_folder_names_the_file(tmp_path: Path, damage: Callable[[Path], None], message: str) -> None:
    model = small_model("llama")
    model.save_pretrained(str(tmp_path), max_shard_size="20KB")
    damage(tmp_path)
    with pytest.raises(ModelFolderError, match=message):
        open_weights(tmp_path, model.config)


@pytest.mark.parametrize(
    ("family", "gone", "message"),
    [
        ("mixtral", "model.layers.1.block_sparse_moe.experts.2.w3.weight", r"expert 2 of .*gate_up_proj' lacks w3"),
        ("qwen3_moe", "model.layers.0.mlp.experts.0.down_proj.weight", r"expert 0 of .*down_proj' lacks down_proj"),
    ],
)
def test_an_incomplete_expert_is_named(tmp_path: Path, family: str, gone: str, message: str) -> None:
    model = small_model(family)
    model.save_pretrained(str(tmp_path))
    change_file(tmp_path, lambda weights: weights.pop(gone))
    with pytest.raises(ModelFolderError, match=message):
        open_weights(tmp_path, model.config)


def test_experts_of_different_shapes_are_named(tmp_path: Path) -> None:
    model = small_model("qwen3_moe")
    model.save_pretrained(str(tmp_path))
    name = "model.layers.0.mlp.experts.1.down_proj.weight"
    change_file(tmp_path, lambda weights: weights.update({name: torch.zeros(3, 3)}))
    with pytest.raises(ModelFolderError, match=r"experts of 'model\.layers\.0\.mlp\.experts\.down_proj' differ"):
        open_weights(tmp_path, model.config).get("model.layers.0.mlp.experts.down_proj")


@pytest.mark.parametrize(
    ("family", "dtype", "shards"),
    [("qwen3", torch.bfloat16, "20KB"), ("glm4_moe", torch.bfloat16, None), ("glm4_moe", torch.float16, None)],
)
def test_a_cast_folder_is_what_transformers_writes_in_that_dtype(tmp_path, family, dtype, shards):
    small_model(family).save_pretrained(str(tmp_path / "cast"), **({"max_shard_size": shards} if shards else {}))
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "cast", dtype=dtype)
    expected.save_pretrained(str(tmp_path / "expected"), **({"max_shard_size": "20KB"} if shards else {}))
    cast_folder(tmp_path / "cast", dtype)
    read = {}
    for name in ("cast", "expected"):
        read[name] = {}
        for file in (tmp_path / name).glob("*.safetensors"):
            read[name] |= load_file(file)
    assert_same(read["cast"], read["expected"])
    assert {name: each.dtype for name, each in read["cast"].items()} == {
        name: each.dtype for name, each in read["expected"].items()
    }
    assert json.loads((tmp_path / "cast" / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")
    if shards:
        total = json.loads((tmp_path / "cast" / INDEX).read_text())["metadata"]["total_size"]
        assert total == sum(weight.nbytes for weight in read["cast"].values())


def test_a_weight_that_the_dtype_cannot_hold_is_refused_by_name(tmp_path: Path) -> None:
    small_model("qwen3").save_pretrained(str(tmp_path))
    change_file(tmp_path, lambda weights: weights["model.norm.weight"].fill_(1e5))
    with pytest.raises(ModelFolderError, match=r"model.norm.weight: has values too large for torch.float16"):
        cast_folder(tmp_path, torch.float16)
