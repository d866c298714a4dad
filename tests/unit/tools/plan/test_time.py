"""Seconds of a step in virtual time: closed formulas, conservation, order, and constants found again in a run."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nemo_rl.algorithms.run_folder import write_config
from nemo_rl.cli.main import app
from nemo_rl.config.load import load_config
from nemo_rl.config.yaml_text import to_yaml
from nemo_rl.errors import ConfigError
from nemo_rl_tools.known_models import planned_model_config
from nemo_rl_tools.plan.setting import Model, PlanSetting
from nemo_rl_tools.plan.time_constants import TimeConstants, constants_of, measured_run
from nemo_rl_tools.plan.time_model import STEPS, WARM_UP_STEPS, StepSimulation, TimeEstimate, estimate
from nemo_rl_tools.plan.time_work import (
    PlannedRow,
    Workload,
    decode_amounts,
    pass_amounts,
    rows_of_step,
    workload_of,
)
from tests.repo.walk_docs import ROOT

DEMO, MATH = ROOT / "configs" / "grpo_sort_cpu.yaml", ROOT / "configs" / "recipes" / "grpo_math_1b.yaml"
SMALL = ("grpo.num_prompts_per_step=32", "policy.train_global_batch_size=64")
ALONE = ("policy.generation.num_replicas=1",)
ASYNC = ("grpo.async.enabled=true", "grpo.async.max_staleness=1", "grpo.use_generation_logprobs_as_prev=true")
EQUAL, UNEQUAL = Workload(rows=((17, 8),)), Workload(rows=tuple((17, length) for length in range(2, 11)))
CONSTANTS = TimeConstants(
    source="a test",
    is_measured=True,
    decode_flop_s=1e-10,
    turn_layer_s=2e-3,
    train_flop_s=8e-11,
    microbatch_layer_s=0.01,
    write_row_s={"sort": 1e-4},
    driver_step_s=0.05,
    refit_byte_s=3e-8,
)


def setting_of(*overrides: str) -> PlanSetting:
    config = load_config(DEMO, (*SMALL, *overrides))
    return PlanSetting(config=config, model=Model(planned_model_config(config.policy.model_name)), gpu=None)


def estimated(*overrides: str, constants: TimeConstants = CONSTANTS, **options: float | None) -> TimeEstimate:
    cores = options.get("cores")
    return estimate(setting_of(*overrides), constants, UNEQUAL, cores=cores)


def test_a_step_of_equal_rows_has_the_time_of_its_parts() -> None:
    setting = setting_of(*ALONE)
    found, rows = estimate(setting, CONSTANTS, EQUAL, cores=None), rows_of_step(setting, EQUAL)
    assert rows == [PlannedRow(prompt=17, response=8, is_trained=True)] * 256
    rollout = CONSTANTS.seconds(decode_amounts(setting, rows)) + 256 * 1e-4
    assert found.stages["rollout"] == pytest.approx(rollout)
    assert found.stages["train"] == pytest.approx(CONSTANTS.seconds(pass_amounts(setting, rows)))
    assert found.stages["refit"] == pytest.approx(434_944 * 4 * 3e-8)
    assert found.step_s == pytest.approx(sum(found.stages.values())) and found.stages["driver"] == pytest.approx(0.05)


def test_rows_that_are_not_trained_leave_their_own_update_and_stay_in_fixed_microbatches() -> None:
    row = PlannedRow(prompt=17, response=8, is_trained=True)
    rows = [replace(row, is_trained=number >= 64) for number in range(256)]
    dynamic, fixed = setting_of(), setting_of("policy.dynamic_batching.enabled=false")
    assert pass_amounts(dynamic, rows) == pass_amounts(dynamic, rows[64:])
    assert pass_amounts(dynamic, rows)["update_s"] == 3
    half = [replace(row, is_trained=number % 2 == 0) for number in range(256)]
    assert pass_amounts(fixed, half) == pass_amounts(fixed, [row] * 256) != pass_amounts(dynamic, half)


def test_rows_beyond_the_places_of_an_engine_wait_for_the_batch_before() -> None:
    setting = setting_of(*ALONE, "policy.generation.max_batch_size=64")
    rows = rows_of_step(setting, UNEQUAL)
    amounts = decode_amounts(setting, rows)
    assert amounts["turn_layer_s"] == 4 * 10 * 2
    found = estimate(setting, replace(CONSTANTS, write_row_s={"sort": 0.0}), UNEQUAL, cores=None)
    # Which prompts a batch has differs from step to step, and with it a few operations.
    assert found.stages["rollout"] == pytest.approx(CONSTANTS.seconds(amounts), rel=0.02)


@pytest.mark.parametrize("cores", [None, 2.0])
@pytest.mark.parametrize("overrides", [(), ASYNC])
def test_busy_and_idle_seconds_of_each_side_are_the_whole_run(overrides: tuple[str, ...], cores: float | None) -> None:
    setting = setting_of(*overrides)
    # In no time for new weights rows stand still in no engine.
    constants = replace(CONSTANTS, refit_byte_s=0.0)
    simulation = StepSimulation(setting, constants, UNEQUAL, cores=cores, steps=WARM_UP_STEPS + STEPS)
    run = simulation.run()
    assert run.engine_idle_s + simulation.busy_s["engines"] == pytest.approx(2 * run.seconds)
    assert 0 < simulation.busy_s["policy"] < run.seconds
    assert run.seconds == pytest.approx(sum(simulation.stage_s.values()) + run.trainer_idle_s)


def test_an_asynchronous_run_is_not_slower_where_each_has_its_own_processors() -> None:
    sync, ahead = estimated(), estimated(*ASYNC)
    assert ahead.step_s < sync.step_s and ahead.engine_idle_share < sync.engine_idle_share


def test_on_shared_processors_what_runs_at_once_takes_longer() -> None:
    alone, shared = estimated(*ASYNC, cores=8.0), estimated(*ASYNC, cores=2.0)
    assert alone == estimated(*ASYNC) and shared.stages["train"] > alone.stages["train"]
    # Two workers after two engines, on two processors, wait for nobody.
    assert estimated(cores=2.0) == estimated()
    # The work of all processes is there, however it is spread.
    assert estimated(cores=1.0).stages["train"] == pytest.approx(2 * estimated().stages["train"])


@pytest.mark.parametrize("name", ["decode_flop_s", "turn_layer_s", "train_flop_s", "driver_step_s", "refit_byte_s"])
@pytest.mark.parametrize("overrides", [(), ASYNC])
def test_a_slower_part_never_makes_a_step_faster(overrides: tuple[str, ...], name: str) -> None:
    factors = (0.5, 1.0, 2.0, 8.0)
    found = [
        estimated(*overrides, constants=replace(CONSTANTS, **{name: factor * getattr(CONSTANTS, name)}), cores=2.0)
        for factor in factors
    ]
    assert all(one.step_s <= other.step_s + 1e-9 for one, other in pairwise(found))
    assert found[0].step_s < found[-1].step_s


def write_run(folder: Path, constants: TimeConstants, *overrides: str) -> PlanSetting:
    """Write what a run would leave whose parts take what the constants say."""
    setting = setting_of(*overrides)
    rows, engines = rows_of_step(setting, UNEQUAL), setting.policy.generation.num_replicas
    write_config(folder, to_yaml(setting.config))
    (folder / "rollouts").mkdir()
    lines = [{"response_tokens": length, "token_ids": [0] * (prompt + length)} for prompt, length in UNEQUAL.rows]
    (folder / "rollouts" / "step_1.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    decode = constants.seconds(decode_amounts(setting, rows))
    tokens, train = sum(row.response for row in rows), constants.seconds(pass_amounts(setting, rows))
    rollout = decode + constants.row_write_s("sort") * len(rows)
    speeds = {f"rollout/engine_{each}/tokens_per_s": tokens / engines / decode for each in range(engines)}
    size = setting.model.num_parameters * 4 * engines
    step = {
        **{"timing/rollout_s": rollout, "timing/train_s": train, "rollout/response_tokens": tokens},
        **{"timing/step_s": rollout + train + constants.driver_step_s, "rollout/trivial_group_share": 0.0},
        **{"timing/refit_s": constants.refit_byte_s * size, **speeds},
    }
    metrics = [{"step": number, **step} for number in range(1, 9)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics))
    return setting


def test_constants_are_found_again_and_predict_other_sizes(tmp_path: Path) -> None:
    truth, runs = replace(CONSTANTS, driver_step_s=0.0), []
    for number, overrides in enumerate([(), ("grpo.num_prompts_per_step=16",)]):
        folder = tmp_path / str(number)
        folder.mkdir()
        setting = write_run(folder, truth, *overrides)
        runs.append(measured_run(folder, cores=2.0))
    found = constants_of(runs, source="a test")
    assert found.decode_flop_s == pytest.approx(truth.decode_flop_s, rel=1e-3)
    assert found.turn_layer_s == pytest.approx(truth.turn_layer_s, rel=1e-3)
    assert found.write_row_s == {"sort": pytest.approx(1e-4, rel=1e-3)}
    assert found.refit_byte_s == pytest.approx(truth.refit_byte_s, rel=1e-3)
    workload, setting = runs[0].workload, setting_of(*ASYNC, "grpo.num_prompts_per_step=24")
    assert estimate(setting, found, workload, cores=2.0).step_s == pytest.approx(
        estimate(setting, truth, workload, cores=2.0).step_s, rel=0.02
    )


def test_a_folder_that_is_no_measured_run_is_refused_with_what_it_lacks(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"expected the folder of a run with config\.yaml"):
        measured_run(tmp_path, cores=None)
    write_run(tmp_path, CONSTANTS)
    metrics = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    without = [{name: value for name, value in row.items() if name != "timing/refit_s"} for row in metrics]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in without))
    with pytest.raises(ConfigError, match=r"lack timing/refit_s in metrics\.jsonl"):
        measured_run(tmp_path, cores=None)
    (tmp_path / "rollouts" / "step_1.jsonl").unlink()
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics))
    with pytest.raises(ConfigError, match=r"set logger\.num_rollouts_to_log"):
        measured_run(tmp_path, cores=None)
    write_config(tmp_path, to_yaml(setting_of(*ASYNC, "loss_fn.reference_policy_kl_penalty=0.1").config))
    with pytest.raises(ConfigError, match="expected a synchronous run"):
        measured_run(tmp_path, cores=None)


def test_lengths_are_stated_as_a_number_or_a_span() -> None:
    setting = setting_of()
    assert [response for _, response in workload_of("3-5", setting).rows] == [3, 4, 5]
    for text in ("5-3", "0", "11", "a", "3-", "3-5-7"):
        with pytest.raises(ConfigError, match="--lengths: expected"):
            workload_of(text, setting)


@pytest.mark.parametrize("as_json", [False, True])
def test_the_command_shows_stages_and_splits(tmp_path: Path, as_json: bool) -> None:
    write_run(tmp_path, CONSTANTS)
    command = [
        "plan",
        str(DEMO),
        *SMALL,
        "--time",
        "--from",
        str(tmp_path),
        "--cores",
        "2",
        *(["--json"] if as_json else []),
    ]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    if as_json:
        found = json.loads(done.stdout)
        assert [(split["ranks"], split["engines"]) for split in found["splits"]] == [(3, 1), (2, 2), (1, 3)]
        assert found["best"]["ranks"] + found["best"]["engines"] == 4 and found["constants"]["is_measured"]
        path = tmp_path / "constants.json"
        path.write_text(done.stdout)
        assert TimeConstants.read(path).as_json() == found["constants"]
    else:
        assert "Splits of the same workers" in done.output and "this recipe" in done.output


def test_without_a_run_the_data_sheet_is_marked_as_not_measured() -> None:
    done = CliRunner().invoke(app, ["plan", str(MATH), "--time", "--gpu", "H100-80G", "--lengths", "64"])
    assert done.exit_code == 0 and "NOT MEASURED" in done.output
    for flags, text in ((["--time"], "--time: expected --from with a measured run"), (["--cores", "2"], "add it")):
        done = CliRunner().invoke(app, ["plan", str(DEMO), *flags])
        assert isinstance(done.exception, ConfigError) and text in str(done.exception)
