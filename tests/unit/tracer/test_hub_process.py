"""The hub as a process of its own: it starts, serves, and ends with the job whatever happens."""

import json
import os
import signal
import stat
import subprocess
import sys
import textwrap
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from nemo_rl.errors import ResourceError
from nemo_rl.tracer import process
from nemo_rl.tracer.frame import Frame, FramePart, decode
from nemo_rl.tracer.link import HubLink
from nemo_rl.tracer.process import HubProcess, HubSpec, open_job
from nemo_rl.tracer.protocol import HubLimits, Role
from nemo_rl.tracer.reducer import Span
from nemo_rl_tools.tracer.entry import EntryKind
from nemo_rl_tools.tracer.store import stream_files
from nemo_rl_tools.tracer.stream_reader import StreamReader
from tests.helpers.tracer_hub import PHASE, RUN, WAIT_S, where


def spec(tmp_path, **more):
    return HubSpec(folder=tmp_path / "tracer", run=RUN, start_timeout_s=300, **more)


class Line:
    """One end of a connection to a hub's process."""

    def __init__(self, socket):
        self.socket = socket

    def send(self, kind, **fields):
        self.socket.send(json.dumps({"type": kind, **fields}))

    def wait_for(self, kind, **fields):
        while True:
            message = self.socket.recv(WAIT_S)
            found = json.loads(message) if isinstance(message, str) else {"type": "frame", "frame": decode(message)}
            if found.items() >= {"type": kind, **fields}.items():
                return found


@contextmanager
def line(address, role, token, **hello):
    with connect(f"ws://{address}/live", max_size=None, compression=None, proxy=None, close_timeout=1) as socket:
        peer = Line(socket)
        peer.send("hello", v=1, role=role, token=token, **hello)
        peer.wait_for("welcome")
        yield peer


def send_norm(peer, step, value):
    peer.send("begin", step=step, phase=PHASE)
    peer.socket.send(FramePart(where=where(step), payload=np.array([value]), span=Span(0, 4, 4)).encode())
    peer.send("end", step=step, phase=PHASE, sent=1, dropped=0)


def test_specs_travel_as_json(tmp_path):
    whole = spec(
        tmp_path,
        port=5,
        origins=("http://a",),
        watches=("layer.out | stats",),
        limits=HubLimits(max_viewers=3),
        record=True,
        compat=True,
        tokenizer=tmp_path,
        artifacts=tmp_path,
    )
    for each in (whole, spec(tmp_path)):
        assert HubSpec.of_record(json.loads(json.dumps(each.as_record()))) == each


def test_hub_serves_ranks_and_viewers_records_and_ends_with_the_job(tmp_path):
    with HubProcess(spec(tmp_path, watches=("layer.out | norm",), record=True, record_bytes=1 << 20)) as hub:
        folder, tokens = tmp_path / "tracer", hub.tokens
        assert json.loads((folder / "hub.json").read_text()) == {
            "address": hub.address,
            "port": hub.port,
            "pid": hub.pid,
            "run": RUN,
        }
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        page = folder / "open.html"
        assert stat.S_IMODE(page.stat().st_mode) == 0o600
        assert f"http://{hub.address}/#token={tokens.controller}" in page.read_text()
        told = " ".join(psutil.Process(hub.pid).cmdline()) + str(psutil.Process(hub.pid).environ()) + hub.note
        assert os.getsid(hub.pid) == hub.pid
        assert not any(token in told for token in (tokens.job, tokens.viewer, tokens.controller))
        with (
            line(hub.address, "driver", tokens.job) as driver,
            line(hub.address, "rank", tokens.job, run=RUN, rank=0, world=1) as rank,
            line(hub.address, "viewer", tokens.viewer) as viewer,
        ):
            driver.send("run", run=RUN, name="n", model={}, layout={}, unobserved={})
            send_norm(rank, 1, 9.0)
            assert viewer.wait_for("frame")["frame"].payload == [3.0]
            driver.send("finish", reason="completed")
            assert viewer.wait_for("run", state="ended")["text"] == "completed"
        pid = hub.pid
    assert not psutil.pid_exists(pid) and not hub.is_alive
    assert not (folder / "hub.json").exists() and not page.exists()
    assert any(path.stat().st_size for path in stream_files(folder).values())
    log = (folder / "hub.log").read_text()
    assert "listening" in log and "Traceback" not in log and tokens.job not in log


def test_hub_starts_without_torch_and_ray():
    heavy = {"torch", "ray", "transformers", "pydantic"}
    code = f"import sys, nemo_rl_tools.tracer.hub.main; print(sorted({heavy} & {{*sys.modules}}))"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT_S, check=True)
    assert said.stdout == "[]\n"


def test_port_that_is_taken_is_told_at_the_start(tmp_path):
    with HubProcess(spec(tmp_path / "first")) as first:
        second = HubProcess(spec(tmp_path / "second", port=first.port))
        with pytest.raises(ResourceError, match=rf"127.0.0.1:{first.port}.*in use.*choose another port"), second:
            pass


def test_hub_that_is_killed_ends_nothing_but_itself(tmp_path, caplog):
    with HubProcess(spec(tmp_path)) as hub:
        with line(hub.address, "rank", hub.tokens.job, run=RUN, rank=0, world=1) as rank:
            os.kill(hub.pid, signal.SIGKILL)
            with pytest.raises(ConnectionClosed):
                rank.socket.recv(WAIT_S)
        assert hub._process.wait(WAIT_S) == -signal.SIGKILL
        assert not hub.is_alive
    assert "ended with code -9" in caplog.text


def test_hub_that_hangs_is_killed_within_the_deadline(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(process, "CLOSE_S", 0.3)
    with HubProcess(spec(tmp_path)) as hub:
        pid = hub.pid
        os.kill(pid, signal.SIGSTOP)
        start = time.monotonic()
    assert time.monotonic() - start < WAIT_S
    assert not psutil.pid_exists(pid) and "is killed" in caplog.text


DRIVER = """
    import json, os, sys, time
    from pathlib import Path
    from nemo_rl.tracer.process import HubProcess, HubSpec
    hub = HubProcess(HubSpec(folder=Path(sys.argv[1]), run="run", start_timeout_s=300)).__enter__()
    # A child that outlives its parent and holds all it was given.
    if os.fork() == 0:
        time.sleep(60)
        os._exit(0)
    print(json.dumps([hub.pid, hub.address, hub.tokens.job, hub.tokens.viewer]), flush=True)
    time.sleep(60)
"""


def test_driver_that_is_killed_takes_the_hub_with_it_and_its_run_is_lost(tmp_path):
    script = [sys.executable, "-c", textwrap.dedent(DRIVER), str(tmp_path / "tracer")]
    with subprocess.Popen(script, stdout=subprocess.PIPE, text=True) as driver:
        pid, address, job, token = json.loads(driver.stdout.readline())
        hub = psutil.Process(pid)
        children = psutil.Process(driver.pid).children()
        try:
            with line(address, "viewer", token) as viewer:
                with line(address, "driver", job) as inside:
                    inside.send("run", run=RUN, name="n", model={}, layout={}, unobserved={})
                    viewer.wait_for("run", state="running")
                    driver.kill()
                assert viewer.wait_for("run", state="lost")
                assert hub.is_running(), "serves those who look on a little longer"
            hub.wait(WAIT_S)
        finally:
            driver.kill()
            for child in children:
                if child.is_running():
                    child.kill()


def test_last_pictures_reach_viewers_after_the_job_has_ended(tmp_path):
    hub = HubProcess(spec(tmp_path)).__enter__()
    try:
        with (
            line(hub.address, "viewer", hub.tokens.viewer) as viewer,
            line(hub.address, "rank", hub.tokens.job, run=RUN, rank=0, world=2) as rank,
        ):
            send_norm(rank, 1, 9.0)
            rank.socket.ping().wait(WAIT_S)
            hub._process.ask_to_end()
            found = viewer.wait_for("frame")["frame"]
            assert isinstance(found, Frame) and found.missing == (1,)
    finally:
        hub.close()
    assert Path(hub.spec.folder).is_dir()


def test_end_that_is_said_before_the_job_goes_is_recorded_though_ranks_are_still_there(tmp_path):
    with open_job(spec(tmp_path, record=True), {"name": "n", "model": {}, "layout": {}, "tokenizer": ""}) as job:
        rank = HubLink(job.address, Role.RANK, hello={"run": RUN, "rank": 0, "world": 1}, memory_bytes=1 << 20)
        rank.say({"type": "begin", "step": 1, "phase": "train"})
    messages = [
        entry.message() for entry in StreamReader(tmp_path / "tracer").entries() if entry.kind is EntryKind.MESSAGE
    ]
    assert [said["state"] for said in messages if said["type"] == "run"][-1] == "ended"
    rank.close()
