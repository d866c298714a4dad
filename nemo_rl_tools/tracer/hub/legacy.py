"""`LegacyViewer`: the text protocol of older public tensor tracers, at `/legacy`, where a recipe asks for it.

    run_training_step    sets the watches (`read_request`)        -> start {micro_batch_size, seq_length, num_layers}
    frames of these      by layer, numbers row by row             -> update {update_type, layer_id, args, result}

The numbers are `[B, S, n]`: rows of the step, tokens of a row one after the other, null beyond its end and for what is
not finite; several sites of one flag come together, feature behind feature. `InputTokens` has two numbers per token,
its id and its position in the row, as layer 0, and is never compressed. Invariant: a viewer here is a controller
like any other: it has its token, its bounds and its one place.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
from websockets.asyncio.server import ServerConnection
from websockets.exceptions import ConnectionClosed

from nemo_rl.errors import UserError, shorten
from nemo_rl.records.sites import Direction, SiteKind
from nemo_rl.tracer.frame import Frame, FrameTable, decode
from nemo_rl.tracer.protocol import BadMessage, ErrorCode, HubLimits, Role, dump
from nemo_rl.tracer.reducer import Full, Project, Reducer, Tiles
from nemo_rl.tracer.watch import BY_FLAG, Classical
from nemo_rl_tools.tracer.hub.history import Kept
from nemo_rl_tools.tracer.hub.hub import Hub
from nemo_rl_tools.tracer.hub.sessions import Sessions, refuse
from nemo_rl_tools.tracer.hub.viewer import Viewer

__all__ = ["LEGACY_PATH", "PHASE", "serve_legacy"]

PHASE = "train"
"""The tracers show the forward passes of training steps."""
NUM_TILES = 96
"""Tiles of a message that gives no number."""
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


CLASS_NAME = "Compressor"
"""End of a compressor's name as the public page sends it: `TileCompressor`."""
INPUT_TOKENS = Classical(switch="", flag="InputTokens", update_type=8, sites=SiteKind.TOKENS.value)
"""Tokens and their positions; no switch of a recipe, since every frame has them in its table."""
FLAGS: Mapping[str, Classical] = {**BY_FLAG, INPUT_TOKENS.flag: INPUT_TOKENS}


def read_request(message: Mapping[str, Any]) -> dict[Classical, Reducer]:
    """Return what a message asks for.

    Raises:
        BadMessage: a flag, compressor or method that is not known.
    """
    flags, compressors = message.get("visualization_flags"), message.get("compressor_config", {})
    if not isinstance(flags, Mapping) or not isinstance(compressors, Mapping):
        raise BadMessage("expected 'visualization_flags' and 'compressor_config' as objects")
    for name in (*flags, *compressors):
        if name not in FLAGS:
            raise BadMessage(f"expected flags among {', '.join(FLAGS)}, got {shorten(name)!r}")
    chosen = [name for name, value in flags.items() if str(value).lower() == "true"]
    found = {FLAGS[name]: _reducer(name, compressors.get(name)) for name in chosen}
    return {each: reducer for each, reducer in found.items() if reducer is not None}


def _reducer(flag: str, config: object) -> Reducer | None:
    """Return the reducer, or None for a compressor of another name: these tracers then keep nothing, silently."""
    config = {} if config is None else config
    if not isinstance(config, Mapping):
        raise BadMessage(f"{flag}: expected compressor_type and compressor_configs")
    kind, options = config.get("compressor_type", "Empty"), config.get("compressor_configs") or {}
    if not isinstance(options, Mapping):
        raise BadMessage(f"{flag}: expected compressor_configs as an object")
    if FLAGS[flag] is INPUT_TOKENS:
        return Full()
    kind = kind.removesuffix(CLASS_NAME) if isinstance(kind, str) else kind
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
    raise BadMessage(
        f"{flag}: expected the compressor Tile, NoOp, Empty or Projection, or its class such as TileCompressor, got "
        f"{shorten(str(kind))!r}"
    )


def _tiles(flag: str, options: Mapping[str, Any]) -> Tiles:
    """Return tiles, which are exact whatever the ranks have, so that what each rank shall do first (`*_one_rank`)
    has no effect."""
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


LEGACY_PATH = "/legacy"
MAX_NUMBERS = 1 << 20
"""Most numbers of one update: about 20 MB of text."""
NUM_LAYERS = ("num_layers", "num_hidden_layers")
"""Names of the number of layers in what is known of a model."""


class LegacyViewer(Viewer):
    """Gets frames as `update` messages and nothing else of what viewers get."""

    def __init__(self, connection: ServerConnection, limits: HubLimits, hub: Hub) -> None:
        super().__init__(connection, Role.CONTROLLER, limits)
        self._hub = hub
        self._request: Mapping[Classical, Reducer] = {}
        self._last: dict[str, np.ndarray] = {}
        """Numbers of the sites of one flag that have come so far."""
        self._last_of: tuple[object, ...] = ()
        self._shape = (0, 0)
        self._started: str | None = None

    def message(self, text: str) -> None:
        """Ignore a message for other viewers, which has no counterpart in this protocol."""

    def say(self, message: Mapping[str, object]) -> None:
        super().message(dump(message))

    def refused(self, error: BadMessage) -> None:
        self.say({"type": "error", "code": error.code.value, "text": str(error)})

    def ask(self, request: Mapping[Classical, Reducer]) -> None:
        self._request, self._started = request, dump(self._start())
        super().message(self._started)

    def frame(self, kept: Kept) -> None:
        if self._flag(kept) is not None:
            super().frame(kept)

    def _flag(self, kept: Kept) -> Classical | None:
        where = kept.where
        if where.phase != PHASE or where.site.direction is not Direction.FORWARD or where.site.is_recomputed:
            return None
        for flag, reducer in self._request.items():
            if where.site.kind.value in _kinds(flag) and reducer == where.reducer:
                return flag
        return None

    async def _send_stats(self) -> None:
        """Ignore a change that this protocol cannot show."""

    async def _send_frame(self, kept: Kept, has: OrderedDict[tuple[str, str], None]) -> None:
        flag = self._flag(kept)
        if flag is None or kept.table is None:
            return
        numbers = await asyncio.to_thread(_numbers, kept, with_positions=flag is INPUT_TOKENS)
        at, kind = (kept.where.step, kept.where.update, kept.where.site.layer, flag), kept.where.site.kind.value
        if self._last_of != at:
            self._last, self._last_of = {}, at
        self._last[kind] = numbers
        if kind != _kinds(flag)[-1]:
            return
        together = np.concatenate([self._last[each] for each in _kinds(flag) if each in self._last], axis=-1)
        self._last = {}
        self._shape = (together.shape[0], together.shape[1])
        if (start := dump(self._start())) != self._started:
            # The shape is known now, and is sent before the numbers.
            self._started = start
            await self._send(start)
        if together.size > MAX_NUMBERS:
            text = f"{flag.flag}: {together.size} numbers are more than {MAX_NUMBERS}; choose a smaller compressor"
            await self._send(dump({"type": "error", "text": text}))
            return
        layer = kept.where.site.layer
        await self._send(await asyncio.to_thread(_update, flag, 0 if layer is None else layer + 1, together))
        self.num_sent += 1

    def _start(self) -> Mapping[str, object]:
        models = [facts.model for facts in self._hub.runs.values()]
        found = [model[name] for model in reversed(models) for name in NUM_LAYERS if type(model.get(name)) is int]
        layers = found[0] if found else 0
        rows, tokens = self._shape
        return {"type": "start", "micro_batch_size": rows, "seq_length": tokens, "num_layers": layers}


async def serve_legacy(connection: ServerConnection, hub: Hub, sessions: Sessions) -> None:
    """Serve one viewer until the connection ends; its token was checked before."""
    viewer = LegacyViewer(connection, hub.limits, hub)
    with suppress(ConnectionClosed):
        try:
            await sessions.serve_viewer(viewer, partial(_hear, viewer, sessions))
        except BadMessage as error:
            await refuse(connection, error.code, str(error))


def _hear(viewer: LegacyViewer, sessions: Sessions, said: Mapping[str, Any]) -> None:
    if said["type"] == "ping":
        viewer.say({"type": "pong"})
        return
    if said["type"] != "run_training_step":
        raise BadMessage(f"type: expected run_training_step, got {said['type'][:40]!r}")
    if sessions.controller is not viewer:
        raise BadMessage("another controller has taken over")
    request = read_request(said)
    sessions.watch([f"{each.sites} & forward | {reducer} | {PHASE}" for each, reducer in request.items()])
    viewer.ask(request)


def _kinds(flag: Classical) -> list[str]:
    return [kind.strip() for kind in flag.sites.split(",")]


def _numbers(kept: Kept, *, with_positions: bool) -> np.ndarray:
    """Return `[B, S, n]` float64, NaN where a row has no token; with positions as the last of n."""
    assert kept.table is not None, "has one"
    frame, table = decode(kept.message), decode(kept.table.message)
    assert isinstance(frame, Frame) and isinstance(table, FrameTable), "as the hub has made them"
    row_R = table.tokens[0]
    lengths = np.bincount(row_R, minlength=len(table.keys)) if len(row_R) else np.zeros(0, np.int64)
    # Rows follow each other, so that a token's place is how far it is behind the first of its row.
    place_R = np.arange(len(row_R)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    payload = frame.payload.reshape(len(row_R), -1)
    if with_positions:
        payload = np.concatenate([payload, table.tokens[1][:, None].astype(payload.dtype)], axis=1)
    numbers = np.full((len(lengths), int(lengths.max(initial=0)), payload.shape[1]), np.nan)
    numbers[row_R, place_R] = payload
    return numbers


def _update(flag: Classical, layer: int, numbers: np.ndarray) -> str:
    """Return the message; layers count from 1, and 0 stands before them."""
    flat = numbers.reshape(-1)
    finite = np.isfinite(flat)
    result = [value if good else None for value, good in zip(flat.tolist(), finite.tolist(), strict=True)]
    return dump(
        {
            "type": "update",
            "update_type": flag.update_type,
            "layer_id": layer,
            "args": list(numbers.shape),
            "result": result,
        }
    )
