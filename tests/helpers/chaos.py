"""Kills and stops every process of small runs, plants other faults, and prints `row | expected | got | seconds`.

    python -m tests.helpers.chaos [--only WORD] [--stores transfer_queue,ray]

A row is a signal, a process and a stage: the run must end by its deadline with an exit code of its own, name what died,
show no traceback, and leave no process, no shared memory and no folder of its own. Servers of Ray that die while Ray
starts may also be started again: then the run must train. Rows of another kind are in `chaos_rows.TABLE`. Exit code 1
when a row ends otherwise than expected.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import psutil

from nemo_rl.data_plane.ledger.events import EVENTS_FILE
from nemo_rl.distributed.run_folder import OWNER_FILE
from tests.helpers.chaos_rows import TABLE, FaultRow
from tests.helpers.processes import MARK, end_all, marked, wait_for_none
from tests.helpers.runs import start_cli, write_recipe
from tests.helpers.tiny_model import write_tiny_folder

DEADLINES = {
    "cluster.stage_timeout_s": 30,
    "cluster.collective_timeout_s": 20,
    "cluster.worker_start_timeout_s": 300,
    "data_plane.timeout_s": 10,
    "env.timeout_s": 10,
    "env.on_timeout": "error",
}
"""Of each run, in seconds: a stopped process is found out by them, and none is replaced."""
START_S = 400.0
"""Until the stage is reached, on a machine that does much else."""
END_S = {"KILL": 90.0, "STOP": 240.0}
"""From the signal to the end of the run."""
GONE_S = 30.0
"""From the end of the run to that of its last process."""
STOPPED_DRIVER_S = 3.0
ROLES = {
    "driver": r"examples/run_grpo\.py",
    "policy": r"^ray::PolicyWorker",
    "engine": r"^ray::GenerationWorker",
    "rollout": r"^ray::RolloutWorker",
    "ledger": r"^ray::_LedgerActor",
    "controller": r"^ray::TransferQueueController",
    "storage": r"^ray::\S*StorageUnit",
    "raylet": r"/raylet/raylet ",
    "gcs": r"/gcs/gcs_server ",
    "scorer": r"scorer_child",
    "guard": r"scorer_child",
    "forks": r"fork_server_process",
}
"""Command lines of the processes of a run; a scorer is the child of its guard."""
NAMED = {
    "policy": r"policy worker|rank \d",
    "engine": r"generation",
    "rollout": r"rollout|owner \S+:\d+\S* is gone",
    "ledger": r"[Ll]edger",
    "controller": r"TransferQueue",
    "storage": r"StorageUnit",
    "raylet": r"raylet",
    "gcs": r"gcs_server|GCS",
    "scorer": r"reward|scor",
    "guard": r"reward|scor",
    "forks": r"worker|rank \d|generation|rollout|[Ll]edger",
}
"""What the error must speak of."""
STAGES = {"rollout": '"event":"clear"', "train": '"event":"commit"'}
"""By the event of the ledger that comes just before."""
STARTED_AGAIN = ("raylet", "gcs", "forks")
"""A start of Ray that fails is repeated; without a fork server, workers start as Ray starts them."""
NOT_MISSED = (("STOP", "guard"), ("STOP", "forks"))
"""Nobody waits for these: the run goes on, and must end when it is told to."""
ENDS = "ends in time, cause named, nothing left"
OF_TRANSFER_QUEUE = ("controller", "storage")


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One run of the table."""

    store: str
    signal: str
    role: str
    stage: str

    def __str__(self) -> str:
        return f"{self.store:<14} {self.signal:<4} {self.role:<10} {self.stage:<7}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What became of it."""

    code: int | None
    """None when it had to be ended."""
    seconds: float
    told: str
    """The line of the error."""
    problems: tuple[str, ...]


def table(stores: Sequence[str]) -> Iterator[Row]:
    """Every kill at the start, in a rollout and in training; every stop in training, and what a start waits for."""
    for store in stores:
        roles = [role for role in ROLES if store == "transfer_queue" or role not in OF_TRANSFER_QUEUE]
        stages = ("start", "rollout", "train") if store == "transfer_queue" else ("train",)
        for role, stage in product(roles, stages):
            yield Row(store=store, signal="KILL", role=role, stage=stage)
        for role in roles:
            yield Row(store=store, signal="STOP", role=role, stage="train")


def find(role: str, mark: str) -> psutil.Process | None:
    """The run's first process of a role."""
    for process in marked(mark):
        try:
            if re.search(ROLES[role], " ".join(process.cmdline()) + " ") and _is_of_pair(role, process):
                return process
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return None


def _is_of_pair(role: str, process: psutil.Process) -> bool:
    """Whether it is the half of guard and scorer that the role names; other roles have no halves."""
    return role not in ("guard", "scorer") or bool(process.children()) == (role == "guard")


def hit(row: Row, folder: Path, model: Path) -> Outcome:
    """One run, and its end."""
    mark = os.environ[MARK] = uuid.uuid4().hex
    settings = {**DEADLINES, "grpo.max_num_steps": 100000, "data_plane.impl": row.store}
    process = start_cli(write_recipe(folder, model), *(f"{name}={value}" for name, value in settings.items()))
    output_file = folder / "output.txt"
    with output_file.open("w") as file:
        reader = subprocess.Popen(["cat"], stdin=process.stdout, stdout=file)
    try:
        victim = _wait_for_stage(row, folder / "logs" / EVENTS_FILE, mark, process)
        if victim is None:
            return _outcome(row, process, 0.0, output_file, ["the stage was not reached"])
        victim.send_signal(signal.SIGKILL if row.signal == "KILL" else signal.SIGSTOP)
        started = time.monotonic()
        if row.role == "driver" and row.signal == "STOP":
            time.sleep(STOPPED_DRIVER_S)
            victim.send_signal(signal.SIGCONT)
            process.send_signal(signal.SIGTERM)
        if (row.signal, row.role) in NOT_MISSED and _goes_on(folder / "logs" / EVENTS_FILE, process):
            row = replace(row, role="driver")
            process.send_signal(signal.SIGTERM)
        if row.stage == "start" and row.role in STARTED_AGAIN and _trains(folder / "logs" / EVENTS_FILE, process):
            row = replace(row, role="driver")
            process.send_signal(signal.SIGTERM)
        problems = []
        try:
            process.wait(END_S[row.signal])
        except subprocess.TimeoutExpired:
            problems.append(f"no end after {END_S[row.signal]:.0f} s")
        seconds = time.monotonic() - started
        left = wait_for_none(mark, timeout_s=GONE_S) if not problems else []
        problems += [f"left: {what}" for what in [*left, *_left_behind(process.pid, folder / "logs" / EVENTS_FILE)]]
        return _outcome(row, process, seconds, output_file, problems)
    finally:
        end_all(mark)
        process.kill()
        process.wait()
        reader.wait()
        assert process.stdout is not None
        process.stdout.close()
        del os.environ[MARK]


def _wait_for_stage(row: Row, events: Path, mark: str, process: subprocess.Popen[str]) -> psutil.Process | None:
    """The process to hit, in the moment when its stage has begun."""
    give_up = time.monotonic() + START_S
    seen, words = 0, STAGES.get(row.stage, "")
    while time.monotonic() < give_up and process.poll() is None:
        if row.stage == "start":
            victim = find(row.role, mark)
            if victim is not None:
                return victim
        elif events.is_file() and (text := events.read_text()).count('"event":"clear"') >= 1:
            count = text.count(words)
            if seen and count > seen:
                return find(row.role, mark)
            seen = seen or count
        time.sleep(0.02)
    return None


def _trains(events: Path, process: subprocess.Popen[str]) -> bool:
    """Whether the run gets to a step, rather than to its end."""
    give_up = time.monotonic() + START_S
    while time.monotonic() < give_up and process.poll() is None:
        if events.is_file() and STAGES["train"] in events.read_text():
            return True
        time.sleep(0.1)
    return False


def _goes_on(events: Path, process: subprocess.Popen[str]) -> bool:
    """Whether more steps are trained than had been."""
    before = events.read_text().count(STAGES["train"])
    give_up = time.monotonic() + START_S
    while time.monotonic() < give_up and process.poll() is None:
        if events.read_text().count(STAGES["train"]) > before + 1:
            return True
        time.sleep(0.1)
    return False


def _outcome(
    row: Row, process: subprocess.Popen[str], seconds: float, output_file: Path, problems: list[str]
) -> Outcome:
    output = output_file.read_text()
    told = [line for line in output.splitlines() if line.startswith(("error", "interrupted"))]
    last = " ".join(told[-1].split())[:160] if told else ""
    code = process.poll()
    if not problems and row.role != "driver":
        if code not in (1, 2):
            problems.append(f"exit code {code}")
        if not re.search(NAMED[row.role], output[output.rfind("\nerror") :]):
            problems.append("the cause is not named")
    if "Traceback (most recent" in output:
        problems.append("a traceback")
    return Outcome(code=code, seconds=seconds, told=last, problems=tuple(problems))


def _left_behind(driver: int, events: Path) -> list[str]:
    """What the run has left outside of its log folder, once its last process is gone."""
    root = Path(tempfile.gettempdir()) / f"nemo_rl-{os.getuid()}"
    folders = [path.parent for path in root.glob(f"*/{OWNER_FILE}") if f'"pid": {driver},' in path.read_text()]
    runs = set(re.findall(r'"run":"(\w+)"', events.read_text())) if events.is_file() else set()
    return [str(path) for path in (*folders, *(path for run in runs for path in Path("/dev/shm").glob(f"*{run}*")))]


def _end_of(row: Row | FaultRow, folder: Path, model: Path) -> tuple[str, str, float]:
    """How it is to end, how it has, and the seconds that took."""
    if isinstance(row, FaultRow):
        started = time.monotonic()
        folder.mkdir()
        return row.expected, row.run(folder, model), time.monotonic() - started
    outcome = hit(row, folder, model)
    found = f"{'; '.join(outcome.problems)}: code {outcome.code}, {outcome.told}"
    return ENDS, found if outcome.problems else ENDS, outcome.seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="rows that have all these words, separated by commas")
    parser.add_argument("--stores", default="transfer_queue,ray", help="data planes to run over")
    given = parser.parse_args()
    words = [word for word in given.only.split(",") if word]
    rows = [row for row in (*TABLE, *table(given.stores.split(","))) if all(word in str(row).split() for word in words)]
    num_failed = 0
    with tempfile.TemporaryDirectory() as root:
        model = write_tiny_folder(Path(root) / "model")
        print("row | expected | got | seconds")
        for number, row in enumerate(rows):
            expected, got, seconds = _end_of(row, Path(root) / str(number), model)
            num_failed += got != expected
            print(f"{row} | {expected} | {got} | {seconds:.1f}", flush=True)
    print(f"{len(rows) - num_failed} of {len(rows)} rows hold")
    return min(num_failed, 1)


if __name__ == "__main__":
    sys.exit(main())
