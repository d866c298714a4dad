"""Memory of a node whose ranks load and save one model: its shards, and little besides."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from nemo_rl.algorithms.losses.nll import NLLLoss
from nemo_rl.config.backends import DTensorConfig
from tests.helpers.gloo import run_ranks
from tests.helpers.model_families import write_with_tokenizer
from tests.helpers.tiny_model import tiny_batch, tiny_policy, tiny_worker

LOOK_S = 0.002
SLACK_BYTES = 12 << 20
"""Of a process: what libraries take for themselves while a model is built and gathered."""
SHARD_DTYPE_BYTES = 4
SAVE_S = 120.0


class Peak:
    """Highest growth of this process's own memory; pages of files are the node's and shared by its ranks."""

    def __init__(self) -> None:
        self.num_bytes = 0
        # What was freed before would be taken again without a trace.
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        self._before = _own_bytes()
        self._stop = threading.Event()

    def watch(self) -> None:
        while not self._stop.wait(LOOK_S):
            self.num_bytes = max(self.num_bytes, _own_bytes() - self._before)

    def end(self) -> None:
        self._stop.set()


def _own_bytes() -> int:
    found = psutil.Process().memory_info()
    return int(found.rss - found.shared)


@contextmanager
def peak() -> Iterator[Peak]:
    found = Peak()
    thread = threading.Thread(target=found.watch, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        found.end()
        thread.join()


def load_and_save(rank: int, folder: Path, world_size: int) -> dict[str, int]:
    warm_up = torch.zeros(1 << 18).sum()  # libraries load what they need
    assert warm_up == 0
    policy = tiny_policy(folder, dtensor_cfg=DTensorConfig())
    with peak() as loading:
        worker = tiny_worker(policy, rank=rank, world_size=world_size)
    # The optimizer's state comes with its first step; gradients end with the change of state.
    worker.train(tiny_batch(world_size).select_indices([rank]), NLLLoss(), gbs=world_size, mbs=1)
    worker.prepare_for_training()
    paths = {"weights": folder.parent / "saved", "optimizer": folder.parent / "optimizer", "tokenizer": None}
    with peak() as saving:
        worker.save_checkpoint(**paths)
    with peak() as beside:
        worker.begin_save(**paths)
        worker.finish_save(timeout_s=SAVE_S)
    worker.shutdown()
    return {"loading": loading.num_bytes, "saving": saving.num_bytes, "saving beside": beside.num_bytes}


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, pytest.param(8, marks=pytest.mark.full)])
def test_a_node_holds_shards_and_little_besides(tmp_path: Path, world_size: int) -> None:
    config = Qwen3Config(
        vocab_size=32_000,
        hidden_size=512,
        num_hidden_layers=16,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        intermediate_size=1536,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    write_with_tokenizer(tmp_path / "model", model)
    size = sum(weight.numel() for weight in model.parameters())
    del model
    found = run_ranks(world_size, load_and_save, tmp_path / "model", world_size)
    shards, own = size * SHARD_DTYPE_BYTES, size * torch.bfloat16.itemsize
    sums = {name: sum(each[name] for each in found) for name in found[0]}
    sizes = {**sums, "shards": shards, "model": own}
    print(f"{world_size} ranks: {', '.join(f'{name} {size / 1e6:.0f} MB' for name, size in sizes.items())}")
    # The pages of the files, which the ranks share, come on top: the model in its own dtype, once.
    slack = 0.3 * own + world_size * SLACK_BYTES
    assert sums["loading"] <= shards + slack
    # Beside weights and optimizer, which are there before.
    assert sums["saving"] <= 1.3 * own
    # One copy of the shards and of the optimizer's two moments of each.
    assert sums["saving beside"] <= 3 * shards + slack
