"""`Saving`: how a policy worker writes checkpoints, now or beside its training.

A base of `PolicyWorker`. A save beside the training copies what it writes first, and its threads talk in a group of
their own, so that no collective of the training meets one of theirs. Invariant: at most one save runs.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from nemo_rl.errors import CheckpointError
from nemo_rl.models.hf.checkpoint_folder import save_tokenizer
from nemo_rl.models.policy.workers.device_states import DeviceStates
from nemo_rl.models.policy.workers.engine import Snapshot

__all__ = ["Saving"]

logger = logging.getLogger(__name__)


class Saving(DeviceStates):
    """Reads and writes the checkpoints of one rank.

    Args:
        model: folder that the run started from.
        group: all ranks of the job, for this alone; its backend serves tensors on the CPU.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, model: Path, group: dist.ProcessGroup) -> None:
        self.tokenizer, self._model_folder, self._save_group = tokenizer, model, group
        self._running: _Thread | None = None

    def save_checkpoint(self, *, weights: Path, optimizer: Path | None, tokenizer: Path | None) -> None:
        """(collective) Write the HF folder at `weights`; optimizer, schedule and random state at `optimizer`."""
        self._check_none_runs()
        with self.ready_for_training():
            snapshot = self.engine.snapshot(with_optimizer=optimizer is not None, copies=False)
            self._write(snapshot, weights, optimizer, tokenizer)

    def begin_save(self, *, weights: Path, optimizer: Path | None, tokenizer: Path | None) -> None:
        """(collective) Begin a `save_checkpoint` of this moment: copy what is to be saved, and write it beside what
        this rank does until `finish_save`."""
        self._check_none_runs()
        with self.ready_for_training():
            snapshot = self.engine.snapshot(with_optimizer=optimizer is not None, copies=True)
        self._running = _Thread(lambda: self._write(snapshot, weights, optimizer, tokenizer))

    def is_saving(self) -> bool:
        """Return whether a save is still being written; one that failed is no longer running."""
        return self._running is not None and self._running.is_alive

    def finish_save(self, *, timeout_s: float) -> float:
        """(collective) Wait until what was begun is written; the seconds it took, 0 where nothing was begun.

        Raises:
            CheckpointError: on every rank, it could not be written; or it is not written in time.
        """
        running, self._running = self._running, None
        return 0.0 if running is None else running.finish(timeout_s)

    def load_checkpoint(self, *, weights: Path, optimizer: Path | None) -> None:
        """(collective) Continue from a checkpoint of any layout; the reference stays the initial model."""
        with self.ready_for_training():
            self.engine.load(weights=weights, optimizer=optimizer)

    def _close_saving(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group(self._save_group)

    def _check_none_runs(self) -> None:
        if self._running is not None:
            raise RuntimeError("a save was begun: finish it before the next")

    def _write(self, snapshot: Snapshot, weights: Path, optimizer: Path | None, tokenizer: Path | None) -> None:
        snapshot.write(weights=weights, optimizer=optimizer, group=self._save_group)
        if tokenizer is not None:
            save_tokenizer(self.tokenizer, tokenizer, model=self._model_folder, group=self._save_group)


class _Thread:
    """A thread that calls one function and keeps its error."""

    def __init__(self, action: Callable[[], None]) -> None:
        self._action: Callable[[], None] | None = action
        self._error: BaseException | None = None
        self._seconds = 0.0
        # A daemon, so that a process that has to end does not wait: its part of a checkpoint has no name yet.
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def finish(self, timeout_s: float) -> float:
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise CheckpointError(
                f"the checkpoint is still being written after another {timeout_s:.0f} s; raise "
                "cluster.stage_timeout_s if the disk is only slow, or set checkpointing.async_save=false"
            )
        if self._error is not None:
            raise self._error
        return self._seconds

    def _run(self) -> None:
        started = time.monotonic()
        action, self._action = self._action, None
        assert action is not None
        try:
            action()
        except BaseException as error:  # noqa: BLE001 - raised by `finish`
            self._error = error
        # Free the copies, which the action holds.
        del action
        self._seconds = time.monotonic() - started
        logger.info("wrote a checkpoint in %.1f s beside the training", self._seconds)
