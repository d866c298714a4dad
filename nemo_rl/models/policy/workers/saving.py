"""`Saving`: how a policy worker writes checkpoints, now or beside its training.

A part of the worker. A save beside the training copies what it writes first, and its threads talk in a group of their
own, so that no collective of the training meets one of theirs. Invariant: at most one save runs.
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
from nemo_rl.models.policy.workers.engine import Engine, Snapshot

__all__ = ["Saving"]

logger = logging.getLogger(__name__)


class Saving:
    """Writes the checkpoints of one rank.

    Args:
        model: folder that the run started from.
        group: all ranks of the job, for this alone; its backend serves tensors on the CPU.
    """

    def __init__(
        self,
        engine: Engine,
        device_states: DeviceStates,
        tokenizer: PreTrainedTokenizerBase,
        *,
        model: Path,
        group: dist.ProcessGroup,
    ) -> None:
        self._engine, self._device_states, self._tokenizer, self._group = engine, device_states, tokenizer, group
        self._model = model
        self._running: _Thread | None = None

    def save(self, *, weights: Path, optimizer: Path | None, tokenizer: Path | None) -> None:
        """(collective) Save, and return when all is written."""
        self._check_none_runs()
        with self._device_states.ready_for_training():
            snapshot = self._engine.snapshot(with_optimizer=optimizer is not None, copies=False)
            self._write(snapshot, weights, optimizer, tokenizer)

    def begin(self, *, weights: Path, optimizer: Path | None, tokenizer: Path | None) -> None:
        """(collective) Copy what is to be saved, and write it beside what this rank does from here on."""
        self._check_none_runs()
        with self._device_states.ready_for_training():
            snapshot = self._engine.snapshot(with_optimizer=optimizer is not None, copies=True)
        self._running = _Thread(lambda: self._write(snapshot, weights, optimizer, tokenizer))

    @property
    def is_running(self) -> bool:
        """Return whether a save is still being written; one that failed is no longer running."""
        return self._running is not None and self._running.is_alive

    def finish(self, *, timeout_s: float) -> float:
        """(collective) Wait until what was begun is written; the seconds it took, 0 where nothing was begun.

        Raises:
            CheckpointError: on every rank, it could not be written; or it is not written in time.
        """
        running, self._running = self._running, None
        return 0.0 if running is None else running.finish(timeout_s)

    def close(self) -> None:
        """End the group; called once."""
        if dist.is_initialized():
            dist.destroy_process_group(self._group)

    def _check_none_runs(self) -> None:
        if self._running is not None:
            raise RuntimeError("a save was begun: finish it before the next")

    def _write(self, snapshot: Snapshot, weights: Path, optimizer: Path | None, tokenizer: Path | None) -> None:
        snapshot.write(weights=weights, optimizer=optimizer, group=self._group)
        if tokenizer is not None:
            save_tokenizer(self._tokenizer, tokenizer, model=self._model, group=self._group)


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
