"""Stand-ins for thousands of workers in one process, which answer the driver's requests as the real ones do.

Used by `scale` and by tests that count calls. A request is pickled as Ray would pickle it and every answer is unpickled
on the driver's side, so that this work is the driver's; making the answers is the workers', and is counted apart.
Invariant: every request to every rank is counted by its kind of worker and its method.
"""

from __future__ import annotations

import pickle
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Any, TypeVar, cast

import numpy as np
import torch

from benchmarks.packing_lengths import draw_lengths
from nemo_rl.data_plane.client.operation_counts import OperationCount, Totals
from nemo_rl.data_plane.column_io import kv_first_write
from nemo_rl.data_plane.interfaces import DataPlaneClient, KVBatchMeta
from nemo_rl.data_plane.keys import keys_of_groups
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.worker_groups import Call, Pending, Request, WorkerFleet, WorkerGroup
from nemo_rl.experience.payload import SampleStats
from nemo_rl.experience.rollout_records import WEIGHT_VERSION, GroupRequest, RolloutInfo, RolloutResult
from nemo_rl.models.generation.interfaces import EngineLoad
from nemo_rl.models.policy.interfaces import TrainResult
from nemo_rl.models.weight_sync.buckets import WeightSlot
from nemo_rl.models.weight_sync.receipt import Answer, Probe, ScoredProbe, Sent
from nemo_rl.models.weight_sync.target import AcceptedRefit
from nemo_rl.models.weight_sync.transport import ChannelOffer, ChannelSpec
from nemo_rl.utils.metrics import Max, Mean, Reduction

__all__ = ["Actors", "Engine", "PolicyRank", "Rollout", "rolled_rows"]

_T = TypeVar("_T")

NUM_WEIGHTS = 400
"""Weights of a decoder of about 40 layers."""
FREE_BYTES = 1 << 36
METRICS = ("loss", "actor_loss", "policy_kl", "clip_share", "importance_ratio", "importance_ratio_squared", "entropy")
GB = 1 << 30


@dataclass(slots=True)
class Actors:
    """What the driver asks of all workers, and the time that is not the driver's."""

    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(kind of worker, method) -> requests."""
    results: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(kind of worker, method) -> results of streams."""
    sent_bytes: int = 0
    num_packed: int = 0
    """Messages that were made: one per request, whoever gets it."""
    aside_s: float = 0.0
    """Processor seconds in which workers were played."""
    aside_wall_s: float = 0.0
    _lock: Lock = field(default_factory=Lock)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Count the block as work of a worker."""
        began, began_wall = time.thread_time(), time.perf_counter()
        try:
            yield
        finally:
            with self._lock:
                self.aside_s += time.thread_time() - began
                self.aside_wall_s += time.perf_counter() - began_wall

    def group(self, kind: str, answers: Callable[[int], object], *, size: int = 1, first: int = 0) -> WorkerGroup:
        """Return a group of so many workers, each made by `answers(rank)`."""
        return _Group(self, kind, [answers(rank) for rank in range(first, first + size)])

    def fleet(self, kind: str, answers: Callable[[int], object], *, size: int) -> WorkerFleet:
        return WorkerFleet([self.group(kind, answers, first=number) for number in range(size)])

    def num_calls(self, kind: str) -> int:
        return sum(count for (asked, _), count in self.calls.items() if asked == kind)

    def pack(self, arguments: Mapping[str, object]) -> bytes:
        """Return the message of a request, as Ray's groups make it, and count it."""
        self.num_packed += 1
        return pickle.dumps(dict(arguments))

    def clear(self) -> None:
        self.calls.clear()
        self.results.clear()
        self.sent_bytes = self.num_packed = 0


class _Group(WorkerGroup):
    """Workers of one kind; a call is done when `submit` returns, and its answers are unpickled when they are asked
    for."""

    def __init__(self, actors: Actors, kind: str, workers: list[object]) -> None:
        self.world_size = len(workers)
        self._actors, self._kind, self._workers = actors, kind, workers

    def submit(self, call: Call[_T]) -> Pending[list[_T]]:
        ranks = range(self.world_size) if call.ranks is None else call.ranks
        requests = [self._sent(call, rank) for rank in ranks]
        with self._actors.aside():
            replies = [self._reply(rank, request) for rank, request in zip(ranks, requests, strict=True)]
        return Pending(lambda: [cast("_T", pickle.loads(reply)["value"]) for reply in replies])

    def stream(self, call: Call[Iterator[_T]]) -> Iterator[_T]:
        request = self._sent(call, 0)
        with self._actors.aside():
            replies = list(map(pickle.dumps, getattr(self._workers[0], request.method)(**request.arguments)))
        for reply in replies:
            self._actors.results[self._kind, request.method] += 1
            yield pickle.loads(reply)

    def _sent(self, call: Call[Any], rank: int) -> Request[Any]:
        request = call.of_rank(rank)
        self._actors.calls[self._kind, request.method] += 1
        self._actors.sent_bytes += len(request.message(self._actors.pack))
        return request

    def _reply(self, rank: int, request: Request[Any]) -> bytes:
        value = getattr(self._workers[rank], request.method)(**request.arguments)
        return pickle.dumps({"ok": True, "warnings": [], "value": value})

    @property
    def is_local(self) -> bool:
        return False

    @property
    def is_running(self) -> bool:
        return True

    def shutdown(self) -> None:
        """Do nothing: there is no process."""

    def __reduce__(self) -> tuple[object, ...]:
        # A copy of the fleet goes to rollout workers: as small as Ray's handle of an actor.
        return str, (self._kind,)


class _Worker:
    """Answers None to every request that has no method of its own."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda **_: None


WEIGHTS = {f"model.layers.{number // 10}.part_{number % 10}.weight": (64, 64) for number in range(NUM_WEIGHTS)}
PRINTS = {name: f"{number:032x}" for number, name in enumerate(WEIGHTS)}
SLOTS = tuple(WeightSlot(name=name, dtype="bfloat16", shape=shape) for name, shape in WEIGHTS.items())


class PolicyRank(_Worker):
    """One rank of the policy."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def get_logprobs_presharded(self, meta: KVBatchMeta, **_: object) -> KVBatchMeta:
        return meta.with_fields(("prev_logprobs",), versions={"prev_logprobs": 1})

    get_reference_policy_logprobs_presharded = get_logprobs_presharded

    def train_presharded(self, meta: KVBatchMeta, **_: object) -> TrainResult:
        assert meta.pack is not None and meta.sequence_lengths is not None, "a part of a plan"
        numbers: dict[str, Reduction] = {name: Mean(1.0 + self.rank, 100.0) for name in METRICS}
        steps, count = len(meta.pack.steps), sum(meta.pack.steps)
        return TrainResult(
            loss=(0.1,) * steps,
            grad_norm=(1.0,) * steps,
            rank=self.rank,
            metrics=(numbers | {"longest": Max(float(count))},),
            microbatch_losses=(0.1,) * count,
            total_flops=1e15,
            theoretical_tflops=989.0,
            learning_rate=1e-6,
            num_tokens=sum(meta.sequence_lengths),
        )

    def memory_report(self) -> dict[str, int]:
        stages = ("train", "logprobs", "refit")
        return {f"{stage}_{what}": GB + self.rank for stage in stages for what in ("peak", "start", "end")}

    def data_plane_snapshot(self) -> Totals:
        found = Totals()
        for stage in ("prev_logprobs", "train"):
            for operation in ("fetch", "put"):
                found.add(stage, operation, OperationCount.of_call(3.0, error=None, payload_bytes=GB, meta_bytes=999))
        found.add_fields(dict.fromkeys(("input_ids", "token_mask", "prev_logprobs"), GB))
        return found

    def router_replay_metrics(self) -> dict[str, Reduction]:
        return {}

    def offer_refit(self, **_: object) -> tuple[dict[str, tuple[int, ...]], int]:
        return ({} if self.rank else dict(WEIGHTS)), FREE_BYTES

    def report_device_id(self) -> str:
        return f"GPU-policy-{self.rank}"

    def open_refit_store(self, **_: object) -> int:
        return 29500

    def begin_refit(self, **_: object) -> int:
        return 1

    def open_refit_channel(self, **_: object) -> ChannelOffer | None:
        if self.rank:
            return None
        spec = ChannelSpec(
            address="10.0.0.1",
            port=29501,
            token=b"t" * 32,
            num_buckets=1,
            slot_bytes=1 << 20,
            num_slots=2,
            path="/proc/1/fd/9",
            timeout_s=60.0,
        )
        return ChannelOffer(spec=spec, handle=None)

    def end_refit(self) -> Sent:
        return Sent(num_bytes=1 << 24, fingerprints={} if self.rank else PRINTS)

    def score_probe(self, probe: Probe, **_: object) -> ScoredProbe:
        return ScoredProbe(logprobs=() if self.rank else (-1.0,) * len(probe.token_ids), seconds=0.01)

    def is_saving(self) -> bool:
        return False


class Engine(_Worker):
    """One generation engine."""

    def __init__(self, number: int) -> None:
        self.number, self.version = number, -1

    def accept_refit(self, **_: object) -> AcceptedRefit:
        return AcceptedRefit(slots=SLOTS, free_bytes=FREE_BYTES, delta_base=self.version)

    def report_device_ids(self) -> tuple[str, ...]:
        return (f"GPU-engine-{self.number}",)

    def receive_refit(self, *, version: int, **_: object) -> int:
        self.version = version
        return version

    receive_buckets = read_buckets = receive_refit

    def answer_receipt(self, probe: Probe | None) -> Answer:
        if probe is None:
            return Answer(fingerprints=PRINTS, version=self.version)
        tokens = probe.token_ids
        return Answer(fingerprints=PRINTS, version=self.version, token_ids=tokens, logprobs=(-1.0,) * len(tokens))

    def take_load(self) -> EngineLoad:
        return EngineLoad(busy_s=1.0)


class Rollout(_Worker):
    """One rollout worker; its groups are there when they are asked for.

    Args:
        client: writes their rows.
        group_size: rows of a group.
        held: returns the version of the weights in the engines.
    """

    def __init__(self, client: DataPlaneClient, *, group_size: int, num_prompts: int, held: Callable[[], int]) -> None:
        self._client, self._size, self._num_prompts, self._held = client, group_size, num_prompts, held

    def describe(self) -> RolloutInfo:
        return RolloutInfo(num_train_prompts=(self._num_prompts,), num_val_prompts=0, num_skipped_prompts=0)

    def rollout(
        self, groups: list[GroupRequest], *, partition_id: str, **_: object
    ) -> Iterator[tuple[RolloutResult, ...]]:
        """Yield each group by itself, as engines end them."""
        keys = keys_of_groups([group.uid for group in groups], self._size)
        rows = rolled_rows(self._client, keys, partition_id=partition_id, version=self._held(), seed=groups[0].seed)
        for first in range(0, len(keys), self._size):
            yield (rows.select(range(first, first + self._size)).counted(),)

    def data_plane_snapshot(self) -> Totals:
        return Totals()


def rolled_rows(
    client: DataPlaneClient, keys: tuple[str, ...], *, partition_id: str, version: int, seed: int
) -> RolloutResult:
    """Write the rows of a rollout as a rollout worker does, with drawn lengths and rewards, and return them."""
    count, draws = len(keys), random.Random(seed)
    lengths = torch.tensor(draw_lengths("pile-up", count, seed=seed)) // 16 + 2
    width = int(lengths.max())
    rewards = np.asarray([float(draws.random() < 0.5) for _ in range(count)], dtype=np.float32)
    columns = BatchedDataDict(
        {
            "input_ids": torch.ones(count, width, dtype=torch.int32),
            "input_lengths": lengths.to(torch.int32),
            "token_mask": torch.arange(width) < lengths[:, None],
            "generation_logprobs": torch.zeros(count, width),
            "sample_mask": torch.ones(count),
        }
    )
    tags: list[Mapping[str, Any]] = [{"reward": float(reward), WEIGHT_VERSION: version} for reward in rewards]
    meta = kv_first_write(client, columns, keys, partition_id=partition_id, tags=tags)
    sample_stats = SampleStats(
        rewards=rewards, truncated=np.zeros(count, dtype=bool), response_lengths=lengths.numpy().astype(np.int32)
    )
    return RolloutResult(meta=replace(meta), sample_stats=sample_stats)
