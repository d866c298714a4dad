"""`HubProcess`: the hub in its own process, beside the job whose tensors it shows.

Invariant: once it has started, nothing that becomes of the hub raises in the job or holds it up; and the hub does not
outlive the job by more than a few seconds.
"""

from __future__ import annotations

import json
import logging
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from nemo_rl.errors import ResourceError, RunFolderError, UserError
from nemo_rl.tracer.link import HubAddress, HubLink, OnMessage
from nemo_rl.tracer.protocol import HubLimits, HubTokens, Role, token_path, write_private
from nemo_rl.utils.child_process import ChildProcess
from nemo_rl.utils.files import write_text

__all__ = [
    "HUB_FILE",
    "HUB_MODULE",
    "LOG_FILE",
    "OPEN_FILE",
    "RECORDING_FOLDER",
    "HubProcess",
    "HubSpec",
    "TracedJob",
    "find_hub",
    "open_job",
]

logger = logging.getLogger(__name__)

CLOSE_S = 30.0
"""Seconds that the hub may take to write what waits and to end."""
RECORDING_FOLDER = "tracer"
"""Folder of the tracer in the log folder of a run."""
HUB_FILE, OPEN_FILE, LOG_FILE = "hub.json", "open.html", "hub.log"
MAX_HUB_FILE = 65_536
HUB_MODULE = "nemo_rl_tools.tracer.hub.main"
"""Module that the process of a hub runs; the package nemo-rl-tools has it."""
ANY_HOST = ("0.0.0.0", "::", "")
"""All addresses of the machine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HubSpec:
    """The settings of a hub."""

    folder: Path
    """Folder of the tracer: `tracer` in the log folder of the run."""
    run: str
    start_timeout_s: float
    """Seconds until the hub must listen; it takes less than one where the machine is not busy."""
    host: str = "127.0.0.1"
    port: int = 0
    """0: any that is free."""
    origins: tuple[str, ...] = ()
    """Origins of pages, beside the hub's own, from which a browser may connect."""
    watches: tuple[str, ...] = ()
    """Watches until a controller sets others."""
    limits: HubLimits = field(default_factory=HubLimits)
    record: bool = False
    record_bytes: int = 10 << 30
    """Most bytes of the recording."""
    compat: bool = False
    """True where the compatibility endpoint is served."""
    tokenizer: Path | None = None
    """Folder with `tokenizer.json`; None: texts of tokens are unknown."""
    artifacts: Path | None = None
    """Folder with vectors to project on."""

    def as_record(self) -> dict[str, object]:
        return {name: str(value) if isinstance(value, Path) else value for name, value in asdict(self).items()}

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> HubSpec:
        """Return the settings of a record that `as_record` made."""
        paths = {name: None if record[name] is None else Path(record[name]) for name in ("tokenizer", "artifacts")}
        texts = {name: tuple(record[name]) for name in ("origins", "watches")}
        limits = HubLimits(**record["limits"])
        return cls(**{**record, **paths, **texts, "folder": Path(record["folder"]), "limits": limits})


class HubProcess:
    """A hub that runs beside the job.

    Example:
        with HubProcess(HubSpec(folder=folder, run="a1", start_timeout_s=60)) as hub:
            connect(hub.address, hub.tokens.job)
    """

    def __init__(self, spec: HubSpec) -> None:
        self.spec, self.tokens = spec, HubTokens.draw()
        self.port = 0
        self._process: ChildProcess | None = None

    def __enter__(self) -> HubProcess:
        """Raises:
        ResourceError: the hub does not start, such as where its port is taken.
        RunFolderError: its folder cannot be written.
        """
        try:
            self._start()
        except OSError as error:
            self.close()
            raise RunFolderError(f"cannot start the tracer's hub: {error}; check {self.spec.folder}") from error
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def address(self) -> str:
        """Return the address of the page, such as `127.0.0.1:40123`."""
        host = self.connect_host
        return f"{f'[{host}]' if ':' in host else host}:{self.port}"

    @property
    def connect_host(self) -> str:
        return _own_address(self.spec.host) if self.spec.host in ANY_HOST else self.spec.host

    @property
    def note(self) -> str:
        """Return a line for people with the address of the page, without a token."""
        page, token = self.spec.folder / OPEN_FILE, token_path(self.spec.folder, Role.CONTROLLER.value)
        return f"tracer: http://{self.address}/ (open {page}, or give the token of {token})"

    @property
    def pid(self) -> int | None:
        """Return the id of the process, or None before it was started."""
        return None if self._process is None else self._process.pid

    @property
    def is_alive(self) -> bool:
        """Return whether the process runs."""
        return self._process is not None and self._process.exit_code is None

    def close(self) -> None:
        """End the hub, which first writes what waits; raise nothing."""
        process, self._process = self._process, None
        if process is None:
            return
        code = process.stop(timeout_s=CLOSE_S)
        if code:
            logger.warning("the tracer's hub ended with code %s; see %s", code, self.spec.folder / LOG_FILE)
        for name in (HUB_FILE, OPEN_FILE):
            with suppress(OSError):
                (self.spec.folder / name).unlink(missing_ok=True)

    def _start(self) -> None:
        folder = self.spec.folder
        # Readable by its owner only: prompts may be private.
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.tokens.write(folder)
        self._process = ChildProcess(
            [sys.executable, "-m", HUB_MODULE],
            name="the tracer's hub",
            log=folder / LOG_FILE,
            is_read=True,
            environment={"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )
        said = self._talk(self._process)
        if "port" not in said:
            raise ResourceError(
                f"cannot start the tracer's hub on {self.spec.host}:{self.spec.port}: "
                f"{said.get('error', 'it ended')}; see {folder / LOG_FILE}, or choose another port"
            )
        self.port = int(said["port"])
        facts = {"address": self.address, "port": self.port, "pid": self._process.pid, "run": self.spec.run}
        write_text(folder / HUB_FILE, f"{json.dumps(facts)}\n")
        target = escape(f"http://{self.address}/#token={self.tokens.controller}")
        page = (
            '<!doctype html><meta charset="utf-8"><meta name="referrer" content="no-referrer">'
            f'<title>Tracer</title><meta http-equiv="refresh" content="0; url={target}">'
            f'<a href="{target}">Open the tracer</a>\n'
        )
        write_private(folder / OPEN_FILE, page)

    def _talk(self, process: ChildProcess) -> Mapping[str, Any]:
        """Send the settings to the process and return its answer, which has the port; empty where the process ended."""
        orders = json.dumps({"spec": self.spec.as_record(), "tokens": asdict(self.tokens)})
        process.tell(f"{orders}\n".encode())
        line = process.read_line(timeout_s=self.spec.start_timeout_s)
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}


def find_hub(run: Path) -> tuple[str, Path]:
    """Return the address of a run's hub, and the folder of its tokens.

    Raises:
        UserError: no hub has written where it is.
    """
    for folder in (run, run / RECORDING_FOLDER):
        path = folder / HUB_FILE
        if not path.is_file():
            continue
        try:
            with path.open(encoding="utf-8") as file:
                return str(json.loads(file.read(MAX_HUB_FILE))["address"]), folder
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path}: expected JSON with the address of a hub: {error}") from error
    raise UserError(
        f"{run}: expected the log folder of a run that is on and is traced ({RECORDING_FOLDER}/{HUB_FILE}), found "
        f"none; has it ended, or does its recipe lack diagnostics.tracer.enabled: true? `nemo-rl inspect {run} "
        f"tracer` reads its recording"
    )


def _own_address(host: str) -> str:
    """Return the address of this machine in its network, for a hub that listens at all of its addresses."""
    family, elsewhere = (socket.AF_INET6, "2001:db8::1") if ":" in host else (socket.AF_INET, "192.0.2.1")
    with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        # Nothing is sent: connect only asks which way packets to that network would go.
        probe.connect((elsewhere, 9))
        return str(probe.getsockname()[0])
    return "::1" if ":" in host else "127.0.0.1"


DRIVER_BYTES = 1 << 20
"""Most bytes of the driver's messages that wait: numbers and keys."""
MAX_TEXT = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedJob:
    """The hub of a job, and the driver's link to it."""

    address: HubAddress
    link: HubLink
    note: str
    """Line for people with the address of the page."""


@contextmanager
def open_job(
    spec: HubSpec,
    facts: Mapping[str, object],
    *,
    on_message: OnMessage | None = None,
) -> Iterator[TracedJob]:
    """Start the hub, and tell it how the job ends.

    Args:
        facts: what the hub is told of the run: `name`, `model`, `layout`, `tokenizer`.
        on_message: called by a thread with what the hub says to the driver.

    Raises:
        ResourceError: the hub does not start, such as where its port is taken.
    """
    with HubProcess(spec) as hub:
        address = HubAddress(host=hub.connect_host, port=hub.port, token=hub.tokens.job)
        link = HubLink(address, Role.DRIVER, hello={}, memory_bytes=DRIVER_BYTES, on_message=on_message)
        link.say({"type": "run", "run": spec.run, **facts})
        reason, text = "completed", ""
        try:
            yield TracedJob(address=address, link=link, note=hub.note)
        except BaseException as error:
            reason = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
            text = str(error)[:MAX_TEXT]
            raise
        finally:
            link.say({"type": "finish", "reason": reason, "text": text})
            link.close()
