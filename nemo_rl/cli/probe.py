"""`nemo-rl probe run|ab|compare`: run a worker by hand, and compare two recordings of the tensors of a model.

The commands share their options as records (`RowOptions`, `ComparisonOptions`), which `with_records` spreads over the
command line.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

import typer

from nemo_rl.errors import UserError
from nemo_rl.records.sites import SITES
from nemo_rl.utils.console import make_console
from nemo_rl.utils.files import write_text

if TYPE_CHECKING:
    from nemo_rl.diagnostics.runner.run import ProbeSpec
    from nemo_rl.diagnostics.verdict import Verdict

__all__ = ["app"]

LAYOUT_HELP = (
    "tp=N cp=N pp=N ep=N etp=N dp=N sp packed recompute worker=dtensor|megatron precision=... mbs=N "
    "weights=DIR|random:SEED, or engine=torch|vllm tp=N prompt=N; what is not named is 1 or off"
)
EVERYTHING = "*"

Recipe = Annotated[Path, typer.Argument(metavar="RECIPE", help="a YAML recipe, of which the policy is used")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="as run_grpo.py takes them")]
AsJson = Annotated[bool, typer.Option("--json", help="machine-readable output")]
Kind = Literal["math", "text", "file", "token-ids", "step"]

app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Run a worker by hand, record its tensors, compare them."
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


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparisonOptions:
    """The options of a comparison of two recordings."""

    limits: Annotated[Path | None, typer.Option("--limits", help="file of limits; else those of the precision")] = None
    html: Annotated[Path | None, typer.Option("--html", help="write a page with plots")] = None
    show_all: Annotated[bool, typer.Option("--all", help="show every site")] = False
    as_json: AsJson = False


def with_records(command: Callable[..., None]) -> Callable[..., None]:
    """Give typer one option for each field of the records that `command` takes, and make the records of their values.

    A parameter is a record where its type is a dataclass; each field of it has an `Annotated` type and a default.
    """
    hints = get_type_hints(command, include_extras=True)
    hints.pop("return", None)
    records: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    spread: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        if parameter.name not in records:
            spread.append(parameter.replace(kind=parameter.KEYWORD_ONLY, annotation=hints[parameter.name]))
            continue
        record = records[parameter.name]
        types = get_type_hints(record, include_extras=True)
        spread += [
            inspect.Parameter(field.name, parameter.KEYWORD_ONLY, default=field.default, annotation=types[field.name])
            for field in fields(record)
        ]

    @wraps(command)
    def called(**given: Any) -> None:
        made: dict[str, Any] = {
            name: record(**{field.name: given.pop(field.name) for field in fields(record)})
            for name, record in records.items()
        }
        command(**given, **made)

    called.__signature__ = inspect.Signature(spread)  # type: ignore[attr-defined]
    called.__annotations__ = {parameter.name: parameter.annotation for parameter in spread}
    return called


@app.callback()
def _root() -> None:
    """Run a worker by hand, record its tensors, compare them."""


@app.command(short_help="two recordings, token by token")
@with_records
def compare(
    a: Annotated[Path, typer.Argument(metavar="A", help="folder of records that is relied on")],
    b: Annotated[Path, typer.Argument(metavar="B", help="folder of records that is compared with it")],
    options: ComparisonOptions,
    noise: Annotated[
        list[Path] | None,
        typer.Option("--noise", metavar="DIR", help="recorded like A: measures noise, proposes limits; repeatable"),
    ] = None,
    propose: Annotated[Path | None, typer.Option("--propose", help="with --noise: write the proposed limits")] = None,
) -> None:
    """Match records token by token. Exit code: 0 pass, 2 usage, 3 mismatch, 4 incomplete, 5 vacuous, 6 corrupt, 7
    unsupported."""
    if propose is not None and not noise:
        raise UserError("--propose: limits are proposed out of recordings like A; name them with --noise DIR")
    raise typer.Exit(_show_comparison(a, b, options, noise=noise or (), propose=propose).value)


@app.command(short_help="what can be recorded, and what it means")
def sites() -> None:
    """List the sites that selectors name: their dims (R tokens) and meaning; `*` marks those with gradients, too."""
    console = make_console()
    for kind, meaning in SITES.items():
        mark = "*" if meaning.has_backward else " "
        where = "each layer" if meaning.in_layers else "the model"
        console.print(f"{kind.value:<17}{mark} {meaning.dims:<23} {where:<11} {meaning.text}")


@app.command(short_help="one worker on given rows")
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
            "--watch", metavar="WATCH", help="reduce sites, such as 'layer.out | stats', for trace ls|serve OUT"
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
    from nemo_rl.diagnostics.runner.layout_text import LayoutText  # noqa: PLC0415
    from nemo_rl.diagnostics.runner.run import run_probe  # noqa: PLC0415

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
        _show(result.as_record(), result.lines(), as_json=as_json)


@app.command(short_help="the same rows in two layouts")
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
    from nemo_rl.diagnostics.runner.layout_text import LayoutText  # noqa: PLC0415
    from nemo_rl.diagnostics.runner.run import run_ab  # noqa: PLC0415

    spec = _spec(recipe, overrides, rows, dump=dump, out=out)
    runs = run_ab(
        spec, LayoutText.parse(a), LayoutText.parse(b), pins_routes=pin == "routes", num_noise_runs=noise_runs
    )
    raise typer.Exit(_show_comparison(*runs.records, options, noise=runs.noise).value)


def _spec(recipe: Path, overrides: list[str] | None, rows: RowOptions, **settings: object) -> ProbeSpec:
    from nemo_rl.config.load import load_config  # noqa: PLC0415
    from nemo_rl.diagnostics.runner.prompts import PromptSpec  # noqa: PLC0415
    from nemo_rl.diagnostics.runner.run import ProbeSpec  # noqa: PLC0415

    prompt = PromptSpec(
        kind=rows.kind,
        text=rows.text,
        path=rows.path,
        length=rows.length,
        num_rows=rows.num_rows,
        is_unequal=rows.is_unequal,
        uses_chat_template=rows.uses_chat_template,
    )
    return ProbeSpec(
        config=load_config(recipe, overrides or []),
        prompt=prompt,
        has_backward=rows.has_backward,
        timeout_s=rows.timeout_s,
        **settings,  # type: ignore[arg-type]
    )


def _show(record: dict[str, object], lines: list[str], *, as_json: bool) -> None:
    console = make_console()
    if as_json:
        console.print_json(json.dumps(record), ensure_ascii=True)
        return
    for line in lines:
        console.print(line)


def _show_comparison(
    a: Path, b: Path, options: ComparisonOptions, *, noise: Sequence[Path], propose: Path | None = None
) -> Verdict:
    """Print the differences between two folders of records, and write the page and the proposed limits.

    Args:
        noise: folders recorded like `a`, from which limits are proposed.
        propose: the file for the proposed limits; None writes none.

    Raises:
        UserError: a file cannot be read or written.
    """
    # torch takes seconds to import, and other commands need none.
    from nemo_rl.diagnostics.compare.folders import compare_folders, propose_limits  # noqa: PLC0415
    from nemo_rl.diagnostics.compare.limits import DEFAULT, read_limits  # noqa: PLC0415
    from nemo_rl.diagnostics.compare.page import write_page  # noqa: PLC0415

    chosen = DEFAULT if options.limits is None else read_limits(options.limits)
    comparison = compare_folders(a, b, limits=chosen)
    proposal = propose_limits([a, *noise]) if noise else None
    if propose is not None and proposal is not None:
        write_text(propose, proposal.text)
    if options.html is not None:
        write_page(options.html, comparison)
    console = make_console()
    if options.as_json:
        record = comparison.as_record() | ({} if proposal is None else {"proposed_limits": proposal.text})
        console.print_json(json.dumps(record, allow_nan=False), ensure_ascii=True)
        return comparison.verdict
    for line in comparison.lines(is_all=options.show_all):
        console.print(line)
    if proposal is not None:
        console.print(f"proposed limits:\n{proposal.text}", end="")
    return comparison.verdict
