"""Kept steps of whole runs, replayed: to the last bit in their layout, within bounds in others, and after a fall."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from nemo_rl.algorithms.kept_steps.folder import STEP_FILE, UPDATE_FILE, StepsFolder, StepStatus
from nemo_rl.algorithms.run import run
from nemo_rl.cli.main import app
from nemo_rl.errors import ConfigError, NonFiniteError, UserError
from nemo_rl.utils.checkpoint import Manifest
from nemo_rl_tools.compare.folders import compare_folders
from nemo_rl_tools.compare.limits import read_limits
from nemo_rl_tools.step_replay.chain import ReplayProblem, ReplayRequest
from nemo_rl_tools.step_replay.replay import replay_step
from nemo_rl_tools.verdict import Comparison, Verdict
from tests.helpers.faulty_loss import row_sums
from tests.helpers.model_families import write_family
from tests.helpers.runs import LOCAL, load_recipe, logged_steps, write_recipe

KEEP = {"diagnostics.keep_steps.enabled": "true"}
FOUR_STEPS = {"grpo.max_num_steps": "4"}
SAVES = {"checkpointing.enabled": "true", "checkpointing.save_period": "2", "checkpointing.keep_top_k": "null"}
OWN_TRAFFIC = ("data_plane/", "keep/", "train/tflops")
"""What reading the columns once more adds to."""
PLANTED = "tests.helpers.faulty_loss:PlantedLoss"


def train(folder: Path, model: Path, overrides: dict[str, str]) -> Path:
    """The log folder of a run of four steps with a checkpoint after the second."""
    config = load_recipe(write_recipe(folder, model), {**LOCAL, **FOUR_STEPS, **SAVES, **overrides})
    run(config, console=Console(file=io.StringIO()))
    return config.logger.log_dir


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    return train(tmp_path_factory.mktemp("kept"), model, KEEP)


@pytest.fixture
def copied(tmp_path: Path, kept: Path) -> Path:
    """For a test that changes it."""
    return Path(shutil.copytree(kept, tmp_path / "logs"))


def words(report: Comparison) -> dict[tuple[int, str], bool | None]:
    return {(site.step, site.name): site.agrees for site in report.sites}


def test_a_step_after_a_checkpoint_and_one_after_the_start_are_replayed_to_the_last_bit(kept: Path) -> None:
    for number, start in ((4, "step_2"), (2, "the initial model")):
        report = replay_step(ReplayRequest(run=kept, step=number))
        assert report.verdict is Verdict.PASS, list(report.lines())
        assert start in report.title and {site.step for site in report.sites} == {number - 1, number}
        assert not any(site.difference for site in report.sites)
        stages = [site.name for site in report.sites if site.step == number]
        for stage in ("plan", "prev_logprobs", "reference_logprobs", "loss per microbatch", "grad_norm", "weights"):
            assert stage in stages
        assert report.seconds < 300


def test_keeping_changes_no_number_of_the_run(tmp_path: Path, model: Path, kept: Path) -> None:
    def learned(log_dir: Path) -> list[dict[str, float]]:
        rows = logged_steps(log_dir)
        return [{name: row[name] for name in row if not name.startswith(OWN_TRAFFIC)} for row in rows]

    without = train(tmp_path, model, {})
    assert learned(kept) == learned(without) and len(learned(kept)) == 4
    assert not (without / "steps").exists()
    assert all(row["keep/step_bytes"] > 0 for row in logged_steps(kept))


def test_another_config_answers_what_if(kept: Path) -> None:
    same = replay_step(ReplayRequest(run=kept, step=4, overrides=("loss_fn.ratio_clip_max=0.2",)))
    assert same.verdict is Verdict.PASS and same.first is None
    with pytest.raises(ConfigError, match=r"did you mean 'ratio_clip_max'"):
        replay_step(ReplayRequest(run=kept, step=4, overrides=("loss_fn.ratio_clip_mx=0.2",)))
    other = replay_step(ReplayRequest(run=kept, step=4, overrides=("loss_fn.reference_policy_kl_penalty=0.5",)))
    assert other.verdict is Verdict.PASS and other.first.label == "loss per microbatch of step 3"
    assert any("what if" in line and "loss_fn.reference_policy_kl_penalty=0.5" in line for line in other.lines())


def test_some_rows_alone_are_scored_without_an_update(kept: Path) -> None:
    keys = StepsFolder(kept).all()[-1].read().keys[:2]
    report = replay_step(ReplayRequest(run=kept, step=4, rows=keys))
    assert words(report)[4, "prev_logprobs"] and (4, "weights") not in words(report)
    assert report.verdict is Verdict.INCOMPLETE and any("2 rows" in note for note in report.notes)
    with pytest.raises(ReplayProblem, match="has no row nobody_g0"):
        replay_step(ReplayRequest(run=kept, step=4, rows=("nobody_g0",)))


@pytest.mark.slow
def test_the_other_worker_is_within_the_limits(kept: Path, tmp_path: Path) -> None:
    report = replay_step(ReplayRequest(run=kept, step=2, worker="megatron"))
    assert report.verdict is Verdict.PASS, list(report.lines())
    assert "the megatron worker in place of dtensor" in report.inexact
    found = words(report)
    assert found[2, "columns"] and found[2, "plan"] and found[2, "weights"]
    (tmp_path / "limits").write_text("- {sites: logprob, metric: max_abs, max: 0}\n")
    tight = replay_step(ReplayRequest(run=kept, step=2, worker="megatron", limits=read_limits(tmp_path / "limits")))
    assert tight.verdict is Verdict.MISMATCH and tight.first.label.startswith("prev_logprobs")
    with pytest.raises(ReplayProblem, match=r"cannot read the optimizer's state") as caught:
        folder = StepsFolder(kept).path
        (folder / "step_1").rename(folder / "aside")
        try:
            replay_step(ReplayRequest(run=kept, step=4, worker="megatron"))
        finally:
            (folder / "aside").rename(folder / "step_1")
    assert caught.value.verdict is Verdict.INCOMPLETE


def other_norm(outcome: dict) -> None:
    outcome["grad_norms"][0] += 1e-9


def other_weights(outcome: dict) -> None:
    outcome["weights"]["bits"] = outcome["weights"]["bits"][::-1]


@pytest.mark.parametrize(("change", "stage"), [(other_norm, "grad_norm"), (other_weights, "weights")])
def test_what_is_not_as_it_was_kept_is_named(change: Callable[[dict], None], stage: str, copied: Path) -> None:
    step = copied / "steps" / "step_4"
    record = json.loads((step / STEP_FILE).read_text())
    change(record["outcome"])
    (step / STEP_FILE).write_text(json.dumps(record))
    with pytest.raises(ReplayProblem, match=STEP_FILE) as caught:
        replay_step(ReplayRequest(run=copied, step=4))
    assert caught.value.verdict is Verdict.CORRUPT
    Manifest.write(step)
    (step / "manifest.json").write_text(_without_itself((step / "manifest.json").read_text()))
    report = replay_step(ReplayRequest(run=copied, step=4))
    assert report.verdict is Verdict.MISMATCH and (report.first.step, report.first.name) == (4, stage)


EDITS: dict[str, Callable[[dict], None]] = {
    "number": lambda record: record.update(number=3),
    "seed": lambda record: record.update(seed=record["seed"] + 1),
    "stages": lambda record: record["run"].update(stages=["rollout"]),
    "world_size": lambda record: record["run"].update(world_size=10**9),
    "config": lambda record: record["run"].update(config={"grpo": []}),
    "plan": lambda record: record["plan"]["microbatches"][0][0].append(10**6),
    "trained": lambda record: record.update(trained=[0, 0]),
    "rows.lengths": lambda record: record["rows"]["lengths"].pop(),
    "keys": lambda record: record["rows"].pop("keys"),
    "versions": lambda record: record["rows"].update(versions=[[[]]]),
}


@pytest.mark.parametrize("name", EDITS)
def test_an_edited_record_is_corrupt_though_its_checksums_are_right(name: str, copied: Path) -> None:
    step = copied / "steps" / "step_4"
    record = json.loads((step / STEP_FILE).read_text())
    EDITS[name](record)
    (step / STEP_FILE).write_text(json.dumps(record))
    Manifest.write(step)
    (step / "manifest.json").write_text(_without_itself((step / "manifest.json").read_text()))
    done = CliRunner().invoke(app, ["compare", str(copied), "replay", "step", "4"])
    assert done.exit_code == Verdict.CORRUPT.value, done.output
    assert str(step / STEP_FILE) in done.output.replace("\n", "") and "Traceback" not in done.output


def _without_itself(text: str) -> str:
    files = json.loads(text)["files"]
    files.pop("manifest.json", None)
    return json.dumps({"files": files})


def test_a_missing_step_and_a_torn_file_have_exit_codes_of_their_own(copied: Path) -> None:
    shutil.rmtree(copied / "steps" / "step_3")
    cli = CliRunner()
    gone = cli.invoke(app, ["compare", str(copied), "replay", "step", "4"])
    assert gone.exit_code == Verdict.INCOMPLETE.value and "step 3" in gone.output
    content = (copied / "steps" / "step_4" / UPDATE_FILE).read_bytes()
    (copied / "steps" / "step_4" / UPDATE_FILE).write_bytes(content[:-5])
    torn = cli.invoke(app, ["compare", str(copied), "replay", "step", "4"])
    assert torn.exit_code == Verdict.CORRUPT.value and UPDATE_FILE in torn.output
    assert cli.invoke(app, ["compare", str(copied), "replay", "step", "9"]).exit_code == Verdict.INCOMPLETE.value


def planted_row(log_dir: Path) -> int:
    """A trained row of step 3 that no other step has."""
    rows = {}
    for folder in StepsFolder(log_dir).all():
        step, (rollout, _) = folder.read(), folder.columns()
        ids = rollout["input_ids"].to_padded_tensor(0)
        sums = row_sums(ids, rollout["input_lengths"])
        rows[step.number] = [sums[row] for row in step.trained or ()]
    others = {row for number, found in rows.items() if number != 3 for row in found}
    return next(row for row in rows[3] if row not in others)


def test_a_planted_nan_keeps_the_step_that_failed_and_the_replay_fails_alike(
    tmp_path: Path, model: Path, kept: Path
) -> None:
    plants = {"loss_fn.name": PLANTED, "loss_fn.options": f"{{row: {planted_row(kept)}}}"}
    with pytest.raises(NonFiniteError, match="NaN or inf in the loss"):
        train(tmp_path, model, {**KEEP, **plants})
    log_dir = tmp_path / "logs"
    failed = StepsFolder(log_dir).all()[-1]
    assert failed.number == 3 and failed.read().status is StepStatus.FAILED
    with pytest.raises(ReplayProblem, match=rf"loss_fn.name: '{PLANTED}'. Add --allow-code") as refused:
        replay_step(ReplayRequest(run=log_dir, step=3))
    assert refused.value.verdict is Verdict.USAGE
    report = replay_step(ReplayRequest(run=log_dir, step=3, allows_code=True))
    assert report.verdict is Verdict.PASS, list(report.lines())
    assert words(report)[3, "error"] and words(report)[3, "prev_logprobs"]
    assert "NaN or inf in the loss" in "\n".join(report.lines())
    # The loss itself is the first value that is not finite, of the microbatch with the planted row.
    assert [note for note in report.notes if note.startswith("first NaN or infinity: train/loss, microbatch ")]


def test_sites_are_recorded_on_the_way(kept: Path, tmp_path: Path) -> None:
    request = ReplayRequest(run=kept, step=4, dump="layer.out, logprob", out=tmp_path / "a 'dump'")
    assert replay_step(request).verdict is Verdict.PASS
    assert replay_step(replace(request, in_one_process=True, out=tmp_path / "again")).verdict is Verdict.PASS
    found = compare_folders(tmp_path / "a 'dump'", tmp_path / "again")
    assert found.verdict is Verdict.PASS, found.outcome.text
    assert {result.site.phase for result in found.sites} >= {"prev_logprobs", "train"}
    with pytest.raises(UserError, match="selector"):
        replay_step(replace(request, dump="layers"))
    with pytest.raises(UserError, match="--out"):
        replay_step(replace(request, out=None))


def test_a_run_killed_in_mid_step_is_replayed_to_the_step_that_it_was_in(
    tmp_path: Path, model: Path, kept: Path
) -> None:
    logs, left = tmp_path / "logs", tmp_path / "left"
    options = {
        "row": planted_row(kept),
        "folder": str(logs),
        "copy": str(left),
        "after": str(logs / "steps" / "step_3" / UPDATE_FILE),
    }
    with pytest.raises(NonFiniteError):
        train(tmp_path, model, {**KEEP, "loss_fn.name": PLANTED, "loss_fn.options": json.dumps(options)})
    report = replay_step(ReplayRequest(run=left, step=3, overrides=("loss_fn.options={row: -1}",), allows_code=True))
    assert report.verdict is Verdict.PASS and "in flight" in "\n".join(report.lines())
    found = words(report)
    assert found[3, "columns"] and found[3, "plan"] and found[3, "prev_logprobs"] and found[3, "loss"] is None


@pytest.mark.slow
@pytest.mark.parametrize("source", ["rollout", "prev_logprobs"])
def test_kept_routes_are_replayed_with_their_step(tmp_path: Path, source: str) -> None:
    replay = "policy.router_replay"
    routes = {f"{replay}.enabled": "true", f"{replay}.source": source}
    moe = write_family(tmp_path / "model", "qwen3_moe")
    log_dir = train(tmp_path / "run", moe, {**KEEP, **routes, "policy.generation.precision": "bfloat16"})
    rollout, update = StepsFolder(log_dir).all()[-1].columns()
    assert "routed_experts" in (rollout if source == "rollout" else update)
    report = replay_step(ReplayRequest(run=log_dir, step=4))
    assert report.verdict is Verdict.PASS, list(report.lines())
    assert not any(site.difference for site in report.sites)
    assert ((4, "routes") in words(report)) is (source == "prev_logprobs"), "those that the replay records again"


LAYOUTS = {
    "dp2": {"data_plane.impl": "ray"},
    "tp2": {
        "policy.dtensor_cfg.tensor_parallel_size": "2",
        "policy.dtensor_cfg.sequence_parallel": "true",
        "policy.dynamic_batching.enabled": "false",
        "policy.sequence_packing.enabled": "true",
        "policy.sequence_packing.train_mb_tokens": "64",
        "policy.sequence_packing.logprob_mb_tokens": "64",
    },
}


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_run_on_two_ranks_is_replayed_on_two_and_on_one(tmp_path: Path, model: Path, name: str) -> None:
    config = load_recipe(write_recipe(tmp_path, model), {**FOUR_STEPS, **SAVES, **KEEP, **LAYOUTS[name]})
    run(config, console=Console(file=io.StringIO()))
    exact = replay_step(ReplayRequest(run=config.logger.log_dir, step=4))
    assert exact.verdict is Verdict.PASS and not exact.inexact, list(exact.lines())
    alone = replay_step(ReplayRequest(run=config.logger.log_dir, step=4, in_one_process=True))
    assert alone.verdict is Verdict.PASS and alone.inexact, list(alone.lines())
