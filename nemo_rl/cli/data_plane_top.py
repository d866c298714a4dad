"""`nemo-rl data-plane top`: who does what in the data plane of a running job, as `top` shows processes.

Two views of the run (`run_view`) make one `TopTable`: rates are counted between them. The clients report their calls
once a second, so a rate lags by as much. Nothing in the run is changed.
"""

from __future__ import annotations

import json
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Literal

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from nemo_rl.data_plane.client.operation_counts import OperationCount, Totals
from nemo_rl.data_plane.ledger.host import LedgerHost
from nemo_rl.data_plane.run_view import ClientView, RunView, view_of
from nemo_rl.utils.console import bytes_text

__all__ = ["TopTable", "watch"]

TIMEOUT_S = 10.0
"""One question to a running ledger."""
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
