"""`configs/grpo_base.yaml` is the schema, written out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nemo_rl.config.load import load_config
from nemo_rl.config.schema_walk import iter_fields, section_class
from nemo_rl.config.yaml_text import commented_defaults, masked, to_yaml, write_recipe
from nemo_rl.errors import ConfigError

ROOT = Path(__file__).parents[3]


def test_base_recipe_is_what_the_schema_renders() -> None:
    assert (ROOT / "configs/grpo_base.yaml").read_text(encoding="utf-8") == commented_defaults(), "run `make configs`"


def test_every_key_is_documented() -> None:
    assert [
        path for path, field in iter_fields() if not field.description and not section_class(field.annotation)
    ] == []


def test_base_recipe_equals_the_defaults(tmp_path: Path) -> None:
    needed = [
        "policy.model_name=m",
        "data.train.data_path=p",
        "grpo.val_period=0",
        "grpo.val_at_start=false",
        "grpo.val_at_end=false",
        "checkpointing.keep_top_k=null",
    ]
    (tmp_path / "empty.yaml").write_text("")
    assert load_config(ROOT / "configs/grpo_base.yaml", needed) == load_config(tmp_path / "empty.yaml", needed)


SECRETS = {
    **{"api_key": "sk-abc", "judge.HF_TOKEN": "hf-abc", "model": "tokenizer", "max_tokens": 7},
    "url": "https://me:pw@host:8000/v1?api_key=sk-def&page=2",
}


def test_secrets_are_masked_and_a_masked_value_is_no_recipe(tmp_path: Path) -> None:
    options = ["env.name=my_rewards:Environment", f"env.options={json.dumps(SECRETS)}"]
    config = load_config(ROOT / "configs/grpo_sort_cpu.yaml", options)
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    text = (tmp_path / "config.yaml").read_text()
    assert not any(secret in text for secret in ("sk-abc", "hf-abc", "me:pw", "sk-def"))
    assert "model: tokenizer" in text and "page=2" in text and "input_key: input" in text
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "config.yaml")
    assert [line.partition(": ")[2].partition(": ")[0] for line in caught.value.problems] == [
        "env.options.api_key",
        "env.options.judge.HF_TOKEN",
        "env.options.url",
    ]
    assert all("${oc.env:NAME}" in line for line in caught.value.problems)
    read = load_config(tmp_path / "config.yaml", with_masked=True)
    assert masked(read.model_dump(mode="json")) == masked(config.model_dump(mode="json"))
    load_config(tmp_path / "config.yaml", options)


COMMANDS = {
    "list": [
        "prog",
        "--api-key",
        "SECRET",
        "-v",
        "--token",
        "--hub.token=SECRET",
        "HF_TOKEN=SECRET",
        "--tokenizer",
        "x",
    ],
    "shell": "SOME_API_KEY=SECRET prog --password 'SECRET' --max-tokens 5 --model key=1 \\\n--secret=SECRET",
    "quoted": 'prog --token="SECRET"',
}


@pytest.mark.parametrize("form", COMMANDS)
def test_secrets_in_the_words_of_a_command_are_masked(form: str) -> None:
    found = masked({"env": {"options": {"command": COMMANDS[form], "nested": [{"words": COMMANDS[form]}]}}})
    assert "SECRET" not in str(found) and str(found).count("<masked ") == 2 * str(COMMANDS[form]).count("SECRET")
    for kept in ("prog", "--max-tokens 5", "--tokenizer', 'x'", "--model key=1", "'-v'", "--token', '--hub"):
        assert kept not in str(COMMANDS[form]) or kept in str(found)
    prompt = {"data": {"prompt": "write token=5 and --key x", "text": "--token"}}
    assert masked(prompt) == prompt and masked(found) == found


@pytest.mark.parametrize(("key", "mode"), [("api_key", 0o600), ("page", 0o644)])
def test_a_recipe_with_secrets_is_for_its_owner_alone(key: str, mode: int, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("old")
    write_recipe(path, f"env: {{options: {{{key}: abc}}}}\n")
    assert path.stat().st_mode & 0o777 == mode and "abc" in path.read_text()


def test_masks_of_other_secrets_differ() -> None:
    first, second, again = (masked({"token": text})["token"] for text in ("a", "b", "a"))
    assert first == again != second and masked({"token": first})["token"] == first
