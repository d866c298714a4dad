"""Two ranks: over gloo with their tensors on the one GPU, over NCCL where there are two GPUs.

A world of one rank exercises no collective.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nemo_rl.algorithms.losses.policy_loss import PolicyLoss
from nemo_rl.config.backends import DTensorConfig
from nemo_rl.config.loss import LossConfig
from nemo_rl.models.hf.loading import load_causal_lm
from nemo_rl.models.policy.workers.compose import compose_worker
from tests.helpers.gloo import run_ranks
from tests.helpers.hf_reference import hf_logprobs, hf_train_step
from tests.helpers.tiny_model import tiny_batch, tiny_policy, write_tiny_folder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LOSS = PolicyLoss(config=LossConfig())
ADAM = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.0}
ROWS = 8
LAYOUTS = {
    "dp2": DTensorConfig(),
    "tp2": DTensorConfig(tensor_parallel_size=2),
    "tp2 with split activations": DTensorConfig(tensor_parallel_size=2, sequence_parallel=True),
    "cp2": DTensorConfig(context_parallel_size=2),
}


def _train(
    rank: int, folder: Path, layouts: dict[str, DTensorConfig], devices: tuple[str, str]
) -> dict[str, dict[str, object]]:
    """Log-probabilities before, loss and norm of a step, a weight after it, layout by layout."""
    seen = {}
    torch.cuda.set_device(torch.device(devices[rank]))
    for name, layout in layouts.items():
        config = tiny_policy(folder, dtensor_cfg=layout, make_sequence_length_divisible_by=8)
        worker = compose_worker(
            config, rank=rank, world_size=2, num_steps=10, collective_timeout_s=60.0, seed=0, device=devices[rank]
        )
        batch = tiny_batch(ROWS)
        if name == "dp2":
            batch = batch.select_indices(range(rank * ROWS // 2, (rank + 1) * ROWS // 2))
        logprobs = worker.get_logprobs(batch, mbs=2)
        result = worker.train(batch, LOSS, gbs=ROWS, mbs=2)
        weights = {weight_name: weight.numpy() for weight_name, weight in worker.export_weights()}
        seen[name] = {
            "logprobs": logprobs.numpy(),
            "loss": result.loss[0],
            "norm": result.grad_norm[0],
            "weights": weights,
        }
        worker.shutdown()
    return seen


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module", params=["gloo on one GPU", "nccl on two GPUs"])
def ranks(request: pytest.FixtureRequest, folder: Path) -> list[dict[str, dict[str, object]]]:
    is_nccl = request.param.startswith("nccl")
    if is_nccl and torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    devices = ("cuda:0", "cuda:1" if is_nccl else "cuda:0")
    return run_ranks(2, _train, folder, LAYOUTS, devices, timeout_s=300.0, gpu_per_rank=is_nccl)  # type: ignore[return-value]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_equals_one_cpu_process(
    folder: Path, ranks: list[dict[str, dict[str, object]]], layout: str
) -> None:
    batch = tiny_batch(ROWS)
    with torch.no_grad():
        expected = hf_logprobs(load_causal_lm(folder), batch) * batch.tensor("token_mask")
    loss, norm, weights = hf_train_step(folder, batch, LOSS, ADAM, max_norm=1.0)
    parts = [torch.from_numpy(rank[layout]["logprobs"]) for rank in ranks]
    logprobs = torch.cat(parts) if layout == "dp2" else parts[0]
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-4)
    for rank in ranks:
        assert rank[layout]["loss"] == pytest.approx(loss, rel=1e-4)
        assert rank[layout]["norm"] == pytest.approx(norm, rel=1e-4)
        for name, weight in rank[layout]["weights"].items():  # type: ignore[attr-defined]
            gap = (torch.from_numpy(weight) - weights[name]).abs()
            assert float(gap.mean()) <= 1e-5, name
