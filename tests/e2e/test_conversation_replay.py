"""Kept steps of runs with conversations, replayed: the update, and every turn with the replies that were recorded."""

from __future__ import annotations

import asyncio
import io
import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from rich.console import Console

from nemo_rl.algorithms.kept_steps.folder import CONVERSATION_FILE, StepsFolder
from nemo_rl.algorithms.run import run
from nemo_rl.data.tokenizer import build_tokenizer
from nemo_rl.utils.checkpoint import Manifest
from nemo_rl_tools.conversation_replay import replay_conversations
from nemo_rl_tools.step_replay.chain import ReplayProblem, ReplayRequest
from nemo_rl_tools.step_replay.replay import replay_step
from nemo_rl_tools.verdict import Verdict
from tests.helpers.case_selection import params
from tests.helpers.chat_templates import QWEN3
from tests.helpers.runs import LOCAL, load_recipe, rollouts_of, write_recipe
from tests.helpers.tiny_model import tiny_model, write_tiny_folder

CORPUS = ["user\nassistant\nturn 0 turn 1 turn 2 guess 1 to 9 <think> </think>"] * 3
CONVERSATIONS = {
    "experience.conversation.enabled": "true",
    "diagnostics.keep_steps.enabled": "true",
    "grpo.max_num_steps": "2",
    "policy.max_total_sequence_length": "96",
    "policy.train_global_batch_size": "16",
    "policy.generation.batch_invariant": "true",
    "policy.dynamic_batching.train_mb_tokens": "512",
    "policy.dynamic_batching.logprob_mb_tokens": "512",
    "env.num_workers": "1",
}
COUNTING = {"env.name": "tests.helpers.failing_environments:Counting", "env.reward_function": "null"}


def train(folder: Path, overrides: dict[str, str], *, with_thoughts: bool = False) -> Path:
    """Return the log folder of a run of two steps.

    Args:
        with_thoughts: many turns have some, which the template strips from earlier turns.
    """
    model = folder / "model"
    if with_thoughts:
        tokenizer, tiny = build_tokenizer(CORPUS, chat_template=QWEN3), tiny_model()
        [end] = tokenizer.encode("</think>")
        with torch.no_grad():
            tiny.get_input_embeddings().weight[end] *= 3
        tiny.save_pretrained(str(model))
        tokenizer.save_pretrained(str(model))
    else:
        write_tiny_folder(model)
    config = load_recipe(write_recipe(folder, model), {**LOCAL, **CONVERSATIONS, **COUNTING, **overrides})
    run(config, console=Console(file=io.StringIO()))
    return config.logger.log_dir


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in which a fifth of the conversations is left out."""
    folder = tmp_path_factory.mktemp("kept")
    failing = json.dumps({"folder": str(folder), "failing": 100, "turns": 3})
    return train(folder, {"env.options": failing, "experience.conversation.retries": "0"})


def sign(folder: Path) -> None:
    """Write the manifest of a step that was changed."""
    (folder / "manifest.json").unlink()
    Manifest.write(folder)


ESTIMATORS = ("grpo", "outcome_plus_turn", "discounted_return")
TRAINED = [(estimator, history) for estimator in ESTIMATORS for history in ("append", "new_row")]
USUAL = [("grpo", "append"), ("outcome_plus_turn", "new_row"), ("discounted_return", "new_row")]


@pytest.mark.parametrize("case", params(TRAINED, USUAL), ids="-".join)
def test_a_step_with_conversations_is_trained_again_to_the_last_bit(tmp_path: Path, case: tuple[str, str]) -> None:
    estimator, history = case
    options = json.dumps({"folder": str(tmp_path), "failing": 100, "turns": 3})
    overrides = {
        "env.options": options,
        "experience.conversation.retries": "0",
        "grpo.adv_estimator.name": estimator,
        "data.history": history,
    }
    log_dir = train(tmp_path, overrides, with_thoughts=history == "new_row")
    report = replay_step(ReplayRequest(run=log_dir, step=2))
    assert report.verdict is Verdict.PASS, list(report.lines())
    assert not any(site.difference for site in report.sites)
    rows = StepsFolder(log_dir).all()[0].read().rows
    assert rows is not None and rows.conversations is not None
    assert {*rows.conversations["is_scored"]} == {True, False}
    assert (len(rows.keys) > 16) == (history == "new_row")
    assert "env_error" in rows.conversations["endings"] and "environment_done" in rows.conversations["endings"]


@pytest.mark.parametrize("num_engines", [1, 2])
def test_conversations_are_sampled_again_to_the_last_bit_in_any_order_of_replies(kept: Path, num_engines: int) -> None:
    draws = random.Random(num_engines)

    async def pause() -> None:
        await asyncio.sleep(draws.random() * 0.05)

    for step in (1, 2):
        report = replay_conversations(ReplayRequest(run=kept, step=step), num_engines=num_engines, pause=pause)
        assert report.verdict is Verdict.PASS, list(report.lines())
        assert report.facts["largest"] == 0.0 and not report.inexact
        assert report.facts["num_compared"] == report.facts["num_turns"] > 30


def test_a_reply_that_was_changed_is_named(tmp_path: Path, kept: Path) -> None:
    log_dir = Path(shutil.copytree(kept, tmp_path / "logs"))
    folder = log_dir / "steps" / "step_1"
    path = folder / CONVERSATION_FILE
    header, first, *others = path.read_text().splitlines()
    line = json.loads(first)
    line["turns"][0]["messages"][0]["content"] = "turn 7"
    path.write_text("\n".join([header, json.dumps(line), *others]) + "\n")
    with pytest.raises(ReplayProblem, match=CONVERSATION_FILE):
        replay_conversations(ReplayRequest(run=log_dir, step=1))
    sign(folder)
    report = replay_conversations(ReplayRequest(run=log_dir, step=1))
    assert report.verdict is Verdict.MISMATCH
    [found] = [site for site in report.sites if site.agrees is False]
    assert found.name == line["key"] and found.difference.startswith("turn 1: ")
    assert all(said in found.difference for said in ("which it read: expected", "'0' as kept", "'7'"))


def test_weights_of_another_run_are_named_by_the_first_token(tmp_path: Path, kept: Path) -> None:
    log_dir = Path(shutil.copytree(kept, tmp_path / "logs"))
    path = log_dir / "steps" / "step_2" / "step.json"
    record = json.loads(path.read_text())
    record["rows"]["tags"]["weight_version"] = [0] * len(record["rows"]["keys"])
    path.write_text(json.dumps(record))
    sign(path.parent)
    report = replay_conversations(ReplayRequest(run=log_dir, step=2))
    assert report.verdict is Verdict.MISMATCH and "sampled: expected" in report.first.difference


def test_a_run_without_batch_invariance_is_compared_to_rounding_and_says_so(tmp_path: Path) -> None:
    log_dir = train(tmp_path, {"policy.generation.batch_invariant": "false", "env.options": "{turns: 2}"})
    report = replay_conversations(ReplayRequest(run=log_dir, step=2))
    assert report.verdict is Verdict.PASS and report.facts["largest"] < 1e-4
    assert any("policy.generation.batch_invariant is false" in line for line in report.lines())


def test_readable_rollouts_have_turns_replies_and_causes(kept: Path) -> None:
    rows = rollouts_of(kept, 1)
    whole = next(row for row in rows if row["finish_reason"] == "environment_done")
    assert [turn["messages"][0]["content"] for turn in whole["turns"][:2]] == ["turn 0", "turn 1"]
    assert whole["turns"][0]["reward"] == 0.5 and whole["turns"][0]["sampled_s"] > 0 and not whole.get("left_out")
    lost = next(row for row in rows if row["finish_reason"] == "env_error")
    assert lost["left_out"] and "the backend is away" in lost["cause"]


@pytest.mark.slow
@pytest.mark.parametrize("in_flight", [pytest.param("drain", marks=pytest.mark.full), "recompute"])
def test_turns_of_an_asynchronous_run_are_sampled_again_from_their_own_weights(tmp_path: Path, in_flight: str) -> None:
    changes = {
        "grpo.async.enabled": "true",
        "grpo.async.max_staleness": "2",
        "grpo.async.lookahead": "2",
        "grpo.use_generation_logprobs_as_prev": "false",
        "loss_fn.use_importance_sampling_correction": "true",
        "loss_fn.truncated_importance_sampling_type": "tis",
        "loss_fn.truncated_importance_sampling_ratio": "2.0",
        "policy.generation.in_flight": in_flight,
        "policy.generation.max_batch_size": "4",
        "grpo.max_num_steps": "4",
        "env.options": "{turns: 5}",
    }
    log_dir = train(tmp_path, changes)
    held = set[str]()
    for step in range(1, 5):
        again = replay_step(ReplayRequest(run=log_dir, step=step))
        assert again.verdict is Verdict.PASS, list(again.lines())
        report = replay_conversations(ReplayRequest(run=log_dir, step=step))
        assert report.first is None and report.facts["largest"] == 0.0, list(report.lines())
        assert report.facts["num_compared"] > 50
        assert (report.verdict is Verdict.PASS) or any(
            "while the weights were replaced" in text for text in report.notes
        )
        held.add(report.title)
    assert any("version 0, 1" in how or "version 1, 2" in how for how in held), held


@pytest.mark.slow
def test_the_other_worker_trains_a_step_with_conversations_again_within_the_bounds(tmp_path: Path) -> None:
    log_dir = train(tmp_path, {"env.options": "{turns: 3}", "grpo.adv_estimator.name": "outcome_plus_turn"})
    report = replay_step(ReplayRequest(run=log_dir, step=2, worker="megatron"))
    assert report.verdict is Verdict.PASS, list(report.lines())
