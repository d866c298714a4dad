"""`AsyncBatches` without its threads: kinds of failures, and the state of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

from nemo_rl.algorithms.async_batches import FRONTIER_STATE, AsyncBatches, build_schedule, failure_kind
from nemo_rl.algorithms.batches import NoStepLeft, RolloutParts
from nemo_rl.config.grpo import GRPOConfig
from nemo_rl.data.sampler import PromptSampler
from nemo_rl.data_plane.interfaces import DataPlaneClient
from nemo_rl.errors import (
    CheckpointError,
    DataPlaneClosed,
    DataPlaneError,
    NonFiniteError,
    RewardError,
    UserError,
    WorkerError,
    WorkerLost,
)
from nemo_rl.experience.rollout_handle import RolloutHandle
from nemo_rl.utils.metrics import Mean

SIZE = 4


class RolloutWithoutFiles:
    """A rollout that keeps no finished groups on disk."""

    def durable_ordinals(self) -> dict[int, int]:
        return {}


def batches() -> AsyncBatches:
    config = GRPOConfig.model_validate(
        {"num_prompts_per_step": SIZE, "num_generations_per_prompt": 2, "max_num_steps": 9, "async": {"enabled": True}}
    )
    parts = RolloutParts(
        config=config,
        client=cast(DataPlaneClient, None),
        rollout=cast(RolloutHandle, RolloutWithoutFiles()),
        sampler=PromptSampler(40, seed=0, shuffle=True, max_num_epochs=1),
        weight_version=lambda: 0,
    )
    return AsyncBatches(parts, build_schedule(config), record=None, timeout_s=1.0, note=lambda line: None)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (WorkerError("x", stage="rollout"), "infra"),
        (WorkerLost("x", stage="rollout"), "infra"),
        (DataPlaneError("x"), "infra"),
        (DataPlaneClosed("x"), None),
        (RewardError("x"), "data"),
        (NonFiniteError("x"), "model"),
        (KeyError("x"), None),
    ],
)
def test_a_failure_is_told_by_what_failed(error: Exception, kind: str | None) -> None:
    assert failure_kind(error) == kind


def test_prompts_that_a_checkpoint_has_settled_are_not_drawn_again() -> None:
    sampler = PromptSampler(40, seed=0, shuffle=True, max_num_epochs=1)
    sampler.next(3)
    source = batches()
    source.load_state_dict(
        {"sampler": sampler.state_dict(), FRONTIER_STATE: {"next_ordinal": 3, "done": [4, 6]}}, step=1, folder=Path()
    )
    assert [draw.ordinal for draw in source._draw(SIZE)] == [3, 5, 7, 8]
    state = source.state_dict()
    assert state[FRONTIER_STATE] == {"next_ordinal": 3, "done": [4, 6]}
    # The sampler has drawn further, but the checkpoint holds its place at the first prompt that is not settled.
    assert state["sampler"] == {**sampler.state_dict(), "batch_size": 2}


def test_a_checkpoint_that_an_asynchronous_run_cannot_go_on_from_is_refused() -> None:
    sampler = PromptSampler(40, seed=0, shuffle=True, max_num_epochs=1).state_dict()
    with pytest.raises(CheckpointError, match="resume it with grpo.async.enabled=false"):
        batches().load_state_dict(
            {"sampler": sampler, "dynamic_sampling": {"redrawn_ordinals": [3]}}, step=1, folder=Path()
        )
    with pytest.raises(CheckpointError, match="async: expected ordinals that were trained, got"):
        batches().load_state_dict({"sampler": sampler, FRONTIER_STATE: {"done": "4"}}, step=1, folder=Path())


def test_a_step_that_equal_rewards_keep_waiting_ends_with_that_reason() -> None:
    source = batches()
    source._filtered = Mean(10 * SIZE - 1.0, 10 * SIZE - 1.0)
    source._check_filtered(1)
    source._filtered = source._filtered.merge(Mean(1.0))
    wanted = (
        r"dynamic_sampling_max_gen_batches: after 40 groups of equal rewards step 1 has 0 of 4 .*use_dynamic_sampling"
    )
    with pytest.raises(UserError, match=wanted):
        source._check_filtered(1)


def test_a_step_for_which_nothing_is_left_ends_the_run() -> None:
    source = batches()
    assert not source.is_exhausted
    source._parts.sampler.next(40 - SIZE + 1)  # too few are left for a step
    source._admit()
    assert source.is_exhausted
    with pytest.raises(NoStepLeft):
        source._check_filtered(2)
    source._filtered = Mean(0.0, 3.0)
    with pytest.raises(UserError, match="after 3 groups of equal rewards step 1 has 0 of 4"):
        source._check_filtered(1)
