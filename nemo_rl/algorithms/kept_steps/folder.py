"""`StepsFolder`: the kept steps of a run on disk, and which of them fall out under the limit.

    RUN/steps/step_N/            a step that has ended; its manifest is written last
      rollout.safetensors        columns of the rollout, all rows
      update.safetensors         columns of the update, the trained rows in its order
      conversations.jsonl        replies of environments and tools   (`ConversationFile`)
      step.json                  everything else (`StepSnapshot`)
      manifest.json              size and checksum of each file
    RUN/steps/step_N.partial/    the step in flight, or where a killed run was: a step without outcome

The trainer writes through `StepRecorder`; the replay only reads. Invariant: a folder named `step_N` is whole.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from nemo_rl.algorithms.kept_steps.record import StepSnapshot, read_record
from nemo_rl.algorithms.run_folder import STEPS
from nemo_rl.data_plane.column_io import read_column_file
from nemo_rl.distributed.batched_data_dict import Column
from nemo_rl.errors import CheckpointError, SchemaMismatch
from nemo_rl.utils.files import read_plain
from nemo_rl.utils.manifest import Manifest

__all__ = ["CONVERSATION_FILE", "ROLLOUT_FILE", "STEP_FILE", "UPDATE_FILE", "SnapshotFolder", "StepsFolder"]

logger = logging.getLogger(__name__)

ROLLOUT_FILE, UPDATE_FILE, STEP_FILE = "rollout.safetensors", "update.safetensors", "step.json"
CONVERSATION_FILE = "conversations.jsonl"
"""File of a step with conversations whose replies are kept."""
PARTIAL = ".partial"
NAME = re.compile(rf"step_([0-9]{{1,18}})({re.escape(PARTIAL)})?")


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotFolder:
    """One kept step on disk."""

    number: int
    path: Path
    is_partial: bool

    @property
    def num_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.path.glob("*") if path.is_file())

    def read(self) -> StepSnapshot:
        """The record; of a whole folder all files are compared with the manifest.

        Raises:
            CheckpointError: a file is missing or is not as it was written.
            SchemaMismatch: the record is damaged, or of another format.
        """
        try:
            problem = None if self.is_partial else Manifest.read(self.path).damage(self.path)
            if problem is not None:
                raise CheckpointError(f"kept step {self.path}: {problem}")
            text = read_plain(self.path / STEP_FILE).decode("utf-8")
        except (OSError, ValueError) as error:
            raise CheckpointError(f"kept step {self.path} cannot be read: {error}") from error
        return read_record(text, where=str(self.path / STEP_FILE))

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
    """The kept steps of one run.

    Args:
        log_dir: `logger.log_dir` of the run.
    """

    def __init__(self, log_dir: Path) -> None:
        self.path = log_dir / STEPS

    def all(self) -> list[SnapshotFolder]:
        """Return the steps in order; a step in flight only where there is no whole one."""
        found: dict[int, SnapshotFolder] = {}
        for path in sorted(self.path.glob("step_*"), reverse=True):
            name = NAME.fullmatch(path.name)
            # A run that is killed at once leaves an empty folder.
            if name is not None and (path / STEP_FILE).is_file():
                # In reverse order `step_7.partial` comes before `step_7`.
                found[int(name[1])] = SnapshotFolder(number=int(name[1]), path=path, is_partial=name[2] is not None)
        return [found[number] for number in sorted(found)]

    def begin(self, number: int) -> Path:
        """An empty folder for the step in flight."""
        path = self.path / f"step_{number}{PARTIAL}"
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        return path

    def end(self, number: int) -> SnapshotFolder:
        """The step in flight becomes a whole one; its files are all there."""
        source, target = self.path / f"step_{number}{PARTIAL}", self.path / f"step_{number}"
        Manifest.write(source)
        # One that an earlier run of this folder has left is of other rows.
        shutil.rmtree(target, ignore_errors=True)
        os.replace(source, target)
        return SnapshotFolder(number=number, path=target, is_partial=False)

    def drop(self, number: int) -> None:
        """Forgets the step in flight."""
        shutil.rmtree(self.path / f"step_{number}{PARTIAL}", ignore_errors=True)

    def cut(self, *, resume_step: int) -> None:
        """Removes the steps after the one that a run resumes from: it makes them again."""
        for kept in self.all():
            if kept.number > resume_step:
                shutil.rmtree(kept.path, ignore_errors=True)

    def prune(self, *, max_bytes: int, since: int) -> list[int]:
        """Removes the oldest steps until the others fit; those after step `since` only if they alone do not.

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
            shutil.rmtree(kept.path, ignore_errors=True)
            total -= size
            if number > since:
                needed.append(number)
        return needed
