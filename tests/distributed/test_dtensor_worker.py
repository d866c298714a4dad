"""Two data-parallel ranks equal one: loss, gradients, checkpoints and errors. One spawn serves all cases."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.gradient_bytes import share_of
from nemo_rl.algorithms.losses.policy_loss import PolicyLoss
from nemo_rl.config.backends import DTensorConfig, OptimizerConfig
from nemo_rl.config.loss import LossConfig
from nemo_rl.config.policy import PolicyConfig
from nemo_rl.distributed.packing import PackPlan, plan_packs, plan_padded
from nemo_rl.errors import CheckpointError, NonFiniteError
from nemo_rl.models.policy.workers.base import gradients_decided
from nemo_rl.models.policy.workers.policy_worker import PolicyWorker
from nemo_rl.utils.metrics import merge_metrics, values
from tests.helpers.gloo import run_ranks
from tests.helpers.tiny_model import tiny_batch, tiny_policy, tiny_worker

LOSS = PolicyLoss(config=LossConfig())
ROWS = 12
Arrays = dict[str, np.ndarray]
# Gradients are read off a step of plain gradient descent with rate 1.
GRADIENT_DESCENT = OptimizerConfig(name="torch.optim.SGD", kwargs={"lr": 1.0})


def _gradient_policy(folder: Path, accumulation: str = "sharded") -> PolicyConfig:
    sizes = DTensorConfig(gradient_accumulation=accumulation)
    return tiny_policy(folder, optimizer=GRADIENT_DESCENT, max_grad_norm=None, dtensor_cfg=sizes)


def _plan(kind: str, dp_world: int) -> PackPlan:
    lengths = tiny_batch(ROWS).tensor("input_lengths").tolist()
    if kind == "packed":
        return plan_packs(lengths, capacity=60, dp_world=dp_world)
    return plan_padded(lengths, capacity=60, dp_world=dp_world)


def _exported(worker: PolicyWorker) -> Arrays:
    """Weights as arrays: tensors would travel as file descriptors of a process that has ended by then."""
    return {name: weight.numpy() for name, weight in worker.export_weights()}


def _gradients(folder: Path, rank: int, world_size: int, kind: str, accumulation: str = "sharded") -> dict[str, object]:
    worker = tiny_worker(_gradient_policy(folder, accumulation), rank=rank, world_size=world_size)
    before = _exported(worker)
    plan = _plan(kind, world_size)
    shard = tiny_batch(ROWS).select_indices(plan.rows_of_rank(rank))
    with warnings.catch_warnings():
        # An in-place op on such a view would skip the gathering of weights.
        warnings.filterwarnings("error", message=".*returned a view tensor")
        result = worker.train(shard, LOSS, plan=plan.for_rank(rank))
    gradients = {name: before[name] - weight for name, weight in _exported(worker).items()}
    found = {"loss": result.loss, "norm": result.grad_norm, "gradients": gradients, "metrics": result.metrics}
    found["held"] = share_of(worker)
    worker.shutdown()
    return found


def _error(folder: Path, rank: int) -> str:
    """Only rank 1 has a bad row; both must stop, and name it."""
    worker = tiny_worker(tiny_policy(folder), rank=rank, world_size=2)
    batch = tiny_batch(4)
    if rank == 1:
        batch.tensor("advantages")[3, 6] = float("inf")
    with pytest.raises(NonFiniteError) as caught:
        worker.train(batch, LOSS, gbs=8, mbs=1)
    worker.train(tiny_batch(4), LOSS, gbs=8, mbs=1)
    worker.shutdown()
    return str(caught.value)


def _uneven(folder: Path, rank: int) -> str:
    worker = tiny_worker(tiny_policy(folder), rank=rank, world_size=2)
    plan = PackPlan(microbatches=(((0, 1, 2, 3),) if rank else ((0, 1), (2, 3)),), steps=(2 - rank,), pad_to=24)
    with pytest.raises(ValueError, match="same number") as caught:
        worker.train(tiny_batch(4), LOSS, plan=plan)
    worker.shutdown()
    return str(caught.value)


def _train_twice(folder: Path, rank: int, world_size: int, checkpoint: Path, *, resume: bool) -> dict[str, object]:
    """One step, a checkpoint, another step; or the second step alone, from the checkpoint."""
    worker = tiny_worker(tiny_policy(folder), rank=rank, world_size=world_size, keep_reference=True)
    plan = _plan("padded", world_size)
    shard, part = tiny_batch(ROWS).select_indices(plan.rows_of_rank(rank)), plan.for_rank(rank)
    paths = {"weights": checkpoint / "weights", "optimizer": checkpoint / "optimizer"}
    if resume:
        worker.load_checkpoint(**paths)
    else:
        worker.train(shard, LOSS, plan=part)
        torch.rand(3 + rank)
        worker.save_checkpoint(**paths, tokenizer=checkpoint / "weights")
    noise = torch.rand(2).tolist()
    loaded = _exported(worker)
    result = worker.train(shard, LOSS, plan=part)
    outcome = {"loss": result.loss, "norm": result.grad_norm, "loaded": loaded, "noise": noise}
    outcome["weights"] = _exported(worker)
    reference = worker.get_reference_policy_logprobs(shard, plan=part)
    outcome["reference"] = float(reference.double().sum())
    worker.shutdown()
    return outcome


def _refused(folder: Path, rank: int, checkpoint: Path) -> str:
    """Rank 0 cannot write: its target is below a file. Both ranks hear of it and go on."""
    worker = tiny_worker(tiny_policy(folder), rank=rank, world_size=2)
    with pytest.raises(CheckpointError) as caught:
        worker.save_checkpoint(weights=folder / "config.json" / "weights", optimizer=None, tokenizer=None)
    worker.save_checkpoint(weights=checkpoint / "second", optimizer=None, tokenizer=None)
    worker.shutdown()
    return str(caught.value)


def _two_ranks(rank: int, folder: Path, checkpoint: Path) -> dict[str, object]:
    return {
        "padded": _gradients(folder, rank, 2, "padded"),
        "packed": _gradients(folder, rank, 2, "packed"),
        "whole": _gradients(folder, rank, 2, "padded", "whole"),
        "error": _error(folder, rank),
        "uneven": _uneven(folder, rank),
        "first": _train_twice(folder, rank, 2, checkpoint, resume=False),
        "again": _train_twice(folder, rank, 2, checkpoint, resume=True),
        "refused": _refused(folder, rank, checkpoint),
    }


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoint")


@pytest.fixture(scope="module")
def ranks(folder: Path, checkpoint: Path) -> list[dict]:
    return run_ranks(2, _two_ranks, folder, checkpoint)


@pytest.fixture(scope="module")
def single(folder: Path) -> dict:
    return _gradients(folder, 0, 1, "padded")


def _equal(left: Arrays, right: Arrays) -> bool:
    return left.keys() == right.keys() and all(np.array_equal(left[name], right[name]) for name in left)


def _relative_error(got: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize("kind", ["padded", "packed"])
def test_two_ranks_give_the_loss_and_gradients_of_one(kind: str, ranks: list[dict], single: dict) -> None:
    for outcome in (rank[kind] for rank in ranks):
        assert outcome["loss"][0] == pytest.approx(single["loss"][0], rel=1e-5)
        assert outcome["norm"][0] == pytest.approx(single["norm"][0], rel=1e-5)
        for name, gradient in single["gradients"].items():
            assert _relative_error(outcome["gradients"][name], gradient) <= 1e-5, name


def test_gradients_are_sharded_between_microbatches_unless_the_recipe_wants_them_whole(ranks: list[dict]) -> None:
    for rank in ranks:
        assert rank["padded"]["held"] <= 1.05 and rank["whole"]["held"] == 2
        # The sums over microbatches and over ranks change places.
        assert rank["whole"]["norm"] == pytest.approx(rank["padded"]["norm"], rel=1e-6)
        for name, gradient in rank["whole"]["gradients"].items():
            # Gradients are differences of float32 weights here.
            assert _relative_error(rank["padded"]["gradients"][name], gradient) <= 1e-5, name


def test_packed_and_padded_single_rank_gradients_are_equal(folder: Path, single: dict) -> None:
    packed = _gradients(folder, 0, 1, "packed")
    assert packed["loss"][0] == pytest.approx(single["loss"][0], rel=1e-5)
    for name, gradient in single["gradients"].items():
        assert _relative_error(packed["gradients"][name], gradient) <= 1e-5, name


def test_metrics_of_both_ranks_merge_to_those_of_one(ranks: list[dict], single: dict) -> None:
    merged = values(merge_metrics(metrics for rank in ranks for metrics in rank["padded"]["metrics"]))
    for name, value in values(merge_metrics(single["metrics"])).items():
        assert merged[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name


def test_a_bad_row_of_one_rank_stops_both_with_its_key(ranks: list[dict]) -> None:
    for rank in ranks:
        assert "samples uid1_g1 (rank 1); the weights were not changed. Look" in rank["error"]


def test_unequal_numbers_of_microbatches_are_refused_on_both_ranks(ranks: list[dict]) -> None:
    for rank in ranks:
        assert "rank 0: 1 steps, 2 passes, rank 1: 1 steps, 1 passes" in rank["uneven"]
        assert "policy.train_micro_batch_size" in rank["uneven"]


def test_resuming_on_as_many_ranks_is_exact(ranks: list[dict]) -> None:
    for rank in ranks:
        first, again = rank["first"], rank["again"]
        assert (first["loss"], first["norm"]) == (again["loss"], again["norm"])
        assert first["noise"] == again["noise"]
        assert first["reference"] == again["reference"]
        assert _equal(first["weights"], again["weights"])


def test_resuming_on_one_rank_continues_the_run_of_two(ranks: list[dict], folder: Path, checkpoint: Path) -> None:
    first, again = ranks[0]["first"], _train_twice(folder, 0, 1, checkpoint, resume=True)
    assert _equal(first["loaded"], again["loaded"])
    assert again["loss"][0] == pytest.approx(first["loss"][0], rel=1e-5)
    assert again["norm"][0] == pytest.approx(first["norm"][0], rel=1e-4)
    for name, weight in first["weights"].items():
        # A step of Adam moves a weight by about 1e-3; lost moments would show at that size.
        np.testing.assert_allclose(again["weights"][name], weight, rtol=0, atol=2e-5)


def test_a_rank_that_cannot_write_a_checkpoint_is_reported_by_all(ranks: list[dict], checkpoint: Path) -> None:
    for rank in ranks:
        assert "rank 0 could not write it" in rank["refused"]
    assert (checkpoint / "second" / "model.safetensors").is_file()
    assert not list(checkpoint.glob("*.part"))


def _decided(rank: int, rooms: tuple[int, ...]) -> list[str]:
    """Return what `auto` means to a rank: without a plan, with room everywhere, and without on one rank."""
    config = PolicyConfig(model_name="model", dtensor_cfg=DTensorConfig(gradient_accumulation="auto"))
    cases: tuple[tuple[dict[str, int], int], ...] = (({}, 100), ({"train": 90}, 100), ({"train": 90}, rooms[rank]))
    return [
        gradients_decided(config, planned, room=room, device=torch.device("cpu")).dtensor_cfg.gradient_accumulation
        for planned, room in cases
    ]


def test_gradients_are_whole_where_every_rank_has_room_for_them() -> None:
    for found in run_ranks(2, _decided, (100, 93), timeout_s=120):
        assert found == ["sharded", "whole", "sharded"]
