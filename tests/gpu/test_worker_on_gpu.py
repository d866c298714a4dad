"""The DTensor worker and the embedded engine on a CUDA device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nemo_rl.algorithms.loss_functions import ClippedPGLoss
from nemo_rl.config.schema import LossConfig
from nemo_rl.models.dtensor.parallelize import local_shard
from nemo_rl.models.generation.interfaces import GenerationRequest, SamplingParams
from nemo_rl.models.generation.torch_engine import TorchEngine
from nemo_rl.models.loading import load_causal_lm
from nemo_rl.models.policy.workers.dtensor_policy_worker import DTensorPolicyWorker
from tests.helpers.hf_reference import hf_logprobs, hf_train_step
from tests.helpers.tiny_model import tiny_batch, tiny_policy, write_tiny_folder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LOSS = ClippedPGLoss(config=LossConfig())
DEVICE = "cuda"
ADAM = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.0}


def _worker(folder: Path, **changes: object) -> DTensorPolicyWorker:
    config = tiny_policy(folder, **changes)
    return DTensorPolicyWorker(
        config,
        rank=0,
        world_size=1,
        num_steps=10,
        collective_timeout_s=60.0,
        seed=0,
        keep_reference=True,
        device=DEVICE,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(("precision", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.1), ("float16", 0.02)])
def test_a_training_step_equals_the_cpu_reference(folder: Path, precision: str, tolerance: float) -> None:
    loss, norm, _ = hf_train_step(folder, tiny_batch(8), LOSS, ADAM, max_norm=1.0)
    worker = _worker(folder, precision=precision)
    result = worker.train(tiny_batch(8), LOSS, gbs=8, mbs=4)
    assert result.loss[0] == pytest.approx(loss, rel=tolerance)
    assert result.grad_norm[0] == pytest.approx(norm, rel=tolerance)
    worker.shutdown()


def test_logprobs_of_policy_and_reference_equal_the_cpu_reference(folder: Path) -> None:
    batch = tiny_batch(8)
    with torch.no_grad():
        expected = hf_logprobs(load_causal_lm(folder), batch) * batch.tensor("token_mask")
    worker = _worker(folder)
    torch.testing.assert_close(worker.get_logprobs(batch), expected, rtol=0, atol=1e-4)
    worker.train(batch, LOSS)
    assert not torch.allclose(worker.get_logprobs(batch), expected, rtol=0, atol=1e-4)
    torch.testing.assert_close(worker.get_reference_policy_logprobs(batch), expected, rtol=0, atol=1e-4)
    worker.shutdown()


def _devices(worker: DTensorPolicyWorker) -> tuple[set[str], set[str]]:
    """Device types of parameters and of optimizer moments, as they are."""
    weights = {local_shard(p).device.type for p in worker._model.parameters()}
    moments = {
        local_shard(value).device.type
        for state in worker._optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.dim() > 0
    }
    return weights, moments


def test_each_state_holds_its_tensors_where_it_promises(folder: Path) -> None:
    worker = _worker(folder)
    worker.train(tiny_batch(8), LOSS)
    assert _devices(worker) == ({DEVICE}, {DEVICE})
    worker.prepare_for_lp_inference()
    assert _devices(worker) == ({DEVICE}, {"cpu"})
    worker.offload_before_refit()
    assert _devices(worker) == ({DEVICE}, {"cpu"})
    worker.offload_after_refit()
    assert _devices(worker) == ({"cpu"}, {"cpu"})
    worker.prepare_for_training()
    assert _devices(worker) == ({DEVICE}, {DEVICE})
    assert all(p.grad is None for p in worker._model.parameters())
    worker.shutdown()


def test_a_whole_cycle_frees_the_device_and_continues(folder: Path, tmp_path: Path) -> None:
    worker, batch = _worker(folder), tiny_batch(8)
    worker.train(batch, LOSS)
    worker.offload_before_refit()
    exported = {name: weight.clone() for name, weight in worker.export_weights()}
    worker.offload_after_refit()
    assert torch.cuda.memory_allocated() < 2**20
    worker.save_checkpoint(weights=tmp_path / "w", optimizer=tmp_path / "o", tokenizer=None)
    worker.prepare_for_lp_inference()
    worker.get_reference_policy_logprobs(batch)
    worker.prepare_for_training()
    assert all(torch.equal(exported[name], weight) for name, weight in worker.export_weights())
    worker.train(batch, LOSS)
    worker.load_checkpoint(weights=tmp_path / "w", optimizer=tmp_path / "o")
    assert worker.report_device_id().startswith("GPU-")
    assert all(torch.equal(exported[name], weight) for name, weight in worker.export_weights())
    worker.shutdown()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_engine_says_the_same_on_both_devices(folder: Path, temperature: float) -> None:
    request = GenerationRequest(
        prompt_ids=((9, 8, 7), (20, 21)),
        seeds=tuple(range(8)),
        sampling=SamplingParams(temperature=temperature, max_new_tokens=8, stop_token_ids=(2,)),
    )
    outputs = [
        TorchEngine.from_config(tiny_policy(folder), device=device, weight_version=0).generate(request)
        for device in ("cpu", DEVICE)
    ]
    assert torch.equal(outputs[0].token_ids, outputs[1].token_ids)
    torch.testing.assert_close(outputs[0].logprobs, outputs[1].logprobs, rtol=0, atol=1e-4)
