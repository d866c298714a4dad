"""`nemo-rl probe run|ab`: a worker by hand, on one layout or on two. Added to the app of `probe`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from nemo_rl.config.load import load_config
from nemo_rl.diagnostics.runner.layout_text import KNOWN, LayoutText
from nemo_rl.diagnostics.runner.prompts import PromptSpec
from nemo_rl.diagnostics.runner.run import ProbeSpec, run_probe

__all__ = ["prompt_spec", "run", "show"]

Recipe = Annotated[Path, typer.Argument(metavar="RECIPE", help="a YAML recipe; its policy section is used")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[a.b=value ...]", help="as of run_grpo.py")]
PromptKind = Annotated[
    Literal["math", "text", "file", "token-ids"], typer.Option("--prompt", help="where rows come from")
]
Text = Annotated[str | None, typer.Option("--text", help="of --prompt text")]
PromptFile = Annotated[
    Path | None, typer.Option("--prompt-file", help="of --prompt file, a text; of token-ids, a JSON list of rows")
]
Length = Annotated[int | None, typer.Option("--length", min=2, help="tokens of a row; 137 of math, else all")]
NumRows = Annotated[int, typer.Option("--rows", min=1, max=4096)]
Unequal = Annotated[bool, typer.Option("--unequal", help="each row 17 tokens shorter than the one before it")]
Chat = Annotated[bool, typer.Option("--chat", help="put the text through the chat template")]
Backward = Annotated[bool, typer.Option("--backward", help="loss and gradient norm, too")]
Out = Annotated[Path | None, typer.Option("--out", metavar="DIR", help="result.json, and records/ of a dump")]
Timeout = Annotated[float, typer.Option("--timeout", min=1, metavar="SECONDS", help="deadline of all ranks together")]
AsJson = Annotated[bool, typer.Option("--json", help="machine-readable output")]


def run(
    recipe: Recipe,
    overrides: Overrides = None,
    layout: Annotated[str | None, typer.Option("--layout", help=f"{KNOWN}; without it, that of the recipe")] = None,
    prompt: PromptKind = "math",
    text: Text = None,
    prompt_file: PromptFile = None,
    length: Length = None,
    rows: NumRows = 1,
    unequal: Unequal = False,
    chat: Chat = False,
    backward: Backward = False,
    top_k: Annotated[int, typer.Option("--top-k", min=0, help="print the likeliest next tokens")] = 0,
    dump: Annotated[
        str | None, typer.Option("--dump", metavar="SELECTOR", help="sites, such as 'layer.out, logits'")
    ] = None,
    record_routes: Annotated[Path | None, typer.Option("--record-routes", metavar="FILE")] = None,
    replay_routes: Annotated[Path | None, typer.Option("--replay-routes", metavar="FILE")] = None,
    out: Out = None,
    timeout: Timeout = 600.0,
    as_json: AsJson = False,
) -> None:
    """Runs one policy worker on given rows: log-probabilities, and with --backward loss and gradient norm."""
    prompts = prompt_spec(prompt, text, prompt_file, length, rows, unequal=unequal, chat=chat)
    spec = ProbeSpec(
        config=load_config(recipe, overrides or []),
        layout=LayoutText.parse(layout) if layout is not None else None,
        prompt=prompts,
        has_backward=backward,
        top_k=top_k,
        dump=dump,
        out=out,
        routes_to=record_routes,
        routes_from=replay_routes,
        timeout_s=timeout,
    )
    result = run_probe(spec)
    show(result.as_record(), result.lines(), as_json=as_json)


def prompt_spec(
    kind: PromptKind,
    text: str | None,
    path: Path | None,
    length: int | None,
    num_rows: int,
    *,
    unequal: bool,
    chat: bool,
) -> PromptSpec:
    """The rows that the options mean."""
    return PromptSpec(
        kind=kind,
        text=text,
        path=path,
        length=length,
        num_rows=num_rows,
        is_unequal=unequal,
        uses_chat_template=chat,
    )


def show(record: dict[str, object], lines: list[str], *, as_json: bool) -> None:
    """Prints a result for people or for machines."""
    console = Console(soft_wrap=True, markup=False, highlight=False)
    if as_json:
        console.print_json(json.dumps(record))
        return
    for line in lines:
        console.print(line)
