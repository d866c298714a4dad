"""Processes that hold payloads, killed one after the other under work, and the account of every row that was read.

    python -m tests.helpers.store_kills [--kills 200] [--only STORE ...] [--seed 0]

Each kill has a data plane of its own. Two clients put groups, read groups that they have put, and clear the oldest;
then one process of the store gets SIGKILL at a random moment. Before it no call fails. After it a read gives what was
put or an error that says what is lost; no call outlasts its deadline; and once the owner has closed, no process, no
actor and no shared memory of the store is left. Prints the counts of each store; exit code 1 when anything is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields

import psutil
import ray

from nemo_rl.data_plane.factory import attach_data_plane, build_data_plane_client
from nemo_rl.data_plane.interfaces import DataPlaneClient
from nemo_rl.errors import DataPlaneClosed, DataPlaneError, DataPlaneTimeout, PayloadLost
from tests.helpers import mooncake
from tests.helpers.data_planes import CONFIGS, ids_column, keys_of, ray_cluster, rows_of, segments, wait_until

UNITS = ("TransferQueueStorageUnit#0", "TransferQueueController")
SERVERS = ("mooncake_master", "mooncake_client")
VICTIMS: Mapping[str, tuple[str, ...]] = {
    "ray-holder": ("holder-",),
    "transfer_queue": UNITS,
    "transfer_queue-native": UNITS,
    "mooncake": SERVERS,
    "transfer_queue-mooncake": (*SERVERS, UNITS[1]),
}
"""Store -> how the names of the actors and of the programs begin that may die."""
PARTITION, GROUP_ROWS, MOST_GROUPS = "p", 4, 20
TIMEOUT_S = 10.0
CALL_S = 3 * TIMEOUT_S
CLOSE_S = 120.0
AFTER_S = 2.0
"""Seconds of work after a kill, and longest time of work before it."""
FOLLOWING = (PayloadLost, DataPlaneClosed, DataPlaneTimeout)
"""What a call may raise once a process of the store has died."""


@dataclass(kw_only=True)
class StoreKills:
    """Counts and problems of one store."""

    kills: Counter[str] = field(default_factory=Counter)
    reads: int = 0
    """Groups that were read, each row as it was put."""
    puts: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    """Kinds of errors after a kill, with the call that got them."""
    longest_call_s: float = 0.0
    problems: list[str] = field(default_factory=list)


class _Work:
    """A client that works in a thread until it is told to stop."""

    def __init__(self, client: DataPlaneClient, name: str, result: StoreKills, chance: random.Random) -> None:
        self._client, self._name, self._result, self._chance = client, name, result, chance
        self._groups: dict[str, int] = {}
        self.is_killed = threading.Event()
        """Set when a process is about to be killed: from then on calls may fail."""
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name)
        self._thread.start()

    def end(self) -> None:
        self._stopped.set()
        self._thread.join(4 * CALL_S)
        if self._thread.is_alive():
            self._result.problems.append(f"{self._name} does not come back")

    @property
    def has_read(self) -> bool:
        return len(self._groups) > 1

    def _run(self) -> None:
        number = 0
        while not self._stopped.is_set():
            number += 1
            self._call("put", lambda number=number: self._put(number))
            if self._groups:
                self._call("get", lambda: self._read(self._chance.choice(list(self._groups))))
            if len(self._groups) > MOST_GROUPS:
                self._call("clear", lambda: self._clear(next(iter(self._groups))))

    def _call(self, what: str, action: Callable[[], None]) -> None:
        could_fail, began = self.is_killed.is_set(), time.monotonic()
        try:
            action()
        except FOLLOWING as error:
            self._result.errors[f"{what}: {type(error).__name__}"] += 1
            if not (could_fail or self.is_killed.is_set()):
                self._result.problems.append(f"{self._name}: {what} failed before the kill: {error}")
            self._stopped.wait(0.05)  # calls of a store that has ended fail at once
        except (DataPlaneError, AssertionError) as error:
            self._result.problems.append(f"{self._name}: {what}: {type(error).__name__}: {error}")
        seconds = time.monotonic() - began
        self._result.longest_call_s = max(self._result.longest_call_s, seconds)
        if seconds > CALL_S:
            self._result.problems.append(f"{self._name}: {what} took {seconds:.1f} s")

    def _keys(self, group: str) -> list[str]:
        return keys_of(1, GROUP_ROWS, prefix=f"{group}-")

    def _put(self, number: int) -> None:
        group, start = f"{self._name}{number}", self._chance.randrange(1 << 20)
        self._client.kv_batch_put(
            self._keys(group), PARTITION, {"input_ids": ids_column([2] * GROUP_ROWS, start=start)}
        )
        self._groups[group] = start
        self._result.puts += 1

    def _read(self, group: str) -> None:
        found = self._client.kv_batch_get(self._keys(group), PARTITION, ["input_ids"])["input_ids"]
        expected = rows_of(ids_column([2] * GROUP_ROWS, start=self._groups[group]))
        assert rows_of(found) == expected, f"group {group} was put as {expected}, read as {rows_of(found)}"
        self._result.reads += 1

    def _clear(self, group: str) -> None:
        del self._groups[group]
        self._client.kv_clear(self._keys(group), PARTITION)


def _processes(names: tuple[str, ...]) -> dict[int, str]:
    """Return process id -> beginning of the name of the store's processes."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if process.name() in set(names).intersection(SERVERS):
                found[process.pid] = process.name()
    for actor in ray.util.list_named_actors(all_namespaces=True):
        for name in names:
            if actor["name"].startswith(name):
                handle = ray.get_actor(actor["name"], namespace=actor["namespace"])
                found[ray.get(handle.__ray_call__.remote(lambda _: os.getpid()), timeout=CALL_S)] = name
    return found


def kill_store(name: str, result: StoreKills, chance: random.Random) -> None:
    """Kill one process of a store under work, on the Ray cluster of this process."""
    config = CONFIGS[name].model_copy(update={"timeout_s": TIMEOUT_S})
    owner = build_data_plane_client(config, run_id=f"run-{uuid.uuid4().hex[:8]}")
    run_id, clients = owner.address.run_id, [owner]
    try:
        owner.register_partition(PARTITION, ("input_ids",), 4096, ())
        clients.append(attach_data_plane(owner.address))
        works = [_Work(client, f"w{i}-", result, chance) for i, client in enumerate(clients)]
        try:
            wait_until(lambda: all(work.has_read for work in works))
            time.sleep(chance.uniform(0.0, AFTER_S))
            processes = _processes(VICTIMS[name])
            victim = chance.choice(sorted(processes))
            for work in works:
                work.is_killed.set()
            os.kill(victim, signal.SIGKILL)
            result.kills[processes[victim]] += 1
            time.sleep(AFTER_S)
        finally:
            for work in works:
                work.end()
    finally:
        began = time.monotonic()
        for client in reversed(clients):
            client.close()
        if time.monotonic() - began > CLOSE_S:
            result.problems.append(f"{name}: its close took {time.monotonic() - began:.0f} s")
    for what, left in {
        "processes": lambda: [processes[pid] for pid in processes if mooncake.is_alive(pid)],
        "actors": lambda: [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)],
        "shared memory": lambda: segments(run_id),
    }.items():
        try:
            wait_until(lambda left=left: not left())
        except AssertionError:
            result.problems.append(f"{name}: {what} are left: {left()}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200, help="of all stores together")
    parser.add_argument("--only", nargs="+", choices=tuple(VICTIMS), default=tuple(VICTIMS), help="stores")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    stores = [name for name in given.only if "mooncake" not in name or not mooncake.why_not()]
    print(*(f"{name} left out: {mooncake.why_not()}" for name in given.only if name not in stores), sep="\n")
    results = {name: StoreKills() for name in stores}
    chance = random.Random(given.seed)
    with ray_cluster():
        for number in range(given.kills):
            name = stores[number % len(stores)]
            kill_store(name, results[name], chance)
    for name, result in results.items():
        print(json.dumps({name: {f.name: getattr(result, f.name) for f in fields(result)}}, indent=1), flush=True)
    return min(sum(len(result.problems) for result in results.values()), 1)


if __name__ == "__main__":
    sys.exit(main())
