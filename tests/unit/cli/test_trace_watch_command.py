"""`nemo-rl trace watch`: a terminal that looks on at a real hub, fed by a job that is made up."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nemo_rl.cli.main import main
from nemo_rl.errors import UserError
from nemo_rl.tracer.process import HubProcess, HubSpec
from nemo_rl.tracer.protocol import Role, token_path
from nemo_rl.utils import interrupt
from nemo_rl_tools.tracer.client import HubGone, LiveClient, Refused
from nemo_rl_tools.tracer.entry import EntryKind
from nemo_rl_tools.tracer.stream_reader import StreamReader
from tests.helpers.tracer_recordings import RUN, FakeJob

DEADLINE_S = 30
NAN = (1.0, float("nan"), 3.0)


@pytest.fixture
def hub(tmp_path):
    spec = HubSpec(
        folder=tmp_path / "logs" / "tracer", run=RUN, start_timeout_s=300, record=True, watches=("layer.out | stats",)
    )
    with HubProcess(spec) as hub:
        yield hub


@pytest.fixture
def job(hub):
    job = FakeJob(hub.address, hub.tokens.job)
    yield job
    job.close()


class Watching:
    """The command in its own process, which has begun to look on."""

    def __init__(self, run: Path, *args: object, waits_for: str = "watched") -> None:
        command = [sys.executable, "-m", "nemo_rl.cli.main", "trace", "watch", str(run), *map(str, args)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.head = ""
        while waits_for not in self.head.rpartition("\n")[0] + self.head:
            line = self.process.stdout.readline()
            assert line, self.process.stderr.read()
            self.head += line

    def end(self) -> tuple[int, str, str]:
        """Exit code, output, errors."""
        out, err = self.process.communicate(timeout=DEADLINE_S)
        return self.process.returncode, self.head + out, err


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs the command in this process: exit code and errors."""
    handlers = {number: signal.getsignal(number) for number in interrupt.SIGNALS}

    def run(*args):
        monkeypatch.setattr("sys.argv", ["nemo-rl", "trace", "watch", *map(str, args)])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr().err
        assert "Traceback" not in said
        return ended.value.code, said

    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_prints_and_records_what_comes_until_the_job_ends(tmp_path, job):
    job.step(1)
    watching = Watching(tmp_path / "logs", "--to", tmp_path / "to", waits_for="step 1")
    for step, values in ((2, (1.0, 2.0, 3.0)), (3, NAN)):
        job.step(step, values)
    job.finish()
    code, shown, _ = watching.end()
    assert code == 0
    assert "run run-1 (exp_001) running\n" in shown and "run run-1 (exp_001) ended: completed\n" in shown
    assert "step 3      train              layer.out[1]" in shown
    assert "first NaN or inf: step 3, train, layer.out[0]: 1 value is NaN" in shown
    assert shown.endswith("9 frames, 6 of stats\n")
    of_hub, of_client = (_frames(tmp_path / name) for name in ("logs/tracer", "to"))
    assert len(of_hub) == 9 and of_client == of_hub


def _frames(folder):
    return {entry.body for entry in StreamReader(folder).entries() if entry.kind is EntryKind.FRAME}


def test_lines_of_json_are_the_numbers_of_stats(tmp_path, job):
    job.step(1, NAN, layers=1)
    watching = Watching(tmp_path / "logs", "--json", waits_for="layer.out")
    job.finish()
    code, shown, _ = watching.end()
    (line,) = shown.splitlines()
    said = json.loads(line)
    assert code == 0 and (said["step"], said["site"], said["nan"], said["mean"]) == (1, "layer.out[0]", 1, 2.0)


def test_ends_after_so_many_whole_steps(tmp_path, job):
    job.step(1)
    watching = Watching(tmp_path / "logs", "--steps", 2, "--to", tmp_path / "to", waits_for="step 1")
    for step in (2, 3, 4):
        job.step(step)
    code, shown, _ = watching.end()
    assert code == 0 and "step 3 " in shown and "step 4 " not in shown
    frames = [entry for entry in StreamReader(tmp_path / "to").entries() if entry.kind is EntryKind.FRAME]
    assert sorted({entry.step for entry in frames}) == [1, 2, 3]
    assert len(_frames(tmp_path / "to")) == 9


def test_changes_what_is_watched_and_refuses_what_cannot_be_read(tmp_path, hub, job, run):
    watching = Watching(tmp_path / "logs", "--watch", "mlp.out | norm", waits_for="mlp.out | norm")
    assert json.loads(job.driver.connection.recv(timeout=5))["watches"] == ["layer.out | stats"]
    assert job.driver.receive()["watches"] == ["mlp.out | norm"]
    code, said = run(tmp_path / "logs", "--watch", "layer.out | stats")
    assert code == 2 and "the hub refused this (busy)" in said
    taker = Watching(tmp_path / "logs", "--watch", "attn.out | norm", "--takeover", waits_for="attn.out | norm")
    job.finish()
    assert "another controller has taken over" in watching.end()[1] and taker.end()[0] == 0
    code, said = run(tmp_path / "logs", "--watch", "mlp.uot | stats")
    assert code == 2 and "mlp.uot" in said


def test_an_interrupt_ends_it_cleanly(tmp_path, job):
    watching = Watching(tmp_path / "logs", "--to", tmp_path / "to")
    watching.process.send_signal(signal.SIGINT)
    code, shown, errors = watching.end()
    assert (code, errors) == (0, "") and "stopped\n" in shown


def test_a_job_that_dies_is_told_with_exit_code_1(tmp_path, job):
    job.step(1)
    watching = Watching(tmp_path / "logs", waits_for="step 1")
    job.close()
    code, shown, errors = watching.end()
    assert code == 1 and "the job is lost" in errors and "run-1 (exp_001) lost" in shown


def test_a_hub_that_dies_is_told_with_exit_code_1(tmp_path, hub, run):
    watching = Watching(tmp_path / "logs")
    os.kill(hub.pid, signal.SIGKILL)
    code, _, errors = watching.end()
    assert code == 1 and "is gone" in errors and "Traceback" not in errors
    code, said = run(tmp_path / "logs")
    assert code == 1 and "no hub answers at 127.0.0.1:" in said


def test_what_the_user_can_mend_ends_with_exit_code_2(tmp_path, hub, run):
    code, said = run(tmp_path / "nowhere")
    assert code == 2 and "expected the log folder of a run that is on" in said
    assert run(tmp_path / "logs", "--takeover")[0] == 2
    path = token_path(tmp_path / "logs" / "tracer", "viewer")
    path.write_text("wrong\n")
    code, said = run(tmp_path / "logs")
    assert code == 2 and "the hub refused this (unauthorized)" in said and "wrong" not in said
    path.unlink()
    assert run(tmp_path / "logs")[0] == 2
    (tmp_path / "logs" / "tracer" / "hub.json").write_text("{}")
    code, said = run(tmp_path / "logs")
    assert code == 2 and "expected JSON with the address of a hub" in said


def test_client_refuses_with_the_code_of_the_hub(hub):
    with pytest.raises(Refused) as refused:
        LiveClient.connect(hub.address, hub.tokens.viewer, role=Role.CONTROLLER)
    assert refused.value.code == "unauthorized" and hub.tokens.viewer not in str(refused.value)
    with LiveClient.connect(hub.address, hub.tokens.viewer) as viewer, pytest.raises(Refused, match="forbidden"):
        viewer.watch(["layer.out | stats"])
    with LiveClient.connect(hub.address, hub.tokens.controller, role=Role.CONTROLLER) as controller:
        with pytest.raises(UserError, match="mlp.uot"):
            controller.watch(["mlp.uot | stats"])
        assert controller.watch(["mlp.out | stats"])["watches"] == ["mlp.out | stats"]


def test_client_waits_no_longer_than_it_was_told_to(hub):
    begun = time.monotonic()
    with LiveClient.connect(hub.address, hub.tokens.viewer) as viewer:
        assert viewer.receive(timeout_s=0.1) is None
        with pytest.raises(HubGone, match="did not answer with 'done'"):
            viewer.wait_for("done", timeout_s=0.1)
    with pytest.raises(HubGone, match="no hub answers"):
        LiveClient.connect("127.0.0.1:9", "x", timeout_s=1.0)
    with pytest.raises(UserError, match="HOST:PORT"):
        LiveClient.connect("no such\naddress", "x", timeout_s=1.0)
    assert time.monotonic() - begun < 10
