"""`preflight`: everything that can be checked about a run without starting it, all problems at once.

Called first in every run, and alone by `--preflight`. A check is a function that is given the `Subject` and returns a
line per problem, or raises a `UserError`; a new one is one line in `CHECKS`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from nemo_rl.algorithms.preflight import inputs, machine
from nemo_rl.algorithms.preflight.inputs import Subject, with_teacher_folder
from nemo_rl.algorithms.preflight.model_check import packs
from nemo_rl.algorithms.run_folder import CONFIG_FILE
from nemo_rl.config.base import AUTO
from nemo_rl.config.load import load_config
from nemo_rl.config.render import masked
from nemo_rl.config.rules.policy import packing_decided
from nemo_rl.config.schema import MasterConfig
from nemo_rl.errors import ConfigError, PreflightError, RunFolderError, UserError, name_some
from nemo_rl.models.hf.loading import local_folders
from nemo_rl.utils.checkpoint import STEP, checkpoint_paths

__all__ = ["CHECKS", "decide_resume", "preflight", "run_checks"]

logger = logging.getLogger(__name__)

Check = Callable[[Subject], list[str]]

CHECKS: Mapping[str, Check] = {
    "run folder": machine.check_run_folder,
    "checkpoint": machine.check_checkpoint,
    "time limit": machine.check_time_limit,
    "folders": machine.check_folders,
    "model": inputs.check_model,
    "optimizer": inputs.check_optimizer,
    "tokenizer": inputs.check_tokenizer,
    "teacher": inputs.check_teacher,
    "prompts": inputs.check_prompts,
    "reward": inputs.check_reward,
    "gold answers": inputs.check_answers,
    "turns": inputs.check_turns,
    "identity": inputs.check_identity,
    "parts": inputs.check_parts,
    "engine": inputs.check_engine,
    "trackers": inputs.check_trackers_are_installed,
    "records": inputs.check_records,
    "data plane": machine.check_data_plane,
    "GPUs": machine.check_gpus,
    "CPUs": machine.check_cpus,
    "memory": machine.check_memory,
    "disk": machine.check_disk,
}
NEED_MODEL = ("model", "tokenizer", "teacher", "prompts", "turns", "gold answers", "identity", "memory", "disk")
"""Checks that would only repeat that a model's name on the hub leads nowhere."""
ALONGSIDE = ("reward",)
"""Checks that wait for their own process, and run alongside the others."""


def preflight(config: MasterConfig, *, is_alone: bool = False) -> MasterConfig:
    """Runs every check; returns the config with folders in place of names on the hub, and with `auto` decided for
    `checkpointing.resume` and `policy.sequence_packing.enabled`.

    Args:
        is_alone: no run follows: also looks at all rows of the datasets, which a run does when it loads them.

    Raises:
        UserError: the only one that a check has met.
        PreflightError: all of them, a line each.
    """
    return run_checks(decide_resume(config), CHECKS, is_alone=is_alone)


def run_checks(config: MasterConfig, names: Iterable[str], *, is_alone: bool = False) -> MasterConfig:
    """Some of `CHECKS`; returns the config with folders in place of names on the hub, and packing decided. Raises as
    `preflight`."""
    errors: list[UserError] = []
    wanted = {name: CHECKS[name] for name in names}
    try:
        config = config.model_copy(update={"policy": local_folders(config.policy)})
        config = packing_decided(with_teacher_folder(config), fits=packs)
    except UserError as error:
        errors.append(error)
        wanted = {name: check for name, check in wanted.items() if name not in NEED_MODEL}
    subject = Subject(config, is_alone=is_alone)
    with ThreadPoolExecutor(len(ALONGSIDE), thread_name_prefix="preflight") as pool:
        alongside = {name: pool.submit(_run, wanted[name], subject) for name in ALONGSIDE if name in wanted}
        for name, check in wanted.items():
            found = alongside[name].result() if name in alongside else _run(check, subject)
            errors += [error for error in found if str(error) not in map(str, errors)]
    busy = machine.busy_machine(config.cluster) if "CPUs" in wanted else None
    if errors:
        problems = [line for error in errors for line in _lines(error)]
        refused = errors[0] if len(errors) == 1 else PreflightError(problems)
        if busy is not None:
            refused.add_note(busy)
        raise refused
    if busy is not None:
        logger.warning("%s", busy)
    return config


def _run(check: Check, subject: Subject) -> list[UserError]:
    try:
        return [UserError(line) for line in check(subject)]
    except UserError as error:
        return [error]


def _lines(error: UserError) -> list[str]:
    return error.problems if isinstance(error, ConfigError) else [str(error)]


COMPARED = {"grpo", "loss_fn", "policy", "data", "env"}
"""Sections that say what is learned; the others say where and with what."""
MAY_CHANGE = ("grpo.max_num_steps", "grpo.max_num_epochs", "env.preflight_reward")
"""A run may be made longer, and checked otherwise."""


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
        earlier = load_config(path, with_masked=True)
    except ConfigError:
        return [f"keys that cannot be read ({path})"]
    trees = (masked(one.model_dump(mode="json", include=COMPARED)) for one in (earlier, config))
    before, now = (dict(_leaves(tree, "")) for tree in trees)
    return sorted(
        name for name in before.keys() | now.keys() if before.get(name) != now.get(name) and name not in MAY_CHANGE
    )


def _leaves(value: object, name: str) -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _leaves(item, f"{name}.{key}" if name else str(key))
    else:
        yield name, value
