"""Runs one Megatron worker by hand: a recipe and a prompt in, log-probabilities out; no Ray, no reinforcement learning.

    python examples/run_megatron.py configs/recipes/grpo_sort_megatron_tp2_cpu.yaml --rows 2 --backward
    torchrun --nproc-per-node 2 examples/run_megatron.py RECIPE --layout "tp=2 sp" --record-routes routes.safetensors

The same as `nemo-rl probe run`, whose `--help` lists the options; a layout that names no worker means Megatron's. Exit
codes: 0 done, 2 something the user can fix, 8 a rank failed.
"""

from __future__ import annotations

import sys

from nemo_rl.cli.main import main

WORKER = "worker=megatron"


def arguments(given: list[str]) -> list[str]:
    """Those of `nemo-rl probe run`; a layout that names no worker means this one."""
    found = ["probe", "run", *given]
    for at, word in enumerate(given):
        name, is_joined, value = word.partition("=")
        if name == "--layout" and not is_joined and at + 1 < len(given):
            found[at + 3] = _on_megatron(given[at + 1])
        elif name == "--layout" and is_joined:
            found[at + 2] = f"{name}={_on_megatron(value)}"
    return found


def _on_megatron(layout: str) -> str:
    return layout if "worker=" in layout else f"{WORKER} {layout}"


if __name__ == "__main__":
    sys.argv[1:] = arguments(sys.argv[1:])
    main()
