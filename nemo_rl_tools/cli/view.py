"""`nemo-rl view`: a page with the runs of a folder, served on loopback or written as files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nemo_rl.utils.console import make_console
from nemo_rl_tools.view.pages import ViewPages
from nemo_rl_tools.view.server import ViewServer

__all__ = ["view"]


def view(
    results: Annotated[Path, typer.Argument(metavar="RESULTS", help="log folder of a run, or a folder above several")],
    export: Annotated[
        Path | None, typer.Option("--export", metavar="DIR", help="write the page as files that need no server")
    ] = None,
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0 takes a free one")] = 0,
) -> None:
    """Show the runs below RESULTS on one page.

    It has curves over each other, settings that differ, and of each run the time of its stages, rollouts of any step,
    the life of a row, routes, and what the live tracer has recorded. The page is served on 127.0.0.1 until Ctrl-C,
    at the printed address, which has a token; a reload shows new steps.
    """
    console = make_console()
    pages = ViewPages(results, is_served=export is None)
    if export is not None:
        console.print(f"{pages.write(export)}  {pages.num_runs} runs", soft_wrap=True)
        return
    server = ViewServer(pages, port=port)
    console.print(f"{server.address}  {pages.num_runs} runs; Ctrl-C ends", soft_wrap=True)
    server.serve()
