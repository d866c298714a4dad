"""Runs whose rewards are verdicts of a judge, some of which fail."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from nemo_rl.algorithms.grpo import LEFT_OUT
from nemo_rl.algorithms.run import run
from nemo_rl.errors import RewardError
from tests.helpers.judge_server import FAULTS, JudgeServer, judge_server
from tests.helpers.runs import LOCAL, load_recipe, logged_steps, rollouts_of, write_recipe


def _train(
    folder: Path,
    model: Path,
    server: JudgeServer,
    *,
    overwrite: bool = False,
    given: dict[str, str] | None = None,
    **changes: Any,
) -> list[dict[str, float]]:
    judge = {"base_url": server.url, "model": "m", "rubric": "Is it sorted?", "retries": 0, "max_failed_share": 1.0}
    judge |= changes
    recipe = write_recipe(
        folder,
        model,
        env={"name": "judge", "reward_function": None, "judges": {"order": judge}},
        logger={"log_dir": str(folder / "logs"), "num_rollouts_to_log": 16, "overwrite": overwrite},
        grpo={"max_num_steps": 2},
    )
    run(load_recipe(recipe, {**LOCAL, **(given or {})}), console=Console(file=io.StringIO()))
    return logged_steps(folder / "logs")


def _learned(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    names = ("train/loss", "train/grad_norm", "train/reward", "train/rows")
    return [{name: row[name] for name in names} for row in rows if "train/reward" in row]


def test_faults_give_no_reward_leave_other_rows_as_they_are_and_are_repeated(tmp_path: Path, model: Path) -> None:
    faults = [fault for fault in FAULTS if fault not in ("429", "hang")]  # these take their time
    with judge_server() as server:
        _train(tmp_path / "whole", model, server)
        num_asked = len(server.bodies)
        _train(tmp_path / "whole", model, server, overwrite=True)
        assert len(server.bodies) == 2 * num_asked, "verdicts are those of a run, and leave with it"
        whole = rollouts_of(tmp_path / "whole" / "logs", 1)
        hit = whole[1]["response"]
        number = iter(range(10_000))

        def fault(place: int, body: dict[str, Any]) -> str | None:
            text = body["messages"][-1]["content"].split("RESPONSE>>\n")[1].split("\n<<")[0]
            return faults[next(number) % len(faults)] if text == hit else None

        server.fault = fault
        steps = _train(tmp_path / "some", model, server)
        num_asked = len(server.bodies)
        again = _train(tmp_path / "again", model, server, verdicts=str(tmp_path / "some" / "logs" / "verdicts.jsonl"))
        assert len(server.bodies) == num_asked + 4, "the preflight alone has asked"
    assert _learned(again) == _learned(steps) and len(_learned(steps)) == 2
    assert steps[0]["rollout/left_out_rows"] >= 1 and steps[0]["rollout/judge/order/rows_without_verdict"] >= 1
    some = rollouts_of(tmp_path / "some" / "logs", 1)
    touched = {row["group"] for row in some if row["response"] == hit}
    for row, before in zip(some, whole, strict=True):
        if row["response"] == hit:
            assert row["no_weight"] == LEFT_OUT and row["sample_mask"] == 0 and row["finish_reason"] == "judge_error"
        else:
            assert row["reward"] == before["reward"] and row["reward"] > 0
        if row["group"] not in touched:
            assert row["advantage"] == before["advantage"] and row["response"] == before["response"]
    lines = [json.loads(line) for line in (tmp_path / "some" / "logs" / "verdicts.jsonl").read_text().splitlines()]
    assert {line["responses"][0] for line in lines} >= {row["response"] for row in some}


def test_a_fault_ends_the_run_where_the_recipe_says_so(tmp_path: Path, model: Path) -> None:
    with judge_server() as server, pytest.raises(RewardError, match="on_failure is error"):
        server.fault = lambda number, body: "500" if number > 5 else None
        _train(tmp_path, model, server, on_failure="error")


ASYNC = {
    "grpo.async.enabled": "true",
    "grpo.use_generation_logprobs_as_prev": "false",
    "loss_fn.use_importance_sampling_correction": "true",
    "loss_fn.truncated_importance_sampling_type": "tis",
    "loss_fn.truncated_importance_sampling_ratio": "2.0",
}
TALK = {
    "experience.conversation.enabled": "true",
    "policy.max_total_sequence_length": "96",
    "grpo.use_generation_logprobs_as_prev": "false",
}


@pytest.mark.parametrize("given", [ASYNC, TALK], ids=["asynchronous", "conversations"])
def test_rows_without_a_verdict_are_left_out_everywhere(tmp_path: Path, model: Path, given: dict[str, str]) -> None:
    with judge_server() as server:
        server.fault = lambda number, body: "garbage" if number % 5 == 4 else None
        steps = _train(tmp_path, model, server, given=given)
    assert len(steps) == 2 and all("train/loss" in row for row in steps)
    failed = sum(row.get("rollout/ending/judge_error", 0.0) for row in steps)
    assert failed > 0 and any("rollout/judge/order/asked" in row for row in steps)
    assert sum(row["rollout/left_out_rows"] for row in steps) >= failed
