"""`nemo-rl config import`, `plan`, `shrink` and `doctor`: prepare a recipe and a machine before a run."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nemo_rl.cli.doors import AsJson, Verbs
from nemo_rl.config.yaml_text import write_recipe
from nemo_rl.errors import ConfigError, UserError, boundary
from nemo_rl.utils.console import make_console
from nemo_rl_tools.recipe_import import as_record, import_recipe, report_lines, to_recipe

if TYPE_CHECKING:
    from nemo_rl_tools.shrink.run import ShrinkReport

__all__ = ["app", "doctor", "plan", "shrink"]

ModelConfig = Annotated[
    Path | None, typer.Option("--model-config", metavar="FILE", help="config.json of a model that is not here")
]

app = typer.Typer(cls=Verbs, no_args_is_help=True, help="Import recipes from other frameworks.")


@app.callback()
def _group() -> None:
    """Import recipes from other frameworks."""


@app.command("import")
def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="a NeMo-RL GRPO recipe")],
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="recipe to write; default: print it")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="what became of every key, for machines")] = False,
) -> None:
    """Map every key of a NeMo-RL recipe, or name it as not supported, without effect or unknown.

    Exit code: 0 the result loads, 2 somebody has to decide first (a parent or a value is missing, a key without which
    something else is trained is not supported, a rule is broken), or FILE is no recipe.
    """
    imported = import_recipe(file)
    recipe = to_recipe(imported)
    if out is not None:
        with boundary(UserError, f"{out}: cannot be written"):
            write_recipe(out, recipe)
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


def plan(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="YAML file")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="changes of the recipe")
    ] = None,
    gpu: Annotated[str | None, typer.Option("--gpu", metavar="NAME", help="such as H100-80G")] = None,
    nodes: Annotated[int | None, typer.Option("--nodes", min=1, help="in place of cluster.num_nodes")] = None,
    model_config: ModelConfig = None,
    is_time: Annotated[bool, typer.Option("--time", help="seconds of a step, in a simulation")] = False,
    sources: Annotated[
        list[Path] | None,
        typer.Option("--from", metavar="RUN", help="--time: log folder of a measured run; repeatable"),
    ] = None,
    cores: Annotated[
        float | None, typer.Option("--cores", min=0.1, help="--time: processors that all CPU processes share")
    ] = None,
    lengths: Annotated[
        str | None, typer.Option("--lengths", metavar="N[-M]", help="--time: response tokens, spread evenly")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Plan a run without starting anything.

    Exit code: 0 it fits, 2 it does not, or the recipe cannot run.
    """
    # torch takes seconds to import, and other commands need none.
    from nemo_rl_tools.plan.command import (  # noqa: PLC0415
        nodes_overrides,
        plan_recipe,
        show_plan,
    )

    if is_time:
        from nemo_rl_tools.plan.time_command import TimeRequest, show_times, time_recipe  # noqa: PLC0415

        request = TimeRequest(
            recipe=recipe,
            overrides=(*(overrides or ()), *(() if nodes is None else nodes_overrides(nodes))),
            sources=tuple(sources or ()),
            gpu=gpu,
            cores=cores,
            lengths=lengths,
            model_config=model_config,
        )
        times = time_recipe(request)
        if as_json:
            typer.echo(json.dumps(times.as_json(), indent=2))
        else:
            show_times(times, make_console())
        return
    if sources or cores is not None or lengths is not None:
        raise ConfigError("--from, --cores and --lengths: expected --time beside them; add it, or leave them out")
    found, error = plan_recipe(
        recipe, overrides=tuple(overrides or ()), gpu=gpu, nodes=nodes, model_config=model_config
    )
    if as_json:
        typer.echo(json.dumps(found.as_json(), indent=2))
    else:
        show_plan(found, make_console())
    if error is not None:
        raise error


def shrink(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="a YAML recipe")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="changes of the recipe")
    ] = None,
    cpus: Annotated[int, typer.Option("--cpus", min=1, help="cores that the run may use")] = 2,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="small recipe, model and run; default: results/shrink/NAME"),
    ] = None,
    steps: Annotated[int, typer.Option("--steps", min=1, max=100, help="steps to run")] = 3,
    is_run: Annotated[bool, typer.Option("--run/--no-run", help="run it, or only write it")] = True,
    model_config: ModelConfig = None,
    as_json: AsJson = False,
) -> None:
    """Run the code of RECIPE on this machine: few CPU workers, a small random model of the same family.

    Exit code: 0 it ran, 2 the recipe is at fault, 3 a check of the run failed, 1 a worker failed.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # torch takes seconds to import, and other commands need none.
    from nemo_rl.distributed.local_job import quiet_libraries  # noqa: PLC0415
    from nemo_rl.utils import interrupt  # noqa: PLC0415
    from nemo_rl_tools.shrink.run import ShrinkRequest  # noqa: PLC0415
    from nemo_rl_tools.shrink.run import shrink as make_small  # noqa: PLC0415

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


FORMAT = 1


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="findings as JSON on standard output")] = False,
    self_test: Annotated[bool, typer.Option(help="also run two ranks with a data plane")] = True,
) -> None:
    """Look at versions, devices, network, memory and limits, and try two ranks with a data plane.

    Exit code 0: in order, or only yellow; 2: something is red.
    """
    from nemo_rl_tools.doctor import (  # noqa: PLC0415 - psutil and packaging
        State,
        examine,
        show,
        worst,
    )

    console, findings = make_console(), []
    for finding in examine(with_self_test=self_test):
        findings.append(finding)
        if not as_json:
            show(finding, console)
    verdict = worst(findings)
    if as_json:
        document = {"format": FORMAT, "state": verdict, "findings": [finding.to_json() for finding in findings]}
        typer.echo(json.dumps(document, indent=2))
    raise typer.Exit(2 if verdict is State.RED else 0)
