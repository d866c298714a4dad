"""Recipes of NeMo-RL become recipes of ours: every key has a fate, and the result loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from nemo_rl.cli.main import app
from nemo_rl.cluster.recipe_import.convert import Imported, import_recipe, rule_of
from nemo_rl.cluster.recipe_import.emit import report_lines, to_recipe
from nemo_rl.cluster.recipe_import.key_rule import Fate
from nemo_rl.config.load import load_config
from nemo_rl.config.schema_walk import place_of
from nemo_rl.errors import ConfigError
from tests.helpers.nemo_rl_keys import FATES, KEYS, nested

SMALL: dict[str, Any] = {
    "grpo": {"num_prompts_per_step": 8, "num_generations_per_prompt": 4},
    "policy": {
        "model_name": "models/x",
        "train_global_batch_size": 32,
        "max_total_sequence_length": 512,
        "generation": {"backend": "vllm", "max_new_tokens": 512},
    },
    "data": {"max_input_seq_length": 512, "train": {"data_path": "data/x.jsonl", "input_key": "q"}, "validation": None},
    "cluster": {"gpus_per_node": 1, "num_nodes": 1},
    "checkpointing": {"metric_name": "train:reward"},
}


def write(folder: Path, tree: dict[str, Any], name: str = "recipe.yaml") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return path


def merged(changes: dict[str, Any], base: dict[str, Any] | None = None) -> dict[str, Any]:
    result = dict(SMALL if base is None else base)
    for name, value in changes.items():
        below = result.get(name)
        result[name] = merged(value, below) if isinstance(value, dict) and isinstance(below, dict) else value
    return result


def loaded(folder: Path, imported: Imported) -> Any:
    path = folder / "ours.yaml"
    path.write_text(to_recipe(imported), encoding="utf-8")
    return load_config(path)


def fates_of(imported: Imported, key: str) -> set[Fate]:
    return {outcome.fate for outcome in imported.outcomes if outcome.key == key}


def test_no_key_falls_through() -> None:
    assert [key for key in KEYS if rule_of(key) is None] == []


def test_every_key_has_the_fate_that_the_table_says(tmp_path: Path) -> None:
    imported = import_recipe(write(tmp_path, nested()))
    assert imported.of(Fate.UNKNOWN) == []
    wrong = {}
    for key, (word, _) in KEYS.items():
        # A dictionary of ours is one value.
        found = fates_of(imported, key) or fates_of(imported, key.rpartition(".")[0])
        if word in FATES:
            expected = FATES[word]
        else:
            is_known = place_of((rule_of(key).to or key).split(".")).is_known  # type: ignore[union-attr]
            expected = Fate.NOT_SUPPORTED if not is_known else next(iter(found))
        if expected not in found:
            wrong[key] = (expected, found)
    assert wrong == {}


def test_lengths_prompts_and_what_has_no_key_are_converted_and_the_result_loads(tmp_path: Path) -> None:
    config = loaded(tmp_path, import_recipe(write(tmp_path, SMALL)))
    assert (config.data.max_input_seq_length, config.policy.generation.max_new_tokens) == (128, 384)
    assert config.data.train.data_path == Path("data/x.jsonl") and config.data.train.input_key == "q"
    assert config.data.validation is None and config.grpo.val_period == 0 and not config.grpo.val_at_end
    assert config.grpo.use_leave_one_out_std and not config.grpo.drop_zero_advantage_groups
    assert config.policy.generation.backend == "torch" and config.env.name == "math"


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_the_kl_keeps_its_gradient(kind: str, tmp_path: Path) -> None:
    kl = {"loss_fn": {"reference_policy_kl_penalty": 0.01, "reference_policy_kl_type": kind}}
    loss = loaded(tmp_path, import_recipe(write(tmp_path, merged(kl)))).loss_fn
    assert (loss.reference_policy_kl_type, loss.reference_policy_kl_gradient) == (kind, "importance_weighted")


@pytest.mark.parametrize(
    ("estimator", "ours"),
    [
        ({"minus_baseline": False}, "reinforce_plus_plus"),
        ({}, "reinforce_plus_plus_baseline"),
    ],
)
def test_a_kl_in_the_reward_leaves_no_key_of_that_in_the_loss(
    estimator: dict[str, Any], ours: str, tmp_path: Path
) -> None:
    theirs = {
        "grpo": {"adv_estimator": {"name": "reinforce_plus_plus", **estimator}, "seq_logprob_error_threshold": 1.5},
        "loss_fn": {
            "use_kl_in_reward": True,
            "reference_policy_kl_penalty": 0.02,
            "reference_policy_kl_type": "k3",
            "kl_output_clamp_value": None,
        },
    }
    imported = import_recipe(write(tmp_path, merged(theirs)))
    config = loaded(tmp_path, imported)
    assert config.grpo.adv_estimator.name == ours and config.grpo.seq_logprob_error_threshold == 1.5
    assert config.loss_fn.use_kl_in_reward and config.loss_fn.reference_policy_kl_penalty == 0.02
    assert fates_of(imported, "loss_fn.use_kl_in_reward") == {Fate.MAPPED}
    other = merged({"grpo": {"adv_estimator": {"name": "grpo"}}}, merged(theirs))
    assert fates_of(import_recipe(write(tmp_path / "other", other)), "loss_fn.use_kl_in_reward") == {Fate.NOT_SUPPORTED}


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({"ratio_clip_c": 3.0}, {"name": "clipped_pg", "ratio_clip_c": 3.0}),
        (
            {"sequence_level_importance_ratios": True, "token_level_loss": False},
            {"name": "gspo", "token_level_loss": False},
        ),
        ({"use_cispo": True, "ratio_clip_max": 4.0}, {"name": "cispo", "ratio_clip_max": 4.0}),
        ({"disable_ppo_ratio": True}, {"name": "reinforce"}),
        ({"force_on_policy_ratio": True}, {"force_on_policy_ratio": True}),
        (
            {
                "use_importance_sampling_correction": True,
                "truncated_importance_sampling_type": "icepop",
                "truncated_importance_sampling_ratio": 5,
                "truncated_importance_sampling_ratio_min": 0.2,
            },
            {"truncated_importance_sampling_type": "icepop", "truncated_importance_sampling_ratio_min": 0.2},
        ),
        (
            {
                "sequence_level_importance_ratios": True,
                "token_level_loss": False,
                "use_importance_sampling_correction": True,
                "truncated_importance_sampling_type": "tis",
                "truncated_importance_sampling_ratio": 2,
            },
            {"name": "gspo", "truncated_importance_sampling_type": "seq-tis"},
        ),
    ],
)
def test_losses_have_one_word_each(theirs: dict[str, Any], ours: dict[str, Any], tmp_path: Path) -> None:
    loss = loaded(tmp_path, import_recipe(write(tmp_path, merged({"loss_fn": theirs})))).loss_fn
    assert {name: getattr(loss, name) for name in ours} == ours


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({"name": "reinforce_plus_plus"}, "reinforce_plus_plus_baseline"),
        ({"name": "reinforce_plus_plus", "minus_baseline": False}, "reinforce_plus_plus"),
        ({"name": "grpo"}, "grpo"),
    ],
)
def test_estimators_have_one_word_each(theirs: dict[str, Any], ours: str, tmp_path: Path) -> None:
    grpo = loaded(tmp_path, import_recipe(write(tmp_path, merged({"grpo": {"adv_estimator": theirs}})))).grpo
    assert grpo.adv_estimator.name == ours and not grpo.drop_zero_advantage_groups


def test_megatron_recipes_keep_their_layout_and_leave_the_other_worker_out(tmp_path: Path) -> None:
    changes = {
        "cluster": {"gpus_per_node": 8, "num_nodes": 2},
        "policy": {
            "dtensor_cfg": {"enabled": False, "tensor_parallel_size": 2},
            "optimizer": None,
            "megatron_cfg": {"enabled": True, "tensor_model_parallel_size": 2, "optimizer": {"lr": 1e-6, "bf16": True}},
            "sequence_packing": {"enabled": True, "train_mb_tokens": 100, "logprob_mb_tokens": 50},
            "generation": {"vllm_cfg": {"tensor_parallel_size": 4}},
        },
        "data_plane": {"enabled": True, "backend": "simple", "num_storage_units": 8},
    }
    config = loaded(tmp_path, import_recipe(write(tmp_path, merged(changes))))
    assert config.policy.parallel_sizes.tensor == 2 and not config.policy.megatron_cfg.optimizer.decay_norms_and_biases
    assert config.policy.sequence_packing.train_mb_tokens == config.policy.sequence_packing.logprob_mb_tokens == 512
    assert config.policy.generation.num_replicas == 4 and config.cluster.address == "auto"
    assert config.data_plane.impl == "transfer_queue" and config.data_plane.simple.num_storage_units == 8


def test_parents_overrides_and_interpolations_are_followed(tmp_path: Path) -> None:
    write(tmp_path, merged({"grpo": {"seed": 7}, "logger": {"wandb": {"project": "theirs"}}}), "base.yaml")
    child = {
        "defaults": "base.yaml",
        "policy": {"train_micro_batch_size": 2, "logprob_batch_size": "${mul:2,${policy.train_micro_batch_size}}"},
        "logger": {"_override_": True, "log_dir": "logs/${policy.model_name}"},
    }
    config = loaded(tmp_path, import_recipe(write(tmp_path, child)))
    assert config.grpo.seed == 7 and config.policy.logprob_batch_size == 4
    assert str(config.logger.log_dir) == "logs/models/x" and config.logger.wandb.project == "nemo_rl"


def test_a_missing_parent_is_named_and_the_exemplar_stands_in(tmp_path: Path) -> None:
    child = {"defaults": ["../../grpo_math_1B.yaml", "gone.yaml"], "policy": {"model_name": "models/x"}}
    imported = import_recipe(write(tmp_path, child))
    config = loaded(tmp_path, imported)
    assert config.policy.max_total_sequence_length == 512 and config.policy.sequence_packing.enabled
    report = "\n".join(report_lines(imported))
    assert "gone.yaml: what it sets is not in the result" in report
    assert "grpo_math_1B.yaml: its values of August 2026" in report


def test_unknown_keys_get_a_suggestion_and_references_without_a_value_are_left_out(tmp_path: Path) -> None:
    changes = {"grpo": {"num_generation_per_prompt": 4}, "logger": {"log_dir": "${nowhere.at_all}"}}
    imported = import_recipe(write(tmp_path, merged(changes)))
    [unknown] = imported.of(Fate.UNKNOWN)
    assert (
        unknown.key == "grpo.num_generation_per_prompt" and "did you mean 'num_generations_per_prompt'" in unknown.why
    )
    assert list(imported.given.unresolved) == ["logger.log_dir"]
    assert "unknown: grpo.num_generation_per_prompt" in to_recipe(imported)


def test_values_that_no_key_here_takes_are_named(tmp_path: Path) -> None:
    imported = import_recipe(write(tmp_path, merged({"policy": {"precision": "fp8"}})))
    [outcome] = [one for one in imported.of(Fate.NOT_SUPPORTED) if one.key == "policy.precision"]
    assert "'fp8' is not taken here" in outcome.why
    assert loaded(tmp_path, imported).policy.precision == "bfloat16"


def test_the_command_writes_a_recipe_and_says_what_remains_to_decide(tmp_path: Path) -> None:
    out = tmp_path / "ours.yaml"
    done = CliRunner().invoke(app, ["config", "import", str(write(tmp_path, SMALL)), "--out", str(out)])
    assert done.exit_code == 0 and "mapped:" in done.output
    load_config(out)
    odd = write(tmp_path, merged({"policy": {"train_global_batch_size": 24}}), "odd.yaml")
    refused = CliRunner().invoke(app, ["config", "import", str(odd), "--out", str(out)])
    assert isinstance(refused.exception, ConfigError) and "expected a divisor" in str(refused.exception)
    assert "# to decide: policy.train_global_batch_size" in out.read_text()


@pytest.mark.parametrize("flag", [["--json"], []])
def test_without_a_file_the_recipe_or_the_record_is_printed(tmp_path: Path, flag: list[str]) -> None:
    done = CliRunner().invoke(app, ["config", "import", str(write(tmp_path, SMALL)), *flag])
    assert done.exit_code == 0 and yaml.safe_load(done.stdout)
