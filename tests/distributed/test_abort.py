"""The abort of a step with real processes: an error or a death on one rank ends it on all, in time and by its text."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nemo_rl.distributed.abort import EXIT_CODE
from tests.helpers.gloo import run_ranks
from tests.helpers.rank_failures import CASES, LISTENER, StageFailure, run_every_case

LIMIT_S = 5.0
"""The contract."""
SLACK = 6
ROOT = Path(__file__).parents[2]
SCRIPT = "tests.helpers.rank_failures"


@pytest.fixture(scope="module", params=[4, 2], ids=["connected", "late"])
def seen(request: pytest.FixtureRequest) -> list[dict[str, StageFailure]]:
    """Of three ranks that are connected each with each, and of some that connect when they first talk."""
    return run_ranks(3, run_every_case, request.param, further_jobs=len(CASES))


TEXTS = {
    "before_a_collective": "ValueError: planted before a collective",
    "a_peer_waits_for_a_third": "ValueError: planted behind another rank",
    "peers_compute_meanwhile": "ValueError: planted while peers compute",
    "a_peer_needs_nobody": "ValueError: planted besides an independent peer",
    "leader_of_a_broadcast": "KeysNotFound: partition 'train': keys a, b",
}


@pytest.mark.slow
@pytest.mark.parametrize("case", TEXTS)
def test_an_error_on_one_rank_ends_the_stage_on_all_with_its_text(seen, case):
    for rank in (0, 2):
        peer = seen[rank][case]
        assert (peer.kind, peer.rank, peer.stage) == ("WorkerError", 1, "train")
        assert peer.text == f"rank 1, stage train: {TEXTS[case]}"
    own = seen[1][case]
    assert f"{own.kind}: {own.text}" == TEXTS[case]
    assert max(of_rank[case].seconds for of_rank in seen) < LIMIT_S * SLACK


@pytest.mark.slow
def test_an_error_that_the_user_can_fix_keeps_its_kind_on_every_rank(seen):
    for of_rank in seen:
        assert of_rank["user_error"].kind == "NonFiniteError"
        assert of_rank["user_error"].text == "loss is NaN in rows k1, k2"


def start(name: str, folder: Path) -> list[subprocess.Popen[bytes]]:
    """Two plain processes; rank 0 keeps the store."""
    folder.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return [
            subprocess.Popen(
                [sys.executable, "-m", SCRIPT, name, str(folder)],
                cwd=ROOT,
                env={
                    **os.environ,
                    "OMP_NUM_THREADS": "1",
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": "2",
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(listener.getsockname()[1]),
                    LISTENER: str(listener.fileno()) if rank == 0 else "",
                },
                pass_fds=[listener.fileno()] if rank == 0 else [],
                stderr=subprocess.PIPE,
            )
            for rank in range(2)
        ]


def ended(processes: list[subprocess.Popen[bytes]], *, timeout_s: float) -> list[tuple[int, str]]:
    """Exit code and log of each; whatever still runs at the deadline is killed."""
    deadline = time.monotonic() + timeout_s
    try:
        logs = [process.communicate(timeout=max(0.1, deadline - time.monotonic()))[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, log.decode()) for process, log in zip(processes, logs, strict=True)]


def reports(folder: Path) -> dict[int, StageFailure]:
    return {int(path.stem): StageFailure(**json.loads(path.read_text())) for path in folder.glob("*.json")}


@pytest.mark.slow
def test_a_killed_or_deaf_rank_ends_the_other(tmp_path):
    """Three jobs at the same time: a killed rank, the killed keeper of the store, a rank that cannot be reached."""
    jobs = {name: start(name, tmp_path / name) for name in ("kill_1", "kill_0", "deaf")}
    results = {name: ended(processes, timeout_s=300) for name, processes in jobs.items()}
    for name, victim in (("kill_1", 1), ("kill_0", 0)):
        seen = reports(tmp_path / name)
        assert set(seen) == {1 - victim}, results[name]
        survivor = seen[1 - victim]
        assert survivor.rank == victim and survivor.stage == "train"
        assert re.search(rf"the worker process of rank {victim}.* (has ended|exited)", survivor.text)
        assert survivor.seconds < LIMIT_S * SLACK
    assert set(reports(tmp_path / "deaf")) == {0}
    code, log = results["deaf"][1]
    assert code == EXIT_CODE and "planted besides a deaf peer" in log


@pytest.mark.full
@pytest.mark.slow
def test_under_torchrun_every_rank_reports_the_first_cause(tmp_path):
    folder = tmp_path / "raise"
    folder.mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", "--no-python"]
    done = subprocess.run(
        [*command, sys.executable, "-m", SCRIPT, "raise", str(folder)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        timeout=300,
        check=False,
    )
    assert done.returncode != 0
    seen = reports(folder)
    assert set(seen) == {0, 1}, done.stderr.decode()
    assert seen[0].text == "rank 1, stage train: ValueError: planted before a collective"
    assert seen[0].seconds < LIMIT_S * SLACK
