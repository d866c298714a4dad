"""`DataPlaneEvent` and the user's function that gets one after each call (`data_plane.observability.callback`).

Used by the `meter.Meter` of every client. A callback that raises is reported once; the data
plane's calls go on.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from nemo_rl.errors import ConfigError

__all__ = ["DataPlaneEvent", "EventCallback", "load_callback", "print_event"]

logger = logging.getLogger(__name__)

KEY = "data_plane.observability.callback"
PRINT = "print_event"
"""Value of the key that stands for the function of this name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataPlaneEvent:
    """One call of a data plane client, after it has ended."""

    op: str
    """Name of the method, for example `kv_batch_put`."""
    stage: str
    """Stage that the call worked for; "" outside every stage."""
    partition: str
    rows: int
    fields: tuple[str, ...]
    bytes: int
    """Columns put or fetched, padding excluded."""
    meta_bytes: int
    """Keys, lengths and tags, as plain values."""
    ms: float
    status: Literal["ok", "error", "timeout"]


EventCallback: TypeAlias = Callable[[DataPlaneEvent], object]


def print_event(event: DataPlaneEvent) -> None:
    """Logs one line per call: on the console of the driver, in the log file of a worker.

    Example:
        `data plane: kv_batch_put ok in 0.4 ms, stage rollout, partition train: 4 rows, 64 bytes of input_ids`
    """
    fields = f" of {', '.join(event.fields)}" if event.fields else ""
    logger.info(
        "data plane: %s %s in %.1f ms, stage %s, partition %s: %d rows, %d bytes%s",
        event.op,
        event.status,
        event.ms,
        event.stage or "none",
        event.partition or "none",
        event.rows,
        event.bytes,
        fields,
    )


def load_callback(name: str | None) -> EventCallback | None:
    """The function that `package.module:function` or `print_event` names, made safe to call; None for None.

    Raises:
        ConfigError: there is no such function.
    """
    if name is None:
        return None
    if name == PRINT:
        return print_event
    module_name, mark, function_name = name.partition(":")
    try:
        function = vars(importlib.import_module(module_name))[function_name]
    except (ImportError, KeyError, ValueError) as error:
        raise ConfigError(
            f"{KEY}: expected an importable `package.module:function`, got {name!r}: {error!r}"
        ) from error
    if not mark or not callable(function):
        raise ConfigError(f"{KEY}: expected a function, got {name!r}")
    return _Guarded(name, function)


class _Guarded:
    """Calls the user's function; the first error is logged, none is raised."""

    def __init__(self, name: str, function: EventCallback) -> None:
        self._name, self._function = name, function
        self._has_failed = False

    def __call__(self, event: DataPlaneEvent) -> None:
        try:
            self._function(event)
        except Exception as error:  # noqa: BLE001 - the user's code may raise anything
            if not self._has_failed:
                logger.warning("%s: %s raised %r; further errors are not reported", KEY, self._name, error)
            self._has_failed = True
