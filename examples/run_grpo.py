"""Runs GRPO from a YAML recipe.

    python examples/run_grpo.py --config configs/grpo_sort_cpu.yaml [a.b=value ...] [--print-config]
        [--validate-only | --preflight]

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

from nemo_rl.cli.run_recipe import Extent, run_recipe


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
    looks = (
        (args.preflight, Extent.PREFLIGHT),
        (args.validate_only, Extent.VALIDATE),
        (args.print_config, Extent.PRINT),
    )
    extent = next((extent for is_asked, extent in looks if is_asked), Extent.RUN)
    return run_recipe(args.config, args.overrides, extent=extent, print_config=args.print_config)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
