"""Finds the weights of a checkpoint by what a person names, and copies them out of it.

Called by `nemo-rl eval` and `nemo-rl export`. Invariant: no file is used that differs from what the manifest says.
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable
from pathlib import Path

from nemo_rl.errors import CheckpointError
from nemo_rl.utils.checkpoint import STEP, WEIGHTS, Checkpoint, checkpoint_paths, read_checkpoint
from nemo_rl.utils.exits import machine_problem

__all__ = ["export_weights", "find_checkpoint"]

CHECKPOINTS = "checkpoints"
"""Folder in `logger.log_dir`, unless a recipe has named another."""


def find_checkpoint(place: Path, *, step: int | None = None) -> Checkpoint:
    """Return the checkpoint that `place` is or holds, its weights compared with the manifest.

    Args:
        place: a folder `step_N`, a folder of such, or the log folder of a run.
        step: which one; None takes the newest.

    Raises:
        CheckpointError: there is none, not this one, or it is damaged.
    """
    path = _chosen(place, step)
    try:
        checkpoint = read_checkpoint(path)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: is not a complete checkpoint: {error}") from error
    damage = checkpoint.manifest.only(f"{WEIGHTS}/").damage(path)
    if damage is not None:
        raise CheckpointError(f"{path}: {damage}; take another checkpoint")
    return checkpoint


def export_weights(checkpoint: Checkpoint, out: Path, *, change: Callable[[Path], None] | None = None) -> Path:
    """Copy the Hugging Face folder of a checkpoint to `out`, which appears when it is whole.

    Args:
        change: of the copy, once it is known to be what was saved.

    Raises:
        CheckpointError: `out` exists, or cannot be written, or the copy differs from the manifest.
    """
    if out.exists():
        raise CheckpointError(f"{out}: exists already; name a folder that does not")
    partial = out.with_name(f".{out.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        partial.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(checkpoint.weights, partial)
        damage = checkpoint.manifest.only(f"{WEIGHTS}/", is_relative=True).damage(partial)
        if damage is not None:
            raise CheckpointError(f"{out}: the copy is not what was saved: {damage}")
        if change is not None:
            change(partial)
        partial.rename(out)
    except OSError as error:
        raise CheckpointError(f"{out}: cannot be written: {machine_problem(error) or error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return out


def _chosen(place: Path, step: int | None) -> Path:
    if STEP.fullmatch(place.name) and step is None:
        return place
    below = place / CHECKPOINTS
    folder = below if below.is_dir() else place
    steps = [path for path in checkpoint_paths(folder) if STEP.fullmatch(path.name)]
    by_step = dict(sorted((int(path.name.removeprefix("step_")), path) for path in steps))
    if not by_step:
        raise CheckpointError(
            f"{place}: holds no checkpoint; expected a folder step_N, a folder of such, or the log folder of a run"
        )
    if step is None:
        return list(by_step.values())[-1]
    if step not in by_step:
        raise CheckpointError(f"{folder}: holds no step {step}, only {', '.join(str(number) for number in by_step)}")
    return by_step[step]
