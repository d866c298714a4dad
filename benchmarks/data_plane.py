"""How fast a GRPO batch goes from a producer process to a consumer process, ours and raw engines side by side.

    python benchmarks/data_plane.py [--quick] [--json FILE] [--turns N] [--only SESSION ...] [--without FEATURE]

All ways of a session run in one cluster, turn by turn, so that noise meets all of them alike; the first turn warms up
and is thrown away. Sessions: `tuned` (our environment for everybody: one thread, huge pages), `mooncake` (the same,
Mooncake underneath) and `default` (raw TransferQueue without our environment; reported, never held). The driver's part
of a step is that of `driver_step.py`, with its bounds. Exit code 1 when a bound of `data_plane_report.HOLDS` is missed
or an engine brought other rows than it got. `--without` switches a feature off, whose bounds are then missed. Sessions
that cannot run here, for want of Mooncake, are named and left out, with their bounds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

# A script's own folder is on the path, its package is not; Ray hands the path on to the workers.
sys.path.insert(0, str(Path(__file__).parents[1]))

import ray
from rich.console import Console

from benchmarks.common import check_figures, environment, figures_table, load_average, paired_ratio, write_json
from benchmarks.data_plane_batches import make_batch
from benchmarks.data_plane_peers import BatchSpec, Peer, Timing
from benchmarks.data_plane_report import HOLDS, Samples, holds_of, ways_table
from benchmarks.driver_step import DriverSample
from benchmarks.driver_step import figures_of as driver_figures
from benchmarks.driver_step import measure as measure_driver
from nemo_rl.config.data_plane import DataPlaneConfig, RayStoreConfig, TransferQueueConfig
from nemo_rl.data_plane.adapters.mooncake_master import check_installed
from nemo_rl.data_plane.factory import build_data_plane_client
from nemo_rl.data_plane.interfaces import DataPlaneClient
from nemo_rl.data_plane.store_kinds import transport_environment
from nemo_rl.distributed.own_ray import OwnRay
from nemo_rl.distributed.packing import plan_packs
from nemo_rl.errors import ResourceError

__all__ = ["BATCHES", "SESSIONS", "Options", "main", "measure", "not_here"]

TURNS, QUICK_TURNS = 15, 5
SMALL_TURNS = 3
"""Turns with the small batch for each with the large one: they are short, and vary more."""
WAIT_S = 300.0
DP_RANKS = 8
DRIVER_ROWS = 16384
TAG_COUNTS = (1024, 4096, 16384)
BLOCK_CURVE = (4 << 10, 12 << 10, 32 << 10, 128 << 10, 4 << 20)
"""Sizes of TransferQueue's blocks; the second is the default."""
WORKER_WAYS = ("shm", "ray_node")
"""Ways that are also timed as the workers use them: padded columns in, a padded batch out, log-probabilities back."""
CHECKED_WAYS = ("shm", "transfer_queue", "mooncake")
"""Ways that are timed with checksums and without."""
FEATURES = ("chunks", "blocks", "warm-memory", "frozen-startup")
OBJECT_STORE_BYTES = 3 << 30
TABLE_WIDTH = 190

BATCHES: Mapping[str, BatchSpec] = {
    "large": BatchSpec(routes=True, num_rows=256, longest=2048),
    "small": BatchSpec(routes=False, num_rows=256, longest=2048),
}
TQ_CONFIG = DataPlaneConfig(impl="transfer_queue")
MOONCAKE_TQ_CONFIG = DataPlaneConfig(impl="transfer_queue", backend="mooncake_cpu")
SESSIONS: Mapping[str, Mapping[str, DataPlaneConfig | None]] = {
    "tuned": {
        "memcpy": None,
        "raw_ray": None,
        "raw_transfer_queue": None,
        "raw_transfer_queue_ragged": None,
        "ray": DataPlaneConfig(impl="ray"),
        "ray_holder": DataPlaneConfig(impl="ray", ray=RayStoreConfig(owner="holder")),
        "ray_node": DataPlaneConfig(impl="ray", ray=RayStoreConfig(owner="node")),
        "shm": DataPlaneConfig(impl="shm"),
        "transfer_queue": TQ_CONFIG,
        # A cluster has one controller: this run is a guest of the one before.
        "transfer_queue_native": TQ_CONFIG.model_copy(
            update={"transfer_queue": TransferQueueConfig(layout="native", connect=True)}
        ),
    },
    "mooncake": {
        "raw_transfer_queue_mooncake": None,
        "raw_transfer_queue_mooncake_ragged": None,
        "transfer_queue_mooncake": MOONCAKE_TQ_CONFIG,
        "mooncake": DataPlaneConfig(impl="mooncake"),
    },
    "default": {"raw_transfer_queue_default": None},
}
"""Way -> our config, or None for a baseline."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What to run."""

    turns: int = TURNS
    sessions: tuple[str, ...] = tuple(SESSIONS)
    batches: tuple[str, ...] = tuple(BATCHES)
    without: str = ""
    """A feature of `FEATURES` that is switched off."""

    def configured(self, config: DataPlaneConfig) -> DataPlaneConfig:
        """Return the settings of a way without the feature."""
        if self.without == "chunks":
            size = {"chunk_bytes": 1}
            sections = {name: getattr(config, name).model_copy(update=size) for name in ("ray", "shm", "mooncake")}
            sections["simple"] = config.simple.model_copy(update={**size, "block_bytes": 1})
            return config.model_copy(update={**size, **sections})
        if self.without == "blocks":
            return with_blocks(config, 1 << 40)
        if self.without == "warm-memory":
            return config.model_copy(update={"shm": config.shm.model_copy(update={"keep_bytes": 1})})
        return config


def with_blocks(config: DataPlaneConfig, block_bytes: int) -> DataPlaneConfig:
    """Return the settings with blocks of another size."""
    return config.model_copy(update={"simple": config.simple.model_copy(update={"block_bytes": block_bytes})})


@dataclass(kw_only=True, slots=True)
class Results:
    """Raw samples, single figures and what went wrong."""

    samples: list[Samples] = field(default_factory=list)
    driver: list[DriverSample] = field(default_factory=list)
    raw: dict[str, list[float]] = field(default_factory=dict)
    num_bytes: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def of(self, batch: str, way: str) -> Samples | None:
        return next((one for one in self.samples if one.batch == batch and one.way == way), None)


def measure(options: Options) -> Results:
    """Runs the sessions one after the other."""
    results = Results()
    for session in options.sessions:
        for batch in options.batches:
            with _session(session, batch, options) as peers:
                _turns(peers, session, batch, options, results)
                if session == "tuned":
                    _single_questions(peers, batch, options, results)
    if "tuned" in options.sessions:
        results.driver = measure_driver(DRIVER_ROWS, frozen=options.without != "frozen-startup")
    return results


@dataclass(frozen=True, kw_only=True, slots=True)
class _Peers:
    producer: Any
    consumer: Any
    ways: tuple[str, ...]


@contextmanager
def _session(session: str, batch: str, options: Options) -> Iterator[_Peers]:
    """A Ray cluster with both peers and every data plane of the session."""
    variables = {"OMP_NUM_THREADS": "1"}
    if session != "default":
        for config in SESSIONS[session].values():
            variables |= transport_environment(config) if config is not None else {}
    with ExitStack() as stack:
        stack.enter_context(_exported(variables))
        # The Ray that a run starts: Ray's own default lets other processes starve its workers.
        stack.enter_context(OwnRay(num_cpus=8, object_store_bytes=OBJECT_STORE_BYTES))
        owners = {
            name: stack.enter_context(_owner(options.configured(config)))
            for name, config in SESSIONS[session].items()
            if config is not None
        }
        if session == "default":
            stack.enter_context(_plain_transfer_queue())
        actor_class = ray.remote(Peer).options(num_cpus=0)
        spec = replace(BATCHES[batch], is_cold=options.without == "warm-memory")
        producer, consumer = (actor_class.remote(spec) for _ in range(2))
        made = make_batch(routes=BATCHES[batch].routes, num_rows=1, longest=8)
        for name in SESSIONS[session]:
            owner = owners.get(name)
            if owner is not None:
                owner.register_partition("batch", made.fields, BATCHES[batch].num_rows, ["train"])
            address = None if owner is None else owner.address
            _wait([peer.setup.remote(name, address) for peer in (producer, consumer)])
        ways = list(SESSIONS[session])
        for name in CHECKED_WAYS:
            if name in owners:
                config = owners[name].address.config
                other = config.model_copy(update={"checksums": not config.has_checksums})
                ways.insert(ways.index(name) + 1, _other_checksums(name))
                _wait(
                    [
                        peer.with_settings.remote(name, ways[ways.index(name) + 1], other)
                        for peer in (producer, consumer)
                    ]
                )
        yield _Peers(producer=producer, consumer=consumer, ways=tuple(ways))


def _other_checksums(way: str) -> str:
    """Name of the way that checks its bytes where the way does not, and the other way round."""
    return f"{way}_checked" if way == "shm" else f"{way}_unchecked"


@contextmanager
def _exported(variables: Mapping[str, str]) -> Iterator[None]:
    """Ray's own processes inherit what they read at their start."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def _owner(config: DataPlaneConfig) -> Iterator[DataPlaneClient]:
    client = build_data_plane_client(config, run_id=f"bench-{uuid.uuid4().hex[:8]}")
    try:
        yield client
    finally:
        client.close()


@contextmanager
def _plain_transfer_queue() -> Iterator[None]:
    """TransferQueue as it comes."""
    import transfer_queue  # noqa: PLC0415 - only where it is measured

    transfer_queue.init()
    try:
        yield
    finally:
        transfer_queue.close()


def _wait(references: Any) -> Any:
    return ray.get(references, timeout=WAIT_S)


def _turns(peers: _Peers, session: str, batch: str, options: Options, results: Results) -> None:
    expected = _wait(peers.producer.describe.remote())
    results.num_bytes[batch] = expected["num_bytes"]
    found = {way: Samples(session=session, batch=batch, way=way) for way in peers.ways}
    turns = options.turns * (SMALL_TURNS if batch == "small" else 1)
    for turn in range(turns + 1):
        # A way gains from what the one before it has warmed.
        for way in peers.ways[:: 1 if turn % 2 else -1]:
            put: Timing = _wait(peers.producer.put.remote(way, turn))
            get: Timing = _wait(peers.consumer.get.remote(way, turn, put.result))
            _wait(peers.producer.clear.remote(way, turn))
            if way != "memcpy" and get.result != expected["sums"]:
                results.problems.append(f"{way}, {batch}: brought {get.result}, expected {expected['sums']}")
            if turn:
                found[way].put.append(put.seconds)
                found[way].get.append(get.seconds if way != "memcpy" else 0.0)
                found[way].parts.append({**put.parts, **_both(put, get)})
        for way in WORKER_WAYS if batch == "large" else ():
            if way in peers.ways:
                _worker_path(peers, way, turn, expected["sums"], results)
    results.samples += found.values()


def _worker_path(peers: _Peers, way: str, turn: int, expected: Mapping[str, float], results: Results) -> None:
    """Time a first write, a read and a write-back as the workers of a run do them."""
    put: Timing = _wait(peers.producer.put_padded.remote(way))
    get: Timing = _wait(peers.consumer.read_and_write_back.remote(way, turn, put.result))
    _wait(peers.producer.clear.remote(way, turn))
    if get.result != expected:
        results.problems.append(f"{way}, as a worker: brought {get.result}, expected {expected}")
    if turn:
        results.raw.setdefault(f"worker_{way}_s", []).append(put.seconds + get.seconds)


def _both(put: Timing, get: Timing) -> dict[str, float]:
    return {part: seconds + put.parts.get(part, 0.0) for part, seconds in get.parts.items()}


def _single_questions(peers: _Peers, batch: str, options: Options, results: Results) -> None:
    lengths = _wait(peers.producer.describe.remote())["lengths"]
    plan = plan_packs(lengths, capacity=16384, dp_world=DP_RANKS)
    shards = [list(plan.rows_of_rank(rank)) for rank in range(DP_RANKS)]
    for way in ("ray", "transfer_queue"):
        put: Timing = _wait(peers.producer.put.remote(way, 0))
        read = _wait(peers.consumer.read_shards.remote(way, put.result, shards))
        _wait(peers.producer.clear.remote(way, 0))
        results.raw[f"over_read_{way}_{batch}"] = [read["moved_bytes"] / read["asked_bytes"]]
    if batch == "small":
        _block_curve(peers, shards, options, results)
        for turn in range(options.turns):
            for fields in (1, 32):
                for way in ("ray", "transfer_queue"):
                    seconds = _wait(peers.producer.time_fields.remote(way, fields, 256, 16384, turn))
                    results.raw.setdefault(f"fields_{way}_{fields}", []).append(seconds)
            for num_keys in TAG_COUNTS:
                seconds = _wait(peers.producer.time_tags.remote("ray", num_keys, turn))
                results.raw.setdefault(f"scalar_tags_{_short(num_keys)}", []).append(seconds)


def _short(count: int) -> str:
    return f"{count >> 10}k" if count >= 1024 else str(count)


def _block_curve(peers: _Peers, shards: list[list[int]], options: Options, results: Results) -> None:
    """Time and bytes of the small batch against the size of blocks, read whole and as shards of 8 ranks."""
    ways = {size: f"transfer_queue_{size >> 10}k" for size in BLOCK_CURVE}
    for size, way in ways.items():
        config = with_blocks(TQ_CONFIG, size)
        _wait([peer.with_settings.remote("transfer_queue", way, config) for peer in (peers.producer, peers.consumer)])
    for turn in range(options.turns + 1):
        for size, way in ways.items():
            put: Timing = _wait(peers.producer.put.remote(way, turn))
            get: Timing = _wait(peers.consumer.get.remote(way, turn, put.result))
            read = _wait(peers.consumer.read_shards.remote(way, put.result, shards))
            _wait(peers.producer.clear.remote(way, turn))
            if not turn:
                continue
            results.raw.setdefault(f"block_{size}_s", []).append(put.seconds + get.seconds)
            results.raw.setdefault(f"block_{size}_8_shards_s", []).append(put.seconds + read["seconds"])
            results.raw.setdefault(f"block_{size}_over_read", []).append(read["moved_bytes"] / read["asked_bytes"])


def figures_of(results: Results) -> dict[str, float]:
    """The figures that the samples allow."""
    figures: dict[str, float] = {}
    ratios = {
        "ray_vs_tuned_tq": ("large", "raw_transfer_queue", "ray"),
        "ray_vs_tuned_tq_ragged": ("large", "raw_transfer_queue_ragged", "ray"),
        "ray_node_vs_tuned_tq": ("large", "raw_transfer_queue", "ray_node"),
        "ray_holder_vs_tuned_tq": ("large", "raw_transfer_queue", "ray_holder"),
        "ray_vs_raw_ray": ("large", "raw_ray", "ray"),
        "ray_vs_tuned_tq_small": ("small", "raw_transfer_queue", "ray"),
        "tq_vs_tuned_tq_small": ("small", "raw_transfer_queue", "transfer_queue"),
        "tq_vs_tuned_tq_large_ragged": ("large", "raw_transfer_queue_ragged", "transfer_queue"),
        "tq_vs_tuned_tq_large": ("large", "raw_transfer_queue", "transfer_queue"),
        "mooncake_vs_tq_mooncake_ragged": ("large", "raw_transfer_queue_mooncake_ragged", "mooncake"),
        "mooncake_vs_tq_mooncake": ("large", "raw_transfer_queue_mooncake", "mooncake"),
        "tq_mooncake_vs_tq_mooncake": ("large", "raw_transfer_queue_mooncake", "transfer_queue_mooncake"),
        "ray_vs_default_tq": ("large", "raw_transfer_queue_default", "ray"),
    }
    for name, (batch, baseline, way) in ratios.items():
        slow, fast = results.of(batch, baseline), results.of(batch, way)
        if slow is not None and fast is not None:
            figures[name] = slow.median / fast.median
    for way in CHECKED_WAYS:
        for batch in BATCHES:
            one, other = results.of(batch, way), results.of(batch, _other_checksums(way))
            if one is not None and other is not None:
                checked, plain = (other, one) if way == "shm" else (one, other)
                name = f"checksums_{way}_{batch}_pct"
                figures[name] = 100 * (paired_ratio(checked.totals, plain.totals) - 1)
    floor = results.of("large", "memcpy")
    for way in WORKER_WAYS:
        if floor is not None and f"worker_{way}_s" in results.raw:
            figures[f"worker_{way}_vs_memcpy"] = paired_ratio(results.raw[f"worker_{way}_s"], floor.totals)
    ours = results.of("large", "ray")
    if ours is not None:
        shares = [parts["ledger"] / total for parts, total in zip(ours.parts, ours.totals, strict=True)]
        figures["ledger_overhead_pct"] = 100 * statistics.median(shares)
    medians = {name: statistics.median(values) for name, values in results.raw.items()}
    if "fields_ray_1" in medians:
        figures["fields_32_vs_1"] = medians["fields_ray_32"] / medians["fields_ray_1"]
        figures["fields_32_vs_1_transfer_queue"] = (
            medians["fields_transfer_queue_32"] / medians["fields_transfer_queue_1"]
        )
    own, whole = (f"block_{size}_8_shards_s" for size in (BLOCK_CURVE[1], BLOCK_CURVE[3]))
    if own in results.raw:
        figures["blocks_8_shards_time"] = paired_ratio(results.raw[own], results.raw[whole])
    figures |= {f"{name}_ms": 1e3 * value for name, value in medians.items() if name.startswith("scalar_tags_")}
    figures |= {name: value for name, value in medians.items() if name.startswith(("over_read_", "block_"))}
    return figures | driver_figures(results.driver)


def not_here(sessions: Sequence[str]) -> dict[str, str]:
    """Sessions that cannot run on this machine, and why."""
    if "mooncake" not in sessions:
        return {}
    try:
        check_installed()
    except ResourceError as error:
        return {"mooncake": str(error)}
    return {}


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--json", type=Path, help="file for raw samples and figures; without it the tables alone")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_TURNS} turns instead of {TURNS}")
    parser.add_argument("--turns", type=int, help="turns per way")
    parser.add_argument("--only", nargs="+", choices=tuple(SESSIONS), default=tuple(SESSIONS), help="sessions")
    parser.add_argument("--without", choices=FEATURES, default="", help="switch a feature off: its bounds are missed")
    given = parser.parse_args(arguments)
    turns = given.turns or (QUICK_TURNS if given.quick else TURNS)
    console = Console(width=TABLE_WIDTH)
    skipped = not_here(given.only)
    for session, why in skipped.items():
        console.print(f"session {session} left out: {why}")
    sessions = tuple(session for session in given.only if session not in skipped)
    options = Options(turns=turns, sessions=sessions, without=given.without)
    load_before = load_average()
    results = measure(options)
    figures = figures_of(results)
    missed = results.problems + check_figures(figures, holds_of(sessions))
    console.print(ways_table(results.samples, results.num_bytes), figures_table(figures, HOLDS))
    report = {
        **environment(),
        "load_average": {"before": load_before, "after": load_average()},
        "turns": turns,
        "num_bytes": results.num_bytes,
        "samples": [
            {
                "session": one.session,
                "batch": one.batch,
                "way": one.way,
                "put": one.put,
                "get": one.get,
                "parts": one.parts,
            }
            for one in results.samples
        ],
        "raw": results.raw,
        "driver": [one.as_record() for one in results.driver],
        "without": given.without,
        "figures": figures,
        "skipped": skipped,
        "missed": missed,
    }
    if given.json is not None:
        write_json(given.json, report)
    for line in missed:
        console.print(line)
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
