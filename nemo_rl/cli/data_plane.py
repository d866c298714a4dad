"""`nemo-rl data-plane stat|top|ls|bench`, `inspect RUN row KEY`: the data plane of a running or of a finished job.

A running job is asked through its ledger, read-only (`stats`, `watch`, `list`, `explain`); what is over is read from
the event log in the run's folder. No payload store is opened.

`nemo-rl data-plane top`: who does what in the data plane of a running job, as `top` shows processes.

Two views of the run (`run_view`) make one `TopTable`: rates are counted between them. The clients report their calls
once a second, so a rate lags by as much. Nothing in the run is changed.
"""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import termios
import time
import tty
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from nemo_rl.cli.doors import AsJson, Verbs, show
from nemo_rl.data_plane.address import ATTACH_FILE, AttachPoint, read_attach_file
from nemo_rl.data_plane.chunks.tags import TagTable
from nemo_rl.data_plane.client.operation_counts import OperationCount, Totals
from nemo_rl.data_plane.ledger.events import EVENTS_FILE, history_of_key, read_history
from nemo_rl.data_plane.ledger.host import LedgerHost
from nemo_rl.data_plane.metrics_endpoint import ClientView, RunView, view_of
from nemo_rl.errors import DataPlaneClosed, UserError, name_some
from nemo_rl.utils.console import bytes_text, make_console

__all__ = ["TopTable", "app", "show_row", "watch"]


GETS = ("kv_batch_get", "get_data")
"""Operations whose bytes go to the client; those of others come from it."""
QUIT_KEYS = b"qQ"
PIPE_WIDTH = 200
"""Columns of a table that no terminal shows: wide enough for every label."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TopHead:
    """The run as a whole."""

    run: str
    rows: int
    capacity_rows: int
    bytes: int
    capacity_bytes: int | None
    reserved_bytes: int
    puts_waiting: int
    blocked_put_s: float
    """Seconds that puts have waited for capacity, since the start of the run."""
    oldest_row_age_s: float
    ledger_calls_per_s: float
    errors_per_s: float
    """Calls of clients that an error has ended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TopClient:
    """One open client."""

    label: str
    stage: str
    """The stage in which it has spent most time between the views; without calls, that of its last one."""
    calls_per_s: float
    in_bytes_per_s: float
    """Columns that it has put."""
    out_bytes_per_s: float
    """Columns that it has got."""
    ms_per_call: float
    busy: float
    """Seconds in calls per second; above 1 with several threads."""
    rows_held: int
    """Rows under its claims."""
    seen_s: float
    """Seconds since its last request to the ledger."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TopTask:
    """One consumer task of a partition; a partition without tasks has a line of its own."""

    partition: str
    task: str
    """Empty for a partition without tasks."""
    live: int
    pending: int
    leased: int
    done: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TopTable:
    """A table of the run between two views of it."""

    head: TopHead
    clients: tuple[TopClient, ...]
    """Busiest first."""
    tasks: tuple[TopTask, ...]

    @classmethod
    def between(cls, before: RunView, now: RunView) -> TopTable:
        """Return the state `now`, with the rates since `before`."""
        seconds = max(now.at - before.at, 1e-6)
        earlier = {client.label: client for client in before.clients}
        clients = [
            _client(earlier.get(client.label), client, seconds=seconds, rows_held=now.rows_held()[client.label])
            for client in now.clients
            if not client.is_closed
        ]
        clients.sort(key=lambda client: (-client.busy, -client.calls_per_s, client.seen_s, client.label))
        return cls(head=_head(before, now, seconds), clients=tuple(clients), tasks=tuple(_tasks(now)))

    def draw(self) -> RenderableType:
        return Group(_head_line(self.head), Text(), _client_table(self.clients), Text(), _task_table(self.tasks))


def watch(
    ledger: LedgerHost, console: Console, *, interval_s: float, form: Literal["live", "once", "json"] = "live"
) -> None:
    """Show the run until the user ends it; `once` and `json` print one table and return.

    Raises:
        DataPlaneClosed: the run has ended.
    """
    before = view_of(ledger, timeout_s=TIMEOUT_S)
    if form != "live" or not console.is_terminal:
        while True:
            time.sleep(interval_s)
            now = view_of(ledger, timeout_s=TIMEOUT_S)
            table = TopTable.between(before, now)
            if form == "json":
                console.print_json(json.dumps(asdict(table)))
            else:
                console.print(table.draw(), width=console.width if console.is_terminal else PIPE_WIDTH)
            if form != "live":
                return
            before = now
    with ExitStack() as stack:
        is_quit = stack.enter_context(_quit_key())
        live = stack.enter_context(Live(console=console, screen=True, auto_refresh=False))
        shown = TopTable.between(before, before)
        while True:
            live.update(shown.draw(), refresh=True)
            if is_quit.within(interval_s):
                break
            now = view_of(ledger, timeout_s=TIMEOUT_S)
            shown, before = TopTable.between(before, now), now
    console.print(shown.draw())


class _QuitKey:
    def __init__(self, terminal: int | None) -> None:
        """Args:
        terminal: descriptor of standard input; None when it is no terminal.
        """
        self._terminal = terminal

    def within(self, seconds: float) -> bool:
        """Return whether the user has asked to end; waits so long at most."""
        if self._terminal is None:
            time.sleep(seconds)
            return False
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if select.select([self._terminal], [], [], left)[0]:
                keys = os.read(self._terminal, 64)
                if not keys or set(keys) & set(QUIT_KEYS):  # no keys: the terminal is gone
                    return True
        return False


@contextmanager
def _quit_key() -> Iterator[_QuitKey]:
    """Read single keys, where standard input is a terminal; it is as before afterwards."""
    if not sys.stdin.isatty():
        yield _QuitKey(None)
        return
    descriptor = sys.stdin.fileno()
    saved = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)
    try:
        yield _QuitKey(descriptor)
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, saved)


def _head(before: RunView, now: RunView, seconds: float) -> TopHead:
    stats = now.stats
    return TopHead(
        run=now.run_id,
        rows=stats["live_rows"],
        capacity_rows=now.capacity_rows,
        bytes=stats["live_bytes"],
        capacity_bytes=now.capacity_bytes,
        reserved_bytes=stats["reserved_bytes"],
        puts_waiting=now.puts_waiting,
        blocked_put_s=stats["blocked_put_s"],
        oldest_row_age_s=stats["oldest_row_age_s"],
        ledger_calls_per_s=(now.calls - before.calls) / seconds,
        errors_per_s=(_errors(now) - _errors(before)) / seconds,
    )


def _errors(view: RunView) -> int:
    return sum(count.errors for client in view.clients for count in client.totals.operations.values())


def _client(before: ClientView | None, now: ClientView, *, seconds: float, rows_held: int) -> TopClient:
    stages = _since(Totals() if before is None else before.totals, now.totals)
    counts = [(operation, count) for by_operation in stages.values() for operation, count in by_operation.items()]
    calls, ms = sum(count.count for _, count in counts), sum(count.ms for _, count in counts)
    got = sum(count.payload_bytes for operation, count in counts if operation in GETS)
    put = sum(count.payload_bytes for operation, count in counts if operation not in GETS)
    busiest = max(stages, key=lambda stage: sum(count.ms for count in stages[stage].values()), default=now.stage)
    return TopClient(
        label=now.label,
        stage=busiest,
        calls_per_s=calls / seconds,
        in_bytes_per_s=put / seconds,
        out_bytes_per_s=got / seconds,
        ms_per_call=ms / calls if calls else 0.0,
        busy=ms / 1e3 / seconds,
        rows_held=rows_held,
        seen_s=now.seen_s,
    )


def _since(before: Totals, now: Totals) -> dict[str, dict[str, OperationCount]]:
    """Return what was counted between two reports, by stage and operation; stages without calls are left out."""
    stages: dict[str, dict[str, OperationCount]] = {}
    for stage, counts in now.stages.items():
        for operation, count in counts.items():
            earlier = before.stages.get(stage, {}).get(operation, OperationCount())
            if count.count > earlier.count:
                stages.setdefault(stage, {})[operation] = OperationCount(
                    count=count.count - earlier.count,
                    ms=count.ms - earlier.ms,
                    payload_bytes=count.payload_bytes - earlier.payload_bytes,
                )
    return stages


def _tasks(view: RunView) -> Iterator[TopTask]:
    for partition, tasks in view.tasks.items():
        live = view.stats["partitions"][partition]["rows"]
        each: Mapping[str, Mapping[str, int]] = tasks or {"": {"pending": 0, "leased": 0, "done": 0}}
        for task, states in each.items():
            yield TopTask(partition=partition, task=task, live=live, **states)


def _head_line(head: TopHead) -> Text:
    limit = "" if head.capacity_bytes is None else f" of {bytes_text(head.capacity_bytes)}"
    reserved = f" (+{bytes_text(head.reserved_bytes)} reserved)" if head.reserved_bytes else ""
    return Text(
        f"run {head.run}: {head.rows:,} rows of {head.capacity_rows:,}, {bytes_text(head.bytes)}{limit}{reserved}, "
        f"oldest row {_age(head.oldest_row_age_s)}\n"
        f"{head.puts_waiting} puts waiting ({head.blocked_put_s:.1f} s in all), "
        f"{head.ledger_calls_per_s:.1f} ledger calls/s, {head.errors_per_s:.1f} errors/s"
    )


def _client_table(clients: tuple[TopClient, ...]) -> Table:
    table = _table("client", "stage", "calls/s", "MB/s in", "MB/s out", "ms/call", "busy", "held", "seen")
    for client in clients:
        table.add_row(
            client.label,
            client.stage or "-",
            f"{client.calls_per_s:.1f}",
            f"{client.in_bytes_per_s / 1e6:.2f}",
            f"{client.out_bytes_per_s / 1e6:.2f}",
            f"{client.ms_per_call:.1f}",
            f"{client.busy:.0%}",
            f"{client.rows_held}",
            _age(client.seen_s),
        )
    return table


def _task_table(tasks: tuple[TopTask, ...]) -> Table:
    table = _table("partition", "task", "live", "pending", "leased", "done")
    for task in tasks:
        states = (task.pending, task.leased, task.done) if task.task else ("-", "-", "-")
        table.add_row(task.partition, task.task or "-", f"{task.live}", *map(str, states))
    return table


def _table(*columns: str) -> Table:
    """Return an empty table: two columns of words, which fold in a narrow terminal, then numbers, which do not."""
    table = Table(box=None, pad_edge=False)
    for number, name in enumerate(columns):
        is_word = number < 2
        table.add_column(name, justify="left" if is_word else "right", no_wrap=not is_word, overflow="fold")
    return table


def _age(seconds: float) -> str:
    """Return an age in the unit that suits it.

    Example:
        >>> _age(3.25), _age(120), _age(7260)
        ('3.2 s', '2 min', '2.0 h')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 3600 else f"{seconds / 3600:.1f} h"


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
    from nemo_rl.cli.data_plane import watch  # noqa: PLC0415 (torch takes seconds, and help needs none)

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
