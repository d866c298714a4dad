"""Writes a starter checkpoint of the CPU recipes: a Hugging Face folder with model and tokenizer.

Usage: python examples/make_starter.py --out checkpoints/starter_sort [--task sort] [--experts 0] [--seed 0]
"""

from __future__ import annotations

import logging
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

# A script's own folder is on the path, its package is not.
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import typer

from examples.starter import STARTER_TASKS, make_starter
from nemo_rl.errors import UserError

USER_ERROR = 2


def main(
    out: Annotated[Path, typer.Option(help="Folder to write: a new or empty one, or a starter, which is replaced.")],
    task: Annotated[str, typer.Option(help=f"One of: {', '.join(STARTER_TASKS)}.")] = "sort",
    experts: Annotated[int, typer.Option(min=0, help="Experts per layer, two per token; 0 is a dense model.")] = 0,
    seed: Annotated[int, typer.Option(help="Seed of the weights and of the training order.")] = 0,
    threads: Annotated[int, typer.Option(help="Torch threads.")] = 1,
) -> None:
    """Warm-starts a Qwen3 of about half a million parameters on one task: to a sampled accuracy of about 0.3, or, where
    the task has turns (guess, calculator), until it knows their form."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    if task not in STARTER_TASKS:
        raise typer.BadParameter(f"expected one of {', '.join(STARTER_TASKS)}, got {task!r}", param_hint="--task")
    torch.set_num_threads(threads)
    if experts == 1:
        raise typer.BadParameter("expected 0 or at least 2, two for each token, got 1", param_hint="--experts")
    chosen = STARTER_TASKS[task]
    config = chosen.config.with_experts(experts) if experts else chosen.config
    try:
        report = make_starter(out, chosen, config=replace(config, seed=seed))
    except UserError as error:
        logging.error("error: %s", error)
        sys.exit(USER_ERROR)
    accuracy = "" if report.accuracy is None else f", sampled accuracy {report.accuracy:.3f}"
    logging.info("wrote %s: %d steps%s", out, report.steps, accuracy)


if __name__ == "__main__":
    typer.run(main)
