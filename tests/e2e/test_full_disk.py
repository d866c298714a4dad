"""A file system that becomes full in the middle of a run: its folder, its room and the key that moves it are named."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.helpers.runs import LOCAL, write_recipe
from tests.helpers.tiny_model import write_tiny_folder

pytestmark = pytest.mark.slow
SAVING = {"enabled": True, "save_period": 3, "keep_top_k": None}
SIZE_MIB = 300
"""More than a run asks for at its start."""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a small file system."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={SIZE_MIB}m", "tmpfs", str(folder)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"no file system of its own can be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(disk: Path) -> None:
    """Fill a file system to its last byte."""
    with (disk / "fill").open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            try:
                while file.write(b"x" * size):
                    pass
            except OSError as error:
                assert error.errno == errno.ENOSPC


def fill_after_two_steps(disk: Path, metrics: Path) -> None:
    deadline = time.monotonic() + 120
    while not (metrics.exists() and metrics.read_text().count("\n") > 1):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    fill(disk)


@pytest.mark.parametrize(
    ("key", "further"),
    [
        ("logger.log_dir", {}),
        pytest.param("logger.log_dir", {"diagnostics": {"keep_steps": {"enabled": True}}}, marks=pytest.mark.full),
        pytest.param("checkpointing.checkpoint_dir", {"checkpointing": SAVING}, marks=pytest.mark.full),
    ],
    ids=["logs", "kept steps", "checkpoints"],
)
def test_a_disk_that_becomes_full_is_named(
    key: str, further: dict[str, object], disk: Path, tmp_path: Path, command_line: Callable[..., tuple[int, str]]
) -> None:
    model = write_tiny_folder(tmp_path / "model")
    recipe = write_recipe(tmp_path, model, **further)
    log_dir = disk / "logs" if key == "logger.log_dir" else tmp_path / "logs"
    changes = {**LOCAL, "grpo.max_num_steps": 5000, "logger.log_dir": log_dir, key: disk / "logs"}
    metrics = log_dir / "metrics.jsonl"
    with ThreadPoolExecutor(1) as pool:
        filled = pool.submit(fill_after_two_steps, disk, metrics)
        code, output = command_line(recipe, *(f"{name}={value}" for name, value in changes.items()))
        filled.result(timeout=120)
    assert code == 2, output
    told = " ".join(output.split("error:", 1)[1].split())
    assert str(disk) in told and key in told
    assert os.strerror(errno.ENOSPC) in told
    # What was written before is whole.
    lines = metrics.read_text().splitlines()
    assert all(json.loads(line) for line in lines[:-1])
