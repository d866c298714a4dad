"""`nemo-rl plan`: who runs where, what it needs, how long it takes at least, and whether it fits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from nemo_rl.utils.console import make_console

__all__ = ["plan"]


def plan(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="YAML file")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="changes of the recipe")
    ] = None,
    gpu: Annotated[str | None, typer.Option("--gpu", metavar="NAME", help="such as H100-80G")] = None,
    nodes: Annotated[int | None, typer.Option("--nodes", min=1, help="in place of cluster.num_nodes")] = None,
    model_config: Annotated[
        Path | None, typer.Option("--model-config", metavar="FILE", help="config.json of a model that is not here")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="machine-readable output")] = False,
) -> None:
    """Plans a run without starting anything.

    Exit code: 0 it fits, 2 it does not, or the recipe cannot run.
    """
    # torch takes seconds to import, and other commands need none.
    from nemo_rl.cluster.plan.command import PlanRequest, plan_recipe  # noqa: PLC0415
    from nemo_rl.cluster.plan.report import show_plan  # noqa: PLC0415

    request = PlanRequest(
        recipe=recipe, overrides=tuple(overrides or ()), gpu=gpu, nodes=nodes, model_config=model_config
    )
    found, error = plan_recipe(request)
    if as_json:
        typer.echo(json.dumps(found.as_json(), indent=2))
    else:
        show_plan(found, make_console())
    if error is not None:
        raise error
