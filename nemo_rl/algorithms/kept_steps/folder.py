"""`StepsFolder`: what a run has left of each step, and which kept steps fall out under the limit.

    RUN/steps/step_N/
      step.json                  plan, settings, outcome: everything but columns   (`StepSnapshot`)
      rollout.safetensors        columns of the rollout, all rows
      update.safetensors         columns of the update, the trained rows in its order
      conversations.jsonl        replies of environments and tools                 (`ConversationFile`)
      manifest.json              size and checksum of each file above; written last
      records/                   tensors of the policy workers                     (`nemo_rl.records`)
      records/generation/        tensors of the engines

`StepRecorder` writes the kept step, workers and engines write their records; every reader asks here where they are.
Records have a digest for each tensor, and may be removed. Invariant: a step with a manifest is whole; one without was
in flight when its run was killed, or still is.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from nemo_rl.algorithms.kept_steps.record import StepSnapshot, StepStatus, read_record
from nemo_rl.algorithms.run_folder import STEPS
from nemo_rl.data_plane.column_io import read_column_file
from nemo_rl.distributed.batched_data_dict import Column
from nemo_rl.errors import CheckpointError, SchemaMismatch
from nemo_rl.utils.files import read_plain
from nemo_rl.utils.manifest import MANIFEST_FILE, Manifest

__all__ = ["CONVERSATION_FILE", "RECORDS", "ROLLOUT_FILE", "STEP_FILE", "UPDATE_FILE", "SnapshotFolder", "StepsFolder"]

ROLLOUT_FILE, UPDATE_FILE, STEP_FILE = "rollout.safetensors", "update.safetensors", "step.json"
CONVERSATION_FILE = "conversations.jsonl"
"""File of a step with conversations whose replies are kept."""
KEPT = (MANIFEST_FILE, STEP_FILE, ROLLOUT_FILE, UPDATE_FILE, CONVERSATION_FILE)
"""Files of a kept step. The manifest is removed first: without it the step is not taken for a whole one."""
RECORDS = "records"
"""Folder of recorded tensors, in that of a step; earlier releases had a folder of each step in it."""
NAME = re.compile(r"step_([0-9]{1,18})(\.partial)?")
"""Earlier releases had another name for the step in flight."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotFolder:
    """One kept step on disk."""

    number: int
    path: Path

    @property
    def is_partial(self) -> bool:
        """Return whether the step was in flight when its run was killed, or still is."""
        return not (self.path / MANIFEST_FILE).exists()

    @property
    def num_bytes(self) -> int:
        return sum(path.stat().st_size for name in KEPT if (path := self.path / name).is_file())

    def read(self) -> StepSnapshot:
        """The record; of a whole step all files are compared with the manifest.

        Raises:
            CheckpointError: a file is missing or is not as it was written.
            SchemaMismatch: the record is damaged. UnsupportedFormat: it is of another version.
        """
        is_partial = self.is_partial
        try:
            problem = None if is_partial else Manifest.read(self.path).damage(self.path)
            text = read_plain(self.path / STEP_FILE).decode("utf-8")
        except (OSError, ValueError) as error:
            raise CheckpointError(f"kept step {self.path} cannot be read: {error}") from error
        if problem is None:
            found = read_record(text, where=str(self.path / STEP_FILE))
            if not is_partial or found.status is StepStatus.PARTIAL:
                return found
            problem = f"{MANIFEST_FILE} is missing: its run was killed while it wrote it, or it was removed"
        raise CheckpointError(f"kept step {self.path}: {problem}")

    def columns(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Return the tensor columns of the rollout and of the update; empty where they were not written.

        Raises:
            CheckpointError: a file is torn.
        """
        try:
            rollout, update = (
                read_column_file(path) if (path := self.path / name).is_file() else {}
                for name in (ROLLOUT_FILE, UPDATE_FILE)
            )
        except (OSError, ValueError, RuntimeError, SchemaMismatch) as error:
            raise CheckpointError(f"kept step {self.path}: {error}") from error
        return _tensors(rollout), _tensors(update)


def _tensors(columns: Mapping[str, Column]) -> dict[str, torch.Tensor]:
    return {name: column for name, column in columns.items() if isinstance(column, torch.Tensor)}


class StepsFolder:
    """The steps of one run.

    Args:
        log_dir: `logger.log_dir` of the run.
    """

    def __init__(self, log_dir: Path) -> None:
        self.path = log_dir / STEPS
        self._old_records = log_dir / RECORDS

    def all(self) -> list[SnapshotFolder]:
        """Return the kept steps in order, the one in flight among them."""
        found = [SnapshotFolder(number=number, path=path) for number, path in _numbered(self.path).items()]
        # A run that is killed at once leaves an empty folder; one with records alone is no kept step.
        return [kept for kept in found if (kept.path / STEP_FILE).is_file()]

    def records(self) -> dict[int, Path]:
        """Return step -> folder of its records, in order of the steps; `records/step_N` of earlier releases
        is read, too."""
        found = {number: path / RECORDS for number, path in _numbered(self.path).items() if (path / RECORDS).is_dir()}
        return dict(sorted((_numbered(self._old_records) | found).items()))

    def begin(self, number: int) -> Path:
        """A folder for the step in flight, without what another run of it has kept."""
        path = self._step(number)
        _forget(path)
        path.mkdir(parents=True, exist_ok=True)
        return path

    def end(self, number: int) -> SnapshotFolder:
        """The step in flight becomes a whole one; its files are all there."""
        path = self._step(number)
        Manifest.write(path, [name for name in KEPT if (path / name).is_file()])
        return SnapshotFolder(number=number, path=path)

    def drop(self, number: int) -> None:
        """Forgets the step in flight. Raises nothing."""
        with suppress(OSError):
            _forget(self._step(number))

    def cut(self, *, resume_step: int) -> None:
        """Removes the steps after the one that a run resumes from, with their records: it makes them again."""
        for number, path in (*_numbered(self.path).items(), *_numbered(self._old_records).items()):
            if number > resume_step:
                shutil.rmtree(path, ignore_errors=True)

    def prune(self, *, max_bytes: int, since: int) -> list[int]:
        """Removes the oldest kept steps until the others fit; those after step `since` only if they alone do not.

        Returns:
            Removed steps that came after `since`: without them nothing from that checkpoint on can be replayed.
        """
        sizes = {kept.number: (kept, kept.num_bytes) for kept in self.all()}
        total = sum(size for _, size in sizes.values())
        needed: list[int] = []
        for number, (kept, size) in sizes.items():
            # The newest one stays: a limit below a single step would otherwise keep none and say so every step.
            if total <= max_bytes or number == max(sizes):
                break
            _forget(kept.path)
            total -= size
            if number > since:
                needed.append(number)
        return needed

    def _step(self, number: int) -> Path:
        return self.path / f"step_{number}"


def _numbered(folder: Path) -> dict[int, Path]:
    """Return the folders of steps by their numbers, in order."""
    # In reverse order `step_7.partial` comes before `step_7`, which counts.
    paths = sorted((path for path in folder.glob("step_*") if path.is_dir()), reverse=True)
    found = {int(name[1]): path for path in paths if (name := NAME.fullmatch(path.name)) is not None}
    return dict(sorted(found.items()))


def _forget(path: Path) -> None:
    """Remove a kept step; what else its folder holds stays."""
    for name in KEPT:
        (path / name).unlink(missing_ok=True)
    with suppress(OSError):  # records are in it, or it never was
        path.rmdir()
