"""One process group that carries CPU tensors over gloo and CUDA tensors over NCCL."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from nemo_rl.distributed.collectives import RankSpec, broadcast_from_leader, destroy_process_group, init_process_group

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE = "cuda"


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    init_process_group(RankSpec(rank=0, world_size=1), device=torch.device(DEVICE), timeout_s=60.0)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    destroy_process_group()
    assert not dist.is_initialized()


@pytest.mark.parametrize("device", ["cpu", DEVICE])
def test_both_kinds_of_tensors_are_reduced(group: dist.ProcessGroup, device: str) -> None:
    numbers = torch.arange(4.0, device=device)
    dist.all_reduce(numbers, group=group)
    assert numbers.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert numbers.device.type == device


def test_a_leader_sends_every_kind_of_column(group: dist.ProcessGroup) -> None:
    jagged = torch.nested.nested_tensor_from_jagged(torch.arange(5, dtype=torch.int32), torch.tensor([0, 2, 5]))
    columns = {"ids": jagged, "mask": torch.tensor([True, False]), "text": ["a", {"b": 1}]}
    sent = broadcast_from_leader(lambda: dict(columns), group=group, leader=0)
    assert sent["ids"] is jagged and sent["text"] == ["a", {"b": 1}]


def test_an_error_of_the_leader_is_raised_on_it_after_it_was_sent(group: dist.ProcessGroup) -> None:
    def fail() -> dict[str, torch.Tensor | list[object]]:
        raise ValueError("no such column")

    with pytest.raises(ValueError, match="no such column"):
        broadcast_from_leader(fail, group=group, leader=0)
