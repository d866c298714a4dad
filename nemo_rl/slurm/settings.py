"""The settings of one node of a Slurm job, from its environment: Slurm's variables, those of `ray.sub`, the job's
folder.

`node.py` reads it once. Invariant: whatever is wrong is said with the name of the variable, before anything is started.
"""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from nemo_rl.errors import UserError

__all__ = ["HEAD_FILE", "NODES_FILE", "RESULT_FILE", "TOKEN_FILE", "NodeRecord", "NodeSettings", "PortRange"]

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
