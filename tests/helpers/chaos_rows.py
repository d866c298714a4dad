"""Rows of `make chaos` that are no single kill: a fixed table of faults, each with its expected end and a deadline.

A row is a whole run of its own, or a suite that plants faults through real refits or kills engines. `run_row` says what
became of it in the words of the expected end, so that a row holds when both are equal.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from nemo_rl.utils.trackers import METRICS_FILE
from tests.helpers.kernel_models import write_dense
from tests.helpers.processes import MARK, end_all, wait_for_none
from tests.helpers.runs import LOCAL, ROOT, logged_steps, write_recipe

GONE_S = 60.0
"""From the end of a row's process to that of its last child."""
RUN_S, SUITE_S = 300.0, 900.0
"""Deadlines, on a machine that does much else."""
MOMENTS = 20
"""Of a shutdown, in which a second signal arrives."""
MOMENT_S = 0.1
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
CLOCK = """
import time
real, state = time.time, {"calls": 0}
def jumping():
    state["calls"] += 1
    return real() + (0, 86400, -86400, 7.5e8, -3600)[state["calls"] // 50 % 5]
time.time = jumping
time.time_ns = lambda: int(jumping() * 1e9)
"""
"""Of every Python process of a run, as a sitecustomize; waits of C libraries keep the machine's own clock."""
SAVING = {"checkpointing.enabled": "true", "checkpointing.save_period": "1", "checkpointing.keep_top_k": "null"}


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultRow:
    """One row."""

    name: str
    expected: str
    run: Callable[[Path, Path], str]
    """Given a folder of its own and a tiny model, says what became of it."""

    def __str__(self) -> str:
        return f"fault {self.name}"


def _tests(*words: str) -> Callable[[Path, Path], str]:
    def run(folder: Path, model: Path) -> str:
        del model
        options = ["-q", "-p", "no:cacheprovider", f"--basetemp={folder / 'pytest'}"]
        code, text = _ended([sys.executable, "-m", "pytest", *options, *words], limit_s=SUITE_S)
        if code is None:
            return "no end by the deadline"
        if code:
            return " ".join(re.findall(r"^(?:FAILED|ERROR) .*", text, re.MULTILINE))[:200] or f"exit code {code}"
        num_skipped = re.search(r"(\d+) skipped", text)
        return "all found" if num_skipped is None else f"{num_skipped[1]} skipped"

    return run


def _ended(
    command: list[str], *, limit_s: float, environment: Mapping[str, str] | None = None, at_end: str = ""
) -> tuple[int | None, str]:
    """Exit code (None: it had to be ended) and output; what it left running is told in the output."""
    mark = uuid.uuid4().hex
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **(environment or {}), MARK: mark},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        end_all(mark)
        process.kill()
        output, _ = process.communicate()
        return None, output
    left = wait_for_none(mark, timeout_s=GONE_S)
    end_all(mark)
    return process.returncode, output + "".join(f"\nleft: {what}" for what in left) + at_end


def _command(recipe: Path, settings: Mapping[str, object]) -> list[str]:
    words = [f"{name}={value}" for name, value in settings.items()]
    return [sys.executable, "examples/run_grpo.py", "--config", str(recipe), *words]


def _told(code: int | None, text: str, *, cause: str = "") -> str:
    """The end of a run in a few words."""
    if code is None:
        return "no end by the deadline"
    problems = [line for line in text.splitlines() if line.startswith("left: ")][:1]
    if "Traceback (most recent" in text:
        problems.append("a traceback")
    if cause and not re.search(cause, text[text.rfind("\nerror") :]):
        problems.append("the cause is not named")
    return ", ".join([f"exit code {code}", *problems])


def _plane_at_capacity(folder: Path, model: Path) -> str:
    settings = {**LOCAL, "data_plane.storage_capacity.rows": 15, "data_plane.timeout_s": 5}
    code, text = _ended(_command(write_recipe(folder, model), settings), limit_s=RUN_S)
    return _told(code, text, cause=r"storage_capacity|capacity|rows")


def _jumping_clock(folder: Path, model: Path) -> str:
    """As a run of an even clock, number by number."""
    (folder / "clock").mkdir(parents=True)
    (folder / "clock" / "sitecustomize.py").write_text(CLOCK)
    losses = []
    for name, path in (("even", str(ROOT)), ("jumping", f"{folder / 'clock'}{os.pathsep}{ROOT}")):
        recipe = write_recipe(folder / name, model)
        code, text = _ended(
            _command(recipe, {"data_plane.impl": "ray"}), limit_s=RUN_S, environment={"PYTHONPATH": path}
        )
        if code != 0:
            return f"{name} clock: {_told(code, text)}"
        losses.append([row["train/loss"] for row in logged_steps(folder / name / "logs")])
    return "the same losses" if losses[0] == losses[1] else f"other losses: {losses}"


def _small_shared_memory(folder: Path, model: Path) -> str:
    """A file system of 64 KiB in place of /dev/shm."""
    recipe = write_recipe(folder, model)
    inside = 'mount -t tmpfs -o size=64k tmpfs /dev/shm && exec "$@"'
    settings = {**LOCAL, "data_plane.impl": "shm", "data_plane.timeout_s": 10}
    code, text = _ended(["unshare", "--mount", "sh", "-c", inside, "sh", *_command(recipe, settings)], limit_s=RUN_S)
    return _told(code, text, cause="/dev/shm|space|shared memory")


def _signals_of_a_shutdown(folder: Path, model: Path) -> str:
    """A second signal at each of so many moments after the first one."""
    wrong = []
    for moment in range(MOMENTS):
        own = folder / str(moment)
        settings = {**(LOCAL if moment % 4 else {"data_plane.impl": "ray"}), "grpo.max_num_steps": 100000}
        recipe, mark = write_recipe(own, model), uuid.uuid4().hex
        with (own / "output.txt").open("w") as output:
            process = subprocess.Popen(
                _command(recipe, settings),
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), MARK: mark},
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        try:
            give_up = time.monotonic() + RUN_S
            metrics = own / "logs" / METRICS_FILE
            while not (metrics.is_file() and metrics.read_text().count("\n") > 1) and time.monotonic() < give_up:
                time.sleep(0.05)
            for number in (SIGNALS[moment % 3], SIGNALS[moment // 3 % 3]):
                process.send_signal(number)
                time.sleep(moment * MOMENT_S)
            process.wait(RUN_S)
            left = wait_for_none(mark, timeout_s=GONE_S)
            told = _told(process.returncode, (own / "output.txt").read_text())
            if told != "exit code 130" or left:
                wrong.append(f"moment {moment}: {told} {left[:1] or ''}")
        except subprocess.TimeoutExpired:
            wrong.append(f"moment {moment}: no end")
        finally:
            end_all(mark)
            process.kill()
            process.wait()
    return "; ".join(wrong)[:200] or f"exit code 130 at {MOMENTS} moments"


def _resumed(
    changes: Mapping[str, object], *, write: Callable[[Path], Path] | None = None
) -> Callable[[Path, Path], str]:
    """Two steps, and the third one otherwise; with a model of its own where an engine needs one."""

    def run(folder: Path, model: Path) -> str:
        model = model if write is None else write(folder / "model")
        recipe = write_recipe(folder, model, cluster={"cpu_workers_per_node": 1})
        first = {**SAVING, "data_plane.impl": "ray"}
        code, text = _ended(_command(recipe, {**first, "grpo.max_num_steps": 2}), limit_s=RUN_S)
        if code != 0:
            return f"before: {_told(code, text)}"
        words = {**first, "checkpointing.resume": "true", **changes}
        code, text = _ended(_command(recipe, words), limit_s=RUN_S)
        steps = [int(row["step"]) for row in logged_steps(folder / "logs")]
        return f"{_told(code, text)}, steps {steps}"

    return run


REFIT = "tests/unit/models/test_refit_receipt.py"
CONTINUED = "exit code 0, steps [1, 2, 3]"
TABLE: tuple[FaultRow, ...] = (
    FaultRow(name="full-refit planted", expected="all found", run=_tests(REFIT, "-k", "embedded")),
    FaultRow(name="vllm-refit planted", expected="all found", run=_tests(REFIT, "-k", "vllm")),
    FaultRow(
        name="delta-refit planted",
        expected="all found",
        run=_tests(REFIT, "tests/unit/models/test_refit_delta.py", "-k", "delta or doubt or whole or versions"),
    ),
    FaultRow(name="vllm-engines killed stopped", expected="all found", run=_tests("tests/e2e/test_lost_vllm.py")),
    FaultRow(name="engines killed stopped", expected="all found", run=_tests("tests/e2e/test_lost_engines.py")),
    FaultRow(name="plane-contract capacity", expected="all found", run=_tests("tests/contract/test_capacity.py")),
    FaultRow(name="plane-run capacity", expected="exit code 1", run=_plane_at_capacity),
    FaultRow(
        name="async-save killed",
        expected="all found",
        run=_tests("tests/e2e/test_interrupt.py", "-k", "killed_run_resumes", "tests/e2e/test_async_save.py"),
    ),
    FaultRow(name="resume world", expected=CONTINUED, run=_resumed({"cluster.cpu_workers_per_node": 2})),
    FaultRow(
        name="resume layout",
        expected=CONTINUED,
        run=_resumed({"cluster.cpu_workers_per_node": 2, "policy.dtensor_cfg.tensor_parallel_size": 2}),
    ),
    FaultRow(name="resume store", expected=CONTINUED, run=_resumed({"data_plane.impl": "transfer_queue"})),
    FaultRow(
        name="resume engine", expected=CONTINUED, run=_resumed({"policy.generation.backend": "vllm"}, write=write_dense)
    ),
    FaultRow(name="clock jumps", expected="the same losses", run=_jumping_clock),
    FaultRow(name="small shm", expected="exit code 1", run=_small_shared_memory),
    FaultRow(name="signals shutdown", expected=f"exit code 130 at {MOMENTS} moments", run=_signals_of_a_shutdown),
    FaultRow(name="two runs", expected="all found", run=_tests("tests/e2e/test_two_runs.py")),
)
"""Storage units, controllers and ledgers are killed and stopped in the other table of `chaos`."""
