"""An asynchronous run whose processes are killed again and again, and the account of its prompts at the end.

    python -m tests.helpers.async_kills [--kills 100] [--seed 0]

Rollout workers, engines and the trainer (the driver) of the asynchronous demo get SIGKILL at random moments, most of
them while groups are being sampled. A run goes on without a rollout worker or an engine until it has another one; after
the trainer's death it is resumed. At the end, by the run's schedule: no prompt below the frontier is missing, none was
trained twice, and no row was older than the bound. Prints a summary; exit code 1 when anything is wrong.
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
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import yaml

from tests.helpers.processes import MARK, end_all, marked, wait_for_none
from tests.helpers.runs import ROOT, logged_steps, start_cli

RECIPE = ROOT / "configs/recipes/grpo_sort_async_cpu.yaml"
MAX_STALENESS = 2
SETTINGS = {
    "grpo.async.max_staleness": MAX_STALENESS,
    "grpo.async.lookahead": MAX_STALENESS,
    "experience.num_workers": 2,
    "grpo.num_prompts_per_step": 32,
    "grpo.max_num_steps": 5000,
    "grpo.val_period": 0,
    "grpo.val_at_start": "false",
    "grpo.val_at_end": "false",
    "data.validation": "null",
    "policy.train_global_batch_size": 256,
    "policy.generation.engine_timeout_s": 60,
    "policy.generation.max_batch_size": 8,
    "checkpointing.save_period": 2,
    "logger.tensorboard_enabled": "false",
    "logger.live_panel": "false",
    "logger.num_rollouts_to_log": 0,
}
TITLES = {"rollout": "ray::RolloutWorker", "engine": "ray::GenerationWorker"}
"""Beginning of the process titles of each kind; the trainer is the process that was started."""
SHARES = {"rollout": 0.4, "engine": 0.35, "trainer": 0.25}
STEPS_BETWEEN = 2
"""Most steps between two kills."""
LIFE_S = 300.0
"""Longest wait for a start and a few steps, on a machine that does much else."""
GONE_S = 120.0


@dataclass(kw_only=True)
class Result:
    """Counts and problems of the experiment."""

    kills: Counter[str] = field(default_factory=Counter)
    steps: int = 0
    groups: int = 0
    lost: int = 0
    """Prompts below the frontier that no step has trained."""
    repeated: int = 0
    """Prompts that two steps have trained."""
    over_age: int = 0
    """Steps with a row that is older than the bound."""
    max_staleness: int = 0
    retried: int = 0
    seconds: int = 0
    processes_left: int = 0
    problems: list[str] = field(default_factory=list)


class AsyncKills:
    """One experiment.

    Args:
        folder: of the run.
        plan: kinds of the processes to kill, in order.
        model: folder of the model that is trained; the recipe's own when it is None.
    """

    def __init__(self, folder: Path, plan: Sequence[str], *, seed: int = 0, model: Path | None = None) -> None:
        self._logs, self._output, self._plan = folder / "logs", folder / "output.txt", plan
        self._model = [] if model is None else [f"policy.model_name={model}"]
        self._random = random.Random(seed)
        self._mark = ""
        self.result = Result()

    def run(self) -> Result:
        """Kill as often as planned, end the run, and look at its account."""
        self._mark = os.environ[MARK] = uuid.uuid4().hex
        started = time.monotonic()
        try:
            self._live()
            self.result.processes_left = len(wait_for_none(self._mark, timeout_s=GONE_S))
        finally:
            del os.environ[MARK]
            end_all(self._mark)
        self.result.seconds = round(time.monotonic() - started)
        if (self._logs / "schedule.jsonl").is_file():
            self._account()
        return self.result

    def _live(self) -> None:
        try:
            self._kill_as_planned(self._begin())
        finally:
            self._process.kill()
            self._process.wait()

    def _kill_as_planned(self, run: subprocess.Popen[str]) -> None:
        for number, kind in enumerate(self._plan):
            if not self._wait_for_steps(run, self._random.randint(1, STEPS_BETWEEN)):
                break
            time.sleep(self._random.uniform(0, 1.5))
            if kind == "trainer":
                run.kill()
                run.wait()
                run = self._begin()
            else:
                self._kill_one(kind)
            self.result.kills[kind] += 1
            print(f"kill {number + 1}/{len(self._plan)}: {kind}, step {self._num_steps()}", file=sys.stderr, flush=True)
        if not self.result.problems:
            self._wait_for_steps(run, 2)
        run.send_signal(signal.SIGINT)
        run.wait(GONE_S)

    def _begin(self) -> subprocess.Popen[str]:
        settings = [*(f"{name}={value}" for name, value in SETTINGS.items()), *self._model]
        can_resume = any((self._logs / "checkpoints").glob("step_*"))
        settings.append("checkpointing.resume=true" if can_resume else "logger.overwrite=true")
        with self._output.open("a", encoding="utf-8") as log:
            self._process = start_cli(RECIPE, *settings, f"logger.log_dir={self._logs}", log=log)
        return self._process

    def _kill_one(self, kind: str) -> None:
        found = []
        for process in marked(self._mark):
            try:
                if " ".join(process.cmdline()).startswith(TITLES[kind]):
                    found.append(process)
            except psutil.NoSuchProcess:
                continue
        if found:
            self._random.choice(sorted(found, key=lambda process: process.pid)).kill()

    def _wait_for_steps(self, run: subprocess.Popen[str], count: int) -> bool:
        wanted, deadline = self._num_steps() + count, time.monotonic() + LIFE_S
        while self._num_steps() < wanted:
            if run.poll() is not None:
                said = self._end_of_output()
                self.result.problems.append(f"the run ended by itself with {run.returncode}: {said}")
                return False
            if time.monotonic() > deadline:
                self.result.problems.append(f"no step for {LIFE_S:.0f} s after step {self._num_steps()}")
                return False
            time.sleep(0.05)
        return True

    def _end_of_output(self) -> str:
        """Return the last lines, without those of native stacks."""
        lines = [line for line in self._output.read_text(encoding="utf-8").splitlines() if "[0x" not in line]
        return "\n".join(filter(None, lines))[-6000:]

    def _num_steps(self) -> int:
        path = self._logs / "schedule.jsonl"
        return 0 if not path.is_file() else path.read_text().count('"event": "step"')

    def _account(self) -> None:
        """Follow the run's history: steps after the checkpoint that a start has resumed from do not count."""
        result, trained = self.result, dict[int, list[str]]()
        for line in (self._logs / "schedule.jsonl").read_text().splitlines():
            event = json.loads(line)
            if event["event"] == "start":
                trained = {step: names for step, names in trained.items() if step <= event["step"]}
            elif event["event"] == "step":
                trained[event["step"]] = event["groups"]
        names = [name for _, groups in sorted(trained.items()) for name in groups]
        ordinals = [int(name.split(".")[0]) for name in names]
        counts = Counter(ordinals)
        frontier = len(ordinals) - self._ahead(set(ordinals))
        result.steps, result.groups = len(trained), len(ordinals)
        result.retried = sum(not name.endswith(".0") for name in names)
        result.repeated = sum(count - 1 for count in counts.values())
        result.lost = sum(ordinal not in counts for ordinal in range(frontier))
        if sorted(trained) != list(range(1, len(trained) + 1)):
            result.problems.append(f"steps are missing: {sorted(trained)[:5]} ... {sorted(trained)[-5:]}")
        steps = logged_steps(self._logs)
        ages = [int(row.get("rollout/staleness_max", 0)) for row in steps]
        result.max_staleness = max(ages, default=0)
        result.over_age = sum(age > MAX_STALENESS for age in ages)
        for what in ("lost", "repeated", "over_age", "processes_left"):
            if getattr(result, what):
                result.problems.append(f"{what}: {getattr(result, what)}")

    @staticmethod
    def _ahead(ordinals: set[int]) -> int:
        """Return how many of the trained prompts lie beyond the first steps that still wait for theirs.

        The newest prompts are in flight when the run ends: at most those of the steps ahead.
        """
        in_flight = SETTINGS["grpo.num_prompts_per_step"] * (1 + MAX_STALENESS)
        limit = max(ordinals, default=0) + 1 - int(in_flight)
        return sum(ordinal >= limit for ordinal in ordinals)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        plan = random.Random(options.seed).choices(list(SHARES), weights=list(SHARES.values()), k=options.kills)
        result = AsyncKills(Path(name), plan, seed=options.seed).run()
    shown = {**vars(result), "kills": dict(result.kills)}
    print(yaml.safe_dump(shown, sort_keys=False, default_flow_style=None, width=110))
    return 1 if result.problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
