"""`nemo-rl probe run|ab|compare`: a worker by hand, and whether two recordings of a model's tensors agree."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nemo_rl.cli.probe_run import ab, run
from nemo_rl.errors import UserError
from nemo_rl.records.sites import SITES
from nemo_rl.utils.console import make_console

__all__ = ["app"]

app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Run a worker by hand, record its tensors, compare them."
)


@app.callback()
def _root() -> None:
    """Run a worker by hand, record its tensors, compare them."""


@app.command(short_help="two recordings, token by token")
def compare(
    a: Annotated[Path, typer.Argument(metavar="A", help="folder of records that is relied on")],
    b: Annotated[Path, typer.Argument(metavar="B", help="folder of records that is compared with it")],
    limits: Annotated[Path | None, typer.Option("--limits", help="file of limits; else those of the precision")] = None,
    html: Annotated[Path | None, typer.Option("--html", help="write a page with plots")] = None,
    noise: Annotated[
        list[Path] | None,
        typer.Option("--noise", metavar="DIR", help="recorded like A: measures noise, proposes limits; repeatable"),
    ] = None,
    propose: Annotated[Path | None, typer.Option("--propose", help="with --noise: write the proposed limits")] = None,
    show_all: Annotated[bool, typer.Option("--all", help="show every site")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="machine-readable output")] = False,
) -> None:
    """Matches records token by token. Exit code: 0 pass, 2 usage, 3 mismatch, 4 incomplete, 5 vacuous, 6 corrupt, 7
    unsupported."""
    # torch takes seconds to import, and other commands need none.
    from nemo_rl.cli.comparison import show_comparison  # noqa: PLC0415

    if propose is not None and not noise:
        raise UserError("--propose: limits are proposed out of recordings like A; name them with --noise DIR")
    verdict = show_comparison(
        a, b, limits=limits, noise=noise or (), propose=propose, html=html, show_all=show_all, as_json=as_json
    )
    raise typer.Exit(verdict.value)


@app.command(short_help="what can be recorded, and what it means")
def sites() -> None:
    """Lists the sites that selectors name: their dims (R tokens) and meaning; `*` marks those with gradients, too."""
    console = make_console()
    for kind, meaning in SITES.items():
        mark = "*" if meaning.has_backward else " "
        where = "each layer" if meaning.in_layers else "the model"
        console.print(f"{kind.value:<17}{mark} {meaning.dims:<23} {where:<11} {meaning.text}")


app.command(short_help="one worker on given rows")(run)
app.command(short_help="the same rows in two layouts")(ab)
