"""`nemo-rl trace serve|play`: recordings of the tracer on the page again, all at once or as they were made."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Event
from typing import Annotated

import typer
from rich.console import Console

from nemo_rl.cli.trace_watch import Printer
from nemo_rl.errors import UserError
from nemo_rl.tracer.entry import EntryKind
from nemo_rl.tracer.frame import BadFrame, Frame
from nemo_rl.tracer.playback import Serving, paced, serving
from nemo_rl.tracer.stream_reader import StreamReader, find_recording
from nemo_rl.utils import interrupt
from nemo_rl.utils.console import make_console

__all__ = ["play", "serve"]

Host = Annotated[str, typer.Option("--host", help="address of this machine that the page listens at")]
Port = Annotated[int, typer.Option("--port", min=0, max=65535, help="its port; 0: any that is free")]
TURN_S = 0.2
"""Between looks at whether it is over."""


def serve(
    recordings: Annotated[
        list[Path], typer.Argument(metavar="RUN_OR_FOLDER...", help="log folders of runs, or folders of recordings")
    ],
    host: Host = "127.0.0.1",
    port: Port = 0,
) -> None:
    """Shows recordings on the page, all steps at once, several runs side by side; those of runs that are on are
    followed. Ends on Ctrl-C. Exit code: 0, 2 usage."""
    folders = [find_recording(path) for path in recordings]
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise UserError("expected each recording once")
    asyncio.run(_serve(folders, make_console(), host=host, port=port))


def play(
    recording: Annotated[
        Path, typer.Argument(metavar="RUN_OR_FOLDER", help="log folder of a run, or folder of a recording")
    ],
    speed: Annotated[float, typer.Option("--speed", help="2.0 takes half the time that the run took")] = 1.0,
    headless: Annotated[bool, typer.Option("--headless", help="print stats here instead of serving the page")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="with --headless: one JSON object per line")] = False,
    host: Host = "127.0.0.1",
    port: Port = 0,
) -> None:
    """Plays a recording at the speed at which it was made, from when the first page looks on. Ends on Ctrl-C. Exit
    code: 0, 2 usage."""
    folder = find_recording(recording)
    if as_json and not headless:
        raise UserError("--json: expected --headless, too")
    if not 0 < speed < float("inf"):
        raise UserError(f"--speed: expected a positive number such as 2.0, got {speed}")
    if headless:
        _print(folder, Printer(make_console(), as_json=as_json), speed=speed)
    else:
        asyncio.run(_play(folder, make_console(), speed=speed, host=host, port=port))


def _print(folder: Path, printer: Printer, *, speed: float) -> None:
    interrupt.install()
    try:
        for entry in paced(StreamReader(folder).entries(), speed=speed, stop=Event()):
            try:
                if entry.kind is EntryKind.MESSAGE:
                    printer.message(entry.message())
                elif isinstance(found := entry.frame(), Frame):
                    printer.frame(found)
            except BadFrame:
                printer.say("an entry that this version cannot read is left out")
    except KeyboardInterrupt:
        printer.say("stopped")
    printer.sum_up()


async def _serve(folders: list[Path], console: Console, *, host: str, port: int) -> None:
    stopped = _stop_signal()
    async with serving(host=host, port=port) as found:
        console.print(f"reading {', '.join(map(str, folders))}")
        loading = asyncio.create_task(found.show(folders))
        if await _wait_until(loading.done, stopped):
            loading.result()
            _print_address(found, console, what=f"{len(found.server.hub.runs)} runs")
            await stopped.wait()
        loading.cancel()


async def _play(folder: Path, console: Console, *, speed: float, host: str, port: int) -> None:
    stopped = _stop_signal()
    async with serving(host=host, port=port) as found:
        _print_address(found, console, what="plays when a page looks on")
        if not await _wait_until(lambda: found.has_viewer, stopped):
            return
        found.play(folder, speed=speed)
        if await _wait_until(lambda: found.is_over, stopped):
            found.raise_problem()
            console.print("all is played")
            await stopped.wait()


def _print_address(found: Serving, console: Console, *, what: str) -> None:
    console.print(f"{found.address}  {what}; its token is in {found.token_file}; Ctrl-C ends")


def _stop_signal() -> asyncio.Event:
    """Set by Ctrl-C and its like."""
    stopped, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in interrupt.SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            loop.add_signal_handler(number, stopped.set)
    return stopped


async def _wait_until(is_so: Callable[[], bool], stopped: asyncio.Event) -> bool:
    """False: it was stopped before."""
    while not is_so():
        with suppress(TimeoutError):
            async with asyncio.timeout(TURN_S):
                await stopped.wait()
        if stopped.is_set():
            return False
    return True
