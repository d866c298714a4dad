"""`nemo-rl compare A B`: two sides, and the first site at which they differ.

    A B                two recordings, what two runs recorded of `step N`, or the numbers of two runs
    RUN replay         a kept step of a run against the same step run again; also its conversations, or a whole
                       asynchronous run from its schedule

The commands share their options as records, which `with_records` spreads over the command line.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn

import typer

from nemo_rl.cli.doors import AsJson, Door, Selected, selected, show, with_records
from nemo_rl.errors import UnsupportedFormat, UserError, name_some
from nemo_rl.utils.console import make_console
from nemo_rl.utils.files import write_text
from nemo_rl.utils.trackers import METRICS_FILE
from nemo_rl_tools.verdict import Comparison, Verdict

if TYPE_CHECKING:
    from nemo_rl_tools.compare.limits import ToleranceRules
    from nemo_rl_tools.step_replay.chain import ReplayRequest

__all__ = ["ComparisonOptions", "ReplayOptions", "app", "show_comparison", "tell", "verdict_of_problem"]

HELP = """Compare two sides, and name the first site at which they differ.

A and B are folders of records, or the log folders of two runs: their numbers, or what they recorded of `step N`. With
the word `replay` in place of B, side B is A run again.
"""

app = typer.Typer(
    cls=Door,
    no_args_is_help=True,
    rich_markup_mode=None,
    subcommand_metavar="A B [step N] [row KEY]",
    help=HELP,
)


@app.callback(help=HELP)
def _root() -> None:
    """Compare two sides."""


Html = Annotated[Path | None, typer.Option("--html", metavar="FILE", help="write the report as a page, too")]
Layout = Literal["run", "one"]
WorkerName = Literal["dtensor", "megatron"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparisonOptions:
    """The options of a comparison of two recordings."""

    limits: Annotated[Path | None, typer.Option("--limits", help="file of limits; else those of the precision")] = None
    html: Html = None
    show_all: Annotated[bool, typer.Option("--all", help="show every site")] = False
    as_json: AsJson = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayOptions:
    """The options of everything that runs rows of a kept step again."""

    layout: Annotated[Layout, typer.Option("--layout", help="run: its ranks; one: a single process")] = "run"
    worker: Annotated[WorkerName | None, typer.Option("--worker", help="default: that of the run")] = None
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="what if the config had been another")
    ] = None
    allow_code: Annotated[
        bool, typer.Option("--allow-code", help="import what the kept config names outside the library")
    ] = False
    as_json: AsJson = False

    def request(self, found: Selected, *, dump: str | None = None, out: Path | None = None) -> ReplayRequest:
        """Return the request for the step and the rows that are selected.

        Raises:
            UserError: no step is selected.
        """
        # torch takes seconds to import, and other commands need none.
        from nemo_rl_tools.step_replay.chain import ReplayRequest  # noqa: PLC0415

        if found.step is None:
            raise UserError("step N: expected the number of a kept step, or --to N for an asynchronous run")
        return ReplayRequest(
            run=found.folders[0],
            step=found.step,
            in_one_process=self.layout == "one",
            worker=self.worker,
            overrides=tuple(self.overrides or ()),
            rows=found.rows,
            dump=dump,
            allows_code=self.allow_code,
            out=out,
        )


@app.command(short_help="two recordings, token by token; the view without a name")
@with_records
def recordings(
    ctx: typer.Context,
    options: ComparisonOptions,
    noise: Annotated[
        list[Path] | None,
        typer.Option("--noise", metavar="DIR", help="recorded like A: measures noise, proposes limits; repeatable"),
    ] = None,
    propose: Annotated[Path | None, typer.Option("--propose", help="with --noise: write the proposed limits")] = None,
    bits: Annotated[bool, typer.Option("--bits", help="of two runs: their numbers alone, to the last bit")] = False,
) -> None:
    """Match the records of A and B token by token. A is what is relied on.

    Of two runs without a step: rewards, settings that differ and steps, then whether their numbers are equal to the
    last bit, which decides the exit code as with --bits.

    Exit code: 0 pass, 2 usage, 3 mismatch, 4 incomplete, 5 vacuous, 6 corrupt, 7 unsupported.
    """
    found = selected(ctx, what="folders of records, or of runs with `step N`", num=2, step=True)
    if propose is not None and not noise:
        raise UserError("--propose: limits are proposed out of recordings like A; name them with --noise DIR")
    if found.step is None and all((folder / METRICS_FILE).is_file() for folder in found.folders):
        from nemo_rl_tools.run_replay import compare_runs  # noqa: PLC0415

        _end(compare_runs(*found.folders, bits=bits), html=options.html, as_json=options.as_json)
    a, b = (_records(folder, found.step) for folder in found.folders)
    raise typer.Exit(show_comparison(a, b, options, noise=noise or (), propose=propose).value)


def _records(folder: Path, step: int | None) -> Path:
    from nemo_rl.algorithms.kept_steps.folder import StepsFolder  # noqa: PLC0415

    there = StepsFolder(folder).records()
    if step is None or not there:
        return folder
    if step not in there:
        raise UserError(
            f"step {step}: {folder} has records of step {name_some(there)}; run with diagnostics.record.steps=[{step}]"
        )
    return there[step]


@app.command(short_help="a step of a run, and the same step run again")
@with_records
def replay(
    ctx: typer.Context,
    options: ReplayOptions,
    start: Annotated[int, typer.Option("--from", min=0, help="of --to: 0, the start of the run")] = 0,
    stop: Annotated[
        int | None,
        typer.Option(
            "--to", min=1, help="in place of a step: an asynchronous run again, from its schedule, up to here"
        ),
    ] = None,
    dump: Annotated[
        str | None, typer.Option("--dump", metavar="SELECTOR", help="record sites in the passes of the step")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="folder of these records")] = None,
    conversations: Annotated[
        bool,
        typer.Option("--conversations", help="sample the conversations of the step again with their recorded replies"),
    ] = False,
    limits: Annotated[
        Path | None, typer.Option("--limits", help="file of limits, for another layout or worker and for records")
    ] = None,
    html: Html = None,
    engines: Annotated[
        int | None, typer.Option("--engines", min=1, help="engines for --conversations; default: as in the run")
    ] = None,
) -> None:
    """Run kept steps from the last checkpoint to step N again and name the first stage that differs.

    With `row KEY`, only these rows of the step are scored, without an update.
    With --conversations: sample the turns of step N again, with the replies that environments and tools gave, and
    compare their tokens and log-probabilities.
    With --to N in place of a step: sample and train the first N steps of an asynchronous run again, in the
    order of its schedule, and compare rows, losses and weights to the last bit.

    Exit code: 0 pass, 2 usage, 3 mismatch, 4 incomplete, 5 vacuous, 6 corrupt, 7 unsupported, 8 a rank failed.
    """
    from nemo_rl.distributed.local_job import quiet_libraries  # noqa: PLC0415
    from nemo_rl_tools.conversation_replay import replay_conversations  # noqa: PLC0415
    from nemo_rl_tools.step_replay.replay import replay_step  # noqa: PLC0415

    found = selected(ctx, step=True, rows=True)
    with verdict_of_problem():
        if stop is not None:
            if found.step is not None:
                raise UserError("--to N replays a run, `step N` a kept step: expected one of the two")
            if limits is not None:
                raise UserError("--limits: a whole run again is compared to the last bit; leave it out")
            from nemo_rl_tools.run_replay import replay_run  # noqa: PLC0415

            console, changes = make_console(stderr=True), options.overrides or ()
            run = replay_run(found.folders[0], start=start, stop=stop, overrides=changes, console=console)
            _end(run, html=html, as_json=options.as_json)
        if engines is not None and not conversations:
            raise UserError("--engines N: expected --conversations, too")
        request = replace(options.request(found, dump=dump, out=out), limits=_limits(limits))
        with quiet_libraries():
            if conversations:
                report = replay_conversations(request, num_engines=engines, report=tell)
            else:
                report = replay_step(request)
    _end(report, html=html, as_json=options.as_json)


def _end(report: Comparison, *, html: Path | None, as_json: bool) -> NoReturn:
    """Print the report, write the page where one is asked for, and end with the verdict."""
    from nemo_rl_tools.compare.page import write_page  # noqa: PLC0415

    show(report.as_record(), report.lines(), as_json=as_json)
    if html is not None:
        write_page(html, report)
    raise typer.Exit(report.verdict.value)


def _limits(path: Path | None) -> ToleranceRules:
    """Return the rules of a file; those of the precision without one."""
    from nemo_rl_tools.compare.limits import DEFAULT, read_limits  # noqa: PLC0415

    return DEFAULT if path is None else read_limits(path)


@contextmanager
def verdict_of_problem() -> Iterator[None]:
    """Within it, a step that cannot be replayed ends the command with the verdict as exit code."""
    from nemo_rl_tools.step_replay.chain import ReplayProblem  # noqa: PLC0415

    try:
        yield
    except (ReplayProblem, UnsupportedFormat) as problem:
        verdict = problem.verdict if isinstance(problem, ReplayProblem) else Verdict.UNSUPPORTED
        make_console(stderr=True).print(f"{verdict.label}: {problem}", style="red")
        raise typer.Exit(verdict.value) from problem


def tell(text: str) -> None:
    make_console(stderr=True).print(text)


def show_comparison(
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
    from nemo_rl_tools.compare.folders import compare_folders, propose_limits  # noqa: PLC0415
    from nemo_rl_tools.compare.page import write_page  # noqa: PLC0415

    comparison = compare_folders(a, b, limits=_limits(options.limits))
    proposal = propose_limits([a, *noise]) if noise else None
    if propose is not None and proposal is not None:
        write_text(propose, proposal)
    if options.html is not None:
        write_page(options.html, comparison)
    record, lines = comparison.as_record(), comparison.lines(is_all=options.show_all)
    if proposal is not None:
        record["proposed_limits"] = proposal
        lines.append(f"proposed limits:\n{proposal}".rstrip("\n"))
    show(record, lines, as_json=options.as_json)
    return comparison.verdict
