"""`nemo-rl probe compare`: whether two recordings of a model's tensors agree, and where they part."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from nemo_rl.errors import UserError
from nemo_rl.utils.files import write_text

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Record tensors of a model and compare them.")


@app.callback()
def _root() -> None:
    """Record tensors of a model and compare them."""


@app.command()
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
    from nemo_rl.diagnostics.compare.folders import compare_folders  # noqa: PLC0415
    from nemo_rl.diagnostics.compare.limits import DEFAULT, read_limits  # noqa: PLC0415
    from nemo_rl.diagnostics.compare.noise import propose_limits  # noqa: PLC0415
    from nemo_rl.diagnostics.compare.page import write_page  # noqa: PLC0415

    if propose is not None and not noise:
        raise UserError("--propose: limits are proposed out of recordings like A; name them with --noise DIR")
    chosen = DEFAULT if limits is None else read_limits(limits)
    comparison = compare_folders(a, b, limits=chosen)
    proposal = propose_limits([a, *noise]) if noise else None
    if propose is not None and proposal is not None:
        write_text(propose, proposal.text)
    if html is not None:
        write_page(html, comparison)
    console = Console(soft_wrap=True, markup=False, highlight=False)
    if as_json:
        record = comparison.as_record() | ({} if proposal is None else {"proposed_limits": proposal.text})
        console.print_json(json.dumps(record, allow_nan=False), ensure_ascii=True)
    else:
        for line in comparison.lines(is_all=show_all):
            console.print(line)
        if proposal is not None:
            console.print(f"proposed limits:\n{proposal.text}", end="")
    raise typer.Exit(comparison.verdict.value)
