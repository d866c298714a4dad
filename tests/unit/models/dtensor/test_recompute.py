"""What the backward pass of a DTensor worker computes again, by `policy.dtensor_cfg.activation_checkpointing`."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nemo_rl.algorithms.losses.policy_loss import PolicyLoss
from nemo_rl.config.backends import DTensorConfig
from nemo_rl.config.loss import LossConfig
from tests.helpers.tiny_model import tiny_batch, tiny_policy, tiny_worker, write_tiny_folder

PRODUCTS = ("aten.mm.default", "aten.addmm.default")


class _Counted(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = Counter[str]()

    def __torch_dispatch__(self, func: object, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        self.calls[str(func)] += 1
        return func(*args, **(kwargs or {}))

    def of(self, *names: str) -> int:
        return sum(count for name, count in self.calls.items() if name.startswith(names))


def _step(folder: Path, mode: object) -> tuple[_Counted, dict[str, torch.Tensor]]:
    """Return the operations of an optimizer step, and the weights after it."""
    worker = tiny_worker(tiny_policy(folder, dtensor_cfg=DTensorConfig(activation_checkpointing=mode)))
    try:
        with _Counted() as counted:
            worker.train(tiny_batch(8), PolicyLoss(config=LossConfig()), gbs=8, mbs=4)
        return counted, dict(worker.export_weights())
    finally:
        worker.shutdown()


@pytest.mark.parametrize(("given", "meant"), [(True, "full"), (False, "none"), ("selective", "selective")])
def test_a_switch_means_all_or_nothing(given: object, meant: str) -> None:
    assert DTensorConfig(activation_checkpointing=given).activation_checkpointing == meant


def test_selective_repeats_neither_products_nor_attention_and_changes_no_bit(tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "model")
    none, selective, full = (_step(folder, mode) for mode in ("none", "selective", "full"))
    attention = ("aten._scaled_dot_product_flash_attention_for_cpu.", "nrl.")
    for names in (PRODUCTS, attention):
        assert 0 < none[0].of(*names) == selective[0].of(*names) < full[0].of(*names)
    # The rest is computed again.
    assert none[0].of("aten.silu.") < selective[0].of("aten.silu.") == full[0].of("aten.silu.")
    for weights in (selective[1], full[1]):
        assert all(torch.equal(weight, weights[name]) for name, weight in none[1].items())
