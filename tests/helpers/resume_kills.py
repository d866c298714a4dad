"""A run that is killed again and again and resumed each time, besides one that is left alone.

    python -m tests.helpers.resume_kills [--kills 50] [--saves 20] [--seed 0] [--launcher ray] [--async-save]
        [--durable] [--mixture]

The driver gets SIGKILL at random moments of its life, so many of them while it writes a checkpoint: those kills are
counted only when they left an unfinished one. With `--durable` every process of the run is killed, steps are saved more
seldom, and what was sampled since the last checkpoint is taken from files (`data_plane.durable`). With `--mixture` the
prompts are those of three sources, whose weights change on the way, and a curriculum chooses among them. After every
kill no step that has a checkpoint lacks its line, and at the end all lines are those of the uninterrupted run. Prints a
summary; exit code 1 when anything differs.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from tests.helpers.processes import MARK, end_all, wait_for_none
from tests.helpers.runs import LOCAL, logged_steps, rollouts_of, run_cli, start_cli, write_recipe
from tests.helpers.tiny_model import write_tiny_folder

LAUNCHERS = {"local": LOCAL, "ray": {"data_plane.impl": "ray"}}
STEPS_PER_KILL = 3
"""Steps that a life reaches at most before it is killed."""
DURABLE_SAVE_PERIOD = 3
"""Steps between two checkpoints where groups are kept in files."""
MIXTURE = {
    name: {
        "dataset_name": "sort_digits",
        "size": size,
        "seed": size,
        "options": {"min_digits": 3, "max_digits": 5},
        **more,
    }
    for name, size, more in (("a", 40, {"weight": 3}), ("b", 7, {"weight": 2}), ("c", 23, {"schedule": {"20": 9}}))
}
CURRICULUM = {"window": {"least": 0.2, "most": 0.6, "easy": 0.3}, "again": {"share": 0.2}, "passed_at": 0.5}
RESTORED = "rollout/restored_groups"
GONE_S = 120.0
"""Ray's agents outlive a killed driver by up to a minute."""
LIFE_S = 300.0
"""Longest wait for a start and a few steps, on a machine that does much else."""


@dataclass(kw_only=True)
class Result:
    """Counts and problems of the experiment."""

    kills_at_random: int = 0
    kills_during_a_save: int = 0
    kills_before_the_first_step: int = 0
    """Kills at random that came during the start of the processes."""
    kills_just_after_a_save: int = 0
    """Meant for a save that was faster; not one of the others."""
    resumed_from: list[int] = field(default_factory=list)
    restored_groups: int = 0
    """Groups of the last lives of their steps that were not sampled again."""
    steps: int = 0
    seconds: int = 0
    processes_left: int = 0
    problems: list[str] = field(default_factory=list)


class ResumeKills:
    """One experiment.

    Args:
        folder: for both runs.
        launcher: `ray` or `local`.
        kills: of the driver, `saves` of them during a save.
        async_save: save beside the training, in the run that is killed alone.
        durable: keep finished groups in files, and kill every process.
        mixture: draw prompts from three sources, by a curriculum.
    """

    def __init__(
        self,
        folder: Path,
        model: Path,
        *,
        launcher: str,
        kills: int,
        saves: int,
        seed: int,
        async_save: bool = False,
        durable: bool = False,
        mixture: bool = False,
    ) -> None:
        self._settings = [f"{name}={value}" for name, value in LAUNCHERS[launcher].items()]
        self._random, self._is_durable = random.Random(seed), durable
        period = DURABLE_SAVE_PERIOD if durable else 1
        steps = {"max_num_steps": (STEPS_PER_KILL + 2 * period - 1) * kills + 2}
        saving = {"enabled": True, "save_period": period, "keep_top_k": 2, "metric_name": "train:reward"}
        plane = {"durable": {"path": str(folder / "groups")}} if durable else {}
        data = {"data": {"train": MIXTURE, "curriculum": CURRICULUM}} if mixture else {}
        self._recipe = write_recipe(
            folder / "killed",
            model,
            grpo=steps,
            checkpointing={**saving, "async_save": async_save},
            data_plane=plane,
            **data,
        )
        self._groups = folder / "groups"
        if durable:
            # A group that is sampled beside fewer others then has the same bits.
            self._settings.append("policy.generation.batch_invariant=true")
        self._whole = write_recipe(folder / "whole", model, grpo=steps, checkpointing=saving, **data)
        self._logs, self._num_steps = folder / "killed" / "logs", steps["max_num_steps"]
        self._saved = self._logs / "checkpoints"
        plan = [True] * saves + [False] * (kills - saves)
        self._random.shuffle(plan)
        self._plan = plan
        self._first, self._left = 0, set[str]()
        self._start_s = 0.0
        """Time from a start to its first step, of the last life that trained one."""
        self.result = Result(steps=steps["max_num_steps"])

    def run(self) -> Result:
        """Kills by the plan, lets the last life end, and compares."""
        mark = os.environ[MARK] = uuid.uuid4().hex
        try:
            self._live()
            self.result.processes_left = len(wait_for_none(mark, timeout_s=GONE_S))
        finally:
            del os.environ[MARK]
            end_all(mark)
        return self.result

    def _live(self) -> None:
        started = time.monotonic()
        result = self.result
        self._whole_run()
        for number, during_a_save in enumerate(self._plan):
            is_done = False
            while not is_done and not result.problems:
                is_done = self._kill_during_a_save() if during_a_save else self._kill_at_random()
                self._check_lines(number)
                self._tell(number)
        code, output = run_cli(self._recipe, *self._arguments(), timeout_s=LIFE_S + 5 * self._num_steps)
        if code != 0:
            result.problems.append(f"the last life ended with {code}: {output[-2000:]}")
        self._note_resume(output)
        self._compare()
        result.seconds = round(time.monotonic() - started)

    def _tell(self, number: int) -> None:
        steps = max(self._saved_steps(), default=0)
        kind = "during a save" if self._plan[number] else "at random"
        print(f"kill {number + 1}/{len(self._plan)}, {kind}: {steps} steps saved", file=sys.stderr, flush=True)

    def _whole_run(self) -> None:
        code, output = run_cli(self._whole, *self._settings, timeout_s=LIFE_S + 5 * self._num_steps)
        assert code == 0, output[-3000:]

    def _arguments(self) -> list[str]:
        """Resumes where there is something to resume from, and else starts over."""
        has_saved = any(self._saved.glob("step_*"))
        return [*self._settings, "checkpointing.resume=true" if has_saved else "logger.overwrite=true"]

    def _kill_during_a_save(self) -> bool:
        """Kills at a random moment of a random save; False when it was over before the signal arrived."""
        life = self._begin()
        try:
            for _ in range(self._random.randint(1, STEPS_PER_KILL)):
                if not self._wait(life, lambda: bool(self._unfinished())):
                    return False
                seen = self._unfinished()
                if self._random.random() < 0.5:
                    break
                # The next save is another folder.
                self._wait(life, lambda seen=seen: not seen & self._unfinished())
            time.sleep(self._random.uniform(0, 0.03))
        finally:
            self._kill(life)
        hit = bool(self._unfinished())
        self.result.kills_during_a_save += hit
        self.result.kills_just_after_a_save += not hit
        return hit

    def _kill_at_random(self) -> bool:
        """Kills at a random moment between the start and a few steps."""
        life = self._begin()
        started = time.monotonic()
        try:
            if self._start_s and self._random.random() < 0.3:
                at_most = self._random.uniform(0, self._start_s)
                self._wait(life, lambda: self._steps_since_start() >= 1, timeout_s=at_most)
                self.result.kills_before_the_first_step += not self._steps_since_start()
            else:
                wanted = self._random.randint(1, STEPS_PER_KILL)
                if not self._wait(life, lambda: self._steps_since_start() >= 1):
                    return False
                self._start_s = time.monotonic() - started
                self._wait(life, lambda: self._steps_since_start() >= wanted)
                time.sleep(self._random.uniform(0, 0.5))
        finally:
            self._kill(life)
        self.result.kills_at_random += 1
        return True

    def _begin(self) -> subprocess.Popen[str]:
        self._first = max(self._saved_steps(), default=0)
        # What an earlier life left is there until this one has started.
        self._left = {path.name for path in self._saved.glob("tmp_step_*")}
        return start_cli(self._recipe, *self._arguments())

    def _unfinished(self) -> set[str]:
        """Checkpoints that this life is writing."""
        return {path.name for path in self._saved.glob("tmp_step_*")} - self._left

    def _steps_since_start(self) -> int:
        return max(self._saved_steps(), default=0) - self._first

    def _wait(self, life: subprocess.Popen[str], is_reached, *, timeout_s: float = LIFE_S) -> bool:
        deadline = time.monotonic() + timeout_s
        while not is_reached():
            if life.poll() is not None:
                self.result.problems.append(f"ended by itself with {life.returncode}: {life.stdout.read()[-2000:]}")
                return False
            if time.monotonic() > deadline:
                return False
            time.sleep(0.002)
        return True

    def _kill(self, life: subprocess.Popen[str]) -> None:
        life.kill()
        life.wait()
        if self._is_durable:
            end_all(os.environ[MARK])
        # What the run started dies by itself and may hold the pipe for a while: what it has written is enough.
        os.set_blocking(life.stdout.fileno(), False)
        self._note_resume(life.stdout.buffer.read() or b"")
        life.stdout.close()

    def _note_resume(self, output: str | bytes) -> None:
        text = output.decode(errors="replace") if isinstance(output, bytes) else output
        for line in text.splitlines():
            if line.startswith("resuming after step "):
                self.result.resumed_from.append(int(line.split()[3]))

    def _saved_steps(self) -> list[int]:
        return [int(path.name.removeprefix("step_")) for path in self._saved.glob("step_*")]

    def _check_lines(self, number: int) -> None:
        """No step that has a checkpoint lacks its line, and no step has two."""
        if not (self._logs / "metrics.jsonl").is_file():
            return
        lines = [row["step"] for row in logged_steps(self._logs)]
        if lines != list(range(1, len(lines) + 1)):
            self.result.problems.append(f"after kill {number}: steps {lines[:5]} ... {lines[-5:]}")
        if max(self._saved_steps(), default=0) > len(lines):
            self.result.problems.append(f"after kill {number}: {len(lines)} lines, saved {self._saved_steps()}")

    def _compare(self) -> None:
        ours, whole = logged_steps(self._logs), logged_steps(self._whole.parent / "logs")
        if [row["step"] for row in ours] != list(range(1, self._num_steps + 1)):
            self.result.problems.append(f"{len(ours)} lines at the end, expected {self._num_steps}")
        for mine, theirs in zip(ours, whole, strict=False):
            restored = int(mine.get(RESTORED, 0))
            self.result.restored_groups += restored
            names = {name for name in mine.keys() | theirs.keys() if not name.startswith("data_plane/")} - {RESTORED}
            other = sorted(name for name in names if mine.get(name) != theirs.get(name))
            if other:
                shown = {name: (mine.get(name), theirs.get(name)) for name in other[:3]}
                self.result.problems.append(f"step {mine['step']}: {len(other)} metrics differ: {shown}")
        for step in range(1, self._num_steps + 1):
            pair = [rollouts_of(logs, step) for logs in (self._logs, self._whole.parent / "logs")]
            if [row["response"] for row in pair[0]] != [row["response"] for row in pair[1]]:
                self.result.problems.append(f"step {step}: other rollouts")
        if self._is_durable and (left := list(self._groups.glob("*"))):
            self.result.problems.append(f"groups left in files after the end: {left}")
        if left := [path.name for path in self._saved.iterdir() if not path.name.startswith(("step_", "latest"))]:
            self.result.problems.append(f"left besides the checkpoints: {left}")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--saves", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--launcher", choices=sorted(LAUNCHERS), default="ray")
    parser.add_argument("--async-save", action="store_true")
    parser.add_argument("--durable", action="store_true")
    parser.add_argument("--mixture", action="store_true")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        result = ResumeKills(folder, write_tiny_folder(folder / "model"), **vars(options)).run()
    print(yaml.safe_dump(vars(result), sort_keys=False, default_flow_style=None, width=110))
    return 1 if result.problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
