"""Rollouts become aligned columns; nothing per token reaches the driver's record."""

from __future__ import annotations

import json
import math

import numpy as np
import torch

from nemo_rl.data_plane.batch_meta import KVBatchMeta
from nemo_rl.experience.payload import ConversationStats, SampleStats, build_columns, mean_of_scored
from nemo_rl.experience.rollout_records import RolloutResult
from nemo_rl.models.generation.interfaces import GenerationOutput
from nemo_rl.utils.metrics import Sum


def output() -> GenerationOutput:
    return GenerationOutput(
        token_ids=torch.tensor([7, 8, 9, 5, 6, 4], dtype=torch.int32),
        logprobs=torch.tensor([-0.7, -0.8, -0.9, -0.5, -0.6, -0.4]),
        lengths=torch.tensor([2, 1, 2, 1]),
        truncated=torch.tensor([False, False, True, False]),
        weight_version=3,
    )


def test_columns_are_prompt_then_response_then_padding():
    batch = build_columns([(1, 2), (3,)], output(), group_size=2, pad_token_id=99)
    assert batch.tensor("input_ids").tolist() == [[1, 2, 7, 8], [1, 2, 9, 99], [3, 5, 6, 99], [3, 4, 99, 99]]
    assert batch.tensor("input_lengths").tolist() == [4, 3, 3, 2]
    assert batch.tensor("token_mask").int().tolist() == [[0, 0, 1, 1], [0, 0, 1, 0], [0, 1, 1, 0], [0, 1, 0, 0]]
    expected = torch.tensor([[0, 0, -0.7, -0.8], [0, 0, -0.9, 0], [0, -0.5, -0.6, 0], [0, -0.4, 0, 0]])
    torch.testing.assert_close(batch.tensor("generation_logprobs"), expected)
    assert batch.tensor("input_ids").dtype == torch.int32


def carry(rewards: list[float], **components: list[float]) -> SampleStats:
    count = len(rewards)
    return SampleStats(
        rewards=np.array(rewards, dtype=np.float32),
        truncated=np.array([row % 2 == 1 for row in range(count)]),
        response_lengths=np.arange(4, 4 + count, dtype=np.int32),
        components={name: np.array(part, dtype=np.float32) for name, part in components.items()},
    )


def test_the_drivers_record_holds_row_vectors_only_and_selects_rows():
    picked = carry([1.0, 0.0, 0.5]).select([2, 0])
    assert picked.rewards.tolist() == [0.5, 1.0] and picked.response_lengths.tolist() == [6, 4]
    assert picked.truncated.tolist() == [False, False] and len(picked) == 2


def test_records_of_several_steps_are_joined_row_by_row():
    older, newer = carry([1.0, 0.0], right=[1, 0]), carry([0.5, 0.25])
    joined = older.concat(newer)
    assert joined.rewards.tolist() == [1.0, 0.0, 0.5, 0.25] and joined.response_lengths.tolist() == [4, 5, 4, 5]
    assert joined.components["right"][:2].tolist() == [1.0, 0.0] and np.isnan(joined.components["right"][2:]).all()
    for rows, part in (([0, 1], older), ([2, 3], newer)):
        assert joined.select(rows).rewards.tolist() == part.rewards.tolist()


def rolled(uid: str, rewards: list[float], version: int) -> RolloutResult:
    keys, tags = [f"{uid}_g{i}" for i in range(len(rewards))], [{"weight_version": version}] * len(rewards)
    meta = KVBatchMeta(partition_id="train", keys=tuple(keys), tags=tags)
    return RolloutResult(meta=meta, sample_stats=carry(rewards), metrics={"response_tokens": Sum(4.0)})


def test_rows_of_several_rollouts_keep_their_group_and_the_version_that_sampled_them():
    joined = rolled("a", [1.0, 0.0], 3).concat(rolled("b", [0.5, 0.25], 4))
    assert joined.group_uids == ("a", "a", "b", "b") and joined.weight_versions.tolist() == [3, 3, 4, 4]
    picked = joined.select([2, 1])
    assert picked.group_uids == ("b", "a") and picked.weight_versions.tolist() == [4, 3]
    assert picked.sample_stats.rewards.tolist() == [0.5, 0.0] and joined.metrics["response_tokens"] == Sum(8.0)


def test_the_mean_of_a_component_is_that_of_the_rows_that_have_one():
    assert mean_of_scored(np.array([1.0, math.nan, 0.0, 0.5], dtype=np.float32)) == 0.5
    assert math.isnan(mean_of_scored(np.array([math.nan], dtype=np.float32)))


def test_scalars_come_back_from_json_to_the_last_bit():
    stats = SampleStats(
        rewards=np.asarray([0.1, 1 / 3], dtype=np.float32),
        truncated=np.asarray([True, False]),
        response_lengths=np.asarray([3, 4], dtype=np.int32),
        components={"odd": np.asarray([float("nan"), 0.7], dtype=np.float32)},
        conversations=ConversationStats(
            sample=np.asarray([0, 1], dtype=np.int32),
            is_scored=np.asarray([False, True]),
            endings=np.asarray([7, 0], dtype=np.uint8),
            num_turns=np.asarray([1, 5], dtype=np.int32),
            is_void=np.asarray([False, True]),
        ),
    )
    record = json.loads(json.dumps(stats.to_json()))
    assert record["conversations"]["endings"] == [stats.conversations.ending_of(0).value, "answered"]
    again = SampleStats.from_json(record)
    assert again.rewards.tobytes() == stats.rewards.tobytes() and again.components["odd"].tobytes() == (
        stats.components["odd"].tobytes()
    )
    for name in ("sample", "is_scored", "endings", "num_turns", "is_void"):
        ours, theirs = getattr(again.conversations, name), getattr(stats.conversations, name)
        assert ours.dtype == theirs.dtype and ours.tolist() == theirs.tolist()
    del record["conversations"]
    assert SampleStats.from_json(record).conversations is None
