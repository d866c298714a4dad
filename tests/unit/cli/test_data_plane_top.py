"""`nemo-rl data-plane top`: rates between two views, what is printed, and how it ends."""

from __future__ import annotations

import io
import json
import os
import pty
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from rich.console import Console

from nemo_rl.cli import data_plane
from nemo_rl.cli.data_plane import TopTable
from nemo_rl.cli.main import app, main
from nemo_rl.config.data_plane import DataPlaneConfig
from nemo_rl.data_plane.address import ATTACH_FILE, read_attach_file
from nemo_rl.data_plane.client.operation_counts import OperationCount, Totals
from nemo_rl.data_plane.factory import attach_data_plane, build_data_plane_client, observe
from nemo_rl.data_plane.interfaces import DataPlaneClient
from nemo_rl.data_plane.ledger.host import LedgerHost
from nemo_rl.data_plane.metrics_endpoint import ClaimView, ClientView, RunView, view_of
from tests.helpers.data_planes import ids_column, keys_of, wait_until

STATS = {
    "live_rows": 8,
    "live_bytes": 3 << 20,
    "reserved_bytes": 1 << 20,
    "blocked_put_s": 1.5,
    "oldest_row_age_s": 75.0,
    "partitions": {"train": {"rows": 8}, "val": {"rows": 0}},
}


def client(label: str, calls: dict[tuple[str, str], OperationCount], **changes: object) -> ClientView:
    totals = Totals()
    for (stage, operation), count in calls.items():
        totals.add(stage, operation, count)
    view = {"stage": "rollout", "seen_s": 0.5, "calls": 9, "is_closed": False, "totals": totals}
    return ClientView(label=label, **{**view, **changes})


def view(at: float, *clients: ClientView, requests: int) -> RunView:
    return RunView(
        run_id="r",
        at=at,
        stats=STATS,
        capacity_rows=1000,
        capacity_bytes=64 << 20,
        reserved={"train": 1 << 20},
        tasks={"train": {"train": {"pending": 1, "leased": 5, "done": 2}}, "val": {}},
        claims=(ClaimView(partition="train", task="train", client="b", rows=5),),
        operations={"commit": (requests, 0.1)},
        errors={},
        puts_waiting=2,
        clients=clients,
    )


def test_rates_are_those_between_two_views() -> None:
    put, get = ("rollout", "kv_batch_put"), ("train", "get_data")
    before = view(
        100.0,
        client("a", {put: OperationCount(count=10, ms=100.0, payload_bytes=1_000_000)}),
        client("c", {}, seen_s=7.0),
        requests=50,
    )
    now = view(
        104.0,
        client("a", {put: OperationCount(count=14, errors=2, ms=140.0, payload_bytes=9_000_000)}),
        client("c", {}, seen_s=11.0),
        client("gone", {put: OperationCount(count=99, ms=9e9)}, is_closed=True),
        client(
            "b",
            {
                get: OperationCount(count=8, ms=3200.0, payload_bytes=4_000_000),
                ("train", "get_meta"): OperationCount(count=8, ms=800.0),
                ("log", "kv_batch_get"): OperationCount(count=4, ms=8.0, payload_bytes=400_000),
            },
        ),
        requests=90,
    )
    table = TopTable.between(before, now)
    assert [c.label for c in table.clients] == ["b", "a", "c"], "busiest first, without those that have closed"
    b, a, c = table.clients
    assert (b.stage, b.calls_per_s, b.out_bytes_per_s, b.in_bytes_per_s) == ("train", 5.0, 1_100_000, 0)
    assert b.busy == pytest.approx(1.002) and b.ms_per_call == pytest.approx(4008 / 20) and b.rows_held == 5
    assert (a.stage, a.calls_per_s, a.in_bytes_per_s, a.ms_per_call, a.busy) == ("rollout", 1.0, 2_000_000, 10.0, 0.01)
    assert (c.calls_per_s, c.ms_per_call, c.seen_s, c.rows_held) == (0.0, 0.0, 11.0, 0)
    assert (table.head.ledger_calls_per_s, table.head.errors_per_s, table.head.puts_waiting) == (10.0, 0.5, 2)
    assert [(t.partition, t.task, t.live, t.pending, t.leased, t.done) for t in table.tasks] == [
        ("train", "train", 8, 1, 5, 2),
        ("val", "", 0, 0, 0, 0),
    ]
    shown = io.StringIO()
    Console(file=shown, width=120).print(table.draw())
    lines = [" ".join(line.split()) for line in shown.getvalue().splitlines()]
    assert lines == [
        "run r: 8 rows of 1,000, 3MiB of 64MiB (+1MiB reserved), oldest row 1 min",
        "2 puts waiting (1.5 s in all), 10.0 ledger calls/s, 0.5 errors/s",
        "",
        "client stage calls/s MB/s in MB/s out ms/call busy held seen",
        "b train 5.0 0.00 1.10 200.4 100% 5 0.5 s",
        "a rollout 1.0 2.00 0.00 10.0 1% 0 0.5 s",
        "c rollout 0.0 0.00 0.00 0.0 0% 0 11.0 s",
        "",
        "partition task live pending leased done",
        "train train 8 1 5 2",
        "val - 0 - - -",
    ]


@pytest.mark.parametrize("width", [80, 200])
def test_numbers_are_whole_in_a_narrow_terminal_and_labels_fold(width: int) -> None:
    label = "127.0.0.1~c9f2904f:32068.c75c4b"
    calls = {("reference_logprobs", "get_data"): OperationCount(count=4000, ms=4321.5, payload_bytes=4_000_000_000)}
    now = view(1.0, client(label, calls), requests=1)
    shown = io.StringIO()
    Console(file=shown, width=width).print(TopTable.between(view(0.0, requests=0), now).draw())
    words = shown.getvalue().split()
    assert {"calls/s", "4000.0", "4000.00", "1.1", "432%", "held"} <= set(words)
    assert (label in words) is (width == 200) and "client" in words
    assert max(map(len, shown.getvalue().splitlines())) <= width


@pytest.fixture
def job(tmp_path: Path) -> Iterator[DataPlaneClient]:
    """A job over the socket with 4 rows, 3 of them claimed by its owner."""
    owner = build_data_plane_client(DataPlaneConfig(impl="shm"), run_id="job", log_dir=tmp_path)
    owner.register_partition("train", ["input_ids", "sample_mask"], 99, ["train"])
    owner.kv_batch_put(keys_of(1), "train", {"input_ids": ids_column([2] * 4), "sample_mask": torch.ones(4)})
    owner.get_meta("train", "train", ["input_ids"], 3, consumer_id="c")
    yield owner
    owner.close()


def test_once_prints_one_table_of_a_running_job(job, tmp_path: Path, capsys) -> None:
    worker, done = attach_data_plane(job.address), threading.Event()

    def work() -> None:
        with worker.stage("train"):
            while not done.wait(0.01):
                worker.kv_batch_get(keys_of(1), "train", ["input_ids"])

    thread = threading.Thread(target=work)
    thread.start()
    try:
        found = json.loads(run(capsys, tmp_path, "--once", "--interval", "2.5", "--json"))
    finally:
        done.set()
        thread.join()
        worker.close()
    seen = {each["label"]: each for each in found["clients"]}
    busy, owner = seen.pop(worker._link.label), seen.pop(job._link.label)
    assert seen == {} and busy["stage"] == "train" and busy["calls_per_s"] > 1 and busy["out_bytes_per_s"] > 32
    assert owner["rows_held"] == 3 and owner["calls_per_s"] < busy["calls_per_s"]
    task = {"partition": "train", "task": "train", "live": 4, "pending": 1, "leased": 3, "done": 0}
    assert found["tasks"] == [task] and found["head"]["rows"] == 4
    shown = run(capsys, "--run", tmp_path, "--once", "--interval", "0.1")
    assert "run job: 4 rows of 1,000,000" in shown and shown.count("train") >= 2
    assert job._link.label in shown and worker._link.label not in shown, "it has closed"


def test_a_key_ends_the_live_table_and_leaves_the_terminal_as_it_was(job, tmp_path: Path, monkeypatch) -> None:
    ours, its = pty.openpty()
    shown = io.StringIO()
    with os.fdopen(its, "r") as keyboard:
        monkeypatch.setattr("sys.stdin", keyboard)
        host = observe(read_attach_file(tmp_path))
        console = Console(file=shown, force_terminal=True, width=120)
        settings = data_plane.termios.tcgetattr(its)
        # Only a key ends it: its interval is far longer than the test may take.
        thread = threading.Thread(target=data_plane.watch, args=(host, console), kwargs={"interval_s": 3600})
        thread.start()
        wait_until(lambda: "run job: 4 rows" in shown.getvalue())
        os.write(ours, b"x")
        os.write(ours, b"q")
        thread.join(timeout=60)
        assert not thread.is_alive()
        assert data_plane.termios.tcgetattr(its) == settings
        host.close()
    os.close(ours)


def test_a_job_that_ends_ends_the_table(job, tmp_path: Path, capsys, monkeypatch) -> None:
    looks: list[float] = []

    def look(ledger: LedgerHost, *, timeout_s: float) -> RunView:
        looks.append(timeout_s)
        if len(looks) == 3:
            job.close()
        return view_of(ledger, timeout_s=timeout_s)

    monkeypatch.setattr(data_plane, "view_of", look)
    assert end(capsys, monkeypatch, "--interval", "0.1", tmp_path) == (0, "run job has ended")
    assert end(capsys, monkeypatch, tmp_path) == (1, f"{tmp_path}: no job runs")


def test_a_job_that_was_killed_is_an_error(job, tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr("nemo_rl.cli.data_plane.END_S", 0.2)
    left_behind = (tmp_path / ATTACH_FILE).read_text()

    def kill() -> None:
        job.close()
        (tmp_path / ATTACH_FILE).write_text(left_behind)

    host = observe(read_attach_file(tmp_path))
    monkeypatch.setattr("nemo_rl.cli.data_plane._reach", lambda point, folder: host)
    kill()
    code, shown = end(capsys, monkeypatch, tmp_path)
    assert code == 1 and "error: run 'job': the ledger's socket is gone" in shown


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (("--json", "{run}"), "--json: prints one table; add --once"),
        ((), "expected logger.log_dir of one run, as RUN or as --run"),
        (("{run}", "--run", "{run}"), "expected logger.log_dir of one run"),
        (("--interval", "0", "{run}"), "greater than or equal to 0.1"),
    ],
)
def test_user_errors_exit_with_2(job, tmp_path: Path, capsys, monkeypatch, args, text: str) -> None:
    code, shown = end(capsys, monkeypatch, *(arg.format(run=tmp_path) for arg in args), whole=True)
    assert code == 2 and text in shown


def run(capsys: pytest.CaptureFixture[str], *args: object) -> str:
    """Standard output of a command that ends well."""
    with pytest.raises(SystemExit) as ended:
        app(["data-plane", "top", *map(str, args)])
    assert ended.value.code == 0
    return capsys.readouterr().out


def end(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *args: object, whole: bool = False
) -> tuple[int, str]:
    """Exit code of the console script, and what it says on standard error, by default up to its first bracket."""
    monkeypatch.setattr("sys.argv", ["nemo-rl", "data-plane", "top", *map(str, args)])
    with pytest.raises(SystemExit) as ended:
        main()
    shown = capsys.readouterr().err
    return ended.value.code or 0, shown if whole else shown.partition(" (")[0].partition("; ")[0].strip()
