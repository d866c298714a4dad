"""Jobs on Slurm nodes: done, cancelled, requeued, at their limit, with a node that is killed, spare or never comes."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from nemo_rl.utils.exits import INTERRUPTED, NODE_LOST, TIME_LIMIT
from nemo_rl.utils.trackers import metrics_by_step
from tests.helpers.runs import logged_steps, run_cli, write_recipe

ROOT = Path(__file__).parents[2]
NODES = {"n1": "127.0.0.2", "n2": "127.0.0.3", "n3": "127.0.0.4"}
"""One address each: Ray takes 127.0.0.1 for another one."""
PROGRAMS = ("slurmctld", "slurmd", "srun", "sbatch", "scancel", "scontrol", "squeue", "munged")
DAEMON_START_S = 30.0
SLURM_LOST_S = 15
"""Time until Slurm itself takes a silent node for lost."""
REQUEUED_S = 10
"""Wait of a requeued job, by default two minutes: until no node knows the credential of its earlier start."""
OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")


def why_no_slurm() -> str | None:
    """Return the reason that Slurm cannot run here, or None."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        return f"no Slurm here ({', '.join(missing)} missing): apt-get install slurmctld slurmd slurm-client munge"
    return None if os.geteuid() == 0 else "only root can start Slurm's daemons"


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("", 0))
        return [one.getsockname()[1] for one in sockets]


class SlurmCluster:
    """Munge, slurmctld and a slurmd per node, all in one folder and ended by their numbers. A context manager.

    Args:
        folder: of configuration, state and logs.
        **options: further lines of slurm.conf.
    """

    def __init__(self, folder: Path, **options: object) -> None:
        self.folder = folder
        self._options = options
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        # Sockets' paths have 107 characters at most.
        self._munge = Path(tempfile.mkdtemp(prefix="m", dir="/tmp"))
        self.temporary = Path(tempfile.mkdtemp(prefix="j", dir="/tmp"))
        """`TMPDIR` of jobs."""

    @property
    def environment(self) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "RAY_"))}
        return {
            **inherited,
            "SLURM_CONF": str(self.folder / "slurm.conf"),
            "LOG_DIR": str(self.folder / "jobs"),
            "TMPDIR": str(self.temporary),
            "PYTHON": sys.executable,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
        }

    def __enter__(self) -> SlurmCluster:
        try:
            self._configure()
            self._start_munge()
            self._begin("slurmctld", "slurmctld", "-D", "-i")
            for name in NODES:
                self.start_node(name)
            self.wait_for(lambda: self.states().count("idle") == len(NODES), "idle nodes", DAEMON_START_S)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the jobs, then everything that was started, by number."""
        if "slurmctld" in self._processes:
            with suppress(AssertionError, subprocess.TimeoutExpired):
                self.run("scancel", "--user=root", check=False)
                self.wait_for(lambda: not self.run("squeue", "--noheader", check=False).strip(), "an empty queue", 20)
        for name in reversed([*self._processes]):
            self.end(name, signal.SIGTERM)
        shutil.rmtree(self._munge, ignore_errors=True)
        shutil.rmtree(self.temporary, ignore_errors=True)

    def end(self, name: str, number: int) -> None:
        """Sends a daemon a signal and waits for its end."""
        process = self._processes.pop(name)
        process.send_signal(number)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)

    def start_node(self, name: str) -> None:
        self._begin(name, "slurmd", "-D", "-N", name)

    def run(self, *words: str, check: bool = True, timeout_s: float = 30.0, **variables: str) -> str:
        """Output of a command of Slurm's, or of one that uses it."""
        done = subprocess.run(
            words, cwd=ROOT, env={**self.environment, **variables}, capture_output=True, text=True, timeout=timeout_s
        )
        assert not check or done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    def states(self) -> list[str]:
        return self.run("sinfo", "--noheader", "--Node", "--format=%T", check=False).split()

    def submit(self, *options: str, **variables: str) -> Job:
        """Submit `sbatch ray.sub` with these options and variables."""
        return self._job(self.run("sbatch", f"--output={self.jobs}/slurm-%j.log", *options, "ray.sub", **variables))

    def launch(self, recipe: Path, *words: str, **variables: str) -> Job:
        """Submit `nemo-rl launch slurm RECIPE`."""
        command = (sys.executable, "-m", "nemo_rl.cli.main", "launch", "slurm", str(recipe))
        return self._job(self.run(*command, f"--log-dir={self.jobs}", *words, **variables))

    @property
    def jobs(self) -> Path:
        folder = self.folder / "jobs"
        folder.mkdir(exist_ok=True)
        return folder

    def leftovers(self) -> list[str]:
        """Run folders of jobs."""
        return [str(path) for path in self.temporary.glob("nemo_rl-*/*")]

    def _job(self, said: str) -> Job:
        found = re.search(r"Submitted batch job (\d+)", said)
        assert found is not None, said
        return Job(self, found[1])

    def wait_for(
        self, is_so: Callable[[], bool], what: str, timeout_s: float, told: Callable[[], str] = lambda: ""
    ) -> None:
        give_up = time.monotonic() + timeout_s
        while not is_so():
            assert time.monotonic() < give_up, f"no {what} within {timeout_s} s; {self.states()}; {told()}"
            time.sleep(0.2)

    def _begin(self, name: str, *words: str) -> None:
        with (self.folder / f"{name}.out").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                words, env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def _start_munge(self) -> None:
        key = self._munge / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        self._munge.chmod(0o711)
        names = {"socket": "socket", "key-file": "key", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        words = [f"--{option}={self._munge / name}" for option, name in names.items()]
        self._begin("munged", "munged", "--foreground", "--force", *words)
        self.wait_for((self._munge / "socket").exists, "socket of munged", DAEMON_START_S)

    def _configure(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        ports = free_ports(1 + len(NODES))
        lines: Mapping[str, object] = {
            "ClusterName": "local",
            "SlurmctldHost": "localhost(127.0.0.1)",
            "SlurmctldPort": ports[0],
            "AuthType": "auth/munge",
            "AuthInfo": f"socket={self._munge / 'socket'},cred_expire={REQUEUED_S}",
            "CredType": "cred/munge",
            "MpiDefault": "none",
            "ProctrackType": "proctrack/linuxproc",
            "ReturnToService": 2,
            "SlurmctldPidFile": self.folder / "slurmctld.pid",
            "SlurmdPidFile": self.folder / "slurmd-%n.pid",
            "SlurmdSpoolDir": self.folder / "spool-%n",
            "SlurmUser": "root",
            "StateSaveLocation": self.folder / "state",
            "SwitchType": "switch/none",
            "TaskPlugin": "task/none",
            "SchedulerType": "sched/builtin",
            "SelectType": "select/cons_tres",
            "SlurmctldLogFile": self.folder / "slurmctld.log",
            "SlurmdLogFile": self.folder / "slurmd-%n.log",
            "SlurmdParameters": "config_overrides",
            "SlurmdTimeout": SLURM_LOST_S,
            **self._options,
        }
        text = [f"{name}={value}" for name, value in lines.items()]
        for (name, address), port in zip(NODES.items(), ports[1:], strict=True):
            text.append(f"NodeName={name} NodeHostname=localhost NodeAddr={address} Port={port} CPUs=8 State=UNKNOWN")
        text.append(f"PartitionName=debug Nodes={','.join(NODES)} Default=YES MaxTime=INFINITE State=UP")
        (self.folder / "slurm.conf").write_text("\n".join(text) + "\n")


class Job:
    """A job of a `SlurmCluster`."""

    def __init__(self, cluster: SlurmCluster, number: str) -> None:
        self._cluster, self.number = cluster, number

    @property
    def log(self) -> str:
        path = self._cluster.jobs / f"slurm-{self.number}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    @property
    def folder(self) -> Path:
        return self._cluster.jobs / self.number

    def field(self, name: str) -> str:
        """Return a field of `scontrol show job`."""
        shown = self._cluster.run("scontrol", "show", "job", "--oneliner", self.number)
        found = re.search(rf"(?:^| ){name}=(\S*)", shown)
        return found[1] if found else ""

    def wait(self, *states: str, timeout_s: float) -> str:
        """Waits for one of these states, or for any that is an end."""
        self._cluster.wait_for(
            lambda: self.field("JobState") in (*states, *OVER),
            f"{states or 'end'}",
            timeout_s,
            lambda: self.log[-3000:],
        )
        return self.field("JobState")

    def wait_for_restart(self, timeout_s: float) -> None:
        """Wait for the second start of a requeued job."""
        self._cluster.wait_for(lambda: "start 1; logs" in self.log, "second start", timeout_s, lambda: self.log[-2000:])

    def wait_for_text(self, text: str, timeout_s: float, *, in_file: Path | None = None) -> None:
        def is_there() -> bool:
            assert self.field("JobState") not in OVER, self.log[-3000:]
            return text in (self.log if in_file is None else in_file.read_text() if in_file.exists() else "")

        self._cluster.wait_for(is_there, f"{text!r}", timeout_s, lambda: self.log[-3000:])

    def processes(self, node: str | None = None) -> dict[int, str]:
        """Live processes whose environment names this job (and node), with their commands."""
        marks = {f"SLURM_JOB_ID={self.number}", f"SLURM_CONF={self._cluster.folder / 'slurm.conf'}"}
        marks |= {f"SLURMD_NODENAME={node}"} if node else set()
        found = {}
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                text = (entry / "environ").read_text(errors="replace") if entry.name.isdecimal() else ""
                if marks <= set(text.split("\0")):
                    found[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ")[:200]
        return found

    def check_nothing_is_left(self, *, but_folders: int = 0) -> None:
        """Processes, folders outside the job's own, and the two ports that the head has listened on.

        Args:
            but_folders: of nodes on which everything was killed: the next job there removes them.
        """
        self._cluster.wait_for(lambda: not self.processes(), "end of all", 30, lambda: str(self.processes()))
        assert len(self._cluster.leftovers()) == but_folders, self._cluster.leftovers()
        for file in self.folder.glob("start_*/head.json"):
            facts = json.loads(file.read_text())
            ports = [facts["port"], *([int(facts["ray"].rpartition(":")[2])] if "ray" in facts else [])]
            for port in ports:
                with socket.socket() as probe:
                    assert probe.connect_ex((facts["address"], port)), f"port {port} is open"
        assert not [*self.folder.glob("start_*/token")]


reason = why_no_slurm()
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.skipif(reason is not None, reason=reason or "")]

TWO_NODES = {"num_nodes": 2, "cpu_workers_per_node": 1}
SAVING = {"enabled": True, "save_period": 1, "keep_top_k": None}
ENDLESS = {"max_num_steps": 100_000}
START_S = 450.0
"""Longest start of a job, on a machine that does much else."""
LOST_S = 60.0
"""Longest time until a lost node is named."""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory) -> Iterator[SlurmCluster]:
    with SlurmCluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture
def cluster(slurm: SlurmCluster) -> SlurmCluster:
    """All nodes are free, also after a test that has failed."""
    slurm.run("scancel", "--user=root")
    slurm.wait_for(lambda: slurm.states() == ["idle"] * len(NODES), "idle nodes", 60)
    return slurm


def wait_for_step(job: Job, step: int, logs: Path) -> None:
    job.wait_for_text(f'"step": {step}', START_S, in_file=logs / "metrics.jsonl")


def learned(logs: Path) -> list[dict[str, float]]:
    return [{k: v for k, v in row.items() if not k.startswith("data_plane/")} for row in logged_steps(logs)]


def test_a_recipe_runs_on_two_nodes_and_leaves_nothing(cluster, tmp_path, model):
    recipe = write_recipe(tmp_path, model, cluster=TWO_NODES, grpo={"max_num_steps": 2})
    job = cluster.launch(recipe)
    job.wait_for_text("all 2 nodes have joined Ray", START_S)
    attached = cluster.run(*(sys.executable, "-m", "nemo_rl.cli.main", "launch", "attach", job.number), "--", "env")
    assert "RAY_ADDRESS=127.0.0.2:" in attached and f"RAY_AUTH_TOKEN_PATH={job.folder}/start_0/token" in attached
    token = job.folder / "start_0" / "token"
    assert token.stat().st_mode & 0o777 == 0o600
    secret = token.read_text()
    assert not [command for command in job.processes().values() if secret in command]
    assert job.wait(timeout_s=START_S) == "COMPLETED", job.log
    assert [row["step"] for row in logged_steps(tmp_path / "logs")] == [1, 2], job.log
    assert "step 2/2" in (job.folder / "start_0" / "command.log").read_text()
    assert {path.name for path in (job.folder / "start_0" / "nodes").iterdir()} == {"n1", "n2"}
    job.check_nothing_is_left()


@pytest.mark.full
@pytest.mark.parametrize(("words", "ended"), [((), "CANCELLED"), (("--signal=USR1",), "FAILED")])
def test_a_cancelled_job_leaves_nothing_and_one_that_is_told_before_saves(cluster, tmp_path, model, words, ended):
    saving = {"enabled": True, "save_period": 1000}
    recipe = write_recipe(tmp_path, model, cluster=TWO_NODES, grpo=ENDLESS, checkpointing=saving)
    job = cluster.launch(recipe)
    wait_for_step(job, 1, tmp_path / "logs")
    cluster.run("scancel", *words, job.number)
    assert job.wait(timeout_s=60) == ended
    job.check_nothing_is_left()
    assert (job.folder / "start_0" / "result").read_text() == f"{INTERRUPTED}\n"
    last = logged_steps(tmp_path / "logs")[-1]["step"]
    assert not words or (tmp_path / "logs" / "checkpoints" / f"step_{last}").is_dir(), job.log


@pytest.mark.full
def test_a_requeued_job_goes_on_to_the_numbers_of_one_left_alone(cluster, tmp_path, model):
    settings = {"checkpointing": SAVING, "grpo": {"max_num_steps": 12}, "cluster": TWO_NODES}
    recipe = write_recipe(tmp_path / "job", model, **settings)
    job = cluster.launch(recipe)
    wait_for_step(job, 2, tmp_path / "job" / "logs")
    cluster.run("scontrol", "requeue", job.number)
    job.wait_for_restart(START_S)
    assert job.wait(timeout_s=START_S) == "COMPLETED", job.log
    assert "resuming after step" in job.log
    alone = write_recipe(tmp_path / "alone", model, **{**settings, "cluster": {"cpu_workers_per_node": 2}})
    code, output = run_cli(alone)
    assert code == 0, output
    assert learned(tmp_path / "job" / "logs") == learned(tmp_path / "alone" / "logs")
    job.check_nothing_is_left()


@pytest.mark.full
def test_a_job_saves_before_its_limit_and_is_requeued(cluster, tmp_path, model):
    saving = {**SAVING, "save_period": 1000}
    recipe = write_recipe(tmp_path, model, checkpointing=saving, grpo=ENDLESS, cluster=TWO_NODES)
    job = cluster.launch(recipe, "--time=2")
    job.wait_for_text("saved step", START_S)
    job.wait_for_restart(START_S)
    assert f"exit code {TIME_LIMIT}: job {job.number} is requeued" in job.log
    job.wait_for_text("resuming after step", START_S)
    cluster.run("scancel", job.number)
    assert job.wait(timeout_s=60) == "CANCELLED"
    job.check_nothing_is_left()


@pytest.mark.full
@pytest.mark.parametrize("requeue", [False, True])
def test_a_killed_node_is_named_and_ends_or_requeues_the_job(cluster, tmp_path, model, requeue):
    recipe = write_recipe(tmp_path, model, cluster=TWO_NODES, grpo=ENDLESS, checkpointing=SAVING)
    job = cluster.launch(recipe, "--requeue" if requeue else "--no-requeue")
    wait_for_step(job, 1, tmp_path / "logs")
    cluster.end("n2", signal.SIGKILL)
    try:
        for pid in job.processes("n2"):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if requeue:
            job.wait_for_text(f"exit code {NODE_LOST}: job {job.number} is requeued", LOST_S)
            assert job.wait("PENDING", "COMPLETING", "REQUEUED", timeout_s=LOST_S) not in ("FAILED", "RUNNING")
            cluster.run("scancel", job.number)
        else:
            assert job.wait(timeout_s=LOST_S) in ("FAILED", "NODE_FAIL"), job.log
        assert "node n2 (" in job.log and "is lost: " in job.log
        job.wait(timeout_s=60)
        job.check_nothing_is_left(but_folders=1)
    finally:
        cluster.start_node("n2")


@pytest.mark.full
def test_a_job_goes_on_with_its_spare_node_when_one_is_killed(cluster, tmp_path, model):
    spare = {**TWO_NODES, "spare_nodes": 1}
    recipe = write_recipe(tmp_path, model, cluster=spare, grpo={"max_num_steps": 20}, checkpointing=SAVING)
    job = cluster.launch(recipe, "--no-requeue")
    job.wait_for_text("all 3 nodes have joined Ray", START_S)
    wait_for_step(job, 2, tmp_path / "logs")
    cluster.end("n2", signal.SIGKILL)
    try:
        for pid in job.processes("n2"):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        job.wait_for_text("1 of 1 spare nodes are lost, and the command goes on", LOST_S)
        assert job.wait(timeout_s=START_S) == "COMPLETED", job.log
        assert "127.0.0.3" in job.log and "on the nodes that are alive" in job.log, job.log
        assert list(metrics_by_step(tmp_path / "logs" / "metrics.jsonl")) == [*range(1, 21)]
        job.check_nothing_is_left(but_folders=1)
    finally:
        cluster.start_node("n2")


@pytest.mark.full
def test_a_node_that_never_comes_is_named_within_the_deadline(cluster):
    setup = "[ $SLURMD_NODENAME = n1 ] || sleep 600"
    job = cluster.submit("--nodes=2", COMMAND="true", SETUP_COMMAND=setup, NODE_TIMEOUT="3", GRACE_S="2")
    assert job.wait(timeout_s=90) == "FAILED"
    assert "1 of 2 nodes are missing after 3 s: n2 (host unknown) has not reported" in job.log
    job.check_nothing_is_left()


@pytest.mark.full
def test_a_node_whose_setup_fails_is_named_at_once(cluster):
    setup = "[ $SLURMD_NODENAME = n1 ] || exit 3"
    job = cluster.submit("--nodes=2", COMMAND="true", SETUP_COMMAND=setup)
    assert job.wait(timeout_s=90) == "FAILED"
    assert "node n2 (127.0.0.3): SETUP_COMMAND ended with exit code 3" in job.log
    job.check_nothing_is_left()


@pytest.mark.full
def test_a_taken_port_is_named_and_the_command_decides_the_exit_code(cluster):
    with socket.socket() as taken:
        taken.bind(("127.0.0.2", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        job = cluster.submit("--nodes=2", COMMAND="true", RAY_PORT=port)
        assert job.wait(timeout_s=90) == "FAILED"
    assert f"RAY_PORT: port {port} is taken on" in job.log
    assert job.field("ExitCode") == "2:0"
    job = cluster.submit("--nodes=1", COMMAND="echo on $RAY_ADDRESS; exit 7")
    assert job.wait(timeout_s=90) == "FAILED" and job.field("ExitCode") == "7:0", job.log
    job.check_nothing_is_left()
