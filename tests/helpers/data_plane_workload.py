"""Writers and readers that check every row they get: its content says which key and which version it is.

Used by the stress test and the stress run, in threads, processes and actors. A key has one writer, so everybody knows
what it may hold.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from nemo_rl.data_plane.interfaces import DataPlaneClient
from nemo_rl.data_plane.schema import extra_field
from nemo_rl.errors import KeysNotFound, LeaseExpired
from nemo_rl.jagged import nest
from tests.helpers.data_planes import Plane

ROWS = extra_field("x", dtypes=["int64"], dims=("W",))
STAMP = extra_field("stamp", dtypes=["int64"])
FIELDS = ("sample_mask", ROWS, STAMP)
TASK = "train"
WORKERS = 8
KEYS_PER_WORKER = 24
BATCH = 6


@dataclass
class Outcome:
    """The operations and rows of one worker."""

    operations: int = 0
    live: dict[str, int] = field(default_factory=dict)
    """Its own keys -> the version they hold at the end."""
    made: list[str] = field(default_factory=list)
    """Rows it put to be claimed, each once."""
    claimed: list[str] = field(default_factory=list)


def key_of(worker: int, number: int) -> str:
    return f"w{worker}_g{number}"


def row_of(key: str, version: int) -> list[int]:
    """Key, version, and filling whose length and content depend on both."""
    worker, number = (int(part) for part in key[1:].split("_g"))
    code = worker * 1000 + number
    return [code, version, *[code * 7 + version * 13 + i for i in range((code + version) % 9)]]


def columns_of(keys: list[str], version: int) -> dict[str, torch.Tensor]:
    rows = [row_of(key, version) for key in keys]
    lengths = torch.tensor([len(row) for row in rows])
    return {
        "x": nest(torch.tensor([value for row in rows for value in row]), lengths),
        "stamp": torch.tensor([row[0] * 1_000_000 + version for row in rows]),
    }


def check_rows(rows: object, keys: list[str]) -> list[int]:
    """Check that every row is the one asked for, whole and of one version; return the versions."""
    versions = []
    for key, row, stamp in zip(keys, rows["x"].unbind(), rows["stamp"].tolist(), strict=True):
        found = row.tolist()
        assert len(found) >= 2 and found == row_of(key, found[1]), f"row {key}: foreign or torn content {found[:4]}"
        assert stamp == found[0] * 1_000_000 + found[1], f"row {key}: columns of two versions, {found[:2]} and {stamp}"
        versions.append(found[1])
    return versions


def churn(client: DataPlaneClient, partitions: tuple[str, str], worker: int, workers: int, turns: int) -> Outcome:
    """Puts, rewrites and clears its own rows, reads everybody's; makes rows in the second partition, and claims."""
    partition, to_claim = partitions
    chance, outcome = random.Random(worker), Outcome()
    own = [key_of(worker, number) for number in range(KEYS_PER_WORKER)]
    seen: dict[str, int] = {}
    for version in range(1, turns + 1):
        keys = chance.sample(own, BATCH)
        client.kv_batch_put(keys, partition, columns_of(keys, version))
        outcome.live.update(dict.fromkeys(keys, version))
        # No other client writes these: they must be there, in any order, exactly as they were written last.
        mine = chance.sample(sorted(outcome.live), min(BATCH, len(outcome.live)))
        assert check_rows(client.kv_batch_get(mine, partition, ["x", "stamp"]), mine) == [outcome.live[k] for k in mine]
        other = chance.randrange(workers)
        theirs = [key_of(other, number) for number in chance.sample(range(KEYS_PER_WORKER), BATCH)]
        try:
            found = check_rows(client.kv_batch_get(theirs, partition, ["stamp", "x"]), theirs)
        except KeysNotFound:
            found = []
        for key, number in zip(theirs, found, strict=False):
            assert number >= seen.get(key, 0), f"row {key}: version {number} after {seen[key]}"
            seen[key] = number
        _make_and_claim(client, to_claim, worker, version, outcome)
        outcome.operations += 6
        if version % 5 == 0:
            gone = chance.sample(own, 4)
            client.kv_clear(gone, partition)
            outcome.live = {key: number for key, number in outcome.live.items() if key not in gone}
            outcome.operations += 1
    return outcome


def _make_and_claim(client: DataPlaneClient, partition: str, worker: int, version: int, outcome: Outcome) -> None:
    """Put one new row for any worker to claim, then claim some rows and clear them."""
    key = f"{worker}-{version}"
    client.kv_batch_put([key], partition, {"sample_mask": torch.tensor([float(version)])}, [{"made": key}])
    outcome.made.append(key)
    meta = client.get_meta(partition, TASK, ["sample_mask"], 2, consumer_id=f"w{worker}", blocking=False)
    if meta:
        assert [tags["made"] for tags in meta.tags or ()] == list(meta.keys)
        try:
            client.release(meta)
        except LeaseExpired:
            return  # a loaded machine kept this worker's heartbeat up: somebody else has the rows now
        outcome.claimed += meta.keys
        client.kv_clear(list(meta.keys), partition)


def run_all(clients: Sequence[tuple[DataPlaneClient, bool]], partitions: tuple[str, str], turns: int) -> int:
    """Eight workers over these clients (and whether they are remote); returns the number of operations."""

    def work(worker: int) -> object:
        client, is_remote = clients[worker % len(clients)]
        if is_remote:
            return client.work(churn, partitions, worker, WORKERS, turns)
        return churn(client, partitions, worker, WORKERS, turns)

    with ThreadPoolExecutor(WORKERS) as pool:
        outcomes = [future.result() for future in [pool.submit(work, worker) for worker in range(WORKERS)]]
    owner, (partition, to_claim) = clients[0][0], partitions
    live = {key: version for outcome in outcomes for key, version in outcome.live.items()}
    assert set(owner.kv_list(partition)) == set(live), "rows are lost, or came back"
    keys = sorted(live)
    assert check_rows(owner.kv_batch_get(keys, partition, ["x", "stamp"]), keys) == [live[key] for key in keys]
    claimed = [key for outcome in outcomes for key in outcome.claimed]
    claimed += owner.kv_list(to_claim)
    made = [key for outcome in outcomes for key in outcome.made]
    assert Counter(claimed) == Counter(made), "a row was handed out twice, or never"
    return sum(outcome.operations for outcome in outcomes)


def stress(plane: Plane, turns: int) -> int:
    """Run the workers over three clients of the plane, one of them elsewhere; return the number of operations."""
    partitions = tuple(plane.partition(FIELDS, tasks=[TASK], num_samples=100_000) for _ in range(2))
    num_done = run_all([(plane.owner, False), (plane.peer, True), (plane.attach(), False)], partitions, turns)
    assert num_done >= WORKERS * turns * 6
    return num_done
