"""A run folder holds one run, which goes on after an interruption as the last lines of the output say."""

from __future__ import annotations

import io
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest
from rich.console import Console

from nemo_rl.algorithms.run import run
from nemo_rl.algorithms.setup import open_trainer
from nemo_rl.errors import CheckpointError, UserError
from nemo_rl.utils.deadlines import SaveDeadline
from tests.helpers.runs import LOCAL, load_recipe, logged_steps, rollouts_of, start_cli, write_recipe

pytestmark = pytest.mark.slow

SAVING = {"enabled": True, "save_period": 1, "keep_top_k": None}


def train(recipe: Path, **overrides: object) -> tuple[list[dict[str, float]], str]:
    dotted = {name.replace("__", "."): str(value) for name, value in overrides.items()}
    config = load_recipe(recipe, {**LOCAL, **dotted})
    text = io.StringIO()
    run(config, console=Console(file=text, width=300, markup=False, highlight=False))
    return logged_steps(config.logger.log_dir), text.getvalue()


def test_a_used_folder_is_refused_overwritten_or_continued(tmp_path, model):
    recipe = write_recipe(tmp_path, model, checkpointing=SAVING)
    logs, saved = tmp_path / "logs", tmp_path / "logs" / "checkpoints"
    first, _ = train(recipe, grpo__max_num_steps=2)
    (logs / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"logs already holds a run \(metrics.jsonl, rollouts of 2 steps, 2 checkp"):
        train(recipe)
    assert logged_steps(logs) == first and (saved / "step_2").is_dir()

    again, _ = train(recipe, grpo__max_num_steps=3, logger__overwrite="true")
    assert [row["step"] for row in again] == [1, 2, 3] and again[:2] == first
    assert (logs / "notes.txt").read_text() == "mine"

    # As if it had been killed while step 3 was saved: its line and rollouts are there, its checkpoint is damaged.
    (saved / "step_3" / "training_info.json").write_text("{")
    rollouts = rollouts_of(logs, 3)
    rest, text = train(recipe, grpo__max_num_steps=3, checkpointing__resume="true")
    assert f"resuming after step 2 from {saved}/step_2: the newest intact one" in text
    learned = [{k: v for k, v in row.items() if not k.startswith("data_plane/")} for row in rest]
    assert learned == [{k: v for k, v in row.items() if not k.startswith("data_plane/")} for row in again]
    assert [row["response"] for row in rollouts_of(logs, 3)] == [row["response"] for row in rollouts]


def test_a_lost_optimizer_is_made_anew_only_when_asked_for(tmp_path, model):
    recipe = write_recipe(tmp_path, model, checkpointing={**SAVING, "save_optimizer": False})
    train(recipe, grpo__max_num_steps=1)
    resume = {"checkpointing__resume": "true", "checkpointing__save_optimizer": "true"}
    with pytest.raises(CheckpointError, match=r"step_1 holds no optimizer state.*load_optimizer=false"):
        train(recipe, **resume)
    rows, _ = train(recipe, **resume, checkpointing__load_optimizer="false")
    assert [row["step"] for row in rows] == [1, 2, 3]


def test_a_run_that_is_out_of_time_has_saved_and_goes_on_by_itself(tmp_path, model):
    """Between two periodic saves; the numbers are those of a run that was left alone."""
    saving = {**SAVING, "save_period": 3, "resume": "auto"}
    recipe = write_recipe(tmp_path / "cut", model, checkpointing=saving, grpo={"max_num_steps": 5})
    config = load_recipe(recipe, LOCAL)
    with open_trainer(config, console=Console(file=io.StringIO())) as trainer:
        summary = trainer.fit(deadline=SaveDeadline(100.0, clock=lambda: 0.0 if trainer._step < 2 else 99.0))
    assert summary.is_out_of_time and summary.num_steps == 2
    assert [path.name for path in sorted(config.checkpoint_dir.glob("step_*"))] == ["step_2"]
    rows, text = train(recipe)
    assert "resuming after step 2" in text
    alone, _ = train(write_recipe(tmp_path / "alone", model, checkpointing=saving, grpo={"max_num_steps": 5}))
    learned = [
        [{k: v for k, v in row.items() if not k.startswith("data_plane/")} for row in run] for run in (rows, alone)
    ]
    assert learned[0] == learned[1] and len(rows) == 5

    with (
        open_trainer(load_recipe(recipe, {**LOCAL, "grpo.max_num_steps": "9"}), console=Console(quiet=True)) as trainer,
        pytest.raises(UserError, match="1 s are left before the first step of this start"),
    ):
        trainer.fit(deadline=SaveDeadline(1.0, clock=lambda: 0.0))


def wait_for(pattern: str, folder: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 150
    while not any(folder.glob(pattern)):
        assert process.poll() is None, process.communicate()[0][-3000:]
        assert time.monotonic() < deadline, f"no {pattern} in {folder}"
        time.sleep(0.001)


def test_a_signal_during_a_save_is_an_interrupt_that_says_how_to_go_on(tmp_path, model, command_line):
    recipe = write_recipe(tmp_path, model, checkpointing=SAVING, grpo={"max_num_steps": 100_000})
    process = start_cli(recipe, *(f"{name}={value}" for name, value in LOCAL.items()))
    wait_for("step_1", tmp_path / "logs" / "checkpoints", process)
    with pytest.raises(UserError, match=rf"logs is in use by another run: process {process.pid} on "):
        train(recipe, logger__overwrite="true")
    wait_for("tmp_step_*", tmp_path / "logs" / "checkpoints", process)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "interrupted" in output and "Traceback" not in output and "disk" not in output, output
    *_, told, command = output.strip().splitlines()
    saved = sorted((tmp_path / "logs" / "checkpoints").glob("step_*"), key=lambda path: int(path.name.split("_")[1]))
    assert told == f"the last checkpoint is {saved[-1]}; to continue:", output
    last = int(saved[-1].name.removeprefix("step_"))
    # The words of the command, as the process was started: python, its script, --config, recipe, overrides.
    _, script, config, said_recipe, *overrides = shlex.split(command)
    assert (script, config, said_recipe) == ("examples/run_grpo.py", "--config", str(recipe))
    code, output = command_line(recipe, *overrides, f"grpo.max_num_steps={last + 1}")
    assert code == 0, output
    assert [row["step"] for row in logged_steps(tmp_path / "logs")] == list(range(1, last + 2))
