"""Recipes of NeMo-RL become recipes of ours: every key has a fate, and the result loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from nemo_rl.cli.main import app
from nemo_rl.config.load import load_config
from nemo_rl.config.schema_walk import place_of
from nemo_rl.config.yaml_text import parse_yaml, text_problem, yaml_line
from nemo_rl.data.messages import prompt_messages
from nemo_rl.errors import ConfigError
from nemo_rl_tools.recipe_import import import_recipe, report_lines, rule_of, to_recipe
from nemo_rl_tools.recipe_import.keys import Fate
from tests.helpers.foreign_recipe import SMALL, fates_of, loaded, merged, write
from tests.helpers.nemo_rl_keys import FATES, KEYS, nested


def texts(folder: Path, **files: str) -> None:
    (folder / "prompts").mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / "prompts" / f"{name}.txt").write_text(text, encoding="utf-8")


def test_no_key_falls_through() -> None:
    assert [key for key in KEYS if rule_of(key) is None] == []


def test_every_key_has_the_fate_that_the_table_says(tmp_path: Path) -> None:
    texts(tmp_path, cot="Solve: {}", system="You solve.")
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
    # A response ends where 512 tokens are reached, as there.
    assert (config.data.max_input_seq_length, config.policy.generation.max_new_tokens) == (511, None)
    assert config.data.train.data_path == Path("data/x.jsonl") and config.data.train.input_key == "q"
    assert config.data.validation is None and config.grpo.val_period == 0 and not config.grpo.val_at_end
    assert config.grpo.use_leave_one_out_std and not config.grpo.drop_zero_advantage_groups
    assert config.policy.generation.backend == "vllm" and config.env.name == "math"


@pytest.mark.parametrize(("theirs", "ours"), [(2, 2), (None, 1)])
def test_copies_of_the_shards_stay(theirs: int | None, ours: int, tmp_path: Path) -> None:
    sizes = {"policy": {"dtensor_cfg": {"dp_replicate_size": theirs}}, "cluster": {"gpus_per_node": 2}}
    found = loaded(tmp_path, import_recipe(write(tmp_path, merged(sizes))))
    assert found.policy.dtensor_cfg.replicate_size == ours


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_the_kl_keeps_its_gradient(kind: str, tmp_path: Path) -> None:
    kl = {"loss_fn": {"reference_policy_kl_penalty": 0.01, "reference_policy_kl_type": kind}}
    loss = loaded(tmp_path, import_recipe(write(tmp_path, merged(kl)))).loss_fn
    assert (loss.reference_policy_kl_type, loss.reference_policy_kl_gradient) == (kind, "importance_weighted")


@pytest.mark.parametrize(
    ("estimator", "ours"), [({"minus_baseline": False}, "reinforce_plus_plus"), ({}, "reinforce_plus_plus_baseline")]
)
def test_a_kl_in_the_reward_leaves_no_key_of_that_in_the_loss(estimator, ours, tmp_path):
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
    assert any("gone.yaml is not here" in problem for problem in imported.problems)
    assert not any("grpo_math_1B.yaml is not here" in problem for problem in imported.problems)
    assert "grpo_math_1B.yaml: its values of August 2026" in report


def test_unknown_keys_get_a_suggestion_and_references_without_a_value_are_left_out(tmp_path: Path) -> None:
    changes = {"grpo": {"num_generation_per_prompt": 4}, "logger": {"log_dir": "${nowhere.at_all}"}}
    imported = import_recipe(write(tmp_path, merged(changes)))
    [unknown] = imported.of(Fate.UNKNOWN)
    assert (
        unknown.key == "grpo.num_generation_per_prompt" and "did you mean 'num_generations_per_prompt'" in unknown.why
    )
    assert list(imported.given.unresolved) == ["logger.log_dir"]
    assert "to decide: grpo.num_generation_per_prompt: unknown" in to_recipe(imported)
    assert any("logger.log_dir: cannot resolve" in problem for problem in imported.problems)


def test_a_list_with_an_element_without_a_value_is_left_out(tmp_path: Path) -> None:
    imported = import_recipe(write(tmp_path, merged({"policy": {"generation": {"stop_strings": ["a", "${no.key}"]}}})))
    assert list(imported.given.unresolved) == ["policy.generation.stop_strings.1"]
    assert loaded(tmp_path, imported).policy.generation.stop_strings == []


def test_values_that_no_key_here_takes_are_named(tmp_path: Path) -> None:
    imported = import_recipe(write(tmp_path, merged({"policy": {"precision": "fp8"}})))
    [outcome] = [one for one in imported.of(Fate.NOT_SUPPORTED) if one.key == "policy.precision"]
    assert "'fp8' is not taken here" in outcome.why
    colocated = {
        "generation": {"colocated": {"enabled": True, "resources": {"num_nodes": None, "gpus_per_node": None}}}
    }
    nulls = import_recipe(write(tmp_path, merged({"policy": colocated}), "nulls.yaml"))
    assert nulls.of(Fate.NOT_SUPPORTED) == []
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


@pytest.mark.parametrize(
    ("file", "ours"),
    [
        ("Solve it:\n{}\nPut it into \\boxed{{}}.", "Solve it:\n{input}\nPut it into \\boxed{}."),
        ("{{{0}}} is the question: {0}", "{{input}} is the question: {input}"),
        ('Reply as {{"answer": 1}}: {}', 'Reply as {"answer": 1}: {input}'),
    ],
)
def test_prompt_files_are_filled_as_str_format_fills_them(file: str, ours: str, tmp_path: Path) -> None:
    texts(tmp_path, cot=file, system="Use {braces} as {} you like, {{twice}}.")
    data = {"default": {"prompt_file": "prompts/cot.txt", "system_prompt_file": "prompts/system.txt"}}
    imported = import_recipe(write(tmp_path, merged({"data": data})))
    train = loaded(tmp_path, imported).data.train
    assert train.prompt_template == ours
    [message] = prompt_messages("1+{input}", prompt_template=train.prompt_template)
    assert message.content == file.format("1+{input}")
    assert train.system_prompt == "Use {braces} as {} you like, {{twice}}." and not imported.problems


@pytest.mark.parametrize(
    ("file", "why"),
    [
        ("Solve {problem}", "got {problem}"),
        ("Solve {0.__class__}", "got {0.__class__}"),
        ("Solve {0[0]}", "got {0[0]}"),
        ("Solve {!r}", "got {!r}"),
        ("Solve {:>9}", "got {:>9}"),
        ("Solve {1}", "got {1}"),
        ("Solve {} and {}", "several {}"),
        ("Solve it", "has no {}"),
        ("Solve {} }", "no template of str.format"),
        ("Solve {} with {{input}}", "holds the text {input}"),
        (None, "cot.txt is not here"),
    ],
)
def test_prompt_files_that_cannot_be_filled_are_left_to_somebody(file: str | None, why: str, tmp_path: Path) -> None:
    if file is not None:
        texts(tmp_path, cot=file)
    path = write(tmp_path, merged({"data": {"default": {"prompt_file": "prompts/cot.txt"}}}))
    [problem] = import_recipe(path).problems
    assert problem.startswith("data.default.prompt_file: not supported") and why in problem


def test_several_data_sets_become_sources_with_rewards_of_their_own(tmp_path: Path) -> None:
    train = [{"data_path": "a.jsonl"}, {"dataset_name": "Code 2", "env_name": "code"}, {"data_path": "b/a.jsonl"}]
    held_out = [{"data_path": "v.jsonl"}, {"name": "hard", "data_path": "h.jsonl", "env_name": "code"}]
    changes = {"data": {"train": train, "validation": held_out}, "checkpointing": {"metric_name": "val:reward"}}
    found = import_recipe(write(tmp_path, merged(changes)))
    assert not found.problems
    data = found.tree["data"]
    assert list(data["train"]) == ["a", "Code-2", "a-2"] and data["mixture"] == {"by": "size"}
    assert data["train"]["a"]["data_path"] == "a.jsonl" and data["train"]["a-2"]["data_path"] == "b/a.jsonl"
    assert "env" not in data["train"]["a"] and data["train"]["Code-2"]["env"]["name"] == "custom"
    assert data["validation"]["data_path"] == "v.jsonl" and "env" not in data["validation"]
    assert data["validation_sets"]["hard"]["env"]["reward_function"] == "my_rewards:score"


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"env": {"math": {"verifier_type": "mcq"}}}, "env.math.verifier_type"),
        ({"env": {"math": {"stop": {"words": ["x"]}}}}, "env.math.stop.words"),
        ({"data": {"train": {"processor": "helpsteer3_data_processor"}}}, "data.train.processor"),
        ({"data": {"processor": "vlm_hf_data_processor"}}, "data.processor"),
        ({"data": {"train": {"split": "dapo"}}}, "data.train.split"),
        ({"data": {"train": {"subset": "hard"}}}, "data.train.subset"),
        ({"use_peft": True, "use_dora": True}, "use_dora"),
        ({"policy": {"generation": {"min_p": 0.05}}}, "policy.generation.min_p"),
        ({"policy": {"generation": {"vllm_kwargs": {"hf_overrides": {"a": 1}}}}}, "vllm_kwargs.hf_overrides"),
        ({"policy": {"reward_model_cfg": {"enabled": True}}}, "policy.reward_model_cfg.enabled"),
        ({"dpo": {"beta": 0.1}}, "dpo.beta"),
    ],
)
def test_a_key_without_which_something_else_is_trained_ends_the_import_with_2(changes, key, tmp_path):
    path = write(tmp_path, merged(changes))
    done = CliRunner().invoke(app, ["config", "import", str(path), "--out", str(tmp_path / "ours.yaml")])
    assert isinstance(done.exception, ConfigError) and f"{key}: not supported" in str(done.exception)


@pytest.mark.parametrize(
    ("key", "value", "decides"),
    [
        ("loss_fn.ratio_clip_by_entropy", 0.1, True),
        ("grpo.adv_estimator.length_baseline", True, True),
        ("grpo.adv_estimator.length_baseline", False, False),
        ("algorithm.use_kl_in_reward", True, True),
        ("loss_type", "dr_grpo", True),
        ("trainer.project_name", "mine", False),
    ],
)
def test_an_unknown_key_of_the_loss_or_the_algorithm_must_be_decided(key, value, decides, tmp_path):
    section, _, name = key.rpartition(".")
    changes: dict[str, Any] = {name: value}
    for part in reversed(section.split(".") if section else []):
        changes = {part: changes}
    imported = import_recipe(write(tmp_path, merged(changes)))
    said = [problem for problem in imported.problems if problem.startswith(f"{key}: unknown: no key of NeMo-RL's")]
    assert bool(said) == decides and all("change it, or leave it out, in" in line for line in said)


def test_switches_that_are_off_there_and_sections_that_nothing_names_are_no_problem(tmp_path: Path) -> None:
    changes = {
        "env": {"math": {"num_workers": 4, "verifier_type": "math"}, "code": {"num_workers": 2}},
        "data": {"default": {"processor": "math_hf_data_processor"}},
        "policy": {
            "dtensor_cfg": {"enabled": True, "lora_cfg": {"enabled": False, "dim": 8}},
            "megatron_cfg": {"enabled": False, "peft": {"enabled": True}, "optimizer": {"clip_grad": 9.0}},
            "max_grad_norm": 0.5,
            "generation": {"min_p": 0.0, "repetition_penalty": 1.0},
        },
    }
    imported = import_recipe(write(tmp_path, merged(changes)))
    assert imported.problems == () and fates_of(imported, "env.code.num_workers") == {Fate.IGNORED}
    config = loaded(tmp_path, imported)
    assert config.env.num_workers == 4 and config.policy.max_grad_norm == 0.5


OWN_GPUS = {
    "cluster": {"gpus_per_node": 2, "num_nodes": 1},
    "policy": {"generation": {"colocated": {"enabled": False, "resources": {"gpus_per_node": 1, "num_nodes": None}}}},
}
CORRECTED = {"loss_fn": {"use_importance_sampling_correction": True}}
AGE = "max_trajectory_age_steps"


@pytest.mark.parametrize(
    ("theirs", "ours", "in_flight"),
    [
        ({"grpo": {"async_grpo": {"enabled": True, AGE: 1}}}, {"max_staleness": 1, "lookahead": None}, "drain"),
        (
            {"grpo": {"async_grpo": {"enabled": True, AGE: 4, "in_flight_weight_updates": True}}},
            {"max_staleness": 4, "lookahead": 4, "selection": "oldest_first"},
            "keep",
        ),
        (
            {
                "grpo": {
                    "async_grpo": {
                        **{"enabled": True, AGE: 2, "in_flight_weight_updates": True},
                        "recompute_kv_cache_after_weight_updates": True,
                    }
                }
            },
            {"max_staleness": 2, "lookahead": 2},
            "recompute",
        ),
        (
            {"async_rl": {"sampler": {"name": "in_order", "max_lookahead_versions": 3}}},
            {"max_staleness": 3, "lookahead": 3, "selection": "in_order"},
            "keep",
        ),
        (
            {
                "async_rl": {
                    **{"sampler": {"name": "windowed", "max_staleness_versions": 2}},
                    "recompute_kv_cache_after_weight_updates": True,
                }
            },
            {"max_staleness": 2, "lookahead": 2, "selection": "oldest_first", "overdue": "drop"},
            "recompute",
        ),
        ({"async_rl": {"sampler": {"name": "weight_fifo"}}}, {"max_staleness": 1, "selection": "oldest_first"}, "keep"),
        ({"async_rl": {"sampler": {"name": "ready_first"}}}, {"max_staleness": 1, "selection": "ready_first"}, "keep"),
    ],
)
def test_asynchronous_recipes_keep_their_bound_and_what_they_do_with_running_rows(theirs, ours, in_flight, tmp_path):
    imported = import_recipe(write(tmp_path, merged(theirs, merged(CORRECTED, merged(OWN_GPUS)))))
    assert imported.problems == ()
    config = loaded(tmp_path, imported)
    assert config.grpo.async_.enabled and config.policy.generation.in_flight == in_flight
    assert {name: getattr(config.grpo.async_, name) for name in ours} == ours


def test_an_asynchronous_trainer_that_is_off_leaves_no_keys(tmp_path: Path) -> None:
    section = {"enabled": False, AGE: 4, "in_flight_weight_updates": True}
    imported = import_recipe(write(tmp_path, merged({"grpo": {"async_grpo": section}})))
    assert imported.problems == () and imported.tree["grpo"]["async"] == {"enabled": False}
    assert fates_of(imported, f"grpo.async_grpo.{AGE}") == {Fate.IGNORED}


def test_an_asynchronous_recipe_without_a_correction_is_left_to_somebody(tmp_path: Path) -> None:
    theirs = {"async_rl": {"sampler": {"name": "custom", "target": "a.b:C"}}}
    imported = import_recipe(write(tmp_path, merged(theirs, merged(OWN_GPUS))))
    assert any(problem.startswith("loss_fn.use_importance_sampling") for problem in imported.problems)
    assert fates_of(imported, "async_rl.sampler.target") == {Fate.NOT_SUPPORTED}


@pytest.mark.parametrize(
    ("nodes", "resources", "workers", "engines"),
    [(1, {"gpus_per_node": 2}, 6, 2), (4, {"num_nodes": 1}, 24, 8), (4, {"num_nodes": 3, "gpus_per_node": 8}, 8, 24)],
)
def test_gpus_of_engines_are_taken_out_of_those_of_the_workers(nodes, resources, workers, engines, tmp_path):
    changes = {
        "cluster": {"gpus_per_node": 8, "num_nodes": nodes},
        "policy": {"train_global_batch_size": 96, "generation": {"colocated": {"enabled": False}}},
        "grpo": {"num_prompts_per_step": 24},
    }
    changes["policy"]["generation"]["colocated"]["resources"] = resources
    config = loaded(tmp_path, import_recipe(write(tmp_path, merged(changes))))
    assert (config.cluster.num_workers, config.policy.generation.num_replicas) == (workers, engines)


@pytest.mark.parametrize(("gpus", "experts"), [(0, 1), (8, 2)])
def test_vllm_stays_vllm_with_its_settings(gpus: int, experts: int, tmp_path: Path) -> None:
    cfg = {
        "tensor_parallel_size": 2,
        "expert_parallel_size": experts,
        "gpu_memory_utilization": 0.4,
        "enforce_eager": True,
        "max_model_len": 512,
    }
    kwargs = {"enable_prefix_caching": False, "compilation_config": {"level": 0}, "speculative_config": {"x": 1}}
    generation = {"backend": "vllm", "vllm_cfg": cfg, "vllm_kwargs": kwargs}
    changes = {"policy": {"generation": generation}, "cluster": {"gpus_per_node": gpus}}
    imported = import_recipe(write(tmp_path, merged(changes)))
    ours = loaded(tmp_path, imported).policy.generation
    assert ours.backend == "vllm" and ours.vllm_cfg.tensor_parallel_size == 2
    assert ours.vllm_cfg.enable_expert_parallel == (experts > 1) and ours.num_replicas == (4 if gpus else 1)
    assert (ours.vllm_cfg.gpu_memory_utilization, ours.vllm_cfg.enforce_eager) == (0.4, True)
    assert not ours.vllm_cfg.enable_prefix_caching and ours.vllm_kwargs == {"compilation_config": {"level": 0}}
    named = {outcome.key for outcome in imported.of(Fate.NOT_SUPPORTED)}
    assert "policy.generation.vllm_kwargs.speculative_config" in named
    assert "policy.generation.vllm_cfg.tensor_parallel_size" not in named


@pytest.mark.parametrize("key", ["policy.model_name", "grpo.seed"])
def test_a_value_that_must_be_set_ends_the_import_with_2(key: str, tmp_path: Path) -> None:
    section, name = key.split(".")
    path = write(tmp_path, merged({section: {name: "???"}}))
    done = CliRunner().invoke(app, ["config", "import", str(path), "--out", str(tmp_path / "ours.yaml")])
    assert isinstance(done.exception, ConfigError) and f"{key}: must be set" in str(done.exception)


TEXTS = [
    *("1e3", "2E-4", "0o7", "1_000", "0x1F", "+5", ".5", ".inf", "yes", "No", "null", "~", "", " a ", "2024-01-02"),
    *("12:30", "a: b", "- x", "*x", "&x", "!x", "<<", "=", "#x", "a #b", "---", "...", "{a}", "[a", "'", '"', "%x"),
    *(
        "a\nb: 1",
        "\n",
        "tab\t",
        "bell\x07",
        "\x85",
        "\u2028",
        "\ufeffx",
        "caf\u00e9",
        "\U0001f600",
        ":rocket:",
        "`",
        "@",
    ),
]


@pytest.mark.parametrize("text", TEXTS)
def test_texts_stay_texts_as_values_and_as_names(text: str, tmp_path: Path) -> None:
    changes = {
        "policy": {"optimizer": {"name": "torch.optim.AdamW", "kwargs": {text: 1.0, "lr": 1e-6}}},
        "logger": {"wandb_enabled": True, "wandb": {"name": text}},
    }
    imported = import_recipe(write(tmp_path, merged(changes)))
    config = loaded(tmp_path, imported)
    assert config.policy.optimizer.kwargs == {text: 1.0, "lr": 1e-6} and config.logger.wandb.name == text
    # Readers of YAML 1.1 see the same.
    assert yaml.safe_load((tmp_path / "ours.yaml").read_text())["logger"]["wandb"]["name"] == text


@pytest.mark.parametrize("name", ["a\ngrpo:\n  seed: 5\n.yaml", "b\x85policy: {}\x07.yaml", "c # d.yaml"])
def test_the_name_of_a_file_stays_in_its_comment(name: str, tmp_path: Path) -> None:
    config = loaded(tmp_path, import_recipe(write(tmp_path, merged({"grpo": {"seed": 7}}), name)))
    assert config.grpo.seed == 7


@settings(deadline=None)
@given(
    st.dictionaries(st.text(max_size=8), st.text() | st.integers(-(2**63) + 1, 2**63 - 1) | st.booleans() | st.none())
)
def test_what_is_written_reads_the_same(values: dict[str, Any]) -> None:
    if all(text_problem(text) is None for pair in values.items() for text in pair if isinstance(text, str)):
        assert parse_yaml(yaml_line(values)) == values


def test_lists_of_files_of_verl_become_sources_that_are_drawn_by_size(tmp_path: Path) -> None:
    files = ["data/gsm8k/train.parquet", "data/math/train.parquet", "data/extra.jsonl"]
    data = {
        "train_files": files,
        "val_files": ["data/gsm8k/test.parquet", "data/aime.parquet"],
        "prompt_key": "messages",
    }
    longer = merged({"policy": {"max_total_sequence_length": 2048}})
    base = {name: section for name, section in longer.items() if name != "data"}
    imported = import_recipe(write(tmp_path, {**base, "data": data}))
    config = loaded(tmp_path, imported).data
    assert {name: str(source.data_path) for name, source in config.train.named.items()} == dict(
        zip(["gsm8k", "math", "extra"], files, strict=True)
    )
    assert [source.dataset_name for source in config.train.named.values()] == ["huggingface"] * 2 + ["jsonl"]
    assert {source.input_key for source in config.sections.values()} == {"messages"}
    assert {source.output_key for source in config.sections.values()} == {"reward_model.ground_truth"}
    assert config.mixture.by == "size" and list(config.held_out) == ["validation", "aime"]
    assert Fate.NOT_SUPPORTED in fates_of(imported, "data.train_files"), "the reward by data_source is named"
    one = loaded(tmp_path, import_recipe(write(tmp_path, {**base, "data": {"train_files": files[0]}})))
    assert str(one.data.train.data_path) == files[0] and one.data.validation is None and one.grpo.val_period == 0


def test_sources_of_prime_rl_keep_names_shares_group_sizes_and_limits(tmp_path: Path) -> None:
    text = """
[model]
name = "m"
[orchestrator]
group_size = 8
[[orchestrator.train.source]]
name = "math"
ratio = 3.0
env = {id = "org/math-env"}
sampling = {stop = ["###"], temperature = 0.7}
[[orchestrator.train.source]]
name = "code"
env = {id = "code-env"}
group_size = 4
sampling = {max_completion_tokens = 64}
algo = {type = "sft"}
[[orchestrator.train.source]]
env = {id = "org/math-env"}
sampling = {max_completion_tokens = 32}
"""
    (tmp_path / "rl.toml").write_text(text)
    imported = import_recipe(tmp_path / "rl.toml")
    train, grpo = imported.tree["data"]["train"], imported.tree["grpo"]
    assert set(train) == {"math", "code", "org-math-env"}
    assert grpo["num_generations_per_prompt"] == 8 and train["code"]["num_generations_per_prompt"] == 4
    assert "num_generations_per_prompt" not in train["math"] and train["math"]["weight"] == 3.0
    assert imported.tree["policy"]["generation"]["max_new_tokens"] == 64
    assert train["org-math-env"]["max_new_tokens"] == 32 and train["math"]["stop_strings"] == ["###"]
    assert train["code"]["env"] == {"name": "custom", "reward_function": "my_rewards:score"}
    named = {outcome.key for outcome in imported.of(Fate.NOT_SUPPORTED)}
    source = "orchestrator.train.source"
    assert {f"{source}.0.sampling.temperature", f"{source}.1.algo", f"{source}.0.env"} <= named
    assert any(f"{source}.1.algo" in problem for problem in imported.problems)
