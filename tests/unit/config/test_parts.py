"""Parts that a recipe names: words of ours, and `module:name` of anybody's."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from nemo_rl.algorithms.preflight.checks import preflight
from nemo_rl.config import parts
from nemo_rl.config.load import load_config
from nemo_rl.config.parts import LOSSES, PluginKind
from nemo_rl.errors import ConfigError, UserError
from tests.helpers.runs import write_recipe
from tests.helpers.tiny_model import write_tiny_folder

KINDS = {name: kind for name, kind in vars(parts).items() if isinstance(kind, PluginKind)}


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_part.py").write_text("CONSTANT = 3\n1 / 0\n")
    (tmp_path / "whole_part.py").write_text("CONSTANT = 3\n")
    monkeypatch.syspath_prepend(tmp_path)


def problem_of(tmp_path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(write_recipe(tmp_path, Path("model")), overrides)
    return str(caught.value)


@pytest.mark.parametrize("name", sorted(KINDS))
def test_every_builtin_word_is_defined_where_it_says(name: str) -> None:
    for target in KINDS[name].builtin.values():
        module, _, attribute = target.partition(":")
        # Looked up, not imported: some stores read the environment while they are.
        spec = importlib.util.find_spec(module)
        assert spec is not None and spec.origin is not None
        assert re.search(rf"^(class|def) {attribute}\b", Path(spec.origin).read_text(), re.MULTILINE), target


@pytest.mark.parametrize(
    "name", ["clipped", "losses.MyLoss", "my module:Loss", ":Loss", "losses:", "losses:my loss", "a..b:Loss", ""]
)
def test_what_is_neither_a_word_nor_two_names_is_refused(tmp_path: Path, name: str) -> None:
    text = problem_of(tmp_path, f"loss_fn.name={name!r}")
    assert "loss_fn.name: expected one of 'clipped_pg', 'reinforce', 'gspo'" in text
    assert "'dro', or module:name of your own, got" in text


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("loss_fn.name=clip_pg", "clipped_pg"),
        ("env.name=maths", "math"),
        ("data_plane.impl=transferqueue", "transfer_queue"),
        ("data.train.dataset_name=json", "jsonl"),
        ("grpo.adv_estimator.name=gpro", "grpo"),
    ],
)
def test_a_slip_leads_to_the_word_that_was_meant(tmp_path: Path, override: str, meant: str) -> None:
    assert f"did you mean {meant!r}?" in problem_of(tmp_path, override)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("no_such_module:Loss", "cannot be imported: ModuleNotFoundError"),
        ("broken_part:Loss", "cannot be imported: ZeroDivisionError"),
        ("whole_part:Loss", "module 'whole_part' has no 'Loss'; expected a loss"),
        ("whole_part:CONSTANT", "expected a loss, a class or a function, got 3"),
    ],
)
def test_a_part_that_cannot_be_had_is_named_with_its_key(broken: None, name: str, said: str) -> None:
    with pytest.raises(ConfigError, match="loss_fn.name: ") as caught:
        LOSSES.load(name, key="loss_fn.name")
    assert said in str(caught.value)


def test_parts_of_ones_own_are_imported_before_a_run_starts(tmp_path: Path) -> None:
    model = write_tiny_folder(tmp_path / "model")
    overrides = [
        "loss_fn.name=nowhere_a:Loss",
        "grpo.adv_estimator.name=nowhere_b:Advantages",
        "env.name=nowhere_c:Env",
    ]
    overrides += ["env.reward_function=null", "logger.trackers=[nowhere_d:Tracker]", "cluster.launcher=local"]
    overrides += ["cluster.cpu_workers_per_node=1", "policy.generation.backend=nowhere_e:Engine"]
    overrides += ["data_plane.impl=nowhere_f:Store", "data.train.dataset_name=nowhere_g:prompts"]
    with pytest.raises(UserError) as caught:
        preflight(load_config(write_recipe(tmp_path / "run", model), overrides))
    found = [name for name in "abcdefg" if f"nowhere_{name}" in str(caught.value)]
    assert found == list("abcdefg"), str(caught.value)


def test_an_order_of_ones_own_is_imported_before_a_run_starts(tmp_path: Path) -> None:
    model = write_tiny_folder(tmp_path / "model")
    overrides = ["grpo.async.enabled=true", "grpo.async.selection=nowhere_h:Newest"]
    overrides += ["loss_fn.use_importance_sampling_correction=true"]
    with pytest.raises(UserError, match="grpo.async.selection: 'nowhere_h:Newest' cannot be imported"):
        preflight(load_config(write_recipe(tmp_path / "run", model), overrides))
