"""The trackers that receive the metrics of a run: `metrics.jsonl`, TensorBoard, Weights & Biases and MLflow.

The only file that names tensorboard, wandb (extra `wandb`) and mlflow (extra `mlflow`, its client without server and
database); each is imported when its tracker is made.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import math
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from nemo_rl.config.run import MlflowConfig, WandbConfig
from nemo_rl.utils.files import open_plain, write_text

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

__all__ = [
    "METRICS_FILE",
    "JsonlTracker",
    "MlflowTracker",
    "TensorboardTracker",
    "Tracker",
    "WandbTracker",
    "has_mlflow",
    "has_wandb",
    "metrics_by_step",
    "read_metrics",
]

logger = logging.getLogger(__name__)


class Tracker(ABC):
    """A place where metrics go. It may raise: the logger warns once and switches it off.

    One of your own (`logger.trackers`) is made with `log_dir=`, the run's folder, and `run_config=`, its resolved
    config as plain values.
    """

    name: str
    """Word for warnings, for example `wandb`."""

    @abstractmethod
    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Record one step; the values are on disk, or handed to the service, when it returns."""

    @abstractmethod
    def close(self) -> None:
        """End threads and processes of the tracker. Idempotent."""


METRICS_FILE = "metrics.jsonl"


class JsonlTracker(Tracker):
    """Appends `{"step": 3, "train/reward": 0.5, ...}`; NaN and infinity are written as null."""

    name = "jsonl"

    def __init__(self, path: Path, *, resume_step: int | None = None) -> None:
        """Args:
        resume_step: keep the lines up to this step, which a resumed run continues; None starts a new file.
        """
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = _lines_up_to(path, resume_step) if resume_step is not None and path.exists() else []
        write_text(path, "".join(kept))
        self._file: TextIO | None = path.open("a", encoding="utf-8")

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        if self._file is None:
            raise ValueError(f"{self.path}: the tracker is closed")
        row = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._file.write(json.dumps({"step": step, **row}) + "\n")
        self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def read_metrics(path: Path, *, last_bytes: int | None = None) -> Iterator[dict[str, float]]:
    """Yield the rows of a metrics file without null values; lines that are none (cut off by a kill, damaged) are left
    out.

    Args:
        last_bytes: reads so many bytes at the end of the file alone; None reads all.
    """
    for _, row in _rows(path, last_bytes=last_bytes):
        yield {name: value for name, value in row.items() if value is not None}


def metrics_by_step(path: Path) -> dict[int, dict[str, float]]:
    """Return the metrics of each step; those of several lines are joined."""
    steps: dict[int, dict[str, float]] = {}
    for row in read_metrics(path):
        steps.setdefault(int(row["step"]), {}).update(row)
    return steps


def _rows(path: Path, *, last_bytes: int | None = None) -> Iterator[tuple[str, dict[str, float | None]]]:
    """Yield the line and row of every line that is whole."""
    with open_plain(path) as file:
        if last_bytes is not None:
            file.seek(max(0, os.fstat(file.fileno()).st_size - last_bytes))
        for encoded in file:
            line = encoded.decode("utf-8", errors="replace")
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if line.endswith("\n") and isinstance(row, dict) and isinstance(row.get("step"), int):
                yield line, row


def _lines_up_to(path: Path, step: int) -> list[str]:
    kept = [(row["step"], line) for line, row in _rows(path) if (row["step"] or 0) <= step]
    missing = sorted(set(range(1, step + 1)) - {number for number, _ in kept})
    if missing:
        logger.warning("%s lacks %d steps up to the resumed one, the first is %d", path, len(missing), missing[0])
    return [line for _, line in kept]


class TensorboardTracker(Tracker):
    """Scalars under their metric names in `log_dir`.

    Args:
        resume_step: TensorBoard hides what an earlier start recorded of later steps; None for a new run.
    """

    name = "tensorboard"

    def __init__(self, log_dir: Path, *, resume_step: int | None = None) -> None:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415  (torch is heavy)

        self.log_dir = log_dir
        purge_step = None if resume_step is None else resume_step + 1
        self._writer: SummaryWriter | None = SummaryWriter(  # type: ignore[no-untyped-call]
            str(log_dir), purge_step=purge_step
        )

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        if self._writer is None:
            raise ValueError(f"{self.log_dir}: the tracker is closed")
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, global_step=step)  # type: ignore[no-untyped-call]
        self._writer.flush()  # type: ignore[no-untyped-call]

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()  # type: ignore[no-untyped-call]
            self._writer = None


# Longest wait for the service at the start of a run; a machine without network must not hold the run up for long.
INIT_TIMEOUT_S = 30.0


def has_wandb() -> bool:
    """Return whether the extra is installed."""
    return importlib.util.find_spec("wandb") is not None


class WandbTracker(Tracker):
    """One wandb run; in `offline` mode everything stays under `log_dir/wandb`."""

    name = "wandb"

    def __init__(self, cfg: WandbConfig, *, log_dir: Path, run_config: Mapping[str, object]) -> None:
        import wandb  # noqa: PLC0415  (optional extra)

        log_dir.mkdir(parents=True, exist_ok=True)
        self._wandb: Any = wandb
        self._run: Any = wandb.init(
            project=cfg.project,
            name=cfg.name,
            mode=cfg.mode,
            dir=str(log_dir),
            config=dict(run_config),
            settings=wandb.Settings(init_timeout=INIT_TIMEOUT_S, silent=True, console="off"),
        )

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()
            self._run = None
            # Ends the service process that `init` started.
            self._wandb.teardown()


PARAMS_PER_CALL = 100
"""Parameters that a server takes in one call."""
ENVIRONMENT = {
    # A server that does not answer must not hold the run up for long: the defaults are 120 s and 7 retries.
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "15",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    # The client alone has no database; without this it refuses to write files.
    "MLFLOW_ALLOW_FILE_STORE": "true",
}
"""Environment variables of the client, where the user has not set them."""


def has_mlflow() -> bool:
    """Return whether the extra is installed."""
    return importlib.util.find_spec("mlflow") is not None


class MlflowTracker(Tracker):
    """One MLflow run, on a server or in files under `log_dir/mlflow`; its parameters are the resolved config."""

    name = "mlflow"

    def __init__(self, cfg: MlflowConfig, *, log_dir: Path, run_config: Mapping[str, object]) -> None:
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        from mlflow import entities  # noqa: PLC0415  (optional extra)
        from mlflow.tracking import MlflowClient  # noqa: PLC0415

        self._entities: Any = entities
        self._client: Any = MlflowClient(tracking_uri=cfg.tracking_uri or (log_dir / "mlflow").absolute().as_uri())
        known = self._client.get_experiment_by_name(cfg.experiment_name)
        experiment = known.experiment_id if known else self._client.create_experiment(cfg.experiment_name)
        self._run_id: str | None = self._client.create_run(experiment, run_name=cfg.run_name).info.run_id
        params = (entities.Param(name, str(value)) for name, value in _flat(run_config))
        while batch := list(islice(params, PARAMS_PER_CALL)):
            self._client.log_batch(self._run_id, params=batch)

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        at = int(time.time() * 1000)
        rows = [self._entities.Metric(name, value, at, step) for name, value in metrics.items()]
        self._client.log_batch(self._run_id, metrics=rows)

    def close(self) -> None:
        if self._run_id is not None:
            self._client.set_terminated(self._run_id)
            self._run_id = None


def _flat(tree: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
