"""`nemo-rl data-plane stat|top|ls|bench`, `inspect RUN row KEY`: the data plane of a running or of a finished job.

A running job is asked through its ledger, read-only (`stats`, `watch`, `list`, `explain`); what is over is read from
the event log in the run's folder. No payload store is opened.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import typer

from nemo_rl.cli.doors import AsJson, Verbs, show
from nemo_rl.data_plane.address import ATTACH_FILE, AttachPoint, read_attach_file
from nemo_rl.data_plane.chunks.tags import TagTable
from nemo_rl.data_plane.ledger.events import EVENTS_FILE
from nemo_rl.data_plane.ledger.history import history_of_key, read_history
from nemo_rl.data_plane.ledger.host import LedgerHost
from nemo_rl.errors import DataPlaneClosed, UserError, name_some
from nemo_rl.utils.console import make_console

__all__ = ["app", "show_row"]

TIMEOUT_S = 10.0
"""One question to a running ledger."""
END_S = 5.0
"""A job that ends in order has removed its file so long after its ledger has closed."""
BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "data_plane.py"

app = typer.Typer(cls=Verbs, no_args_is_help=True, rich_markup_mode=None, help="Look into the data plane of a run.")

RunFolder = Annotated[
    Path, typer.Option("--run", help=f"logger.log_dir of the run: holds {ATTACH_FILE} or {EVENTS_FILE}")
]


@app.command()
def stat(run: RunFolder, as_json: AsJson = False) -> None:
    """Show rows and bytes, live and at their peak; of a finished run, what its event log counts."""
    with _ledger(run) as ledger:
        if ledger is not None:
            stats = ledger.call("stats", {}, timeout_s=TIMEOUT_S)
            show(stats, _stat_lines(ledger.address.run_id, stats), as_json=as_json)
            return
    history = read_history(_events(run))
    show(history.as_record(), history.lines(), as_json=as_json)


@app.command()
def top(
    folder: Annotated[Path | None, typer.Argument(metavar="RUN", help="the same as --run")] = None,
    run: Annotated[Path | None, typer.Option("--run", help=f"logger.log_dir of the run: holds {ATTACH_FILE}")] = None,
    interval: Annotated[float, typer.Option("--interval", min=0.1, help="seconds between two looks")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="print one table after one interval, and end")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="machine-readable output; with --once")] = False,
) -> None:
    """Show who uses the data plane of a running job, live: clients by use, tasks of partitions. q or Ctrl-C ends.

    A run that ends, ends it: exit code 0, or 1 when its process was killed or no job runs.
    """
    if as_json and not once:
        raise UserError("--json: prints one table; add --once")
    if (folder is None) == (run is None):
        raise UserError("expected logger.log_dir of one run, as RUN or as --run")
    where = folder or run
    assert where is not None
    from nemo_rl.cli.data_plane_top import watch  # noqa: PLC0415 (torch takes seconds, and help needs none)

    with _ledger(where) as ledger:
        if ledger is None:
            make_console(stderr=True).print(f"{where}: no job runs; `nemo-rl data-plane stat` reads what it has left")
            raise typer.Exit(1)
        run_id = ledger.address.run_id
        form: Literal["live", "once", "json"] = "json" if as_json else "once" if once else "live"
        try:
            watch(ledger, make_console(), interval_s=interval, form=form)
        except KeyboardInterrupt:
            return
        except DataPlaneClosed as error:
            if not _has_ended(where):
                raise
            make_console(stderr=True).print(f"run {run_id} has ended ({error})")


def _has_ended(run: Path) -> bool:
    """Return whether a job whose ledger is gone has ended in order: it removes its file a moment later."""
    deadline = time.monotonic() + END_S
    while (run / ATTACH_FILE).exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


@app.command(name="ls")
def list_rows(
    run: RunFolder,
    partition: Annotated[str | None, typer.Option("--partition", help="only this one")] = None,
    as_json: AsJson = False,
) -> None:
    """List live rows with their tags and the client that made each; of a finished run, rows that were never cleared."""
    with _ledger(run) as ledger:
        if ledger is not None:
            rows = _live_rows(ledger, partition)
            show(
                rows,
                [f"{r['partition']}  {r['key']}  {r['owner']}  {_words(r['tags'])}" for r in rows],
                as_json=as_json,
            )
            return
    left = read_history(_events(run)).left
    found = [{"partition": p, "key": key} for p, keys in left.items() if partition in (None, p) for key in keys]
    show(found, [f"{row['partition']}  {row['key']}" for row in found] or ["no row is left"], as_json=as_json)


def show_row(run: Path, key: str, *, as_json: bool) -> None:
    """Show the life of one row: made, put, read by whom, trained or dropped and why, cleared.

    Raises:
        UserError: no event names it, and it is not in a running job.
    """
    events = run / EVENTS_FILE
    with _ledger(run) as ledger:
        live = [] if ledger is None else ledger.call("explain", {"key": key}, timeout_s=TIMEOUT_S)["rows"]
    assert isinstance(live, list)
    history = history_of_key(events, key) if events.is_file() else None
    if history is None and not live:
        where = f"no event of {events} names it" if events.is_file() else f"{events} does not exist"
        raise UserError(
            f"unknown key {key!r}: {where}; expected `<group uid>_g<index>` as `nemo-rl data-plane ls` shows it"
        )
    record = {
        "key": key,
        "events": history.events if history else [],
        "outcome": history.outcome if history else "live",
    }
    lines = history.lines() if history else [line for row in live for line in _history_lines(row)]
    lines += [line for row in live for line in _state_lines(row)]
    show({**record, "live": live}, lines, as_json=as_json)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def bench(context: typer.Context) -> None:
    """Move a GRPO batch through the adapters: `benchmarks/data_plane.py --quick`, further options are passed on."""
    if not BENCHMARK.is_file():
        raise UserError(f"expected {BENCHMARK}, found nothing; benchmarks are part of a checkout: run it from one")
    done = subprocess.run([sys.executable, str(BENCHMARK), "--quick", *context.args], check=False)
    raise typer.Exit(done.returncode)


@contextmanager
def _ledger(run: Path) -> Iterator[LedgerHost | None]:
    """The ledger of a running job; None when it has ended.

    Raises:
        UserError: the folder is not that of a run.
    """
    if not run.is_dir():
        raise UserError(f"--run: {run} is not a directory; pass logger.log_dir of a run")
    point = read_attach_file(run)
    if point is None and not (run / EVENTS_FILE).is_file():
        raise UserError(
            f"--run: {run} holds neither {ATTACH_FILE} (a running job) nor {EVENTS_FILE} (its event log); pass "
            "logger.log_dir of a run with data_plane.observability.event_log=true"
        )
    host = None if point is None else _reach(point, run)
    try:
        yield host
    finally:
        if host is not None:
            host.close()


def _reach(point: AttachPoint, run: Path) -> LedgerHost | None:
    """Return the address of a ledger that answers, or None when the job was killed before it could remove its file."""
    if point.host_name != socket.gethostname():
        raise UserError(f"{run / ATTACH_FILE}: the job runs on {point.host_name}; look into it there")
    from nemo_rl.data_plane.factory import observe  # noqa: PLC0415  (torch takes seconds, and help needs none)

    host = observe(point)
    try:
        host.call("stats", {}, timeout_s=TIMEOUT_S)
    except DataPlaneClosed as error:
        note = f"the job of process {point.process_id} on {point.host_name} does not answer any more ({error})"
        make_console(stderr=True).print(f"{note}; reading its log")
        return None
    return host


def _events(run: Path) -> Path:
    path = run / EVENTS_FILE
    if not path.is_file():
        raise UserError(
            f"{path} does not exist: the job has ended and left no events; run with "
            "data_plane.observability.event_log=true"
        )
    return path


def _live_rows(ledger: LedgerHost, partition: str | None) -> list[dict[str, object]]:
    partitions = ledger.call("stats", {}, timeout_s=TIMEOUT_S)["partitions"]
    assert isinstance(partitions, dict)
    if partition is not None and partition not in partitions:
        raise UserError(f"--partition: unknown {partition!r}; registered: {name_some(partitions) or 'none'}")
    rows: list[dict[str, object]] = []
    for name in partitions if partition is None else [partition]:
        reply = ledger.call("list", {"partition": name}, timeout_s=TIMEOUT_S)
        keys, owners = reply["keys"], reply["owners"]
        assert isinstance(keys, list) and isinstance(owners, list)
        tags = TagTable.from_plain(reply["tags"], len(keys))
        rows += [
            {"partition": name, "key": key, "owner": owner, "tags": dict(tag)}
            for key, tag, owner in zip(keys, tags, owners, strict=True)
        ]
    return rows


def _stat_lines(run_id: str, stats: Mapping[str, object]) -> list[str]:
    lines = [f"run {run_id}, running"]
    lines += [f"  {name:<18} {_number(value)}" for name, value in stats.items() if name != "partitions"]
    partitions = stats["partitions"]
    assert isinstance(partitions, dict)
    for name, partition in partitions.items():
        lines.append(
            f"partition {name}: {partition['rows']} rows, {_number(partition['bytes'])} bytes "
            f"(peak {partition['peak_rows']} and {_number(partition['peak_bytes'])}), "
            f"oldest {partition['oldest_row_age_s']:.1f} s"
        )
        lines += [f"  {field:<28} {_number(size)} bytes" for field, size in partition["fields"].items()]
    return lines


def _state_lines(row: Mapping[str, object]) -> list[str]:
    fields, tasks = row["fields"], row["tasks"]
    assert isinstance(fields, dict) and isinstance(tasks, dict)
    return [
        f"now: live in partition {row['partition']} for {row['age_s']:.1f} s, made by {row['owner']}",
        f"  tokens {row['length']}, tags {_words(row['tags'])}",
        *(f"  field {name:<26} version {cell['version']}, chunk {cell['chunk']}" for name, cell in fields.items()),
        *(f"  task {name}: {state}" for name, state in tasks.items()),
    ]


def _history_lines(row: Mapping[str, object]) -> list[str]:
    history = row["history"]
    assert isinstance(history, list)
    return [f"{event['age_s']:.1f} s ago: {event['event']} by {event['who']}" for event in history]


def _number(value: object) -> str:
    return f"{value:,.1f}" if isinstance(value, float) else f"{value:,}"


def _words(tags: object) -> str:
    assert isinstance(tags, dict)
    return " ".join(f"{name}={value}" for name, value in tags.items()) or "none"
