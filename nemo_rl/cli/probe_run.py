"""`nemo-rl probe run|ab`: a worker by hand, in one layout or in two. Added to the app of `probe`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from nemo_rl.utils.console import make_console

if TYPE_CHECKING:
    from nemo_rl.diagnostics.runner.prompts import PromptSpec
    from nemo_rl.diagnostics.runner.run import ProbeSpec

__all__ = ["ab", "run"]

LAYOUT_HELP = (
    "tp=N cp=N pp=N ep=N etp=N dp=N sp packed recompute worker=dtensor|megatron precision=... mbs=N "
    "weights=DIR|random:SEED; what is not named is 1 or off"
)
EVERYTHING = "*"

Recipe = Annotated[Path, typer.Argument(metavar="RECIPE", help="a YAML recipe, of which the policy is used")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="as run_grpo.py takes them")]
Kind = Literal["math", "text", "file", "token-ids", "step"]
PromptKind = Annotated[Kind, typer.Option("--prompt", help="where the rows come from")]
Text = Annotated[str | None, typer.Option("--text", help="of --prompt text")]
PromptFile = Annotated[
    Path | None,
    typer.Option("--prompt-file", help="of file, a text; of token-ids, a JSON list of rows; of step, RUN/steps/step_N"),
]
Length = Annotated[int | None, typer.Option("--length", min=2, help="tokens of a row; else 137 of math, or all")]
NumRows = Annotated[int, typer.Option("--rows", min=1, max=4096, help="rows of the batch")]
Unequal = Annotated[bool, typer.Option("--unequal", help="each row 17 tokens shorter than the one before it")]
Chat = Annotated[bool, typer.Option("--chat", help="put the text through the chat template")]
Backward = Annotated[bool, typer.Option("--backward", help="loss, gradient norm and gradients, too")]
Timeout = Annotated[
    float, typer.Option("--timeout", min=1, metavar="SECONDS", help="deadline of several ranks together")
]
AsJson = Annotated[bool, typer.Option("--json", help="machine-readable output")]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rows:
    """The options that say which rows."""

    kind: Kind
    text: str | None
    path: Path | None
    length: int | None
    num_rows: int
    is_unequal: bool
    uses_chat_template: bool

    def spec(self) -> PromptSpec:
        from nemo_rl.diagnostics.runner.prompts import PromptSpec  # noqa: PLC0415

        return PromptSpec(
            kind=self.kind,
            text=self.text,
            path=self.path,
            length=self.length,
            num_rows=self.num_rows,
            is_unequal=self.is_unequal,
            uses_chat_template=self.uses_chat_template,
        )


def run(
    recipe: Recipe,
    overrides: Overrides = None,
    layout: Annotated[
        str | None, typer.Option("--layout", help=f"{LAYOUT_HELP}; without it that of the recipe")
    ] = None,
    prompt: PromptKind = "math",
    text: Text = None,
    prompt_file: PromptFile = None,
    length: Length = None,
    rows: NumRows = 1,
    unequal: Unequal = False,
    chat: Chat = False,
    backward: Backward = False,
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
    timeout: Timeout = 600.0,
    as_json: AsJson = False,
) -> None:
    """Runs one policy worker on given rows, without Ray: log-probabilities, and with --backward loss and gradients.

    Under torchrun each process is a rank; else the ranks are started here. Exit code: 0 done, 2 usage, 8 a rank failed.
    """
    from nemo_rl.diagnostics.runner.layout_text import LayoutText  # noqa: PLC0415
    from nemo_rl.diagnostics.runner.run import run_probe  # noqa: PLC0415

    given = _Rows(
        kind=prompt,
        text=text,
        path=prompt_file,
        length=length,
        num_rows=rows,
        is_unequal=unequal,
        uses_chat_template=chat,
    )
    spec = _spec(
        recipe,
        overrides,
        given,
        has_backward=backward,
        top_k=top_k,
        dump=dump,
        watches=tuple(watch or ()),
        out=out,
        routes_to=record_routes,
        routes_from=replay_routes,
        timeout_s=timeout,
        layout=LayoutText.parse(layout) if layout is not None else None,
    )
    result = run_probe(spec)
    if result.is_first_rank:
        _show(result.as_record(), result.lines(), as_json=as_json)


def ab(
    recipe: Recipe,
    a: Annotated[str, typer.Option("--a", metavar="LAYOUT", help=LAYOUT_HELP)],
    b: Annotated[str, typer.Option("--b", metavar="LAYOUT", help="the other side")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="records of both sides; must not exist")],
    overrides: Overrides = None,
    pin: Annotated[
        Literal["none", "routes"], typer.Option("--pin", help="routes: side b uses side a's experts")
    ] = "none",
    prompt: PromptKind = "math",
    text: Text = None,
    prompt_file: PromptFile = None,
    length: Length = None,
    rows: NumRows = 1,
    unequal: Unequal = False,
    chat: Chat = False,
    backward: Backward = False,
    dump: Annotated[str, typer.Option("--dump", metavar="SELECTOR", help="sites that are compared")] = EVERYTHING,
    limits: Annotated[Path | None, typer.Option("--limits", help="file of limits; else those of the precision")] = None,
    noise_runs: Annotated[int, typer.Option("--noise-runs", min=0, help="run side a again, and propose limits")] = 0,
    html: Annotated[Path | None, typer.Option("--html", help="write a page with plots")] = None,
    timeout: Timeout = 600.0,
    show_all: Annotated[bool, typer.Option("--all", help="show every site")] = False,
    as_json: AsJson = False,
) -> None:
    """Runs the same rows in two layouts, on two workers or with two sets of weights, and compares all sites.

    Exit code: as of compare; 8 a rank failed.
    """
    from nemo_rl.cli.comparison import show_comparison  # noqa: PLC0415
    from nemo_rl.diagnostics.runner.layout_text import LayoutText  # noqa: PLC0415
    from nemo_rl.diagnostics.runner.run import run_ab  # noqa: PLC0415

    given = _Rows(
        kind=prompt,
        text=text,
        path=prompt_file,
        length=length,
        num_rows=rows,
        is_unequal=unequal,
        uses_chat_template=chat,
    )
    spec = _spec(recipe, overrides, given, has_backward=backward, dump=dump, out=out, timeout_s=timeout)
    runs = run_ab(
        spec, LayoutText.parse(a), LayoutText.parse(b), pins_routes=pin == "routes", num_noise_runs=noise_runs
    )
    verdict = show_comparison(
        *runs.records, limits=limits, noise=runs.noise, propose=None, html=html, show_all=show_all, as_json=as_json
    )
    raise typer.Exit(verdict.value)


def _spec(recipe: Path, overrides: list[str] | None, rows: _Rows, **settings: object) -> ProbeSpec:
    from nemo_rl.config.load import load_config  # noqa: PLC0415
    from nemo_rl.diagnostics.runner.run import ProbeSpec  # noqa: PLC0415

    return ProbeSpec(config=load_config(recipe, overrides or []), prompt=rows.spec(), **settings)  # type: ignore[arg-type]


def _show(record: dict[str, object], lines: list[str], *, as_json: bool) -> None:
    console = make_console()
    if as_json:
        console.print_json(json.dumps(record), ensure_ascii=True)
        return
    for line in lines:
        console.print(line)
