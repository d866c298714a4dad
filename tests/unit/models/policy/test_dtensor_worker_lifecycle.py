"""What the DTensor worker alone has: placements, loss scaling, checkpoints through DCP."""

from __future__ import annotations

import resource
import shutil
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from nemo_rl.algorithms.losses.policy_loss import PolicyLoss
from nemo_rl.config.backends import OptimizerConfig, SchedulerConfig
from nemo_rl.config.loss import LossConfig
from nemo_rl.errors import CheckpointError, ConfigError, ResourceError
from nemo_rl.models.dtensor.train_step import INITIAL_SCALE
from nemo_rl.models.hf.files import local_shard
from nemo_rl.models.policy.workers.base import (
    HostBuffers,
    Placement,
    WorkerState,
    check_placement,
    has_expandable_segments,
    move_model,
    optimizer_tensors,
    placement_of,
)
from nemo_rl.models.policy.workers.policy_worker import PolicyWorker
from nemo_rl.torch_private import replace_tensors, with_shard
from tests.helpers.tiny_model import same, tiny_batch, tiny_model, tiny_policy, tiny_worker, weights_of

LOSS = PolicyLoss(config=LossConfig())


@pytest.fixture
def worker(folder: Path) -> Iterator[PolicyWorker]:
    worker = tiny_worker(tiny_policy(folder), keep_reference=True)
    yield worker
    worker.shutdown()


def test_the_reference_is_kept_in_the_dtype_of_the_pass_and_has_the_first_numbers(folder: Path) -> None:
    worker = tiny_worker(tiny_policy(folder, precision="bfloat16"), keep_reference=True)
    first = worker.get_logprobs(tiny_batch())
    worker.train(tiny_batch(), LOSS)
    trained = weights_of(worker)
    assert torch.equal(worker.get_reference_policy_logprobs(tiny_batch()), first)
    assert not torch.equal(worker.get_logprobs(tiny_batch()), first) and same(weights_of(worker), trained)
    reference = worker.reference
    assert reference is not None and {weight.dtype for weight in reference} == {torch.bfloat16}
    worker.shutdown()


def test_a_pass_without_memory_says_what_it_needed_and_what_lowers_it(folder: Path) -> None:
    worker = tiny_worker(tiny_policy(folder))
    worker._device_side.planned = {"train": 3 << 30}

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    layer = next(module for name, module in worker.engine.model.named_modules() if name.endswith("mlp"))
    hook = layer.register_forward_hook(full)
    for call, expected in (
        (
            lambda: worker.train(tiny_batch(), LOSS),
            ("train with microbatches of up to", "counts 3", "micro_batch_size (2)"),
        ),
        (
            lambda: worker.get_logprobs(tiny_batch()),
            ("logprobs with microbatches of up to", "nemo-rl plan", "logprob_batch"),
        ),
    ):
        with pytest.raises(ResourceError) as caught:
            call()
        assert all(text in str(caught.value) for text in (*expected, "cpu is used up", "Tried to allocate")), (
            caught.value
        )
    hook.remove()
    worker.train(tiny_batch(), LOSS)
    worker.shutdown()


def test_a_leftover_gradient_is_found(worker: PolicyWorker) -> None:
    worker.offload_before_refit()
    weight = next(worker.engine.model.parameters())
    weight.grad = torch.zeros_like(weight)
    with pytest.raises(AssertionError, match="still has a gradient"):
        check_placement(
            placement_of(WorkerState.REFIT, cpu_offload=False),
            model=worker.engine.model,
            optimizer=optimizer_tensors(worker.engine.optimizer),
            device=worker.device,
        )


def test_a_gradient_left_by_a_broken_step_is_freed_before_refit(worker: PolicyWorker) -> None:
    weight = next(worker.engine.model.parameters())
    weight.grad = torch.zeros_like(weight)
    worker.offload_before_refit()
    assert weight.grad is None


META = torch.device("meta")


@pytest.mark.parametrize(
    ("on_device", "message"),
    [
        ("weights", "parameter hf.*is on cpu, expected meta"),
        ("buffers", "buffer hf.*is on cpu, expected meta"),
        ("optimizer", "optimizer exp_avg is on cpu, expected meta"),
    ],
)
def test_a_tensor_on_another_device_is_found(worker: PolicyWorker, on_device: str, message: str) -> None:
    worker.train(tiny_batch(), LOSS)
    nowhere = Placement(weights=False, buffers=False, optimizer=False, has_gradients=True)
    parts = {
        "model": worker.engine.model,
        "optimizer": list(optimizer_tensors(worker.engine.optimizer)),
        "device": META,
    }
    check_placement(nowhere, **parts)
    with pytest.raises(AssertionError, match=message):
        check_placement(replace(nowhere, **{on_device: True}), **parts)


def test_cpu_offload_keeps_weights_and_optimizer_on_the_cpu_and_moves_buffers() -> None:
    model = torch.nn.BatchNorm1d(3)
    placement = placement_of(WorkerState.TRAINING, cpu_offload=True)
    host = HostBuffers(is_pinned=False)
    move_model(model, placement, META, host)
    assert model.weight.device.type == "cpu" and model.running_mean.device == META
    assert [name for name, _ in model.named_buffers()] == ["running_mean", "running_var", "num_batches_tracked"]
    optimizer = torch.optim.AdamW(model.parameters())
    check_placement(placement, model=model, optimizer=optimizer_tensors(optimizer), device=META)
    move_model(model, placement_of(WorkerState.TRAINING, cpu_offload=False), META, host)
    assert model.weight.device == META
    with pytest.raises(AssertionError, match="parameter weight is on meta, expected cpu"):
        check_placement(placement, model=model, optimizer=optimizer_tensors(optimizer), device=META)


@pytest.mark.parametrize(
    ("environment", "is_growing"),
    [
        ({}, False),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512, expandable_segments: True"}, True),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:False"}, False),
    ],
)
def test_memory_for_another_process_heeds_a_users_own_allocator(environment: dict[str, str], is_growing: bool) -> None:
    assert has_expandable_segments(environment) is is_growing


def test_a_rank_alone_on_a_cpu_computes_with_the_weights_that_it_holds(folder: Path) -> None:
    """FSDP would copy each weight before it is used, and each gradient after."""
    alone, half = tiny_worker(tiny_policy(folder)), tiny_worker(tiny_policy(folder, precision="bfloat16"))
    assert not isinstance(alone.engine.model, FSDPModule)
    assert not any(isinstance(weight, DTensor) for weight in alone.engine.model.parameters())
    # Cast for computation.
    assert isinstance(half.engine.model, FSDPModule)
    for worker in (alone, half):
        worker.shutdown()


def test_a_reference_of_values_that_16_bits_hold_takes_16_bits(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "half")
    weights = load_file(tmp_path / "half" / "model.safetensors")
    first = next(iter(weights))
    weights = {name: value if name == first else value.bfloat16().float() for name, value in weights.items()}
    save_file(weights, tmp_path / "half" / "model.safetensors", metadata={"format": "pt"})
    worker = tiny_worker(tiny_policy(tmp_path / "half"), keep_reference=True)
    reference = worker.reference or []
    assert sorted({str(part.dtype) for part in reference}) == ["torch.bfloat16", "torch.float32"]
    assert sum(part.dtype == torch.float32 for part in reference) == 1
    assert all(map(torch.equal, worker.shards.held(), [part.float() for part in reference]))
    worker.shutdown()


def test_the_weights_that_make_room_for_the_reference_are_held_no_longer_than_that(worker: PolicyWorker) -> None:
    made = list[weakref.ref[torch.Tensor]]()
    take = worker.shards.aside

    def aside() -> list[torch.Tensor]:
        found = take()
        made.extend(weakref.ref(tensor) for tensor in found)
        return found

    worker.shards.aside = aside
    with worker.use_reference_model():
        assert made and all(tensor() is not None for tensor in made)
    assert not any(tensor() is not None for tensor in made)


def test_a_cycle_of_moves_keeps_every_bit_and_the_memory_on_the_cpu(folder: Path) -> None:
    worker, host = tiny_worker(tiny_policy(folder)), HostBuffers(is_pinned=False)
    worker.train(tiny_batch(), LOSS)
    tensors = [local_shard(moment) for moment in worker.engine.moments()] + worker.shards.held()
    tensors.append(torch.arange(7, dtype=torch.int64))
    places = list[list[int]]()
    for _ in range(2):
        away = host.away("all", tensors)
        back = host.back("all", away, worker.device)
        assert all(map(torch.equal, away, tensors)) and all(map(torch.equal, back, tensors))
        # What comes back is another memory, one per dtype, which the next one to leave does not change.
        assert len({tensor.untyped_storage().data_ptr() for tensor in back}) == 2
        places.append([tensor.data_ptr() for tensor in away])
        assert not {tensor.data_ptr() for tensor in back} & set(places[-1])
        tensors = [tensor + 1 for tensor in back]
    assert places[0] == places[1]
    worker.shutdown()


def test_a_model_whose_tensors_are_replaced_trains_on_to_the_same_bits(folder: Path) -> None:
    results = []
    for moves in (False, True):
        worker, host = tiny_worker(tiny_policy(folder)), HostBuffers(is_pinned=False)
        worker.train(tiny_batch(), LOSS)
        if moves:
            model = worker.engine.model
            old = list(model.parameters())
            new = host.away("parameters", [local_shard(weight) for weight in old])
            by_id = {id(weight): with_shard(weight, shard) for weight, shard in zip(old, new, strict=True)}
            worker.engine.drop_gradients()
            replace_tensors(model, lambda tensor, by_id=by_id: by_id.get(id(tensor), tensor))
            assert all(weight is kept for weight, kept in zip(model.parameters(), old, strict=True))
            assert [local_shard(weight).data_ptr() for weight in old] == [shard.data_ptr() for shard in new]
        results.append((worker.train(tiny_batch(), LOSS).loss, weights_of(worker)))
        worker.shutdown()
    assert results[0][0] == results[1][0] and same(results[0][1], results[1][1])


@pytest.mark.parametrize(
    ("sharing", "to_logprobs", "to_training"), [("alone", 0.0, 0.0), ("turns", 0.0, 0.0), ("crowded", 1.0, 1.0)]
)
def test_log_probabilities_leave_the_optimizer_where_it_is(folder, sharing, to_logprobs, to_training):
    worker = tiny_worker(tiny_policy(folder), sharing=sharing)
    worker.train(tiny_batch(), LOSS)
    optimizer = sum(local_shard(moment).nbytes for moment in worker.engine.moments())
    weights = sum(shard.nbytes for shard in worker.shards.held())
    worker.prepare_for_lp_inference()
    worker.prepare_for_training()
    moved = worker.moved_bytes
    assert moved == {"logprobs": to_logprobs * optimizer, "train": to_training * optimizer}
    # For engines that wake, everything leaves; the optimizer comes back for training and not before.
    worker.offload_before_refit()
    worker.offload_after_refit()
    worker.prepare_for_lp_inference()
    worker.prepare_for_training()
    is_shared = sharing != "alone"
    assert moved["refit"] == is_shared * optimizer and moved["generation"] == is_shared * weights
    assert moved["logprobs"] == to_logprobs * optimizer + is_shared * weights
    assert moved["train"] == to_training * optimizer + is_shared * optimizer
    worker.shutdown()


def test_float16_overflow_halves_the_scale_and_repeats_the_step(folder: Path) -> None:
    worker = tiny_worker(tiny_policy(folder, precision="float16"))
    worker.engine.scaler.scale = 2.0**24
    result = worker.train(tiny_batch(), LOSS)
    assert worker.engine.scaler.scale < 2.0**24
    assert result.grad_norm[0] < 100
    assert all(weight.isfinite().all() for weight in weights_of(worker).values())
    assert INITIAL_SCALE > 1
    worker.shutdown()


@pytest.mark.parametrize("which", ["weights", "optimizer"])
def test_a_checkpoint_that_does_not_fit_on_the_disk_leaves_the_earlier_one(worker, tmp_path, which):
    paths = {"weights": tmp_path / "weights", "optimizer": tmp_path / "optimizer"}
    worker.save_checkpoint(**paths, tokenizer=None)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    worker.train(tiny_batch(), LOSS)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Room for the weights (120 KB) in the second case, not for the two moments as well.
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000 if which == "optimizer" else 50_000, hard))
    try:
        with pytest.raises(CheckpointError, match=f"{which}'.*rank 0 could not write it"):
            worker.save_checkpoint(**paths, tokenizer=None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    after = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and which in str(path)}
    assert after == {path: content for path, content in before.items() if which in str(path)}
    assert not list(tmp_path.glob("*.part"))
    worker.load_checkpoint(**paths)


@pytest.mark.parametrize("fault", ["no optimizer", "other model", "torn optimizer", "other optimizer"])
def test_a_checkpoint_that_cannot_be_read_says_why(worker, folder, tmp_path, fault):
    paths = {"weights": tmp_path / "weights", "optimizer": tmp_path / "optimizer"}
    worker.save_checkpoint(**paths, tokenizer=None)
    if fault == "no optimizer":
        shutil.rmtree(paths["optimizer"])
    elif fault == "other model":
        tiny_model(num_layers=1).save_pretrained(str(paths["weights"]))
    elif fault == "torn optimizer":
        (paths["optimizer"] / ".metadata").write_bytes(b"torn")
    message = "weights of another model" if fault == "other model" else "optimizer state cannot be read"
    if fault == "other optimizer":
        worker.shutdown()
        worker = tiny_worker(tiny_policy(folder, optimizer=OptimizerConfig(name="torch.optim.SGD", kwargs={"lr": 0.1})))
        message = r"Missing key .* optimizer that it was made with \(this one is SGD\)"
    with pytest.raises(CheckpointError, match=message) as caught:
        worker.load_checkpoint(**paths)
    assert "Traceback" not in str(caught.value)
    if fault == "other optimizer":
        worker.shutdown()


CHAIN = SchedulerConfig(
    phases=[
        {"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": {"start_factor": 0.5, "total_iters": 1}},
        {"name": "torch.optim.lr_scheduler.ExponentialLR", "kwargs": {"gamma": 0.5}},
    ],
    milestones=[1],
)


@pytest.mark.parametrize("scheduler", [SchedulerConfig(name="linear"), CHAIN], ids=["shape", "chain"])
def test_checkpoint_round_trip_is_exact_and_continues_the_run(folder, tmp_path, scheduler):
    config = tiny_policy(folder, scheduler=scheduler)
    worker = tiny_worker(config, keep_reference=True)
    batch = tiny_batch()
    worker.train(batch, LOSS)
    worker.train(batch, LOSS)
    worker.offload_before_refit()
    worker.offload_after_refit()
    paths = {"weights": tmp_path / "weights", "optimizer": tmp_path / "optimizer"}
    worker.save_checkpoint(**paths, tokenizer=tmp_path / "weights")
    torch.rand(3)
    worker.prepare_for_training()
    expected = worker.train(batch, LOSS), weights_of(worker)
    worker.shutdown()

    other = tiny_worker(config, keep_reference=True)
    other.load_checkpoint(**paths)
    result = other.train(batch, LOSS), weights_of(other)
    assert (result[0].loss, result[0].grad_norm) == (expected[0].loss, expected[0].grad_norm)
    assert result[0].learning_rate == expected[0].learning_rate < 1e-3
    assert same(result[1], expected[1])
    other.shutdown()
    # The folder of weights is a model folder of its own.
    again = tiny_worker(tiny_policy(paths["weights"]))
    again.shutdown()


def test_a_worker_that_cannot_start_leaves_no_process_group(folder: Path) -> None:
    wrong = OptimizerConfig(name="torch.optim.AdamW", kwargs={"lr": -1.0})
    with pytest.raises(ConfigError, match="AdamW refuses"):
        tiny_worker(tiny_policy(folder, optimizer=wrong))
    assert not dist.is_initialized()
    tiny_worker(tiny_policy(folder)).shutdown()
