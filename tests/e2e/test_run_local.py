"""Whole runs in one process: what is written, what is deterministic, what a failing stage leaves behind."""

from __future__ import annotations

import io
import os
from pathlib import Path
from pkgutil import resolve_name

import pytest
from rich.console import Console
from safetensors.torch import load_file

from nemo_rl.algorithms.grpo import EQUAL
from nemo_rl.algorithms.grpo_sync import GRPOTrainer
from nemo_rl.algorithms.run import run
from nemo_rl.algorithms.setup import open_parts, open_trainer
from nemo_rl.algorithms.stages.bodies import NOT_TRAINED
from nemo_rl.errors import RewardError, WorkerError
from nemo_rl.utils.rollout_file import rollout_path
from nemo_rl.utils.run_lock import outcome_of
from nemo_rl_tools.rollouts.row import read_rows
from tests.helpers.runs import LOCAL, load_recipe, logged_steps, rollouts_of, validated_rollouts_of, write_recipe

GRPO = {"num_prompts_per_step": 4, "num_generations_per_prompt": 4, "max_num_steps": 3, "val_period": 0, "seed": 5}
SAVE_EVERY_STEP = {"enabled": True, "save_period": 1, "keep_top_k": None}


def train(recipe: Path, overrides: dict[str, str] | None = None) -> tuple[list[dict[str, float]], str]:
    config = load_recipe(recipe, {**LOCAL, **(overrides or {})})
    text = io.StringIO()
    run(config, console=Console(file=text, width=200, markup=False, highlight=False))
    return logged_steps(config.logger.log_dir), text.getvalue()


def learning(row: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in row.items() if not name.startswith("data_plane/")}


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory, model: Path) -> list[dict[str, float]]:
    """Steps of the small recipe as it is."""
    return train(write_recipe(tmp_path_factory.mktemp("usual"), model))[0]


def test_a_run_writes_everything_it_names_and_leaves_no_row(tmp_path, model):
    recipe = write_recipe(
        tmp_path,
        model,
        data={
            "train": {"dataset_name": "sort_digits", "size": 64, "seed": 1},
            "validation": {"dataset_name": "sort_digits", "size": 8, "seed": 2},
        },
        grpo={**GRPO, "val_at_start": True, "val_at_end": True},
        checkpointing={"enabled": True, "checkpoint_dir": str(tmp_path / "ck"), "save_period": 2},
        logger={"tensorboard_enabled": True, "reward_curve": True, "num_rollouts_to_log": 3},
    )
    rows, text = train(recipe)
    logs = tmp_path / "logs"
    steps = [row for row in rows if "train/reward" in row]
    assert [row["step"] for row in steps] == [1, 2, 3]
    assert all(row["data_plane/live_rows"] == 0 for row in steps)
    for row in steps:
        parts = row["train/actor_loss"] + row["train/kl_penalty"]
        assert row["train/loss"] == pytest.approx(parts, rel=1e-4, abs=1e-7), "the loss is the sum of its parts"
    assert "validation reward" in text and "in 3 steps" in text, "a graded reward is no accuracy"
    assert not any("val/accuracy" in row for row in rows) and sum("val/reward" in row for row in rows) == 2
    for path in (logs / "config.yaml", logs / "reward_curve.png", tmp_path / "ck" / "step_3" / "training_info.json"):
        assert path.is_file() and str(path.parent) in text
    assert list((logs / "tensorboard").glob("events*"))
    samples = rollouts_of(logs, 2)
    assert len(samples) == 3
    about_any = {"prompt", "response", "reward", "response_tokens", "truncated", "finish_reason"}
    of_training = {"key", "group", "advantage", "sample_mask", "no_weight", "weight_version", "no_prev_logprobs"}
    of_training |= {"number", "answer", "messages"}
    of_tokens = {"token_ids", "token_texts", "token_mask", "generation_logprobs", "prev_logprobs"}
    assert set(samples[0]) == about_any | of_training | of_tokens and next(iter(samples[0])) == "key"
    for row in read_rows(rollout_path(logs, 2)):
        assert row.tokens is not None and row.no_prev_logprobs is None and row.weight_version == 1
        [asked] = row.messages
        assert asked.who == "user" and asked.text in row.prompt
        assert asked.text.startswith("sort ") and row.answer == "".join(sorted(asked.text.removeprefix("sort ")))
        assert "".join(row.tokens.texts[row.tokens.num_prompt :]) == row.response
        assert len(row.tokens.differences()) == sum(row.tokens.mask) == row.response_tokens
        assert max(map(abs, row.tokens.differences())) < 1e-4, "one model in fp32, asked in two ways"
    for step in (0, 3):
        validated = validated_rollouts_of(logs, step)
        assert len(validated) == 3 and set(validated[0]) == about_any | {"set", "number", "sample", "greedy"}
        assert "sort" in validated[0]["prompt"]
    assert "sort" in samples[0]["prompt"]
    ended = outcome_of(logs, step=3, num_steps=3)
    assert (ended.state, ended.cause) == ("ended", "") and ended.seconds > 0


@pytest.mark.slow
def test_the_same_seed_gives_the_same_numbers_and_another_seed_others(tmp_path, model, usual):
    again, _ = train(write_recipe(tmp_path / "b", model))
    other, _ = train(write_recipe(tmp_path / "c", model), {"grpo.seed": "6"})
    assert usual == again
    assert [row["train/loss"] for row in usual] != [row["train/loss"] for row in other]
    assert all(row["train/grad_norm"] > 0 for row in usual)


@pytest.mark.slow
def test_the_ledger_behind_a_socket_gives_the_same_numbers(tmp_path, model, usual):
    socket, _ = train(write_recipe(tmp_path / "b", model), {"data_plane.ledger_host": "socket"})
    assert usual == socket


@pytest.mark.slow
def test_every_way_of_batching_trains_alike_and_says_how_well_it_packed(tmp_path, model):
    off, caps = {"dynamic_batching": {"enabled": False}}, {"train_mb_tokens": 96, "logprob_mb_tokens": 160}
    ways = {
        "padded": {"dynamic_batching": {"enabled": True, **caps, "microbatch_order": "largest_first"}},
        "fixed": {**off, "train_micro_batch_size": 16},
        # As `auto` decides.
        "packed": {**off, "sequence_packing": caps},
        "concatenated": {**off, "sequence_packing": {"enabled": True, **caps, "algorithm": "concatenative"}},
    }
    base = {"model_name": str(model), "precision": "float32", "train_global_batch_size": 16}
    base |= {"max_total_sequence_length": 32, "generation": {"max_new_tokens": 6}}
    steps = {name: train(write_recipe(tmp_path / name, model, policy={**base, **way}))[0] for name, way in ways.items()}
    for name, rows in steps.items():
        for row, packed in zip(rows, steps["packed"], strict=True):
            assert row["train/loss"] == pytest.approx(packed["train/loss"], rel=1e-4, abs=1e-6), name
            assert row["train/grad_norm"] == pytest.approx(packed["train/grad_norm"], rel=1e-4), name
            for stage in ("train", "logprob"):
                # One rank: without padding nothing is above the lower bound.
                at_best = row[f"{stage}/pack_pad_share"] == 0
                assert (row[f"{stage}/pack_imbalance"] == pytest.approx(1)) is at_best, (name, stage)
                assert row[f"{stage}/pack_bins"] >= row[f"{stage}/pack_bins_bound"] >= 1
    padding = {name: sum(row["train/pack_pad_share"] for row in rows) for name, rows in steps.items()}
    assert padding["packed"] == padding["concatenated"] == 0
    assert padding["padded"] < padding["fixed"], "microbatches of rows of similar length"
    assert all(row["logprob/pack_bins"] < row["train/pack_bins"] for row in steps["packed"]), "its own cap"


@pytest.mark.slow
def test_a_learning_rate_of_zero_changes_no_weight(tmp_path, model):
    recipe = write_recipe(tmp_path, model, checkpointing={**SAVE_EVERY_STEP, "checkpoint_dir": str(tmp_path / "ck")})
    rows, _ = train(recipe, {"policy.optimizer.kwargs.lr": "0"})
    assert rows[-1]["train/grad_norm"] > 0
    saved = sorted((tmp_path / "ck" / "step_3" / "policy" / "weights").glob("*.safetensors"))
    before = load_file(model / "model.safetensors")
    after = {name: tensor for path in saved for name, tensor in load_file(path).items()}
    assert set(before) == set(after)
    assert all(bool((before[name] == after[name]).all()) for name in before)


def test_a_step_without_any_signal_runs_no_stage_of_the_update(tmp_path, model):
    recipe = write_recipe(tmp_path, model, env={"reward_function": "tests.helpers.rewards:indifferent"})
    config = load_recipe(recipe, {**LOCAL, "loss_fn.reference_policy_kl_penalty": "0"})
    with open_trainer(config, console=Console(file=io.StringIO())) as trainer:
        trainer.open_run()
        step = trainer.step()
        assert step.chosen is None and step.train is None and list(step.stage_seconds) == ["rollout", "score", "log"]
        assert step.untrained_keys == step.keys and trainer.data_plane_stats()["live_rows"] == 0
    rows = read_rows(rollout_path(tmp_path / "logs", 1))
    assert {(row.sample_mask, row.no_prev_logprobs) for row in rows} == {(0.0, NOT_TRAINED.format(why=EQUAL))}
    assert {row.left_out for row in rows} == {f"not trained ({EQUAL})"}


def test_a_stage_that_raises_leaves_no_live_row(tmp_path, model):
    explode = {"reward_function": "tests.helpers.rewards:explode", "preflight_reward": False}
    recipe = write_recipe(tmp_path, model, env=explode)
    config = load_recipe(recipe, LOCAL)
    with open_trainer(config, console=Console(file=io.StringIO())) as trainer:
        trainer.open_run()
        with pytest.raises(RewardError, match=r"explode.*this reward always fails"):
            trainer.step()
        assert trainer.data_plane_stats()["live_rows"] == 0


# Where a stage fails -> the work that it has done by then: rows are alive, and its own column is or is not written.
FAILURES = {
    "rollout, after its put": "nemo_rl.experience.rollout_worker.kv_first_write",
    "previous log-probabilities": "nemo_rl.models.policy.workers.passes.Passes.get_logprobs",
    "advantages, after their put": "nemo_rl.algorithms.stages.bodies.write_columns",
    "training": "nemo_rl.models.policy.workers.passes.Passes.train",
    "log": "nemo_rl.experience.rollout_worker.RolloutWorker.log_rollouts",
}


@pytest.mark.slow
@pytest.mark.parametrize("stage", FAILURES)
def test_a_stage_that_raises_behind_the_first_put_leaves_no_live_row(tmp_path, model, monkeypatch, stage):
    config, live = load_recipe(write_recipe(tmp_path, model), LOCAL), []
    with open_trainer(config, console=Console(file=io.StringIO())) as trainer:
        work = resolve_name(FAILURES[stage])

        def fail(*args: object, **kwargs: object) -> None:
            work(*args, **kwargs)
            live.append(trainer.data_plane_stats()["live_rows"])
            raise ValueError("planted")

        # A worker is called by the name of the method.
        fail.__name__ = work.__name__
        monkeypatch.setattr(FAILURES[stage], fail)
        with pytest.raises((ValueError, WorkerError), match="planted"):
            trainer.fit()
        assert live == [16], "the stage fails once, when all rows of the step are alive"
        assert trainer.data_plane_stats()["live_rows"] == 0


def test_only_the_clearing_is_booked_as_clear(tmp_path, model, monkeypatch):
    config = load_recipe(write_recipe(tmp_path, model), LOCAL)
    with open_parts(config, console=Console(file=io.StringIO())) as parts:
        for name in (FAILURES["rollout, after its put"], FAILURES["training"], FAILURES["log"]):
            work = resolve_name(name)

            def look(*args: object, work=work, **kwargs: object) -> object:
                parts.client.stats()
                return work(*args, **kwargs)

            look.__name__ = work.__name__
            monkeypatch.setattr(name, look)
        trainer = GRPOTrainer(parts)
        trainer.open_run()
        parts.client.snapshot(reset=True)
        trainer.step()
        stages = parts.client.snapshot().stages
    assert {name: set(calls) for name, calls in stages.items()} == {
        "rollout": {"stats"},
        "advantages": {"kv_batch_put"},
        "train": {"stats"},
        "log": {"stats"},
        "clear": {"kv_clear", "row_owners"},
    }


@pytest.mark.slow
def test_resuming_continues_with_the_same_prompts_and_losses(tmp_path, model):
    checkpoints = {**SAVE_EVERY_STEP, "checkpoint_dir": str(tmp_path / "ck")}
    whole, _ = train(write_recipe(tmp_path / "whole", model, checkpointing=checkpoints), {"grpo.max_num_steps": "4"})
    for step in (3, 4):
        (tmp_path / "ck" / f"step_{step}").rename(tmp_path / f"later_{step}")
    os.unlink(tmp_path / "ck" / "latest")
    rest, _ = train(
        write_recipe(tmp_path / "rest", model, checkpointing=checkpoints),
        {"grpo.max_num_steps": "4", "checkpointing.resume": "true"},
    )
    assert [row["step"] for row in rest] == [3, 4]
    for ours, theirs in zip(rest, whole[2:], strict=True):
        assert ours["train/loss"] == pytest.approx(theirs["train/loss"], abs=1e-6)
        assert learning(ours) == learning(theirs)
    for step in (3, 4):
        whole_rows = rollouts_of(tmp_path / "whole" / "logs", step)
        rest_rows = rollouts_of(tmp_path / "rest" / "logs", step)
        assert [(r["prompt"], r["response"]) for r in whole_rows] == [(r["prompt"], r["response"]) for r in rest_rows]
