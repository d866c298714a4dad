"""Whole runs in one process that replay routes: who records, in which form, and that every hop had the same."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from nemo_rl.algorithms.run import run
from nemo_rl.utils.r3_trace import reset_r3_trace
from nemo_rl_tools.route_chain.chain import verify_trace
from tests.helpers.model_families import write_family
from tests.helpers.runs import LOCAL, load_recipe, logged_steps, write_recipe

pytestmark = pytest.mark.slow

REPLAY = "policy.router_replay"
WITH_SQUARES = {"grpo.adv_estimator.name": "optimal_token_baseline"}
"""The pass that replays or records gives sums of squares as well."""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_family(tmp_path_factory.mktemp("moe"), "qwen3_moe")


def train(folder: Path, model: Path, **changes: str) -> list[dict[str, float]]:
    """Metrics of the steps of a run with routes."""
    on = {f"{REPLAY}.enabled": "true", "grpo.use_generation_logprobs_as_prev": "false"}
    config = load_recipe(write_recipe(folder, model), {**LOCAL, **on, **changes})
    run(config, console=Console(file=io.StringIO(), width=200))
    return [row for row in logged_steps(config.logger.log_dir) if "train/reward" in row]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {f"{REPLAY}.bit_packed": "true", "policy.generation.precision": "bfloat16"},
        {f"{REPLAY}.source": "prev_logprobs", **WITH_SQUARES},
    ],
    ids=["rollout", "packed, engine in half precision", "prev_logprobs"],
)
def test_every_hop_of_a_run_has_the_routes_that_were_recorded(tmp_path, model, monkeypatch, changes):
    trace = tmp_path / "trace"
    for name, value in (("", "1"), ("_VERIFY_FORWARD", "1"), ("_DIR", str(trace)), ("_STEPS", "3")):
        monkeypatch.setenv(f"NRL_R3_TRACE{name}", value)
    reset_r3_trace()
    rows = train(tmp_path, model, **changes)
    reset_r3_trace()
    report = verify_trace(trace, require_forward_verify=True)
    assert report.verdict.name == "PASS", "\n".join(report.lines())
    assert len(rows) == 3
    for row in rows:
        assert row["data_plane/live_rows"] == 0 and row["r3/train_missing_share"] == 0
        assert row["data_plane/bytes/routed_experts_digests"] > 0
        assert ("data_plane/bytes/squared_probs" in row) == (WITH_SQUARES.items() <= changes.items())
    if not changes:
        # An engine of the policy's precision takes the policy's own routes until the weights change.
        assert all(row["r3/prev_logprobs_live_routes_differ"] == 0 for row in rows)
        assert all(row["r3/k3_r3"] < 1e-10 for row in rows)


def test_replay_of_a_models_own_routes_learns_as_without_replay(tmp_path, model, monkeypatch):
    """One precision, one step per global batch: what is replayed is what the policy would have chosen."""
    monkeypatch.delenv("NRL_R3_TRACE", raising=False)
    one_batch = {"policy.train_global_batch_size": "16", **WITH_SQUARES}
    replayed = train(tmp_path / "replayed", model, **one_batch)
    free = train(tmp_path / "free", model, **one_batch, **{f"{REPLAY}.enabled": "false"})
    for name in ("train/loss", "train/grad_norm", "train/policy_kl", "rollout/mean_generation_logprob"):
        for a, b in zip(replayed, free, strict=True):
            # The loss is what is left of float32 terms of about 1 that cancel.
            assert a[name] == pytest.approx(b[name], rel=1e-6, abs=2e-8), name


@pytest.mark.parametrize("history", ["append", "new_row"])
def test_routes_of_conversations_are_whole_over_turns(tmp_path, model, monkeypatch, history):
    """What is said between turns has the routes of the next turn's prompt, and so has the last token of a turn."""
    trace = tmp_path / "trace"
    for name, value in (("", "1"), ("_VERIFY_FORWARD", "1"), ("_DIR", str(trace)), ("_STEPS", "3")):
        monkeypatch.setenv(f"NRL_R3_TRACE{name}", value)
    reset_r3_trace()
    turns = {
        "experience.conversation.enabled": "true",
        "env.name": "tests.helpers.failing_environments:Counting",
        "env.options": "{turns: 3}",
        "env.reward_function": "null",
        "policy.max_total_sequence_length": "96",
        "policy.dynamic_batching.train_mb_tokens": "256",
        "data.history": history,
    }
    rows = train(tmp_path, model, **turns)
    reset_r3_trace()
    report = verify_trace(trace, require_forward_verify=True)
    assert report.verdict.name == "PASS", "\n".join(report.lines())
    assert len(rows) == 3
    for row in rows:
        assert row["rollout/turns"] == 3 and row["data_plane/live_rows"] == 0
        assert row["rollout/routes_missing_trained_tokens"] == 0 and row["rollout/routes_missing_share"] == 0
        assert row["r3/train_missing_share"] == 0 and row["r3/prev_logprobs_live_routes_differ"] == 0
        assert row["r3/k3_r3"] < 1e-10
