"""Whole runs in one process with what needs the tokens of a row: weights by log-probabilities, a KL in the reward,
advantages of tokens. What was trained on is kept, computed again from the formulas, and replayed."""

from __future__ import annotations

import io
import json
import math
import statistics
from dataclasses import dataclass
from pathlib import Path

import pytest
from rich.console import Console

from nemo_rl.algorithms.grpo import TOO_FAR
from nemo_rl.algorithms.kept_steps.folder import StepsFolder
from nemo_rl.algorithms.run import run
from nemo_rl.algorithms.stages.bodies import PrevLogprobs
from nemo_rl.algorithms.stages.stage import StepState
from nemo_rl.data_plane.keys import group_uid
from nemo_rl.errors import WorkerError
from nemo_rl_tools.rollouts.row import RolloutRow, read_rows
from nemo_rl_tools.step_replay.chain import ReplayProblem, ReplayRequest, SnapshotColumns
from nemo_rl_tools.step_replay.replay import replay_step
from nemo_rl_tools.verdict import Verdict
from tests.helpers.runs import LOCAL, load_recipe, logged_steps, write_recipe

ROWS = 16
Logged = dict[str, float]


def steps_of(folder: Path, model: Path, overrides: dict[str, str]) -> list[Logged]:
    recipe = write_recipe(
        folder,
        model,
        grpo={"max_num_steps": 2},
        loss_fn={"reference_policy_kl_penalty": 0.0},
        policy={"train_global_batch_size": ROWS},
    )
    config = load_recipe(recipe, {**LOCAL, "grpo.drop_zero_advantage_groups": "false", **overrides})
    run(config, console=Console(file=io.StringIO()))
    return logged_steps(config.logger.log_dir)


def rollouts(folder: Path, step: int) -> list[RolloutRow]:
    return read_rows(folder / "logs" / "rollouts" / f"step_{step}.jsonl")


def test_rows_above_the_log_probability_error_have_no_weight_and_say_so(tmp_path: Path, model: Path) -> None:
    key = "grpo.seq_logprob_error_threshold"
    free = steps_of(tmp_path / "free", model, {key: "1000000"})[0]
    assert free["train/seq_logprob_error_masked_rows"] == 0 and free["train/valid_sequences"] == ROWS
    low, high = free["train/seq_logprob_error_mean"], free["train/seq_logprob_error_max"]
    assert 1 < low < high < 1.001
    keep = {"diagnostics.keep_steps.enabled": "true"}
    first, _ = steps_of(tmp_path / "some", model, {**keep, key: repr((low + high) / 2)})
    masked = first["train/seq_logprob_error_masked_rows"]
    assert 0 < masked < ROWS and first["train/valid_sequences"] == ROWS - masked
    assert first["train/seq_logprob_error_masked_share"] == masked / ROWS
    assert first["train/loss"] != free["train/loss"] and first["train/reward"] == free["train/reward"]
    pairs = list(zip(rollouts(tmp_path / "free", 1), rollouts(tmp_path / "some", 1), strict=True))
    assert len(pairs) == ROWS and sum(after.no_weight == TOO_FAR for _, after in pairs) == masked
    for before, after in pairs:
        assert before.sample_mask == 1 and before.no_weight is None
        assert after.advantage == before.advantage, "it counts for the baseline"
        assert after.sample_mask == (0 if after.no_weight == TOO_FAR else 1)
    report = replay_step(ReplayRequest(run=tmp_path / "some" / "logs", step=2))
    assert report.verdict is Verdict.PASS, list(report.lines())


def test_a_step_of_which_every_row_is_masked_updates_nothing(tmp_path: Path, model: Path) -> None:
    steps = steps_of(tmp_path, model, {"grpo.seq_logprob_error_threshold": "1.0000000001"})
    for step in steps:
        assert step["train/seq_logprob_error_masked_share"] == 1 and step["train/rows"] == 0
        assert "train/loss" not in step and step["data_plane/live_rows"] == 0
    assert {row.no_weight for row in rollouts(tmp_path, 2)} == {TOO_FAR}
    assert json.loads((tmp_path / "logs" / "rollouts" / "step_2.jsonl").read_text().splitlines()[0])["sample_mask"] == 0


KL_WEIGHT = 0.5
KEPT = {
    "diagnostics.keep_steps.enabled": "true",
    "loss_fn.use_kl_in_reward": "true",
    "loss_fn.reference_policy_kl_penalty": str(KL_WEIGHT),
    "policy.optimizer.kwargs.lr": "0.01",
}
RUNS = {
    "grpo": {**KEPT, "grpo.advantage_clip_high": "1.25"},
    "optimal_token_baseline": {**KEPT, "grpo.adv_estimator.name": "optimal_token_baseline"},
    "reinforce_plus_plus": {**KEPT, "grpo.adv_estimator.name": "reinforce_plus_plus", "grpo.advantage_clip_low": "-2"},
}


@dataclass(frozen=True, kw_only=True)
class KeptRun:
    """A run and what its second step was trained on, row by row, in the order of the update."""

    log_dir: Path
    logged: Logged
    keys: list[str]
    rewards: list[float]
    columns: dict[str, list[list[float]]]
    """Of each row its response tokens, or its one number."""


@pytest.fixture(scope="module")
def kept_runs(tmp_path_factory: pytest.TempPathFactory, model: Path) -> dict[str, KeptRun]:
    return {name: kept_run(tmp_path_factory.mktemp(name), model, overrides) for name, overrides in RUNS.items()}


def kept_run(folder: Path, model: Path, overrides: dict[str, str]) -> KeptRun:
    logged = steps_of(folder, model, overrides)[-1]
    [_, kept] = StepsFolder(folder / "logs").all()
    step = kept.read()
    assert step.rows is not None and step.trained is not None
    columns, trained = SnapshotColumns.read(kept, step), list(step.trained)
    masks = columns.rows("token_mask", trained).unbind()
    found = {}
    for name in columns.update:
        rows = columns.rows(name, trained)
        if rows.is_nested:
            found[name] = [part.double()[mask].tolist() for part, mask in zip(rows.unbind(), masks, strict=True)]
        else:
            found[name] = [[number] for number in rows.tolist()]
    return KeptRun(
        log_dir=folder / "logs",
        logged=logged,
        keys=[step.rows.keys[row] for row in trained],
        rewards=[step.rows.rewards[row] for row in trained],
        columns=found,
    )


def kl_of(run: KeptRun) -> list[list[float]]:
    """log(pi_old / pi_ref) of each token."""
    pairs = zip(run.columns["prev_logprobs"], run.columns["reference_policy_logprobs"], strict=True)
    return [[p - r for p, r in zip(prev, reference, strict=True)] for prev, reference in pairs]


def test_advantages_are_of_the_rewards_less_the_kl_and_the_loss_has_none(kept_runs: dict[str, KeptRun]) -> None:
    run = kept_runs["grpo"]
    sums = [math.fsum(row) for row in kl_of(run)]
    assert max(map(abs, sums)) > 0.05 and len(run.keys) == ROWS
    shaped = [reward - KL_WEIGHT * kl for reward, kl in zip(run.rewards, sums, strict=True)]
    for row, key in enumerate(run.keys):
        others = [shaped[at] for at, other in enumerate(run.keys) if group_uid(other) == group_uid(key) and at != row]
        spread = statistics.stdev([shaped[row], *others]) + 1e-4
        expected = (shaped[row] - statistics.fmean(others)) / spread
        assert run.columns["advantages"][row][0] == pytest.approx(min(expected, 1.25), rel=1e-4, abs=1e-5)
    assert [1.25] in run.columns["advantages"], "the clip is in use"
    assert run.logged["train/kl_in_reward"] == pytest.approx(statistics.fmean(sums), rel=1e-6)
    assert "train/kl_penalty" not in run.logged and run.logged["train/loss"] == run.logged["train/actor_loss"]


def test_reinforce_plus_plus_whitens_the_returns_of_all_tokens(kept_runs: dict[str, KeptRun]) -> None:
    run = kept_runs["reinforce_plus_plus"]
    returns = [
        [reward - KL_WEIGHT * math.fsum(row[at:]) for at in range(len(row))]
        for reward, row in zip(run.rewards, kl_of(run), strict=True)
    ]
    every = [value for row in returns for value in row]
    mean, spread = statistics.fmean(every), math.sqrt(statistics.variance(every) + 1e-8)
    found = run.columns["token_advantages"]
    assert "advantages" not in run.columns and len(every) > ROWS
    for row, values in enumerate(returns):
        assert found[row] == pytest.approx([max(-2.0, (value - mean) / spread) for value in values], abs=1e-5)
        assert len(set(found[row])) > 1 or len(values) == 1, "tokens differ"
    assert min(map(min, found)) == -2.0, "the clip is in use"
    [shown] = [row for row in rollouts(run.log_dir.parent, 2) if row.key == run.keys[0]]
    assert shown.advantage == pytest.approx(statistics.fmean(found[0]), abs=1e-4)


def test_the_token_baseline_has_the_squares_of_the_pass_before_the_update(kept_runs: dict[str, KeptRun]) -> None:
    run = kept_runs["optimal_token_baseline"]
    kl, columns = kl_of(run), run.columns
    returns = [
        [reward - KL_WEIGHT * math.fsum(row[at:]) for at in range(len(row))]
        for reward, row in zip(run.rewards, kl, strict=True)
    ]
    weights = []
    for prev, squares in zip(columns["prev_logprobs"], columns["squared_probs"], strict=True):
        assert all(math.exp(2 * p) < square < 1 for p, square in zip(prev, squares, strict=True))
        energies = [1 - 2 * math.exp(p) + square for p, square in zip(prev, squares, strict=True)]
        weights.append([math.fsum(energies[: at + 1]) for at in range(len(energies))])
    for row, key in enumerate(run.keys):
        group = [other for other, name in enumerate(run.keys) if group_uid(name) == group_uid(key)]
        for at, value in enumerate(returns[row]):
            there = [other for other in group if at < len(returns[other])]
            total = math.fsum(weights[other][at] for other in there) + 1e-8
            baseline = math.fsum(returns[other][at] * weights[other][at] for other in there) / total
            expected = value - (baseline if len(there) > 1 else 0.0)
            assert columns["token_advantages"][row][at] == pytest.approx(expected, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("name", RUNS)
def test_a_step_with_row_work_is_replayed_to_the_last_bit(kept_runs: dict[str, KeptRun], name: str) -> None:
    report = replay_step(ReplayRequest(run=kept_runs[name].log_dir, step=2))
    assert report.verdict is Verdict.PASS, list(report.lines())
    stages = {site.name: site for site in report.sites if site.step == 2}
    column = "advantages" if name == "grpo" else "token_advantages"
    for stage in (column, "sample_mask", "loss per microbatch", "grad_norm", "weights"):
        assert stages[stage].agrees is True and not stages[stage].difference


def test_a_replay_of_other_rows_or_of_another_kind_of_advantages_says_so(kept_runs: dict[str, KeptRun]) -> None:
    run = kept_runs["reinforce_plus_plus"]
    some = replay_step(ReplayRequest(run=run.log_dir, step=2, rows=tuple(run.keys[:2])))
    assert some.verdict is Verdict.INCOMPLETE
    other = replay_step(ReplayRequest(run=run.log_dir, step=1, overrides=("loss_fn.reference_policy_kl_penalty=0.4",)))
    assert other.verdict is Verdict.PASS, "the policy is its own reference in the first step"
    with pytest.raises(ReplayProblem, match="step 1 was trained on advantages of tokens"):
        replay_step(ReplayRequest(run=run.log_dir, step=1, overrides=("grpo.adv_estimator.name=rloo",)))


def test_a_kept_step_of_which_every_row_was_masked_is_replayed(tmp_path: Path, model: Path) -> None:
    steps_of(tmp_path, model, {**KEPT, "grpo.seq_logprob_error_threshold": "1.0000000001"})
    report = replay_step(ReplayRequest(run=tmp_path / "logs", step=2))
    assert report.verdict is Verdict.PASS, list(report.lines())


@pytest.mark.parametrize("name", RUNS)
def test_a_step_that_failed_before_its_tokens_were_kept_is_replayed_as_far_as_it_goes(
    name: str, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(stage: PrevLogprobs, step: StepState) -> object:
        raise WorkerError("planted", stage=stage.name)

    monkeypatch.setattr(PrevLogprobs, "_submit", fail)
    with pytest.raises(WorkerError, match="planted"):
        steps_of(tmp_path, model, {**RUNS[name], "diagnostics.keep_steps.on_failure": "true"})
    if name == "grpo":
        report = replay_step(ReplayRequest(run=tmp_path / "logs", step=1))
        assert report.verdict is not Verdict.PASS
        assert any("ended before its log-probabilities were kept" in note for note in report.notes)
    else:
        with pytest.raises(ReplayProblem, match="step 1 ended before token_advantages was kept"):
            replay_step(ReplayRequest(run=tmp_path / "logs", step=1))


def test_an_estimator_of_ones_own_may_be_of_tokens(tmp_path: Path, model: Path) -> None:
    own = {
        "grpo.adv_estimator.name": "examples.extending.advantages:FadingReward",
        "+grpo.adv_estimator.options.discount": "0.5",
    }
    run = kept_run(tmp_path, model, {"diagnostics.keep_steps.enabled": "true", **own})
    for reward, values in zip(run.rewards, run.columns["token_advantages"], strict=True):
        length = len(values)
        assert values == pytest.approx([reward * 0.5 ** (length - 1 - at) for at in range(length)], rel=1e-6)
