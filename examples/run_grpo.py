"""Runs GRPO from a YAML recipe.

    python examples/run_grpo.py --config configs/grpo_sort_cpu.yaml [a.b=value ...] [--print-config] [--validate-only]

Exit codes: 0 done, 1 a worker or the data plane failed, 2 something the user can fix, 130 interrupted.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path

from rich.console import Console

from nemo_rl.config.load import load_config
from nemo_rl.config.render import to_yaml
from nemo_rl.config.schema import MasterConfig
from nemo_rl.errors import NemoRLError, UserError
from nemo_rl.utils import interrupt
from nemo_rl.utils.console import configure_logging, make_console
from nemo_rl.utils.resume_hint import resume_hint

USER_ERROR, FAILURE, INTERRUPTED = 2, 1, 130


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="GRPO from a YAML recipe")
    parser.add_argument("--config", type=Path, required=True, help="recipe to run")
    parser.add_argument("--print-config", action="store_true", help="print the resolved config and exit")
    parser.add_argument("--validate-only", action="store_true", help="check the config and exit")
    parser.add_argument("overrides", nargs="*", help="a.b=value sets, +a.b=value adds, ~a.b deletes")
    return parser.parse_intermixed_args(argv)


def train(config: MasterConfig, console: Console) -> None:
    """Imports torch and Ray only here, so that configs can be checked without them."""
    os.environ.setdefault("OMP_NUM_THREADS", str(config.cluster.threads_per_worker))
    from nemo_rl.algorithms.run import run

    run(config, console=console)


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
        raise error
    if not is_interrupt and isinstance(error, UserError):
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
        if not (args.print_config or args.validate_only):
            running = config
            train(config, console)
        elif args.validate_only:
            console.print(f"{args.config}: ok")
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001  (the outermost place: told as what it is, or raised)
        return report(error, running, errors)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
