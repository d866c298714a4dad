"""Whole runs with extra columns: the same numbers over every store, kept, replayed, logged and cleared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nemo_rl.algorithms.kept_steps.folder import ROLLOUT_FILE, StepsFolder
from nemo_rl.cli.main import app
from nemo_rl.data_plane.column_io import read_column_file, rows_as_list
from nemo_rl.data_plane.schema import FIELDS
from nemo_rl.errors import ConfigError
from nemo_rl_tools.step_replay.chain import ReplayRequest
from nemo_rl_tools.step_replay.replay import replay_step
from nemo_rl_tools.verdict import Verdict
from tests.helpers import mooncake
from tests.helpers.extra_columns import DECLARED, write_rows
from tests.helpers.runs import LOCAL, load_recipe, logged_steps, write_recipe
from tests.helpers.warm_runs import WarmRuns

HELPERS = "tests.helpers.extra_columns"
OWN = {"env": {"name": f"{HELPERS}:SpottedEnvironment"}, "loss_fn": {"name": f"{HELPERS}:ExtraLoss"}}
PLAIN_LOSS = {"loss_fn.name": "clipped_pg"}
KEEPS_NONE = {"diagnostics.keep_steps.enabled": "false"}
TWO_RANKS = {"cluster.cpu_workers_per_node": "2", "policy.dtensor_cfg.tensor_parallel_size": "2"}
STORES = {
    "shm": {**LOCAL, "data_plane.impl": "shm"},
    "mooncake": {**LOCAL, "data_plane.impl": "mooncake"},
    "ray-tp2": TWO_RANKS,
    "transfer_queue-tp2": {**TWO_RANKS, "data_plane.impl": "transfer_queue"},
}
MARKS = {"ray-tp2": [pytest.mark.full], "transfer_queue-tp2": [pytest.mark.slow]}


def train(
    runs: WarmRuns,
    folder: Path,
    model: Path,
    overrides: dict[str, str],
    declared: dict[str, dict[str, object]] = DECLARED,
) -> Path:
    """Return the log folder of two steps."""
    folder.mkdir(exist_ok=True)
    rows = {"dataset_name": "jsonl", "data_path": str(write_rows(folder / "rows.jsonl"))}
    recipe = write_recipe(
        folder,
        model,
        env={"reward_function": None, **OWN["env"]},
        loss_fn={**OWN["loss_fn"], "reference_policy_kl_penalty": 0.0},
        data={"train": rows, "max_input_seq_length": 24, "extra_columns": declared},
        grpo={"max_num_steps": 2, "drop_zero_advantage_groups": False},
        diagnostics={"keep_steps": {"enabled": True}},
    )
    config = load_recipe(recipe, overrides)
    runs.run(config)
    return config.logger.log_dir


@pytest.fixture(scope="module")
def alone(warm_runs: WarmRuns, tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    return train(warm_runs, tmp_path_factory.mktemp("noop"), model, LOCAL)


def learning(logs: Path) -> list[dict[str, float]]:
    steps = logged_steps(logs)
    return [{name: value for name, value in step.items() if name.startswith("train/")} for step in steps]


def kept_columns(logs: Path) -> list[dict[str, list[object]]]:
    """Return the extra columns of every kept step, row by row."""
    found = []
    for number in (1, 2):
        columns = read_column_file(StepsFolder(logs).path / f"step_{number}" / ROLLOUT_FILE)
        found.append({name: [_plain(row) for row in rows_as_list(columns[name])] for name in DECLARED})
    return found


def _plain(row: object) -> object:
    return row.tolist() if hasattr(row, "tolist") else row


def test_rows_keep_what_prompt_and_environment_gave(alone: Path) -> None:
    for columns in kept_columns(alone):
        for row in range(16):
            note, verdict = columns["note"][row], columns["verdict"][row]
            assert isinstance(note, dict) and isinstance(verdict, dict)
            number = note["number"]
            assert columns["image"][row] == [[number + patch / 8, 1.0, -patch] for patch in range(number % 4)]
            assert columns["grid"][row] == [[number, 1], [2, 3]] and columns["weight"][row] == 0.5 + number % 3
            assert verdict["answer"] == "".join(sorted(f"{number:03d}"))
        assert len({len(row) for row in columns["image"] if isinstance(row, list)}) > 1
    lines = [json.loads(line) for line in (alone / "rollouts" / "step_1.jsonl").read_text().splitlines()]
    assert all(set(line["extras"]) == {"weight", "note"} for line in lines)
    shown = CliRunner().invoke(app, ["inspect", str(alone), "step", "1", "rollouts"]).output
    assert "weight 1.5" in shown and 'note {"number": ' in " ".join(shown.split())


@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS.get(name, [])) for name in STORES])
def test_every_store_gives_the_numbers_of_one_process(
    warm_runs: WarmRuns, tmp_path: Path, model: Path, alone: Path, name: str
) -> None:
    if name == "mooncake" and (why := mooncake.why_not()):
        pytest.skip(why)
    logs = train(warm_runs, tmp_path, model, STORES[name])
    assert kept_columns(logs) == kept_columns(alone), "to the last bit"
    rows, others = learning(logs), learning(alone)
    if "tp2" in name:  # two ranks add in another order
        assert [row["train/loss"] for row in rows] == pytest.approx([row["train/loss"] for row in others], rel=1e-5)
    else:
        assert rows == others
    assert all(step["data_plane/live_rows"] == 0 for step in logged_steps(logs))


def test_a_step_with_extra_columns_is_replayed_to_the_last_bit(alone: Path) -> None:
    report = replay_step(ReplayRequest(run=alone, step=2, allows_code=True))
    assert report.verdict is Verdict.PASS, list(report.lines())
    assert not any(site.difference for site in report.sites)


def test_columns_that_no_pass_reads_move_once_and_change_no_other_traffic(
    warm_runs: WarmRuns, tmp_path: Path, model: Path
) -> None:
    unread = {name: {**column, "read_by": []} for name, column in DECLARED.items()}
    found = []
    for name, declared in (("with", unread), ("without", {})):
        logs = train(warm_runs, tmp_path / name, model, {**LOCAL, **PLAIN_LOSS, **KEEPS_NONE}, declared)
        steps = [{k: v for k, v in step.items() if k.startswith("data_plane/")} for step in logged_steps(logs)]
        own = [{k: v for k, v in step.items() if k.removeprefix("data_plane/bytes/") in FIELDS} for step in steps]
        found.append((own, [step["data_plane/over_read_bytes"] for step in steps], steps[0]))
    assert found[0][:2] == found[1][:2]
    assert found[0][2]["data_plane/bytes/grid"] == 16 * 4 * 2, "rows of four int16, put once"
    assert "data_plane/bytes/grid" not in found[1][2]


def test_an_environment_with_turns_gives_columns_with_its_replies(
    warm_runs: WarmRuns, tmp_path: Path, model: Path
) -> None:
    columns = {"spots": {**DECLARED["spots"], "read_by": ["train", "log"]}, "verdict": DECLARED["verdict"]}
    recipe = write_recipe(
        tmp_path,
        model,
        env={"reward_function": None, "name": f"{HELPERS}:CountingWords", "options": {"turns": 3}},
        loss_fn={"reference_policy_kl_penalty": 0.0},
        policy={"max_total_sequence_length": 96},
        data={"extra_columns": columns},
        experience={"conversation": {"enabled": True}},
        grpo={"max_num_steps": 2, "drop_zero_advantage_groups": False},
        diagnostics={"keep_steps": {"enabled": True}},
    )
    config = load_recipe(recipe, LOCAL)
    warm_runs.run(config)
    kept = read_column_file(StepsFolder(config.logger.log_dir).path / "step_1" / ROLLOUT_FILE)
    spots, verdicts = ([_plain(row) for row in rows_as_list(kept[name])] for name in ("spots", "verdict"))
    assert [len(row) for row in spots if isinstance(row, list)] == [3] * 16 and verdicts == [{"turns": 3}] * 16
    lines = [
        json.loads(line) for line in (config.logger.log_dir / "rollouts" / "step_1.jsonl").read_text().splitlines()
    ]
    assert [line["extras"]["spots"] for line in lines] == spots[: len(lines)]
    report = replay_step(ReplayRequest(run=config.logger.log_dir, step=2, allows_code=True))
    assert report.verdict is Verdict.PASS, list(report.lines())


@pytest.mark.parametrize(
    ("name", "column", "message"),
    [
        ("absent", {"dtype": "float32"}, "no such column; the row has"),
        ("grid", {"dtype": "int16", "dims": [3, 2]}, r"expected dims \[3, 2\], got shape \[2, 2\]"),
        ("weight", {"dtype": "int32"}, "expected whole numbers"),
        ("verdict", {"dtype": "float32", "source": "environment"}, "expected numbers of dims"),
        ("lost", {"dtype": "float32", "source": "environment"}, "expected 16 values from the environment"),
    ],
)
def test_a_value_that_does_not_fit_ends_the_run_with_its_name(
    warm_runs: WarmRuns, tmp_path: Path, model: Path, name: str, column: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=f"data.extra_columns.{name}.*{message}"):
        train(warm_runs, tmp_path, model, {**LOCAL, **PLAIN_LOSS}, {name: column})
