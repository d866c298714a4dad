"""The KL between rollout and trainer, split: each planted cause is named first, and the parts add up to the total."""

from __future__ import annotations

import io
import json
import math
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from nemo_rl.algorithms.kept_steps.folder import ROLLOUT_FILE, StepsFolder
from nemo_rl.algorithms.run import run
from nemo_rl.cli.main import app
from nemo_rl.data_plane.column_io import read_column_file, write_column_file
from nemo_rl.jagged import nest
from nemo_rl.models.head.logits import SUPPORT
from nemo_rl.models.head.logprobs import Sampling
from nemo_rl.utils.checkpoint import MANIFEST_FILE, Manifest
from nemo_rl_tools.mismatch import progress
from nemo_rl_tools.mismatch.explain import MismatchReport, explain_mismatch, look_at
from nemo_rl_tools.mismatch.parts import divergence
from nemo_rl_tools.mismatch.scorer import scaled_rope
from nemo_rl_tools.mismatch.tokens import StepTokens
from nemo_rl_tools.step_replay.chain import ReplayProblem, ReplayRequest
from nemo_rl_tools.verdict import Verdict
from tests.helpers.mismatch_causes import (
    CASES,
    KEEPS,
    STEP,
    Base,
    Case,
    Rows,
    bf16_engine,
    explain,
    make_base,
    no_fault,
)
from tests.helpers.runs import LOCAL, ROOT, load_recipe, write_recipe
from tests.helpers.tiny_model import tiny_model

DENSE = [name for name, case in CASES.items() if not case.experts]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    return _from_root(tmp_path_factory.mktemp("dense"), experts=False)


def _from_root(folder: Path, *, experts: bool) -> Base:
    before = Path.cwd()
    os.chdir(ROOT)
    try:
        return make_base(folder, seed=2, experts=experts)
    finally:
        os.chdir(before)


def check_named(base: Base, name: str, folder: Path) -> None:
    report = explain(base, CASES[name], folder)
    assert report.verdict is Verdict.MISMATCH
    assert report.first is not None and report.first.cause == CASES[name].expected, list(report.lines())
    assert sum(part.kl for part in report.parts) == pytest.approx(report.total.kl, rel=1e-9)
    assert report.first.share > 0.8
    assert report.total.std_error > 0 and abs(report.far[0].apart) == pytest.approx(report.total.largest)


@pytest.mark.parametrize("name", DENSE)
def test_a_planted_cause_is_named_first_and_the_parts_add_up(base: Base, tmp_path: Path, name: str) -> None:
    check_named(base, name, tmp_path / "run")


def test_other_routes_are_named_first(tmp_path: Path) -> None:
    check_named(_from_root(tmp_path / "base", experts=True), "routes off", tmp_path / "run")


def test_an_engine_as_it_should_be_is_within_noise(base: Base, tmp_path: Path) -> None:
    report = explain(base, Case(plant=no_fault, expected=""), tmp_path / "run")
    assert report.verdict is Verdict.PASS and report.first is None, list(report.lines())
    assert report.total.kl < 1e-11 < report.floor and report.total.num_tokens > 500


@pytest.mark.slow
def test_two_causes_have_a_part_each(base: Base, tmp_path: Path) -> None:
    def stale_and_cut(base: Base, folder: Path) -> Path:
        return base.keep(folder, base.sample(base.model(STEP - 2), top_p=0.8))

    report = explain(base, Case(plant=stale_and_cut, expected=""), tmp_path / "run")
    parts = {part.cause: part.share for part in report.parts}
    assert parts["weights"] > 0.1 and parts["top_p"] > 0.1 and parts["engine"] < 0.01, list(report.lines())
    assert sum(parts.values()) == pytest.approx(1.0)


def test_what_the_config_says_of_the_engine_is_tried_before_suppositions(base: Base, tmp_path: Path) -> None:
    """The trainer's own numbers say that it has left out the temperature of the config."""
    log_dir = base.keep(tmp_path / "run", base.sample(base.model(STEP - 1), temperature=0.8))
    request = ReplayRequest(run=log_dir, step=STEP, overrides=("policy.generation.temperature=0.8",))
    report = explain_mismatch(request)
    assert report.first is not None and report.first.cause == "temperature" and report.first.is_stated
    assert "temperature 1," in report.trainer and "0.8 (as configured)" in report.first.what
    precise = replace(request, run=bf16_engine(base, tmp_path / "bf16"), overrides=(HALF,))
    report = explain_mismatch(precise)
    assert report.first is not None and report.first.cause == "precision" and report.first.is_stated
    assert report.first.share == pytest.approx(1.0), "what is left is rounding of the same precision"


HALF = "policy.generation.precision=bfloat16"


def test_the_command_prints_causes_tokens_and_a_hint_and_says_what_is_missing(base: Base, tmp_path: Path) -> None:
    log_dir = CASES["token shift by one"].plant(base, tmp_path / "run")
    cli, arguments = CliRunner(), ["inspect", str(log_dir), "step", str(STEP), "mismatch"]
    shown = cli.invoke(app, arguments)
    assert shown.exit_code == Verdict.MISMATCH.value, shown.output
    assert f"rows of step {STEP} again, one change at a time" in shown.stderr
    for word in (
        "main cause: token shift (100%): each token -> the one behind it",
        "hint: ",
        "_g0[",
        "nats per token",
        " 100.0%",
    ):
        assert word in shown.output
    found = json.loads(cli.invoke(app, [*arguments, "--json", "row", "row0_g0", "row", "row1_g0"]).stdout)
    assert found["first"] == "shift" and found["verdict"] == "mismatch" and found["num_rows"] == 2
    step = log_dir / "steps" / f"step_{STEP}"
    columns = read_column_file(step / ROLLOUT_FILE)
    del columns["generation_logprobs"]
    write_column_file(step / ROLLOUT_FILE, columns)
    (step / MANIFEST_FILE).unlink()
    Manifest.write(step)
    missing = cli.invoke(app, arguments)
    assert missing.exit_code == Verdict.INCOMPLETE.value and "generation_logprobs" in missing.output


def test_weights_that_cannot_be_tried_are_said(base: Base, tmp_path: Path) -> None:
    log_dir = CASES["one version behind"].plant(base, tmp_path / "run")
    for gone in (log_dir / "steps" / "step_1", log_dir / "checkpoints" / "step_1"):
        shutil.rmtree(gone)
    report = explain_mismatch(ReplayRequest(run=log_dir, step=STEP))
    assert report.first is not None and report.first.cause == "engine"
    assert "weights of version 1 cannot be tried: step 1 was not kept" in report.notes[0]


def test_weights_that_no_checkpoint_has_are_replayed(base: Base, tmp_path: Path) -> None:
    log_dir = CASES["one version behind"].plant(base, tmp_path / "run")
    shutil.rmtree(log_dir / "checkpoints")
    report = explain_mismatch(ReplayRequest(run=log_dir, step=STEP))
    assert report.first is not None and report.first.cause == "weights" and not report.notes, list(report.lines())
    assert report.parts[0].kl == pytest.approx(0, abs=1e-9) and report.parts[-1].kl < 1e-9
    shutil.rmtree(log_dir / "steps" / "step_1")
    with pytest.raises(ReplayProblem, match="step 1 ") as caught:
        explain_mismatch(ReplayRequest(run=log_dir, step=STEP))
    assert caught.value.verdict is Verdict.INCOMPLETE


@pytest.mark.slow
def test_the_trainers_pass_is_run_again_where_the_run_had_none(base, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    changes = {**LOCAL, **KEEPS, "grpo.use_generation_logprobs_as_prev": "true"}
    config = load_recipe(write_recipe(tmp_path, base.log_dir.parent / "model"), changes)
    run(config, console=Console(file=io.StringIO()))
    request = ReplayRequest(run=config.logger.log_dir, step=STEP)
    report = explain_mismatch(request)
    assert report.verdict is Verdict.PASS and "its pass run again" in report.trainer, list(report.lines())
    assert report.total.mean_abs > 0, "two engines never round alike"
    keys = StepsFolder(request.run).all()[-1].read().keys[:1]
    assert explain_mismatch(replace(request, rows=keys)).num_rows == 1
    shutil.rmtree(request.run / "checkpoints" / "step_2")
    again = explain_mismatch(request)
    assert again.total == report.total and again.num_rows == report.num_rows


def test_an_explanation_reports_how_much_of_a_comparison_is_done(base, tmp_path, monkeypatch):
    monkeypatch.setattr(progress, "TELL_EVERY_S", 0.001)
    log_dir = CASES["one version behind"].plant(base, tmp_path / "run")
    shutil.rmtree(log_dir / "checkpoints")
    told: list[str] = []
    explain_mismatch(ReplayRequest(run=log_dir, step=STEP), report=told.append)
    assert [
        line for line in told if re.fullmatch(r"replaying steps [\d, ]+ for their weights: \d of \d, \d+ s.*", line)
    ]
    counted = [
        re.fullmatch(r"comparing .* rows scored: (\d+) of (\d+), \d+ s(, about \d+ s left)?", line) for line in told
    ]
    assert {match[3] is not None for match in counted if match} >= {True}
    assert all(int(match[1]) <= int(match[2]) for match in counted if match)


@pytest.mark.parametrize(
    ("total", "done", "taken_s", "line"),
    [
        (0, 0, 7, "scoring, 7 s"),
        (40, 0, 7, "scoring: 0 of 40, 7 s"),
        (40, 10, 7, "scoring: 10 of 40, 7 s, about 21 s left"),
        (40, 40, 7, "scoring: 40 of 40, 7 s, about 0 s left"),
    ],
)
def test_time_left_is_said_once_a_unit_is_done(total, done, taken_s, line, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    found = progress.Progress(lambda _: None)
    found.begin("scoring", total=total)
    found.advance(done)
    now[0] += taken_s
    assert found.line() == line


def test_k3_is_the_kl_of_the_sampled_side_and_its_error_is_that_of_rows() -> None:
    torch.manual_seed(0)
    rollout = torch.randn(50).double().log_softmax(0)
    trainer = (rollout + 0.3 * torch.randn(50)).log_softmax(0)
    ids = torch.multinomial(rollout.exp(), 40_000, replacement=True)
    exact = float((rollout.exp() * (rollout - trainer)).sum())
    found = divergence(trainer[ids], rollout[ids], torch.arange(40_000))
    assert abs(found.kl - exact) < 4 * found.std_error < 0.05 * exact
    # Each token ten times in one row: no more is known.
    repeated = ids.repeat_interleave(10)
    same = divergence(trainer[repeated], rollout[repeated], torch.arange(40_000).repeat_interleave(10))
    assert same.kl == pytest.approx(found.kl) and same.std_error == pytest.approx(found.std_error)
    beside = divergence(torch.tensor([0.0, math.nan]), torch.tensor([-0.5, 1.0]), torch.tensor([0, 0]))
    assert beside.num_tokens == 1 and beside.kl == pytest.approx(math.exp(0.5) - 1.5)


def test_thirds_of_a_row_are_of_its_sampled_tokens_whatever_lies_between_them() -> None:
    # Six sampled tokens; a long reply lies behind the second one. The difference is at the third and fourth.
    is_sampled = torch.zeros(1, 40, dtype=torch.bool)
    is_sampled[0, [3, 4, 30, 31, 32, 33]] = True
    tokens = StepTokens(
        rows=(0,),
        keys=("a",),
        versions=(0,),
        lengths=(40,),
        ids_NT=torch.zeros(1, 40, dtype=torch.int64),
        is_sampled_NT=is_sampled,
        rollout_M=torch.zeros(6),
        trainer_M=None,
        support_NS=None,
    )
    found = look_at(tokens, torch.tensor([0.0, 0.0, 1.0, 1.0, 0.0, 0.0]))
    assert (found.first_tokens, found.early, found.late) == (0.0, 0.0, 0.0)
    found = look_at(tokens, torch.tensor([1.0, 0.0, 0.0, 0.0, 0.5, 0.5]))
    assert found.first_tokens > found.late > 0.0 and found.early == pytest.approx(found.first_tokens / 2)


def test_a_scaled_rope_is_that_of_another_base_and_is_put_back() -> None:
    model = tiny_model()
    ids = torch.arange(10, 40)[None]
    other = type(model)(type(model.config)(**{**model.config.to_dict(), "rope_parameters": _rope(model, 10.0)}))
    other.load_state_dict(model.state_dict())
    with torch.inference_mode():
        before = model(ids).logits
        with scaled_rope(model, 10.0):
            torch.testing.assert_close(model(ids).logits, other.eval()(ids).logits)
            assert float((model(ids).logits - before).abs().max()) > 1e-2
        assert torch.equal(model(ids).logits, before)


def _rope(model: torch.nn.Module, factor: float) -> dict[str, object]:
    given = model.config.rope_parameters
    return {**given, "rope_theta": given["rope_theta"] * factor}


def test_rows_of_an_older_version_are_explained_by_their_tags(base: Base, tmp_path: Path) -> None:
    log_dir = base.keep(tmp_path / "run", base.sample(base.model(STEP - 2)), tag=STEP - 2)
    report = explain_mismatch(ReplayRequest(run=log_dir, step=STEP))
    assert report.first is not None and report.first.cause == "weights" and report.first.is_stated
    assert report.first.share == pytest.approx(1.0)


@pytest.mark.slow
def test_a_trainer_is_taken_at_its_own_numbers(base: Base, tmp_path: Path) -> None:
    """A filter in the trainer that the engine has not: the engine's side is the config's."""
    log_dir = base.keep(tmp_path / "run", base.sample(base.model(STEP - 1)), trainer=Sampling(top_k=20))
    report = explain_mismatch(ReplayRequest(run=log_dir, step=STEP))
    assert report.first is not None and report.first.cause == "top_k" and "top-k 20" in report.trainer


FILTER = "policy.generation.top_p=0.8"
FEW = "policy.generation.top_k=2"
"""So few that their change weighs more than that of the weights which moved them."""
RECORDED = (FILTER, "policy.generation.record_support=true")


def explained(log_dir: Path, *overrides: str) -> MismatchReport:
    report = explain_mismatch(ReplayRequest(run=log_dir, step=STEP, overrides=overrides))
    assert sum(part.kl for part in report.parts) == pytest.approx(report.total.kl, rel=1e-9)
    return report


def test_rows_with_recorded_sets_are_scored_under_them(base: Base, tmp_path: Path) -> None:
    rows = base.sample(base.model(STEP - 1), top_p=0.8, with_support=True)
    report = explained(base.keep(tmp_path / "run", rows, trainer=Sampling(top_p=0.8)), *RECORDED)
    assert report.verdict is Verdict.PASS and "recorded sets" in report.trainer, list(report.lines())
    assert report.total.kl < 1e-11
    # Other weights: what is left under the sets is theirs.
    stale = base.sample(base.model(STEP - 2), top_p=0.8, with_support=True)
    report = explained(base.keep(tmp_path / "stale", stale, trainer=Sampling(top_p=0.8)), *RECORDED)
    assert report.first is not None and report.first.cause == "weights", list(report.lines())
    assert report.first.share == pytest.approx(1.0, abs=1e-3) and report.parts[0].kl < 1e-9


def test_sets_that_were_not_recorded_are_named_where_they_are_most_of_it(base: Base, tmp_path: Path) -> None:
    filtered = Sampling(top_k=2)
    rows = base.sample(base.model(STEP - 2), top_k=2)
    report = explained(base.keep(tmp_path / "run", rows, trainer=filtered, tag=STEP - 2), FEW)
    assert report.first is not None and report.first.cause == "sets", list(report.lines())
    assert "top-k 2 without recorded sets" in report.first.what and report.first.share > 0.5
    # Under the sets the rest is that of the weights.
    parts = {part.cause: part.share for part in report.parts}
    assert parts["weights"] == pytest.approx(1 - report.first.share, abs=1e-3), parts
    # The trainer had the sets, but did not score under them.
    recorded = base.sample(base.model(STEP - 2), top_k=2, with_support=True)
    unused = replace(recorded, support=None)
    log_dir = base.keep(tmp_path / "unused", unused, trainer=filtered)
    _add_sets(log_dir, recorded)
    report = explained(log_dir, FEW)
    assert report.first is not None and report.first.cause == "sets", list(report.lines())
    assert "those that the rollout recorded" in report.first.what
    # Without a difference nothing is named.
    same = base.keep(tmp_path / "same", base.sample(base.model(STEP - 1), top_k=2), trainer=filtered)
    assert explained(same, FEW).verdict is Verdict.PASS


def _add_sets(log_dir: Path, rows: Rows) -> None:
    assert rows.support is not None
    step = log_dir / "steps" / f"step_{STEP}"
    sets = nest(torch.cat(rows.support), torch.tensor([len(row) for row in rows.support]))
    write_column_file(step / ROLLOUT_FILE, {**read_column_file(step / ROLLOUT_FILE), SUPPORT: sets})
    (step / MANIFEST_FILE).unlink()
    Manifest.write(step)
