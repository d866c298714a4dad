"""Stage declarations: a column that is read must have been written before."""

from __future__ import annotations

import pytest

from nemo_rl.algorithms.loss_functions import ClippedPGLoss
from nemo_rl.algorithms.stages import Stage, build_stages, check_stages, written_fields
from nemo_rl.config.schema import MasterConfig
from nemo_rl.errors import ConfigError


def config(**sections: object) -> MasterConfig:
    return MasterConfig.model_validate({"policy": {"model_name": "m"}, **sections})


def names(settings: MasterConfig, prev_field: str = "prev_logprobs") -> list[str]:
    loss = ClippedPGLoss(config=settings.loss_fn, prev_field=prev_field)
    return [stage.name for stage in build_stages(settings, loss)]


def test_a_stage_runs_only_when_the_config_needs_it():
    full = config(loss_fn={"reference_policy_kl_penalty": 0.1})
    assert names(full) == ["rollout", "prev_logprobs", "reference_logprobs", "advantages", "train", "log"]
    lean = config(loss_fn={"reference_policy_kl_penalty": 0}, grpo={"use_generation_logprobs_as_prev": True})
    assert names(lean, "generation_logprobs") == ["rollout", "advantages", "train", "log"]


def test_a_loss_that_reads_a_column_nobody_writes_is_refused_at_build():
    lean = config(loss_fn={"reference_policy_kl_penalty": 0}, grpo={"use_generation_logprobs_as_prev": True})
    with pytest.raises(ConfigError, match=r"stage 'train' reads column 'prev_logprobs', which is written by no stage"):
        build_stages(lean, ClippedPGLoss(config=lean.loss_fn, prev_field="prev_logprobs"))


def test_every_problem_is_reported_and_a_late_writer_is_named():
    stages = [Stage(name="a", reads=("x", "y")), Stage(name="b", writes=("x",))]
    with pytest.raises(ConfigError) as caught:
        check_stages(stages)
    assert caught.value.problems == [
        "stage 'a' reads column 'x', which is written only later, by 'b'",
        "stage 'a' reads column 'y', which is written by no stage",
    ]


def test_columns_are_listed_in_order_of_their_first_write():
    stages = (Stage(name="a", writes=("x", "y")), Stage(name="b", writes=("y", "z")))
    assert written_fields(stages) == ("x", "y", "z")
