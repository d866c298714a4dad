"""States, reference weights, plans and bad numbers of one worker, whichever engine holds the model."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from nemo_rl.algorithms.losses.policy_loss import PolicyLoss
from nemo_rl.config.backends import DTensorConfig, MegatronConfig, SchedulerConfig
from nemo_rl.config.loss import LossConfig
from nemo_rl.config.policy import PolicyConfig
from nemo_rl.distributed.packing import PackPlan
from nemo_rl.errors import NonFiniteError
from nemo_rl.models.policy.workers.policy_worker import PolicyWorker
from tests.helpers.processes import touched_pages
from tests.helpers.tiny_model import same, tiny_batch, tiny_policy, tiny_worker, weights_of

LOSS = PolicyLoss(config=LossConfig())
ADAM = {"lr": 1e-3, "adam_beta2": 0.95, "weight_decay": 0.0}


@pytest.fixture(params=["dtensor", "megatron"])
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def worker(engine: str, folder: Path) -> Iterator[PolicyWorker]:
    worker = tiny_worker(settings(engine, folder), keep_reference=True)
    yield worker
    worker.shutdown()


def settings(engine: str, folder: Path, *, warms_up: bool = False) -> PolicyConfig:
    """AdamW with the same numbers in both engines; on request the first call has half the learning rate."""
    if engine == "dtensor":
        scheduler = {"scheduler": SchedulerConfig(name="linear", warmup_steps=2)} if warms_up else {}
        return tiny_policy(folder, **scheduler)
    schedule = {"lr_warmup_iters": 1, "lr_warmup_init": 5e-4} if warms_up else {}
    section = MegatronConfig(enabled=True, optimizer=ADAM, scheduler=schedule)
    return tiny_policy(folder, dtensor_cfg=DTensorConfig(enabled=False), megatron_cfg=section)


def test_each_state_allows_its_own_calls(worker: PolicyWorker) -> None:
    batch = tiny_batch()
    worker.prepare_for_lp_inference()
    worker.get_logprobs(batch)
    with pytest.raises(RuntimeError, match="train: expected state 'training', got 'log-probability inference'"):
        worker.train(batch, LOSS)
    worker.prepare_for_training()
    worker.train(batch, LOSS)
    worker.offload_before_refit()
    assert len(weights_of(worker)) == len(worker.prepare_refit_info())
    worker.offload_after_refit()
    with pytest.raises(RuntimeError, match="export_weights: expected state"):
        weights_of(worker)
    with pytest.raises(RuntimeError, match="get_logprobs: expected state"):
        worker.get_logprobs(batch)


def test_memory_is_logged_at_each_change_and_its_peak_is_kept_per_stage(worker, caplog):
    mib = 2**20
    with caplog.at_level("INFO", logger="nemo_rl.models.policy.workers.device_states"):
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


def test_reference_logprobs_stay_while_the_policy_moves(worker: PolicyWorker) -> None:
    batch = tiny_batch()
    before = worker.get_logprobs(batch)
    assert torch.equal(worker.get_reference_policy_logprobs(batch), before)
    worker.train(batch, LOSS)
    after = worker.get_logprobs(batch)
    assert not torch.equal(after, before)
    assert torch.equal(worker.get_reference_policy_logprobs(batch), before)
    assert torch.equal(worker.get_logprobs(batch), after)


def test_policy_weights_come_back_after_an_error_under_the_reference(worker: PolicyWorker) -> None:
    worker.train(tiny_batch(), LOSS)
    weights = weights_of(worker)
    with pytest.raises(ZeroDivisionError), worker.use_reference_model():
        assert not same(weights_of(worker), weights)
        raise ZeroDivisionError
    assert same(weights_of(worker), weights)


def test_nothing_may_change_state_or_train_under_the_reference(worker: PolicyWorker) -> None:
    with worker.use_reference_model():
        with pytest.raises(RuntimeError, match="reference weights are in place"):
            worker.offload_before_refit()
        with pytest.raises(RuntimeError, match="reference weights are in place"):
            worker.train(tiny_batch(), LOSS)
        with pytest.raises(RuntimeError, match="does not nest"), worker.use_reference_model():
            pass


def test_without_a_kept_reference_the_error_says_what_to_set(engine: str, folder: Path) -> None:
    worker = tiny_worker(settings(engine, folder))
    with pytest.raises(RuntimeError, match="reference_policy_kl_penalty"):
        worker.get_reference_policy_logprobs(tiny_batch())
    worker.shutdown()


def test_evaluation_changes_neither_weights_nor_schedule(engine: str, folder: Path) -> None:
    worker = tiny_worker(settings(engine, folder, warms_up=True))
    batch, weights = tiny_batch(), weights_of(worker)
    evaluated = worker.train(batch, LOSS, eval_mode=True)
    assert same(weights_of(worker), weights)
    assert evaluated.grad_norm == (0.0,)
    trained = worker.train(batch, LOSS)
    assert trained.loss == pytest.approx(evaluated.loss, rel=1e-6)
    assert (evaluated.learning_rate, trained.learning_rate) == (5e-4, 5e-4)
    assert worker.train(batch, LOSS).learning_rate == 1e-3
    worker.shutdown()


def test_each_global_batch_is_one_step_with_its_own_counts(worker: PolicyWorker) -> None:
    result = worker.train(tiny_batch(8), LOSS, gbs=4, mbs=2)
    assert len(result.loss) == len(result.grad_norm) == 2
    assert len(result.metrics) == 4
    assert result.num_tokens == int(tiny_batch(8).tensor("input_lengths").sum())
    assert result.total_flops > 0
    assert result.theoretical_tflops == 0.0


def test_a_global_batch_without_weight_changes_nothing(worker: PolicyWorker) -> None:
    batch, weights = tiny_batch(), weights_of(worker)
    batch["sample_mask"] = torch.zeros(8)
    assert worker.train(batch, LOSS).loss == (0.0,)
    assert same(weights_of(worker), weights)


def test_an_empty_microbatch_adds_nothing(engine: str, folder: Path) -> None:
    results = []
    for microbatches in [((0, 1, 2, 3), (4, 5, 6, 7)), ((0, 1, 2, 3), (4, 5, 6, 7), ())]:
        worker = tiny_worker(settings(engine, folder))
        plan = PackPlan(microbatches=(microbatches,), steps=(len(microbatches),), pad_to=24)
        result = worker.train(tiny_batch(), LOSS, plan=plan)
        results.append((result.loss, result.grad_norm, worker.get_logprobs(tiny_batch(), plan=plan).sum().item()))
        worker.shutdown()
    assert results[0] == results[1]


@pytest.mark.parametrize("column", ["advantages", "prev_logprobs"])
def test_nan_in_the_batch_stops_training_with_the_keys(worker: PolicyWorker, column: str) -> None:
    batch, weights = tiny_batch(), weights_of(worker)
    batch[column] = batch.tensor(column).clone()
    batch.tensor(column)[3, 5] = float("nan")
    with pytest.raises(
        NonFiniteError, match=r"NaN or inf in the loss: samples uid1_g1 \(rank 0\); the weights were not"
    ):
        worker.train(batch, LOSS, mbs=2)
    assert same(weights_of(worker), weights)


def test_nan_in_a_later_update_says_that_weights_have_changed(worker: PolicyWorker, engine: str) -> None:
    batch = tiny_batch()
    batch["advantages"] = batch.tensor("advantages").clone()
    batch.tensor("advantages")[6, 5] = float("nan")
    key = "optimizer" if engine == "dtensor" else "megatron_cfg.optimizer"
    says = rf"samples uid3_g0 \(rank 0\); 1 earlier updates of this step have changed the weights.*lower policy\.{key}"
    with pytest.raises(NonFiniteError, match=says):
        worker.train(batch, LOSS, gbs=4, mbs=2)


def test_nan_weights_stop_logprobs_with_row_numbers_where_there_are_no_keys(worker: PolicyWorker) -> None:
    batch = tiny_batch(4)
    del batch["keys"]
    with torch.no_grad():
        for shard in worker.shards.held():
            shard.fill_(float("nan"))
    with pytest.raises(NonFiniteError, match=r"log-probabilities: samples row 0 \(rank 0\), row 1"):
        worker.get_logprobs(batch)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (PackPlan(microbatches=(((0,),), ((1,),)), steps=(1,), pad_to=24), "one rank's part"),
        (PackPlan(microbatches=(((0, 1),),), steps=(1,), pad_to=24), "each of the 8 rows once"),
        (PackPlan(microbatches=((tuple(range(8)),),), steps=(2,), pad_to=24), "do not add up"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(worker: PolicyWorker, plan: PackPlan, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        worker.train(tiny_batch(), LOSS, plan=plan)


def test_rows_that_do_not_divide_into_global_batches_are_refused(worker: PolicyWorker) -> None:
    with pytest.raises(ValueError, match="train_global_batch_size"):
        worker.train(tiny_batch(8), LOSS, gbs=3)


def test_device_questions_are_answered_without_a_gpu(worker: PolicyWorker) -> None:
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
