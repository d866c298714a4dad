"""Checkpoints at a URL: complete with their record or not there, damaged ones named, and no secret in an error."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import fsspec
import pytest

from nemo_rl.errors import CheckpointError
from nemo_rl.utils.object_store import ObjectStore
from nemo_rl.utils.remote_checkpoints import RemoteCheckpoints, fetched
from tests.helpers.object_server import BUCKET, KEY, KEY_VARIABLE, PROTOCOL, ObjectFileSystem, Server

PART = "policy/weights/model.bin"
FAR_S = 60.0


@dataclass
class Place:
    server: Server
    tmp: Path

    @property
    def url(self) -> str:
        return f"{PROTOCOL}://127.0.0.1:{self.server.server_port}/{BUCKET}/run"

    def manager(self, *, keep: int | None = None) -> RemoteCheckpoints:
        store = ObjectStore(self.url, timeout_s=FAR_S)
        return RemoteCheckpoints(store, staging=self.tmp / "staging", keep_top_k=keep, metric_name="reward")

    def names(self) -> list[str]:
        return ObjectStore(self.url).names()

    def file_of(self, name: str) -> Path:
        """The file of the server that holds an object."""
        (found,) = (self.tmp / BUCKET).glob(f"*{name.replace('/', '%2F')}")
        return found


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    fsspec.register_implementation(PROTOCOL, ObjectFileSystem, clobber=True)
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    (tmp_path / BUCKET).mkdir()
    with Server(tmp_path) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        yield Place(server, tmp_path)
        server.shutdown()
        thread.join(FAR_S)


def save(manager: RemoteCheckpoints, step: int, *, reward: float = 0.0, content: str | None = None) -> None:
    def write(folder: Path) -> None:
        for name in (PART, "policy/optimizer/__0_0.distcp"):
            (folder / name).parent.mkdir(parents=True)
            (folder / name).write_text(content or f"{name} of step {step}")

    manager.save(step, write=write, state={"sampler": {}, "metrics": {"reward": reward}})


def test_what_was_saved_is_downloaded_and_nothing_stays_in_the_staging_folder(place: Place) -> None:
    manager = place.manager()
    save(manager, 3)
    assert list((place.tmp / "staging").iterdir()) == []
    choice = place.manager().choose()
    found = choice.checkpoint
    assert found.place == f"{place.url}/step_3" and "named by `latest`" in choice.reason
    assert (found.path / PART).read_text() == f"{PART} of step 3" and found.has_optimizer
    copy = fetched(found, prefix="policy/weights/")
    assert copy.path != found.path and (copy.path / PART).is_file() and not copy.optimizer.exists()
    assert fetched(found, prefix="policy/weights/") is copy


def test_files_without_a_record_are_never_taken_and_the_next_save_removes_them(place: Place) -> None:
    manager = place.manager()
    save(manager, 1)
    killed = place.manager().begin(2, state={"sampler": {}})
    assert killed.upload is not None
    (killed.folder / "part.bin").write_bytes(b"x")
    ObjectStore(killed.upload.url).upload({"part.bin": killed.folder / "part.bin"})
    left = killed.upload.url.rpartition("/")[2]
    assert left in place.names() and place.manager().choose().checkpoint.step == 1
    save(place.manager(), 2)
    assert left not in place.names() and [each.step for each in place.manager().all()] == [1, 2]


def test_the_best_and_the_latest_are_kept(place: Place) -> None:
    manager = place.manager(keep=1)
    for step, reward in enumerate((0.1, 0.9, 0.5, 0.2)):
        save(manager, step, reward=reward)
    assert [each.step for each in manager.all()] == [1, 3]
    assert len(place.names()) == 5  # latest, and two records with their folders


def test_a_step_that_is_saved_again_exchanges_its_record(place: Place) -> None:
    save(place.manager(), 1)
    save(place.manager(), 1, content="again")
    assert (place.manager().choose().checkpoint.path / PART).read_text() == "again"
    assert len(place.names()) == 3


@pytest.mark.parametrize("damage", ["truncated", "changed", "gone", "record"])
def test_a_damaged_object_is_named_and_the_one_before_it_is_taken(
    place: Place, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    save(place.manager(), 1)
    save(place.manager(), 2)
    file = place.file_of(f"run/step_2.*/{PART}") if damage != "record" else place.file_of("run/step_2.json")
    content = file.read_bytes()
    file.unlink()
    if damage != "gone":
        file.write_bytes(content[:-1] + (b"?" if damage == "changed" else b""))
    assert place.manager().choose().checkpoint.step == 1
    said = {
        "truncated": f"{PART} has {len(content) - 1} bytes, expected {len(content)}",
        "changed": f"{PART} is corrupt: its checksum differs",
        "gone": f"{PART} is missing",
        "record": "step_2.json",
    }
    assert f"{place.url}/step_2 is corrupt" in caplog.text and said[damage] in caplog.text
    if damage == "truncated":
        with pytest.raises(CheckpointError, match=f"step_2: {PART} has"):
            fetched(place.manager().one(2))


def test_a_record_cannot_name_a_file_outside_of_its_folder(place: Place) -> None:
    save(place.manager(), 1)
    record = place.file_of("run/step_1.json")
    record.write_text(record.read_text().replace(PART, "../../model.bin"))
    with pytest.raises(CheckpointError, match="which lies outside"):
        place.manager().choose()


def test_an_upload_that_does_not_arrive_whole_is_no_checkpoint(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    save(place.manager(), 1)
    put = ObjectFileSystem.put_file

    def lose_the_end(self: ObjectFileSystem, lpath: str, rpath: str, **given: object) -> None:
        put(self, lpath, rpath, **given)
        if rpath.endswith(PART):
            self.pipe_file(rpath, Path(lpath).read_bytes()[:-1])

    monkeypatch.setattr(ObjectFileSystem, "put_file", lose_the_end)
    with pytest.raises(CheckpointError, match=rf"{PART}: expected 41 bytes, the store lists 40.*step_1\. "):
        save(place.manager(), 2, content="x" * 41)
    assert place.manager().choose().checkpoint.step == 1


def test_what_the_store_refuses_for_a_moment_is_tried_again(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nemo_rl.utils.object_store.RETRY_WAITS_S", (0.0, 0.0))
    place.server.failures = 2
    ObjectStore(place.url).write("a", b"x")
    place.server.failures = 3
    with pytest.raises(CheckpointError, match="could not write a: OSError: .*503"):
        ObjectStore(place.url).write("a", b"x")


def test_a_store_that_does_not_answer_is_given_up(place: Place) -> None:
    place.server.slow_s = 5.0
    with pytest.raises(CheckpointError, match="could not write a within 0 s"):
        ObjectStore(place.url, timeout_s=0.2).write("a", b"x")


def test_the_probe_names_what_is_wrong_without_a_secret(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    ObjectStore(place.url).probe()
    assert place.names() == []
    with pytest.raises(CheckpointError, match="FileNotFoundError.*correct checkpointing.checkpoint_dir"):
        ObjectStore(place.url.replace(BUCKET, "wrong")).probe()
    monkeypatch.setenv(KEY_VARIABLE, "wrongkey-99")
    with pytest.raises(CheckpointError, match="the key <masked> is refused") as refused:
        ObjectStore(place.url).probe()
    assert "wrongkey" not in str(refused.value)
    with pytest.raises(CheckpointError, match="no package for the protocol 's3': .*s3fs"):
        ObjectStore("s3://bucket/run")
    with pytest.raises(CheckpointError, match="no package for the protocol 'nothing'"):
        ObjectStore("nothing://bucket/run")


def test_a_file_url_works_too(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/new/run"
    manager = RemoteCheckpoints(ObjectStore(url), staging=tmp_path / "staging", keep_top_k=1)
    for step in (1, 2):
        save(manager, step)
    assert [each.step for each in manager.all()] == [2]
    assert manager.choose().checkpoint.place == f"{url}/step_2"
    manager.remove_all()
    assert ObjectStore(url).names() == []
