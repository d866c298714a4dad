"""`Saver`: the trainer's way to save, at once or beside the training with `checkpointing.async_save`.

    save      the workers copy what is saved; each writes its part meanwhile      (Policy.begin_save)
    look      after every step: once all have written, a thread adds state and
              manifest, renames, prunes                                           (CheckpointManager.complete)
    finish    before the next save and at the end of the run: waits for all of it

Invariant: at most one save runs, and what it has not completed has no name that a run would resume from.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from nemo_rl.algorithms.kept_steps.folder import StepsFolder
from nemo_rl.algorithms.run_folder import truncate_rollouts
from nemo_rl.config.run import CheckpointingConfig
from nemo_rl.errors import CheckpointError, NemoRLError
from nemo_rl.models.policy.tq_policy import Policy
from nemo_rl.utils.checkpoint import Checkpoint, CheckpointManager, Unfinished
from nemo_rl.utils.deadlines import SaveDeadline
from nemo_rl.utils.remote_checkpoints import open_checkpoints

__all__ = ["Saver", "build_checkpoints", "checkpoint_to_resume"]

logger = logging.getLogger(__name__)

COPY_SHARE = 0.25
"""Most of a node's free memory that a copy takes unasked."""


@dataclass(kw_only=True, slots=True)
class _Running:
    unfinished: Unfinished
    seconds: float
    """Seconds that the save has taken so far, without those in which nobody looked."""
    completed: Future[str | Path] | None = None
    """Once all workers have written."""


class Saver:
    """Checkpoints of one run.

    Args:
        checkpoints: None: the run saves none.
        timeout_s: how long the workers may write, and the rest may take.
    """

    def __init__(
        self, checkpoints: CheckpointManager | None, policy: Policy, config: CheckpointingConfig, *, timeout_s: float
    ) -> None:
        self._manager, self._policy, self._config, self._timeout_s = checkpoints, policy, config, timeout_s
        self._running: _Running | None = None
        self.deadline = SaveDeadline()
        """Hears how long saves take."""
        self.last_path: str | Path | None = None
        """Path or URL of the last complete checkpoint of the run."""
        self.last_step = 0

    def resumed(self, checkpoint: Checkpoint) -> None:
        self.last_path, self.last_step = checkpoint.url or checkpoint.path, checkpoint.step

    def save(
        self, step: int, *, state: Mapping[str, object], also: Callable[[Path], None] | None = None, waits: bool
    ) -> None:
        """Save what the workers hold now as the checkpoint of a step; one that still runs is finished first.

        Args:
            also: writes further files into the folder.
            waits: return when it is complete, also with `async_save`.

        Raises:
            CheckpointError, WorkerError, KeyboardInterrupt: as `CheckpointManager.guarded`, of this save or the one
                before it.
        """
        self.finish()
        started = time.monotonic()
        unfinished = self._checkpoints.begin(step, state=state)
        is_beside = bool(self._config.async_save) and not waits
        most_share = COPY_SHARE if self._config.async_save == "auto" else None
        write = partial(self._policy.begin_save, most_share=most_share) if is_beside else self._policy.save_checkpoint
        with self._checkpoints.guarded(unfinished):
            if also is not None:
                also(unfinished.folder)
            write(
                weights=unfinished.folder / "policy" / "weights",
                optimizer=unfinished.folder / "policy" / "optimizer" if self._config.save_optimizer else None,
                tokenizer=unfinished.folder / "policy" / "weights",
                upload=unfinished.upload,
            )
        if is_beside:
            self._running = _Running(unfinished=unfinished, seconds=time.monotonic() - started)
            self.deadline.save_began()
        else:
            path = self._checkpoints.complete(unfinished)
            self._note(step, path, seconds=time.monotonic() - started)

    def look(self) -> None:
        """Look how far a save beside the training has come, without waiting.

        Raises:
            CheckpointError, WorkerError, KeyboardInterrupt: it failed.
        """
        running = self._running
        if running is None:
            return
        if running.completed is not None:
            is_ready = running.completed.done()
        else:
            with self._ends_with_an_error(), self._checkpoints.guarded(running.unfinished):
                is_ready = not self._policy.is_saving()
        if not is_ready:
            return
        if running.completed is None:
            self._complete(running)
        else:
            self.finish()

    def finish(self) -> None:
        """Waits for a save beside the training.

        Raises:
            CheckpointError, WorkerError, KeyboardInterrupt: it failed, or takes too long.
        """
        running = self._running
        if running is None:
            return
        with self._ends_with_an_error():
            completed = running.completed or self._complete(running)
            try:
                path = completed.result(self._timeout_s)
            except TimeoutError as error:
                raise CheckpointError(
                    f"checkpoint of step {running.unfinished.step}: reading its files back, and uploading the last "
                    f"of them to a URL, takes longer than {self._timeout_s:.0f} s; raise cluster.stage_timeout_s, or "
                    "use a faster disk"
                ) from error
        self._running = None
        self._note(running.unfinished.step, path, seconds=running.seconds)

    @contextmanager
    def waited_for(self) -> Iterator[None]:
        """Around a run: no save is left when it ends. After an error of the run, one of the save is a warning."""
        try:
            yield
            self.finish()
        except BaseException:
            self._finish_after_error()
            raise

    @property
    def _checkpoints(self) -> CheckpointManager:
        assert self._manager is not None, "this run saves no checkpoints"
        return self._manager

    def _finish_after_error(self) -> None:
        running = self._running
        if running is None:
            return
        step = running.unfinished.step
        logger.info("waiting for the checkpoint of step %d, which is being written", step)
        try:
            self.finish()
        except NemoRLError as error:
            logger.warning("the checkpoint of step %d was being written, and is removed: %s", step, error)

    def _complete(self, running: _Running) -> Future[str | Path]:
        """Waits for the workers; what is left to do runs in a thread."""
        with self._ends_with_an_error(), self._checkpoints.guarded(running.unfinished):
            running.seconds += self._policy.finish_save()
        completed = running.completed = Future()

        def complete() -> None:
            started = time.monotonic()
            try:
                path = self._checkpoints.complete(running.unfinished)
            except BaseException as error:  # noqa: BLE001 - raised by `finish`
                completed.set_exception(error)
            else:
                running.seconds += time.monotonic() - started
                completed.set_result(path)

        # A process that has to end does not wait for it.
        threading.Thread(target=complete, name="checkpoint", daemon=True).start()
        return completed

    @contextmanager
    def _ends_with_an_error(self) -> Iterator[None]:
        """Forget a save that has failed, so that nothing waits for it again."""
        try:
            yield
        except BaseException:
            self._running = None
            raise

    def _note(self, step: int, path: str | Path, *, seconds: float) -> None:
        self.last_path, self.last_step = path, step
        self.deadline.save_took(seconds)
        logger.info("saved step %d in %.1f s", step, seconds)


def build_checkpoints(
    config: CheckpointingConfig, *, log_dir: Path, metric_name: str, timeout_s: float
) -> CheckpointManager | None:
    """Return the checkpoints of a run; None where it saves none."""
    if not config.enabled:
        return None
    metric_name = metric_name.replace(":", "/", 1)
    return open_checkpoints(config, log_dir, keep_top_k=config.keep_top_k, metric_name=metric_name, timeout_s=timeout_s)


def checkpoint_to_resume(
    config: CheckpointingConfig, checkpoints: CheckpointManager | None, *, log_dir: Path, note: Callable[[str], None]
) -> Checkpoint | None:
    """Leaves the folders as if the run had ended with the checkpoint that it takes."""
    if checkpoints is None:
        return None
    checkpoints.clean()
    if not config.resume:
        return None
    choice = checkpoints.choose(with_optimizer=config.load_optimizer)
    chosen = choice.checkpoint
    note(f"resuming after step {chosen.step} from {chosen.place}: {choice.reason}")
    truncate_rollouts(log_dir, resume_step=chosen.step)
    StepsFolder(log_dir).cut(resume_step=chosen.step)
    return chosen
