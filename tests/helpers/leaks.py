"""A run of many small steps, and what grows in it: memory, descriptors and threads of every process, shared memory,
entries of its temporary folder.

    python -m tests.helpers.leaks [--steps 200] [--stores transfer_queue,ray]

Every process is looked at once a second. What it holds in the last quarter of the steps is compared with what it held
in the second one, by the median: caches and pools are full by then. Exit code 1 when anything has grown.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
import uuid
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import psutil

from tests.helpers.processes import MARK, end_all, marked
from tests.helpers.runs import start_cli, write_recipe
from tests.helpers.tiny_model import write_tiny_folder

MIB = 2**20
MAY_GROW = {
    "memory_mib": 12.0,
    "descriptors": 3.0,
    "threads": 3.0,
    "shared_mib": 4.0,
    "shared_files": 4.0,
    "temporary": 0.0,
}
"""Allowed growth from the second quarter of the steps to the last; Ray's own servers record every task."""
SERVERS_MAY_GROW_MIB = 40.0
SERVERS = re.compile(r"raylet|gcs_server|ray/_private|log_monitor")
STEP_S = 20.0
"""Longest mean step, on a machine that does much else."""
START_S = 400.0
OF_ALL = "all processes"


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """The resources of one process at one moment."""

    who: str
    step: int
    held: dict[str, float]


def grown(looks: Sequence[Look], *, steps: int) -> Iterator[str]:
    """Says of every process what it holds more of in the last quarter of the steps than in the second."""
    by_process = defaultdict(list)
    for look in looks:
        by_process[look.who].append(look)
    for who, of_one in sorted(by_process.items()):
        early = [look.held for look in of_one if steps / 4 <= look.step < steps / 2]
        late = [look.held for look in of_one if look.step >= steps * 3 / 4]
        if not early or not late:
            continue
        for what in early[0]:
            before, after = (median(held[what] for held in helds) for helds in (early, late))
            limit = SERVERS_MAY_GROW_MIB if what == "memory_mib" and SERVERS.search(who) else MAY_GROW[what]
            if after - before > limit:
                yield f"{who[:100]}: {what} {before:.0f} -> {after:.0f}"


def watch(process: subprocess.Popen[str], mark: str, metrics: Path, temporary: Path, *, steps: int) -> list[Look]:
    """Looks once a second until the run ends or its time is over."""
    give_up = time.monotonic() + START_S + STEP_S * steps
    looks: list[Look] = []
    while process.poll() is None and time.monotonic() < give_up:
        step = metrics.read_text().count("\n") if metrics.is_file() else 0
        looks += [Look(who=who, step=step, held=held) for who, held in _held(mark, temporary)]
        time.sleep(1.0)
    return looks


def _held(mark: str, temporary: Path) -> Iterator[tuple[str, dict[str, float]]]:
    for process in marked(mark):
        try:
            with process.oneshot():
                name = " ".join(process.cmdline())
                info = process.memory_info()
                held = {
                    # Pages of shared memory are counted once, below.
                    "memory_mib": (info.rss - info.shared) / MIB,
                    "descriptors": float(process.num_fds()),
                    "threads": float(process.num_threads()),
                }
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        yield f"{process.pid} {name}", held
    files = [path for path in Path("/dev/shm").iterdir() if path.is_file()]
    shared = {"shared_mib": sum(_blocks(path) for path in files) / MIB, "shared_files": float(len(files))}
    yield OF_ALL, {**shared, "temporary": float(len(list(temporary.iterdir())))}


def _blocks(path: Path) -> int:
    try:
        return path.stat().st_blocks * 512
    except FileNotFoundError:
        return 0


def run(folder: Path, model: Path, *, store: str, steps: int) -> tuple[int, list[Look], str]:
    """Exit code, everything seen, and the end of the output."""
    mark = os.environ[MARK] = uuid.uuid4().hex
    settings = {"grpo.max_num_steps": steps, "data_plane.impl": store}
    recipe, temporary = write_recipe(folder, model), folder / "tmp"
    temporary.mkdir()
    before, os.environ["TMPDIR"] = os.environ.get("TMPDIR"), str(temporary)
    process = start_cli(recipe, *(f"{name}={value}" for name, value in settings.items()))
    os.environ.pop("TMPDIR") if before is None else os.environ.update(TMPDIR=before)
    output = folder / "output.txt"
    try:
        with output.open("w") as file:
            reader = subprocess.Popen(["cat"], stdin=process.stdout, stdout=file)
        looks = watch(process, mark, folder / "logs" / "metrics.jsonl", temporary, steps=steps)
        process.kill()
        process.wait()
        reader.wait()
    finally:
        end_all(mark)
        del os.environ[MARK]
    return process.returncode, looks, output.read_text()[-2000:]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--stores", default="transfer_queue,ray", help="data planes to run over")
    given = parser.parse_args()
    num_failed = 0
    with tempfile.TemporaryDirectory() as root:
        model = write_tiny_folder(Path(root) / "model")
        for store in given.stores.split(","):
            folder = Path(root) / store
            code, looks, output = run(folder, model, store=store, steps=given.steps)
            problems = list(grown(looks, steps=given.steps)) + ([f"exit code {code}: {output}"] if code else [])
            num_failed += bool(problems)
            last = max((look.step for look in looks), default=0)
            print(f"{store}: {len(looks)} looks at {len({look.who for look in looks})} processes, {last} steps")
            print("\n".join(problems) or "nothing has grown", flush=True)
    return min(num_failed, 1)


if __name__ == "__main__":
    sys.exit(main())
