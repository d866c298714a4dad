"""Several sources of training prompts by name: what they share, and what is no name of one."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemo_rl.config.load import load_config
from nemo_rl.config.yaml_text import to_yaml
from nemo_rl.errors import ConfigError

DEMO = "configs/grpo_sort_cpu.yaml"
RECIPE = """\
defaults: configs/grpo_sort_cpu.yaml
data:
  train:
    system_prompt: be brief
    math: {dataset_name: jsonl, data_path: math.jsonl, output_key: solution, weight: 2}
    sort: {dataset_name: sort_digits, size: 50, system_prompt: null, schedule: {100: 3}}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "math.jsonl").write_text("")
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    return tmp_path / "recipe.yaml"


def test_keys_beside_the_names_hold_for_every_source_that_has_none_of_its_own(recipe: Path) -> None:
    sources = load_config(recipe, ["data.train.math.weight=4"]).data.sources
    math, sort = sources["data.train.math"], sources["data.train.sort"]
    assert list(sources) == ["data.train.math", "data.train.sort"]
    assert (math.system_prompt, sort.system_prompt) == ("be brief", None)
    assert (math.output_key, sort.output_key) == ("solution", "output")
    assert (math.size, sort.size) == (None, 50), "what the parent says of its one source is of none of them"
    assert math.data_path == recipe.parent / "math.jsonl", "beside the recipe"
    assert math.weights == {1: 4.0} and sort.weights == {1: 1.0, 100: 3.0}


def test_what_a_run_writes_down_is_the_same_recipe(recipe: Path, tmp_path: Path) -> None:
    config = load_config(recipe)
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert load_config(tmp_path / "config.yaml") == config


def test_one_source_is_the_section_itself() -> None:
    data = load_config(DEMO).data
    assert list(data.sources) == ["data.train"] and data.sources["data.train"] == data.train
    assert list(data.sections)[1:] == [data.held_out_key(name) for name in data.held_out]


WRONG = {
    "a key": ("data.train.promt_template=x", "data.train.promt_template: unknown key; did you mean 'prompt_template'"),
    "a key of a source": (
        "data.train.math.wieght=2",
        "data.train.math.wieght: unknown key 'wieght'; did you mean 'weight'",
    ),
    "a key of all sources": (
        "data.train.math.temperature=0.5",
        "data.train.math.temperature: unknown key 'temperature'; it holds for the rows of all sources: set policy.gen",
    ),
    "a value": ("data.train.math.weight=-1", "data.train.math.weight: expected a number >= 0.0, got -1"),
    "a name": ("data.train={a/b: {size: 3}}", "names of sources made of letters"),
    "a step": ("data.train.math.schedule={0: 1}", "data.train.math.schedule"),
    "no file": ("data.train.math.data_path=null", "data.train.math.data_path: must be set: jsonl reads local files"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_with_a_source_is_named(recipe: Path, name: str) -> None:
    override, said = WRONG[name]
    with pytest.raises(ConfigError) as caught:
        load_config(recipe, [override])
    assert said in str(caught.value)
