"""What a node reads from its environment, and what it says of what it cannot use."""

from __future__ import annotations

import socket
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from nemo_rl.errors import UserError
from nemo_rl.slurm.job import NODES_FILE, NodeRecord, NodeSettings, PortRange
from nemo_rl.slurm.node import free_port, own_address

NODES = "NodeName=n1 Arch=x86_64 NodeAddr=127.0.0.2 Port=1\n\nNodeName=n2 NodeAddr=127.0.0.3\nNodeName=n3 CPUTot=8\n"


@pytest.fixture
def variables(tmp_path: Path) -> dict[str, str]:
    (tmp_path / NODES_FILE).write_text(NODES)
    return {
        "NEMO_RL_JOB_DIR": str(tmp_path),
        "SLURMD_NODENAME": "n2",
        "NEMO_RL_HEAD_NODE": "n2",
        "COMMAND": "true",
        "SLURM_CPUS_ON_NODE": "8",
        "SLURM_GPUS_ON_NODE": "4",
    }


def test_ours_decide_over_slurms_and_the_rest_has_defaults(variables):
    settings = NodeSettings.from_environment(variables)
    assert (settings.num_cpus, settings.num_gpus, settings.is_head) == (8, 4, True)
    assert [node.name for node in settings.nodes] == ["n2", "n1", "n3"]
    assert settings.nodes[2] == NodeRecord(name="n3", address="n3")
    assert settings.spare_nodes == 0
    assert NodeSettings.from_environment({**variables, "SPARE_NODES": "2"}).spare_nodes == 2
    more = {"CPUS_PER_NODE": "2", "GPUS_PER_NODE": "0", "RAY_PORT": "7000-7010", "WORKER_PORTS": "8000-8999"}
    settings = NodeSettings.from_environment({**variables, **more, "NEMO_RL_HEAD_NODE": "n1", "NODE_TIMEOUT": "1.5"})
    assert (settings.num_cpus, settings.num_gpus, settings.is_head) == (2, 0, False)
    assert settings.head_ports == PortRange(low=7000, high=7010) and settings.node_timeout_s == 1.5


def test_words_of_ray_start(variables, tmp_path):
    settings = NodeSettings.from_environment({**variables, "WORKER_PORTS": "8000-8999"})
    head = settings.ray_words(address="127.0.0.3", temp_dir=tmp_path, head=None, port=7000)
    pairs = dict(pairwise(head))
    assert pairs["--num-cpus"] == "8" and pairs["--num-gpus"] == "4" and pairs["--node-ip-address"] == "127.0.0.3"
    assert pairs["--min-worker-port"] == "8000" and pairs["--max-worker-port"] == "8999"
    assert "--head" in head and pairs["--port"] == "7000" and "--address" not in head
    other = settings.ray_words(address="127.0.0.2", temp_dir=tmp_path, head="127.0.0.3:7000", port=0)
    assert "--head" not in other and other[-2:] == ["--address", "127.0.0.3:7000"]


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("COMMAND", "", "COMMAND is not set: start this through ray.sub"),
        ("SLURMD_NODENAME", "n9", "SLURMD_NODENAME: 'n9' is not one of the job's nodes"),
        ("NEMO_RL_HEAD_NODE", "n9", "NEMO_RL_HEAD_NODE: 'n9' is not one of the job's nodes"),
        ("GPUS_PER_NODE", "-1", "GPUS_PER_NODE: expected a whole number of at least 0, got '-1'"),
        ("SLURM_CPUS_ON_NODE", "0", "SLURM_CPUS_ON_NODE: expected a whole number of at least 1, got '0'; set CPUS_"),
        ("RAY_PORT", "70000", "RAY_PORT: expected a port, or LOW-HIGH within 1 to 65535, got '70000'"),
        ("WORKER_PORTS", "9-8", "WORKER_PORTS: expected a port, or LOW-HIGH"),
        ("NODE_TIMEOUT", "soon", "NODE_TIMEOUT: expected a number of seconds above 0, got 'soon'"),
        ("NEMO_RL_JOB_DIR", "/nowhere", "LOG_DIR must be on a file system that all nodes share"),
    ],
)
def test_what_cannot_be_used_is_named(variables, name, value, said):
    with pytest.raises(UserError) as raised:
        NodeSettings.from_environment({**variables, name: value})
    assert said in str(raised.value)


def test_a_taken_port_is_passed_over_or_named():

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=rf"RAY_PORT: port {port} is taken on .*; set another, a range LOW-HIGH"):
            free_port(PortRange(low=port, high=port), "127.0.0.1")
        assert free_port(PortRange(low=port, high=min(port + 50, 65535)), "127.0.0.1") > port
    assert free_port(None, "127.0.0.1") > 0


def test_a_loopback_address_counts_only_where_slurm_says_so(variables, tmp_path):
    assert own_address(NodeSettings.from_environment(variables)) == "127.0.0.3"
    (tmp_path / NODES_FILE).write_text("NodeName=n2 NodeAddr=localhost\nNodeName=n1 NodeAddr=127.0.0.2\n")
    # The route to a loopback address begins at one.
    assert own_address(NodeSettings.from_environment(variables)) in ("127.0.0.1", "127.0.0.2")
    (tmp_path / NODES_FILE).write_text("NodeName=n2 NodeAddr=no.such.host.invalid\n")
    with pytest.raises(UserError, match=r"node n2: NodeAddr 'no.such.host.invalid' of Slurm cannot be resolved"):
        own_address(NodeSettings.from_environment(variables))


def test_a_node_starts_without_torch_and_ray():
    code = "import nemo_rl.slurm.node, sys; print({'torch', 'ray', 'transformers'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "set()\n"
