"""Messages of ranks, driver and viewers to the hub, and its answers: JSON texts beside the binary frames.

One WebSocket at `/live`; the first message is `hello`, within `HANDSHAKE_S`. Every message is an object with `type`.

    from              type       fields                                            answer
    anyone            hello      v, role, token; of a rank also run, rank, world   welcome, or error and the end
                                 and unobserved {kind of site: why}, group
                                 (`policy` if it is left out)
    rank              begin      step, phase                                       -
    rank              end        step, phase, sent, dropped (so far)               -
    rank              problem    text                                              problem to all
    driver            run        run (id), name, model, layout, tokenizer          -
    driver            step       step, keys (rows whose tokens are shown), group   -
                                 (`policy` if it is left out)
    driver            problem    text                                              problem to all
    driver            metrics    step, metrics {name: number}                      -
    driver            finish     reason (`completed`, `failed`, `interrupted`),    -
                                 text
    driver            applied    step, digest                                      -
    viewer            history    id, run, first, last (steps)                      the frames again, then done {id}
    viewer            pause, resume                                                -; paused viewers get no frames
    controller        watch      watches [text]                                    plan; the driver gets it, too
    controller        mark       label                                             mark to all

    to viewers: welcome {v, role, runs, watches, digest, effective_step, sites, reducers, limits}
                runs [{run, name, model, layout, unobserved, state, text, step, world, first_non_finite}]
                run {one of these, when it changes}; metrics {run, step, metrics}; plan {watches, digest,
                effective_step}; stats {sent, dropped, queued}; mark {label, step}; problem {text}; done {id};
                demoted {}; error {code, text}
    to the driver: plan {watches, digest}

Ranks are of a group: the workers of the policy, or the generation engines. Each group counts its ranks from 0, has a
world of its own, and shows other phases than the others: a phase is complete when all ranks of the group have ended it.

States of a run: `running`, `lost` (its driver went without a word), `ended`, `recorded` (played back). Roles: `rank`
and `driver` share the job's token; `viewer` and `controller` have one each, and a controller's is good for viewing.
At most one controller: a second is refused, unless its hello says `takeover: true`; the first is then told, a viewer.
"""

from __future__ import annotations

import hmac
import json
import math
import os
import secrets
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from nemo_rl.errors import RunFolderError, UserError

__all__ = [
    "HANDSHAKE_S",
    "LIVE_PATH",
    "PROTOCOL_VERSION",
    "BadMessage",
    "ErrorCode",
    "HubLimits",
    "HubTokens",
    "RankGroup",
    "Role",
    "RunState",
    "dump",
    "error_text",
    "number",
    "parse",
    "read_token",
    "text_field",
    "texts_field",
    "token_path",
    "write_private",
]


PROTOCOL_VERSION = 1
LIVE_PATH = "/live"
HANDSHAKE_S = 5.0


class Role(StrEnum):
    """The role of a peer."""

    RANK = "rank"
    DRIVER = "driver"
    VIEWER = "viewer"
    CONTROLLER = "controller"


class RankGroup(StrEnum):
    """Ranks that show the same phases."""

    POLICY = "policy"
    GENERATION = "generation"

    @property
    def member(self) -> str:
        return "engine" if self is RankGroup.GENERATION else "rank"


class RunState(StrEnum):
    """The state of a run."""

    RUNNING = "running"
    LOST = "lost"
    ENDED = "ended"
    RECORDED = "recorded"


class ErrorCode(StrEnum):
    """The reason why a message was refused."""

    VERSION = "version"
    UNAUTHORIZED = "unauthorized"
    FORBIDDEN = "forbidden"
    BUSY = "busy"
    BAD_MESSAGE = "bad_message"
    BAD_WATCH = "bad_watch"
    TOO_MANY = "too_many"
    SLOW = "slow"


@dataclass(frozen=True, kw_only=True, slots=True)
class HubLimits:
    """The limits of a hub."""

    max_viewers: int = 16
    max_waiting: int = 32
    """Connections that have not said hello yet."""
    max_text_bytes: int = 64 << 10
    """Most bytes of a message from a viewer."""
    max_frame_bytes: int = 64 << 20
    """Most bytes of a message from a rank."""
    viewer_bytes: int = 16 << 20
    """Waiting for one viewer; beyond it the oldest frame of a site gives way to the newest."""
    history_bytes: int = 256 << 20
    """Frames kept in memory for viewers that come later or step back."""
    slow_viewer_s: float = 60.0
    """A viewer that takes nothing for so long is told and closed."""
    assembly_s: float = 30.0
    """After the first rank has ended a phase the others have so long; then the pictures are made without them."""
    assembly_bytes: int = 512 << 20
    """Parts that wait for others, and tables of ranks, of each group; what comes beyond is dropped and counted."""
    sink_bytes: int = 256 << 20
    """Waiting to be recorded; what comes beyond is left out of the recording."""


MAX_ERROR_TEXT = 2000
"""Characters of an error that is sent."""


class BadMessage(ValueError):
    """A message that the protocol does not allow, with the code of the error."""

    def __init__(self, text: str, code: ErrorCode = ErrorCode.BAD_MESSAGE) -> None:
        super().__init__(text)
        self.code = code


def parse(text: str) -> dict[str, Any]:
    """Parse a message; numbers that are not finite become None.

    Raises:
        BadMessage: it is no JSON object with a text `type`.
    """
    try:
        found = json.loads(text, parse_constant=lambda _: None, parse_float=_finite)
        # Lone surrogates can be neither hashed nor stored.
        json.dumps(found, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise BadMessage(f"expected JSON: {str(error)[:200]}") from error
    if not isinstance(found, dict) or not isinstance(found.get("type"), str):
        raise BadMessage("expected a JSON object with a text 'type'")
    return found


def dump(message: Mapping[str, object]) -> str:
    """Return the text of a message; numbers that are not finite become null."""
    try:
        return json.dumps(message, allow_nan=False, separators=(",", ":"))
    except ValueError:
        return json.dumps(_clean(message), allow_nan=False, separators=(",", ":"))


def error_text(code: ErrorCode, text: str) -> str:
    """Return an `error` message."""
    return dump({"type": "error", "code": code.value, "text": text[:MAX_ERROR_TEXT]})


def number(message: Mapping[str, Any], name: str, *, limit: int = 1 << 53) -> int:
    """Raises:
    BadMessage: it is no whole number from 0 to the limit, which is what JavaScript holds exactly.
    """
    value = message.get(name)
    if type(value) is not int or not 0 <= value <= limit:
        raise BadMessage(f"{name}: expected a whole number from 0 to {limit}, got {str(value)[:100]}")
    return value


def text_field(message: Mapping[str, Any], name: str, *, limit: int = 1000, default: str | None = None) -> str:
    """Raises:
    BadMessage: it is no text of at most `limit` characters.
    """
    value = message.get(name, default)
    if not isinstance(value, str) or len(value) > limit:
        raise BadMessage(f"{name}: expected a text of at most {limit} characters, got {str(value)[:100]!r}")
    return value


def texts_field(message: Mapping[str, Any], name: str) -> list[str]:
    """Raises:
    BadMessage: it is no list of texts.
    """
    value = message.get(name)
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise BadMessage(f"{name}: expected a list of texts, got {str(value)[:100]!r}")
    return value


def _finite(text: str) -> float | None:
    value = float(text)
    return value if math.isfinite(value) else None


def _clean(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _clean(each) for key, each in value.items()}
    return [_clean(each) for each in value] if isinstance(value, list | tuple) else value


NUM_BYTES = 32
"""Random bytes in a token."""
MAX_BYTES = 4096
"""Largest file that is read as a token."""
OWNER_ONLY = 0o600
OTHERS = stat.S_IRWXG | stat.S_IRWXO


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class HubTokens:
    """The three tokens of a hub; their text is in no `repr`."""

    job: str
    """Token of ranks and the driver."""
    viewer: str
    controller: str
    """Good for viewing, too."""

    def __repr__(self) -> str:
        return "Tokens(...)"

    @classmethod
    def draw(cls) -> HubTokens:
        job, viewer, controller = (secrets.token_urlsafe(NUM_BYTES) for _ in range(3))
        return cls(job=job, viewer=viewer, controller=controller)

    def write(self, folder: Path) -> None:
        """Write `job.token`, `viewer.token` and `controller.token`, in place of those of an earlier run.

        Raises:
            RunFolderError: the folder cannot be written.
        """
        for name, token in (("job", self.job), ("viewer", self.viewer), ("controller", self.controller)):
            write_private(token_path(folder, name), f"{token}\n")

    def allow(self, role: Role, token: str) -> bool:
        """Return whether this token is good for this role, in the same time whatever is wrong with it."""
        good: Mapping[Role, tuple[str, ...]] = {
            Role.RANK: (self.job,),
            Role.DRIVER: (self.job,),
            Role.VIEWER: (self.viewer, self.controller),
            Role.CONTROLLER: (self.controller,),
        }
        given = token.encode(errors="surrogatepass")
        # A list: all are compared, so that time does not say which one was right.
        return any([hmac.compare_digest(known.encode(), given) for known in good[role]])


def token_path(folder: Path, name: str) -> Path:
    """Return the path of the token `job`, `viewer` or `controller`."""
    return folder / f"{name}.token"


def write_private(path: Path, text: str) -> None:
    """Make a file that nobody but its owner can read at any moment, in place of one that is there.

    Raises:
        RunFolderError: the folder cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # The mode counts from creation, and O_EXCL follows no link that somebody has laid.
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, OWNER_ONLY)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise RunFolderError(f"tracer: {path} cannot be written: {error}; check the folder and its space") from error


def read_token(path: Path) -> str:
    """Return the token that `HubTokens.write` has written.

    Raises:
        UserError: no such file, or others can read it.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise UserError(
            f"token {path}: cannot be read ({error.strerror}); pass the folder 'tracer' of a running job, as its owner"
        ) from error
    with os.fdopen(handle, "rb") as file:
        state = os.fstat(file.fileno())
        if not stat.S_ISREG(state.st_mode) or state.st_mode & OTHERS:
            raise UserError(
                f"token {path}: expected a file of mode 0600, got {stat.filemode(state.st_mode)}: others can read it; "
                "start the run again, which makes a new token"
            )
        text = file.read(MAX_BYTES).decode("ascii", errors="replace").strip()
    if not text:
        raise UserError(f"token {path}: the file is empty; start the run again, which makes a new token")
    return text
