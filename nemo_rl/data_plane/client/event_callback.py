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

__all__ = ["DataPlaneEvent", "EventCallback", "load_callback"]

logger = logging.getLogger(__name__)

KEY = "data_plane.observability.callback"


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


def load_callback(name: str | None) -> EventCallback | None:
    """The function that `package.module:function` names, made safe to call; None for None.

    Raises:
        ConfigError: there is no such function.
    """
    if name is None:
        return None
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
