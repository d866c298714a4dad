"""One run as a person starts it, with its messages and exit code; the same for every way to launch one.

`examples/run_grpo.py`, `nemo-rl train` and `nemo-rl launch` call it. Exit codes are those of
`nemo_rl.utils.exits`.
"""

from __future__ import annotations

import logging
import os
import shlex
import sys
import tempfile
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path

from rich.console import Console

from nemo_rl.algorithms.processes import driver_environment, environment_lines, worker_forks
from nemo_rl.config.load import first_stage, load_config
from nemo_rl.config.policy import adapter_warnings
from nemo_rl.config.schema import MasterConfig
from nemo_rl.config.yaml_text import to_yaml
from nemo_rl.errors import CheckpointError, NemoRLError, UserError
from nemo_rl.utils import interrupt
from nemo_rl.utils.console import configure_logging, make_console
from nemo_rl.utils.exits import (
    FAILURE,
    INTERRUPTED,
    TIME_LIMIT,
    USER_ERROR,
    crash_line,
    disk_line,
    machine_problem,
    text_of,
)
from nemo_rl.utils.remote_checkpoints import open_checkpoints

__all__ = ["extent_of", "resume_hint", "run_recipe"]

RESUME = "checkpointing.resume=true"
LOOK_S = 20.0
"""Longest look at a URL by a run that has failed."""


def resume_hint(config: MasterConfig, command: Sequence[str]) -> str:
    """Return the last checkpoint and the command that continues from it, or why there is none.

    Args:
        command: the words that started the run.
    """
    section = config.checkpointing
    if not section.enabled:
        return "nothing was saved: checkpointing.enabled is false"
    places = [(section, config.logger.log_dir)]
    if (first := first_stage(config)) is not None:
        places.append((first.checkpointing, first.logger.log_dir))
    try:
        found = (open_checkpoints(saving, folder, timeout_s=LOOK_S).latest() for saving, folder in places)
        last = next(filter(None, found), None)
    except CheckpointError as error:
        return f"the last checkpoint cannot be looked up: {error}"
    if last is None:
        return f"no checkpoint was saved yet: checkpointing.save_period is {section.save_period}"
    words = [
        word for word in command if not word.lstrip("+").startswith(("logger.overwrite=", "checkpointing.resume="))
    ]
    return f"the last checkpoint is {last.place}; to continue:\n  {shlex.join([*words, RESUME])}"


NOT_LOOKED_AT = "model folder, data, reward, extras, hardware, memory, disk, folders"


class Extent(StrEnum):
    """The extent to which a recipe is taken."""

    PRINT = "print"
    """Shown as it is resolved."""
    VALIDATE = "validate"
    PREFLIGHT = "preflight"
    """All that a run needs is checked, nothing is started."""
    RUN = "run"


def extent_of(*, print_config: bool, validate_only: bool, preflight: bool) -> Extent:
    """Return the extent to which the options of a command line take a recipe: the most thorough of the checks that were
    asked for."""
    if preflight:
        return Extent.PREFLIGHT
    if validate_only:
        return Extent.VALIDATE
    return Extent.PRINT if print_config else Extent.RUN


def run_recipe(
    recipe: Path, overrides: Sequence[str], *, extent: Extent = Extent.RUN, print_config: bool = False
) -> int:
    """Run it, or look at it; return the exit code."""
    console, errors = make_console(), make_console(stderr=True)
    configure_logging(console, level=logging.WARNING)
    interrupt.install()
    running: MasterConfig | None = None
    try:
        config = load_config(recipe, overrides)
        for line in adapter_warnings(config.policy):
            errors.print(f"warning: {line}", style="yellow", soft_wrap=True)
        if print_config:
            console.print(to_yaml(config))
            for line in environment_lines(config):
                console.print(f"# {line}")
        if extent is Extent.PREFLIGHT:
            _look(config, console, recipe)
        elif extent is Extent.VALIDATE:
            console.print(f"{recipe}: ok, the config only; not looked at: {NOT_LOOKED_AT} (see --preflight)")
        elif extent is Extent.RUN:
            running = config
            return _train(config, console)
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001  (the outermost place: reported as what it is)
        return _report(error, running, errors)
    return 0


def _train(config: MasterConfig, console: Console) -> int:
    """Import torch and Ray only here, so that configs can be checked without them."""
    for name, value in driver_environment(config).items():
        os.environ.setdefault(name, value)
    # The workers' imports begin before this process's own.
    with worker_forks(config) as forks:
        from nemo_rl.algorithms.run import run  # noqa: PLC0415

        summary = run(config, console=console, forks=forks)
    if summary.is_interrupted:
        raise KeyboardInterrupt
    return TIME_LIMIT if summary.is_out_of_time else 0


def _look(config: MasterConfig, console: Console, recipe: Path) -> None:
    """Check everything that can be known before a run, of each of its stages."""
    from nemo_rl.algorithms.preflight.checks import checks_of, preflight  # noqa: PLC0415
    from nemo_rl.algorithms.preflight.inputs import turn_lines  # noqa: PLC0415
    from nemo_rl.algorithms.two_stages import stage_configs  # noqa: PLC0415

    for stage in stage_configs(config):
        for line in turn_lines(preflight(stage, is_alone=True)):
            console.print(line, markup=False, soft_wrap=True)
        name = "stage sft, " if stage.sft.enabled and not config.sft.enabled else ""
        console.print(f"{recipe}: {name}ok: {', '.join(checks_of(stage))}")


def _folders(config: MasterConfig) -> dict[str, Path]:
    """Return the folders that a run writes to, by the keys and variables that name them."""
    folders = {"logger.log_dir": config.logger.log_dir, config.checkpointing.folder_key: config.checkpoint_dir}
    durable = config.data_plane.durable.path
    found = {**folders, "data_plane.durable.path": durable, "TMPDIR": Path(tempfile.gettempdir())}
    return {key: folder.absolute() for key, folder in found.items() if folder is not None}


def _report(error: BaseException, config: MasterConfig | None, errors: Console) -> int:
    """Say how it ended, and for a run that had begun how to go on; return the exit code."""
    # Libraries make errors of their own of an interrupt.
    is_interrupt = isinstance(error, KeyboardInterrupt) or interrupt.received()
    if is_interrupt:
        interrupt.ignore()
        errors.print("interrupted; everything this run started has been ended")
    elif isinstance(error, NemoRLError):
        notes = "".join(f"\n  ({note})" for note in error.__notes__) if hasattr(error, "__notes__") else ""
        errors.print(f"error: {text_of(error)}{notes}", style="red")
    else:
        line = machine_problem(error) or crash_line(error, folder=config.logger.log_dir if config is not None else None)
        errors.print(f"error: {line}", style="red")
    if config is not None and not is_interrupt and (said := disk_line(error, _folders(config))):
        errors.print(f"  ({said})", style="red")
    if not is_interrupt and (isinstance(error, UserError) or machine_problem(error) is not None):
        return USER_ERROR
    if config is not None:
        errors.print(resume_hint(config, sys.orig_argv))
    return INTERRUPTED if is_interrupt else FAILURE
