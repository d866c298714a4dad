"""The DTensor worker and the embedded engine on a CUDA device: the CPU's numbers, states, speed."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nemo_rl.algorithms.losses.policy_loss import PolicyLoss
from nemo_rl.config.backends import DTensorConfig
from nemo_rl.config.loss import LossConfig
from nemo_rl.config.policy import SequencePackingConfig
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.packing import PackPlan, plan_packs
from nemo_rl.models.generation.interfaces import GenerationRequest, SamplingParams
from nemo_rl.models.generation.torch_engine import TorchEngine
from nemo_rl.models.hf.files import local_shard
from nemo_rl.models.hf.loading import load_causal_lm
from nemo_rl.models.policy.workers.compose import compose_worker
from nemo_rl.models.policy.workers.policy_worker import PolicyWorker
from tests.helpers.hf_reference import hf_logprobs, hf_train_step
from tests.helpers.model_families import write_family
from tests.helpers.tiny_model import tiny_batch, tiny_policy, write_larger_folder, write_tiny_folder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LOSS = PolicyLoss(config=LossConfig())
DEVICE = "cuda"
ADAM = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.0}
PACKING = SequencePackingConfig(enabled=True)


def _worker(folder: Path, *, device: str = DEVICE, **changes: object) -> PolicyWorker:
    config = tiny_policy(folder, **changes)
    return compose_worker(
        config,
        rank=0,
        world_size=1,
        num_steps=10,
        collective_timeout_s=60.0,
        seed=0,
        keep_reference=True,
        device=device,
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


def _plan(batch: BatchedDataDict, *, packed: bool) -> PackPlan:
    lengths = batch.tensor("input_lengths").tolist()
    plan = plan_packs(lengths, capacity=64, dp_world=1)
    return plan.for_rank(0) if packed else replace(plan, packed=False).for_rank(0)


Outcome = tuple[list[float], list[float], torch.Tensor, dict[str, torch.Tensor]]


def _three_steps(folder: Path, *, device: str, packed: bool) -> Outcome:
    """Losses, gradient norms, the last log-probabilities and weights."""
    worker = _worker(folder, device=device, sequence_packing=PACKING if packed else SequencePackingConfig())
    batch = tiny_batch(8)
    plan = _plan(batch, packed=packed) if packed else None
    results = [worker.train(batch, LOSS, plan=plan, mbs=None if packed else 4) for _ in range(3)]
    logprobs, weights = worker.get_logprobs(batch, plan=plan), dict(worker.export_weights())
    worker.shutdown()
    return [r.loss[0] for r in results], [r.grad_norm[0] for r in results], logprobs, weights


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen2", "qwen3_moe"])
def test_three_steps_of_adamw_equal_those_on_the_cpu(tmp_path: Path, family: str, packed: bool) -> None:
    folder = write_family(tmp_path / family, family)
    losses, norms, logprobs, weights = _three_steps(folder, device=DEVICE, packed=packed)
    cpu_losses, cpu_norms, cpu_logprobs, cpu_weights = _three_steps(folder, device="cpu", packed=packed)
    assert losses == pytest.approx(cpu_losses, rel=1e-4, abs=1e-6)
    assert norms == pytest.approx(cpu_norms, rel=1e-3)
    torch.testing.assert_close(logprobs, cpu_logprobs, rtol=0, atol=2e-3)
    for name, weight in weights.items():
        # AdamW divides by the gradient's size, so an element whose gradient is all rounding may move the other way;
        # nearly all of them agree to far below a step of 1e-3.
        gap = (weight - cpu_weights[name]).abs()
        assert float(gap.max()) <= 6e-3 and float(gap.mean()) <= 2e-5, name


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_bfloat16_logprobs_are_near_those_of_float32(folder: Path, packed: bool) -> None:
    """Packed rows take flash attention where its package is installed; this says which one ran."""
    batch = tiny_batch(8)
    outcomes = []
    for precision in ("float32", "bfloat16"):
        worker = _worker(folder, precision=precision, sequence_packing=PACKING if packed else SequencePackingConfig())
        outcomes.append(worker.get_logprobs(batch, plan=_plan(batch, packed=True) if packed else None))
        worker.shutdown()
    gap = (outcomes[0] - outcomes[1]).abs()
    print(f"\nbfloat16 against float32, packed={packed}: mean {gap.mean():.4f}, max {gap.max():.4f}")
    assert float(gap.mean()) < 0.05 and float(gap.max()) < 1.0


def test_compiled_layers_train_as_those_that_are_not(folder: Path) -> None:
    outcomes, graphs = [], {}
    for mode in ("off", "on"):
        worker = _worker(folder, sequence_packing=PACKING, dtensor_cfg=DTensorConfig(compile=mode))
        batches = [tiny_batch(8, seed=seed) for seed in range(3)]
        losses = [worker.train(batch, LOSS, plan=_plan(batch, packed=True)).loss[0] for batch in batches]
        outcomes.append((losses, worker.get_logprobs(batches[0], plan=_plan(batches[0], packed=True))))
        if worker.engine.model.compiled is not None:
            graphs[mode] = (worker.engine.model.compiled.num_graphs, worker.engine.model.compiled.recompilations)
        worker.shutdown()
    (eager, expected), (mine, logprobs) = outcomes
    assert mine == pytest.approx(eager, rel=1e-4, abs=1e-6)
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=2e-3)
    assert graphs == {"on": (2, 0)}, "one with gradients and one without"


def test_flash_attention_of_packed_rows_equals_the_plain_kernel(folder: Path) -> None:
    pytest.importorskip("flash_attn", reason="flash_attn is not installed")
    batch = tiny_batch(8)
    worker = _worker(folder, precision="bfloat16", sequence_packing=PACKING)
    packed = worker.get_logprobs(batch, plan=_plan(batch, packed=True))
    padded = worker.get_logprobs(batch, mbs=2)
    worker.shutdown()
    torch.testing.assert_close(packed, padded, rtol=0, atol=0.3)


def test_logprobs_of_policy_and_reference_equal_the_cpu_reference(folder: Path) -> None:
    batch = tiny_batch(8)
    with torch.no_grad():
        expected = hf_logprobs(load_causal_lm(folder), batch) * batch.tensor("token_mask")
    worker = _worker(folder)
    assert all(weight.is_pinned() for weight in worker.reference or ())
    torch.testing.assert_close(worker.get_logprobs(batch), expected, rtol=0, atol=1e-4)
    worker.train(batch, LOSS)
    assert not torch.allclose(worker.get_logprobs(batch), expected, rtol=0, atol=1e-4)
    torch.testing.assert_close(worker.get_reference_policy_logprobs(batch), expected, rtol=0, atol=1e-4)
    worker.shutdown()


def _devices(worker: PolicyWorker) -> tuple[set[str], set[str], set[str]]:
    """Device types of parameters, buffers and optimizer moments, as they are."""
    weights = {local_shard(p).device.type for p in worker.engine.model.parameters()}
    buffers = {b.device.type for b in worker.engine.model.buffers()}
    moments = {
        local_shard(value).device.type
        for state in worker.engine.optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.dim() > 0
    }
    return weights, buffers, moments


CPU_ONLY = {"cpu"}
ON_GPU = {DEVICE}


def test_each_state_holds_its_tensors_where_it_promises(folder: Path) -> None:
    worker = _worker(folder)
    assert worker.engine.optimizer.defaults["fused"] is True
    worker.train(tiny_batch(8), LOSS)
    assert _devices(worker) == (ON_GPU, ON_GPU, ON_GPU)
    worker.prepare_for_lp_inference()
    assert _devices(worker) == (ON_GPU, ON_GPU, CPU_ONLY)
    worker.offload_before_refit()
    assert _devices(worker) == (ON_GPU, ON_GPU, CPU_ONLY)
    worker.offload_after_refit()
    assert _devices(worker) == (CPU_ONLY, CPU_ONLY, CPU_ONLY)
    worker.prepare_for_training()
    assert _devices(worker) == (ON_GPU, ON_GPU, ON_GPU)
    assert all(p.grad is None for p in worker.engine.model.parameters())
    worker.train(tiny_batch(8), LOSS)
    report = worker.memory_report()
    assert report["train_peak"] > report["generation_start"] and report["refit_end"] > report["generation_start"]
    print("\nmemory in KiB:", {name: size // 1024 for name, size in sorted(report.items())})
    worker.shutdown()


def test_cpu_offload_keeps_weights_and_moments_on_the_cpu_and_trains_the_same(folder: Path) -> None:
    batch = tiny_batch(8)
    outcomes = []
    for cpu_offload in (False, True):
        worker = _worker(folder, dtensor_cfg=DTensorConfig(cpu_offload=cpu_offload))
        result = worker.train(batch, LOSS)
        if cpu_offload:
            assert _devices(worker) == (CPU_ONLY, ON_GPU, CPU_ONLY)
            worker.offload_before_refit()
            worker.offload_after_refit()
            assert _devices(worker) == (CPU_ONLY, CPU_ONLY, CPU_ONLY)
            worker.prepare_for_lp_inference()
        outcomes.append((result.loss, result.grad_norm, worker.get_logprobs(batch)))
        worker.shutdown()
    assert outcomes[0][:2] == (pytest.approx(outcomes[1][0]), pytest.approx(outcomes[1][1], rel=1e-4))
    torch.testing.assert_close(outcomes[0][2], outcomes[1][2], rtol=0, atol=1e-3)


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


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_speed_and_memory_are_shown(tmp_path: Path, packed: bool) -> None:
    """Says what the device does; nothing is asserted about speed."""
    worker = _worker(
        write_larger_folder(tmp_path),
        precision="bfloat16",
        train_global_batch_size=32,
        sequence_packing=PACKING if packed else SequencePackingConfig(),
        dtensor_cfg=DTensorConfig(activation_checkpointing=True),
    )
    batch = tiny_batch(32, width=1024)
    plan = None
    if packed:
        lengths = batch.tensor("input_lengths").tolist()
        plan = plan_packs(lengths, capacity=8192, dp_world=1).for_rank(0)
    worker.train(batch, LOSS, plan=plan, mbs=None if packed else 8)
    worker.reset_peak_memory_stats()
    torch.cuda.synchronize()
    started = time.perf_counter()
    result = worker.train(batch, LOSS, plan=plan, mbs=None if packed else 8)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    peak_mib = worker.memory_report()["train_peak"] / 2**20
    tflops = result.total_flops / seconds / 1e12
    share = f", {tflops / result.theoretical_tflops:.1%} of peak" if result.theoretical_tflops else ""
    print(
        f"\n{torch.cuda.get_device_name()}, {'packed' if packed else 'padded'}: {result.num_tokens / seconds:,.0f} "
        f"tokens/s, {tflops:.1f} TFLOP/s{share}, peak {peak_mib:,.0f} MiB"
    )
    assert result.num_tokens == int(batch.tensor("input_lengths").sum()) and peak_mib > 100
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
