"""A ledger whose process is killed again and again under work, and the account of every row at the end.

    python -m tests.helpers.ledger_kills [--kills 100] [--run-kills 6] [--seed 0]

Actors put rows, claim them for two tasks, read, write, release and clear them; one row of each is rewritten all the
time, so that its versions count its commits. The ledger's process gets SIGKILL at random moments, some of them just
after it has come back. At the end every row was handed out once per task, all were read as they were put, no commit
counts twice, and the event log has no gap. Then a GRPO run is hit in the same way, and its numbers are compared with
those of a run that was left alone. Prints a summary; exit code 1 when anything is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import ray
import torch

from nemo_rl.config.data_plane import DataPlaneConfig, LedgerConfig, RayStoreConfig
from nemo_rl.data_plane.address import DataPlaneAddress, read_attach_file
from nemo_rl.data_plane.factory import attach_data_plane, build_data_plane_client, observe
from nemo_rl.data_plane.interfaces import DataPlaneClient
from nemo_rl.data_plane.ledger.events import EVENTS_FILE, expand_keys, read_events
from nemo_rl.data_plane.ledger.journal import JOURNAL_FILE
from nemo_rl.errors import DataPlaneClosed
from tests.helpers.data_planes import ids_column, keys_of, ray_cluster, rows_of, wait_until
from tests.helpers.processes import MARK, end_all, wait_for_none
from tests.helpers.runs import logged_steps, start_cli, write_recipe
from tests.helpers.tiny_model import write_tiny_folder

PARTITION, FIELDS, TASKS = "p", ("input_ids", "sample_mask", "prev_logprobs"), ("prev_lp", "train")
GROUP_ROWS, MAX_LIVE_ROWS = 4, 400
CALL_S = 120.0
RUN_S = 600.0
LIFE_S = 300.0
"""Longest wait for an actor or a start, on a machine that does much else."""
LIMIT_S = 10.0
"""A recovery may take so long."""


def config_of(owner: str, *, journal_bytes: int = 1 << 18) -> DataPlaneConfig:
    """Return a data plane with snapshots every few seconds of work."""
    return DataPlaneConfig(
        impl="ray",
        ray=RayStoreConfig(owner=owner),
        timeout_s=CALL_S,
        ledger=LedgerConfig(recovery="journal", journal_bytes=journal_bytes),
    )


@dataclass(kw_only=True)
class Account:
    """What one worker has done."""

    put: list[str] = field(default_factory=list)
    claimed: dict[str, list[str]] = field(default_factory=lambda: {task: [] for task in TASKS})
    cleared: int = 0
    calls: int = 0
    problems: list[str] = field(default_factory=list)


class LedgerWorker:
    """A process with a client, which works until it is told to stop.

    Args:
        is_far: the client calls the ledger as one on another node does.
    """

    def __init__(self, address: DataPlaneAddress, name: str, *, is_far: bool) -> None:
        torch.set_num_threads(1)
        if is_far:
            address = replace(address, ledger=replace(address.ledger, node="another"))
        self._client, self._name = attach_data_plane(address), name
        self._account = Account()
        self._is_stopped = False

    def stop(self) -> None:
        self._is_stopped = True

    def work(self) -> Account:
        """Return the account once it was told to stop."""
        number, version = 0, 0
        while not self._is_stopped:
            number += 1
            if self._client.stats()["live_rows"] < MAX_LIVE_ROWS:
                self._put(number)
            version = self._rewrite(version)
            use_rows(self._client, self._account, self._name, GROUP_ROWS * 2)
            self._account.calls += 3
        return self._account

    def close(self) -> None:
        self._client.close()

    def _put(self, number: int) -> None:
        keys = keys_of(1, GROUP_ROWS, prefix=f"{self._name}-{number}-")
        columns = {"input_ids": ids_column([2] * len(keys), start=start_of(keys[0])), "sample_mask": torch.ones(4)}
        self._client.kv_batch_put(keys, PARTITION, columns, [{"by": self._name}] * len(keys))
        self._account.put += keys

    def _rewrite(self, version: int) -> int:
        """Write the worker's own row once more: each commit raises its version by one."""
        meta = self._client.kv_batch_put([self._name], "own", {"sample_mask": torch.full((1,), float(version))})
        found = meta.versions["sample_mask"]
        if found != version + 1:
            self._account.problems.append(f"{self._name}: version {found} after {version}")
        read = float(self._client.get_data(meta, ["sample_mask"])["sample_mask"][0])
        if read != version:
            self._account.problems.append(f"{self._name}: read {read}, wrote {version}")
        assert isinstance(found, int)
        return found


def start_of(key: str) -> int:
    """Return the first value of a group's rows, of the key of its first row."""
    return sum(key.encode()) * 8


def use_rows(client: DataPlaneClient, account: Account, name: str, count: int) -> int:
    """Claim rows for both tasks, check what they hold, and end the claims; return how many rows it were."""
    first, last = TASKS
    meta = client.get_meta(PARTITION, first, ["input_ids"], count, consumer_id=name, blocking=False)
    account.claimed[first] += meta.keys
    if meta.keys:
        found = rows_of(client.get_data(meta)["input_ids"])
        starts = [start_of(f"{key[:-1]}0") + 2 * int(key[-1]) for key in meta.keys]
        if found != [[start, start + 1] for start in starts]:
            account.problems.append(f"{meta.keys}: read {found}")
        columns = {"prev_logprobs": torch.zeros(len(meta), 2)}
        client.kv_batch_put(meta.keys, PARTITION, columns, claimed=meta)
    done = client.get_meta(PARTITION, last, ["prev_logprobs"], count, consumer_id=name, blocking=False)
    account.claimed[last] += done.keys
    if done.keys:
        client.get_data(done)
        client.release(done)
        account.cleared += client.kv_clear(done.keys, PARTITION, reason="used")
    return len(meta) + len(done)


@dataclass(kw_only=True)
class KillResult:
    """Counts and problems of one experiment."""

    kills: int = 0
    recoveries_s: list[float] = field(default_factory=list)
    """Seconds from a kill to the next answer."""
    rows: int = 0
    calls: int = 0
    events: int = 0
    problems: list[str] = field(default_factory=list)

    def summary(self) -> dict[str, object]:
        """Return the numbers to print."""
        times = sorted(self.recoveries_s) or [0.0]
        shown = {"median_recovery_s": round(times[len(times) // 2], 2), "longest_recovery_s": round(times[-1], 2)}
        rest = {name: value for name, value in asdict(self).items() if name != "recoveries_s"}
        return {**rest, **shown}


def ledger_process(log_dir: Path) -> int:
    """Return the process of the ledger, as `data_plane.json` has it."""
    point = read_attach_file(log_dir)
    assert point is not None, "the run has no data_plane.json"
    return point.ledger.process_id


def kill_under_work(
    folder: Path, *, kills: int, seed: int = 0, owner: str = "producer", workers: int = 3, pause_s: float = 1.0
) -> KillResult:
    """Kill the ledger of a data plane under work, on the Ray cluster of this process."""
    result, chance = KillResult(), random.Random(seed)
    run_id = f"kills-{uuid.uuid4().hex[:8]}"
    client = build_data_plane_client(config_of(owner), run_id=run_id, log_dir=folder, validate=True)
    try:
        client.register_partition(PARTITION, FIELDS, MAX_LIVE_ROWS + 100, TASKS)
        client.register_partition("own", ("sample_mask",), workers, ())
        actor_class = ray.remote(LedgerWorker).options(num_cpus=0, max_concurrency=2)
        actors = [actor_class.remote(client.address, f"w{i}", is_far=i == 0) for i in range(workers)]
        working = [actor.work.remote() for actor in actors]
        wait_until(lambda: client.stats()["partitions"]["p"]["rows"] > 0, timeout_s=LIFE_S)
        for number in range(kills):
            # Most deaths come under work, every fourth as soon as the ledger is back from the one before.
            time.sleep(0.0 if number % 4 == 3 else chance.uniform(0.05, pause_s))
            _kill(folder, client, result)
        time.sleep(pause_s)
        ray.get([actor.stop.remote() for actor in actors], timeout=CALL_S)
        accounts: list[Account] = ray.get(working, timeout=CALL_S)
        accounts.append(Account())
        while use_rows(client, accounts[-1], "driver", 64):
            continue
        client.kv_clear(None, "own")
        live = {name: value for name, value in client.stats().items() if name.startswith("live")}
        result.problems += [f"left: {live}"] if any(live.values()) else []
        _settle(accounts, result)
        ray.get([actor.close.remote() for actor in actors], timeout=CALL_S)
        for actor in actors:
            ray.kill(actor)
    finally:
        client.close()
    _check_events(folder, accounts, result)
    left = [name for name in os.listdir(folder) if name != EVENTS_FILE]
    result.problems += [f"files are left: {left}"] if left else []
    return result


def _kill(folder: Path, client: DataPlaneClient, result: KillResult) -> None:
    victim = ledger_process(folder)
    os.kill(victim, signal.SIGKILL)
    killed = time.monotonic()
    client.stats()
    result.recoveries_s.append(time.monotonic() - killed)
    result.kills += 1
    point = read_attach_file(folder)
    assert point is not None
    if point.ledger.process_id == victim or point.process_id != os.getpid():
        result.problems.append(f"{point} after the death of process {victim}")
    observer = observe(point)
    try:
        observer.call("stats", {}, timeout_s=CALL_S)
    except DataPlaneClosed as error:
        result.problems.append(f"data_plane.json after kill {result.kills}: {error}")
    finally:
        observer.close()


def _settle(accounts: Sequence[Account], result: KillResult) -> None:
    put = Counter(key for account in accounts for key in account.put)
    result.rows, result.calls = len(put), sum(account.calls for account in accounts)
    for task in TASKS:
        claimed = Counter(key for account in accounts for key in account.claimed[task])
        result.problems += [
            f"{task}: {key} was handed out {count} times" for key, count in claimed.items() if count > 1
        ]
        result.problems += [f"{task}: {key} was never handed out" for key in put.keys() - claimed.keys()]
    cleared = sum(account.cleared for account in accounts)
    result.problems += [f"{cleared} rows were cleared, {len(put)} put"] if cleared != len(put) else []
    result.problems += [problem for account in accounts for problem in account.problems]
    result.problems += [f"a recovery took {s:.1f} s" for s in result.recoveries_s if s > LIMIT_S]


def _check_events(folder: Path, accounts: Sequence[Account], result: KillResult) -> None:
    """Every change is in the event log once: the numbers of changes have no gap, and rows appear as often as used."""
    events = list(read_events(folder / EVENTS_FILE))
    result.events = len(events)
    numbers = [event["n"] for event in events if event["event"] not in ("open", "recover", "read")]
    if numbers != list(range(1, len(numbers) + 1)):
        result.problems.append(f"the numbers of events have gaps or repetitions: {numbers[:20]} ...")
    for kind in ("claim", "clear"):
        mine = [event for event in events if event["event"] == kind and event["partition"] == PARTITION]
        told = Counter(key for event in mine for key in expand_keys(event))
        expected = 2 if kind == "claim" else 1
        wrong = [key for account in accounts for key in account.put if told[key] != expected]
        result.problems += [f"{key}: {told[key]} {kind} events" for key in wrong[:5]]
    recoveries = sum(event["event"] == "recover" for event in events)
    if recoveries < result.kills:
        result.problems.append(f"{recoveries} recoveries in the event log after {result.kills} kills")


# ---- a training run


def kill_in_a_run(folder: Path, model: Path, *, kills: int, seed: int = 0) -> KillResult:
    """Train with and without kills, and compare every number of every step."""
    result, chance, losses = KillResult(), random.Random(seed), []
    settings = {"data_plane.impl": "ray", "data_plane.ledger.recovery": "journal", "grpo.max_num_steps": 4 + 2 * kills}
    for name in ("quiet", "killed"):
        own = folder / name
        recipe = write_recipe(own, model)
        mark = os.environ[MARK] = uuid.uuid4().hex
        try:
            with (own / "output.txt").open("w") as output:
                run = start_cli(recipe, *(f"{key}={value}" for key, value in settings.items()), log=output)
            if name == "killed":
                _kill_run(run, own / "logs", kills, chance, result)
            code = run.wait(RUN_S)
            left = wait_for_none(mark, timeout_s=60.0)
        finally:
            del os.environ[MARK]
            end_all(mark)
        result.problems += [f"{name}: exit code {code}"] if code else []
        result.problems += [f"{name}: left {what}" for what in left]
        result.problems += [f"{name}: {JOURNAL_FILE} is left"] if (own / "logs" / JOURNAL_FILE).exists() else []
        steps = logged_steps(own / "logs") if not code else []
        losses.append([{k: v for k, v in row.items() if not k.startswith("data_plane/")} for row in steps])
    result.rows = len(losses[1])
    if losses[0] != losses[1]:
        result.problems.append(f"other numbers: {_first_difference(*losses)}")
    events = Counter(event["event"] for event in read_events(folder / "killed" / "logs" / EVENTS_FILE))
    result.events = sum(events.values())
    if events["recover"] != result.kills:
        result.problems.append(f"{events['recover']} recoveries after {result.kills} kills")
    return result


def _kill_run(run: subprocess.Popen[str], log_dir: Path, kills: int, chance: random.Random, result: KillResult) -> None:
    """Kill the ledger once for every two steps, at random moments of them."""
    events, give_up = log_dir / EVENTS_FILE, time.monotonic() + RUN_S
    for number in range(kills):
        while run.poll() is None and time.monotonic() < give_up:
            if events.is_file() and events.read_text().count('"event":"clear"') > 2 * number:
                break
            time.sleep(0.02)
        time.sleep(chance.uniform(0.0, 1.5))
        if run.poll() is not None:
            result.problems.append(f"the run ended before kill {number + 1}")
            return
        victim = ledger_process(log_dir)
        os.kill(victim, signal.SIGKILL)
        result.kills += 1
        killed = time.monotonic()
        while run.poll() is None and ledger_process(log_dir) == victim:
            time.sleep(0.02)
        result.recoveries_s.append(time.monotonic() - killed)


def _first_difference(one: Sequence[Mapping[str, float]], other: Sequence[Mapping[str, float]]) -> str:
    for a, b in zip(one, other, strict=False):
        names = [name for name in a if a[name] != b.get(name)]
        if names:
            return f"step {a.get('step')}: {names[0]} is {b.get(names[0])}, expected {a[names[0]]}"
    return f"{len(one)} and {len(other)} steps"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100, help="under work of several clients")
    parser.add_argument("--run-kills", type=int, default=6, help="in a training run")
    parser.add_argument("--owner", default="producer", choices=("producer", "holder", "node"))
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    results: dict[str, KillResult] = {}
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root)
        if given.kills:
            (folder / "work").mkdir()
            with ray_cluster():
                work = kill_under_work(folder / "work", kills=given.kills, seed=given.seed, owner=given.owner)
            results["work"] = work
        if given.run_kills:
            model = write_tiny_folder(folder / "model")
            results["run"] = kill_in_a_run(folder, model, kills=given.run_kills, seed=given.seed)
    for name, result in results.items():
        print(json.dumps({name: result.summary()}, indent=1), flush=True)
    return min(sum(len(result.problems) for result in results.values()), 1)


if __name__ == "__main__":
    sys.exit(main())
