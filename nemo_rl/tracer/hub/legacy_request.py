"""`LegacyRequest`: the `run_training_step` message of older public tensor tracers, as watches.

Invariant: nothing of the message is evaluated or opened: a method is one of a list of literal texts, a vector is the
name of an artifact.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nemo_rl.errors import UserError, shorten
from nemo_rl.tracer.classical import BY_FLAG, Classical
from nemo_rl.tracer.hub.wire import BadMessage
from nemo_rl.tracer.protocol import ErrorCode
from nemo_rl.tracer.reducer import Full, Project, Reducer, Tiles

__all__ = ["METHODS", "PHASE", "LegacyRequest"]

PHASE = "train"
"""The tracers show the forward passes of training steps."""
NUM_TILES = 96
"""Where the message does not say."""
METHODS: Mapping[str, str] = {
    "data.mean(dim=-1)": "mean",
    "data.mean(-1)": "mean",
    "data.max(dim=-1)": "max",
    "data.max(dim=-1).values": "max",
    "data.max(dim=-1)[0]": "max",
    "data.amax(dim=-1)": "max",
    "data.abs().max(dim=-1)": "absmax",
    "data.abs().max(dim=-1).values": "absmax",
    "data.abs().max(dim=-1)[0]": "absmax",
    "data.abs().amax(dim=-1)": "absmax",
    "data.pow(2).mean(dim=-1).sqrt()": "rms",
}
"""Expressions that are known, as texts, and what `Tiles` calls them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LegacyRequest:
    """What a message asks for."""

    reducers: Mapping[Classical, Reducer]

    @classmethod
    def of(cls, message: Mapping[str, Any]) -> LegacyRequest:
        """Raises:
        BadMessage: a flag, compressor or method that is not known.
        """
        flags, compressors = message.get("visualization_flags"), message.get("compressor_config", {})
        if not isinstance(flags, Mapping) or not isinstance(compressors, Mapping):
            raise BadMessage("expected 'visualization_flags' and 'compressor_config' as objects")
        for name in (*flags, *compressors):
            if name not in BY_FLAG:
                raise BadMessage(f"expected flags among {', '.join(BY_FLAG)}, got {shorten(name)!r}")
        found = {BY_FLAG[name]: _reducer(name, compressors.get(name)) for name, value in flags.items() if _is_on(value)}
        return cls(reducers={each: reducer for each, reducer in found.items() if reducer is not None})

    @property
    def watches(self) -> list[str]:
        """Texts of watches."""
        return [f"{each.sites} & forward | {reducer} | {PHASE}" for each, reducer in self.reducers.items()]


def _is_on(value: object) -> bool:
    return value is True or (isinstance(value, str) and value.lower() == "true")


def _reducer(flag: str, config: object) -> Reducer | None:
    """None: nothing is kept, which is what these tracers do without a word of a compressor."""
    config = {} if config is None else config
    if not isinstance(config, Mapping):
        raise BadMessage(f"{flag}: expected compressor_type and compressor_configs")
    kind, options = config.get("compressor_type", "Empty"), config.get("compressor_configs") or {}
    if not isinstance(options, Mapping):
        raise BadMessage(f"{flag}: expected compressor_configs as an object")
    try:
        if kind == "Tile":
            return _tiles(flag, options)
        if kind == "NoOp":
            return Full()
        if kind == "Projection":
            return Project(str(options.get("vector_path", "")))
    except UserError as error:
        raise BadMessage(f"{flag}: {error}", ErrorCode.BAD_WATCH) from error
    if kind == "Empty":
        return None
    raise BadMessage(f"{flag}: expected the compressor Tile, NoOp, Empty or Projection, got {shorten(str(kind))!r}")


def _tiles(flag: str, options: Mapping[str, Any]) -> Tiles:
    """Tiles are exact whatever the ranks have, so that what each rank shall do first (`*_one_rank`) has no effect."""
    tiles, methods = options.get("tiles", NUM_TILES), []
    for name in ("method", "method_one_rank"):
        method = options.get(name, "data.mean(dim=-1)")
        if not isinstance(method, str) or method not in METHODS:
            raise BadMessage(
                f"{flag}: {name}: expected one of these texts: {'; '.join(METHODS)}; got {shorten(str(method))!r}",
                ErrorCode.BAD_WATCH,
            )
        methods.append(METHODS[method])
    if type(tiles) is not int:
        raise BadMessage(f"{flag}: tiles: expected a whole number, got {shorten(str(tiles))!r}", ErrorCode.BAD_WATCH)
    return Tiles(tiles, methods[0])  # type: ignore[arg-type]
