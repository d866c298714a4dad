"""Step folders that are either complete or absent, which of them to keep, and which is the latest.

A checkpoint is written into `tmp_step_N`, then renamed to `step_N`; a crash or a full disk leaves the previous one
as it was. The trainer calls `save`; `setup` calls `latest` when it resumes.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from nemo_rl.errors import CheckpointError, NemoRLError
from nemo_rl.utils.files import write_text

__all__ = ["Checkpoint", "CheckpointManager"]

logger = logging.getLogger(__name__)

STATE_FILE = "training_info.json"
LATEST_FILE = "latest"


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    step: int
    path: Path
    state: Mapping[str, object]
    """Contents of `training_info.json`."""

    @property
    def weights(self) -> Path:
        return self.path / "policy" / "weights"

    @property
    def optimizer(self) -> Path:
        return self.path / "policy" / "optimizer"


class CheckpointManager:
    """Writes and prunes checkpoints in one folder.

    Args:
        folder: holds `step_N` folders and the file `latest`.
        keep_top_k: best checkpoints to keep besides the latest; None keeps all.
        metric_name: key of `state["metrics"]` to rank by; checkpoints without it rank last.
    """

    def __init__(
        self, folder: Path, *, keep_top_k: int | None, metric_name: str, higher_is_better: bool = True
    ) -> None:
        self._folder = folder
        self._keep_top_k = keep_top_k
        self._metric_name = metric_name
        self._sign = 1.0 if higher_is_better else -1.0

    def save(self, step: int, *, write: Callable[[Path], None], state: Mapping[str, object]) -> Path:
        """Runs `write(tmp folder)`, adds `state`, renames, updates `latest`, prunes.

        Raises:
            CheckpointError: a write failed; earlier checkpoints and `latest` are untouched.
        """
        target, tmp = self._folder / f"step_{step}", self._folder / f"tmp_step_{step}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(tmp, ignore_errors=True)
            tmp.mkdir()
            write(tmp)
            write_text(tmp / STATE_FILE, json.dumps({**state, "step": step}, indent=2, sort_keys=True))
            _replace_folder(tmp, target)
            write_text(self._folder / LATEST_FILE, target.name)
        except (OSError, NemoRLError) as error:
            shutil.rmtree(tmp, ignore_errors=True)
            kept = self.latest()
            rest = f"the latest valid checkpoint is {kept.path}" if kept else "there is no earlier checkpoint"
            raise CheckpointError(
                f"checkpoint of step {step} in {self._folder}: {error}; {rest}. Free some space or change "
                "checkpointing.checkpoint_dir, then run again with checkpointing.resume=true"
            ) from error
        self._prune(latest=step)
        return target

    def latest(self) -> Checkpoint | None:
        """The checkpoint named by `latest`, or the newest complete one when that file is missing or stale."""
        found = self.all()
        pointer = self._folder / LATEST_FILE
        if pointer.is_file():
            named = pointer.read_text().strip()
            for checkpoint in found:
                if checkpoint.path.name == named:
                    return checkpoint
        return found[-1] if found else None

    def all(self) -> list[Checkpoint]:
        """Complete checkpoints in order of their steps."""
        found = []
        for path in self._folder.glob("step_*"):
            number = path.name.removeprefix("step_")
            if number.isdigit() and (path / STATE_FILE).is_file():
                state = json.loads((path / STATE_FILE).read_text())
                found.append(Checkpoint(step=int(number), path=path, state=state))
        return sorted(found, key=lambda checkpoint: checkpoint.step)

    def _prune(self, *, latest: int) -> None:
        if self._keep_top_k is None:
            return
        ranked = sorted(self.all(), key=self._rank, reverse=True)
        for checkpoint in ranked[self._keep_top_k :]:
            if checkpoint.step != latest:
                logger.info("removing %s", checkpoint.path)
                shutil.rmtree(checkpoint.path, ignore_errors=True)

    def _rank(self, checkpoint: Checkpoint) -> tuple[float, int]:
        metrics = checkpoint.state.get("metrics")
        value = metrics.get(self._metric_name) if isinstance(metrics, Mapping) else None
        score = self._sign * float(value) if isinstance(value, int | float) else float("-inf")
        return score, checkpoint.step


def _replace_folder(source: Path, target: Path) -> None:
    """Renames `source` to `target`; a folder already there survives until the new one is in place."""
    old = target.with_name(f"old_{target.name}")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        os.replace(target, old)
    os.replace(source, target)
    shutil.rmtree(old, ignore_errors=True)
