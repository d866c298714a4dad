"""The observations of all records: which token of which sample was in which slot, with which routes.

Called by `chain`. A `RolloutSample` is what the rollout recorded; an `Observation` is what a later
record saw. Shapes: T tokens of a sample, S slots of a record, L layers, K chosen experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, TypeAlias

import numpy as np

from nemo_rl.utils.r3_trace import token_digests
from nemo_rl_tools.route_chain.records import RecordError, Trace, TraceRecord, decode_array

__all__ = ["Hop", "Observation", "RolloutSample", "digest_of", "named_layers", "observe", "read_sample"]


class Hop(IntEnum):
    """A stage at which routes are seen, in causal order."""

    ROLLOUT = 0
    FETCH = 1
    SHARD = 2
    ASSIGNMENT = 3
    ACTION = 4
    FORWARD = 5
    RECOMPUTE = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutSample:
    """The routes of one sample as the rollout recorded them."""

    key: str
    layers: tuple[int, ...]
    """Numbers of its L layers in the model."""
    digests: np.ndarray
    """`[T, L]` int64."""
    tokens: np.ndarray
    """`[T]` int32."""
    ids: np.ndarray | None
    """`[T, L, K]` int32; None in a long record."""
    top_k: int
    highest: int
    """Largest id."""
    record: TraceRecord

    @property
    def is_missing(self) -> np.ndarray:
        """`[T, L]` bool: tokens without a route."""
        return self.digests == digest_of([-1] * self.top_k)

    def columns(self, layers: Sequence[int]) -> list[int]:
        """Column of each layer; -1 for one that the rollout does not know."""
        return [self.layers.index(layer) if layer in self.layers else -1 for layer in layers]


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """The routes that one record saw."""

    hop: Hop
    record: TraceRecord
    stage: str
    step: int
    microbatch: int | None
    keys: tuple[str, ...]
    """Samples with a slot here."""
    key_index: np.ndarray
    """`[S]` int64: index into `keys`; -1 for padding."""
    positions: np.ndarray
    """`[S]` int64: place of the token in its sample."""
    layers: tuple[int, ...]
    digests: np.ndarray
    """`[S, L]` int64."""
    tokens: np.ndarray | None
    """`[S]` int32, when the record has them."""
    ids: np.ndarray | None
    """`[S, L, K]` int32; None in a long record."""
    lowest: int
    highest: int

    @property
    def coords(self) -> Mapping[str, int]:
        """Coordinates of the rank on the parallel axes; empty for a fetch."""
        coords = self.record.fields.get("coords")
        return coords if isinstance(coords, dict) else {}


def digest_of(ids: Sequence[int]) -> int:
    return int(token_digests(np.array(ids, dtype=np.int64)[None, None])[0, 0])


def named_layers(trace: Trace) -> tuple[int, ...]:
    """Return all layers that the records of routers name, ascending: those of a payload that does not name its own."""
    named = {record.fields.get("layer_number") for record in trace.of("router_replay_assignment")}
    return tuple(sorted(layer for layer in named if isinstance(layer, int)))


def read_sample(record: TraceRecord, named: tuple[int, ...]) -> RolloutSample | None:
    """Return the sample of a record of whole samples; None when it holds no routes.

    Args:
        named: layers of a record that names none.

    Raises:
        RecordError: the record is malformed.
    """
    if "digests" not in record.fields:
        return None
    key, where = record.get("key", str), record.where
    digests = decode_array(record.fields["digests"], where)
    tensor = record.get("routed_experts", dict)
    shape, layers = tensor.get("valid_shape"), record.fields.get("layers")
    if not isinstance(shape, list) or len(shape) != 3 or digests.shape != tuple(shape[:2]):
        raise RecordError(f"{where}: digests {list(digests.shape)} do not fit routes of shape {shape!r}")
    if layers is None:
        layers = list(named) if len(named) == shape[1] else list(range(shape[1]))
    _check_layers(layers, shape[1], where)
    tokens = decode_array(record.get("input_ids", dict).get("values"), where)
    if len(tokens) != len(digests):
        raise RecordError(f"{where}: {key} has {len(tokens)} tokens, but routes of {len(digests)}")
    return RolloutSample(
        key=key,
        layers=tuple(layers),
        digests=digests,
        tokens=tokens,
        ids=_ids(record),
        top_k=int(shape[2]),
        highest=int(tensor.get("max", -1)),
        record=record,
    )


def observe(trace: Trace, damaged: list[str]) -> Iterator[Observation]:
    """Yield the observations of the workers, process by process; malformed ones go to `damaged`."""
    shards: dict[tuple[str, ...], Observation] = {}
    named = named_layers(trace)
    for record in trace.of(*_HOPS):
        try:
            is_fetch = record.event == "tq_fetch_sample"
            seen = _fetched(record, named) if is_fetch else _slots(record, shards)
        except (TypeError, ValueError) as error:
            damaged.append(str(error) if isinstance(error, RecordError) else f"{record.where}: malformed ({error})")
            continue
        if seen is None:
            continue
        if seen.hop is Hop.SHARD:
            shards[_pass_of(record)] = seen
        yield seen


_HOPS = {
    "tq_fetch_sample": Hop.FETCH,
    "cp_routed_experts": Hop.SHARD,
    "router_replay_assignment": Hop.ASSIGNMENT,
    "router_replay_action": Hop.ACTION,
    "router_replay_forward_verify": Hop.FORWARD,
}


def _fetched(record: TraceRecord, named: tuple[int, ...]) -> Observation | None:
    sample = read_sample(record, named)
    if sample is None:
        return None
    tensor = record.get("routed_experts", dict)
    num = len(sample.digests)
    return Observation(
        hop=Hop.FETCH,
        record=record,
        stage=record.get("stage", str),
        step=record.get("trace_step", int),
        microbatch=None,
        keys=(sample.key,),
        key_index=np.zeros(num, dtype=np.int64),
        positions=np.arange(num),
        layers=sample.layers,
        digests=sample.digests,
        tokens=sample.tokens,
        ids=sample.ids,
        lowest=int(tensor.get("min", -1)),
        highest=sample.highest,
    )


def _slots(record: TraceRecord, shards: Mapping[tuple[str, ...], Observation]) -> Observation | None:
    if "digests" not in record.fields:
        return None  # its own action without routes
    hop = _HOPS[record.event]
    if hop is Hop.FORWARD and record.fields["action"] == "replay_backward":
        hop = Hop.RECOMPUTE
    digests = decode_array(record.fields["digests"], record.where)
    if digests.ndim != 2:
        raise RecordError(f"{record.where}: expected digests of slots and layers, got {list(digests.shape)}")
    layers = record.get("layers", list) if hop is Hop.SHARD else [record.get("layer_number", int)]
    _check_layers(layers, digests.shape[1], record.where)
    tensor = record.get("actual" if record.event == "router_replay_forward_verify" else "tensor", dict)
    found = record.fields.get("input_ids")
    tokens = decode_array(found.get("values"), record.where) if isinstance(found, dict) else None
    keys, key_index, positions = _places(record, shards, num=len(digests))
    if len(positions) != len(digests) or (tokens is not None and len(tokens) != len(digests)):
        raise RecordError(f"{record.where}: {len(positions)} slots are named, routes of {len(digests)} are there")
    return Observation(
        hop=hop,
        record=record,
        stage=record.get("stage", str),
        step=record.get("trace_step", int),
        microbatch=record.get("microbatch_idx", int),
        keys=keys,
        key_index=key_index,
        positions=positions,
        layers=tuple(layers),
        digests=digests,
        tokens=tokens,
        ids=_ids(record),
        lowest=int(tensor.get("min", -1)),
        highest=int(tensor.get("max", -1)),
    )


Places: TypeAlias = tuple[tuple[str, ...], np.ndarray, np.ndarray]
"""The keys of an observation, and for each slot the index of its key and its position."""


def _places(record: TraceRecord, shards: Mapping[tuple[str, ...], Observation], *, num: int) -> Places:
    """Return the places of the slots, which the record names itself or takes from those of its shard."""
    if record.fields.get("token_identity") is not None:
        return _expand(record.get("token_identity", list), record.where)
    shard = shards.get(_pass_of(record))
    if shard is None:
        raise RecordError(f"{record.where}: names no slots, and no cp_routed_experts record precedes it")
    first = record.get("first_slot", int)
    return shard.keys, shard.key_index[first : first + num], shard.positions[first : first + num]


def _expand(runs: Sequence[Any], where: str) -> Places:
    numbers: dict[str, int] = {}
    key_index, positions = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
    for run in runs:
        try:
            key, start, length = run
            index = -1 if key is None else numbers.setdefault(str(key), len(numbers))
            positions.append(np.arange(int(start), int(start) + int(length)))
        except (TypeError, ValueError) as error:
            raise RecordError(f"{where}: expected (key, first position, tokens), got {run!r}") from error
        key_index.append(np.full(len(positions[-1]), index))
    return tuple(numbers), np.concatenate(key_index), np.concatenate(positions)


def _check_layers(layers: object, num: int, where: str) -> None:
    if not isinstance(layers, list) or len(layers) != num or not all(isinstance(layer, int) for layer in layers):
        raise RecordError(f"{where}: expected the numbers of {num} layers, got {layers!r}")


def _pass_of(record: TraceRecord) -> tuple[str, ...]:
    return (record.process, *(str(record.fields.get(name)) for name in ("stage", "trace_step", "microbatch_idx")))


def _ids(record: TraceRecord) -> np.ndarray | None:
    return decode_array(record.fields["ids"], record.where) if "ids" in record.fields else None
