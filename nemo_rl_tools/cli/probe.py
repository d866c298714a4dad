"""`nemo-rl probe run|ab|sites`: run a worker by hand on given rows, in one layout or in two that are compared."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from nemo_rl.cli.doors import AsJson, Verbs, show, with_records
from nemo_rl.records.sites import SITES
from nemo_rl.utils.console import make_console
from nemo_rl_tools.cli.compare import ComparisonOptions, show_comparison

if TYPE_CHECKING:
    from nemo_rl_tools.runner.run import ProbeSpec

__all__ = ["app"]

LAYOUT_HELP = (
    "tp=N cp=N pp=N ep=N etp=N dp=N sp packed recompute worker=dtensor|megatron precision=... mbs=N "
    "weights=DIR|random:SEED, or engine=torch|vllm tp=N prompt=N; what is not named is 1 or off"
)
EVERYTHING = "*"

Recipe = Annotated[Path, typer.Argument(metavar="RECIPE", help="a YAML recipe, of which the policy is used")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="changes of the recipe")]
Kind = Literal["math", "text", "file", "token-ids", "step"]

app = typer.Typer(
    cls=Verbs, no_args_is_help=True, rich_markup_mode=None, help="Run a worker by hand, and record its tensors."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RowOptions:
    """The options of a worker that runs by hand: its rows, its passes and its deadline."""

    kind: Annotated[Kind, typer.Option("--prompt", help="where the rows come from")] = "math"
    text: Annotated[str | None, typer.Option("--text", help="of --prompt text")] = None
    path: Annotated[
        Path | None,
        typer.Option(
            "--prompt-file", help="of file, a text; of token-ids, a JSON list of rows; of step, RUN/steps/step_N"
        ),
    ] = None
    length: Annotated[int | None, typer.Option("--length", min=2, help="tokens of a row; else 137 of math, or all")] = (
        None
    )
    num_rows: Annotated[int, typer.Option("--rows", min=1, max=4096, help="rows of the batch")] = 1
    is_unequal: Annotated[bool, typer.Option("--unequal", help="each row 17 tokens shorter than the one before it")] = (
        False
    )
    uses_chat_template: Annotated[bool, typer.Option("--chat", help="put the text through the chat template")] = False
    has_backward: Annotated[bool, typer.Option("--backward", help="loss, gradient norm and gradients, too")] = False
    timeout_s: Annotated[
        float, typer.Option("--timeout", min=1, metavar="SECONDS", help="deadline of several ranks together")
    ] = 600.0


@app.callback()
def _root() -> None:
    """Run a worker by hand, and record its tensors."""


@app.command(short_help="List what can be recorded, and what it means.")
def sites() -> None:
    """List the sites that selectors name: their dims (R tokens) and meaning; `*` marks those with gradients, too."""
    console = make_console()
    for kind, meaning in SITES.items():
        mark = "*" if meaning.has_backward else " "
        where = "each layer" if meaning.in_layers else "the model"
        console.print(f"{kind.value:<17}{mark} {meaning.dims:<23} {where:<11} {meaning.text}")


@app.command(short_help="Run one worker on given rows.")
@with_records
def run(
    recipe: Recipe,
    rows: RowOptions,
    overrides: Overrides = None,
    layout: Annotated[
        str | None, typer.Option("--layout", help=f"{LAYOUT_HELP}; without it that of the recipe")
    ] = None,
    top_k: Annotated[int, typer.Option("--top-k", min=0, help="print so many likeliest next tokens")] = 0,
    dump: Annotated[
        str | None, typer.Option("--dump", metavar="SELECTOR", help="record sites, such as 'layer.out, logits'")
    ] = None,
    watch: Annotated[
        list[str] | None,
        typer.Option(
            "--watch",
            metavar="WATCH",
            help="reduce sites, such as 'layer.out | stats', for `inspect OUT tracer` and `trace serve OUT`",
        ),
    ] = None,
    record_routes: Annotated[
        Path | None, typer.Option("--record-routes", metavar="FILE", help="write the experts that the routers choose")
    ] = None,
    replay_routes: Annotated[
        Path | None, typer.Option("--replay-routes", metavar="FILE", help="use the experts of a file")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="result.json, records/ of --dump, tracer/ of --watch")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run one policy worker on given rows, without Ray: log-probabilities, and with --backward loss and gradients.

    Under torchrun each process is a rank; else the ranks are started here. Exit code: 0 done, 2 usage, 8 a rank failed.
    """
    # torch takes seconds to import, and other commands need none.
    from nemo_rl_tools.runner.layout_text import LayoutText  # noqa: PLC0415
    from nemo_rl_tools.runner.run import run_probe  # noqa: PLC0415

    spec = _spec(
        recipe,
        overrides,
        rows,
        top_k=top_k,
        dump=dump,
        watches=tuple(watch or ()),
        out=out,
        routes_to=record_routes,
        routes_from=replay_routes,
        layout=LayoutText.parse(layout) if layout is not None else None,
    )
    result = run_probe(spec)
    if result.is_first_rank:
        show(result.as_record(), result.lines(), as_json=as_json)


@app.command(short_help="Run the same rows in two layouts.")
@with_records
def ab(
    recipe: Recipe,
    a: Annotated[str, typer.Option("--a", metavar="LAYOUT", help=LAYOUT_HELP)],
    b: Annotated[str, typer.Option("--b", metavar="LAYOUT", help="the other side")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="records of both sides; must not exist")],
    rows: RowOptions,
    options: ComparisonOptions,
    overrides: Overrides = None,
    pin: Annotated[
        Literal["none", "routes"], typer.Option("--pin", help="routes: side b uses side a's experts")
    ] = "none",
    dump: Annotated[str, typer.Option("--dump", metavar="SELECTOR", help="sites that are compared")] = EVERYTHING,
    noise_runs: Annotated[int, typer.Option("--noise-runs", min=0, help="run side a again, and propose limits")] = 0,
) -> None:
    """Run the same rows in two layouts, on two workers or with two sets of weights, and compare all sites.

    Exit code: as of compare; 8 a rank failed.
    """
    from nemo_rl_tools.runner.layout_text import LayoutText  # noqa: PLC0415
    from nemo_rl_tools.runner.run import run_ab  # noqa: PLC0415

    spec = _spec(recipe, overrides, rows, dump=dump, out=out)
    runs = run_ab(
        spec, LayoutText.parse(a), LayoutText.parse(b), pins_routes=pin == "routes", num_noise_runs=noise_runs
    )
    raise typer.Exit(show_comparison(*runs.records, options, noise=runs.noise).value)


def _spec(recipe: Path, overrides: list[str] | None, rows: RowOptions, **settings: object) -> ProbeSpec:
    from nemo_rl.config.load import load_config  # noqa: PLC0415
    from nemo_rl_tools.runner.prompts import PromptSpec  # noqa: PLC0415
    from nemo_rl_tools.runner.run import ProbeSpec  # noqa: PLC0415

    given = asdict(rows)
    prompt = PromptSpec(**{part.name: given.pop(part.name) for part in fields(PromptSpec)})
    config = load_config(recipe, overrides or [])
    of_recipe = {"policy": config.policy, "cluster": config.cluster, "seed": config.grpo.seed}
    return ProbeSpec(prompt=prompt, **of_recipe, **given, **settings)  # type: ignore[arg-type]
