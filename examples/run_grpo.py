"""Runs GRPO from a YAML recipe.

    python examples/run_grpo.py --config configs/grpo_sort_cpu.yaml [a.b=value ...] [--print-config]
        [--validate-only | --preflight]

`nemo-rl train RECIPE` takes the same options and does the same.

Exit codes: 0 done, 1 a worker or the data plane failed, 2 something the user can fix, 75 saved and ended before
`checkpointing.must_save_by`, 130 interrupted.
"""

from __future__ import annotations

import argparse
import sys
from importlib.metadata import version
from pathlib import Path

from nemo_rl.utils import interrupt

if __name__ == "__main__":
    interrupt.end_at_once()

from nemo_rl.cli.run_recipe import extent_of, run_recipe


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


def main(argv: list[str]) -> int:
    args = parse_args(argv)
    extent = extent_of(print_config=args.print_config, validate_only=args.validate_only, preflight=args.preflight)
    return run_recipe(args.config, args.overrides, extent=extent, print_config=args.print_config)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
