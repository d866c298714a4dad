"""The starter's tokenizer, and loading one from a folder."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest

from nemo_rl.data.tokenizer import END_OF_TURN, build_tokenizer, load_tokenizer, stop_token_ids, tokenizer_identity
from nemo_rl.errors import ModelFolderError

CORPUS = [f"user\nsort {i}\nassistant\n{i}" for i in range(100, 300)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    build_tokenizer(CORPUS).save_pretrained(str(path))
    return path


def test_digits_are_tokens_of_their_own(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    assert len(tokenizer.encode("41735986", add_special_tokens=False)) == 8


def test_any_text_survives_encoding_and_decoding(folder: Path) -> None:
    tokenizer, rng = load_tokenizer(folder), random.Random(0)
    for _ in range(200):
        text = "".join(
            chr(rng.choice([rng.randrange(32, 127), rng.randrange(160, 0xD800), 0x1F600])) for _ in range(12)
        )
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_a_chat_ends_each_turn_and_the_prompt_is_its_prefix(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    user = [{"role": "user", "content": "sort 312"}]
    prompt = tokenizer.apply_chat_template(user, add_generation_prompt=True, tokenize=False)
    full = tokenizer.apply_chat_template([*user, {"role": "assistant", "content": "123"}], tokenize=False)
    assert prompt == "<|im_start|>user\nsort 312<|im_end|>\n<|im_start|>assistant\n"
    assert full.startswith(prompt)
    assert tokenizer.eos_token == END_OF_TURN


def test_a_given_chat_template_replaces_the_own_one(folder: Path) -> None:
    tokenizer = load_tokenizer(folder, chat_template="{{ messages[0]['content'] }}!")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi!"


def test_a_missing_folder_names_the_setting(tmp_path: Path) -> None:
    with pytest.raises(ModelFolderError, match=r"policy\.tokenizer\.name"):
        load_tokenizer(tmp_path / "nowhere")


def test_a_folder_without_tokenizer_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFolderError, match=r"expected one of tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_an_unreadable_tokenizer_is_a_folder_error(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("not json")
    with pytest.raises(ModelFolderError, match="cannot be read"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(("listed", "expected"), [([5, 2], (2, 5)), (5, (2, 5)), ([2], (2,)), (None, (2,))])
def test_stop_tokens_are_the_tokenizers_and_those_of_the_generation_config(folder, tmp_path, listed, expected):
    """`END_OF_TURN` is token 2."""
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": listed}))
    assert stop_token_ids(tmp_path, load_tokenizer(folder)) == expected


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ({"eos_token_id": [2, 9]}, None, (2, 9)),
        ({"eos_token_id": 7}, {"eos_token_id": [5]}, (2, 5, 7)),
        ({"eos_token_id": None, "text_config": {"eos_token_id": [8, 5]}}, {"eos_token_id": 5}, (2, 5, 8)),
        ({"text_config": None}, {}, (2,)),
    ],
)
def test_stop_tokens_are_also_those_of_the_models_config(folder, tmp_path, config, generation, expected):
    (tmp_path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert stop_token_ids(tmp_path, load_tokenizer(folder)) == expected


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_file_that_names_what_is_no_token_is_refused_with_its_name(folder: Path, tmp_path: Path, name: str) -> None:
    for given in ('{"eos_token_id": ["x"]}', "[1]", "{"):
        (tmp_path / name).write_text(given)
        with pytest.raises(ModelFolderError, match=name):
            stop_token_ids(tmp_path, load_tokenizer(folder))


def test_the_identity_of_a_tokenizer_is_of_what_it_does(folder: Path) -> None:
    def identity(template: str | None = None, stop: tuple[int, ...] = (2,)) -> dict[str, str]:
        tokenizer = load_tokenizer(folder, chat_template=template)
        tokenizer(["a", "longer text"], padding=True, truncation=True, max_length=4)
        return tokenizer_identity(tokenizer, stop_ids=stop)

    first, other_template, other_stop = identity(), identity("{{ messages }}"), identity(stop=(2, 5))
    assert identity() == first
    assert other_template["tokenizer"] == first["tokenizer"] and other_template["template"] != first["template"]
    assert other_stop["tokenizer"] != first["tokenizer"] and other_stop["template"] == first["template"]


def test_a_model_without_a_generation_config_stops_at_the_tokenizers_end(folder: Path, tmp_path: Path) -> None:
    assert stop_token_ids(tmp_path, load_tokenizer(folder)) == (2,)


def test_a_tokenizer_without_a_padding_token_pads_with_its_end(folder: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    settings = json.loads((copy / "tokenizer_config.json").read_text())
    del settings["pad_token"]
    (copy / "tokenizer_config.json").write_text(json.dumps(settings))
    assert load_tokenizer(copy).pad_token_id == 2
