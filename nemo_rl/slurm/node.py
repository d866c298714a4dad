"""One node of a Slurm job, from its first process to its last; `ray.sub` starts one of it on each.

    main -> Node.run
      |- head     token, roll, Ray's head -> all nodes joined -> the command -> all nodes leave
      |                                                            (Node.head, Roll, RayChild, CommandChild)
      `- others   report -> Ray joins -> wait until the head says leave   (Node.member, Attendance, RayChild)

Whatever ends first decides: the command, a node that is lost, Ray, a signal. Invariant: when this process ends, also
after an error or a kill, nothing that it started is left, neither processes nor files outside the job's folder.

`ray symmetric-run` promises less: it ends with 0 where Ray cannot start, notices a lost node or Ray only when the
command ends, leaves both behind at SIGTERM, keeps no logs, and its end stops every Ray of the user on the machine.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path

from nemo_rl.config.base import START_TIMEOUT_S
from nemo_rl.distributed.environment import ray_environment, worker_environment
from nemo_rl.distributed.fork_server import ForkServer
from nemo_rl.distributed.run_folder import RunFolder
from nemo_rl.errors import NemoRLError, UserError
from nemo_rl.slurm.job import HEAD_FILE, RESULT_FILE, TOKEN_FILE, NodeSettings, PortRange
from nemo_rl.slurm.roll import Attendance, NodesMissing, Roll
from nemo_rl.utils.exits import FAILURE, INTERRUPTED, NODE_LOST
from nemo_rl.utils.files import read_tail, write_text

__all__ = ["STEP_END_S", "CommandChild", "RayChild", "RayFailed", "main"]

logger = logging.getLogger(__name__)


READY_FILE = "ray_current_cluster"
"""Written by `ray start` into its temporary folder when all its processes are there; holds the head's address."""
LOG_FILE, RAY_LOGS = "ray_start.log", "ray_logs"
CHILD_POLL_S = 0.1
END_S = 6.0
"""Seconds for an orderly end of Ray, after which it is killed; Slurm itself waits 30 s for all of it."""
COMMAND_END_S = 12.0
"""The same for the command, which ends its workers first."""
STEP_END_S = 28.0
"""The same for a command that ends its step and saves first (`cluster.grace_s`); Slurm kills after 30 s."""
PIPE_END_S = 2.0
PIECE_BYTES = 65536
LAST_WORDS = 1500
"""Characters of a child's output in an error."""


class RayFailed(NemoRLError):
    """Ray's processes on a node have not started, or have ended."""


class RayChild:
    """`ray start` on this node.

    Args:
        temp_dir: of Ray on this node.
        logs: folder that keeps its logs.
    """

    def __init__(self, *, temp_dir: Path, logs: Path) -> None:
        self.temp_dir, self._logs = temp_dir, logs
        self._process: asyncio.subprocess.Process | None = None

    async def begin(self, environment: Mapping[str, str]) -> None:
        """Start the process, which imports Ray meanwhile."""
        self._logs.mkdir(parents=True, exist_ok=True)
        with (self._logs / LOG_FILE).open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "nemo_rl.distributed.ray_node"),
                stdin=asyncio.subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**os.environ, **environment},
                process_group=0,
            )

    async def start(self, words: Sequence[str], *, timeout_s: float) -> str:
        """Let the child go on with `ray start WORDS`; return the address of Ray's head when this node has joined.

        Raises:
            RayFailed: it has ended, or is not there in time.
        """
        assert self._process is not None and self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.write(json.dumps(list(words)).encode() + b"\n")
            await self._process.stdin.drain()
        ready = self.temp_dir / READY_FILE
        try:
            async with asyncio.timeout(timeout_s):
                while not (ready.is_file() and ready.read_text()):
                    if self._process.returncode is not None:
                        raise RayFailed(self._ended())
                    await asyncio.sleep(CHILD_POLL_S)
        except TimeoutError:
            raise RayFailed(f"Ray did not start within {timeout_s:g} s: {self._last_words()}") from None
        return ready.read_text().strip()

    @property
    def has_ended(self) -> bool:
        return self._process is not None and self._process.returncode is not None

    async def ended(self) -> str:
        assert self._process is not None
        await self._process.wait()
        return self._ended()

    async def stop(self) -> None:
        """End Ray's processes in order. Idempotent."""
        if self._process is not None:
            await _end(self._process, to_group=False, timeout_s=END_S)

    def keep_logs(self) -> None:
        """Copy Ray's own logs into the job's folder."""
        source = self.temp_dir / "session_latest" / "logs"
        if source.is_dir():
            with suppress(OSError, shutil.Error):
                shutil.copytree(source, self._logs / RAY_LOGS, dirs_exist_ok=True, ignore_dangling_symlinks=True)

    def _ended(self) -> str:
        assert self._process is not None
        return f"Ray exited with code {self._process.returncode}: {self._last_words()}"

    def _last_words(self) -> str:
        try:
            text = read_tail(self._logs / LOG_FILE, LAST_WORDS).decode(errors="replace")
        except OSError:
            text = ""
        return f"{text.strip() or 'no output'} (all of it: {self._logs})"


class CommandChild:
    """The job's command, whose output goes to the job's log and to a file.

    Args:
        command: for `bash -c`.
        log: the file.
    """

    def __init__(self, command: str, *, log: Path) -> None:
        self._command, self._log = command, log
        self._process: asyncio.subprocess.Process | None = None
        self._pump: asyncio.Task[None] | None = None

    async def run(self, environment: Mapping[str, str]) -> int:
        """Run it to its end; its exit code, of a signal as a shell gives it."""
        self._process = await asyncio.create_subprocess_exec(
            *("bash", "-c", self._command),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={"PYTHONUNBUFFERED": "1", **os.environ, **environment},
            process_group=0,
        )
        assert self._process.stdout is not None
        self._pump = asyncio.create_task(_copy(self._process.stdout, self._log))
        code = await self._process.wait()
        return code if code >= 0 else 128 - code

    async def stop(self, *, is_signalled: bool) -> None:
        """End the command and all of its process group, and copy the last of its output. Idempotent.

        Args:
            is_signalled: the job has got a signal. The command, where Slurm sent it there too, takes both for one.
        """
        if self._process is None or self._pump is None:
            return
        if is_signalled and self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGTERM)
            with suppress(TimeoutError):
                async with asyncio.timeout(STEP_END_S):
                    await self._process.wait()
        await _end(self._process, to_group=True, timeout_s=END_S if is_signalled else COMMAND_END_S)
        # What the command has left behind may hold the pipe open.
        await asyncio.wait([self._pump], timeout=PIPE_END_S)
        self._pump.cancel()
        await asyncio.gather(self._pump, return_exceptions=True)


async def _copy(source: asyncio.StreamReader, target: Path) -> None:
    with target.open("ab", buffering=0) as log:
        while piece := await source.read(PIECE_BYTES):
            log.write(piece)
            sys.stdout.buffer.write(piece)
            sys.stdout.buffer.flush()


async def _end(process: asyncio.subprocess.Process, *, to_group: bool, timeout_s: float) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.returncode is not None:
            break
        with suppress(ProcessLookupError):
            if to_group:
                os.killpg(process.pid, number)
            else:
                process.send_signal(number)
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await process.wait()


POLL_S = 0.2
RAY_ATTEMPTS = 3
LEAVE_S = 12.0
"""Seconds for the other nodes to end their Ray, in order or not."""
DISCARD_PORT = 9
"""Port of the route to the other node; nothing is sent to it."""


class SlurmNode:
    """This node's part of the job.

    Args:
        settings: read from the environment.
    """

    def __init__(self, settings: NodeSettings) -> None:
        self._settings = settings
        self._stop = asyncio.Event()
        self._forks: Mapping[str, str] = {}

    async def run(self) -> int:
        """Run this node's process, and return its exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            loop.add_signal_handler(number, self._stop.set)
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        async with AsyncExitStack() as stack:
            folder = await self._open_folder(stack)
            logs = self._settings.folder / "nodes" / self._settings.name
            ray = RayChild(temp_dir=folder.path, logs=logs)
            stack.callback(ray.keep_logs)
            stack.push_async_callback(ray.stop)
            with folder.marking():
                await ray.begin(self._ray_variables())
                return await (self.head(ray, stack) if self._settings.is_head else self.member(ray))

    async def _open_folder(self, stack: AsyncExitStack) -> RunFolder:
        """Open the temporary folder of Ray on this node; on a node without GPUs its workers begin with their imports
        done."""
        settings = self._settings
        if settings.num_gpus or not settings.preload:
            folder = RunFolder()
            stack.callback(folder.close)
            return folder
        variables = worker_environment(threads=1, uses_gpu=False)
        forks = ForkServer(settings.preload, environment=variables, deadline_s=settings.node_timeout_s)
        stack.callback(forks.close)
        self._forks = forks.environment
        return forks.folder

    async def head(self, ray: RayChild, stack: AsyncExitStack) -> int:
        settings, address = self._settings, own_address(self._settings)
        token = _new_token(settings.folder / TOKEN_FILE)
        roll = Roll([node.name for node in settings.nodes[1:]], token=token)
        stack.push_async_callback(roll.close)
        port = await roll.open(address)
        facts = {"node": settings.name, "address": address, "port": port}
        write_text(settings.folder / HEAD_FILE, json.dumps(facts))
        stack.push_async_callback(self._dismiss, roll)
        begun = await self._first(self._start_head(ray, address), self._stop.wait())
        if not isinstance(begun, str):
            return INTERRUPTED
        roll.call(begun)
        write_text(settings.folder / HEAD_FILE, json.dumps({**facts, "ray": begun}))
        joined = roll.all_joined(timeout_s=settings.node_timeout_s, note=self._failed_node)
        if await self._first(joined, self._stop.wait()) is not None:
            return INTERRUPTED
        logger.info("all %d nodes have joined Ray at %s", len(settings.nodes), begun)
        return await self._command(ray, roll, begun)

    async def _start_head(self, ray: RayChild, address: str) -> str:
        """Start the head on a port that is free now; Ray binds it itself, and where it is taken by then another is
        tried."""
        settings = self._settings

        def words() -> list[str]:
            port = free_port(settings.head_ports, address)
            return settings.ray_words(address=address, temp_dir=ray.temp_dir, head=None, port=port)

        return await self._start_ray(ray, words)

    async def _start_ray(self, ray: RayChild, words: Callable[[], list[str]]) -> str:
        """Starts Ray on this node, again when it has ended: a port was taken, or a busy machine took longer than the
        30 s that Ray gives a node to appear, which no setting changes.
        """
        for attempt in range(1, RAY_ATTEMPTS + 1):
            try:
                return await ray.start(words(), timeout_s=START_TIMEOUT_S)
            except RayFailed as error:
                if not ray.has_ended or attempt == RAY_ATTEMPTS:
                    raise
                logger.warning("%s; trying again", str(error).splitlines()[0])
                await ray.begin(self._ray_variables())
        raise AssertionError("unreachable")

    async def _command(self, ray: RayChild, roll: Roll, address: str) -> int:
        command = CommandChild(self._settings.command, log=self._settings.folder / "command.log")
        try:
            ended = await self._first(
                command.run({**self._token_variables(), "RAY_ADDRESS": address}),
                self._stop.wait(),
                roll.lost(spare=self._settings.spare_nodes),
                ray.ended(),
            )
        finally:
            await command.stop(is_signalled=self._stop.is_set())
        if isinstance(ended, str):
            logger.error("error: %s; the job's command is ended", ended)
            return NODE_LOST
        if ended == FAILURE and ended is not True and roll.problem() is not None:
            return NODE_LOST
        return ended if isinstance(ended, int) and ended is not True else INTERRUPTED

    async def member(self, ray: RayChild) -> int:
        settings = self._settings
        attendance = await self._first(self._report(), self._stop.wait())
        if not isinstance(attendance, Attendance):
            return 0 if attendance is None else INTERRUPTED
        # Said when Ray has ended: callbacks run in reverse, and Ray's is in the stack before this one.
        leaving = AsyncExitStack()
        leaving.push_async_callback(attendance.leave)
        async with leaving:
            try:
                head = await self._first(attendance.ray(), self._stop.wait())
                if not isinstance(head, str):
                    return 0 if head is None else INTERRUPTED
                words = settings.ray_words(address=own_address(settings), temp_dir=ray.temp_dir, head=head, port=0)
                started = self._first(self._start_ray(ray, lambda: words), attendance.dismissed())
                if not isinstance(await started, str):
                    return 0
                attendance.joined()
                ended = await self._first(attendance.dismissed(), ray.ended(), self._stop.wait())
                if ended is True:
                    # The command ends its step meanwhile, which needs this node's workers.
                    await self._first(attendance.dismissed(), ray.ended(), asyncio.sleep(STEP_END_S))
                if isinstance(ended, str):
                    attendance.failed(ended)
                    logger.error("error: %s", ended)
                    return NODE_LOST
                return INTERRUPTED if ended is True else 0
            except NemoRLError as error:
                attendance.failed(str(error))
                raise
            finally:
                await ray.stop()

    async def _report(self) -> Attendance | None:
        """Connect to the head as soon as that is possible; None: the head has ended already."""
        settings = self._settings
        try:
            async with asyncio.timeout(settings.node_timeout_s):
                while True:
                    if (settings.folder / RESULT_FILE).is_file():
                        return None
                    try:
                        facts = json.loads((settings.folder / HEAD_FILE).read_text())
                        token = (settings.folder / TOKEN_FILE).read_text().strip()
                        return await Attendance.connect(
                            facts["address"], facts["port"], name=settings.name, token=token
                        )
                    except (OSError, ValueError, TimeoutError):
                        await asyncio.sleep(POLL_S)
        except TimeoutError:
            head = settings.nodes[0]
            raise NodesMissing(
                f"the head {head.name} ({head.address}) has not reported after {settings.node_timeout_s:g} s; look for "
                f"its lines in the job's log, and whether {settings.folder} is on a file system that both nodes see"
            ) from None

    async def _dismiss(self, roll: Roll) -> None:
        late = await roll.dismiss(timeout_s=LEAVE_S)
        if late:
            logger.error("error: node %s has not left within %g s", ", ".join(late), LEAVE_S)

    def _failed_node(self) -> str | None:
        """Return the note of `ray.sub` about a node whose process could not even begin."""
        for node in self._settings.nodes:
            note = self._settings.folder / f"failed_{node.name}"
            if note.is_file():
                return f"node {node.name} ({node.address}): {note.read_text().strip()}"
        return None

    async def _first(self, *awaited: Coroutine[object, object, object]) -> object:
        """Return the result of the first task that ends; cancel the others."""
        tasks = [asyncio.ensure_future(one) for one in awaited]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return next(task for task in tasks if task in done).result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _token_variables(self) -> dict[str, str]:
        return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(self._settings.folder / TOKEN_FILE)}

    def _ray_variables(self) -> dict[str, str]:
        given = {name: value for name, value in os.environ.items() if name.startswith("RAY_")}
        return {**ray_environment(START_TIMEOUT_S), **given, **self._token_variables(), **self._forks}


def own_address(settings: NodeSettings) -> str:
    """Return the numeric address at which the other nodes reach this node.

    A host name often stands for loopback on its own machine; then the route to another node says more.
    """
    record = settings.record
    try:
        address = socket.getaddrinfo(record.address, None, socket.AF_INET)[0][4][0]
    except OSError as error:
        raise UserError(
            f"node {record.name}: NodeAddr {record.address!r} of Slurm cannot be resolved: {error}"
        ) from error
    others = [node.address for node in settings.nodes if node.name != record.name]
    if str(address).startswith("127.") and address != record.address and others:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:
            route.connect((others[0], DISCARD_PORT))
            address = route.getsockname()[0]
    return str(address)


def free_port(ports: PortRange | None, address: str) -> int:
    """Return a port that is free now.

    Raises:
        UserError: all of them are taken.
    """
    for port in [0] if ports is None else range(ports.low, ports.high + 1):
        with socket.socket() as probe:
            try:
                probe.bind((address, port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    assert ports is not None
    span = f"port {ports.low} is" if ports.low == ports.high else f"all ports from {ports.low} to {ports.high} are"
    raise UserError(
        f"RAY_PORT: {span} taken on {socket.gethostname()} ({address}); set another, a range LOW-HIGH, or 0 for any "
        "that is free"
    )


def _new_token(path: Path) -> str:
    token = secrets.token_hex(32)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(token)
    return token


def main() -> int:
    """Run `python -m nemo_rl.slurm.node`; return the exit code."""
    name = os.environ.get("SLURMD_NODENAME", socket.gethostname())
    logging.basicConfig(level=logging.INFO, format=f"[{name}] %(message)s", stream=sys.stderr, force=True)
    settings, code = None, NemoRLError.exit_code
    try:
        settings = NodeSettings.from_environment(os.environ)
        code = asyncio.run(SlurmNode(settings).run())
    except NemoRLError as error:
        logger.error("error: %s", error)
        code = error.exit_code
    finally:
        if settings is not None and settings.is_head:
            (settings.folder / TOKEN_FILE).unlink(missing_ok=True)
            write_text(settings.folder / RESULT_FILE, f"{code}\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
