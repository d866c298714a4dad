"""`nemo-rl config import`: a recipe of NeMo-RL as a recipe of ours. Imports neither torch nor Ray."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from nemo_rl.cluster.recipe_import.convert import import_recipe
from nemo_rl.cluster.recipe_import.emit import as_record, report_lines, to_recipe
from nemo_rl.errors import ConfigError, UserError, boundary
from nemo_rl.utils.console import make_console

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, help="Recipes: from other frameworks.")


@app.callback()
def _group() -> None:
    """Recipes: from other frameworks."""


@app.command("import")
def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="a NeMo-RL GRPO recipe")],
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="recipe to write; default: print it")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="what became of every key, for machines")] = False,
) -> None:
    """Maps every key of a NeMo-RL recipe, or names it as not supported, without effect or unknown.

    Exit code: 0 the result loads, 2 somebody has to decide first (a parent or a value is missing, a key without which
    something else is trained is not supported, a rule is broken), or FILE is no recipe.
    """
    imported = import_recipe(file)
    recipe = to_recipe(imported)
    if out is not None:
        with boundary(UserError, f"{out}: cannot be written"):
            out.write_text(recipe, encoding="utf-8")
    elif not as_json:
        # Not by rich, which wraps lines.
        typer.echo(recipe, nl=False)
    if as_json:
        make_console().print_json(json.dumps(as_record(imported), default=str))
    else:
        report = make_console(stderr=out is None)
        for line in report_lines(imported):
            report.print(line)
    if imported.problems:
        raise ConfigError([f"{out or file}: {problem}" for problem in imported.problems])
