"""The journal's file, the memory of calls, and the event log of a ledger that comes back."""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgpack
import pytest

from nemo_rl.config.data_plane import DataPlaneConfig, LedgerConfig
from nemo_rl.data_plane.ledger import capacity, state
from nemo_rl.data_plane.ledger.events import EVENTS_FILE, read_events
from nemo_rl.data_plane.ledger.host import LedgerService, build_service
from nemo_rl.data_plane.ledger.journal import JOURNAL_FILE, Journal, create_journal, remove_journal
from nemo_rl.data_plane.ledger.ledger import Ledger
from nemo_rl.data_plane.schema import resolve_fields, spec_to_record
from nemo_rl.errors import DataPlaneError
from nemo_rl.utils.framed_log import HEAD_BYTES, begin

LEASE_S = 30.0
CLAIM = {"task": "t", "fields": ["input_ids"], "consumer": "w"}
CONFIG = DataPlaneConfig(impl="noop", lease_s=LEASE_S, ledger=LedgerConfig(recovery="journal"))
FRAMES = [{"number": number, "padding": "x" * number} for number in range(6)]


def written(path: Path, *, run_id: str = "r") -> Path:
    create_journal(path, run_id=run_id)
    with Journal(path, run_id=run_id) as journal:
        assert journal.is_fresh and list(journal.replay()) == []
        for frame in FRAMES:
            journal.append(msgpack.packb(frame))
    return path


def replayed(path: Path, *, run_id: str = "r") -> list:
    with Journal(path, run_id=run_id) as journal:
        return list(journal.replay())


def test_a_frame_that_was_cut_off_is_dropped_and_the_journal_goes_on(tmp_path: Path) -> None:
    path = written(tmp_path / JOURNAL_FILE)
    content, last = path.read_bytes(), len(msgpack.packb(FRAMES[-1])) + HEAD_BYTES
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    for cut in range(1, last + 1):
        path.write_bytes(content[:-cut])
        with Journal(path, run_id="r") as journal:
            assert list(journal.replay()) == FRAMES[:-1]
            journal.append(msgpack.packb("next"))
        assert replayed(path) == [*FRAMES[:-1], "next"]
    path.write_bytes(content + bytes(4096))  # pages that a machine never wrote
    assert replayed(path) == FRAMES


def test_no_damaged_byte_goes_unseen(tmp_path: Path) -> None:
    path = written(tmp_path / JOURNAL_FILE)
    content, last = path.read_bytes(), len(msgpack.packb(FRAMES[-1])) + HEAD_BYTES
    for at in range(len(content)):
        path.write_bytes(content[:at] + bytes([content[at] ^ 0x10]) + content[at + 1 :])
        try:
            found = replayed(path)
        except DataPlaneError as error:
            assert str(path) in str(error)
        else:
            assert found == FRAMES[:-1] and at >= len(content) - last, f"byte {at}"
    path.write_bytes(content[:-1] + b"!")
    assert replayed(path) == FRAMES[:-1]  # a frame whose pages were not all written
    first = len(content) - sum(len(msgpack.packb(frame)) + HEAD_BYTES for frame in FRAMES)
    sizes = [len(msgpack.packb(frame)) + HEAD_BYTES for frame in FRAMES[:2]]
    path.write_bytes(content[: first + sizes[0]] + content[first + sum(sizes) :])
    with pytest.raises(DataPlaneError, match=rf"is damaged: .* at byte {first + sizes[0]} of "):
        replayed(path)


def test_journals_that_cannot_be_used_are_refused_with_the_reason(tmp_path: Path) -> None:
    path = tmp_path / JOURNAL_FILE
    with pytest.raises(DataPlaneError, match="cannot be opened: .*No such file"):
        replayed(path)
    with pytest.raises(DataPlaneError, match="is of run 'other'; expected one of 'r'"):
        replayed(written(path, run_id="other"))
    content = written(path).read_bytes()
    for start, reason in (
        (b"", "has no beginning .it has 0 bytes"),
        (b"SQLite format 3", "cannot be read: it starts with b'SQLi'"),
        (content[:4] + (2).to_bytes(4, "little") + content[8:], "format 2, this version reads up to 1"),
        (content[:8], "has no beginning"),
        (begin("finished groups", {}), "cannot be read: it is no journal of a ledger"),
    ):
        path.write_bytes(start)
        with pytest.raises(DataPlaneError, match=reason):
            replayed(path)


def test_a_snapshot_takes_the_place_of_the_frames_and_nothing_is_left_of_one_that_was_not_finished(tmp_path):
    path = written(tmp_path / JOURNAL_FILE)
    with Journal(path, run_id="r", sync=True) as journal:
        list(journal.replay())
        journal.restart({"rows": 3})
        journal.append(msgpack.packb("behind"))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and path.stat().st_size < 200
    unfinished = path.with_name(f".{path.stem}.{os.getpid()}.tmp{path.suffix}")
    unfinished.write_bytes(b"half a snap")
    with Journal(path, run_id="r") as journal:
        assert journal.state == {"rows": 3} and not journal.is_fresh and list(journal.replay()) == ["behind"]
    assert os.listdir(tmp_path) == [JOURNAL_FILE]
    remove_journal(path)
    assert os.listdir(tmp_path) == []


# ---- a ledger behind it


@dataclasses.dataclass
class Desk:
    """The service of a run that can be killed: what it has in memory is forgotten."""

    folder: Path
    journal_bytes: int = 16 << 20
    number: int = 0

    def __post_init__(self) -> None:
        create_journal(self.folder / JOURNAL_FILE, run_id="r")
        self.service = self.opened()
        fields = [spec_to_record(spec) for spec in resolve_fields(["input_ids", "sample_mask"])]
        declaration = {"fields": fields, "num_samples": 99, "tasks": ["t"], "task_writes": {"t": []}}
        self.ask("register", group_size=None, **declaration)

    def opened(self) -> LedgerService:
        ledger = CONFIG.ledger.model_copy(update={"journal_bytes": self.journal_bytes})
        config = CONFIG.model_copy(update={"ledger": ledger})
        return build_service(config, run_id="r", validate=True, log_dir=self.folder, journal=self.folder / JOURNAL_FILE)

    def kill(self) -> None:
        if self.journal_bytes == 1:
            self.service._ledger._take_snapshot(time.monotonic())
        self.service.close()
        self.service = self.opened()

    def ask(self, op: str, *, again: int = 0, oldest: int = 0, client: str = "c", **args: object) -> dict:
        """
        Args:
            again: the number of a call that is made again.
        """
        self.number += not again
        number = again or self.number
        request = {"run": "r", "op": op, "args": {"partition": "p", **args}, "client": client, "number": number}
        return self.service.handle({**request, "oldest": oldest or number}, timeout_s=1.0)

    def put(self, key: str, **options: int) -> dict:
        chunk = {"id": f"{key}/{self.number}", "family": "tokens", "fields": ["input_ids"], "first": 0, "rows": 1}
        chunk |= {"column_types": {}, "nbytes": 4, "sizes": [4], "row_sizes": {}}
        args = {"keys": [key], "lengths": [1], "tags": {"n": [1]}, "chunks": [chunk], "claims": {}, "may_create": True}
        return self.ask("commit", **args, **options)

    def claim(self, **options: object) -> dict:
        return self.ask("claim", **{**CLAIM, "batch_size": 1, **options})


@pytest.fixture(params=[16 << 20, 1], ids=["frames", "snapshots"])
def desk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Desk]:
    """With frames alone, and with a snapshot about every second change and before each death."""
    desk = Desk(tmp_path, journal_bytes=request.param)
    yield desk
    desk.service.close()


def test_calls_that_are_made_again_after_a_death_get_their_replies_and_change_nothing(desk: Desk) -> None:
    put = desk.put("a")
    claimed = desk.claim()
    assert put["ok"]["versions"] == {"tokens": 1} and claimed["ok"]["keys"] == ["a"]
    for _ in range(3):
        desk.kill()
        assert desk.claim(again=3) == claimed
        # A call that changed nothing is served anew.
        assert desk.claim(oldest=3)["ok"]["keys"] == []
    rewritten = desk.put("a")
    desk.kill()
    assert desk.put("a", again=desk.number)["ok"] == rewritten["ok"]
    assert desk.put("a")["ok"]["versions"] == {"tokens": 3}


def state_of(desk: Desk) -> bytes:
    """Return everything but the ends of leases."""
    dumped = desk.service._ledger.dump(now=0.0)
    return msgpack.packb({**dumped, "claims": [claim[:5] + claim[6:] for claim in dumped["claims"]]})


def test_what_each_task_did_with_each_row_comes_back_in_its_order(desk: Desk) -> None:
    for key in ("c", "a", "b", "d"):
        desk.put(key)
    first, second = desk.claim(consumer="w-c")["ok"], desk.claim(consumer="w-a")["ok"]
    held = {"t": {"c": first["claim"]}}
    order = [name for name, *_ in desk.ask("claim", **CLAIM, batch_size=0)["ok"]["why"]["holders"]]
    desk.kill()
    assert [name for name, *_ in desk.ask("claim", **CLAIM, batch_size=0)["ok"]["why"]["holders"]] == order
    assert order == ["w-c", "w-a"]
    assert (first["keys"], second["keys"]) == (["c"], ["a"])
    assert desk.ask("release", task="t", keys=["c"], claims=held)["ok"] == {}
    desk.ask("clear", keys=["b"])
    before, explained = state_of(desk), desk.ask("explain", key="c")["ok"]["rows"][0]["tasks"]
    for _ in range(2):
        desk.kill()
        assert state_of(desk) == before and explained == {"t": "done"}
        assert desk.ask("explain", key="c")["ok"]["rows"][0]["tasks"] == explained
    assert desk.claim()["ok"]["keys"] == ["d"] and desk.claim()["ok"]["keys"] == []


def test_claims_that_were_good_get_a_full_lease_and_those_that_were_over_do_not(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.put("a")
    desk.put("b")
    desk.put("c")
    ledger = desk.service._ledger

    def ends() -> list[float]:
        return [claim[5] for claim in ledger.dump(now=0.0)["claims"]]

    def call(number: int, op: str, now: float, **args: object) -> dict:
        request = {"run": "r", "op": op, "client": "d", "number": number, "oldest": number}
        return ledger.handle({**request, "args": {"partition": "p", **args}}, now=now)["ok"]

    began = time.monotonic() - 100.0
    claim = {"task": "t", "fields": ["input_ids"], "batch_size": 1, "consumer": "w"}
    assert [call(1, "claim", began, **claim)["keys"], call(2, "claim", began + 25.0, **claim)["keys"]] == [["a"], ["b"]]
    call(3, "heartbeat", began + 31.0, claims=[])  # the first one is over by now
    desk.service.close()
    killed = time.monotonic()
    desk.service = build_service(CONFIG, run_id="r", journal=tmp_path / JOURNAL_FILE)
    ledger = desk.service._ledger
    assert ends()[0] == began + LEASE_S and killed + LEASE_S <= ends()[1] <= time.monotonic() + LEASE_S
    desk.service.close()


def test_leases_that_a_request_without_rows_found_to_be_over_are_over_after_a_death(desk: Desk) -> None:
    desk.put("a")
    desk.claim()
    ledger = desk.service._ledger
    request = {"run": "r", "op": "consumption", "client": "d", "number": 1, "oldest": 1}
    later = time.monotonic() + 2 * LEASE_S
    reply = ledger.handle({**request, "args": {"partition": "p", "tasks": ["t"]}}, now=later)
    assert reply["ok"] == {"done": False}
    before = state_of(desk)
    desk.service.close()
    desk.service = desk.opened()
    assert state_of(desk) == before
    assert desk.ask("explain", key="a")["ok"]["rows"][0]["tasks"] == {"t": "expired claim of w"}


def test_replies_are_kept_until_the_client_has_them_and_a_late_call_is_refused(desk: Desk) -> None:
    desk.put("a")
    desk.put("b", oldest=2)
    assert desk.put("a", again=2, oldest=2)["ok"]["versions"] == {"tokens": 1}
    desk.put("c", oldest=4)
    desk.kill()
    refused = desk.put("a", again=2, oldest=2)
    assert "came after its client had ended it" in refused["error"]["text"]
    assert desk.ask("list")["ok"]["keys"] == ["a", "b", "c"]
    # Another client counts for itself.
    assert desk.put("d", again=2, client="other")["ok"]["versions"] == {"tokens": 1}


def test_replies_of_silent_clients_are_dropped() -> None:
    from nemo_rl.data_plane.ledger.recovery import _CallReplies

    replies = _CallReplies(keep_s=10.0)
    for second in range(100):
        call = {"client": f"c{second}", "number": 1, "oldest": 1}
        replies.keep(call, {"ok": {}}, now=float(second))
        assert replies.find(call) == {"ok": {}}
    assert [name for name, *_ in replies.dump()] == [f"c{second}" for second in range(89, 100)]


def test_requests_without_numbers_are_served_as_ever(desk: Desk) -> None:
    request = {"run": "r", "op": "register", "args": {}}
    assert "error" in desk.service.handle(request, timeout_s=1.0)
    stats = {"run": "r", "op": "stats", "args": {}}
    assert desk.service.handle(stats, timeout_s=1.0)["ok"]["live_rows"] == 0


def test_handles_of_chunks_come_back(desk: Desk) -> None:
    desk.put("a")
    chunk = desk.ask("locate", keys=["a"], fields=["input_ids"], versions={})["ok"]["chunks"][0]
    request = {"run": "r", "op": "commit", "client": "h", "number": 1, "oldest": 1, "handles": {chunk: [7, "host"]}}
    rewrite = {"id": chunk, "family": "tokens", "fields": ["input_ids"], "first": 0, "rows": 1, "column_types": {}}
    rewrite |= {"nbytes": 4, "sizes": [4], "row_sizes": {}, "id": "other"}
    args = {"partition": "p", "keys": ["a"], "lengths": [1], "tags": None, "chunks": [rewrite], "claims": {}}
    handles = {"other": [7, "host"]}
    desk.service.handle({**request, "handles": handles, "args": {**args, "may_create": True}}, timeout_s=1.0)
    desk.kill()
    assert desk.ask("locate", keys=["a"], fields=["input_ids"], versions={})["ok"]["handles"] == handles


@contextmanager
def files_limited_to(num_bytes: int) -> Iterator[None]:
    """A disk on which no file grows beyond the limit."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_ends_the_recovery_and_not_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    desk = Desk(tmp_path)
    with files_limited_to((tmp_path / JOURNAL_FILE).stat().st_size + 20):
        assert desk.put("a")["ok"]["versions"] == {"tokens": 1}
    assert "cannot be written" in caplog.text and "the run goes on" in caplog.text
    assert desk.put("b")["ok"]["versions"] == {"tokens": 1} and desk.ask("stats")["ok"]["live_rows"] == 2
    desk.service.close()
    with pytest.raises(DataPlaneError, match="was given up when it could not be written"):
        desk.opened()


def test_a_disk_without_space_for_a_snapshot_keeps_the_frames(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    desk = Desk(tmp_path)
    desk.put("a")
    ledger = desk.service._ledger
    ledger._snapshot_bytes = 1
    size = (tmp_path / JOURNAL_FILE).stat().st_size
    with files_limited_to(size + 100):
        desk.ask("heartbeat", claims=[])
    assert "no snapshot of the ledger" in caplog.text and os.listdir(tmp_path).count(JOURNAL_FILE) == 1
    desk.put("b")
    desk.kill()
    assert desk.ask("list")["ok"]["keys"] == ["a", "b"]
    desk.service.close()


# ---- events


def numbered(path: Path) -> list[tuple[str, int]]:
    return [(event["event"], event.get("n", 0)) for event in read_events(path)]


def test_events_go_on_without_a_gap_or_a_repetition_wherever_their_file_was_cut(desk: Desk) -> None:
    path = desk.folder / EVENTS_FILE
    desk.put("a")
    desk.claim()
    desk.ask("locate", keys=["a"], fields=["input_ids"], versions={})
    desk.put("b")
    desk.ask("clear", keys=["a"])
    desk.service.close()
    journal, content = (desk.folder / JOURNAL_FILE).read_bytes(), path.read_bytes()
    changes = ["register", "commit", "claim", "commit", "clear"]
    first = content.index(b"\n") + 1
    if desk.journal_bytes == 1:
        # Events of frames that a snapshot has replaced are in the file before it.
        first = content.index(b"\n", content.index(b'"event":"clear"')) - 200
    for cut in range(first, len(content) + 1):
        (desk.folder / JOURNAL_FILE).write_bytes(journal)
        path.write_bytes(content[:cut])
        desk.service = desk.opened()
        desk.put("c")
        desk.service.close()
        events = [event for event in numbered(path) if event[0] not in ("open", "read")]
        assert events == [*zip(changes, range(1, 6), strict=True), ("recover", 5), ("commit", 6)], f"cut at {cut}"
    times = [event["time"] for event in read_events(path)]
    assert max(times) - min(times) < 600 and json.loads(content[:first].splitlines()[0])["event"] == "open"


def test_events_are_in_their_file_before_a_snapshot_replaces_the_changes_that_made_them(desk: Desk) -> None:
    log = desk.service._ledger._log
    for number in range(3000):  # more than the writer has written meanwhile
        log({"event": "read", "keys": (), "partition": "p", "number": number})
    desk.put("a")
    desk.service._ledger._take_snapshot(time.monotonic())
    assert numbered(desk.folder / EVENTS_FILE)[-1] == ("commit", 2)


# ---- the snapshot knows every field


def test_every_field_of_the_records_is_in_a_snapshot(desk: Desk) -> None:
    desk.put("a")
    desk.claim()
    dumped = desk.service._ledger.dump(now=0.0)
    partition, chunk = dumped["partitions"][0], dumped["chunks"][0]
    fields = {kind: {field.name for field in dataclasses.fields(kind)} for kind in RECORDS}
    for kind, found in ((state.Partition, partition), (state.Chunk, chunk), (capacity.Capacity, dumped["capacity"])):
        assert fields[kind] - set(found) == ELSEWHERE[kind], f"{kind.__name__}: add the field to the snapshot"
    assert {len(fields[state.Row]) - 1} == {len(row) for row in partition["rows"]}
    assert fields[state.TaskCursor] - set(partition["tasks"]["t"]) == ELSEWHERE[state.TaskCursor]
    # A claim is listed with its partition and its task, and its keys are those of the rows that name it.
    assert {len(fields[state.ClaimLease]) - 1 + 2} == {len(claim) for claim in dumped["claims"]}
    others = {"_lease_s", "_validate", "_record", "_ops", "run_id", "num_expired", "_keyed"}
    assert {name.removeprefix("_") for name in set(vars(Ledger(**LIMITS))) - others} == set(dumped)


LIMITS = {"run_id": "r", "capacity_rows": 9, "capacity_bytes": None, "lease_s": 1.0}
RECORDS = (state.Partition, state.Chunk, capacity.Capacity, state.Row, state.TaskCursor, state.ClaimLease)
ELSEWHERE: dict[type, set[str]] = {
    state.Partition: {"name", "specs", "num_samples", "group_size"},
    # A journal is refused where rows are kept under their own keys.
    state.Chunk: {"chunk_id", "is_keyed"},
    capacity.Capacity: {"rows", "nbytes", "partitions", "lease_s"},
    state.TaskCursor: {"writes"},
}
"""Fields that follow from the declaration or the config, or have another name in the snapshot."""
