"""Workers of a run are forked off a process that has imported what they need; without it they start by themselves."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import psutil
import pytest
import ray

from nemo_rl.distributed import fork_stub
from nemo_rl.distributed.fork_server import ForkServer
from nemo_rl.distributed.own_ray import OwnRay
from tests.helpers.data_planes import wait_until

pytestmark = pytest.mark.slow

NOTING = "tests.helpers.import_marker"
ROOT = str(Path(__file__).parents[3])
CALL_S = 120.0


@ray.remote(num_cpus=1)
class Worker:
    def look(self) -> dict[str, object]:
        return {
            "process": os.getpid(),
            "parent": " ".join(psutil.Process(os.getppid()).cmdline()),
            "is_imported": NOTING in sys.modules,
            "variable": os.environ.get("OF_THIS_WORKER"),
            "random": float(np.random.rand()),
            "folder": os.getcwd(),
        }


def start(number: int) -> ray.actor.ActorHandle:
    return Worker.options(runtime_env={"env_vars": {"OF_THIS_WORKER": str(number)}}).remote()


def looks(workers: list[ray.actor.ActorHandle]) -> list[dict[str, object]]:
    return ray.get([worker.look.remote() for worker in workers], timeout=CALL_S)


@pytest.fixture
def noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NOTED_IMPORTS", str(tmp_path / "imports"))
    monkeypatch.setenv("PYTHONPATH", ROOT)
    return tmp_path / "imports"


def alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # it has ended between the two
        return False


def servers() -> list[psutil.Process]:
    return _mine("fork_server_process")


def stubs() -> list[psutil.Process]:
    return _mine("fork_stub")


def _mine(name: str) -> list[psutil.Process]:
    """Processes below this one; the raylet has the command of its workers as one word among others."""
    mine = psutil.Process().children(recursive=True)
    return [process for process in mine if any(name in word for word in _command(process)[1:3])]


def _command(process: psutil.Process) -> list[str]:
    """Of one that has ended meanwhile nothing is known."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


@contextmanager
def ray_from(modules: list[str]) -> Iterator[None]:
    with (
        ForkServer(modules, environment={"OMP_NUM_THREADS": "1"}, deadline_s=CALL_S) as forks,
        OwnRay(num_cpus=4, object_store_bytes=100 << 20, forks=forks),
    ):
        yield


@pytest.fixture
def cluster(noted: Path) -> Iterator[None]:
    with ray_from(["numpy.random", "tests.no_such_module", NOTING]):
        yield


def test_workers_begin_with_what_one_process_has_imported(cluster: None, noted: Path) -> None:
    workers = [start(number) for number in range(2)]
    found = looks(workers)
    assert len(noted.read_text().split()) == 1, "imported once"
    assert all(look["is_imported"] and "fork_server_process" in str(look["parent"]) for look in found)
    assert [look["variable"] for look in found] == ["0", "1"]
    assert found[0]["process"] != found[1]["process"] and found[0]["random"] != found[1]["random"]
    assert {look["folder"] for look in found} == {os.getcwd()}

    # A worker that Ray kills is gone; its server and its neighbour are not.
    ray.kill(workers[0])
    wait_until(lambda: not psutil.pid_exists(int(str(found[0]["process"]))))
    assert looks(workers[1:])[0]["process"] == found[1]["process"]

    # Nor is the server when a worker and its stub end at once, however often.
    for _ in range(3):
        (killed,) = looks([start(1)])
        family = [psutil.Process(int(str(killed["process"]))), *stubs()]
        for send in (psutil.Process.suspend, psutil.Process.kill):
            for process in family:
                with suppress(psutil.NoSuchProcess):  # the stub of an earlier worker may still be ending
                    send(process)
        wait_until(lambda family=family: not any(alive(process) for process in family))
    (server,) = servers()

    # Without the server a worker starts by itself.
    server.kill()
    wait_until(lambda: not psutil.pid_exists(int(str(found[1]["process"]))))
    (alone,) = looks([start(7)])
    assert alone["variable"] == "7" and not alone["is_imported"]


@pytest.mark.full
def test_nothing_is_left_when_ray_is_closed(noted: Path) -> None:
    with ray_from(["numpy"]):
        (look,) = looks([start(0)])
        (server,) = servers()
    assert not server.is_running() and not psutil.pid_exists(int(str(look["process"])))


@pytest.mark.parametrize(
    "said",
    [b"", b"\1", fork_stub.LENGTH.pack(7) + b"{", fork_stub.LENGTH.pack(2**32 - 1), fork_stub.LENGTH.pack(2) + b"[]"],
)
def test_a_request_that_cannot_be_read_ends_no_server(said: bytes, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("print('forked', flush=True)")
    with ForkServer([], environment={}, deadline_s=CALL_S) as forks:
        address = forks.environment[fork_stub.ADDRESS]
        with socket.socket(socket.AF_UNIX) as stub:
            stub.settimeout(CALL_S)
            stub.connect(address)
            stub.sendall(said)
            stub.shutdown(socket.SHUT_WR)
            assert stub.recv(4) == b""
        done = subprocess.run(
            [sys.executable, fork_stub.__file__, str(script)],
            env={**os.environ, **forks.environment, "LARGE": "x" * 100_000},
            capture_output=True,
            text=True,
            timeout=CALL_S,
            check=False,
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "forked\n", "")


def test_a_server_that_has_imported_ray_forks_nobody(noted: Path) -> None:
    with ray_from([NOTING, "ray"]):
        (look,) = looks([start(0)])
    assert look["variable"] == "0" and not look["is_imported"]
