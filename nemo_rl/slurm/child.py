"""The two kinds of children of a node: Ray, and on the head the job's command. `node.py` starts and ends them."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from nemo_rl.errors import NemoRLError
from nemo_rl.utils.files import read_tail

__all__ = ["STEP_END_S", "CommandChild", "RayChild", "RayFailed"]

READY_FILE = "ray_current_cluster"
"""Written by `ray start` into its temporary folder when all its processes are there; holds the head's address."""
LOG_FILE, RAY_LOGS = "ray_start.log", "ray_logs"
POLL_S = 0.1
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
                    await asyncio.sleep(POLL_S)
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
