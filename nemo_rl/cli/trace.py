"""`nemo-rl trace verify|ls|...`: routes of router replay, and the tracer's live pictures and recordings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from nemo_rl.cli.trace_ls import ls
from nemo_rl.cli.trace_play import play, serve
from nemo_rl.cli.trace_watch import watch
from nemo_rl.diagnostics.route_chain.chain import verify_trace
from nemo_rl.utils.console import make_console

__all__ = ["app"]

HELP = "Watch a model train, read recordings of it, check traces of router replay."

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help=HELP)


@app.callback()
def _root() -> None:
    """Watch a model train, read recordings of it, check traces of router replay."""


@app.command(short_help="whether training used the routes of the rollout")
def verify(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="NRL_R3_TRACE_DIR of a run")],
    require_forward_verify: Annotated[
        bool, typer.Option("--require-forward-verify", help="every forward must have checked its routes")
    ] = False,
    require_cp_identity: Annotated[
        bool, typer.Option("--require-cp-identity", help="every shard must name its samples and tokens")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="machine-readable output")] = False,
) -> None:
    """Follows the routes of every sample hop by hop. Exit code: 0 pass, 3 mismatch, 4 incomplete, 5 vacuous."""
    report = verify_trace(
        folder, require_forward_verify=require_forward_verify, require_cp_identity=require_cp_identity
    )
    console = make_console()
    if as_json:
        console.print_json(json.dumps(report.as_record()))
    else:
        for line in report.lines():
            console.print(line)
    raise typer.Exit(report.verdict.value)


app.command(short_help="what a recording holds")(ls)
app.command(short_help="look on at a running job")(watch)
app.command(short_help="recordings on the page again")(serve)
app.command(short_help="a recording at the speed at which it was made")(play)
