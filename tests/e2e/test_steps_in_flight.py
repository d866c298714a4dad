"""Another order of stages than the trainer's: two steps in flight, in one process."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from nemo_rl.algorithms.grpo_sync import GRPOTrainer, TrainerParts
from nemo_rl.algorithms.setup import open_parts
from nemo_rl.algorithms.stages.bodies import clear_untrained
from nemo_rl.algorithms.stages.columns import PARTITION, declare_partition
from nemo_rl.algorithms.stages.stage import StepState, join_steps
from nemo_rl.algorithms.step_metrics import step_metrics
from nemo_rl.config.schema import MasterConfig
from nemo_rl.data_plane.factory import open_step
from tests.helpers.runs import LOCAL, load_recipe, write_recipe

ROWS = 16
"""Of a step: 4 prompts with 4 samples each."""
BEFORE_TRAIN = ("score", "prev_logprobs", "reference_logprobs", "advantages")


class Overlapping:
    """The order of stages is that of the test; whoever begins a step closes it, and so clears its rows."""

    def __init__(self, parts: TrainerParts) -> None:
        self.parts = parts
        self.stages = {stage.name: stage for stage in parts.stages}
        self.open: dict[int, ExitStack] = {}
        grpo = parts.config.grpo
        declare_partition(parts.client, parts.columns, grpo, steps_in_flight=2)
        parts.weight_sync.sync(0)

    def roll_out(self, number: int) -> StepState:
        step = self.parts.source.next(number)
        self.open[number] = ExitStack()
        self.open[number].enter_context(open_step(self.parts.client, step.partition, step.keys))
        return step

    def run(self, step: StepState, *names: str) -> StepState:
        for name in names:
            step = self.stages[name].submit(step).result()
        return step

    def close(self, step: StepState, *numbers: int) -> dict[str, float]:
        """Clears the rows of these steps; returns the metrics of what was trained."""
        clear_untrained(self.parts.client, step)
        for number in numbers:
            self.open.pop(number).close()
        return step_metrics(replace(step, seconds=1.0))

    def alive(self) -> set[str]:
        return set(self.parts.client.kv_list(PARTITION))


def config_of(folder: Path, model: Path) -> MasterConfig:
    return load_recipe(write_recipe(folder, model, grpo={**GRPO}), LOCAL)


GRPO = {"num_prompts_per_step": 4, "num_generations_per_prompt": 4, "max_num_steps": 4, "val_period": 0, "seed": 5}
GRPO |= {"val_at_start": False, "val_at_end": False, "drop_zero_advantage_groups": False}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, model: Path) -> dict[str, float]:
    """Metrics of the first step of the trainer."""
    config = config_of(tmp_path_factory.mktemp("alone"), model)
    with open_parts(config, console=Console(file=io.StringIO())) as parts:
        trainer = GRPOTrainer(parts)
        trainer.open_run()
        return step_metrics(replace(trainer.step(), seconds=1.0))


@pytest.fixture
def scheduler(tmp_path: Path, model: Path, alone: dict[str, float]) -> Iterator[Overlapping]:
    with open_parts(config_of(tmp_path / "overlapping", model), console=Console(file=io.StringIO())) as parts:
        yield Overlapping(parts)


def test_two_steps_in_flight_share_stages_workers_and_partition(
    scheduler: Overlapping, alone: dict[str, float]
) -> None:
    one, two = scheduler.roll_out(1), scheduler.roll_out(2)
    assert scheduler.alive() == {*one.keys, *two.keys} and len(scheduler.alive()) == 2 * ROWS
    assert not {*one.uids} & {*two.uids}

    # The second step's log-probabilities are under way before the first one is trained.
    one = scheduler.run(one, *BEFORE_TRAIN)
    two = scheduler.run(two, "score")
    under_way = scheduler.stages["prev_logprobs"].submit(two)
    one = scheduler.run(one, "train", "log")
    metrics = scheduler.close(one, 1)
    assert scheduler.alive() == {*two.keys}, "a step clears its own rows"
    same = [name for name in alone if name.startswith(("train/", "rollout/")) and "per_s" not in name]
    assert "train/loss" in same and {name: metrics[name] for name in same} == {name: alone[name] for name in same}

    scheduler.parts.weight_sync.sync(1)
    three = scheduler.roll_out(3)
    assert len(scheduler.alive()) == 2 * ROWS
    two = replace(scheduler.run(under_way.result(), *BEFORE_TRAIN[2:], "train", "log"), policy_version=1)
    lag = scheduler.close(two, 2)
    assert lag["rollout/staleness_min"] == lag["rollout/staleness_max"] == 1, "sampled before the first update"
    assert scheduler.alive() == {*three.keys}

    # One batch of the rows of two rollouts, which different weights have sampled.
    scheduler.parts.weight_sync.sync(2)
    four = scheduler.roll_out(4)
    batch = join_steps(4, [three, four], policy_version=2)
    assert batch.rows.weight_versions.tolist() == [1] * ROWS + [2] * ROWS
    batch = scheduler.run(batch, *BEFORE_TRAIN, "train", "log")
    assert len(batch.scores.stats.count) == 8 and set(batch.scores.stats.count.tolist()) == {4.0}
    assert batch.train is not None and batch.train.num_tokens == batch.num_tokens == three.num_tokens + four.num_tokens
    mixed = scheduler.close(batch, 3, 4)
    assert [mixed[f"rollout/staleness_{which}"] for which in ("min", "max", "mean")] == [0, 1, 0.5]
    assert scheduler.alive() == set() and scheduler.parts.client.stats()["peak_rows"] == 2 * ROWS


def test_a_step_that_fails_leaves_the_rows_of_the_other_one(
    scheduler: Overlapping, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = scheduler.roll_out(1)
    rows = scheduler.parts.client.kv_batch_get(one.keys, PARTITION, ["input_lengths"])["input_lengths"].tolist()

    def fail(*args: object, **kwargs: object) -> None:
        assert len(scheduler.alive()) == 2 * ROWS, "its rows are there"
        raise RuntimeError("planted behind the put")

    monkeypatch.setattr("nemo_rl.experience.rollout_worker.SampleStats", fail)
    with pytest.raises(RuntimeError, match="planted"):
        scheduler.parts.source.next(2)
    assert scheduler.alive() == {*one.keys}
    monkeypatch.undo()
    kept = scheduler.parts.client.kv_batch_get(one.keys, PARTITION, ["input_lengths"])["input_lengths"].tolist()
    assert kept == rows
    trained = scheduler.run(one, *BEFORE_TRAIN, "train", "log")
    assert trained.train is not None
    scheduler.close(trained, 1)
    assert scheduler.alive() == set()
