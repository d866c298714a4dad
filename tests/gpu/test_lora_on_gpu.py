"""Adapters of the DTensor worker on a CUDA device: the CPU's numbers, states, offload, checkpoints, grouped kernels."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from nemo_rl.algorithms.losses.policy_loss import PolicyLoss
from nemo_rl.config.backends import DTensorConfig, LoraConfig
from nemo_rl.config.loss import LossConfig
from nemo_rl.models.adapters.lora import folded
from nemo_rl.models.generation.interfaces import GenerationRequest, SamplingParams
from nemo_rl.models.generation.torch_engine.engine import TorchEngine
from nemo_rl.models.hf.files import local_shard
from nemo_rl.models.policy.workers.policy_worker import PolicyWorker
from tests.helpers.model_families import config_of, write_family, write_with_tokenizer
from tests.helpers.tiny_model import tiny_batch, tiny_model, tiny_policy, tiny_worker, write_tiny_folder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LOSS = PolicyLoss(config=LossConfig())
ALL = LoraConfig(enabled=True, rank=4, alpha=8.0)
EXPERTS = ALL.model_copy(update={"targets": ["experts.gate_up_proj", "experts.down_proj", "o_proj"]})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(params=[False, True], ids=["on the device", "offloaded"])
def worker(request: pytest.FixtureRequest, folder: Path) -> Iterator[PolicyWorker]:
    sizes = DTensorConfig(cpu_offload=request.param)
    made = tiny_worker(tiny_policy(folder, lora=ALL, dtensor_cfg=sizes), device="cuda", keep_reference=True)
    yield made
    made.shutdown()


def adapter_of(worker: PolicyWorker) -> dict[str, torch.Tensor]:
    return {name: weight.to("cpu", copy=True) for name, weight in worker.engine.full_adapter()}


@pytest.mark.parametrize(("family", "lora"), [("qwen3", ALL), ("llama", ALL), ("qwen3_moe", EXPERTS)])
def test_three_steps_equal_those_on_the_cpu(family: str, lora: LoraConfig, tmp_path: Path) -> None:
    folder, found = write_family(tmp_path / family, family), {}
    for device in ("cuda", "cpu"):
        worker = tiny_worker(tiny_policy(folder, lora=lora), device=device)
        results = [worker.train(tiny_batch(), LOSS) for _ in range(3)]
        found[device] = (
            [result.loss[0] for result in results],
            [result.grad_norm[0] for result in results],
            worker.get_logprobs(tiny_batch()),
        )
        worker.shutdown()
    assert found["cuda"][0] == pytest.approx(found["cpu"][0], rel=1e-4, abs=1e-6)
    assert found["cuda"][1] == pytest.approx(found["cpu"][1], rel=1e-3)
    torch.testing.assert_close(found["cuda"][2], found["cpu"][2], rtol=0, atol=2e-3)


def test_every_state_keeps_the_adapter_and_its_reference(worker: PolicyWorker) -> None:
    batch = tiny_batch()
    base = worker.get_logprobs(batch)
    worker.train(batch, LOSS)
    expected, after = adapter_of(worker), worker.get_logprobs(batch)
    for change in (
        worker.prepare_for_lp_inference,
        worker.offload_before_refit,
        worker.offload_after_refit,
        worker.prepare_for_training,
    ):
        change()
    found = adapter_of(worker)
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())
    assert torch.equal(worker.get_logprobs(batch), after)
    assert torch.equal(worker.get_reference_policy_logprobs(batch), base)
    assert worker.reference is None
    worker.train(batch, LOSS)


def test_training_goes_on_to_the_bit(worker: PolicyWorker, tmp_path: Path) -> None:
    batch = tiny_batch()
    worker.train(batch, LOSS)
    worker.save_checkpoint(weights=tmp_path / "weights", optimizer=tmp_path / "optimizer", tokenizer=None)
    worker.train(batch, LOSS)
    expected = adapter_of(worker)
    worker.load_checkpoint(weights=tmp_path / "weights", optimizer=tmp_path / "optimizer")
    worker.train(batch, LOSS)
    found = adapter_of(worker)
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())


@pytest.mark.parametrize(("rank", "width"), [(4, 24), (16, 24)])
def test_grouped_kernels_take_any_rank_in_half_precision(rank: int, width: int, tmp_path: Path) -> None:
    """Experts of 24 are grouped in half precision; a rank of 4 is no multiple of what the kernels take."""
    config = config_of("qwen3_moe")
    config.moe_intermediate_size = width
    torch.manual_seed(0)
    folder = write_with_tokenizer(tmp_path / "model", AutoModelForCausalLM.from_config(config))
    lora = EXPERTS.model_copy(update={"rank": rank, "alpha": 2.0 * rank})
    found = {}
    for precision in ("bfloat16", "float32"):
        worker = tiny_worker(tiny_policy(folder, lora=lora, precision=precision), device="cuda")
        assert worker.engine.model.hf.config._experts_implementation == "grouped_mm"
        results = [worker.train(tiny_batch(), LOSS) for _ in range(3)]
        found[precision] = [result.grad_norm[0] for result in results]
        worker.shutdown()
    assert found["bfloat16"] == pytest.approx(found["float32"], rel=0.1)


def test_frozen_weights_in_half_precision_take_half_the_memory_with_the_same_numbers(tmp_path: Path) -> None:
    model, found = tiny_model().bfloat16(), {}
    for dtype in (torch.bfloat16, torch.float32):
        folder = write_tiny_folder(tmp_path / str(dtype))
        model.to(dtype).save_pretrained(str(folder))
        worker = tiny_worker(tiny_policy(folder, lora=ALL, precision="bfloat16"), device="cuda")
        norms = [worker.train(tiny_batch(), LOSS).grad_norm for _ in range(3)]
        size = sum(local_shard(weight).nbytes for _, weight in worker.engine.weights())
        found[dtype] = (worker.get_logprobs(tiny_batch()), norms, size)
        worker.shutdown()
    half, single = found[torch.bfloat16], found[torch.float32]
    assert torch.equal(half[0], single[0]) and half[1] == single[1] and 2 * half[2] == single[2]


@pytest.mark.parametrize(("precision", "bound"), [("float32", 1e-4), ("bfloat16", 5e-2)])
def test_the_engine_scores_as_the_worker_under_each_version(folder: Path, precision: str, bound: float) -> None:
    """Three versions in one engine on the GPU: the base, and the adapter before and after a step."""
    config = tiny_policy(folder, lora=ALL, precision=precision)
    worker, engine = tiny_worker(config, device="cuda"), TorchEngine.from_config(config, device="cuda", adapter_slots=3)
    batch, scored = tiny_batch(8), []
    for version in range(3):
        if version:
            worker.train(batch, LOSS)
        engine.update_adapter(folded(worker.engine.full_adapter(), ALL.scale), version=version)
        scored.append(worker.get_logprobs(batch))
    ids, lengths = batch.tensor("input_ids"), batch.tensor("input_lengths").tolist()
    rows = [ids[row, :length].tolist() for row, length in enumerate(lengths)]
    for version, expected in enumerate(scored):
        output = engine.generate(
            GenerationRequest(
                prompt_ids=tuple((row[0],) for row in rows),
                seeds=tuple(range(len(rows))),
                sampling=SamplingParams(temperature=1.0, max_new_tokens=max(lengths), stop_token_ids=()),
                forced=tuple(tuple(row[1:]) for row in rows),
                adapters=(version,) * len(rows),
            )
        )
        mask = torch.arange(ids.shape[1]) < torch.tensor(lengths)[:, None]
        mask[:, 0] = False
        gap = (output.logprobs - expected[mask]).abs()
        selected = (batch.tensor("token_mask").bool() & mask)[mask]
        assert float(gap[selected].mean()) <= bound, (version, float(gap[selected].max()))
    assert (scored[2] - scored[0]).abs().max() > 10 * bound or precision == "bfloat16"
    worker.shutdown()
    engine.shutdown()
