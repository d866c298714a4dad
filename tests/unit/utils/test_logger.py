"""The fan-out to trackers: real JSONL, TensorBoard and offline wandb files; a failing tracker never stops a run."""

from __future__ import annotations

import json
import logging
import math
import struct
import subprocess
import sys
import textwrap
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from nemo_rl.algorithms.run import write_reward_curve
from nemo_rl.config.run import LoggerConfig
from nemo_rl.utils.logger import REWARD_METRIC, VAL_ACCURACY_METRIC, Logger, build_logger
from nemo_rl.utils.trackers import JsonlTracker, Tracker, has_mlflow, read_metrics


class Recorder(Tracker):
    """Keeps what it gets; raises from `fails_at` on."""

    def __init__(self, name: str, *, fails_at: int = 10**9) -> None:
        self.name, self._fails_at = name, fails_at
        self.seen: list[tuple[int, dict[str, float]]] = []
        self.is_closed = False

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        if step >= self._fails_at:
            raise OSError("no space left")
        self.seen.append((step, dict(metrics)))

    def close(self) -> None:
        self.is_closed = True


def test_a_failing_tracker_warns_once_and_the_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    bad, good = Recorder("bad", fails_at=2), Recorder("good")
    logger = Logger([bad, good])
    with caplog.at_level(logging.WARNING):
        for step in (1, 2, 3):
            logger.log_metrics({"a": step}, step)
    assert [record.getMessage() for record in caplog.records] == [
        "tracker 'bad' failed and is switched off: OSError: no space left"
    ]
    assert [step for step, _ in good.seen] == [1, 2, 3]
    assert bad.is_closed
    assert logger.active == ("good",)
    logger.close()
    assert good.is_closed


def test_a_tracker_that_cannot_start_warns_and_the_run_goes_on(tmp_path, caplog):
    (tmp_path / "tensorboard").write_text("a file where a folder is needed")
    with caplog.at_level(logging.WARNING):
        logger = build_logger(LoggerConfig(log_dir=tmp_path), run_config={})
    logger.log_metrics({"a": 1.0}, 1)
    assert logger.active == ("jsonl",)
    assert "tracker 'tensorboard' failed" in caplog.text
    logger.close()


def test_jsonl_lines_can_be_read_while_the_run_goes_on(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path / "metrics.jsonl")
    tracker.log({"a": 0.5, "bad": math.nan}, step=3)
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 3, "a": 0.5, "bad": None}
    assert list(read_metrics(tmp_path / "metrics.jsonl")) == [{"step": 3, "a": 0.5}]
    tracker.close()


def test_a_resumed_run_replaces_the_steps_after_its_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 6, "a": 1, "b": null}\n{"step": 7, "a": 2}\n{"step": 8, "a": 3}\n{"step": 9, "a"')
    tracker = JsonlTracker(path, resume_step=7)
    tracker.log({"a": 30.0}, step=8)
    tracker.close()
    assert path.read_text() == '{"step": 6, "a": 1, "b": null}\n{"step": 7, "a": 2}\n{"step": 8, "a": 30.0}\n'


def test_damaged_lines_are_left_out_and_a_missing_step_is_told(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(
        b'{"step": 0, "v": 1}\n{"step": 1}\n\xff\xfe{"st\n[2]\n{"step": "x"}\n{"step": 3, "a": 3}\n' + b"[" * 10**5
    )
    assert [row["step"] for row in read_metrics(path)] == [0, 1, 3]
    JsonlTracker(path, resume_step=3).close()
    assert [row["step"] for row in read_metrics(path)] == [0, 1, 3]
    assert "lacks 1 steps up to the resumed one, the first is 2" in caplog.text


def test_tensorboard_events_hold_the_scalars(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = build_logger(LoggerConfig(log_dir=tmp_path), run_config={})
    logger.log_metrics({"train/loss": 0.25}, 4)
    logger.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(4, 0.25)]


def test_tensorboard_shows_each_step_of_a_resumed_run_once(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for resume_step, steps in ((None, (1, 2, 3)), (1, (2, 3, 4))):
        logger = build_logger(LoggerConfig(log_dir=tmp_path), run_config={}, resume_step=resume_step)
        for step in steps:
            logger.log_metrics({"train/loss": step / 10 + (resume_step or 0)}, step)
        logger.close()
        # Files of one second are in the order of their numbers as words, 10 before 9.
        ended = int(time.time())
        while int(time.time()) == ended:
            time.sleep(0.05)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    shown = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert shown == [(1, pytest.approx(0.1)), *((step, pytest.approx(step / 10 + 1)) for step in (2, 3, 4))]


@pytest.mark.slow
def test_wandb_offline_run_holds_the_metrics_and_leaves_no_process(tmp_path: Path) -> None:
    """In its own process: wandb starts a service and changes global state."""
    script = textwrap.dedent(
        """
        import sys
        from pathlib import Path
        from nemo_rl.config.run import LoggerConfig, WandbConfig
        from nemo_rl.utils.logger import build_logger
        import psutil

        config = LoggerConfig(
            log_dir=Path(sys.argv[1]), wandb_enabled=True, wandb=WandbConfig(mode="offline", name="a_run"),
            tensorboard_enabled=False,
        )
        logger = build_logger(config, run_config={"grpo": {"seed": 3}})
        assert logger.active == ("jsonl", "wandb"), logger.active
        for step in (1, 2):
            logger.log_metrics({"train/loss_of_this_test": 0.5 / step}, step)
        assert logger.active == ("jsonl", "wandb"), logger.active
        logger.close()
        gone, alive = psutil.wait_procs(psutil.Process().children(recursive=True), timeout=20)
        assert not alive, alive
        """
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    (recorded,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    content = recorded.read_bytes()
    assert b"train/loss_of_this_test" in content
    assert b"a_run" in content


@pytest.mark.slow
@pytest.mark.full
def test_mlflow_keeps_metrics_and_config_in_files_and_gives_up_on_a_server_that_is_not_there(tmp_path: Path) -> None:
    """In its own process: it imports a lot and sets variables."""
    if not has_mlflow():
        pytest.skip("the extra mlflow is not installed")
    script = textwrap.dedent(
        """
        import sys
        from pathlib import Path
        from nemo_rl.config.run import LoggerConfig, MlflowConfig
        from nemo_rl.utils.logger import build_logger

        folder = Path(sys.argv[1])
        plain = dict(log_dir=folder, mlflow_enabled=True, tensorboard_enabled=False)
        for mlflow in (MlflowConfig(run_name="a_run"), MlflowConfig(tracking_uri="http://127.0.0.1:9")):
            run_config = {"grpo": {"seed": 3}, **{f"key_{number}": number for number in range(150)}}
            logger = build_logger(LoggerConfig(mlflow=mlflow, **plain), run_config=run_config)
            for step in (1, 2):
                logger.log_metrics({"train/loss": 0.5 / step, "bad": float("nan")}, step)
            print(logger.active)
            logger.close()

        from mlflow.tracking import MlflowClient
        client = MlflowClient(tracking_uri=(folder / "mlflow").as_uri())
        [run] = client.search_runs([client.get_experiment_by_name("nemo_rl").experiment_id])
        history = client.get_metric_history(run.info.run_id, "train/loss")
        print(run.info.status, run.info.run_name, len(run.data.params), run.data.params["grpo.seed"])
        print([(metric.step, metric.value) for metric in history])
        """
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "('jsonl', 'mlflow')",
        "('jsonl',)",
        "FINISHED a_run 151 3",
        "[(1, 0.5), (2, 0.25)]",
    ]
    assert "tracker 'mlflow' failed and is switched off" in done.stderr


def test_reward_curve_is_a_picture_of_what_was_logged(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert not path.exists()
    tracker = JsonlTracker(path)
    assert write_reward_curve(path, tmp_path / "reward_curve.png") is None
    for step in range(1, 4):
        tracker.log({REWARD_METRIC: step / 10}, step=step)
    tracker.log({VAL_ACCURACY_METRIC: 0.3}, step=3)
    tracker.close()
    picture = write_reward_curve(path, tmp_path / "reward_curve.png")
    assert picture is not None
    head = picture.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", head[16:24]) == (840, 480)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["metrics.jsonl", "reward_curve.png"]
