"""`nemo-rl trace watch|serve|vector`, `inspect RUN play`: a running job as it is traced, and recordings shown again."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from time import monotonic
from typing import Annotated, Any

import typer
from rich.console import Console

from nemo_rl.cli.doors import Verbs, selected
from nemo_rl.errors import NemoRLError, UserError
from nemo_rl.tracer.frame import BadFrame, Frame, decode
from nemo_rl.tracer.process import find_hub
from nemo_rl.tracer.protocol import Role, RunState, read_token, token_path
from nemo_rl.tracer.reducer import Stats
from nemo_rl.utils import interrupt
from nemo_rl.utils.console import make_console, printable
from nemo_rl_tools.tracer.client import HubGone, LiveClient
from nemo_rl_tools.tracer.entry import EntryKind
from nemo_rl_tools.tracer.playback import Serving, paced, serving
from nemo_rl_tools.tracer.store import StreamWriter
from nemo_rl_tools.tracer.stream_reader import StreamReader, find_recording
from nemo_rl_tools.tracer.summary import Reading

__all__ = ["RECORDING", "app", "play"]

RECORDING = "log folder of a run, or folder of a recording"

SHOWN = 300
"""Characters of a text that somebody else wrote."""
POLL_S = 1.0
"""Seconds between two checks whether the job is over."""
DRAIN_S = 10.0
"""Seconds for frames that a hub still sends after its run has ended."""
QUIET_S = 0.3
"""Seconds of silence after which such a hub has nothing more to send."""
RECORD_BYTES = 10 << 30

app = typer.Typer(cls=Verbs, no_args_is_help=True, rich_markup_mode=None, help="Watch a model train.")


@app.callback()
def _root() -> None:
    """Watch a model train."""


@app.command(short_help="Look on at a running job.")
def watch(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="log folder of a run that is on (logger.log_dir)")],
    watches: Annotated[
        list[str] | None,
        typer.Option("--watch", metavar="WATCH", help="look at this instead, such as 'layer.out | stats'; repeatable"),
    ] = None,
    takeover: Annotated[bool, typer.Option("--takeover", help="with --watch: in place of another controller")] = False,
    to: Annotated[Path | None, typer.Option("--to", metavar="FOLDER", help="record all that comes")] = None,
    steps: Annotated[int | None, typer.Option("--steps", min=1, help="end after so many steps")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object per line")] = False,
) -> None:
    """Print the stats of what is watched, as they come, until the job ends. Exit code: 0, 1 the job is gone,
    2 usage."""
    if takeover and not watches:
        raise UserError("--takeover: expected --watch, too: without it nothing is changed, and any viewer may look on")
    interrupt.install()
    printer = Printer(make_console(), as_json=as_json)
    try:
        address, folder = find_hub(run)
        role = Role.CONTROLLER if watches else Role.VIEWER
        token = read_token(token_path(folder, role.value))
        with (
            LiveClient.connect(address, token, role=role, takeover=takeover) as client,
            nullcontext() if to is None else StreamWriter(to, RECORD_BYTES) as writer,
        ):
            session = _WatchSession(printer, writer, num_steps=steps)
            session.begin(client.welcome)
            if watches:
                session.take_message(client.watch(watches))
            session.follow(client)
    except KeyboardInterrupt:
        printer.say("stopped")
    printer.sum_up()


class Printer:
    """Lines of frames and messages, for people or as JSON."""

    def __init__(self, console: Console, *, as_json: bool) -> None:
        self.num_frames = self.num_stats = 0
        self._console, self._as_json = console, as_json

    def say(self, text: str) -> None:
        """Print a line for people alone."""
        if not self._as_json:
            self._console.print(printable(text, limit=SHOWN))

    def frame(self, frame: Frame) -> None:
        self.num_frames += 1
        if not isinstance(frame.where.reducer, Stats):
            return
        self.num_stats += 1
        reading = Reading.of(frame)
        if self._as_json:
            self._console.print(json.dumps(reading.as_record()), soft_wrap=True)
        else:
            self._console.print(printable(reading.text, limit=SHOWN))

    def message(self, said: Mapping[str, Any]) -> None:
        """Print a line, if the message says something that a person waits for."""
        kind = said.get("type")
        if kind == "problem":
            self.say(f"problem: {said.get('text')}")
        elif kind == "mark":
            self.say(f"mark at step {said.get('step')}: {said.get('label')}")
        elif kind == "plan":
            since = said.get("effective_step")
            when = "from the next step on" if since is None else f"since step {since}"
            self.say(f"watched {when}: {', '.join(map(str, said.get('watches') or ())) or 'nothing'}")
        elif kind == "demoted":
            self.say("another controller has taken over; watching only")

    def sum_up(self) -> None:
        """Print the last line."""
        self.say(f"{self.num_frames} frames, {self.num_stats} of stats")


@dataclass(slots=True)
class _WatchSession:
    """One session of watching, from the welcome to the end of the job or of the requested steps."""

    printer: Printer
    writer: StreamWriter | None
    num_steps: int | None
    states: dict[str, str] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    """Texts about the end of runs and about their NaN, by run."""
    known_step: int = -1
    """Newest at the beginning: what comes of it may lack its first frames, so that it does not count."""
    steps: set[int] = field(default_factory=set)

    def begin(self, welcome: Mapping[str, Any]) -> None:
        """Record and show what was known already."""
        runs = [run for run in welcome.get("runs") or () if isinstance(run, Mapping)]
        for run in runs:
            self.take_message({**run, "type": "run"})
            if type(step := run.get("step")) is int:
                self.known_step = max(self.known_step, step)
        plan = {name: welcome.get(name) for name in ("watches", "digest", "effective_step")}
        self.take_message({"type": "plan", **plan})

    def follow(self, client: LiveClient) -> None:
        """Follow the job until it is over.

        Raises:
            HubGone: the job went without a word.
        """
        for received in self._received(client):
            if isinstance(received, bytes):
                self.take_frame(received)
            else:
                self.take_message(received)
            if self.num_steps is not None and len(self.steps) > self.num_steps:
                return

    def _received(self, client: LiveClient) -> Iterator[bytes | dict[str, Any]]:
        until: float | None = None
        while until is None or monotonic() < until:
            try:
                received = client.receive(timeout_s=POLL_S if until is None else QUIET_S)
            except HubGone:
                if self._is_over():
                    break
                raise
            if received is not None:
                yield received
            elif until is not None:
                break
            if until is None and self._is_over():
                until = monotonic() + DRAIN_S
        if RunState.LOST in self.states.values():
            raise HubGone("the job is lost: it exited without an end message")

    def _is_over(self) -> bool:
        return bool(self.states) and RunState.RUNNING not in self.states.values()

    def take_frame(self, encoded: bytes) -> None:
        try:
            found = decode(encoded)
            if isinstance(found, Frame):
                if found.where.step > self.known_step:
                    self.steps.add(found.where.step)
                # The first frame of a step too many says that the others are whole.
                if self.num_steps is not None and len(self.steps) > self.num_steps:
                    return
                self.printer.frame(found)
        except BadFrame as error:
            raise NemoRLError(f"the hub sent an unreadable frame: {error}; is it of another version?") from error
        if self.writer is not None:
            self.writer.frame(encoded)

    def take_message(self, said: dict[str, Any]) -> None:
        if said.get("type") == "run":
            self._take_run(said)
        else:
            self.printer.message(said)
        if self.writer is not None and said.get("type") not in ("stats", "done", "demoted"):
            self.writer.message(said)

    def _take_run(self, said: Mapping[str, Any]) -> None:
        run, state = str(said.get("run")), str(said.get("state"))
        if self.states.get(run) != state:
            self.states[run] = state
            text = f": {said['text']}" if said.get("text") else ""
            self.printer.say(f"run {run} ({said.get('name') or 'no name'}) {state}{text}")
        first = said.get("first_non_finite")
        if isinstance(first, Mapping) and self.texts.get(run) != (text := str(first.get("text"))):
            self.texts[run] = text
            self.printer.say(f"first NaN or inf: {text}")


Host = Annotated[str, typer.Option("--host", help="address of this machine that the page listens at")]
Port = Annotated[int, typer.Option("--port", min=0, max=65535, help="its port; 0: any that is free")]
TURN_S = 0.2
"""Seconds between two checks whether the job is over."""


@app.command(short_help="Show recordings on the page again.")
def serve(
    recordings: Annotated[
        list[Path], typer.Argument(metavar="RUN_OR_FOLDER...", help="log folders of runs, or folders of recordings")
    ],
    host: Host = "127.0.0.1",
    port: Port = 0,
) -> None:
    """Show recordings on the page, all steps at once, several runs side by side; those of runs that are on are
    followed. Ends on Ctrl-C. Exit code: 0, 2 usage."""
    folders = [find_recording(path) for path in recordings]
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise UserError("expected each recording once")
    asyncio.run(_serve(folders, make_console(), host=host, port=port))


@app.command(short_help="Convert a vector saved with torch to one to project on.")
def vector(
    source: Annotated[Path, typer.Argument(metavar="FILE", help="tensor [h] or [layers, h] of torch.save")],
    out: Annotated[Path, typer.Option("--out", metavar="NAME.safetensors", help="in diagnostics.tracer.artifacts")],
    normalize: Annotated[bool, typer.Option("--normalize", help="give each vector length 1")] = False,
) -> None:
    """Convert a vector of another tracer into one that project(NAME) takes. Nothing in the file is run."""
    from nemo_rl_tools.vector_file import convert_vector  # noqa: PLC0415  (torch takes seconds)

    shape = convert_vector(source, out, normalize=normalize)
    make_console().print(
        printable(f"{out}: {' x '.join(map(str, shape))}{', of length 1' if normalize else ''}", limit=SHOWN)
    )


def play(
    ctx: typer.Context,
    speed: Annotated[float, typer.Option("--speed", help="2.0 takes half the time that the run took")] = 1.0,
    headless: Annotated[bool, typer.Option("--headless", help="print stats here instead of serving the page")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="with --headless: one JSON object per line")] = False,
    host: Host = "127.0.0.1",
    port: Port = 0,
) -> None:
    """Play a recording at the speed at which it was made, from when the first page looks on. Ends on Ctrl-C. Exit code:
    0, 2 usage."""
    folder = find_recording(selected(ctx, what=RECORDING).folders[0])
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
    """Wait until then; return False where the wait was stopped before."""
    while not is_so():
        with suppress(TimeoutError):
            async with asyncio.timeout(TURN_S):
                await stopped.wait()
        if stopped.is_set():
            return False
    return True
