"""Kills and stops every process of small runs, plants other faults, and prints `row | expected | got | seconds`.

    python -m tests.helpers.chaos [--only WORD] [--stores transfer_queue,ray]

A row is a signal, a process and a stage: the run must end by its deadline with its own exit code, name what died,
show no traceback, and leave no process, no shared memory and no folder of its own. Servers of Ray that die while Ray
starts may also be started again: then the run must train. Rows that are no single kill are in `FAULT_ROWS`:
each is a whole run, or a suite that plants faults through real refits or kills engines, with its expected end in words
and a deadline. Exit code 1 when a row ends otherwise than expected.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import psutil

from examples.starter import STARTER_TASKS, make_starter
from nemo_rl.data_plane.ledger.events import EVENTS_FILE
from nemo_rl.distributed.run_folder import OWNER_FILE
from nemo_rl.utils.trackers import METRICS_FILE
from tests.helpers.model_families import write_dense
from tests.helpers.processes import MARK, end_all, marked, wait_for_none
from tests.helpers.runs import LOCAL, ROOT, logged_steps, start_cli, write_recipe
from tests.helpers.tiny_model import write_tiny_folder

FAULT_GONE_S = 60.0
"""Longest time from the end of a row's process to that of its last child."""
RUN_S, SUITE_S = 300.0, 900.0
"""Deadlines, on a machine that does much else."""
MOMENTS = 20
"""Number of moments of a shutdown in which a second signal arrives."""
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
"""The sitecustomize of every Python process of a run; waits of C libraries keep the machine's own clock."""
SAVING = {"checkpointing.enabled": "true", "checkpointing.save_period": "1", "checkpointing.keep_top_k": "null"}


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultRow:
    """A planted fault with its expected end."""

    name: str
    expected: str
    run: Callable[[Path, Path], str]
    """Function of its own folder and a tiny model that returns the end of the row in words."""

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
    """Return exit code (None: it had to be ended) and output, with a line for each process that was left."""
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
    left = wait_for_none(mark, timeout_s=FAULT_GONE_S)
    end_all(mark)
    return process.returncode, output + "".join(f"\nleft: {what}" for what in left) + at_end


def _command(recipe: Path, settings: Mapping[str, object]) -> list[str]:
    words = [f"{name}={value}" for name, value in settings.items()]
    return [sys.executable, "examples/run_grpo.py", "--config", str(recipe), *words]


def _told(code: int | None, text: str, *, cause: str = "") -> str:
    """Return the end of a run in a few words."""
    if code is None:
        return "no end by the deadline"
    problems = [line for line in text.splitlines() if line.startswith("left: ")][:1]
    if "Traceback (most recent" in text:
        problems.append("a traceback")
    if cause and not re.search(cause, _last_error(text)):
        problems.append("the cause is not named")
    return ", ".join([f"exit code {code}", *problems])


def _last_error(text: str) -> str:
    """Return the last error of an output with what follows it; the error may be its first line."""
    return text[text.rfind("\nerror") + 1 :]


def _plane_at_capacity(folder: Path, model: Path) -> str:
    settings = {**LOCAL, "data_plane.storage_capacity.rows": 15, "data_plane.timeout_s": 5}
    code, text = _ended(_command(write_recipe(folder, model), settings), limit_s=RUN_S)
    return _told(code, text, cause=r"storage_capacity|capacity|rows")


def _jumping_clock(folder: Path, model: Path) -> str:
    """Compare a run whose clock jumps with one of an even clock, number by number."""
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
    """Run with a file system of 64 KiB in place of /dev/shm."""
    recipe = write_recipe(folder, model)
    inside = 'mount -t tmpfs -o size=64k tmpfs /dev/shm && exec "$@"'
    settings = {**LOCAL, "data_plane.impl": "shm", "data_plane.timeout_s": 10}
    code, text = _ended(["unshare", "--mount", "sh", "-c", inside, "sh", *_command(recipe, settings)], limit_s=RUN_S)
    return _told(code, text, cause="/dev/shm|space|shared memory")


def _signals_of_a_shutdown(folder: Path, model: Path) -> str:
    """Send a second signal at each of `MOMENTS` moments after the first one."""
    wrong = []
    for moment in range(MOMENTS):
        own = folder / str(moment)
        settings = {**(LOCAL if moment % 4 else {"data_plane.impl": "ray"}), "grpo.max_num_steps": 100000}
        recipe, mark = write_recipe(own, model), uuid.uuid4().hex
        os.environ[MARK] = mark
        with (own / "output.txt").open("w") as output:
            words = [f"{name}={value}" for name, value in settings.items()]
            process = start_cli(recipe, *words, log=output)
        del os.environ[MARK]
        try:
            give_up = time.monotonic() + RUN_S
            metrics = own / "logs" / METRICS_FILE
            while not (metrics.is_file() and metrics.read_text().count("\n") > 1) and time.monotonic() < give_up:
                time.sleep(0.05)
            for number in (SIGNALS[moment % 3], SIGNALS[moment // 3 % 3]):
                process.send_signal(number)
                time.sleep(moment * MOMENT_S)
            process.wait(RUN_S)
            left = wait_for_none(mark, timeout_s=FAULT_GONE_S)
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
    """Return a row that trains two steps, and the third one with other settings; `write` gives it another model."""

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
FAULT_ROWS: tuple[FaultRow, ...] = (
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
"""Faults that are no single kill; `table` kills and stops the processes."""


DEADLINES = {
    "cluster.stage_timeout_s": 30,
    "cluster.collective_timeout_s": 20,
    "cluster.worker_start_timeout_s": 300,
    "data_plane.timeout_s": 10,
    "env.timeout_s": 10,
    "env.on_timeout": "error",
}
"""Deadlines of each run in seconds: they find a stopped process, and none is replaced."""
START_S = 400.0
"""Longest time until the stage is reached, on a machine that does much else."""
END_S = {"KILL": 60.0, "STOP": 240.0, "CONT": 60.0}
"""Longest time from the signal to the end of the run."""
GONE_S = 30.0
"""Longest time from the end of the run to that of its last process."""
STOPPED_DRIVER_S = 3.0
CONT_S = 30.0
"""From SIGSTOP to SIGCONT: a stopped worker is named before."""
CONVERSATIONS = ROOT / "configs/recipes/grpo_guess_async_cpu.yaml"
SHORT = {
    "grpo.num_prompts_per_step": 4,
    "grpo.num_generations_per_prompt": 4,
    "grpo.drop_zero_advantage_groups": "false",
    "policy.train_global_batch_size": 8,
    "grpo.val_period": 0,
    "grpo.val_at_start": "false",
    "grpo.val_at_end": "false",
    "data.validation": "null",
    "checkpointing.enabled": "false",
    "logger.tensorboard_enabled": "false",
    "logger.live_panel": "false",
}
"""What makes the steps of `CONVERSATIONS` short."""
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
    "scorer": r"session_rewards",
    "guard": r"session_rewards",
    "forks": r"fork_server_process",
    "reaper": r"process_guard\.py \S+/r[a-z0-9_]+ $",
    "tools": r"-P -c import sys.*zygote_child",
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
    "forks": r"worker|rank \d|generation|rollout|[Ll]edger|fork server",
    "reaper": r"reaper",
    "tools": r"environment|tool",
}
"""Pattern that the error must match, by role."""
STAGES = {"rollout": '"event":"clear"', "train": '"event":"commit"'}
"""Event of the ledger that comes just before each stage."""
STARTED_AGAIN = ("raylet", "gcs", "forks", "scorer", "guard")
"""A start of Ray that fails is repeated; without a fork server, workers start as Ray starts them; processes in which
a reward is tried before the run may just have done so."""
NOT_MISSED = (
    *(("STOP", "guard"), ("STOP", "forks"), ("STOP", "reaper"), ("KILL", "reaper")),
    # The ledger knows where rows are.
    *(("STOP", "controller"), ("KILL", "controller")),
)
"""Signals that stop no other process: the run goes on, and must end when it is told to."""
ENDS = "ends in time, cause named, nothing left"
OF_TRANSFER_QUEUE = ("controller", "storage")
OF_REWARDS = ("scorer", "guard")
REPLACED = ("engine", "rollout", "tools")
"""Processes that an asynchronous run starts again."""
HEARD_AGAIN = ("driver", "policy", "engine", "rollout")
"""Roles that are stopped and go on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One run of the table."""

    store: str
    signal: str
    role: str
    stage: str
    is_async: bool = False
    """Asynchronous, with conversations."""

    def __str__(self) -> str:
        kind = "async" if self.is_async else "sync"
        return f"{self.store:<14} {self.signal:<4} {self.role:<10} {self.stage:<7} {kind:<5}"

    @property
    def may_go_on(self) -> bool:
        """Whether the run may do without the process, or must wait for it."""
        return (
            self.signal == "CONT" or (self.signal, self.role) in NOT_MISSED or (self.is_async and self.role in REPLACED)
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The end of a run."""

    code: int | None
    """Exit code, or None when the run had to be ended."""
    seconds: float
    told: str
    """The line of the error."""
    problems: tuple[str, ...]


def table(stores: Sequence[str]) -> Iterator[Row]:
    """Yield every kill at the start, in a rollout and in training, and every stop in training; over Ray's store also
    every kill in an asynchronous run with conversations, and stops that end."""
    if "ray" in stores:
        for is_async in (False, True):
            for role in HEARD_AGAIN:
                yield Row(store="ray", signal="CONT", role=role, stage="train", is_async=is_async)
        for role in ROLES:
            if role not in (*OF_TRANSFER_QUEUE, *OF_REWARDS):
                yield Row(store="ray", signal="KILL", role=role, stage="train", is_async=True)
    for store in stores:
        left_out = ("tools",) if store == "transfer_queue" else ("tools", *OF_TRANSFER_QUEUE)
        roles = [role for role in ROLES if role not in left_out]
        stages = ("start", "rollout", "train") if store == "transfer_queue" else ("train",)
        for role, stage in product(roles, stages):
            yield Row(store=store, signal="KILL", role=role, stage=stage)
        for role in roles:
            yield Row(store=store, signal="STOP", role=role, stage="train")


def find(role: str, mark: str) -> psutil.Process | None:
    """Return the run's first process of a role."""
    for process in marked(mark):
        try:
            if re.search(ROLES[role], " ".join(process.cmdline()) + " ") and _is_of_pair(role, process):
                return process
        except (psutil.NoSuchProcess, psutil.AccessDenied, ProcessLookupError):
            continue
    return None


def _is_of_pair(role: str, process: psutil.Process) -> bool:
    """Return whether the process is the one of guard, remover and scorer that the role names; other roles are alone."""
    if role == "scorer":
        # Guard and remover lead sessions of their own.
        return os.getsid(process.pid) != process.pid
    return role != "guard" or bool(process.children())


def hit(row: Row, folder: Path, model: Path) -> Outcome:
    """Run a row and return its end."""
    mark = os.environ[MARK] = uuid.uuid4().hex
    settings = {"grpo.max_num_steps": 100000, "data_plane.impl": row.store}
    # A stop that ends must not look like a failure; the asynchronous run has the deadlines of its recipe.
    settings |= {} if row.is_async or row.signal == "CONT" else DEADLINES
    if row.is_async:
        settings |= {**SHORT, "policy.model_name": _guessing(model.parent), "logger.log_dir": folder / "logs"}
    recipe = CONVERSATIONS if row.is_async else write_recipe(folder, model)
    temporary = folder / "tmp"
    temporary.mkdir(parents=True)
    before, os.environ["TMPDIR"] = os.environ.get("TMPDIR"), str(temporary)
    process = start_cli(recipe, *(f"{name}={value}" for name, value in settings.items()))
    os.environ.pop("TMPDIR") if before is None else os.environ.update(TMPDIR=before)
    output_file = folder / "output.txt"
    with output_file.open("w") as file:
        reader = subprocess.Popen(["cat"], stdin=process.stdout, stdout=file)
    try:
        victim = _wait_for_stage(row, folder / "logs" / EVENTS_FILE, mark, process)
        if victim is None:
            return _outcome(row, process, 0.0, output_file, ["the stage was not reached"])
        victim.send_signal(signal.SIGKILL if row.signal == "KILL" else signal.SIGSTOP)
        started = time.monotonic()
        if row.signal == "CONT":
            time.sleep(CONT_S)
            victim.send_signal(signal.SIGCONT)
        if row.role == "driver" and row.signal == "STOP":
            time.sleep(STOPPED_DRIVER_S)
            victim.send_signal(signal.SIGCONT)
            process.send_signal(signal.SIGTERM)
        problems = []
        if row.may_go_on and _goes_on(folder / "logs" / EVENTS_FILE, process):
            if (
                row.signal == "CONT"
                and row.role != "driver"
                and "(state T" not in " ".join(output_file.read_text().split())
            ):
                problems.append("the stopped process is not named")
            row, started = replace(row, role="driver"), time.monotonic()
            process.send_signal(signal.SIGTERM)
        if row.stage == "start" and row.role in STARTED_AGAIN and _trains(folder / "logs" / EVENTS_FILE, process):
            row = replace(row, role="driver")
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(END_S[row.signal])
            left = wait_for_none(mark, timeout_s=GONE_S)
        except subprocess.TimeoutExpired:
            problems.append(f"no end after {END_S[row.signal]:.0f} s")
            left = []
        seconds = time.monotonic() - started
        left += _left_behind(process.pid, folder / "logs" / EVENTS_FILE)
        left += [
            str(path) for path in temporary.iterdir() if path.name != f"nemo_rl-{os.getuid()}" or any(path.iterdir())
        ]
        problems += [f"left: {what}" for what in left]
        return _outcome(row, process, seconds, output_file, problems)
    finally:
        end_all(mark)
        process.kill()
        process.wait()
        reader.wait()
        assert process.stdout is not None
        process.stdout.close()
        del os.environ[MARK]


def _guessing(folder: Path) -> Path:
    """Return the model of `CONVERSATIONS`, hardly trained."""
    model, task = folder / "guessing", STARTER_TASKS["guess"]
    if not model.exists():
        make_starter(model, task, config=replace(task.config, max_steps=60, batch_size=16, num_problems=500))
    return model


def _wait_for_stage(row: Row, events: Path, mark: str, process: subprocess.Popen[str]) -> psutil.Process | None:
    """Return the process to hit at the moment when its stage has begun."""
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
    """Return whether the run gets to a step, rather than to its end."""
    give_up = time.monotonic() + START_S
    while time.monotonic() < give_up and process.poll() is None:
        if events.is_file() and STAGES["train"] in events.read_text():
            return True
        time.sleep(0.1)
    return False


def _goes_on(events: Path, process: subprocess.Popen[str]) -> bool:
    """Return whether the run trains further steps."""
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
        if not re.search(NAMED[row.role], _last_error(output)):
            problems.append("the cause is not named")
    if "Traceback (most recent" in output:
        problems.append("a traceback")
    return Outcome(code=code, seconds=seconds, told=last, problems=tuple(problems))


def _left_behind(driver: int, events: Path) -> list[str]:
    """Return paths that the run has left outside of its log folder, once its last process is gone."""
    root = Path(tempfile.gettempdir()) / f"nemo_rl-{os.getuid()}"
    folders = [path.parent for path in root.glob(f"*/{OWNER_FILE}") if f'"pid": {driver},' in path.read_text()]
    runs = set(re.findall(r'"run":"(\w+)"', events.read_text())) if events.is_file() else set()
    return [str(path) for path in (*folders, *(path for run in runs for path in Path("/dev/shm").glob(f"*{run}*")))]


def _end_of(row: Row | FaultRow, folder: Path, model: Path) -> tuple[str, str, float]:
    """Return the expected end, the actual end and the seconds of a row."""
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
    rows = [
        row for row in (*FAULT_ROWS, *table(given.stores.split(","))) if all(word in str(row).split() for word in words)
    ]
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
