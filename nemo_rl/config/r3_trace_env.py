"""Switches of the route trace, read when they are asked for. Used by `nemo_rl.utils.r3_trace` and by the set-up of a
run."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass

__all__ = [
    "TraceLimits",
    "r3_trace_enabled",
    "r3_trace_verify_forward_enabled",
    "router_replay_validate_enabled",
    "trace_environment",
    "trace_folder",
    "trace_limits",
]

ON = frozenset({"1", "true", "yes", "on"})
DEFAULT_FOLDER = "logs/r3_trace"


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceLimits:
    """Limits of the trace of each process; records beyond them are left out on purpose, and the header of a file says
    so."""

    steps: int = 1
    """First calls of each event and stage."""
    samples: int = 2
    """Samples of a call that get a preview of their values."""
    microbatches: int = 2
    """First microbatches of a stage."""

    def as_record(self) -> dict[str, int]:
        """Return the limits for the header of a trace file."""
        return asdict(self)


def r3_trace_enabled() -> bool:
    """Return whether routes are traced at all (NRL_R3_TRACE)."""
    return _flag("NRL_R3_TRACE")


def r3_trace_verify_forward_enabled() -> bool:
    """Return whether NRL_R3_TRACE and NRL_R3_TRACE_VERIFY_FORWARD are on: digests travel from the rollout, and every
    forward is checked."""
    return _flag("NRL_R3_TRACE") and _flag("NRL_R3_TRACE_VERIFY_FORWARD")


def router_replay_validate_enabled() -> bool:
    """Return whether NRL_ROUTER_REPLAY_VALIDATE is on: every installed tensor of routes is checked, not only
    the first."""
    return _flag("NRL_ROUTER_REPLAY_VALIDATE")


def trace_limits() -> TraceLimits:
    """Return the limits of NRL_R3_TRACE_STEPS, _SAMPLES and _MICROBATCHES; what is no integer means the default, below
    0 means 0."""
    default = TraceLimits()
    return TraceLimits(
        steps=_count("NRL_R3_TRACE_STEPS", default.steps),
        samples=_count("NRL_R3_TRACE_SAMPLES", default.samples),
        microbatches=_count("NRL_R3_TRACE_MICROBATCHES", default.microbatches),
    )


def trace_folder() -> str:
    """Return the folder of NRL_R3_TRACE_DIR."""
    return os.environ.get("NRL_R3_TRACE_DIR") or DEFAULT_FOLDER


def trace_environment() -> dict[str, str]:
    """Return the switches as they are set in this process, for processes that do not inherit them; one folder
    for all."""
    names = [name for name in os.environ if name.startswith("NRL_R3_TRACE") or name == "NRL_ROUTER_REPLAY_VALIDATE"]
    switches = {name: os.environ[name] for name in names}
    return switches | ({"NRL_R3_TRACE_DIR": os.path.abspath(trace_folder())} if r3_trace_enabled() else {})


def _flag(name: str) -> bool:
    value = os.environ.get(name)
    return value is not None and value.strip().lower() in ON


def _count(name: str, default: int) -> int:
    try:
        return max(0, int(os.environ.get(name, default)))
    except ValueError:
        return default
