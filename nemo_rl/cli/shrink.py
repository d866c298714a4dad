"""`nemo-rl shrink`: a recipe of a cluster, made small and run for a few steps on this machine."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nemo_rl.utils.console import make_console

if TYPE_CHECKING:
    from nemo_rl.cluster.shrink.report import ShrinkReport

__all__ = ["shrink"]


def shrink(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="a YAML recipe")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="as run_grpo.py takes them")
    ] = None,
    cpus: Annotated[int, typer.Option("--cpus", min=1, help="cores that the run may use")] = 2,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="small recipe, model and run; default: results/shrink/NAME"),
    ] = None,
    steps: Annotated[int, typer.Option("--steps", min=1, max=100, help="steps to run")] = 3,
    is_run: Annotated[bool, typer.Option("--run/--no-run", help="run it, or only write it")] = True,
    model_config: Annotated[
        Path | None, typer.Option("--model-config", metavar="FILE", help="config.json of a model that is not here")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="machine-readable output")] = False,
) -> None:
    """Runs the code of RECIPE on this machine: few CPU workers, a small random model of the same family.

    Exit code: 0 it ran, 2 the recipe is at fault, 3 a check of the run failed, 1 a worker failed.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # torch takes seconds to import, and other commands need none.
    from nemo_rl.cluster.shrink.run import ShrinkRequest  # noqa: PLC0415
    from nemo_rl.cluster.shrink.run import shrink as make_small  # noqa: PLC0415
    from nemo_rl.distributed.local_job import quiet_libraries  # noqa: PLC0415
    from nemo_rl.utils import interrupt  # noqa: PLC0415

    interrupt.install()
    request = ShrinkRequest(
        recipe=recipe,
        overrides=tuple(overrides or ()),
        cpus=cpus,
        out=(out or Path("results") / "shrink" / recipe.stem).absolute(),
        steps=steps,
        is_run=is_run,
        model_config=model_config,
    )
    # Progress goes beside the report, which may be read by a machine.
    with quiet_libraries():
        report = make_small(request, console=make_console(stderr=True))
    _show(report, as_json=as_json)
    raise typer.Exit(report.verdict.value)


def _show(report: ShrinkReport, *, as_json: bool) -> None:
    console = make_console()
    if as_json:
        console.print_json(json.dumps(report.as_record(), default=str))
        return
    for line in report.lines():
        console.print(line)
