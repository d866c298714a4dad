"""`nemo-rl replay` and `nemo-rl rollouts`: run the kept steps of a run again, and show its samples."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nemo_rl.diagnostics.rollouts.choice import choose_rollouts
from nemo_rl.diagnostics.rollouts.page import write_rollout_page
from nemo_rl.diagnostics.rollouts.text import rollout_lines
from nemo_rl.diagnostics.verdict import Verdict
from nemo_rl.errors import UserError, boundary
from nemo_rl.utils.console import make_console

if TYPE_CHECKING:
    from nemo_rl.diagnostics.conversation_replay import ConversationReport
    from nemo_rl.diagnostics.mismatch.report import MismatchReport
    from nemo_rl.diagnostics.run_replay import RunReplayReport
    from nemo_rl.diagnostics.step_replay.compare import ReplayReport
    from nemo_rl.diagnostics.step_replay.request import ReplayRequest

__all__ = ["app", "replay"]


class Layout(StrEnum):
    """The layout of the replay."""

    RUN = "run"
    ONE = "one"


class WorkerName(StrEnum):
    """Training engines."""

    DTENSOR = "dtensor"
    MEGATRON = "megatron"


def replay(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="log folder of a run (logger.log_dir)")],
    step: Annotated[int | None, typer.Option("--step", min=1, help="number of the kept step")] = None,
    start: Annotated[
        int | None, typer.Option("--from", min=0, help="0: the whole asynchronous run from its schedule, with --to")
    ] = None,
    stop: Annotated[int | None, typer.Option("--to", min=1, help="last step of the run that is done again")] = None,
    layout: Annotated[Layout, typer.Option("--layout", help="run: its ranks; one: a single process")] = Layout.RUN,
    worker: Annotated[WorkerName | None, typer.Option("--worker", help="default: that of the run")] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="what if the config had been another")
    ] = None,
    rows: Annotated[
        list[str] | None, typer.Option("--rows", metavar="KEY", help="only these rows of the step; no update")
    ] = None,
    dump: Annotated[
        str | None, typer.Option("--dump", metavar="SELECTOR", help="record sites in the passes of STEP")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="folder of these records")] = None,
    explain: Annotated[
        bool,
        typer.Option("--explain-mismatch", help="split the KL between rollout and trainer of the step into its causes"),
    ] = False,
    conversations: Annotated[
        bool,
        typer.Option("--conversations", help="sample the conversations of the step again with their recorded replies"),
    ] = False,
    engines: Annotated[
        int | None, typer.Option("--engines", min=1, help="engines for --conversations; default: as in the run")
    ] = None,
    allow_code: Annotated[
        bool, typer.Option("--allow-code", help="import what the kept config names outside the library")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="machine-readable output")] = False,
) -> None:
    """Run kept steps from the last checkpoint to STEP again and name the first stage that differs.

    With --explain-mismatch: what the KL between rollout and trainer of STEP comes from, by scoring its rows again.
    With --conversations: sample the turns of STEP again, with the replies that environments and tools gave, and compare
    their tokens and log-probabilities.
    With --from 0 --to N in place of --step: sample and train the first N steps of an asynchronous run again, in the
    order of its schedule, and compare rows, losses and weights to the last bit.

    Exit code: 0 pass, 2 usage, 3 mismatch, 4 incomplete, 5 vacuous, 6 corrupt, 7 unsupported, 8 a rank failed.
    """
    # torch takes seconds to import, and other commands need none.
    from nemo_rl.diagnostics.step_replay.request import ReplayProblem, ReplayRequest  # noqa: PLC0415

    if start is not None or stop is not None:
        if step is not None or start is None or stop is None:
            raise UserError("--from 0 --to N replays a run, --step N a kept step: expected one of the two")
        from nemo_rl.diagnostics.run_replay import replay_run  # noqa: PLC0415

        try:
            found = replay_run(
                run, start=start, stop=stop, overrides=overrides or (), console=make_console(stderr=True)
            )
        except ReplayProblem as problem:
            raise _end(str(problem), problem.verdict) from problem
        _show(found, as_json=as_json)
        raise typer.Exit(found.verdict.value)
    if step is None:
        raise UserError("--step N: expected the number of a kept step, or --from 0 --to N for an asynchronous run")
    request = ReplayRequest(
        run=run,
        step=step,
        in_one_process=layout is Layout.ONE,
        worker=None if worker is None else worker.value,
        overrides=tuple(overrides or ()),
        rows=tuple(rows or ()),
        dump=dump,
        allows_code=allow_code,
        out=out,
    )
    if (conversations and explain) or (engines is not None and not conversations):
        raise UserError("--conversations, with --engines N or without, or --explain-mismatch: expected one of the two")
    try:
        report = _replayed(request, explain=explain, conversations=conversations, num_engines=engines)
    except ReplayProblem as problem:
        raise _end(str(problem), problem.verdict) from problem
    _show(report, as_json=as_json)
    raise typer.Exit(report.verdict.value)


def _replayed(
    request: ReplayRequest, *, explain: bool, conversations: bool, num_engines: int | None
) -> ReplayReport | MismatchReport | ConversationReport:
    from nemo_rl.diagnostics.conversation_replay import replay_conversations  # noqa: PLC0415
    from nemo_rl.diagnostics.mismatch.explain import explain_mismatch  # noqa: PLC0415
    from nemo_rl.diagnostics.step_replay.replay import replay_step  # noqa: PLC0415
    from nemo_rl.distributed.local_job import quiet_libraries  # noqa: PLC0415

    with quiet_libraries():
        if explain:
            return explain_mismatch(request, report=_tell)
        if conversations:
            return replay_conversations(request, num_engines=num_engines, report=_tell)
        return replay_step(request)


def _show(report: ReplayReport | MismatchReport | RunReplayReport | ConversationReport, *, as_json: bool) -> None:
    console = make_console()
    if as_json:
        console.print_json(json.dumps(report.as_record()))
        return
    for line in report.lines():
        console.print(line)


def _tell(text: str) -> None:
    make_console(stderr=True).print(text)


def _end(text: str, verdict: Verdict) -> typer.Exit:
    make_console(stderr=True).print(f"{verdict.label}: {text}", style="red")
    return typer.Exit(verdict.value)


app = typer.Typer(no_args_is_help=True, help="Samples of a run.")


@app.callback()
def _group() -> None:
    """Show the samples of a run."""


@app.command()
def show(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="log folder of a run (logger.log_dir)")],
    step: Annotated[int | None, typer.Option("--step", help="default: the newest that has rollouts")] = None,
    every_step: Annotated[bool, typer.Option("--all-steps", help="all steps that have rollouts")] = False,
    group: Annotated[str | None, typer.Option("--group", metavar="ID", help="one group, by the beginning")] = None,
    html: Annotated[Path | None, typer.Option("--html", metavar="OUT", help="write a page instead")] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", metavar="K", min=1, help="at most so many rows of a step")
    ] = None,
) -> None:
    """Show prompts, responses, rewards, advantages, and the log-probabilities of rollout and trainer token by token.

    Exit code: 0, or 2 where the run, the step or the group has no readable rollouts.
    """
    if every_step and step is not None:
        raise UserError(f"--step {step} and --all-steps: expected one of them")
    with boundary(UserError, f"{run}: the rollouts of a run"):
        shown = choose_rollouts(run, step=step, group=group, limit=limit, every_step=every_step)
    console = make_console()
    if html is not None:
        with boundary(UserError, f"--html {html}: cannot be written"):
            write_rollout_page(html, shown)
        console.print(f"{shown.num_shown} rows of {shown.title} are in {html}")
        return
    is_plain = console.no_color or not console.is_terminal
    for line in rollout_lines(shown, width=console.width):
        console.print(line.plain if is_plain else line)
