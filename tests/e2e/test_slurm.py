"""Jobs on two Slurm nodes: done, cancelled, requeued, at their limit, with a node that is killed or never comes."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from nemo_rl.utils.exits import INTERRUPTED, NODE_LOST, TIME_LIMIT
from tests.helpers.runs import logged_steps, run_cli, write_recipe
from tests.helpers.slurm import NODES, Job, SlurmCluster, why_no_slurm
from tests.helpers.tiny_model import write_tiny_folder

reason = why_no_slurm()
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.skipif(reason is not None, reason=reason or "")]

TWO_NODES = {"num_nodes": 2, "cpu_workers_per_node": 1}
SAVING = {"enabled": True, "save_period": 1, "keep_top_k": None}
ENDLESS = {"max_num_steps": 100_000}
START_S = 450.0
"""Of a job, on a machine that does much else."""
LOST_S = 60.0
"""What must hold for a lost node."""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def slurm(tmp_path_factory) -> Iterator[SlurmCluster]:
    with SlurmCluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture
def cluster(slurm: SlurmCluster) -> SlurmCluster:
    """Both nodes are free, also after a test that has failed."""
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
    assert {path.name for path in (job.folder / "start_0" / "nodes").iterdir()} == {*NODES}
    job.check_nothing_is_left()


@pytest.mark.full
def test_a_cancelled_job_leaves_nothing(cluster, tmp_path, model):
    recipe = write_recipe(tmp_path, model, cluster=TWO_NODES, grpo=ENDLESS)
    job = cluster.launch(recipe)
    wait_for_step(job, 1, tmp_path / "logs")
    cluster.run("scancel", job.number)
    assert job.wait(timeout_s=60) == "CANCELLED"
    job.check_nothing_is_left()
    assert (job.folder / "start_0" / "result").read_text() == f"{INTERRUPTED}\n"


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
