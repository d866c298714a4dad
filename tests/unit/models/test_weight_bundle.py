"""Weights survive the trip as bytes, whatever their dtype; requests split and join without a change."""

from __future__ import annotations

import pytest
import torch

from nemo_rl.errors import WorkerError
from nemo_rl.models.generation.interfaces import GenerationOutput, GenerationRequest, SamplingParams
from nemo_rl.models.generation.replicas import join_outputs, split_request
from nemo_rl.models.weight_bundle import WeightBundle

SAMPLING = SamplingParams(temperature=1.0, max_new_tokens=4, stop_token_ids=(0,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool])
def test_a_bundle_keeps_names_shapes_dtypes_and_bits(dtype):
    weights = {"a.weight": torch.randn(3, 4).to(dtype), "scalar": torch.tensor(1).to(dtype)}
    back = dict(WeightBundle.collect(weights.items()))
    assert list(back) == list(weights)
    for name, tensor in weights.items():
        assert back[name].dtype == tensor.dtype and torch.equal(back[name], tensor)


def test_a_bundle_does_not_share_memory_with_the_exported_weights():
    weight = torch.zeros(2)
    bundle = WeightBundle.collect([("w", weight)])
    weight.add_(1)
    first = dict(bundle)["w"]
    assert first.tolist() == [0, 0]
    first.add_(5)
    assert dict(bundle)["w"].tolist() == [0, 0]


def output(rows: list[list[int]], version: int) -> GenerationOutput:
    flat = [token for row in rows for token in row]
    return GenerationOutput(
        token_ids=torch.tensor(flat, dtype=torch.int32),
        logprobs=-torch.tensor(flat, dtype=torch.float32),
        lengths=torch.tensor([len(row) for row in rows], dtype=torch.int64),
        truncated=torch.zeros(len(rows), dtype=torch.bool),
        weight_version=version,
    )


@pytest.mark.parametrize("num_parts", [1, 2, 3, 5])
def test_groups_stay_whole_when_a_request_is_split(num_parts):
    request = GenerationRequest(prompt_ids=((1,), (2,), (3,)), seeds=(10, 11, 20, 21, 30, 31), sampling=SAMPLING)
    parts = split_request(request, num_parts)
    assert [ids for part in parts for ids in part.prompt_ids] == [(1,), (2,), (3,)]
    assert [seed for part in parts for seed in part.seeds] == list(request.seeds)
    assert all(len(part.seeds) == 2 * len(part.prompt_ids) for part in parts)


def test_outputs_join_in_order_and_refuse_mixed_versions():
    joined = join_outputs([output([[1, 2], [3]], 4), output([], 0), output([[5]], 4)])
    assert joined.token_ids.tolist() == [1, 2, 3, 5] and joined.lengths.tolist() == [2, 1, 1]
    assert joined.weight_version == 4
    with pytest.raises(WorkerError, match=r"weight versions \[3, 4\]"):
        join_outputs([output([[1]], 3), output([[2]], 4)])
