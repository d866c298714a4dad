"""Recordings on the page again: every frame is the one that was recorded, at once or at its time."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from nemo_rl.cli.main import app, main
from nemo_rl.errors import UserError
from nemo_rl.tracer.frame import Frame, FrameTable, decode
from nemo_rl_tools.tracer.client import LiveClient
from nemo_rl_tools.tracer.entry import EntryKind
from nemo_rl_tools.tracer.playback import paced
from nemo_rl_tools.tracer.store import StreamWriter
from nemo_rl_tools.tracer.stream_reader import StreamReader
from tests.helpers.tracer_recordings import RUN, RUN_MESSAGE, small_recording, stats_frame

DEADLINE_S = 20
SAID = re.compile(r"http://(\S+)/ .* token is in (\S+); Ctrl-C ends")


class Serving:
    """`nemo-rl trace serve` or `inspect RUN play` in its own process, which listens."""

    def __init__(self, *args: object) -> None:
        command = [sys.executable, "-m", "nemo_rl.cli.main", *map(str, args)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        while (found := SAID.match(line := self.process.stdout.readline())) is None:
            assert line, self.process.stderr.read()
        self.address, self.token = found[1], Path(found[2])

    def connect(self) -> LiveClient:
        return LiveClient.connect(self.address, self.token.read_text().strip())

    def end(self) -> tuple[int, str]:
        """Exit code and errors after Ctrl-C."""
        self.process.send_signal(signal.SIGINT)
        _, errors = self.process.communicate(timeout=DEADLINE_S)
        assert not self.token.parent.exists()
        return self.process.returncode, errors

    def __enter__(self) -> Serving:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate(timeout=DEADLINE_S)


def recorded(folder: Path, kind: EntryKind = EntryKind.FRAME) -> list[bytes]:
    return [entry.body for entry in StreamReader(folder).entries() if entry.kind is kind]


def history(client: LiveClient, run: str, first: int, last: int) -> list[bytes]:
    """Frames and tables that the hub has of these steps."""
    while client.receive(timeout_s=0.2) is not None:
        pass
    client.send({"type": "history", "id": "all", "run": run, "first": first, "last": last})
    found = []
    while not isinstance(received := client.receive(timeout_s=5), dict):
        assert received is not None
        found.append(received)
    assert received == {"type": "done", "id": "all"}
    return found


def test_every_step_of_a_recording_is_served_byte_for_byte(tmp_path) -> None:
    folder = small_recording(tmp_path / "logs" / "tracer", num_steps=4, num_layers=3, bad=(1, 3))
    with Serving("trace", "serve", tmp_path / "logs") as served, served.connect() as client:
        (run,) = client.welcome["runs"]
        assert (run["state"], run["name"], run["step"]) == ("recorded", "exp_001", 4)
        assert run["text"] == f"ended: completed; {folder}"
        assert run["first_non_finite"]["text"].startswith("step 3, train, mlp.out[1]: 2 values")
        assert client.welcome["watches"] == ["layer.out | stats"]
        assert client.wait_for("metrics", step=2)["metrics"] == {"reward": 0.5, "kl": None}
        assert client.wait_for("mark", step=4)["label"] == "look here"
        found = history(client, RUN, 1, 4)
        assert [each for each in found if isinstance(decode(each), Frame)] == recorded(folder)
        tables = {each for each in found if isinstance(decode(each), FrameTable)}
        assert tables == set(recorded(folder, EntryKind.TABLE))
        assert {decode(each).where.step for each in history(client, RUN, 2, 2) if b'"frame"' in each[:64]} == {2}
        client.close()
        assert served.end() == (0, "")


def test_two_recordings_of_one_run_are_apart(tmp_path) -> None:
    a, b = (small_recording(tmp_path / name, num_steps=2) for name in "ab")
    with Serving("trace", "serve", a, b) as served, served.connect() as client:
        assert [run["run"] for run in client.welcome["runs"]] == [RUN, f"{RUN} (2)"]
        frames = [decode(each) for each in history(client, f"{RUN} (2)", 1, 2)]
        assert {each.where.run for each in frames if isinstance(each, Frame)} == {f"{RUN} (2)"}
        assert sum(isinstance(each, Frame) for each in frames) == len(recorded(b))


def test_a_run_whose_end_nobody_wrote_is_shown_as_recorded(tmp_path) -> None:
    small_recording(tmp_path, state="running")
    for path in tmp_path.iterdir():
        os.utime(path, (0, 0))
    with Serving("trace", "serve", tmp_path) as served, served.connect() as client:
        (run,) = client.welcome["runs"]
        assert (run["state"], run["text"]) == ("recorded", f"no end is recorded; {tmp_path}")


def test_a_run_that_is_on_is_followed(tmp_path) -> None:
    with StreamWriter(tmp_path, 1 << 20) as writer:
        writer.message(RUN_MESSAGE)
        writer.frame(stats_frame(1).encode())
        with Serving("trace", "serve", tmp_path) as served, served.connect() as client:
            assert client.welcome["runs"][0]["state"] == "running"
            assert client.receive(timeout_s=5) == stats_frame(1).encode()
            writer.frame(stats_frame(2).encode())
            while not isinstance(found := client.receive(timeout_s=5), bytes):
                assert found is not None
            assert found == stats_frame(2).encode()
            writer.message({**RUN_MESSAGE, "state": "ended", "text": "completed"})
            assert client.wait_for("run", state="recorded")["text"].startswith("ended: completed")


def test_playing_sends_frames_in_order_and_in_time(tmp_path) -> None:
    folder = small_recording(tmp_path, num_steps=4, num_layers=1, step_s=0.4)
    with Serving("inspect", folder, "play", "--speed", 2) as served, served.connect() as client:
        found, times = [], []
        while len(found) < len(recorded(folder)):
            received = client.receive(timeout_s=5)
            assert received is not None
            if isinstance(received, bytes) and isinstance(decode(received), Frame):
                found.append(received)
                times.append(time.monotonic())
        assert found == recorded(folder)
        # Three gaps of 0.4 s, twice as fast.
        assert 0.5 <= times[-1] - times[0] < 3
        assert client.wait_for("run", state="recorded")["text"].startswith("ended: completed")
        client.close()
        assert served.end() == (0, "")


def test_frames_are_due_at_their_time_and_waiting_can_be_stopped(tmp_path) -> None:
    folder, stop = small_recording(tmp_path, num_steps=3, step_s=1.0), threading.Event()
    begun = time.monotonic()
    entries = list(paced(StreamReader(folder).entries(), speed=20.0, stop=stop))
    assert 0.1 <= time.monotonic() - begun < 2 and len(entries) == len(list(StreamReader(folder).entries()))
    threading.Timer(0.1, stop.set).start()
    entries = list(paced(StreamReader(folder).entries(), speed=0.001, stop=stop))
    assert {entry.step for entry in entries if entry.kind is EntryKind.FRAME} == {1} and time.monotonic() - begun < 3
    with pytest.raises(UserError, match="positive number"):
        list(paced(StreamReader(folder).entries(), speed=0.0, stop=stop))


def test_headless_playing_prints_the_stats(tmp_path, capsys) -> None:
    small_recording(tmp_path, num_steps=2, num_layers=1, step_s=0.0)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        app(["inspect", str(tmp_path), "play", "--headless"], standalone_mode=False)
        lines = capsys.readouterr().out.splitlines()
        app(["inspect", str(tmp_path), "play", "--headless", "--json"], standalone_mode=False)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert next(line.split()[:4] for line in lines if line.startswith("step")) == ["step", "1", "train", "mlp.out[0]"]
    assert lines[-2:] == ["mark at step 2: look here", "6 frames, 4 of stats"]
    assert [json.loads(line)["step"] for line in capsys.readouterr().out.splitlines()] == [1, 1, 2, 2]


def test_what_the_user_can_mend_ends_with_exit_code_2(tmp_path, capsys, monkeypatch) -> None:
    small_recording(tmp_path / "r")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for command, said in (
            (("trace", "serve", tmp_path), "expected a recording"),
            (("trace", "serve", tmp_path / "r", tmp_path / "r"), "expected each recording once"),
            (("trace", "serve", tmp_path / "r", "--port", taken.getsockname()[1]), "that is free"),
            (("inspect", tmp_path / "r", "play", "--speed", 0), "expected a positive number"),
            (("inspect", tmp_path / "r", "play", "--json"), "expected --headless"),
        ):
            monkeypatch.setattr("sys.argv", ["nemo-rl", *map(str, command)])
            with pytest.raises(SystemExit) as ended:
                main()
            shown = capsys.readouterr().err
            assert ended.value.code == 2 and said in shown and "Traceback" not in shown
