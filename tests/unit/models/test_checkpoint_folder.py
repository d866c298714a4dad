"""Folders of checkpoints: whole or absent, and refused when reading them would run code."""

from __future__ import annotations

import pickle
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata

from nemo_rl.distributed.collectives import RankSpec, destroy_process_group, init_process_group
from nemo_rl.errors import CheckpointError
from nemo_rl.models.hf.checkpoint_folder import complete_or_nothing, random_state, refuse_code, set_random_state


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    init_process_group(RankSpec(rank=0, world_size=1), device=torch.device("cpu"), timeout_s=30)
    yield
    destroy_process_group()


class Bomb:
    """Leaves a file when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return Path.touch, (self.trace,)


def test_a_folder_is_replaced_when_all_is_written_and_left_alone_otherwise(tmp_path: Path) -> None:
    folder = tmp_path / "step_1"
    with complete_or_nothing(folder) as target:
        (target / "weights").write_text("first")
        assert not folder.exists()
    with (
        pytest.raises(CheckpointError, match="rank 0 could not write it: OSError: no space"),
        complete_or_nothing(folder) as target,
    ):
        (target / "weights").write_text("second")
        raise OSError("no space")
    assert (folder / "weights").read_text() == "first"
    with complete_or_nothing(folder) as target:
        (target / "more").write_text("third")
    assert [path.name for path in folder.iterdir()] == ["more"]
    assert [path.name for path in tmp_path.iterdir()] == ["step_1"]


def test_a_write_that_the_system_stops_is_told_in_one_line(tmp_path: Path) -> None:
    """torch's own error has the traceback of every rank in its text."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        with (
            pytest.raises(CheckpointError, match=r"rank 0 could not write it: .* of disk are free") as caught,
            complete_or_nothing(tmp_path / "step_1") as target,
        ):
            state_dict_saver.save({"weights": torch.zeros(1 << 16)}, checkpoint_id=target)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "Traceback" not in str(caught.value) and "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_tensors_and_plain_values_are_read(tmp_path: Path) -> None:
    values = {
        "lr": 0.1,
        "betas": [0.9, 0.95],
        "fused": None,
        "name": "adam",
        "weight": torch.ones(3, dtype=torch.bfloat16),
    }
    state_dict_saver.save(values, checkpoint_id=tmp_path)
    refuse_code(tmp_path)


@pytest.mark.parametrize("place", ["index", "object"])
def test_pickles_of_anything_else_are_refused_unread(tmp_path: Path, place: str) -> None:
    trace, folder = tmp_path / "trace", tmp_path / "optimizer"
    state_dict_saver.save({"lr": Bomb(trace) if place == "object" else 0.1}, checkpoint_id=folder)
    if place == "index":
        (folder / ".metadata").write_bytes(pickle.dumps(Bomb(trace)))
    with pytest.raises(CheckpointError, match="the optimizer state cannot be read"):
        refuse_code(folder)
    assert not trace.exists()


class Attribute:
    """Pickled as early versions of Python 3.11 pickle a member of an Enum."""

    def __init__(self, kind: type, name: str) -> None:
        self.parts = kind, name

    def __reduce__(self) -> tuple[object, ...]:
        return getattr, self.parts


def test_members_of_enums_are_read_in_the_form_of_every_python(tmp_path: Path) -> None:
    state_dict_saver.save({"lr": 0.1}, checkpoint_id=tmp_path)
    index = pickle.loads((tmp_path / ".metadata").read_bytes())
    index.storage_meta = Attribute(_MEM_FORMAT_ENCODING, "TORCH_CONTIGUOUS_FORMAT")
    (tmp_path / ".metadata").write_bytes(pickle.dumps(index))
    refuse_code(tmp_path)
    for kind, name in ((_MEM_FORMAT_ENCODING, "mro"), (Metadata, "__init__"), (_MEM_FORMAT_ENCODING, "__class__")):
        index.storage_meta = Attribute(kind, name)
        (tmp_path / ".metadata").write_bytes(pickle.dumps(index))
        with pytest.raises(CheckpointError, match="has no place in the index"):
            refuse_code(tmp_path)


def test_random_state_is_set_again() -> None:
    state = random_state()
    expected = torch.rand(3)
    set_random_state(state)
    assert torch.equal(torch.rand(3), expected)
