"""Whole runs over Ray and every store: the same numbers as in one process, and a driver that holds no bulk."""

from __future__ import annotations

import gzip
import io
import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from rich.console import Console

from nemo_rl.algorithms.run import run
from nemo_rl.distributed.ray_worker_groups import RayWorkerGroup
from nemo_rl.distributed.worker_groups import Call, Pending
from tests.helpers import mooncake
from tests.helpers.runs import LOCAL, load_recipe, logged_steps, write_recipe
from tests.helpers.warm_runs import WarmRuns

pytestmark = pytest.mark.slow


def train(recipe: Path, overrides: dict[str, str]) -> list[dict[str, float]]:
    config = load_recipe(recipe, overrides)
    run(config, console=Console(file=io.StringIO()))
    return logged_steps(config.logger.log_dir)


JUDGED = {
    "name": "custom",
    "reward_function": "tests.helpers.rewards:judged",
    "reward_weights": {"odd": 1.0, "length": 0.1},
}


def learning(row: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in row.items() if not name.startswith("data_plane/")}


@pytest.fixture(scope="module")
def in_one_process(tmp_path_factory, model) -> list[dict[str, float]]:
    rows = train(write_recipe(tmp_path_factory.mktemp("noop"), model, env=JUDGED), LOCAL)
    assert len(rows) == 3
    return rows


RAY = {"cluster.cpu_workers_per_node": "1"}
NATIVE = {"data_plane.impl": "transfer_queue", "data_plane.transfer_queue.layout": "native"}
STORES = {
    "off": {**RAY, "data_plane.enabled": "false"},
    "ray-node": {**RAY, "data_plane.impl": "ray", "data_plane.ray.owner": "node"},
    "transfer_queue": {**RAY, "data_plane.impl": "transfer_queue"},
    "transfer_queue-mooncake": {**RAY, "data_plane.impl": "transfer_queue", "data_plane.backend": "mooncake_cpu"},
    "transfer_queue-native": {**RAY, **NATIVE},
    "transfer_queue-native-mooncake": {**RAY, **NATIVE, "data_plane.backend": "mooncake_cpu"},
    "shm": {**LOCAL, "data_plane.impl": "shm"},
    "mooncake": {**LOCAL, "data_plane.impl": "mooncake"},
}
IN_FULL = {name for name, settings in STORES.items() if RAY.items() <= settings.items()}
"""Left to `make test-full`: of the stores under Ray only one trains two workers."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] if name in IN_FULL else []) for name in STORES]
)
def test_every_store_gives_the_numbers_of_one_process(tmp_path, model, in_one_process, warm_runs, name):
    if "mooncake" in name and (why := mooncake.why_not()):
        pytest.skip(why)
    config = load_recipe(write_recipe(tmp_path, model, env=JUDGED), STORES[name])
    warm_runs.run(config)
    rows = logged_steps(config.logger.log_dir)
    for ours, theirs in zip(rows, in_one_process, strict=True):
        assert learning(ours) == learning(theirs), "loss, gradient norm and metrics must be bit-identical"
    assert all(row["data_plane/live_rows"] == 0 for row in rows)


TWO_ENGINES = {**RAY, "policy.generation.num_replicas": "2", "policy.generation.max_batch_size": "4"}


def test_any_number_of_rollout_workers_gives_the_same_numbers(tmp_path, model, warm_runs):
    found = {}
    for count in (1, 2):
        recipe = write_recipe(tmp_path / str(count), model, env=JUDGED)
        config = load_recipe(recipe, {**TWO_ENGINES, "experience.num_workers": str(count)})
        warm_runs.run(config)
        found[count] = [learning(row) for row in logged_steps(config.logger.log_dir)]
        logs = sorted(path.name for path in (config.logger.log_dir / "workers").glob("rollout_*.log"))
        assert logs == [f"rollout_{number}.log" for number in range(count)]
    assert len(found[1]) == 3 and found[2] == found[1], "loss, gradient norm and metrics must be bit-identical"


@pytest.mark.full
def test_two_engines_by_broadcast_sample_what_one_engine_samples(
    tmp_path: Path, model: Path, in_one_process: list[dict[str, float]], warm_runs: WarmRuns
) -> None:
    broadcast = {"policy.generation.num_replicas": "2", "policy.generation.refit_transport": "broadcast"}
    config = load_recipe(write_recipe(tmp_path, model, env=JUDGED), {**STORES["transfer_queue"], **broadcast})
    warm_runs.run(config)
    for name in ("train/reward", "train/loss", "train/grad_norm", "rollout/mean_response_tokens"):
        assert [row[name] for row in logged_steps(config.logger.log_dir)] == [row[name] for row in in_one_process]
    assert len({row["train/grad_norm"] for row in in_one_process}) == 3, "weights must change, or a refit shows nothing"


def bulk_in(value: object, num_rows: int) -> Iterator[str]:
    """Tensors and arrays with more than one number per row, anywhere in what crosses the driver."""
    if isinstance(value, torch.Tensor | np.ndarray):
        if value.ndim > 1 or value.size > num_rows if isinstance(value, np.ndarray) else value.numel() > num_rows:
            yield f"{type(value).__name__}{tuple(value.shape)}"
    elif isinstance(value, dict):
        for item in value.values():
            yield from bulk_in(item, num_rows)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from bulk_in(item, num_rows)
    elif hasattr(type(value), "__dataclass_fields__"):
        for name in type(value).__dataclass_fields__:
            yield from bulk_in(getattr(value, name), num_rows)


T = TypeVar("T")
ABOUT_ROWS = ("groups", "meta", "records", "work")
"""Arguments."""


class Watched(RayWorkerGroup):
    """A worker group that looks at everything the driver sends and receives."""

    seen: list[str] = []
    calls: set[str] = set()
    num_bytes: int = 0
    """Of everything about rows that the driver has sent or received."""

    def submit(self, call: Call[T]) -> Pending[list[T]]:
        return super().submit(call).then(lambda results: self._look(call, results))

    def stream(self, call: Call[Iterator[T]]) -> Iterator[T]:
        return (self._look(call, [result])[0] for result in super().stream(call))

    def _look(self, call: Call[Any], results: list[T]) -> list[T]:
        requests = [call.of_rank(rank) for rank in range(self.world_size)]
        [method] = {request.method for request in requests}
        Watched.calls.add(method)
        if method in ("rollout", "log_rollouts", "map_rows") or method.endswith("_presharded"):
            sent = [value for request in requests for name, value in request.arguments.items() if name in ABOUT_ROWS]
            Watched.num_bytes += len(pickle.dumps([sent, results], protocol=5))
        arguments = [dict(request.arguments) for request in requests]
        Watched.seen += [f"{method}: {what}" for what in bulk_in([*arguments, results], 16)]
        return results


LAYOUTS = {
    "two data parallel": {},
    "tensor parallel": {
        "policy.dtensor_cfg.tensor_parallel_size": "2",
        "policy.dtensor_cfg.sequence_parallel": "true",
    },
}
PER_TOKEN = {
    "grpo.adv_estimator.name": "reinforce_plus_plus",
    "grpo.drop_zero_advantage_groups": "false",
    "grpo.max_num_steps": "2",
    # Far from every row: it changes no number.
    "grpo.seq_logprob_error_threshold": "1000",
    "loss_fn.use_kl_in_reward": "true",
    "loss_fn.reference_policy_kl_penalty": "0.1",
    "policy.optimizer.kwargs.lr": "0.003",
}
TOGETHER = {
    **PER_TOKEN,
    "cluster.cpu_workers_per_node": "2",
    "data_plane.impl": "ray",
    "policy.dynamic_batching.enabled": "false",
    "policy.sequence_packing.enabled": "true",
    "policy.profile.steps": "[2]",
}


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=[pytest.mark.full] if "tensor" in name else []) for name in LAYOUTS]
)
def test_two_workers_train_like_one_process_and_no_per_token_tensor_passes_the_driver(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, warm_runs: WarmRuns, layout: str
) -> None:
    alone = train(write_recipe(tmp_path / "alone", model, env=JUDGED), {**LOCAL, **PER_TOKEN})
    monkeypatch.setattr("nemo_rl.algorithms.start.RayWorkerGroup", Watched)
    monkeypatch.setattr("nemo_rl.algorithms.engines.RayWorkerGroup", Watched)
    Watched.seen, Watched.calls, Watched.num_bytes = [], set(), 0
    shown, logs = io.StringIO(), tmp_path / "two" / "logs"
    recipe = write_recipe(tmp_path / "two", model, env=JUDGED)
    warm_runs.run(load_recipe(recipe, {**TOGETHER, **LAYOUTS[layout]}), shown=shown)
    rows = logged_steps(logs)
    assert len(rows) == len(alone) == 2 and alone[0]["train/kl_in_reward"] == 0 != alone[1]["train/kl_in_reward"]
    assert rows[0]["train/reward"] == alone[0]["train/reward"]
    for ours, theirs in zip(rows, alone, strict=True):
        for name in ("train/loss", "train/grad_norm", "train/kl_in_reward"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-5), name
    for row in rows:
        assert row["data_plane/live_rows"] == 0 and row["train/grad_norm"] > 0 and row["data_plane/driver_share"] > 0
        parts = row["train/reward/odd"] + 0.1 * row["train/reward/length"]
        assert row["train/reward"] == pytest.approx(parts, rel=1e-5)
        assert 1 < row["train/seq_logprob_error_max"] < 1.01 and not row["train/seq_logprob_error_masked_rows"]
    assert "reward: judging" in shown.getvalue(), "what a reward prints in its process reaches the terminal"
    assert "judging" in (logs / "reward.log").read_text()
    assert {"rollout", "train_presharded", "get_logprobs_presharded", "map_rows"} <= Watched.calls
    assert Watched.seen == []
    counted = sum(row["data_plane/driver_bytes"] for row in rows)
    # Counted without the names of classes, which small messages have more of than anything else.
    assert counted > 0.8 * Watched.num_bytes > 0, (
        "metas with plans, row scalars and results are counted as they are sent"
    )
    traces = sorted((logs / "profile").rglob("*"))
    assert [str(path.relative_to(traces[0])) for path in traces[1:]] == ["rank_0.json.gz", "rank_1.json.gz"]
    assert traces[0].name == "step_2"
    for trace in traces[1:]:
        calls = {call.get("name", "") for call in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]}
        assert {"aten::mm", "MmBackward0"} <= calls, "both passes of the update"
