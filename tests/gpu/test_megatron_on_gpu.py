"""The Megatron worker on a CUDA device: the CPU's numbers for every family, states, recomputation, speed.

With Transformer Engine its modules run, without it our own: the tests are the same, and say which.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from nemo_rl.algorithms.losses.policy_loss import PolicyLoss
from nemo_rl.config.backends import DTensorConfig, LoraConfig, MegatronConfig, MegatronOptimizerConfig, OptimizerConfig
from nemo_rl.config.loss import LossConfig
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.packing import PackPlan, plan_packs, plan_padded
from nemo_rl.models.hf.loading import load_causal_lm
from nemo_rl.models.megatron.mcore import USING_PYTORCH_OPTIMIZER
from nemo_rl.models.megatron.transformer_config import has_transformer_engine
from nemo_rl.models.policy.workers.compose import compose_worker
from nemo_rl.models.policy.workers.policy_worker import PolicyWorker
from tests.helpers.gloo import run_ranks
from tests.helpers.hf_reference import hf_logprobs
from tests.helpers.megatron_models import FAMILIES, hf_model
from tests.helpers.model_families import FAMILY_SIZES, write_with_tokenizer
from tests.helpers.tiny_model import tiny_batch, tiny_policy, write_larger_folder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LOSS = PolicyLoss(config=LossConfig())
DEVICE = "cuda"
# Epsilon above the rounding of a gradient: with a smaller one AdamW takes a whole step for a zero that was rounded.
ADAM = MegatronOptimizerConfig(
    lr=1e-3,
    min_lr=0.0,
    adam_beta1=0.9,
    adam_beta2=0.95,
    adam_eps=1e-6,
    weight_decay=0.0,
    use_distributed_optimizer=False,
)
NO_ADAPTER, ADAPTER = LoraConfig(), LoraConfig(enabled=True, rank=4, alpha=8.0)


def _worker(
    folder: Path,
    *,
    device: str = DEVICE,
    precision: str = "float32",
    optimizer: MegatronOptimizerConfig = ADAM,
    lora: LoraConfig = NO_ADAPTER,
    **megatron: object,
) -> PolicyWorker:
    section = MegatronConfig(enabled=True, optimizer=optimizer, **megatron)
    nothing = DTensorConfig(enabled=False)
    return compose_worker(
        tiny_policy(folder, dtensor_cfg=nothing, megatron_cfg=section, precision=precision, lora=lora),
        rank=0,
        world_size=1,
        num_steps=10,
        collective_timeout_s=60.0,
        seed=0,
        keep_reference=True,
        device=device,
    )


def _write(folder: Path, family: str) -> Path:
    return write_with_tokenizer(
        folder / family, hf_model(family, vocab_size=FAMILY_SIZES["vocab_size"], num_hidden_layers=2)
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _write(tmp_path_factory.mktemp("model"), "qwen3")


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _write(tmp_path_factory.mktemp("model"), "qwen3_moe")


def _plan(batch: BatchedDataDict, *, packed: bool) -> PackPlan:
    lengths = batch.tensor("input_lengths").tolist()
    plan = plan_packs if packed else plan_padded
    return plan(lengths, capacity=96, dp_world=1).for_rank(0)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Outcome:
    losses: list[float]
    norms: list[float]
    logprobs: torch.Tensor
    """After the steps."""
    weights: dict[str, torch.Tensor]


def _three_steps(worker: PolicyWorker, *, packed: bool) -> _Outcome:
    batch = tiny_batch(8)
    plan = _plan(batch, packed=packed)
    results = [worker.train(batch, LOSS, plan=plan) for _ in range(3)]
    outcome = _Outcome(
        losses=[result.loss[0] for result in results],
        norms=[result.grad_norm[0] for result in results],
        logprobs=worker.get_logprobs(batch, plan=plan),
        weights=_trained(worker),
    )
    worker.shutdown()
    return outcome


def _trained(worker: PolicyWorker) -> dict[str, torch.Tensor]:
    """Return the adapter, or the weights of a model without one, on the CPU."""
    adapter = {name: weight.cpu() for name, weight in worker.engine.full_adapter()}
    return adapter or dict(worker.export_weights())


def _compare(found: _Outcome, expected: _Outcome) -> None:
    assert found.losses == pytest.approx(expected.losses, rel=1e-4, abs=1e-6)
    assert found.norms == pytest.approx(expected.norms, rel=1e-3)
    torch.testing.assert_close(found.logprobs, expected.logprobs, rtol=0, atol=2e-3)
    assert found.weights.keys() == expected.weights.keys()
    for name, weight in found.weights.items():
        # AdamW divides by the gradient's size, so an element whose gradient is all rounding may move the other way;
        # nearly all of them agree to far below a step of 1e-3.
        gap = (weight - expected.weights[name]).abs()
        assert float(gap.max()) <= 6e-3 and float(gap.mean()) <= 2e-5, name


def _on_cpu(rank: int, root: Path) -> dict[tuple[str, bool], dict[str, object]]:
    """Three steps of every family, in a process that sees no GPU: megatron-core allocates on one where it does."""
    assert rank == 0 and not torch.cuda.is_available()
    found = {}
    for family in FAMILIES:
        folder = _write(root, family)
        for packed in (False, True):
            outcome = _three_steps(_worker(folder, device="cpu"), packed=packed)
            found[family, packed] = {
                "losses": outcome.losses,
                "norms": outcome.norms,
                "logprobs": outcome.logprobs.numpy(),
                "weights": {name: weight.numpy() for name, weight in outcome.weights.items()},
            }
    return found


@pytest.fixture(scope="module")
def cpu_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


@pytest.fixture(scope="module")
def on_cpu(cpu_root: Path) -> dict[tuple[str, bool], dict[str, object]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        [found] = run_ranks(1, _on_cpu, cpu_root, timeout_s=120.0)
    return found  # type: ignore[return-value]


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("family", FAMILIES)
def test_three_steps_of_adamw_equal_those_on_the_cpu(
    on_cpu: dict[tuple[str, bool], dict[str, object]], cpu_root: Path, family: str, packed: bool
) -> None:
    found = _three_steps(_worker(cpu_root / family), packed=packed)
    given = on_cpu[family, packed]
    expected = _Outcome(
        losses=given["losses"],  # type: ignore[arg-type]
        norms=given["norms"],  # type: ignore[arg-type]
        logprobs=torch.from_numpy(given["logprobs"]),
        weights={name: torch.from_numpy(weight) for name, weight in given["weights"].items()},  # type: ignore[attr-defined]
    )
    print(f"\n{family}: Transformer Engine {has_transformer_engine()}, losses {found.losses} and {expected.losses}")
    _compare(found, expected)


@pytest.mark.parametrize("granularity", ["full", "selective"])
@pytest.mark.parametrize("kind", ["dense", "mixture"])
def test_recomputed_layers_give_the_same(kind: str, granularity: str, folder: Path, mixture: Path) -> None:
    model = folder if kind == "dense" else mixture
    recomputed = {"activation_checkpointing": True, "recompute_granularity": granularity}
    _compare(_three_steps(_worker(model, **recomputed), packed=True), _three_steps(_worker(model), packed=True))


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("kind", ["dense", "mixture"])
def test_bfloat16_is_near_float32(kind: str, packed: bool, folder: Path, mixture: Path) -> None:
    model = folder if kind == "dense" else mixture
    exact, half = (_three_steps(_worker(model, precision=name), packed=packed) for name in ("float32", "bfloat16"))
    gap = (half.logprobs - exact.logprobs).abs()
    print(f"\nbfloat16 against float32, {kind}, packed={packed}: mean {gap.mean():.4f}, max {gap.max():.4f}")
    assert float(gap.mean()) < 0.05 and float(gap.max()) < 1.0
    assert half.norms == pytest.approx(exact.norms, rel=0.1)


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


@pytest.mark.parametrize("kind", ["dense", "mixture"])
def test_adapters_have_the_numbers_of_the_other_worker(kind: str, folder: Path, mixture: Path) -> None:
    model = folder if kind == "dense" else mixture
    found = _three_steps(_worker(model, lora=ADAPTER), packed=True)
    kwargs = {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-6, "weight_decay": 0.0}
    policy = tiny_policy(model, lora=ADAPTER, optimizer=OptimizerConfig(kwargs=kwargs))
    other = compose_worker(policy, rank=0, world_size=1, num_steps=10, collective_timeout_s=60.0, seed=0, device=DEVICE)
    _compare(found, _three_steps(other, packed=True))


@pytest.mark.parametrize("lora", [NO_ADAPTER, ADAPTER], ids=["weights", "adapters"])
def test_the_distributed_optimizer_trains_the_same(folder: Path, lora: LoraConfig) -> None:
    if USING_PYTORCH_OPTIMIZER:
        pytest.skip("neither Transformer Engine nor apex is installed")
    sharded = ADAM.model_copy(update={"use_distributed_optimizer": True})
    found = _three_steps(_worker(folder, optimizer=sharded, lora=lora), packed=True)
    _compare(found, _three_steps(_worker(folder, lora=lora), packed=True))


# States and memory.


def _devices(worker: PolicyWorker) -> tuple[set[str], set[str], set[str]]:
    """Device types of weights, buffers and optimizer state, as they are."""
    weights = {weight.device.type for weight in worker.engine.model.module.parameters()}
    buffers = {buffer.device.type for buffer in worker.engine.model.module.buffers()} or weights
    return weights, buffers, {value.device.type for _, value in worker.engine.optimizer.state_tensors()}


def _gradient_bytes(worker: PolicyWorker) -> int:
    ddp = worker.engine.model.ddp
    held = (*ddp.buffers, *ddp.expert_parallel_buffers)
    return sum(buffer.grad_data.untyped_storage().size() for buffer in held)


CPU_ONLY = {"cpu"}
ON_GPU = {DEVICE}


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["dense", "mixture", "adapters"])
def test_each_state_holds_its_tensors_where_it_promises(kind: str, precision: str, folder: Path, mixture: Path) -> None:
    lora = ADAPTER if kind == "adapters" else NO_ADAPTER
    worker = _worker(folder if kind == "dense" else mixture, precision=precision, lora=lora)
    worker.train(tiny_batch(8), LOSS)
    assert _devices(worker) == (ON_GPU, ON_GPU, ON_GPU) and _gradient_bytes(worker) > 0
    worker.prepare_for_lp_inference()
    assert _devices(worker) == (ON_GPU, ON_GPU, CPU_ONLY) and _gradient_bytes(worker) == 0
    worker.offload_before_refit()
    assert _devices(worker) == (ON_GPU, ON_GPU, CPU_ONLY) and _gradient_bytes(worker) == 0
    worker.offload_after_refit()
    assert _devices(worker) == (CPU_ONLY, CPU_ONLY, CPU_ONLY) and _gradient_bytes(worker) == 0
    worker.prepare_for_training()
    assert _devices(worker) == (ON_GPU, ON_GPU, ON_GPU) and _gradient_bytes(worker) > 0
    worker.train(tiny_batch(8), LOSS)
    report = worker.memory_report()
    assert report["train_peak"] > report["generation_start"] and report["refit_end"] > report["generation_start"]
    print("\nmemory in KiB:", {name: size // 1024 for name, size in sorted(report.items())})
    worker.shutdown()


@pytest.mark.parametrize("lora", [NO_ADAPTER, ADAPTER], ids=["weights", "adapters"])
def test_a_whole_cycle_frees_the_device_and_continues(mixture: Path, tmp_path: Path, lora: LoraConfig) -> None:
    worker, batch = _worker(mixture, lora=lora), tiny_batch(8)
    worker.train(batch, LOSS)
    worker.offload_before_refit()
    exported = {name: weight.clone() for name, weight in _trained(worker).items()}
    before = torch.cuda.memory_allocated()
    worker.offload_after_refit()
    left = torch.cuda.memory_allocated()
    print(f"\nallocated in KiB: {before // 1024} before generation, {left // 1024} in it")
    assert left < 2**20
    worker.save_checkpoint(weights=tmp_path / "w", optimizer=tmp_path / "o", tokenizer=None)
    worker.prepare_for_lp_inference()
    worker.get_reference_policy_logprobs(batch)
    worker.prepare_for_training()
    assert all(torch.equal(exported[name], weight) for name, weight in _trained(worker).items())
    trained = worker.train(batch, LOSS)
    worker.load_checkpoint(weights=tmp_path / "w", optimizer=tmp_path / "o")
    assert worker.report_device_id().startswith("GPU-")
    assert all(torch.equal(exported[name], weight) for name, weight in _trained(worker).items())
    again = worker.train(batch, LOSS)
    assert (again.loss, again.grad_norm) == (pytest.approx(trained.loss), pytest.approx(trained.grad_norm, rel=1e-4))
    worker.shutdown()


def test_a_step_after_offloading_is_that_of_a_worker_that_stayed(mixture: Path) -> None:
    outcomes = []
    for leaves in (False, True):
        worker, batch = _worker(mixture, precision="bfloat16"), tiny_batch(8)
        worker.train(batch, LOSS)
        if leaves:
            worker.offload_before_refit()
            worker.offload_after_refit()
            worker.prepare_for_lp_inference()
            worker.prepare_for_training()
        result = worker.train(batch, LOSS)
        outcomes.append((result.loss[0], result.grad_norm[0], worker.get_logprobs(batch)))
        worker.shutdown()
    assert outcomes[0][:2] == (pytest.approx(outcomes[1][0], rel=1e-3), pytest.approx(outcomes[1][1], rel=1e-3))
    torch.testing.assert_close(outcomes[0][2], outcomes[1][2], rtol=0, atol=0.05)


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_speed_and_memory_are_shown(tmp_path: Path, packed: bool, recompute: bool) -> None:
    """Says what the device does; nothing is asserted about speed."""
    worker = _worker(write_larger_folder(tmp_path), precision="bfloat16", activation_checkpointing=recompute)
    batch = tiny_batch(32, width=1024)
    lengths = batch.tensor("input_lengths").tolist()
    plan = (plan_packs if packed else plan_padded)(lengths, capacity=8192, dp_world=1).for_rank(0)
    worker.train(batch, LOSS, plan=plan)
    worker.memory_report()
    worker.reset_peak_memory_stats()
    torch.cuda.synchronize()
    started = time.perf_counter()
    result = worker.train(batch, LOSS, plan=plan)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    peak_mib = worker.memory_report()["train_peak"] / 2**20
    tflops = result.total_flops / seconds / 1e12
    print(
        f"\n{torch.cuda.get_device_name()}, {'packed' if packed else 'padded'}, recompute={recompute}, Transformer "
        f"Engine {has_transformer_engine()}: {result.num_tokens / seconds:,.0f} tokens/s, {tflops:.1f} TFLOP/s, "
        f"peak {peak_mib:,.0f} MiB"
    )
    assert result.num_tokens == int(batch.tensor("input_lengths").sum()) and peak_mib > 100
    worker.shutdown()
