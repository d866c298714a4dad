"""Runs whose rows are conversations: synchronous and asynchronous, both workers, one row or several of each."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from rich.console import Console

from nemo_rl.algorithms.run import run
from nemo_rl_tools.conversation_replay import replay_conversations
from nemo_rl_tools.step_replay.chain import ReplayRequest
from nemo_rl_tools.verdict import Verdict
from tests.helpers.case_selection import params
from tests.helpers.runs import LOCAL, load_recipe, logged_steps, write_recipe

TALK = {
    "experience.conversation.enabled": "true",
    "env.name": "tests.helpers.failing_environments:Counting",
    "env.options": "{turns: 3}",
    "policy.max_total_sequence_length": "96",
    "grpo.use_generation_logprobs_as_prev": "false",
}
ASYNC = {
    "grpo.async.enabled": "true",
    "loss_fn.use_importance_sampling_correction": "true",
    "loss_fn.truncated_importance_sampling_type": "tis",
    "loss_fn.truncated_importance_sampling_ratio": "2.0",
}
SOURCES = {"synchronous": {}, "asynchronous": ASYNC}
MEGATRON = {
    "policy.dtensor_cfg.enabled": "false",
    "policy.megatron_cfg.enabled": "true",
    "policy.optimizer": "null",
    "policy.megatron_cfg.optimizer.lr": "1.0e-3",
    "policy.dynamic_batching.enabled": "false",
    "policy.sequence_packing.enabled": "true",
    "policy.sequence_packing.train_mb_tokens": "256",
    "policy.sequence_packing.logprob_mb_tokens": "256",
}
REWRITING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and not loop.last %}before: {% endif %}{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A template that writes earlier turns of the model in another way."""
NEW_ROWS = {"data.history": "new_row", "policy.tokenizer.chat_template": json.dumps(REWRITING)}


def train(folder: Path, model: Path, changes: Mapping[str, str], *, steps: int = 3) -> Path:
    """Run a small recipe; return its log folder."""
    recipe = write_recipe(folder, model, grpo={"max_num_steps": steps})
    run(load_recipe(recipe, {**LOCAL, **changes}), console=Console(file=io.StringIO(), width=200))
    return folder / "logs"


@pytest.mark.parametrize(
    "changes",
    [{}, MEGATRON, ASYNC, {**ASYNC, **MEGATRON}],
    ids=["synchronous", "megatron", "asynchronous", "asynchronous megatron"],
)
def test_conversations_are_sampled_and_trained(tmp_path, model, changes):
    steps = logged_steps(train(tmp_path / "run", model, {**TALK, **changes}))
    assert len(steps) == 3
    for step in steps:
        assert step["rollout/turns"] == 3 and step["rollout/rows_per_conversation"] == 1
        assert step["rollout/ending/environment_done"] > 0 and step["rollout/left_out_rows"] == 0
        assert step["train/gen_kl_error"] < (1 if step.get("rollout/staleness_max") else 1e-4)
        assert step.get("rollout/staleness_max", 0) <= 1
    assert "grpo.async.enabled" in changes or all(step["rollout/open_conversations"] == 0 for step in steps)


SEVERAL_ROWS = [
    (estimator, name) for estimator in ("grpo", "outcome_plus_turn", "discounted_return") for name in SOURCES
]
USUAL = [("outcome_plus_turn", "synchronous"), ("discounted_return", "asynchronous")]


@pytest.mark.parametrize("case", params(SEVERAL_ROWS, USUAL), ids="-".join)
def test_a_conversation_whose_history_is_rewritten_has_several_rows(tmp_path, model, case):
    estimator, source = case
    changes = {**TALK, **NEW_ROWS, **SOURCES[source], "grpo.adv_estimator.name": estimator}
    for step in logged_steps(train(tmp_path / "run", model, changes)):
        assert step["rollout/turns"] == 3 and 2 < step["rollout/rows_per_conversation"] <= 3


PROGRAM = {
    **TALK,
    "env.name": "program",
    "env.options": f"{{command: [python, {Path(__file__).parents[1] / 'helpers/chat_program.py'}, branch]}}",
    "env.timeout_s": "60",
    "policy.max_total_sequence_length": "256",
    "policy.dynamic_batching.train_mb_tokens": "256",
    "policy.dynamic_batching.logprob_mb_tokens": "256",
    "experience.conversation.max_open": "2",
}


@pytest.mark.slow
@pytest.mark.parametrize("source", SOURCES)
def test_a_program_with_several_histories_is_trained_and_sampled_again(tmp_path, model, source):
    changes = {**PROGRAM, **SOURCES[source]}
    if source == "synchronous":
        changes |= {"diagnostics.keep_steps.enabled": "true", "policy.generation.batch_invariant": "true"}
    logs = train(tmp_path / "run", model, changes, steps=1)
    [step] = logged_steps(logs)
    assert (step["rollout/turns"], step["rollout/rows_per_conversation"], step["rollout/left_out_rows"]) == (5, 3, 0)
    assert step["rollout/rewritten_histories"] == 2 * step["rollout/ending/environment_done"]
    assert step["train/gen_kl_error"] < 1e-4 and step["train/grad_norm"] > 0
    if source == "synchronous":
        report = replay_conversations(ReplayRequest(run=logs, step=1))
        assert report.verdict is Verdict.PASS, list(report.lines())
        assert report.facts["num_compared"] == 5 * step["rollout/ending/environment_done"]


def test_a_loop_of_length_one_is_a_single_turn_to_the_last_bit(tmp_path, model):
    plain = {"policy.generation.batch_invariant": "true", "checkpointing.enabled": "true"}
    logs = train(tmp_path / "plain", model, plain)
    also = train(tmp_path / "loop", model, {**plain, "experience.conversation.enabled": "true"})
    for mine, other in zip(logged_steps(also), logged_steps(logs), strict=True):
        for name in ("train/reward", "train/loss", "train/grad_norm", "rollout/mean_generation_logprob", "val/reward"):
            assert mine.get(name) == other.get(name), name
    files = [path.relative_to(logs) for path in sorted(logs.rglob("step_3/**/*.safetensors"))]
    assert files and all((logs / path).read_bytes() == (also / path).read_bytes() for path in files)


def test_a_run_goes_on_without_conversations_whose_environment_fails(tmp_path, model):
    options = f"{{turns: 3, failing: 99, folder: {tmp_path}}}"
    changes = {**TALK, "env.options": options, "experience.conversation.retries": "0"}
    steps = logged_steps(train(tmp_path / "run", model, changes))
    assert sum(step["rollout/left_out_rows"] for step in steps) > 0
    assert all(step["rollout/ending/environment_done"] > 0 for step in steps)
