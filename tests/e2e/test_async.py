"""Asynchronous runs in one process: bound 0 is the synchronous trainer, other bounds are kept, schedules replay."""

from __future__ import annotations

import io
import json
import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from nemo_rl.algorithms.async_batches import FRONTIER_STATE
from nemo_rl.algorithms.run import run
from nemo_rl.algorithms.scheduled_batches import GROUPS, SCHEDULE_FILE
from nemo_rl.cli.main import app
from nemo_rl.errors import CheckpointError, UserError, WorkerError
from nemo_rl.utils.checkpoint import CheckpointManager
from nemo_rl_tools.run_replay import replay_run
from nemo_rl_tools.step_replay.chain import ReplayRequest
from nemo_rl_tools.step_replay.replay import replay_step
from nemo_rl_tools.verdict import Verdict
from tests.helpers.model_families import write_family
from tests.helpers.runs import LOCAL, load_recipe, logged_steps, write_recipe

PROMPTS = 4
ASYNC = {"grpo.async.enabled": "true"}
CORRECTED = {
    **ASYNC,
    "grpo.use_generation_logprobs_as_prev": "false",
    "loss_fn.use_importance_sampling_correction": "true",
    "loss_fn.truncated_importance_sampling_type": "tis",
    "loss_fn.truncated_importance_sampling_ratio": "2.0",
}
MEGATRON = {
    "policy.dtensor_cfg.enabled": "false",
    "policy.megatron_cfg.enabled": "true",
    "policy.optimizer": "null",
    "policy.megatron_cfg.optimizer.lr": "1.0e-3",
    "policy.dynamic_batching.enabled": "false",
    "policy.sequence_packing.enabled": "true",
    "policy.sequence_packing.train_mb_tokens": "64",
    "policy.sequence_packing.logprob_mb_tokens": "64",
}
ACCOUNT = ("rollout/groups_", "async/")
"""Metrics that an asynchronous run has besides those of a synchronous one."""
UNEQUAL = {"policy.generation.max_new_tokens": "8", "policy.generation.max_batch_size": "16"}
"""Rows of unequal lengths and few places, so that groups join while others run."""

CURRICULUM = {
    "data.curriculum": "{window: {least: 0.3, most: 0.6, hard: 0.5, easy: 0.2}, again: {share: 0.2}, passed_at: 0.25}"
}
"""Which prompts are drawn depends on what was sampled before."""


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family(tmp_path_factory.mktemp("moe"), "qwen3_moe")


def train(folder: Path, model: Path, changes: Mapping[str, str], *, steps: int = 4) -> Path:
    """Run a small recipe; return its log folder."""
    recipe = folder / "recipe.yaml"
    if not recipe.exists():
        recipe = write_recipe(folder, model, grpo={"max_num_steps": steps})
    run(load_recipe(recipe, {**LOCAL, **changes}), console=Console(file=io.StringIO(), width=200))
    return folder / "logs"


def digests(log_dir: Path) -> dict[int, str]:
    lines = [json.loads(line) for line in (log_dir / SCHEDULE_FILE).read_text().splitlines()]
    return {line["version"]: line["digest"] for line in lines if line["event"] == "weights"}


def groups_of_steps(log_dir: Path) -> dict[int, list[int]]:
    """Return the ordinals that each step has trained, of the run's last history."""
    found: dict[int, list[int]] = {}
    for line in (log_dir / SCHEDULE_FILE).read_text().splitlines():
        event = json.loads(line)
        if event["event"] == "start":
            found = {step: groups for step, groups in found.items() if step <= event["step"]}
        elif event["event"] == "step":
            found[event["step"]] = [int(name.split(".")[0]) for name in event["groups"]]
    return found


def draws_of_starts(log_dir: Path) -> list[dict[int, int]]:
    """Return the prompts by their places in the stream, as each start of a run drew them."""
    found: list[dict[int, int]] = []
    for line in (log_dir / SCHEDULE_FILE).read_text().splitlines():
        event = json.loads(line)
        if event["event"] == "start":
            found.append({})
        elif event["event"] == "draws":
            found[-1] |= {ordinal: prompt for ordinal, prompt, _ in event["draws"]}
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("is_moe", "changes"),
    [
        (False, {}),
        (False, MEGATRON),
        (False, {"grpo.use_dynamic_sampling": "true", "env.score_threshold": "0.6"}),
        (True, {"policy.router_replay.enabled": "true", "grpo.use_generation_logprobs_as_prev": "false"}),
        (False, CURRICULUM),
    ],
    ids=["dtensor", "megatron", "dynamic sampling", "router replay", "curriculum"],
)
def test_a_bound_of_0_is_the_synchronous_trainer_to_the_last_bit(tmp_path, model, experts, is_moe, changes):
    folder = experts if is_moe else model
    # On a busy machine even a trivial reward has taken ten seconds, which only one of the runs counts.
    saved = {**changes, "checkpointing.enabled": "true", "env.timeout_s": "60"}
    logs = train(tmp_path / "sync", folder, saved)
    also = train(tmp_path / "async", folder, {**saved, **ASYNC, "grpo.async.max_staleness": "0"})
    ours, theirs = logged_steps(also), logged_steps(logs)
    assert len(ours) == len(theirs) == 4
    for mine, other in zip(ours, theirs, strict=True):
        names = {name for name in mine.keys() | other.keys() if not name.startswith(("data_plane/", *ACCOUNT))}
        assert {name: mine.get(name) for name in names} == {name: other.get(name) for name in names}
    files = [path.relative_to(logs) for path in sorted(logs.rglob("step_4/**/*.safetensors"))]
    assert files and all((logs / path).read_bytes() == (also / path).read_bytes() for path in files)


@pytest.mark.slow
@pytest.mark.parametrize(("in_flight", "more"), [("recompute", {}), ("drain", CURRICULUM), ("keep", {})])
def test_no_row_is_older_than_the_bound_and_the_schedule_replays_to_the_last_bit(tmp_path, model, in_flight, more):
    bound = {"grpo.async.max_staleness": "2", "grpo.async.lookahead": "2", "policy.generation.in_flight": in_flight}
    kept = {"diagnostics.keep_steps.enabled": "true", "checkpointing.enabled": "true", "checkpointing.save_period": "4"}
    logs = train(tmp_path, model, {**CORRECTED, **UNEQUAL, **bound, **kept, **more}, steps=8)
    steps = logged_steps(logs)
    ages = [row.get("rollout/staleness_max", 0) for row in steps]
    assert len(steps) == 8 and 0 < max(ages) <= 2 and steps[-1]["rollout/groups_over_age"] == 0
    assert all(row["data_plane/live_rows"] >= 0 for row in steps)
    counts = Counter(ordinal for groups in groups_of_steps(logs).values() for ordinal in groups)
    assert set(counts.values()) == {1} and len(counts) == 8 * PROMPTS
    report = replay_run(logs, start=0, stop=8, console=Console(file=io.StringIO()))
    assert report.verdict is Verdict.PASS, "\n".join(report.lines())
    assert report.facts == {"last_step": 8, "num_groups": 8 * PROMPTS, "num_weights": 8}
    if in_flight == "recompute":
        assert replay_step(ReplayRequest(run=logs, step=6, in_one_process=True)).verdict is Verdict.PASS


@pytest.mark.slow
def test_a_replay_names_the_first_number_that_differs(tmp_path, model):
    logs = train(tmp_path, model, {**CORRECTED, **UNEQUAL}, steps=3)
    report = replay_run(
        logs, start=0, stop=3, overrides=["policy.optimizer.kwargs.lr=2e-3"], console=Console(file=io.StringIO())
    )
    assert report.verdict is Verdict.MISMATCH and report.first.step == 1
    assert "weights" in {site.name for site in report.sites if site.step == 1 and not site.agrees}
    result = CliRunner().invoke(app, ["compare", str(logs), "replay", "--to", "9"])
    assert result.exit_code == Verdict.USAGE.value and "expected 1 to 3" in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("keeps", ["false", "true"], ids=["sampled again", "kept"])
def test_a_resumed_run_trains_every_prompt_once(tmp_path, model, keeps):
    saving = {"checkpointing.enabled": "true", "checkpointing.save_period": "1", "checkpointing.keep_top_k": "null"}
    bound = {"grpo.async.max_staleness": "2", "grpo.async.lookahead": "2", "grpo.async.selection": "ready_first"}
    changes = {**CORRECTED, **UNEQUAL, **saving, **bound, **CURRICULUM, "grpo.async.keep_finished": keeps}
    folder = train(tmp_path, model, changes, steps=8) / "checkpoints"
    kept = [step for step in range(1, 8) if (folder / f"step_{step}" / GROUPS).is_dir()]
    assert bool(kept) is (keeps == "true")
    # As if it had been killed after step 3, with groups of later steps in flight.
    (folder / "latest").unlink()
    for step in range(4, 9):
        shutil.rmtree(folder / f"step_{step}")
    saved = CheckpointManager(folder, keep_top_k=None, metric_name="val:reward").latest()
    assert saved is not None and saved.step == 3
    if saved.state[FRONTIER_STATE]["done"]:
        again = {"checkpointing.enabled": "true", "checkpointing.resume": "true"}
        with pytest.raises(CheckpointError, match="resume it with grpo.async.enabled=true"):
            train(tmp_path, model, {**again, "checkpointing.checkpoint_dir": str(saved.path.parent)})
    logs = train(tmp_path, model, {**changes, "checkpointing.resume": "true"})
    counts = Counter(ordinal for groups in groups_of_steps(logs).values() for ordinal in groups)
    assert set(counts.values()) == {1} and len(counts) == 8 * PROMPTS
    assert all(row.get("rollout/staleness_max", 0) <= 2 for row in logged_steps(logs))
    first, second = draws_of_starts(logs)
    # What the checkpoint had drawn is drawn again; what came after it follows from other groups.
    again = {place: prompt for place, prompt in second.items() if place < 4 * PROMPTS}
    assert (again or keeps == "true") and again == {place: first[place] for place in again}


@pytest.mark.slow
def test_with_dynamic_sampling_groups_that_teach_nothing_are_replaced(tmp_path, model):
    changes = {"grpo.use_dynamic_sampling": "true", "env.score_threshold": "0.6", "grpo.async.max_staleness": "1"}
    logs = train(tmp_path, model, {**CORRECTED, **UNEQUAL, **changes}, steps=4)
    steps = logged_steps(logs)
    assert len(steps) == 4 and steps[-1]["rollout/groups_filtered"] > 0
    assert all(row["rollout/trivial_group_share"] == 0 for row in steps)
    assert all(row.get("rollout/staleness_max", 0) <= 1 for row in steps)
    settled = sum(map(len, groups_of_steps(logs).values()))
    assert settled == 4 * PROMPTS


SLEEP = {
    "policy.generation.backend": "benchmarks.sleep_engine:build_sleep_engine",
    "policy.generation.options": "{median_tokens: 3, tail_ratio: 4, tokens_per_s: 500, endless_share: 0.02}",
    "policy.generation.receipt.enabled": "false",
}
"""An engine of which one row of fifty never ends."""


@pytest.mark.slow
def test_groups_without_an_end_are_dropped_and_counted_where_the_recipe_says_so(tmp_path, model):
    changes = {**CORRECTED, **SLEEP, "grpo.async.overdue": "drop", "grpo.async.max_staleness": "1"}
    changes["cluster.stage_timeout_s"] = "6"
    logs = train(tmp_path, model, changes, steps=8)
    steps = logged_steps(logs)
    assert len(steps) == 8 and steps[-1]["rollout/groups_dropped"] > 0 and steps[-1]["rollout/groups_over_age"] == 0
    assert max(row.get("rollout/staleness_max", 0) for row in steps) <= 1
    with pytest.raises(UserError, match=r"overdue: error.*|has not ended"):
        train(tmp_path / "error", model, {**changes, "grpo.async.overdue": "error"}, steps=8)


@pytest.mark.slow
def test_a_step_that_waits_for_ever_ends_with_the_group_that_it_waits_for(tmp_path, model):
    changes = {**CORRECTED, **SLEEP, "grpo.async.max_staleness": "1", "cluster.stage_timeout_s": "4"}
    with pytest.raises(WorkerError, match=r"step \d+ has waited \d+ s.*group \d+\.0 \(prompt \d+, uid"):
        train(tmp_path, model, changes, steps=20)


def test_a_folder_without_a_schedule_is_refused(tmp_path):
    with pytest.raises((CheckpointError, UserError), match="only asynchronous runs"):
        replay_run(tmp_path, start=0, stop=1, console=Console(file=io.StringIO()))
