"""`checkpointing.resume: auto`: whether a start continues a run or begins it. Called by `preflight`.

A job that Slurm requeues is started with the very same words, before and after its first checkpoint. Invariant: what a
run of another recipe has left is never continued and never removed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from nemo_rl.algorithms.run_folder import CONFIG_FILE
from nemo_rl.config.base import AUTO
from nemo_rl.config.load import load_config
from nemo_rl.config.schema import MasterConfig
from nemo_rl.errors import ConfigError, RunFolderError, name_some
from nemo_rl.utils.checkpoint import STEP, checkpoint_paths

__all__ = ["decide_resume"]

COMPARED = {"grpo", "loss_fn", "policy", "data", "env"}
"""Sections that say what is learned; the others say where and with what."""
LENGTH = ("grpo.max_num_steps", "grpo.max_num_epochs")
"""A run may be made longer."""


def decide_resume(config: MasterConfig) -> MasterConfig:
    """The config with true or false in place of `auto`.

    Where an earlier start of this recipe has come to no checkpoint, what it wrote is removed as by `logger.overwrite`.

    Raises:
        RunFolderError: there are checkpoints of another recipe.
    """
    if config.checkpointing.resume != AUTO:
        return config
    path = config.logger.log_dir / CONFIG_FILE
    has_checkpoint = any(STEP.fullmatch(found.name) for found in checkpoint_paths(config.checkpoint_dir))
    if not path.is_file():
        # Checkpoints alone may have been copied here on purpose.
        return _decided(config, resume=has_checkpoint, overwrite=False)
    others = _differences(config, path)
    if has_checkpoint and others:
        raise RunFolderError(
            f"checkpointing.resume: auto continues runs of the same recipe, but in {path} others are "
            f"{name_some(others)}; set checkpointing.resume=true to continue it all the same, logger.overwrite=true "
            "with checkpointing.resume=false to remove it, or another logger.log_dir"
        )
    return _decided(config, resume=has_checkpoint, overwrite=not has_checkpoint and not others)


def _decided(config: MasterConfig, *, resume: bool, overwrite: bool) -> MasterConfig:
    checkpointing = config.checkpointing.model_copy(update={"resume": resume})
    logger = config.logger.model_copy(update={"overwrite": overwrite})
    return config.model_copy(update={"checkpointing": checkpointing, "logger": logger})


def _differences(config: MasterConfig, path: Path) -> list[str]:
    """Dotted names of keys whose values differ from those of an earlier start."""
    try:
        earlier = load_config(path)
    except ConfigError:
        return [f"keys that cannot be read ({path})"]
    before, now = (dict(_leaves(one.model_dump(mode="json", include=COMPARED), "")) for one in (earlier, config))
    return sorted(
        name for name in before.keys() | now.keys() if before.get(name) != now.get(name) and name not in LENGTH
    )


def _leaves(value: object, name: str) -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _leaves(item, f"{name}.{key}" if name else str(key))
    else:
        yield name, value
