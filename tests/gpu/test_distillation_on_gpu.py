"""Top-k log-probabilities and the distillation term of the DTensor worker on a CUDA device: the CPU's numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nemo_rl.algorithms.losses.policy_loss import DistillationLoss
from nemo_rl.config.distillation import DistillationConfig
from nemo_rl.config.loss import LossConfig
from nemo_rl.models.head.logprobs import TopTokens
from tests.helpers.distillation_reference import with_teacher
from tests.helpers.tiny_model import VOCAB, tiny_batch, tiny_policy, tiny_worker, write_tiny_folder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE = "cuda"
K = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp("model"))


def test_the_most_likely_tokens_are_those_of_the_cpu(folder: Path) -> None:
    found = []
    for device in (DEVICE, "cpu"):
        worker = tiny_worker(tiny_policy(folder), device=device)
        found.append(worker.get_topk_logprobs(tiny_batch(), TopTokens(k=K)))
        worker.shutdown()
    (ids, logprobs), (expected_ids, expected) = found
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-3)
    # Tokens that are equally likely but for rounding may stand in another order.
    assert float((ids == expected_ids).float().mean()) > 0.99


@pytest.mark.parametrize("kl", ["forward", "reverse", "mixed"])
@pytest.mark.parametrize("mode", ["alone", "added"])
def test_three_steps_with_a_teacher_equal_those_on_the_cpu(kl: str, mode: str, folder: Path) -> None:
    section = DistillationConfig.model_validate({"enabled": True, "top_k": K, "kl": kl, "mode": mode})
    loss, batch = (
        DistillationLoss(config=LossConfig(distillation=section)),
        with_teacher(tiny_batch(), vocab=VOCAB, k=K),
    )
    found = []
    for device in (DEVICE, "cpu"):
        worker = tiny_worker(tiny_policy(folder), device=device)
        results = [worker.train(batch, loss) for _ in range(3)]
        found.append(([result.loss[0] for result in results], [result.grad_norm[0] for result in results]))
        worker.shutdown()
    (losses, norms), (expected_losses, expected_norms) = found
    assert losses == pytest.approx(expected_losses, rel=1e-3, abs=1e-6)
    assert norms == pytest.approx(expected_norms, rel=1e-2)
