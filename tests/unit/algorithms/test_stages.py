"""Stage declarations: a column that is read must have been written before."""

from __future__ import annotations

import pytest
import torch

from nemo_rl.algorithms.losses.policy_loss import PolicyLoss, build_loss
from nemo_rl.algorithms.stages.bodies import BODIES
from nemo_rl.algorithms.stages.columns import (
    PARTITION,
    StageColumns,
    check_stages,
    declare_partition,
    fetched_fields,
    stage_columns,
    written_fields,
)
from nemo_rl.config.data_plane import DataPlaneConfig
from nemo_rl.config.grpo import GRPOConfig
from nemo_rl.config.schema import MasterConfig
from nemo_rl.data_plane.factory import build_data_plane_client
from nemo_rl.data_plane.schema import ROUTE_FIELDS
from nemo_rl.errors import CapacityExceeded, ConfigError
from nemo_rl.models.head.logits import SUPPORT


def config(**sections: object) -> MasterConfig:
    return MasterConfig.model_validate({"policy": {"model_name": "m"}, **sections})


def names(settings: MasterConfig, prev_field: str = "prev_logprobs") -> list[str]:
    loss = PolicyLoss(config=settings.loss_fn, prev_field=prev_field)
    return [stage.name for stage in stage_columns(settings, loss)]


def reads_of_log(settings: MasterConfig, prev_field: str = "prev_logprobs") -> tuple[str, ...]:
    loss = PolicyLoss(config=settings.loss_fn, prev_field=prev_field)
    return stage_columns(settings, loss)[-1].reads


def test_a_teacher_writes_its_columns_before_the_policy_reads_them():
    section = {"enabled": True, "teacher": {"model_name": "teacher"}}
    taught = config(loss_fn={"reference_policy_kl_penalty": 0, "distillation": section})
    stages = {stage.name: stage for stage in stage_columns(taught, build_loss(taught.loss_fn, taught.grpo))}
    assert list(stages) == ["rollout", "score", "prev_logprobs", "topk_logits", "advantages", "train", "log"]
    assert stages["topk_logits"].writes == ("topk_ids", "topk_logprobs")
    assert {"topk_ids", "topk_logprobs"} <= set(stages["train"].reads)


def test_a_stage_runs_only_when_the_config_needs_it():
    full = config(loss_fn={"reference_policy_kl_penalty": 0.1})
    assert names(full) == ["rollout", "score", "prev_logprobs", "reference_logprobs", "advantages", "train", "log"]
    lean = config(loss_fn={"reference_policy_kl_penalty": 0}, grpo={"use_generation_logprobs_as_prev": True})
    assert names(lean, "generation_logprobs") == ["rollout", "score", "advantages", "train", "log"]
    assert set(reads_of_log(full)) - set(reads_of_log(lean, "generation_logprobs")) == {"prev_logprobs"}
    measured = config(loss_fn={"reference_policy_kl_penalty": 0.1}, grpo={"seq_logprob_error_threshold": 2.0})
    assert names(measured) == [*names(full)[:4], "measure_rows", *names(full)[4:]]
    named = {*names(measured), "token_advantages", "topk_logits"}
    assert {"rollout", *BODIES} == named, "each but the source's has a body"


def test_a_loss_that_reads_a_column_nobody_writes_is_refused_at_build():
    lean = config(loss_fn={"reference_policy_kl_penalty": 0}, grpo={"use_generation_logprobs_as_prev": True})
    with pytest.raises(ConfigError, match=r"stage 'train' reads column 'prev_logprobs', which is written by no stage"):
        stage_columns(lean, PolicyLoss(config=lean.loss_fn, prev_field="prev_logprobs"))


def test_every_problem_is_reported_and_a_late_writer_is_named():
    stages = [StageColumns(name="a", reads=("x", "y")), StageColumns(name="b", writes=("x",))]
    with pytest.raises(ConfigError) as caught:
        check_stages(stages)
    assert caught.value.problems == [
        "stage 'a' reads column 'x', which is written only later, by 'b'",
        "stage 'a' reads column 'y', which is written by no stage",
    ]


def test_columns_are_listed_in_order_of_their_first_write():
    stages = (StageColumns(name="a", writes=("x", "y")), StageColumns(name="b", writes=("y", "z")))
    assert written_fields(stages) == ("x", "y", "z")


def test_a_partition_holds_the_rows_of_all_steps_in_flight():
    settings = GRPOConfig(num_prompts_per_step=2, num_generations_per_prompt=2)
    plane = DataPlaneConfig(impl="noop", timeout_s=0.3)
    for steps_in_flight in (1, 2):
        client = build_data_plane_client(plane, run_id=f"capacity{steps_in_flight}")
        columns = (StageColumns(name="rollout", writes=("sample_mask",)),)
        declare_partition(client, columns, settings, steps_in_flight=steps_in_flight)
        for step in range(steps_in_flight):
            client.kv_batch_put([f"s{step}_g{i}" for i in range(4)], PARTITION, {"sample_mask": torch.ones(4)})
        with pytest.raises(CapacityExceeded):
            client.kv_batch_put(["more_g0"], PARTITION, {"sample_mask": torch.ones(1)})
        client.close()


def stages_of(**replay: object) -> dict[str, StageColumns]:
    policy = {"model_name": "m", "router_replay": replay}
    settings = MasterConfig.model_validate({"policy": policy, "loss_fn": {"reference_policy_kl_penalty": 0.1}})
    loss = PolicyLoss(config=settings.loss_fn, prev_field="prev_logprobs")
    return {stage.name: stage for stage in stage_columns(settings, loss)}


def routes_in(names: tuple[str, ...]) -> set[str]:
    return set(names) & set(ROUTE_FIELDS)


def test_routes_go_from_their_recorder_to_the_passes_that_replay_them():
    plain = stages_of()
    assert not routes_in(written_fields(tuple(plain.values()))) and not routes_in(plain["train"].reads)

    whole = {"routed_experts", "routed_experts_missing"}
    at_rollout = stages_of(enabled=True)
    assert routes_in(at_rollout["rollout"].writes) == whole
    assert routes_in(at_rollout["prev_logprobs"].reads) == routes_in(at_rollout["train"].reads) == whole
    assert not routes_in(at_rollout["reference_logprobs"].reads)
    assert not routes_in(fetched_fields(at_rollout["prev_logprobs"]) + fetched_fields(at_rollout["train"]))
    assert fetched_fields(at_rollout["train"]) == plain["train"].reads

    by_policy = stages_of(enabled=True, source="prev_logprobs", bit_packed=True)
    packed = {"routed_experts_bits", "routed_experts_missing"}
    assert not routes_in(by_policy["rollout"].writes) and not routes_in(by_policy["prev_logprobs"].reads)
    assert routes_in(by_policy["prev_logprobs"].writes) == routes_in(by_policy["train"].reads) == packed


def test_kept_sets_go_from_the_rollout_to_the_passes_that_score_under_them_and_only_when_recorded():
    for recorded in (True, False):
        generation = {"top_p": 0.8, "record_support": recorded}
        settings = config(
            loss_fn={"reference_policy_kl_penalty": 0}, policy={"model_name": "m", "generation": generation}
        )
        stages = stage_columns(settings, PolicyLoss(config=settings.loss_fn))
        writers = [stage.name for stage in stages if SUPPORT in stage.writes]
        readers = [stage.name for stage in stages if SUPPORT in fetched_fields(stage)]
        assert (writers, readers) == ((["rollout"], ["prev_logprobs", "train"]) if recorded else ([], []))


def test_digests_travel_only_when_forward_passes_are_verified():
    verified = stages_of(with_digests=True, enabled=True)
    for names in (verified["rollout"].writes, verified["prev_logprobs"].reads, verified["train"].reads):
        assert "routed_experts_digests" in names
    assert not routes_in(stages_of(with_digests=True)["rollout"].writes)
