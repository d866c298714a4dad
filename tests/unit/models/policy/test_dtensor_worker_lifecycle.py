"""States, reference weights, schedules, bad numbers and bad plans of one worker."""

from __future__ import annotations

import re
import resource
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from nemo_rl.algorithms.loss_functions import ClippedPGLoss
from nemo_rl.config.policy import OptimizerConfig, SchedulerConfig
from nemo_rl.config.schema import LossConfig
from nemo_rl.distributed.packing import PackPlan
from nemo_rl.errors import CheckpointError, ConfigError, NonFiniteError
from nemo_rl.models.dtensor.optim import INITIAL_SCALE
from nemo_rl.models.policy.workers.base import Placement, WorkerState, check_placement, move_model, placement_of
from nemo_rl.models.policy.workers.dtensor_policy_worker import DTensorPolicyWorker
from tests.helpers.pages import touched_pages
from tests.helpers.tiny_model import tiny_batch, tiny_model, tiny_policy, tiny_worker, write_tiny_folder

LOSS = ClippedPGLoss(config=LossConfig())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
def worker(folder: Path) -> Iterator[DTensorPolicyWorker]:
    worker = tiny_worker(tiny_policy(folder), keep_reference=True)
    yield worker
    worker.shutdown()


def _weights(worker: DTensorPolicyWorker) -> dict[str, torch.Tensor]:
    return dict(worker.export_weights())


def _same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_each_state_allows_its_own_calls(worker: DTensorPolicyWorker) -> None:
    batch = tiny_batch()
    worker.prepare_for_lp_inference()
    worker.get_logprobs(batch)
    with pytest.raises(RuntimeError, match="train: expected state 'training', got 'log-probability inference'"):
        worker.train(batch, LOSS)
    worker.prepare_for_training()
    worker.train(batch, LOSS)
    worker.offload_before_refit()
    assert len(_weights(worker)) == len(worker.prepare_refit_info())
    worker.offload_after_refit()
    with pytest.raises(RuntimeError, match="export_weights: expected state"):
        _weights(worker)
    with pytest.raises(RuntimeError, match="get_logprobs: expected state"):
        worker.get_logprobs(batch)


def test_a_leftover_gradient_is_found(worker: DTensorPolicyWorker) -> None:
    worker.offload_before_refit()
    weight = next(worker._model.parameters())
    weight.grad = torch.zeros_like(weight)
    with pytest.raises(AssertionError, match="still has a gradient"):
        check_placement(
            placement_of(WorkerState.REFIT, cpu_offload=False),
            model=worker._model,
            optimizer=worker._optimizer,
            device=worker.device,
        )


def test_a_gradient_left_by_a_broken_step_is_freed_before_refit(worker: DTensorPolicyWorker) -> None:
    weight = next(worker._model.parameters())
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
def test_a_tensor_on_another_device_is_found(worker: DTensorPolicyWorker, on_device: str, message: str) -> None:
    worker.train(tiny_batch(), LOSS)
    nowhere = Placement(weights=False, buffers=False, optimizer=False, has_gradients=True)
    parts = {"model": worker._model, "optimizer": worker._optimizer, "device": META}
    check_placement(nowhere, **parts)
    with pytest.raises(AssertionError, match=message):
        check_placement(replace(nowhere, **{on_device: True}), **parts)


def test_cpu_offload_keeps_weights_and_optimizer_on_the_cpu_and_moves_buffers() -> None:
    model = torch.nn.BatchNorm1d(3)
    placement = placement_of(WorkerState.TRAINING, cpu_offload=True)
    move_model(model, placement, META)
    assert model.weight.device.type == "cpu" and model.running_mean.device == META
    assert [name for name, _ in model.named_buffers()] == ["running_mean", "running_var", "num_batches_tracked"]
    optimizer = torch.optim.AdamW(model.parameters())
    check_placement(placement, model=model, optimizer=optimizer, device=META)
    move_model(model, placement_of(WorkerState.TRAINING, cpu_offload=False), META)
    assert model.weight.device == META
    with pytest.raises(AssertionError, match="parameter weight is on meta, expected cpu"):
        check_placement(placement, model=model, optimizer=optimizer, device=META)


def test_memory_is_logged_at_each_change_and_its_peak_is_kept_per_stage(
    worker: DTensorPolicyWorker, caplog: pytest.LogCaptureFixture
) -> None:
    mib = 2**20
    with caplog.at_level("INFO", logger="nemo_rl.models.policy.workers.life_cycle"):
        worker.prepare_for_lp_inference()
        worker.prepare_for_training()
        touched_pages(64 * mib).close()
        worker.offload_before_refit()
    first = caplog.messages[0]
    assert re.fullmatch(r"rank 0: training -> log-probability inference: \d+\.\d MiB -> \d+\.\d MiB on cpu", first)
    assert len(caplog.messages) == 3
    report = worker.memory_report()
    assert {name for name in report if name.endswith("_peak")} == {"train_peak", "logprobs_peak", "refit_peak"}
    assert report["train_peak"] - report["logprobs_peak"] > 48 * mib
    assert report["train_peak"] - max(report["train_start"], report["train_end"]) > 32 * mib
    assert {"logprobs_start", "logprobs_end", "refit_start"} <= report.keys() and "refit_end" not in report
    assert worker.memory_report().keys() == {"refit_peak"}


def test_reference_logprobs_stay_while_the_policy_moves(worker: DTensorPolicyWorker) -> None:
    batch = tiny_batch()
    before = worker.get_logprobs(batch)
    assert torch.equal(worker.get_reference_policy_logprobs(batch), before)
    worker.train(batch, LOSS)
    after = worker.get_logprobs(batch)
    assert not torch.equal(after, before)
    assert torch.equal(worker.get_reference_policy_logprobs(batch), before)
    assert torch.equal(worker.get_logprobs(batch), after)


def test_policy_weights_come_back_after_an_error_under_the_reference(worker: DTensorPolicyWorker) -> None:
    worker.train(tiny_batch(), LOSS)
    weights = _weights(worker)
    with pytest.raises(ZeroDivisionError), worker.use_reference_model():
        assert not _same(_weights(worker), weights)
        raise ZeroDivisionError
    assert _same(_weights(worker), weights)


def test_nothing_may_change_state_or_train_under_the_reference(worker: DTensorPolicyWorker) -> None:
    with worker.use_reference_model():
        with pytest.raises(RuntimeError, match="reference weights are in place"):
            worker.offload_before_refit()
        with pytest.raises(RuntimeError, match="reference weights are in place"):
            worker.train(tiny_batch(), LOSS)
        with pytest.raises(RuntimeError, match="does not nest"), worker.use_reference_model():
            pass


def test_without_a_kept_reference_the_error_says_what_to_set(folder: Path) -> None:
    worker = tiny_worker(tiny_policy(folder))
    with pytest.raises(RuntimeError, match="reference_policy_kl_penalty"):
        worker.get_reference_policy_logprobs(tiny_batch())
    worker.shutdown()


def test_evaluation_changes_neither_weights_nor_schedule(folder: Path) -> None:
    worker = tiny_worker(tiny_policy(folder, scheduler=SchedulerConfig(name="linear", warmup_steps=2)))
    batch, weights = tiny_batch(), _weights(worker)
    evaluated = worker.train(batch, LOSS, eval_mode=True)
    assert _same(_weights(worker), weights)
    assert evaluated.grad_norm == (0.0,)
    trained = worker.train(batch, LOSS)
    assert trained.loss == pytest.approx(evaluated.loss, rel=1e-6)
    assert (evaluated.learning_rate, trained.learning_rate) == (5e-4, 5e-4)
    assert worker.train(batch, LOSS).learning_rate == 1e-3
    worker.shutdown()


def test_each_global_batch_is_one_step_with_its_own_counts(worker: DTensorPolicyWorker) -> None:
    result = worker.train(tiny_batch(8), LOSS, gbs=4, mbs=2)
    assert len(result.loss) == len(result.grad_norm) == 2
    assert len(result.metrics) == 4
    assert result.num_tokens == int(tiny_batch(8).tensor("input_lengths").sum())
    assert result.total_flops > 0
    assert result.theoretical_tflops == 0.0


def test_a_global_batch_without_weight_changes_nothing(worker: DTensorPolicyWorker) -> None:
    batch, weights = tiny_batch(), _weights(worker)
    batch["sample_mask"] = torch.zeros(8)
    assert worker.train(batch, LOSS).loss == (0.0,)
    assert _same(_weights(worker), weights)


def test_an_empty_microbatch_adds_nothing(folder: Path) -> None:
    results = []
    for microbatches in [((0, 1, 2, 3), (4, 5, 6, 7)), ((0, 1, 2, 3), (4, 5, 6, 7), ())]:
        worker = tiny_worker(tiny_policy(folder))
        plan = PackPlan(microbatches=(microbatches,), steps=(len(microbatches),), pad_to=24)
        result = worker.train(tiny_batch(), LOSS, plan=plan)
        results.append((result.loss, result.grad_norm, worker.get_logprobs(tiny_batch(), plan=plan).sum().item()))
        worker.shutdown()
    assert results[0] == results[1]


@pytest.mark.parametrize("column", ["advantages", "prev_logprobs"])
def test_nan_in_the_batch_stops_training_with_the_keys(worker: DTensorPolicyWorker, column: str) -> None:
    batch, weights = tiny_batch(), _weights(worker)
    batch[column] = batch.tensor(column).clone()
    batch.tensor(column)[3, 5] = float("nan")
    with pytest.raises(NonFiniteError, match=r"NaN or inf in the loss: samples uid1_g0 \(rank 0\), uid1_g1"):
        worker.train(batch, LOSS, mbs=2)
    assert _same(_weights(worker), weights)


def test_nan_weights_stop_logprobs_with_row_numbers_where_there_are_no_keys(worker: DTensorPolicyWorker) -> None:
    batch = tiny_batch(4)
    del batch["keys"]
    with torch.no_grad():
        for shard in worker._shards():
            shard.fill_(float("nan"))
    with pytest.raises(NonFiniteError, match=r"log-probabilities: samples row 0 \(rank 0\), row 1"):
        worker.get_logprobs(batch)


def test_float16_overflow_halves_the_scale_and_repeats_the_step(folder: Path) -> None:
    worker = tiny_worker(tiny_policy(folder, precision="float16"))
    worker._scaler.scale = 2.0**24
    result = worker.train(tiny_batch(), LOSS)
    assert worker._scaler.scale < 2.0**24
    assert result.grad_norm[0] < 100
    assert all(weight.isfinite().all() for weight in _weights(worker).values())
    assert INITIAL_SCALE > 1
    worker.shutdown()


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (PackPlan(microbatches=(((0,),), ((1,),)), steps=(1,), pad_to=24), "one rank's view"),
        (PackPlan(microbatches=(((0, 1),),), steps=(1,), pad_to=24), "each of the 8 rows once"),
        (PackPlan(microbatches=((tuple(range(8)),),), steps=(2,), pad_to=24), "do not add up"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(worker: DTensorPolicyWorker, plan: PackPlan, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        worker.train(tiny_batch(), LOSS, plan=plan)


def test_rows_that_do_not_divide_into_global_batches_are_refused(worker: DTensorPolicyWorker) -> None:
    with pytest.raises(ValueError, match="train_global_batch_size"):
        worker.train(tiny_batch(8), LOSS, gbs=3)


@pytest.mark.parametrize("which", ["weights", "optimizer"])
def test_a_checkpoint_that_does_not_fit_on_the_disk_leaves_the_earlier_one(
    worker: DTensorPolicyWorker, tmp_path: Path, which: str
) -> None:
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


@pytest.mark.parametrize("fault", ["no optimizer", "other model", "torn optimizer"])
def test_a_checkpoint_that_cannot_be_read_says_why(
    worker: DTensorPolicyWorker, folder: Path, tmp_path: Path, fault: str
) -> None:
    paths = {"weights": tmp_path / "weights", "optimizer": tmp_path / "optimizer"}
    worker.save_checkpoint(**paths, tokenizer=None)
    if fault == "no optimizer":
        shutil.rmtree(paths["optimizer"])
    elif fault == "other model":
        tiny_model(num_layers=1).save_pretrained(str(paths["weights"]))
    else:
        (paths["optimizer"] / ".metadata").write_bytes(b"torn")
    message = "weights of another model" if fault == "other model" else "optimizer state cannot be read"
    with pytest.raises(CheckpointError, match=message):
        worker.load_checkpoint(**paths)


CHAIN = SchedulerConfig(
    phases=[
        {"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": {"start_factor": 0.5, "total_iters": 1}},
        {"name": "torch.optim.lr_scheduler.ExponentialLR", "kwargs": {"gamma": 0.5}},
    ],
    milestones=[1],
)


@pytest.mark.parametrize("scheduler", [SchedulerConfig(name="linear"), CHAIN], ids=["shape", "chain"])
def test_checkpoint_round_trip_is_exact_and_continues_the_run(
    folder: Path, tmp_path: Path, scheduler: SchedulerConfig
) -> None:
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
    expected = worker.train(batch, LOSS), _weights(worker)
    worker.shutdown()

    other = tiny_worker(config, keep_reference=True)
    other.load_checkpoint(**paths)
    result = other.train(batch, LOSS), _weights(other)
    assert (result[0].loss, result[0].grad_norm) == (expected[0].loss, expected[0].grad_norm)
    assert result[0].learning_rate == expected[0].learning_rate < 1e-3
    assert _same(result[1], expected[1])
    other.shutdown()
    # The folder of weights is a model folder of its own.
    again = tiny_worker(tiny_policy(paths["weights"]))
    again.shutdown()


def test_device_questions_are_answered_without_a_gpu(worker: DTensorPolicyWorker) -> None:
    worker.reset_peak_memory_stats()
    worker.start_gpu_profiling()
    worker.stop_gpu_profiling()
    assert worker.get_gpu_info()["name"] == "cpu"
    assert worker.report_device_id().endswith("-cpu")
    assert worker.is_alive()
    worker.shutdown()
    worker.shutdown()
    assert not worker.is_alive()
    with pytest.raises(RuntimeError, match="shut down"):
        worker.prepare_for_training()


def test_a_worker_that_cannot_start_leaves_no_process_group(folder: Path) -> None:
    wrong = OptimizerConfig(name="torch.optim.AdamW", kwargs={"lr": -1.0})
    with pytest.raises(ConfigError, match="AdamW refuses"):
        tiny_worker(tiny_policy(folder, optimizer=wrong))
    assert not dist.is_initialized()
    tiny_worker(tiny_policy(folder)).shutdown()
