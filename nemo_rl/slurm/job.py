"""The Slurm job of a recipe: the script that `nemo-rl launch slurm` shows or submits, and commands inside the job.

What is rendered is what is submitted: variables and one call of `sbatch`. Writing it needs no cluster. Imports neither
torch nor Ray.

The settings of one node of a Slurm job, from its environment: Slurm's variables, those of `ray.sub`, the job's
folder.

`node.py` reads them once. Invariant: whatever is wrong is said with the name of the variable, before anything is
started.
"""

from __future__ import annotations

import json
import math
import re
import shlex
import shutil
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nemo_rl.algorithms.processes import cpus_per_bundle, forked_modules, other_cpus
from nemo_rl.config.load import load_config
from nemo_rl.config.run import CheckpointingConfig
from nemo_rl.errors import UserError
from nemo_rl.utils.console import printable

__all__ = [
    "HEAD_FILE",
    "NODES_FILE",
    "RESULT_FILE",
    "TOKEN_FILE",
    "JobOptions",
    "NodeRecord",
    "NodeSettings",
    "PortRange",
    "attach_words",
    "render_job",
    "submit_job",
]


NODES_FILE = "nodes.txt"
"""`scontrol show node --oneliner` of the job's nodes, written by `ray.sub`."""
HEAD_FILE, TOKEN_FILE, RESULT_FILE = "head.json", "token", "result"
NODE_TIMEOUT_S = 300.0
"""Seconds until all nodes must have joined: pulling a container image takes minutes."""
PRELOAD = "nemo_rl.models.policy.workers.launch transformers"
"""Modules that every policy worker imports."""
FOLDER = "NEMO_RL_JOB_DIR"


@dataclass(frozen=True, kw_only=True, slots=True)
class PortRange:
    """Ports from `low` to `high`, both included; `0` as text is no range: the system chooses."""

    low: int
    high: int

    @classmethod
    def parse(cls, name: str, text: str) -> PortRange | None:
        if text in ("", "0"):
            return None
        found = re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", text)
        low, high = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
        if not 0 < low <= high <= 65535:
            raise UserError(f"{name}: expected a port, or LOW-HIGH within 1 to 65535, got {text!r}")
        return cls(low=low, high=high)


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeRecord:
    """A node of the job, as Slurm knows it."""

    name: str
    address: str
    """Host name or number under which the other nodes reach it."""

    @classmethod
    def parse_all(cls, text: str) -> tuple[NodeRecord, ...]:
        """Parse one line per node, `NodeName=n1 ... NodeAddr=10.0.0.1 ...`."""
        records = []
        for line in filter(None, map(str.strip, text.splitlines())):
            found = dict(word.partition("=")[::2] for word in line.split())
            if "NodeName" not in found:
                raise UserError(f"{NODES_FILE}: expected NodeName=... in every line, got {line[:80]!r}")
            records.append(cls(name=found["NodeName"], address=found.get("NodeAddr", found["NodeName"])))
        return tuple(records)


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeSettings:
    """One node's part in the job."""

    name: str
    """Slurm's name of this node."""
    folder: Path
    """The folder of this start of the job, on a file system that all nodes share."""
    nodes: tuple[NodeRecord, ...]
    """All of the job; the first is the head."""
    command: str
    """The command that the head runs when all nodes have joined."""
    num_cpus: int
    num_gpus: int
    head_ports: PortRange | None
    """Ports of Ray's head, or None for any that are free."""
    worker_ports: PortRange | None
    node_timeout_s: float
    preload: tuple[str, ...]
    """Modules that workers on a node without GPUs find imported; none: each imports by itself."""
    spare_nodes: int = 0
    """Nodes of the job that may be lost before its command is ended."""

    @property
    def is_head(self) -> bool:
        return self.name == self.nodes[0].name

    @property
    def record(self) -> NodeRecord:
        return next(node for node in self.nodes if node.name == self.name)

    @classmethod
    def from_environment(cls, variables: Mapping[str, str]) -> NodeSettings:
        """
        Raises:
            UserError: a variable is missing or malformed.
        """
        folder = Path(_needed(variables, FOLDER))
        try:
            nodes = NodeRecord.parse_all((folder / NODES_FILE).read_text(encoding="utf-8"))
        except OSError as error:
            raise UserError(
                f"{folder / NODES_FILE}: cannot be read on {socket.gethostname()}: {error.strerror}; LOG_DIR must be "
                "on a file system that all nodes share, and in MOUNTS where a container is used"
            ) from error
        name = _needed(variables, "SLURMD_NODENAME")
        if name not in {node.name for node in nodes}:
            raise UserError(f"SLURMD_NODENAME: {name!r} is not one of the job's nodes in {folder / NODES_FILE}")
        ordered = sorted(nodes, key=lambda node: node.name != _head_name(variables, nodes))
        return cls(
            name=name,
            folder=folder,
            nodes=tuple(ordered),
            command=_needed(variables, "COMMAND"),
            num_cpus=_number(variables, "CPUS_PER_NODE", "SLURM_CPUS_ON_NODE", least=1, default=1),
            num_gpus=_number(variables, "GPUS_PER_NODE", "SLURM_GPUS_ON_NODE", least=0, default=0),
            head_ports=PortRange.parse("RAY_PORT", variables.get("RAY_PORT", "")),
            worker_ports=PortRange.parse("WORKER_PORTS", variables.get("WORKER_PORTS", "")),
            node_timeout_s=_seconds(variables, "NODE_TIMEOUT", NODE_TIMEOUT_S),
            preload=tuple(variables.get("PRELOAD", PRELOAD).split()),
            spare_nodes=_number(variables, "SPARE_NODES", "SPARE_NODES", least=0, default=0),
        )

    def ray_words(self, *, address: str, temp_dir: Path, head: str | None, port: int) -> list[str]:
        """Return the words that follow `ray start` on this node.

        Args:
            address: of this node.
            head: address and port of Ray's head; None: this is the head.
            port: of the head.
        """
        words = ["--block", "--disable-usage-stats", "--include-log-monitor", "false"]
        words += ["--node-ip-address", address, "--temp-dir", str(temp_dir)]
        words += ["--num-cpus", str(self.num_cpus), "--num-gpus", str(self.num_gpus)]
        # Fixed ports would meet those of another job on this machine.
        words += ["--dashboard-agent-listen-port", "0"]
        words += ["--resources", json.dumps({f"slurm:{self.name}": 1})]
        if self.worker_ports is not None:
            words += ["--min-worker-port", str(self.worker_ports.low), "--max-worker-port", str(self.worker_ports.high)]
        if head is None:
            return [*words, "--head", "--include-dashboard", "false", "--port", str(port)]
        return [*words, "--address", head]


def _head_name(variables: Mapping[str, str], nodes: tuple[NodeRecord, ...]) -> str:
    """Return the name of the head: task 0 of the step is on the first node of the job, which runs `ray.sub` itself."""
    name = variables.get("NEMO_RL_HEAD_NODE", nodes[0].name)
    if name not in {node.name for node in nodes}:
        raise UserError(f"NEMO_RL_HEAD_NODE: {name!r} is not one of the job's nodes")
    return name


def _needed(variables: Mapping[str, str], name: str) -> str:
    value = variables.get(name, "")
    if not value:
        raise UserError(f"{name} is not set: start this through ray.sub, for example COMMAND='...' sbatch ray.sub")
    return value


def _number(variables: Mapping[str, str], name: str, of_slurm: str, *, least: int, default: int) -> int:
    """Return a number of our variable, or else of Slurm's own."""
    for source in (name, of_slurm):
        text = variables.get(source, "")
        if text:
            if not text.isdecimal() or int(text) < least:
                raise UserError(f"{source}: expected a whole number of at least {least}, got {text!r}; set {name}")
            return int(text)
    return default


def _seconds(variables: Mapping[str, str], name: str, default: float) -> float:
    text = variables.get(name, "")
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < 1e6:
        raise UserError(f"{name}: expected a number of seconds above 0, got {text!r}")
    return value


SCRIPT = "ray.sub"
NAME_LIMIT = 300
"""Characters of the recipe's path in a comment."""
SBATCH_S = 60.0
"""A busy controller answers late."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobOptions:
    """The options of a Slurm job; None leaves one to the recipe or to Slurm."""

    nodes: int | None = None
    time: str | None = None
    """Time limit as Slurm writes it, for example `4:00:00`."""
    account: str | None = None
    partition: str | None = None
    job_name: str | None = None
    container: str | None = None
    mounts: str | None = None
    setup: str | None = None
    cpus_per_node: int | None = None
    log_dir: Path = Path("slurm_logs")
    requeue: bool = True
    sbatch: Sequence[str] = ()


def render_job(recipe: Path, overrides: Sequence[str], options: JobOptions) -> str:
    """Return the script that submits the job; to be run in the repository's root.

    Raises:
        ConfigError: the recipe cannot be read, or not be run so.
        UserError: the options do not fit it.
    """
    given = load_config(recipe, [*overrides, "cluster.address=auto"])
    words = [*overrides, *_added(given.checkpointing, options, overwrites=given.logger.overwrite)]
    config = load_config(recipe, [*words, "cluster.address=auto"])
    cluster = config.cluster
    # Each actor is on one node: what does not divide is rounded up for all.
    bundles = cluster.num_workers // cluster.num_nodes * cpus_per_bundle(config)
    num_cpus = bundles + math.ceil(other_cpus(config) / cluster.num_nodes)
    preload = "" if cluster.gpus_per_node else " ".join(forked_modules(config))
    asked = {
        "cluster.num_nodes": cluster.num_nodes,
        "policy.generation.colocated.num_nodes": config.policy.generation.colocated.num_nodes,
        "cluster.spare_nodes": cluster.spare_nodes,
    }
    nodes = sum(asked.values()) if options.nodes is None else options.nodes
    if nodes < sum(asked.values()):
        shown = " + ".join(f"{key}={count}" for key, count in asked.items() if count)
        raise UserError(
            f"--nodes: expected at least {shown} of {recipe}, got {nodes}; ask for more nodes, or lower these keys"
        )
    if options.mounts and not options.container:
        raise UserError(f"--mounts: {options.mounts!r} would be ignored without --container")
    command = shlex.join(["-m", "nemo_rl.cli.main", "launch", "ray", "--address", "auto", "--", _path(recipe), *words])
    needs = {"num_gpus": cluster.gpus_per_node, "num_cpus": num_cpus}
    variables = [*_variables(options, f'"$PYTHON" {command}', preload=preload, **needs)]
    if cluster.spare_nodes:
        variables.append(("SPARE_NODES", str(cluster.spare_nodes)))
    exports = "\n".join(f"export {name}={shlex.quote(value)}" for name, value in variables)
    survives = ["--no-kill"] if cluster.spare_nodes else []
    call = shlex.join(["sbatch", *survives, *_sbatch_words(options, nodes, **needs), SCRIPT])
    make_folder = shlex.join(["mkdir", "-p", "--", _path(options.log_dir)])
    # A comment ends at a line feed, which the name may hold.
    title = f"{printable(str(recipe), limit=NAME_LIMIT)} on {nodes} nodes; written by `nemo-rl launch slurm`"
    return (
        f"#!/usr/bin/env bash\n# {title}, to be run in the repository's root.\n"
        f"set -euo pipefail\n{exports}\n{make_folder}\n{call}\n"
    )


def submit_job(script: str) -> str:
    """Run what `render_job` gives; Slurm's answer.

    Raises:
        UserError: there is no Slurm here, or it refuses.
    """
    if shutil.which("sbatch") is None:
        raise UserError(
            "no Slurm here: sbatch is not on PATH; run this on a login node of the cluster, or take what "
            "--render prints there"
        )
    if not Path(SCRIPT).is_file():
        raise UserError(f"{SCRIPT} is not in {Path.cwd()}; run this in the repository's root")
    try:
        done = subprocess.run(
            ["bash", "-c", script],
            capture_output=True,
            text=True,
            timeout=SBATCH_S,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise UserError(
            f"sbatch has not answered within {SBATCH_S:g} s; look at Slurm with sinfo, then try again"
        ) from error
    if done.returncode:
        raise UserError(
            f"sbatch refuses the job: {(done.stderr or done.stdout).strip()}; change the options named there"
        )
    return done.stdout.strip()


def _added(section: CheckpointingConfig, options: JobOptions, *, overwrites: bool) -> Iterator[str]:
    """Return the overrides that a requeued job needs, where neither the recipe nor the command line says otherwise."""
    if not options.requeue or not section.enabled:
        return
    if section.resume is False and not overwrites:
        yield "checkpointing.resume=auto"
    if options.time is not None and section.must_save_by is None:
        yield "checkpointing.must_save_by=auto"


def _variables(
    options: JobOptions, command: str, *, num_gpus: int, num_cpus: int, preload: str
) -> Iterator[tuple[str, str]]:
    yield "COMMAND", command
    yield "LOG_DIR", _path(options.log_dir)
    yield "GPUS_PER_NODE", str(num_gpus)
    yield "CPUS_PER_NODE", str(num_cpus)
    if options.requeue:
        yield "REQUEUE", "1"
    if not num_gpus:
        yield "PRELOAD", preload
    given = {"CONTAINER": options.container, "MOUNTS": options.mounts, "SETUP_COMMAND": options.setup}
    yield from ((name, value) for name, value in given.items() if value)


def _sbatch_words(options: JobOptions, nodes: int, *, num_gpus: int, num_cpus: int) -> list[str]:
    cpus = options.cpus_per_node or num_cpus
    words = [f"--nodes={nodes}", f"--cpus-per-task={cpus}"]
    if num_gpus:
        words.append(f"--gpus-per-node={num_gpus}")
    words.append("--requeue" if options.requeue else "--no-requeue")
    words.append(f"--output={_path(options.log_dir)}/slurm-%j.log")
    given = {"time": options.time, "account": options.account, "partition": options.partition}
    given["job-name"] = options.job_name
    return [*words, *(f"--{name}={value}" for name, value in given.items() if value), *options.sbatch]


def _path(path: Path) -> str:
    return f"./{path}" if str(path).startswith("-") else str(path)


CONTAINER_FILE = "container"
"""Options of `srun` for the job's container, a line each, written by `ray.sub`."""
SCONTROL_S = 30.0


def attach_words(job: str, command: Sequence[str]) -> list[str]:
    """Return the words of the call of `srun`.

    Args:
        command: empty: a shell on a terminal.

    Raises:
        UserError: there is no such job of ours, or its Ray is not there (yet).
    """
    folder = _job_folder(job)
    try:
        facts = json.loads((folder / HEAD_FILE).read_text(encoding="utf-8"))
        container = (folder / CONTAINER_FILE).read_text(encoding="utf-8").split("\n")
    except (OSError, ValueError) as error:
        raise UserError(f"job {job}: {folder} does not name its head yet ({error}); try again in a while") from error
    if "ray" not in facts:
        raise UserError(f"job {job}: Ray is still starting on {facts['node']}; try again in a while")
    variables = {
        "RAY_ADDRESS": facts["ray"],
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(folder / TOKEN_FILE),
    }
    words = ["srun", f"--jobid={job}", "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={facts['node']}"]
    words += ["--cpu-bind=none", *filter(None, container)]
    inside = ["env", *(f"{name}={value}" for name, value in variables.items())]
    if command:
        return [*words, *inside, "bash", "-c", shlex.join(command)]
    return [*words, "--pty", *inside, "bash", "-i"]


def _job_folder(job: str) -> Path:
    if shutil.which("scontrol") is None:
        raise UserError("no Slurm here: scontrol is not on PATH; run this on a login node of the cluster")
    done = subprocess.run(
        ["scontrol", "show", "job", "--oneliner", job], capture_output=True, text=True, timeout=SCONTROL_S, check=False
    )
    state = re.search(r" JobState=(\S+)", done.stdout)
    if done.returncode or state is None:
        raise UserError(f"job {job}: Slurm knows no such job ({done.stderr.strip()}); squeue --me lists yours")
    if state[1] != "RUNNING":
        raise UserError(
            f"job {job}: expected a running job, got one that is {state[1]}; wait for it, or submit it again"
        )
    folder = re.search(r" Comment=NEMO_RL_JOB_DIR=(\S+)", done.stdout)
    if folder is None:
        raise UserError(f"job {job}: runs, but has not begun as a job of ray.sub; try again in a while")
    return Path(folder[1])
