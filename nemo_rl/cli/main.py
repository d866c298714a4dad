"""The `nemo-rl` command: subcommands for people in front of a terminal.

User errors end with exit code 2 and one line, never with a traceback; a job that is gone or does not answer with 1.
"""

from __future__ import annotations

import sys

import typer
from rich.console import Console

from nemo_rl.cli.data_plane import app as data_plane_app
from nemo_rl.cli.trace import app as trace_app
from nemo_rl.errors import NemoRLError, UserError

__all__ = ["app", "main"]

USER_ERROR, FAILURE = 2, 1

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False, rich_markup_mode=None)
app.add_typer(data_plane_app, name="data-plane")
app.add_typer(trace_app, name="trace")


@app.callback()
def _root() -> None:
    """Tools around GRPO runs."""


def main() -> None:
    """Entry point of the console script."""
    try:
        app()
    except NemoRLError as error:
        Console(stderr=True, soft_wrap=True, markup=False, highlight=False).print(f"error: {error}", style="red")
        sys.exit(USER_ERROR if isinstance(error, UserError) else FAILURE)


if __name__ == "__main__":
    main()
