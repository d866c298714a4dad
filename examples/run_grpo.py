"""Runs GRPO from a YAML recipe.

    python examples/run_grpo.py --config configs/grpo_sort_cpu.yaml [a.b=value ...] [--print-config]
        [--validate-only | --preflight]

Exit codes: 0 done, 1 a worker or the data plane failed, 2 something the user can fix, 130 interrupted.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from importlib.metadata import version
from pathlib import Path

from rich.console import Console

from nemo_rl.algorithms.process_environment import environment_lines
from nemo_rl.config.load import load_config
from nemo_rl.config.render import to_yaml
from nemo_rl.config.schema import MasterConfig
from nemo_rl.errors import NemoRLError, UserError
from nemo_rl.utils import interrupt
from nemo_rl.utils.console import configure_logging, make_console
from nemo_rl.utils.last_resort import crash_line, machine_problem
from nemo_rl.utils.resume_hint import resume_hint

USER_ERROR, FAILURE, INTERRUPTED = 2, 1, 130
NOT_LOOKED_AT = "model folder, data, reward, extras, hardware, memory, disk, folders"


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="GRPO from a YAML recipe")
    parser.add_argument("--config", type=Path, required=True, help="recipe to run")
    parser.add_argument(
        "--print-config", action="store_true", help="print the resolved config with variables, and exit"
    )
    parser.add_argument("--validate-only", action="store_true", help="check the config alone and exit")
    parser.add_argument("--preflight", action="store_true", help="check all that a run needs, start nothing, and exit")
    parser.add_argument("--version", action="version", version=f"nemo-rl {version('nemo-rl')}")
    parser.add_argument("overrides", nargs="*", help="a.b=value sets, +a.b=value adds, ~a.b deletes")
    return parser.parse_intermixed_args(argv)


def train(config: MasterConfig, console: Console) -> None:
    """Imports torch and Ray only here, so that configs can be checked without them."""
    os.environ.setdefault("OMP_NUM_THREADS", str(config.cluster.threads_per_worker))
    from nemo_rl.algorithms.worker_forks import worker_forks

    # The workers' imports begin before this process's own.
    with worker_forks(config) as forks:
        from nemo_rl.algorithms.run import run

        run(config, console=console, forks=forks)


def look(config: MasterConfig, console: Console, recipe: Path) -> None:
    """Everything that can be known before a run."""
    from nemo_rl.algorithms.preflight.checks import CHECKS, preflight

    preflight(config)
    console.print(f"{recipe}: ok: {', '.join(CHECKS)}")


def report(error: BaseException, config: MasterConfig | None, errors: Console) -> int:
    """Says how it ended, and for a run that had begun how to go on; returns the exit code."""
    # Libraries make errors of their own of an interrupt.
    is_interrupt = isinstance(error, KeyboardInterrupt) or interrupt.received()
    if is_interrupt:
        errors.print("interrupted; everything this run started has been ended")
    elif isinstance(error, NemoRLError):
        notes = "".join(f"\n  ({note})" for note in error.__notes__) if hasattr(error, "__notes__") else ""
        errors.print(f"error: {error}{notes}", style="red")
    else:
        line = machine_problem(error) or crash_line(error, folder=config.logger.log_dir if config is not None else None)
        errors.print(f"error: {line}", style="red")
    if not is_interrupt and (isinstance(error, UserError) or machine_problem(error) is not None):
        return USER_ERROR
    if config is not None:
        errors.print(resume_hint(config, sys.orig_argv))
    return INTERRUPTED if is_interrupt else FAILURE


def main(argv: list[str]) -> int:
    console, errors = make_console(), Console(stderr=True, soft_wrap=True, markup=False, highlight=False)
    configure_logging(console, level=logging.WARNING)
    args = parse_args(argv)
    interrupt.install()
    running: MasterConfig | None = None
    try:
        config = load_config(args.config, args.overrides)
        if args.print_config:
            console.print(to_yaml(config))
            for line in environment_lines(config):
                console.print(f"# {line}")
        if args.preflight:
            look(config, console, args.config)
        elif args.validate_only:
            console.print(f"{args.config}: ok, the config only; not looked at: {NOT_LOOKED_AT} (see --preflight)")
        elif not args.print_config:
            running = config
            train(config, console)
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001  (the outermost place: reported as what it is)
        return report(error, running, errors)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
