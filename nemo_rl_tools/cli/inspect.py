"""`nemo-rl inspect RUN [step N] [row KEY] [VIEW]`: what a run has left to look at, and its views.

    RUN               what the folder holds, and the command that shows each part
    RUN step N        the numbers of a step in groups, beside those of the step before it, the unusual ones first, and
                      what was kept of it
    RUN row KEY       the life of one row in the data plane
    RUN rollouts      prompts, responses, rewards, log-probabilities token by token
    RUN mismatch      what the KL between rollout and trainer of a step comes from
    RUN routes        whether training used the experts of the rollout
    RUN tracer, play  a recording of the live tracer, as a summary or as it was shown

`nemo_rl_tools/cli/compare.py` compares two sides.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Annotated

import typer

from nemo_rl.cli.data_plane import show_row
from nemo_rl.cli.doors import AsJson, Door, end_with, selected, show, with_records
from nemo_rl.data_plane.ledger.events import EVENTS_FILE
from nemo_rl.errors import UserError, boundary, name_some
from nemo_rl.tracer.process import RECORDING_FOLDER
from nemo_rl.utils.console import make_console
from nemo_rl.utils.rollout_file import steps_with_rollouts
from nemo_rl.utils.trackers import METRICS_FILE, metrics_by_step
from nemo_rl_tools.cli.compare import ReplayOptions, tell, verdict_of_problem
from nemo_rl_tools.cli.recording import tracer
from nemo_rl_tools.cli.trace_watch import play
from nemo_rl_tools.rollouts.choice import choose_rollouts
from nemo_rl_tools.rollouts.page import write_rollout_page
from nemo_rl_tools.rollouts.text import rollout_lines
from nemo_rl_tools.tracer.store import stream_files

__all__ = ["app"]

GROUPS = {
    "rewards": ("train/reward", "train/source/", "val/"),
    "rollout": ("rollout/",),
    "rollout against trainer": ("train/gen_", "train/js_", "train/token_mult", "train/logprob_error", "r3/"),
    "update": ("train/",),
    "refit": ("refit/",),
    "time": ("timing/",),
}
"""Groups of the metrics of a step that a person reads -> beginnings of names; a metric is in the first that fits."""
WINDOW, LEAST_STEPS, MOST_STD, SAME = 50, 8, 3.0, 1e-6
"""A number is unusual outside of mean +- `MOST_STD` standard deviations of its values in at most `WINDOW` steps before;
with fewer than `LEAST_STEPS` values nothing is said. Values that differ by the share `SAME` at most are equal."""

app = typer.Typer(
    cls=Door,
    no_args_is_help=True,
    rich_markup_mode=None,
    subcommand_metavar="RUN [step N] [row KEY] [VIEW]",
    help="Look at a run, at a step or at a row of it.",
)


@app.callback()
def _root() -> None:
    """Look at a run, at a step or at a row of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPart:
    """Something that a run has left."""

    name: str
    steps: tuple[int, ...]
    """Steps that it has; empty where it is not by steps."""
    command: str

    @property
    def line(self) -> str:
        return f"  {self.name:<12} {_steps_text(self.steps):<24} {self.command}"


def _steps_text(steps: tuple[int, ...]) -> str:
    is_whole = len(steps) > 1 and len(steps) == steps[-1] - steps[0] + 1
    if is_whole:
        return f"steps {steps[0]} to {steps[-1]}"
    return f"step{'s' if len(steps) > 1 else ''} {name_some(steps)}" if steps else ""


@app.command(short_help="what there is to look at; the view without a name")
def summary(ctx: typer.Context, as_json: AsJson = False) -> None:
    """Show what a run holds, or the numbers of `step N`, or the life of `row KEY`. Exit code: 0, or 2 for no run."""
    found = selected(ctx, step=True, rows=True)
    run = found.folders[0]
    if len(found.rows) > 1 or (found.rows and found.step is not None):
        raise UserError("row KEY: expected one row and no step; `rollouts` and `mismatch` take more")
    if found.rows:
        show_row(run, found.rows[0], as_json=as_json)
        return
    numbers = metrics_by_step(run / METRICS_FILE) if (run / METRICS_FILE).is_file() else {}
    parts = [part for part in _parts(run, tuple(numbers), found.step) if found.step in (None, *part.steps)]
    if not parts:
        step = "" if found.step is None else f" with step {found.step}"
        raise UserError(f"{run}: expected the log folder of a run{step} (logger.log_dir), got {_content(run)}")
    shown = () if found.step is None else (found.step - 1, found.step)
    before, now = (numbers.get(number, {}) for number in shown) if shown else ({}, {})
    earlier = [numbers[step] for step in sorted(numbers) if found.step is not None and step < found.step]
    remarks = {name: remark for name, value in now.items() if (remark := _unusual(name, value, earlier))}
    told = [asdict(part) for part in parts]
    record = {"run": str(run), "step": found.step, "metrics": now, "unusual": remarks, "parts": told}
    lines = [f"{run}{'' if found.step is None else f', step {found.step}'}"]
    lines += _number_lines(before, now, remarks) if now else []
    show(record, [*lines, *(part.line for part in parts)], as_json=as_json)


def _unusual(name: str, value: float, earlier: Sequence[Mapping[str, float]]) -> str:
    """Return how a number differs from the steps before, by the rule of `WINDOW`; empty where it is usual."""
    known = [row[name] for row in earlier if name in row][-WINDOW:]
    if len(known) < LEAST_STEPS or _group_of(name) in ("", "time"):
        return ""
    mean, std = fmean(known), stdev(known)
    if std <= SAME * abs(mean):
        return f"{mean:.6g} in all {len(known)} steps before" if abs(value - mean) > SAME * abs(mean) else ""
    away = (value - mean) / std
    return f"{away:+.1f} std from {mean:.4g}, the mean of {len(known)} steps" if abs(away) > MOST_STD else ""


def _group_of(name: str) -> str:
    return next((group for group, begins in GROUPS.items() if name.startswith(begins)), "")


def _number_lines(before: Mapping[str, float], now: Mapping[str, float], remarks: Mapping[str, str]) -> Iterator[str]:
    groups = {f"unusual: {len(remarks) or 'no number'}": list(remarks)}
    groups |= {group: [name for name in now if _group_of(name) == group] for group in GROUPS}
    yield f"  {'':<40} {'step before':>14} {'this step':>14}"
    for at, (group, names) in enumerate(groups.items()):
        yield from [f"  {group}"] if names or not at else []
        for name in names:
            mark = f"  {'!' if at else remarks[name]}" if name in remarks else ""
            yield f"    {name:<38} {before.get(name, math.nan):>14.6g} {now[name]:>14.6g}{mark}"


def _parts(run: Path, logged: tuple[int, ...], step: int | None) -> Iterator[RunPart]:
    # torch takes seconds to import, and other commands need none.
    from nemo_rl.algorithms.kept_steps.folder import StepsFolder  # noqa: PLC0415

    at = f"step {'N' if step is None else step}"
    there = StepsFolder(run)
    kept = tuple(folder.number for folder in there.all())
    for name, steps, command in (
        ("numbers", logged, f"inspect {run} {at}"),
        ("rollouts", steps_with_rollouts(run), f"inspect {run} {at} rollouts"),
        ("kept steps", kept, f"compare {run} replay {at}"),
        ("mismatch", kept, f"inspect {run} {at} mismatch"),
        ("records", tuple(there.records()), f"compare {run} OTHER_RUN {at}"),
    ):
        if steps:
            yield RunPart(name=name, steps=steps, command=f"nemo-rl {command}")
    if stream_files(run / RECORDING_FOLDER):
        yield RunPart(name="tracer", steps=(), command=f"nemo-rl inspect {run} tracer")
    if (run / EVENTS_FILE).is_file():
        yield RunPart(name="rows", steps=(), command=f"nemo-rl inspect {run} row KEY")


def _content(run: Path) -> str:
    if not run.is_dir():
        return "no folder"
    return name_some(sorted(path.name for path in run.iterdir())) or "an empty folder"


@app.command(short_help="prompts, responses, rewards, token by token")
def rollouts(
    ctx: typer.Context,
    every_step: Annotated[bool, typer.Option("--all-steps", help="all steps that have rollouts")] = False,
    group: Annotated[str | None, typer.Option("--group", metavar="ID", help="one group, by the beginning")] = None,
    html: Annotated[Path | None, typer.Option("--html", metavar="OUT", help="write a page instead")] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", metavar="K", min=1, help="at most so many rows of a step")
    ] = None,
    source: Annotated[
        str | None, typer.Option("--source", metavar="NAME", help="rows of one source of prompts")
    ] = None,
) -> None:
    """Show prompts, responses, rewards, advantages, and the log-probabilities of rollout and trainer token by token.

    Without a step: of the newest that has rollouts. Exit code: 0, or 2 where the run, the step or the group has no
    readable rollouts.
    """
    found = selected(ctx, step=True)
    run = found.folders[0]
    if every_step and found.step is not None:
        raise UserError(f"step {found.step} and --all-steps: expected one of them")
    with boundary(UserError, f"{run}: the rollouts of a run"):
        shown = choose_rollouts(run, step=found.step, group=group, limit=limit, every_step=every_step, source=source)
    console = make_console()
    if html is not None:
        with boundary(UserError, f"--html {html}: cannot be written"):
            write_rollout_page(html, shown)
        console.print(f"{shown.num_shown} rows of {shown.title} are in {html}")
        return
    is_plain = console.no_color or not console.is_terminal
    for line in rollout_lines(shown, width=console.width):
        console.print(line.plain if is_plain else line)


@app.command(short_help="causes of the KL between rollout and trainer of a step")
@with_records
def mismatch(ctx: typer.Context, options: ReplayOptions) -> None:
    """Split the KL between rollout and trainer of `step N` into its causes, by scoring its rows again.

    With `row KEY`, only these rows. Exit code: 0 pass, 2 usage, 3 mismatch, 4 incomplete, 5 vacuous, 6 corrupt, 7
    unsupported.
    """
    from nemo_rl.distributed.local_job import quiet_libraries  # noqa: PLC0415
    from nemo_rl_tools.mismatch.explain import explain_mismatch  # noqa: PLC0415

    request = options.request(selected(ctx, step=True, rows=True))
    with verdict_of_problem(), quiet_libraries():
        report = explain_mismatch(request, report=tell)
    end_with(report, as_json=options.as_json)


@app.command(short_help="whether training used the experts of the rollout")
def routes(
    ctx: typer.Context,
    require_forward_verify: Annotated[
        bool, typer.Option("--require-forward-verify", help="every forward must have checked its routes")
    ] = False,
    require_cp_identity: Annotated[
        bool, typer.Option("--require-cp-identity", help="every shard must name its samples and tokens")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Follow the routes of every sample hop by hop; RUN is the NRL_R3_TRACE_DIR of a run.

    Exit code: 0 pass, 3 mismatch, 4 incomplete, 5 vacuous.
    """
    from nemo_rl_tools.route_chain.chain import verify_trace  # noqa: PLC0415

    report = verify_trace(
        selected(ctx, what="NRL_R3_TRACE_DIR of a run").folders[0],
        require_forward_verify=require_forward_verify,
        require_cp_identity=require_cp_identity,
    )
    end_with(report, as_json=as_json)


app.command(short_help="what a recording of the live tracer holds")(tracer)
app.command(short_help="a recording at the speed at which it was made")(play)
