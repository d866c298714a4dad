"""`SleepEngine`: it waits as long as a GPU would decode, for tests and benchmarks of what surrounds engines.

Named in a recipe as `policy.generation.backend: benchmarks.sleep_engine:build_sleep_engine`, with
`SleepOptions` as `policy.generation.options` and `policy.generation.receipt.enabled=false`: it keeps no weights, only
their version. Rows join, leave and wait in the batch of `ContinuousDecoding`, as those of the embedded engine do.
Invariant: tokens and length of a row are a function of its seed and its prompt.
"""

from __future__ import annotations

import heapq
import math
import random
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch

from nemo_rl.errors import ConfigError
from nemo_rl.models.generation.continuous import ContinuousDecoding
from nemo_rl.models.generation.interfaces import (
    EngineSpec,
    GenerationInterface,
    GenerationOutput,
    GenerationRequest,
    GroupSamples,
)
from nemo_rl.models.generation.requests import RowRequest, rows_of
from nemo_rl.models.generation.turn_batch import NAMED, ContinuousSpec, TurnBatch, TurnRow
from nemo_rl.models.weight_sync.buckets import RefitPlan, WeightSlot, free_bytes
from nemo_rl.models.weight_sync.target import RefitTarget
from nemo_rl.models.weight_sync.transport import IpcHandle, RefitGroup, RefitGroupSpec, device_id

__all__ = ["SleepEngine", "SleepOptions", "VirtualClock", "build_sleep_engine"]

TAIL_Z = 3.0902
"""Standard deviations of a normal distribution up to its quantile .999."""
KEY = "policy.generation.options"


class SleepClock:
    """The time that an engine spends; here the machine's own."""

    def now(self) -> float:
        """Return seconds."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Return when these seconds have passed."""
        time.sleep(seconds)


class VirtualClock(SleepClock):
    """A time that passes only where an engine sleeps."""

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        self._now += seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class SleepOptions:
    """Lengths of rows and the speed of decoding.

    Example:
        >>> options = SleepOptions(median_tokens=10.0, tail_ratio=30.0)
        >>> options.length_of(7) == options.length_of(7), SleepOptions(lengths="3 5").length_of(7)
        (True, 5)
    """

    median_tokens: float = 20.0
    """Lengths are log-normal with this median."""
    tail_ratio: float = 30.0
    """Length that one row of a thousand exceeds, in medians; 1: all rows are as long as the median."""
    lengths: str = ""
    """Lengths of rows in tokens, with blanks between them, in place of random ones: a row has that at its seed, modulo
    their number."""
    endless_share: float = 0.0
    """Share of the rows that never end."""
    tokens_per_s: float = 100.0
    """Tokens of one row in a second, whatever else is decoded beside it."""
    refit_s: float = 0.0
    """Time that a refit takes."""
    real_time: bool = True
    """False: time passes on a `VirtualClock`."""

    def __post_init__(self) -> None:
        for name, value in (("median_tokens", self.median_tokens), ("tokens_per_s", self.tokens_per_s)):
            if not 0.0 < value < math.inf:
                raise ConfigError(f"{KEY}.{name}: expected a number above 0, got {value}")
        if not 1.0 <= self.tail_ratio < math.inf:
            raise ConfigError(f"{KEY}.tail_ratio: expected a number of at least 1, got {self.tail_ratio}")

    @classmethod
    def of(cls, options: Mapping[str, str | int | float | bool | None]) -> SleepOptions:
        """Return the options of a recipe.

        Raises:
            ConfigError: one is unknown, or of another type.
        """
        known = {each.name: type(each.default) for each in fields(cls)}
        found: dict[str, object] = {}
        for name, value in options.items():
            if name not in known:
                raise ConfigError(f"{KEY}.{name}: unknown; SleepEngine knows {', '.join(known)}")
            kinds = (int, float) if known[name] is float else (known[name],)
            if not isinstance(value, kinds) or (isinstance(value, bool) and known[name] is not bool):
                raise ConfigError(f"{KEY}.{name}: expected a value of type {known[name].__name__}, got {value!r}")
            found[name] = value
        return cls(**found)  # type: ignore[arg-type]

    def length_of(self, seed: int) -> float:
        """Return the tokens of a row; infinite for one without an end."""
        draws = random.Random(f"length:{seed}")
        if draws.random() < self.endless_share:
            return math.inf
        if self.lengths:
            given = self.lengths.split()
            return int(given[seed % len(given)])
        sigma = math.log(self.tail_ratio) / TAIL_Z
        return max(1, round(self.median_tokens * math.exp(sigma * draws.gauss(0.0, 1.0))))


@dataclass(frozen=True, kw_only=True, slots=True)
class _SleepingRow:
    request: RowRequest
    length: float
    """Tokens in all."""
    joined_at: int
    """Turns of its lane's clock before its first token."""


class SleepBatch(TurnBatch):
    """The `TurnBatch` of a `SleepEngine`: a turn is a sleep, after which the rows whose last token it was have ended.

    Rows with names, which a refit makes stand still, have their own count of turns.
    """

    def __init__(self, options: SleepOptions, clock: SleepClock, *, max_total_length: int) -> None:
        self._options, self._clock, self._max_total_length = options, clock, max_total_length
        self._turns = {True: 0, False: 0}
        self._ends: dict[bool, list[tuple[float, int]]] = {True: [], False: []}
        """Heaps of the turn that ends a row and its key, by whether rows have names."""
        self._rows: dict[int, _SleepingRow] = {}
        """Live and ended rows by key."""
        self._live: dict[int, bool] = {}
        """Key of a live row -> whether it has a name."""
        self._ends_at_s = clock.now()
        """Time at which the last turn ended, or would have ended on a GPU."""

    def restart(self) -> None:
        """The next turn begins now."""
        self._ends_at_s = self._clock.now()

    def rows_of(self, request: GenerationRequest) -> list[RowRequest]:
        if request.with_routes or request.with_support:
            raise ConfigError(
                "policy.generation.backend: SleepEngine computes neither routes nor sampling masks; switch off what "
                "needs them (router replay, corrections of top-k and top-p)"
            )
        return rows_of(request, max_total_length=self._max_total_length)

    def join(self, rows: Sequence[TurnRow]) -> None:
        if not self._live:
            self.restart()
        for each in rows:
            is_named, forced = each.lane == NAMED, each.row.forced
            length = self._options.length_of(each.row.seed) if forced is None else len(forced)
            self._rows[each.key] = _SleepingRow(request=each.row, length=length, joined_at=self._turns[is_named])
            self._live[each.key] = is_named
            # A row without an end is not cut either, as one that the engine has lost sight of.
            last = length if math.isinf(length) else min(length, each.row.max_new_tokens)
            heapq.heappush(self._ends[is_named], (self._turns[is_named] + last, each.key))

    def turn(self, *, with_named: bool) -> Collection[int]:
        self._sleep()
        ended: list[int] = []
        for is_named in (True, False) if with_named else (False,):
            self._turns[is_named] += 1
            ends = self._ends[is_named]
            while ends and ends[0][0] <= self._turns[is_named]:
                _, key = heapq.heappop(ends)
                if self._live.pop(key, None) is not None:
                    ended.append(key)
        return ended

    def recompute(self) -> None:
        """Do nothing: there is no cache, and the time is that of the refit."""

    def lengths(self) -> Mapping[int, int]:
        return {key: self._turns[is_named] - self._rows[key].joined_at for key, is_named in self._live.items()}

    def take(self, request: GenerationRequest, keys: Sequence[int]) -> GenerationOutput:
        rows = [self._rows.pop(key) for key in keys]
        tokens = [self._tokens(row, request) for row in rows]
        return GenerationOutput(
            token_ids=torch.tensor([token for row in tokens for token in row], dtype=torch.int32),
            logprobs=torch.full((sum(map(len, tokens)),), -1.0),
            lengths=torch.tensor([len(row) for row in tokens], dtype=torch.int64),
            truncated=torch.tensor([row.length > row.request.max_new_tokens for row in rows], dtype=torch.bool),
            weight_version=0,
        )

    def drop(self, keys: Collection[int]) -> None:
        for key in keys:
            self._rows.pop(key, None)
            self._live.pop(key, None)

    def _sleep(self) -> None:
        """Sleep until the turn would end on a GPU, whose turns follow each other at once while there are rows."""
        self._ends_at_s += 1.0 / self._options.tokens_per_s
        self._clock.sleep(max(0.0, self._ends_at_s - self._clock.now()))

    def _tokens(self, row: _SleepingRow, request: GenerationRequest) -> Sequence[int]:
        """Return tokens of the row's own prompt in a random order, with a stop token where it has ended."""
        given, stops = row.request, request.sampling.stop_token_ids
        if given.forced is not None:
            return given.forced
        count = int(min(row.length, given.max_new_tokens))
        known = [token for token in given.prompt if token not in stops] or list(given.prompt)
        tokens = random.Random(f"tokens:{given.seed}").choices(known, k=count)
        if stops and row.length <= given.max_new_tokens:
            tokens[-1] = stops[0]
        return tokens


class SleepEngine(RefitTarget, GenerationInterface):
    """One replica.

    Args:
        clock: None: the one that the options name.
    """

    _decoding: ContinuousDecoding

    def __init__(self, spec: EngineSpec, *, clock: SleepClock | None = None) -> None:
        generation = spec.policy.generation
        self.options = SleepOptions.of(generation.options)
        self.clock = clock or (SleepClock() if self.options.real_time else VirtualClock())
        self._version = spec.weight_version
        self._num_missing = 0
        """Buckets of a refit that have not come."""
        self._buffer_bytes = 0
        self._group: RefitGroup | None = None
        self._batch = SleepBatch(self.options, self.clock, max_total_length=spec.policy.max_total_sequence_length)
        settings = ContinuousSpec.of(spec, places=generation.max_batch_size)
        self._decoding = ContinuousDecoding(self._batch, settings, version=lambda: self._version)

    @property
    def weight_version(self) -> int:
        return self._version

    def generate(self, request: GenerationRequest) -> GenerationOutput:
        return self._decoding.generate(request)

    def stream(self, request: GenerationRequest) -> Iterator[GroupSamples]:
        yield from self._decoding.stream(request)

    def prepare_for_generation(self) -> None:
        if self._decoding.is_frozen:
            self._batch.restart()
        self._decoding.thaw()

    def finish_generation(self) -> None:
        self._decoding.freeze()

    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]], *, version: int) -> int:
        for _ in weights:
            pass
        return self._hold(version)

    def shutdown(self) -> None:
        self._leave_refit_group()
        self._decoding.end(RuntimeError("this engine was shut down; build a new one"))

    def report_device_id(self) -> str:
        return device_id(torch.device("cpu"))

    def refit_free_bytes(self, *, on_device: bool) -> int:
        del on_device
        return free_bytes(torch.device("cpu"))

    def match_refit(self, offered: Mapping[str, tuple[int, ...]]) -> tuple[WeightSlot, ...]:
        return tuple(WeightSlot(name=name, dtype="float32", shape=shape) for name, shape in offered.items())

    def begin_refit(self, plan: RefitPlan, *, handles: Sequence[IpcHandle] = ()) -> None:
        del handles
        self._version, self._num_missing, self._buffer_bytes = -1, len(plan.buckets()), plan.buffer_bytes

    def load_bucket(self, bucket: np.ndarray | None = None) -> None:
        del bucket
        self._num_missing -= 1

    def join_refit_group(self, spec: RefitGroupSpec) -> None:
        self._leave_refit_group()
        self._group = RefitGroup(spec, device=torch.device("cpu"))

    def receive_weights(self) -> None:
        assert self._group is not None, "join_refit_group comes first"
        buffer = torch.empty(self._buffer_bytes, dtype=torch.uint8)
        while self._num_missing:
            self._group.receive(buffer)
            self._num_missing -= 1

    def finish_refit(self, *, version: int) -> int:
        assert self._num_missing == 0, f"{self._num_missing} buckets have not come"
        return self._hold(version)

    def fingerprints(self) -> Mapping[str, str]:
        raise ConfigError(
            "policy.generation.receipt.enabled: SleepEngine keeps no weights and can prove none; set it to false"
        )

    def _leave_refit_group(self) -> None:
        if self._group is not None:
            self._group.close()
        self._group = None

    def _hold(self, version: int) -> int:
        self.clock.sleep(self.options.refit_s)
        self._version = version
        return version


def build_sleep_engine(spec: EngineSpec) -> SleepEngine:
    """Start one replica."""
    return SleepEngine(spec)
