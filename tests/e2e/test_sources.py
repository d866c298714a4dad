"""Runs of several sources that sample in their own ways: group sizes, limits, stop strings; rewards that are None."""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from nemo_rl.algorithms.grpo import score_rows
from nemo_rl.algorithms.run import run
from nemo_rl.algorithms.setup import open_trainer
from nemo_rl.algorithms.stages.stage import StepState
from nemo_rl_tools.run_replay import replay_run
from nemo_rl_tools.verdict import Verdict
from tests.helpers.runs import LOCAL, load_recipe, logged_steps, rollouts_of, write_recipe

pytestmark = pytest.mark.slow

SHORT = {"dataset_name": "sort_digits", "size": 40, "seed": 2, "options": {"min_digits": 3, "max_digits": 4}}
LONG = {"dataset_name": "sort_digits", "size": 40, "seed": 3, "options": {"min_digits": 5, "max_digits": 5}}
DIGITS = "0123456789"
OWN = {
    "short": {**SHORT, "num_generations_per_prompt": 2, "max_new_tokens": 3},
    "long": {**LONG, "stop_strings": list(DIGITS)},
}
ASYNC = {"grpo.async.enabled": "true", "grpo.async.max_staleness": "0"}


def recipe(folder: Path, model: Path, sources: Mapping[str, object] = OWN, **env: object) -> Path:
    grpo = {"max_num_steps": 3}
    written = write_recipe(folder, model, grpo=grpo, data={"train": sources}, env={"timeout_s": 60, **env})
    text = written.read_text().replace("train_global_batch_size: 8", "train_global_batch_size: 16")
    written.write_text(text)
    return written


def train(folder: Path, model: Path, changes: Mapping[str, str], sources: Mapping[str, object] = OWN) -> Path:
    written = folder / "recipe.yaml" if (folder / "recipe.yaml").exists() else recipe(folder, model, sources)
    run(load_recipe(written, {**LOCAL, **changes}), console=Console(file=io.StringIO(), width=200))
    return folder / "logs"


def steps_of(config_file: Path, count: int, **changes: str) -> list[StepState]:
    with open_trainer(load_recipe(config_file, {**LOCAL, **changes}), console=Console(file=io.StringIO())) as trainer:
        trainer.open_run()
        found = [trainer.step() for _ in range(count)]
        assert trainer.data_plane_stats()["live_rows"] == 0
    return found


def test_each_source_has_its_group_size_limit_and_stops_and_advantages_of_its_own(tmp_path: Path, model: Path) -> None:
    written = recipe(tmp_path, model)
    sources: Counter[str] = Counter()
    config = load_recipe(written).scoring
    for step in steps_of(written, 3):
        stats, uids = step.rows.sample_stats, list(step.rows.group_uids)
        assert step.chosen is not None and len(step.chosen.plan.steps) == 1, "one update of a step"
        for uid, draw in zip(step.uids, step.drawn, strict=True):
            rows = [row for row, name in enumerate(uids) if name == uid]
            assert len(rows) == {"short": 2, "long": 4}[draw.source]
            sources[draw.source] += 1
            if draw.source == "short":
                assert stats.response_lengths[rows].max() <= 3
                assert all(stats.truncated[row] or stats.response_lengths[row] < 4 for row in rows)
            alone = score_rows(stats.select(rows), [uid] * len(rows), config)
            assert torch.equal(step.scores.advantages[rows], alone.advantages)
    assert sources == {"short": 6, "long": 6}
    lines = [line for number in (1, 2, 3) for line in rollouts_of(tmp_path / "logs", number)]
    texts = [re.sub(r"<\|[^|]*\|>", "", str(line["response"])) for line in lines if line["source"] == "long"]
    assert not any(set(text[:-1]) & set(DIGITS) for text in texts) and any(
        text[-1:] in DIGITS for text in texts if text
    )
    assert max(int(str(line["response_tokens"])) for line in lines if line["source"] == "long") > 3


def test_what_says_the_same_as_the_recipe_changes_no_bit(tmp_path: Path, model: Path) -> None:
    same = {"num_generations_per_prompt": 4, "max_new_tokens": 6, "stop_strings": []}
    plain = train(tmp_path / "plain", model, {}, {"short": SHORT, "long": LONG})
    asked = train(tmp_path / "asked", model, {}, {"short": {**SHORT, **same}, "long": {**LONG, **same}})
    assert logged_steps(plain) == logged_steps(asked)


def _without_account(row: Mapping[str, float]) -> dict[str, float]:
    return {name: row[name] for name in row if not name.startswith(("data_plane/", "rollout/groups_", "async/"))}


@pytest.mark.parametrize("changes", [{}, {"grpo.use_dynamic_sampling": "true", "env.score_threshold": "0.6"}])
def test_a_run_that_is_resumed_goes_on_with_the_same_bits(
    tmp_path: Path, model: Path, changes: Mapping[str, str]
) -> None:
    saving = {**changes, "checkpointing.enabled": "true", "checkpointing.save_period": "2"}
    whole = logged_steps(train(tmp_path / "whole", model, saving))
    train(tmp_path / "cut", model, {**saving, "grpo.max_num_steps": "2"})
    resumed = logged_steps(train(tmp_path / "cut", model, {**saving, "checkpointing.resume": "true"}))
    assert len(whole) == len(resumed) == 3 and _without_account(whole[2]) == _without_account(resumed[2])


def test_an_asynchronous_run_has_the_same_groups_and_its_schedule_replays(tmp_path: Path, model: Path) -> None:
    saved = {"checkpointing.enabled": "true", "checkpointing.save_period": "3"}
    # Which rows share a batch differs, and so would the last bits of their log-probabilities.
    saved |= {"policy.generation.batch_invariant": "true"}
    ours = logged_steps(train(tmp_path / "async", model, {**saved, **ASYNC}))
    theirs = logged_steps(train(tmp_path / "sync", model, saved))
    assert list(map(_without_account, ours)) == list(map(_without_account, theirs)) and len(ours) == 3
    ahead = {**ASYNC, "grpo.async.max_staleness": "1", "policy.generation.max_batch_size": "8"}
    ahead |= {"grpo.use_generation_logprobs_as_prev": "false", "loss_fn.use_importance_sampling_correction": "true"}
    ahead |= {"loss_fn.truncated_importance_sampling_type": "tis", "loss_fn.truncated_importance_sampling_ratio": "2"}
    logs = train(tmp_path / "ahead", model, {**saved, **ahead, "diagnostics.keep_steps.enabled": "true"})
    report = replay_run(logs, start=0, stop=3, console=Console(file=io.StringIO()))
    assert report.verdict is Verdict.PASS, "\n".join(report.lines())


@pytest.mark.parametrize("changes", [{}, ASYNC], ids=["sync", "async"])
def test_rows_without_a_reward_are_left_out_and_counted(
    tmp_path: Path, model: Path, changes: Mapping[str, str]
) -> None:
    function = {"reward_function": "tests.helpers.rewards:odd_share_or_none", "on_none": "leave_out"}
    written = recipe(tmp_path, model, {"short": SHORT, "long": LONG}, **function)
    logs = train(tmp_path, model, changes)
    assert written.exists()
    steps: list[dict[str, Any]] = list(logged_steps(logs))
    assert len(steps) == 3 and sum(step.get("rollout/ending/no_reward", 0.0) for step in steps) > 0
    lines = [line for number in (1, 2, 3) for line in rollouts_of(logs, number)]
    unscored = [line for line in lines if line["finish_reason"] == "no_reward"]
    assert unscored and all(line["sample_mask"] == 0 for line in unscored)
    assert sum(step.get("rollout/ending/no_reward", 0.0) for step in steps) == len(unscored)
