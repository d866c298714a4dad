"""The MLflow tracker. The only file that names mlflow (extra `mlflow`, its client without server and database)."""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from nemo_rl.config.schema import MlflowConfig
from nemo_rl.utils.trackers.base import Tracker

__all__ = ["MlflowTracker", "has_mlflow"]

PARAMS_PER_CALL = 100
"""As many as a server takes at once."""
ENVIRONMENT = {
    # A server that does not answer must not hold the run up for long: the defaults are 120 s and 7 retries.
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "15",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    # The client alone has no database; without this it refuses to write files.
    "MLFLOW_ALLOW_FILE_STORE": "true",
}
"""Where the user has not set them."""


def has_mlflow() -> bool:
    """Whether the extra is installed."""
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
    """Leaves by their dotted paths."""
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
