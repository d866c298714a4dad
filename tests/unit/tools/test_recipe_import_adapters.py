"""Turns, tools and adapters of other frameworks' recipes keep what they mean here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nemo_rl.errors import ConfigError
from nemo_rl_tools.recipe_import import import_recipe
from nemo_rl_tools.recipe_import.keys import Fate
from tests.helpers.foreign_recipe import fates_of, loaded, merged, write

VERL: dict[str, Any] = {
    "enable": True,
    "max_assistant_turns": 8,
    "max_user_turns": 4,
    "max_parallel_calls": 2,
    "max_tool_response_length": 1000,
    "tool_response_truncate_side": "middle",
    "format": "gpt-oss",
    "tool_config_path": "tools.yaml",
    "tokenization_sanity_check_mode": "strict",
}


def multi_turn(**section: Any) -> dict[str, Any]:
    return merged({"actor_rollout_ref": {"rollout": {"multi_turn": section}}})


def test_turns_and_tools_of_verl_keep_what_they_mean(tmp_path: Path) -> None:
    imported = import_recipe(write(tmp_path, multi_turn(**VERL)))
    [problem] = imported.problems
    assert "multi_turn.tool_config_path: not supported: list functions in env.tools.use" in problem
    section = imported.tree["experience"]["conversation"]
    assert section == {"enabled": True, "max_turns": 5}  # a last turn follows the fourth reply
    fates = {key.rpartition(".")[2]: fates_of(imported, key) for key in (o.key for o in imported.outcomes)}
    assert fates["tokenization_sanity_check_mode"] == {Fate.IGNORED}
    assert fates["tool_response_truncate_side"] == {Fate.SAME}
    [ours] = [o for o in imported.outcomes if o.key.endswith("max_tool_response_length") and o.fate is Fate.IGNORED]
    assert "env.tools.use names no tool" in ours.why


def test_turns_of_verl_without_tools_or_switched_off(tmp_path: Path) -> None:
    plain = {"enable": True, "max_assistant_turns": None, "format": "hermes", "max_parallel_calls": 1}
    imported = import_recipe(write(tmp_path, multi_turn(**plain)))
    assert imported.problems == () and fates_of(imported, "actor_rollout_ref.rollout.multi_turn.format") == {
        Fate.IGNORED
    }
    assert loaded(tmp_path, imported).experience.conversation.max_turns == 1000
    imported = import_recipe(write(tmp_path, multi_turn(enable=False, max_assistant_turns=3)))
    assert imported.problems == () and not loaded(tmp_path, imported).experience.conversation.enabled


@pytest.mark.parametrize(
    ("section", "why"),
    [
        ({**VERL, "format": "xml"}, "'xml' is not here"),
        ({"enable": True, "interaction_config_path": "a.yaml"}, "env.name=module:Class"),
        ({"enable": True, "completion_callback": "a.b"}, "env.name=module:Class"),
    ],
)
def test_turns_of_verl_that_are_not_here_are_left_to_somebody(section, why, tmp_path):
    imported = import_recipe(write(tmp_path, multi_turn(**section)))
    assert any(why in problem for problem in imported.problems)


def test_turns_and_tools_of_trl_keep_what_they_mean(tmp_path: Path) -> None:
    theirs = {"max_tool_calling_iterations": 3, "max_completion_length": 256}
    imported = import_recipe(write(tmp_path, merged(theirs)))
    assert imported.tree["experience"]["conversation"] == {"enabled": True, "max_turns": 4}
    assert imported.tree["policy"]["generation"]["max_new_tokens"] == 256
    imported = import_recipe(write(tmp_path, merged({"tools": ["a.b"], "environment_factory": "c.d"})))
    assert {problem.partition(":")[0] for problem in imported.problems} == {"tools", "environment_factory"}
    imported = import_recipe(write(tmp_path, merged({"max_completion_length": 64})))
    assert imported.tree["policy"]["generation"]["max_new_tokens"] == 64 and "experience" not in imported.tree


def test_turns_of_nemo_rl_need_an_environment_that_has_them(tmp_path: Path) -> None:
    turns = {"grpo": {"max_rollout_turns": 6}}
    imported = import_recipe(write(tmp_path, merged(turns)))
    assert imported.problems == () and fates_of(imported, "grpo.max_rollout_turns") == {Fate.IGNORED}
    imported = import_recipe(write(tmp_path, merged({**turns, "data": {"train": {"env_name": "my_game"}}})))
    assert any("turns of env.my_game" in problem for problem in imported.problems)
    assert imported.tree["experience"]["conversation"] == {"enabled": True, "max_turns": 6}


def test_the_sliding_puzzle_of_nemo_rl_is_here_as_well(tmp_path: Path) -> None:
    game = {"num_workers": 2, "cfg": {"game_config": {"size": 3, "shuffle_moves": 5}, "max_moves": 9}}
    theirs = {"grpo": {"max_rollout_turns": 20}, "env": {"sliding_puzzle_game": game}, "data": {"train": None}}
    imported = import_recipe(write(tmp_path, merged(theirs)))
    config = loaded(tmp_path, imported)
    assert imported.problems == () and config.env.name == "sliding_puzzle" and config.env.num_workers == 2
    assert config.data.train.dataset_name == "sliding_puzzle" and config.data.train.options == {"side": 3, "moves": 5}
    assert config.experience.conversation.max_turns == 9


LORA_CFG = {"enabled": True, "dim": 8, "alpha": 32, "dropout_position": "post", "lora_A_init": "xavier"}


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({"policy": {"dtensor_cfg": {"lora_cfg": LORA_CFG}}}, {"rank": 8, "alpha": 32, "targets": "all-linear"}),
        (
            {
                "policy": {
                    "dtensor_cfg": {"lora_cfg": {**LORA_CFG, "match_all_linear": False, "target_modules": ["*.q_proj"]}}
                }
            },
            {"rank": 8, "targets": ["q_proj"]},
        ),
        (
            {
                "policy": {
                    "dtensor_cfg": {"enabled": False},
                    "megatron_cfg": {
                        "enabled": True,
                        "peft": {"enabled": True, "dim": 4, "target_modules": ["linear_qkv", "linear_fc2"]},
                    },
                }
            },
            {"rank": 4, "alpha": 32.0, "targets": ["q_proj", "k_proj", "v_proj", "down_proj"]},
        ),
        (
            {"actor_rollout_ref": {"model": {"lora_rank": 64, "lora_alpha": 128, "target_modules": "all-linear"}}},
            {"rank": 64, "alpha": 128, "targets": "all-linear"},
        ),
        ({"actor_rollout_ref": {"model": {"lora": {"rank": 2, "merge": True}}}}, {"rank": 2, "serve": "merged"}),
        (
            {"use_peft": True, "lora_r": 4, "use_rslora": True, "lora_target_modules": ["q_proj", "v_proj"]},
            {"rank": 4, "alpha": 32.0, "dropout": 0.05, "rslora": True, "targets": ["q_proj", "v_proj"]},
        ),
    ],
    ids=["lora_cfg", "lora_cfg names", "peft", "verl", "verl on Megatron", "TRL"],
)
def test_adapters_of_other_frameworks_keep_what_they_mean(theirs, ours, tmp_path):
    imported = import_recipe(write(tmp_path, merged(theirs)))
    lora = loaded(tmp_path, imported).policy.lora
    assert lora.enabled and {name: getattr(lora, name) for name in ours} == ours
    assert not [outcome.key for outcome in imported.outcomes if outcome.fate is Fate.UNKNOWN]


@pytest.mark.parametrize("section", ["model.lora", "trainer.model.lora"])
def test_adapters_of_prime_rl_are_read_from_toml(tmp_path: Path, section: str) -> None:
    path = tmp_path / "rl.toml"
    path.write_text(f"max_steps = 20\n[{section}]\nrank = 8\nalpha = 16.0\ntarget_modules = ['q_proj', 'experts']\n")
    imported = import_recipe(path)
    found = imported.tree["policy"]["lora"]
    assert (found["enabled"], found["rank"], found["alpha"]) == (True, 8, 16.0)
    assert found["targets"] == ["q_proj", "experts.gate_up_proj", "experts.down_proj"]
    path.write_text("[model\n")
    with pytest.raises(ConfigError, match=r"rl\.toml"):
        import_recipe(path)


def test_adapters_that_are_off_or_cannot_be_named_here(tmp_path: Path) -> None:
    off = {"actor_rollout_ref": {"model": {"lora_rank": 0, "lora_alpha": 16}}}
    imported = import_recipe(write(tmp_path, merged(off)))
    assert imported.problems == () and not loaded(tmp_path, imported).policy.lora.enabled
    assert fates_of(imported, "actor_rollout_ref.model.lora_alpha") == {Fate.IGNORED}
    named = {"policy": {"dtensor_cfg": {"lora_cfg": {**LORA_CFG, "target_modules": ["*.layers.*.q_proj"]}}}}
    assert any("is a pattern" in problem for problem in import_recipe(write(tmp_path, merged(named))).problems)
    excluded = {"policy": {"dtensor_cfg": {"lora_cfg": {**LORA_CFG, "exclude_modules": ["o_proj"]}}}}
    assert any("exclude_modules" in problem for problem in import_recipe(write(tmp_path, merged(excluded))).problems)
