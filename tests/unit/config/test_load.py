"""Composition, overrides, interpolation and messages of `load_config`."""

from __future__ import annotations

import os
import re
import textwrap
import time
from pathlib import Path

import pytest

from nemo_rl.config.load import load_config
from nemo_rl.config.yaml_text import to_yaml, yaml_line
from nemo_rl.errors import ConfigError

DEMO = "configs/grpo_sort_cpu.yaml"
REFUSED_S = 10.0
"""Most seconds for a recipe of any content, of which a hundredth is needed."""
MEGATRON = "configs/recipes/grpo_sort_megatron_tp2_cpu.yaml"


def problems(path: str | Path, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return caught.value.problems


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def overlay(folder: Path, text: str, *, name: str = "recipe.yaml") -> Path:
    return write(folder, name, f"defaults: {Path(DEMO).resolve()}\n{text}")


def test_child_wins_over_parents_and_later_parents_over_earlier(tmp_path: Path) -> None:
    overlay(tmp_path, "grpo: {seed: 1, val_period: 1, max_num_steps: 11}", name="a.yaml")
    write(tmp_path, "b.yaml", "grpo: {seed: 2, val_period: 2}")
    recipe = write(tmp_path, "sub/c.yaml", "defaults: [../a.yaml, ../b.yaml]\ngrpo: {seed: 3}")
    grpo = load_config(recipe).grpo
    assert (grpo.seed, grpo.val_period, grpo.max_num_steps) == (3, 2, 11)


def test_override_marker_replaces_a_section(tmp_path: Path) -> None:
    recipe = overlay(tmp_path, "policy: {optimizer: {kwargs: {_override_: true, lr: 0.5}}}")
    assert load_config(recipe).policy.optimizer.kwargs == {"lr": 0.5}


def test_a_pipe_in_place_of_a_recipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    child = write(tmp_path, "child.yaml", "defaults: pipe.yaml")
    for path in (tmp_path / "pipe.yaml", child):
        (line,) = problems(path)
        assert "pipe.yaml: cannot be opened" in line and "expected a plain file" in line


def test_files_that_inherit_from_each_other_are_reported(tmp_path: Path) -> None:
    write(tmp_path, "a.yaml", "defaults: b.yaml")
    write(tmp_path, "b.yaml", "defaults: a.yaml")
    (line,) = problems(tmp_path / "a.yaml")
    assert "inherit from each other" in line
    assert line.count("a.yaml") >= 2


def test_missing_parent_names_the_file_that_wants_it(tmp_path: Path) -> None:
    (line,) = problems(write(tmp_path, "a.yaml", "defaults: gone.yaml"))
    assert "gone.yaml: no such file" in line
    assert "a.yaml" in line


@pytest.mark.parametrize("text", ["grpo: {seed: 1", "- 1\n- 2", "grpo: {seed: 1}\ngrpo: {seed: 2}"])
def test_text_that_is_no_mapping_is_a_config_error(tmp_path: Path, text: str) -> None:
    (line,) = problems(write(tmp_path, "a.yaml", text))
    assert line.startswith(str(tmp_path / "a.yaml"))


def test_all_problems_come_at_once_with_file_path_and_suggestion(tmp_path: Path) -> None:
    recipe = overlay(tmp_path, "grpo: {num_generation_per_prompt: 4, seed: '7'}\nlogger: {wandb: {mod: offline}}")
    lines = problems(recipe, "policy.scheduler.name=liner", "env.timeout_s=3", "grpo.sed=1")
    assert set(lines) == {
        "command line: grpo.sed: unknown key 'sed'; did you mean 'seed'?",
        "command line: policy.scheduler.name: expected one of 'constant', 'linear' or 'cosine', got 'liner'; "
        "did you mean 'linear'?",
        f"{recipe}: grpo.seed: expected an integer, got '7'",
        f"{recipe}: grpo.num_generation_per_prompt: unknown key; did you mean 'num_generations_per_prompt'?",
        f"{recipe}: logger.wandb.mod: unknown key; did you mean 'mode'?",
        "command line: env.timeout_s: 3.0 would be ignored, because env.name is 'sort'; "
        "leave it out, or change env.name",
    }
    assert len(lines) == 6


def test_a_misspelt_section_does_not_drag_its_consequences_along(tmp_path: Path) -> None:
    recipe = overlay(tmp_path, "data: {validation: null, validaton: {dataset_name: sort_digits, size: 3}}")
    assert problems(recipe) == [f"{recipe}: data.validaton: unknown key; did you mean 'validation'?"]


def test_a_key_of_another_section_is_offered_with_its_path() -> None:
    (line,) = problems(DEMO, "grpo.temperature=1")
    assert line.endswith("did you mean 'policy.generation.temperature'?")


@pytest.mark.parametrize(
    ("recipe", "override", "meant"),
    [
        (DEMO, "lr=1e-4", "did you mean 'policy.optimizer.kwargs.lr'?"),
        (DEMO, "grpo.lr=1e-4", "did you mean 'policy.optimizer.kwargs.lr'?"),
        (MEGATRON, "lr=1e-4", "did you mean 'policy.megatron_cfg.optimizer.lr'?"),
        (MEGATRON, "policy.optimizer.lr=1e-4", "did you mean 'policy.megatron_cfg.optimizer.lr'?"),
        (DEMO, "policy.peft.dim=8", "adapters (LoRA) have the section policy.lora"),
        (
            DEMO,
            "backend=vllm",
            "did you mean 'policy.generation.backend' (torch, vllm) or 'data_plane.backend' (simple, mooncake_cpu)?",
        ),
        (
            DEMO,
            "policy.generation.backend=vlm",
            "expected one of 'torch', 'vllm', or module:name of your own, got 'vlm'; did you mean 'vllm'?",
        ),
    ],
)
def test_what_people_write_leads_to_the_key_that_is_on(recipe: str, override: str, meant: str) -> None:
    (line,) = problems(recipe, override)
    assert meant in line


def test_values_keep_their_yaml_types() -> None:
    config = load_config(
        DEMO,
        ["policy.optimizer.kwargs.lr=1e-4", "policy.generation.stop_strings=[a, 'b,c']", "logger.wandb_enabled=no"],
    )
    assert config.policy.optimizer.kwargs["lr"] == pytest.approx(1e-4)
    assert config.policy.generation.stop_strings == ["a", "b,c"]
    assert config.logger.wandb_enabled is False


@pytest.mark.parametrize(
    ("override", "fragment"),
    [
        ("grpo.num_prompts_per_step='32'", "expected an integer, got '32'"),
        ("grpo.seed=true", "expected an integer, got True"),
        ("grpo.num_prompts_per_step=0", "expected a number > 0, got 0"),
        ("policy.generation.temperature=.nan", "expected a finite number, got nan"),
        ("policy=3", "expected a section, got 3"),
        ("policy.model_name=???", "command line: policy.model_name: must be set; Folder"),
        ("grpo", "expected grpo=VALUE"),
        ("~grpo.seed=3", "expected ~a.b without a value"),
        ("=3", "expected a.b=VALUE"),
        ("grpo.seed=[", "the value cannot be read"),
        ("grpo.seed.deeper=3", "has no keys below"),
        ("+grpo.seed=3", "is already set to 42; use grpo.seed="),
        ("policy.optimizer.kwargs.beta=1", "did you mean 'betas'?; use +policy.optimizer.kwargs.beta="),
        ("~policy.optimizer.kwargs.eps", "is not set in the recipe"),
        ("grpo.seed=${grpo.nothing}", "cannot resolve '${grpo.nothing}'"),
        ("grpo.seed=${grpo.seed}", "cannot resolve"),
        ("logger.wandb.name=${", "cannot resolve '${': the closing brace is missing"),
    ],
)
def test_bad_override_is_explained_in_one_line(override: str, fragment: str) -> None:
    lines = problems(DEMO, override)
    assert [line for line in lines if fragment in line] == lines[:1]
    assert len(lines) == 1


def test_plus_adds_a_free_key_and_tilde_restores_a_default() -> None:
    config = load_config(DEMO, ["+policy.optimizer.kwargs.eps=1e-8", "~loss_fn.ratio_clip_max"])
    assert config.policy.optimizer.kwargs["eps"] == pytest.approx(1e-8)
    assert config.loss_fn.ratio_clip_max == pytest.approx(0.2)


def test_an_override_of_a_free_key_keeps_its_default_neighbours(tmp_path: Path) -> None:
    text = Path(DEMO).read_text(encoding="utf-8").replace("defaults: grpo_base.yaml\n", "")
    start, end = text.index("  optimizer:"), text.index("  scheduler:")
    recipe = write(tmp_path, "a.yaml", text[:start] + text[end:])
    config = load_config(recipe, ["policy.optimizer.kwargs.lr=0.25"])
    assert config.policy.optimizer.kwargs == {"lr": 0.25, "weight_decay": 0.01}


def test_interpolation_reaches_defaults_lists_and_sums(tmp_path: Path) -> None:
    write(
        tmp_path,
        "a.yaml",
        Path(DEMO).read_text(encoding="utf-8").replace("defaults: grpo_base.yaml\n", "")
        + "\n  wandb_enabled: true\n  wandb: {project: 'p${grpo.seed}', name: '${add:1,2}'}\n",
    )
    config = load_config(
        tmp_path / "a.yaml", ["policy.generation.stop_strings=['${env.name}']", "logger.wandb.name='n${mul:2,3}'"]
    )
    assert config.logger.wandb.project == "p42"
    assert config.logger.wandb.name == "n6"
    assert config.policy.generation.stop_strings == ["sort"]


@pytest.mark.parametrize(
    ("first", "told"),
    [(["x"] * 10, "more than 5000 values come from references"), ("x" * 999, "more than 262144 characters come from")],
)
def test_references_that_multiply_end(tmp_path: Path, first: object, told: str) -> None:
    """Ten references to the key before, and so five times, are a million values."""
    kwargs = {f"a{n}": [f"${{policy.optimizer.kwargs.a{n - 1}}}"] * 10 for n in range(1, 6)}
    started = time.monotonic()
    lines = problems(overlay(tmp_path, f"policy: {{optimizer: {{kwargs: {yaml_line({'a0': first, **kwargs})}}}}}"))
    assert any(told in line for line in lines) and time.monotonic() - started < REFUSED_S


def test_what_is_rendered_loads_again_to_the_same_config(tmp_path: Path) -> None:
    config = load_config(DEMO, ["policy.generation.stop_strings=['a: b', '\"']"])
    assert load_config(write(tmp_path, "resolved.yaml", to_yaml(config))) == config


@pytest.mark.parametrize("switches", [("1", "1"), ("1", "0"), ("0", "1")])
def test_the_resolved_config_says_whether_digests_travel(monkeypatch: pytest.MonkeyPatch, switches: tuple) -> None:
    """They are columns of their own: whoever reads the config of a run must know its schema."""
    for name, value in zip(("NRL_R3_TRACE", "NRL_R3_TRACE_VERIFY_FORWARD"), switches, strict=True):
        monkeypatch.setenv(name, value)
    on = load_config("configs/recipes/grpo_sort_moe_r3_dtensor_cpu.yaml")
    assert on.policy.router_replay.with_digests is (switches == ("1", "1"))
    assert f"with_digests: {str(on.policy.router_replay.with_digests).lower()}" in to_yaml(on)
    assert not load_config(DEMO).policy.router_replay.with_digests


def test_every_path_of_a_recipe_is_looked_for_in_the_working_directory_then_beside_it(tmp_path, monkeypatch):
    here, beside = tmp_path / "here", tmp_path / "beside"
    for folder in (here, beside):
        folder.mkdir()
        (folder / "both.jsonl").touch()
        (folder / "parent.yaml").write_text(f"grpo: {{seed: {len(folder.name)}}}\n")
    for name in ("only.jsonl", "my_rewards_of_this_test.py", "base.yaml"):
        (beside / name).touch()
    (beside / "model").mkdir()
    text = """
        defaults: [base.yaml, parent.yaml]
        policy: {model_name: model, tokenizer: {name: nowhere}}
        data:
          train: {data_path: both.jsonl}
          validation: {data_path: only.jsonl}
          validation_sets: {more: {data_path: only.jsonl}}
        env: {name: custom, reward_function: "my_rewards_of_this_test:f"}
    """
    (beside / "r.yaml").write_text(textwrap.dedent(text))
    monkeypatch.chdir(here)
    config = load_config("../beside/r.yaml")
    assert config.grpo.seed == len("here")
    assert config.policy.model_name == str(beside / "model") and config.policy.tokenizer.name == "nowhere"
    assert config.data.train.data_path == Path("both.jsonl")
    assert {held.data_path for held in config.data.held_out.values()} == {beside / "only.jsonl"}
    assert config.env.reward_function == f"{beside / 'my_rewards_of_this_test.py'}:f"
    named = load_config("../beside/r.yaml", ["env.reward_function=../beside/my_rewards_of_this_test.py:f"])
    assert named.env == config.env
    (here / "my_rewards_of_this_test.py").touch()
    assert load_config("../beside/r.yaml").env.reward_function == f"{here / 'my_rewards_of_this_test.py'}:f"
    (here / "config.yaml").write_text(to_yaml(config))
    monkeypatch.chdir(tmp_path)
    assert load_config("here/config.yaml").env == config.env, "the config of a run is read from anywhere"
    monkeypatch.chdir(here)
    with pytest.raises(ConfigError, match=rf"no gone.py in {re.escape(str(here))}"):
        load_config("../beside/r.yaml", ["env.reward_function=gone.py:f"])
    (beside / "child.yaml").write_text("defaults: [r.yaml, gone.yaml]")
    with pytest.raises(ConfigError, match=rf"gone.yaml in {re.escape(str(here))} and in {re.escape(str(beside))}"):
        load_config("../beside/child.yaml")


def test_a_parent_of_the_same_name_as_its_child_is_the_one_beside_it(tmp_path, monkeypatch):
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "r.yaml").write_text("policy: {model_name: m}\ngrpo: {seed: 7}")
    (tmp_path / "lib" / "middle.yaml").write_text("defaults: r.yaml")
    (tmp_path / "r.yaml").write_text("defaults: lib/middle.yaml")
    monkeypatch.chdir(tmp_path)
    from nemo_rl.config.compose import compose

    assert compose(Path("r.yaml")).tree["grpo"]["seed"] == 7


def test_a_misspelt_word_of_allowed_changes_gets_a_suggestion() -> None:
    with pytest.raises(ConfigError, match=r"allow_changed.*got 'datas'; did you mean 'data'"):
        load_config("configs/grpo_sort_cpu.yaml", ["checkpointing.resume=true", "checkpointing.allow_changed=[datas]"])


def test_a_key_that_python_reserves_keeps_its_name(tmp_path: Path) -> None:
    recipe = overlay(tmp_path, "grpo: {async: {enabled: true}}")
    config = load_config(recipe, ["grpo.async.max_staleness=2"])
    assert (config.grpo.async_.enabled, config.grpo.async_.max_staleness) == (True, 2)
    assert config.model_dump(mode="json")["grpo"]["async"]["max_staleness"] == 2
    assert load_config(write(tmp_path, "resolved.yaml", to_yaml(config))) == config


@pytest.mark.parametrize("name", ["asinc", "async_"])
def test_a_slip_in_a_reserved_key_leads_to_the_key(tmp_path: Path, name: str) -> None:
    (line,) = problems(DEMO, f"grpo.{name}.enabled=true")
    assert line.endswith(f"unknown key {name!r}; did you mean 'async'?")
    (line,) = problems(overlay(tmp_path, f"grpo: {{{name}: {{enabled: true}}}}"))
    assert line.endswith(f"grpo.{name}: unknown key; did you mean 'async'?")


@pytest.mark.parametrize(
    ("staleness", "lookahead", "ahead"), [(0, "null", 0), (1, "null", 1), (4, "null", 1), (4, "3", 3), (2, "0", 0)]
)
def test_lookahead_is_one_step_unless_it_is_set(staleness: int, lookahead: str, ahead: int) -> None:
    overrides = (f"grpo.async.max_staleness={staleness}", f"grpo.async.lookahead={lookahead}")
    assert load_config(DEMO, ["grpo.async.enabled=true", *overrides]).grpo.async_.steps_ahead == ahead


def test_conversations_and_asynchronous_runs_need_engines_whose_rows_come_and_go() -> None:
    assert not load_config(DEMO).has_continuous_engines
    assert load_config(DEMO, ["grpo.async.enabled=true", "cluster.launcher=ray"]).has_continuous_engines
    assert load_config(DEMO, ["experience.conversation.enabled=true"]).has_continuous_engines
