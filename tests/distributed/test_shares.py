"""Files written from the shards of four ranks: those of full weights, byte for byte; and told on all ranks if not."""

from __future__ import annotations

import os
import resource
from collections import Counter
from pathlib import Path
from unittest.mock import patch

import pytest
import torch.distributed as dist

from nemo_rl.config.backends import DTensorConfig, MegatronConfig
from nemo_rl.errors import CheckpointError
from nemo_rl.models.hf import writing
from nemo_rl.models.hf.writing import write_folder
from nemo_rl.models.policy.workers.policy_worker import PolicyWorker
from tests.helpers.gloo import run_ranks
from tests.helpers.model_families import write_family
from tests.helpers.tiny_model import tiny_policy, tiny_worker

pytestmark = pytest.mark.slow

RANKS = 4
SPLIT = {"dtensor_cfg": DTensorConfig(tensor_parallel_size=2)}
PIPELINE = MegatronConfig(enabled=True, tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
EXPERTS = MegatronConfig(
    enabled=True,
    tensor_model_parallel_size=2,
    sequence_parallel=True,
    expert_model_parallel_size=2,
    expert_tensor_parallel_size=1,
)
CASES: dict[str, tuple[str, dict[str, object]]] = {
    "tied, dp4": ("qwen3", {"dtensor_cfg": DTensorConfig()}),
    "copies": ("qwen3", {"dtensor_cfg": DTensorConfig(replicate_size=2)}),
    "biases, tp2 dp2": ("llama", SPLIT),
    "experts, tp2 dp2": ("qwen3_moe", SPLIT),
    "megatron, experts, ep2 tp2": (
        "qwen3_moe",
        {"precision": "bfloat16", "dtensor_cfg": DTensorConfig(enabled=False), "megatron_cfg": EXPERTS},
    ),
    "megatron, tp2 pp2": (
        "qwen3",
        {"precision": "bfloat16", "dtensor_cfg": DTensorConfig(enabled=False), "megatron_cfg": PIPELINE},
    ),
}
WINDOW_BYTES, OWN_RUN_BYTES, SHARD_BYTES = 1000, 200, 40_000
"""Small enough for weights in several windows, and a folder with several files."""
FULL_BYTES = {"weights": ("biases, tp2 dp2", 2, 20_000), "optimizer": ("megatron, tp2 pp2", 1, 5_000)}
"""In which case which rank can write how much of a file; the Megatron worker writes its optimizer first."""


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if "safetensors" in path.name}


def _written(worker: PolicyWorker, folder: Path) -> dict[str, int]:
    """From shards, and from full weights; returns the bytes that this rank wrote."""
    snapshot = worker.engine.snapshot(with_optimizer=False, copies=True)
    group = dist.group.WORLD
    for name in ("shares", "whole"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    dist.barrier()
    counts = Counter[str]()

    def counted(file: int, content: bytes | memoryview, offset: int) -> None:
        write(file, content, offset)
        counts[Path(os.readlink(f"/proc/self/fd/{file}")).parent.name] += len(content)

    write = writing._write_at
    with patch.object(writing, "_write_at", counted):
        snapshot.part.write(folder / "shares", group=group, max_shard_bytes=SHARD_BYTES)
    whole = worker.export_weights()
    if worker.rank == 0:
        write_folder(folder / "whole", snapshot.part.model, whole, max_shard_bytes=SHARD_BYTES)
    for _ in whole:
        """Each is gathered from all ranks."""
    return counts


def _full_disk(worker: PolicyWorker, folder: Path, which: str) -> str:
    """One rank can write only the beginning of what it writes beside the training."""
    paths = {"weights": folder / "weights", "optimizer": folder / "optimizer", "tokenizer": None}
    worker.save_checkpoint(**paths)
    _, rank, limit = FULL_BYTES[which]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if worker.rank == rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        worker.begin_save(**paths)
        with pytest.raises(CheckpointError) as caught:
            worker.finish_save(timeout_s=60.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    worker.begin_save(**paths)
    worker.finish_save(timeout_s=60.0)
    return str(caught.value)


def _all_cases(rank: int, root: Path) -> tuple[dict[str, str], dict[str, dict[str, int]]]:
    writing.WINDOW_BYTES, writing.OWN_RUN_BYTES = WINDOW_BYTES, OWN_RUN_BYTES
    messages, counts = {}, {}
    for name, (family, layout) in CASES.items():
        worker = tiny_worker(tiny_policy(root / family, **layout), rank=rank, world_size=RANKS)
        counts[name] = _written(worker, root / name)
        for which in (which for which, (case, _, _) in FULL_BYTES.items() if case == name):
            messages[which] = _full_disk(worker, root / which, which)
        worker.shutdown()
    return messages, counts


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shares")


@pytest.fixture(scope="module")
def ranks(root: Path) -> list[tuple[dict[str, str], dict[str, dict[str, int]]]]:
    for family in {family for family, _ in CASES.values()}:
        write_family(root / family, family)
    return run_ranks(RANKS, _all_cases, root)


@pytest.mark.parametrize("name", CASES)
def test_files_do_not_depend_on_how_a_model_is_split_or_who_writes_them(ranks, root: Path, name: str) -> None:
    found, expected = contents(root / name / "shares"), contents(root / name / "whole")
    assert found == expected and len(found) > 2
    shares = [counts[name]["shares"] / sum(map(len, expected.values())) for _, counts in ranks]
    assert sum(shares) > 0.9 and max(shares) < 1.6 / RANKS, shares


@pytest.mark.parametrize("which", FULL_BYTES)
def test_a_full_disk_is_told_on_all_ranks_and_the_next_save_works(ranks, root, which):
    # torch's checkpoints tell of an error on every rank, so the first one is named.
    named = 2 if which == "weights" else 0
    assert all(f"{which}': rank {named} could not write it" in told[which] for told, _ in ranks)
    assert {path.name for path in (root / which).iterdir()} == {"weights", "optimizer"}
