"""A program with an unmodified OpenAI client is trained through the endpoint."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from examples.starter import STARTER_TASKS, make_starter
from nemo_rl.algorithms.run import run
from nemo_rl_tools.conversation_replay import replay_conversations
from nemo_rl_tools.step_replay.chain import ReplayRequest
from nemo_rl_tools.verdict import Verdict
from tests.helpers.processes import MARK, marked
from tests.helpers.runs import LOCAL, load_recipe, logged_steps

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def test_an_agent_with_the_openai_client_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MARK, str(tmp_path))
    task = STARTER_TASKS["guess"]
    make_starter(tmp_path / "model", task, config=replace(task.config, max_steps=40, batch_size=16, num_problems=500))
    settings = {
        **LOCAL,
        "grpo.max_num_steps": "2",
        "grpo.num_prompts_per_step": "2",
        "policy.train_global_batch_size": "8",
        "policy.model_name": str(tmp_path / "model"),
        "policy.generation.num_replicas": "1",
        "logger.log_dir": str(tmp_path / "logs"),
        "logger.tensorboard_enabled": "false",
        "logger.reward_curve": "false",
        "diagnostics.keep_steps.enabled": "true",
        "policy.generation.batch_invariant": "true",
    }
    config = load_recipe(ROOT / "configs/recipes/grpo_guess_program_cpu.yaml", settings)
    run(config, console=Console(file=io.StringIO()))
    steps = logged_steps(config.logger.log_dir)
    assert [row["step"] for row in steps] == [1, 2]
    for row in steps:
        assert row["rollout/left_out_rows"] == 0 and row["rollout/rewritten_histories"] == 0
        assert row["rollout/rows_per_conversation"] == 1 and 1 < row["rollout/turns"] <= 4
        assert row["train/grad_norm"] > 0
        # The log-probabilities of the trainer are those of the engine: the tokens are the same.
        assert abs(row["train/token_mult_prob_error"] - 1) < 1e-4
        ended = [row.get(f"rollout/ending/{name}", 0) for name in ("environment_done", "turn_limit")]
        assert sum(ended) == 8 and 0 < row["train/reward"] < 1
    # The turns are sampled again without the program.
    monkeypatch.setenv("PATH", "")
    report = replay_conversations(ReplayRequest(run=config.logger.log_dir, step=2))
    assert report.verdict is Verdict.PASS and report.facts["num_compared"] > 8, list(report.lines())
    assert not marked(str(tmp_path))
