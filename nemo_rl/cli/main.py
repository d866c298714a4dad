"""The `nemo-rl` command: its subcommands and exit codes.

User errors end with exit code 2 and one line, never with a traceback; a job that is gone or does not answer with 1.
"""

from __future__ import annotations

import sys
from importlib.metadata import version
from typing import Annotated

import typer

from nemo_rl.utils import interrupt
from nemo_rl.utils.console import make_console

if __name__ == "__main__" or sys.argv[0].endswith("nemo-rl"):
    interrupt.end_at_once()

from nemo_rl.cli.checkpoints import evaluate, export
from nemo_rl.cli.compare import app as compare_app
from nemo_rl.cli.data_plane import app as data_plane_app
from nemo_rl.cli.doors import answer_old_names
from nemo_rl.cli.inspect import app as inspect_app
from nemo_rl.cli.launch import app as launch_app
from nemo_rl.cli.launch import train
from nemo_rl.cli.probe import app as probe_app
from nemo_rl.cli.recipes import app as config_app
from nemo_rl.cli.recipes import doctor, plan, shrink
from nemo_rl.cli.trace import app as trace_app
from nemo_rl.cli.view import view
from nemo_rl.errors import NemoRLError, UserError
from nemo_rl.utils.exits import INTERRUPTED, crash_line, machine_problem, text_of

__all__ = ["app", "main"]

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False, rich_markup_mode=None)
app.add_typer(inspect_app, name="inspect")
app.add_typer(compare_app, name="compare")
app.add_typer(config_app, name="config")
app.add_typer(data_plane_app, name="data-plane")
app.add_typer(launch_app, name="launch")
app.add_typer(probe_app, name="probe")
app.add_typer(trace_app, name="trace")
app.command()(doctor)
app.command("eval")(evaluate)
app.command()(export)
app.command()(plan)
app.command()(shrink)
app.command()(train)
app.command()(view)
rollouts_app = typer.Typer()
app.add_typer(rollouts_app, name="rollouts", hidden=True)
answer_old_names(
    {"": app, "trace": trace_app, "data-plane": data_plane_app, "rollouts": rollouts_app, "probe": probe_app}
)


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
    """Run GRPO, and use the tools around it."""


def main() -> None:
    """Run the console script."""
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
