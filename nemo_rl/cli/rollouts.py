"""`nemo-rl rollouts show`: what a run has sampled, and how far rollout and trainer are apart on each token."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nemo_rl.diagnostics.rollouts.choice import choose_rollouts
from nemo_rl.diagnostics.rollouts.page import write_rollout_page
from nemo_rl.diagnostics.rollouts.text import rollout_lines
from nemo_rl.errors import UserError, boundary
from nemo_rl.utils.console import make_console

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, help="Samples of a run.")


@app.callback()
def _group() -> None:
    """Samples of a run."""


@app.command()
def show(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="log folder of a run (logger.log_dir)")],
    step: Annotated[int | None, typer.Option("--step", help="default: the newest that has rollouts")] = None,
    every_step: Annotated[bool, typer.Option("--all-steps", help="all steps that have rollouts")] = False,
    group: Annotated[str | None, typer.Option("--group", metavar="ID", help="one group, by the beginning")] = None,
    html: Annotated[Path | None, typer.Option("--html", metavar="OUT", help="write a page instead")] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", metavar="K", min=1, help="at most so many rows of a step")
    ] = None,
) -> None:
    """Shows prompts, responses, rewards, advantages, and the log-probabilities of rollout and trainer token by token.

    Exit code: 0, or 2 where the run, the step or the group has no readable rollouts.
    """
    if every_step and step is not None:
        raise UserError(f"--step {step} and --all-steps: expected one of them")
    with boundary(UserError, f"{run}: the rollouts of a run"):
        shown = choose_rollouts(run, step=step, group=group, limit=limit, every_step=every_step)
    console = make_console()
    if html is not None:
        with boundary(UserError, f"--html {html}: cannot be written"):
            write_rollout_page(html, shown)
        console.print(f"{shown.num_shown} rows of {shown.title} are in {html}")
        return
    is_plain = console.no_color or not console.is_terminal
    for line in rollout_lines(shown, width=console.width):
        console.print(line.plain if is_plain else line)
