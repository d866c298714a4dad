"""The `nemo-rl` command: its subcommands and exit codes.

Those of `TOOLS` are in their own package, which need not be installed.

User errors end with exit code 2 and one line, never with a traceback; a job that is gone or does not answer with 1.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from typing import Annotated

import typer

from nemo_rl.utils import interrupt
from nemo_rl.utils.console import make_console

if __name__ == "__main__" or sys.argv[0].endswith("nemo-rl"):
    interrupt.end_at_once()

from nemo_rl.cli.checkpoints import evaluate, export
from nemo_rl.cli.data_plane import app as data_plane_app
from nemo_rl.cli.doors import Verbs, answer_old_names, refuse
from nemo_rl.cli.launch import app as launch_app
from nemo_rl.cli.launch import init, sft, train
from nemo_rl.errors import NemoRLError, UserError
from nemo_rl.utils.exits import INTERRUPTED, crash_line, machine_problem, text_of

__all__ = ["TOOLS", "app", "main"]

TOOLS = {
    "inspect": "nemo_rl_tools.cli.inspect:app",
    "compare": "nemo_rl_tools.cli.compare:app",
    "checkpoints": "nemo_rl_tools.cli.checkpoints:app",
    "config": "nemo_rl_tools.cli.recipes:app",
    "probe": "nemo_rl_tools.cli.probe:app",
    "doctor": "nemo_rl_tools.cli.recipes:doctor",
    "plan": "nemo_rl_tools.cli.recipes:plan",
    "shrink": "nemo_rl_tools.cli.recipes:shrink",
    "trace": "nemo_rl_tools.cli.trace_watch:app",
    "view": "nemo_rl_tools.cli.view:view",
}
"""Subcommands of the package nemo-rl-tools -> `module:name` of each, a group or a function."""
TOOLS_PACKAGE = "nemo-rl-tools"


class _Root(Verbs):
    headings = {
        "Run": ("train", "sft", "init", "eval", "export", "config", "checkpoints"),
        "Look": ("view", "inspect", "compare", "trace", "probe"),
        "Cluster": ("launch", "plan", "shrink", "doctor"),
        "Data": ("data-plane",),
    }


app = typer.Typer(
    cls=_Root, no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False, rich_markup_mode=None
)
app.add_typer(data_plane_app, name="data-plane")
app.add_typer(launch_app, name="launch")
app.command("eval")(evaluate)
app.command()(export)
app.command()(train)
app.command()(sft)
app.command()(init)
rollouts_app = typer.Typer()
app.add_typer(rollouts_app, name="rollouts", hidden=True)


def _add_tools() -> dict[str, typer.Typer]:
    """Add the subcommands of `TOOLS`, or in their place the sentence that says what to install; return their groups."""
    groups, absent = {}, find_spec(TOOLS_PACKAGE.replace("-", "_")) is None
    for name, place in TOOLS.items():
        module, _, attribute = place.partition(":")
        if absent:
            refuse(app, name, partial(_not_installed, name))
        elif isinstance(found := getattr(import_module(module), attribute), typer.Typer):
            app.add_typer(found, name=name)
            groups[name] = found
        else:
            app.command(name)(found)
    return groups


def _not_installed(name: str, _given: Sequence[str]) -> str:
    return (
        f"`nemo-rl {name}` is part of the package {TOOLS_PACKAGE}, which is not installed; install it: "
        f"pip install {TOOLS_PACKAGE}=={version('nemo-rl')}"
    )


answer_old_names({"": app, "data-plane": data_plane_app, "rollouts": rollouts_app, **_add_tools()})


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"nemo-rl {version('nemo-rl')}")
        raise typer.Exit


@app.callback()
def _root(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="show the version and exit")
    ] = False,
) -> None:
    """Train language models with GRPO from recipes, and look at what they did."""


def main() -> None:
    interrupt.install()
    try:
        app()
    except SystemExit as ended:
        # The parser of the command line ends an interrupt with 1; a command that ends by one as it should, with 0.
        raise SystemExit(INTERRUPTED if interrupt.received() and ended.code else ended.code) from None
    except Exception as error:  # noqa: BLE001  (the outermost place: reported as what it is)
        problem = text_of(error) if isinstance(error, NemoRLError) else machine_problem(error)
        line = problem or crash_line(error, folder=None)
        make_console(stderr=True).print(f"error: {line}", style="red")
        sys.exit(_exit_code(error))


def _exit_code(error: Exception) -> int:
    if isinstance(error, NemoRLError):
        return error.exit_code
    return UserError.exit_code if machine_problem(error) is not None else NemoRLError.exit_code


if __name__ == "__main__":
    main()
