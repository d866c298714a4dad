"""Memory of a node whose ranks load and save one model: its shards, and little besides."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from nemo_rl.config.policy import DTensorConfig
from tests.helpers.families import write_with_tokenizer
from tests.helpers.gloo import run_ranks
from tests.helpers.tiny_model import tiny_policy, tiny_worker

LOOK_S = 0.002
SLACK_BYTES = 12 << 20
"""Of a process: what libraries take for themselves while a model is built and gathered."""
SHARD_DTYPE_BYTES = 4


class Peak:
    """Highest growth of this process's own memory; pages of files are the node's and shared by its ranks."""

    def __init__(self) -> None:
        self.num_bytes = 0
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
    with peak() as saving:
        worker.save_checkpoint(weights=folder.parent / "saved", optimizer=None, tokenizer=None)
    worker.shutdown()
    return {"loading": loading.num_bytes, "saving": saving.num_bytes}


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
    node, saving = (sum(each[name] for each in found) for name in ("loading", "saving"))
    sizes = {"loading": node, "saving": saving, "shards": shards, "model": own}
    print(f"{world_size} ranks: {', '.join(f'{name} {size / 1e6:.0f} MB' for name, size in sizes.items())}")
    # The pages of the files, which the ranks share, come on top: the model in its own dtype, once.
    assert node <= shards + 0.3 * own + world_size * SLACK_BYTES
