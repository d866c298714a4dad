"""NeMo-RL's data plane interface, as its trainer uses it, over our stores: names, meanings and errors."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from tensordict import NonTensorStack, TensorDict
from torch.nested import as_nested_tensor

from nemo_rl.data_plane.interfaces import DataPlaneClient
from nemo_rl.data_plane.nemo_rl_client import NemoRlClient, SampleMeta
from nemo_rl.errors import DataPlaneTimeout, SchemaMismatch
from tests.helpers.data_planes import PLANES, Plane

OVER = ["noop", "shm", "ray-producer", "transfer_queue-native"]
IDS = [f"u{i // 2}_g{i % 2}" for i in range(4)]
FIELDS = ["input_ids", "input_lengths", "token_mask", "sample_mask", "prev_logprobs"]


def _param(name: str) -> object:
    mode = PLANES[name].modes[-1]
    return pytest.param((name, mode), marks=[pytest.mark.slow] if PLANES[name].needs_ray else [], id=f"{name}-{mode}")


over_stores = pytest.mark.parametrize("plane", [_param(name) for name in OVER], indirect=True)


def nested(*rows: list[float], dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return as_nested_tensor([torch.tensor(row, dtype=dtype) for row in rows], layout=torch.jagged)


def first_write(client: NemoRlClient, partition: str) -> SampleMeta:
    columns = TensorDict(
        {
            "input_ids": nested([1, 2, 3], [4], [5, 6], [7, 8, 9, 10]),
            "input_lengths": torch.tensor([3, 1, 2, 4]),
            "sample_mask": torch.ones(4),
            "prompt_ids_for_adv": torch.arange(8).reshape(4, 2),
        },
        batch_size=[4],
    )
    return client.put_samples(
        IDS, partition, columns, [{"std": float(i), "weight_version": np.int64(3)} for i in range(4)]
    )


def write_logprobs(client: DataPlaneClient, partition: str, ids: list[str]) -> None:
    """The stage of another process: it has never seen how the partition was declared."""
    own = NemoRlClient(client)
    found = own.get_samples(ids, partition, ["input_ids", "input_lengths"])
    rows = [row.float() / 4 for row in found["input_ids"].unbind()]
    own.put_samples(
        ids, partition, TensorDict({"prev_logprobs": as_nested_tensor(rows, layout=torch.jagged)}, [len(ids)])
    )


@over_stores
def test_a_step_of_the_trainer(plane: Plane) -> None:
    client = NemoRlClient(plane.owner)
    client.register_partition("nemo", FIELDS, 4, ["prev_lp", "train"], enums={"kind": ["a"]})
    plane.partitions.append("nemo")
    meta = first_write(client, "nemo")
    assert (meta.sample_ids, meta.size, meta.task_name) == (IDS, 4, None)
    assert meta.fields == ["input_ids", "input_lengths", "sample_mask", "prompt_ids_for_adv"]
    assert meta.tags[2] == {"std": 2.0, "weight_version": 3} and meta.sequence_lengths is None

    rows = client.get_data(meta)
    assert [row.tolist() for row in rows["input_ids"].unbind()] == [[1, 2, 3], [4], [5, 6], [7, 8, 9, 10]]
    assert rows["input_ids"].dtype == torch.int64 and rows["input_lengths"].dtype == torch.int64
    assert rows["prompt_ids_for_adv"].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert client.get_data(meta.subset([2, 0]), ["sample_mask"])["sample_mask"].shape == (2,)

    assert client.claim_meta("nemo", "train", ["prev_logprobs"], 4, blocking=False).sample_ids == []
    assert not client.check_consumption_status("nemo", ["prev_lp"])
    first = client.claim_meta("nemo", "prev_lp", ["input_ids"], 3, dp_rank=0)
    assert first.sample_ids == IDS[:3] and first.tags[1]["std"] == 1.0 and first.task_name == "prev_lp"
    assert client.claim_meta("nemo", "prev_lp", ["input_ids"], 3).sample_ids == IDS[3:]
    assert client.claim_meta("nemo", "prev_lp", ["input_ids"], 3, blocking=False).size == 0
    with pytest.raises(DataPlaneTimeout, match="0 unclaimed, 4 done"):  # a claim is final: there is no lease to expire
        plane.owner.get_meta("nemo", "prev_lp", ["input_ids"], 1, consumer_id="c", timeout_s=0.05)
    assert client.check_consumption_status("nemo", ["prev_lp"])
    assert not client.check_consumption_status("nemo", ["prev_lp", "train"])

    plane.peer.work(write_logprobs, "nemo", IDS[1:])
    ready = client.claim_meta("nemo", "train", ["input_ids", "prev_logprobs"], 4, timeout_s=20.0)
    assert ready.sample_ids == IDS[1:]
    again = client.get_samples([IDS[3], IDS[1], IDS[3]], "nemo", ["prev_logprobs", "sample_mask"])
    assert [row.tolist() for row in again["prev_logprobs"].unbind()] == [
        [1.75, 2.0, 2.25, 2.5],
        [1.0],
        [1.75, 2.0, 2.25, 2.5],
    ]
    client.clear_samples(IDS[:1], "nemo")
    with pytest.raises(KeyError, match="u0_g0"):
        client.get_samples(IDS, "nemo", ["input_ids"])
    client.clear_samples(None, "nemo")
    client.clear_samples(None, "nowhere")
    assert plane.owner.kv_list("nemo") == {} and client.check_consumption_status("nemo", ["train"])


@over_stores
def test_columns_come_back_as_they_were_put_and_errors_are_those_of_the_trainer(plane: Plane) -> None:
    client = NemoRlClient(plane.owner)
    client.register_partition("nemo", FIELDS, 1, ["train"])
    plane.partitions.append("nemo")
    objects = [{"role": "user"}, ["a", 1], None]
    columns = {
        "turn_roles": np.array(objects, dtype=object),
        "turn_contents": NonTensorStack("x", "y", "z"),
        "total_reward": torch.tensor([1.5, 0.0, -1.0], dtype=torch.bfloat16),
        "routed_experts": torch.arange(24, dtype=torch.int16).reshape(3, 2, 2, 2),
        "token_mask": nested([1, 0], [1], [0, 0, 1], dtype=torch.bool),
    }
    client.put_samples(IDS[:3], "nemo", columns)
    # Another group's rows are longer; a column's dtype and the dims of an entry stay.
    client.put_samples(IDS[3:], "nemo", {"routed_experts": torch.zeros(1, 5, 2, 2, dtype=torch.int16)})
    rows = client.get_samples(IDS[:3], "nemo", list(columns))
    assert rows["turn_roles"].tolist() == objects and list(rows["turn_contents"]) == ["x", "y", "z"]
    assert torch.equal(rows["total_reward"], columns["total_reward"])
    assert torch.equal(rows["routed_experts"], columns["routed_experts"])
    assert [row.tolist() for row in rows["token_mask"].unbind()] == [[True, False], [True], [False, False, True]]
    both = client.get_samples(IDS[2:], "nemo", ["routed_experts"])["routed_experts"]
    assert [len(row) for row in both.unbind()] == [2, 5]
    with pytest.raises(SchemaMismatch, match="float32"):
        client.put_samples(IDS[:1], "nemo", {"routed_experts": torch.rand(1, 5, 2, 2)})

    assert client.put_samples([], "nemo", {}).size == 0
    assert client.get_samples([], "nemo", ["total_reward"]).batch_size == torch.Size([0])
    for ids, field in ((["gone"], "total_reward"), (IDS[3:], "total_reward"), (IDS[:1], "never")):
        with pytest.raises(KeyError):
            client.get_samples(ids, "nemo", [field])
    with pytest.raises(KeyError):
        client.put_samples(["x"], "nowhere", {"total_reward": torch.zeros(1)})
    with pytest.raises(KeyError, match="unknown task"):
        client.claim_meta("nemo", "other", ["total_reward"], 1)
    assert not client.check_consumption_status("nemo", ["other"])
    with pytest.raises(ValueError, match="names no fields"):
        client.get_data(SampleMeta(partition_id="nemo", sample_ids=IDS[:1]))
    started = time.monotonic()
    with pytest.raises(TimeoutError, match="never"):
        client.claim_meta("nemo", "train", ["never"], 1, timeout_s=0.2)
    assert time.monotonic() - started < 20
    client.register_partition("nemo", [], 1, ["train"])
    assert len(plane.owner.kv_list("nemo")) == 4
    client.register_partition("nemo", [], 1, ["train", "log"])
    assert plane.owner.kv_list("nemo") == {}


def test_metas_combine_as_the_trainer_expects() -> None:
    meta = SampleMeta(
        partition_id="p",
        sample_ids=["a", "b", "c"],
        fields=["x"],
        sequence_lengths=[1, 2, 3],
        extra_info={"pad_to_multiple": 8},
        tags=[{"n": 0}, {"n": 1}, {"n": 2}],
    )
    picked = meta.subset([2, 0])
    assert (picked.sample_ids, picked.sequence_lengths, picked.tags) == (["c", "a"], [3, 1], [{"n": 2}, {"n": 0}])
    picked.stamp_tags({"std": [0.5, 1.5]})
    assert picked.tags[0] == {"n": 2, "std": 0.5} and meta.tags[2] == {"n": 2}
    with pytest.raises(ValueError, match="expected 2 values"):
        picked.stamp_tags({"std": [0.5]})
    assert meta.slice(1, 99).sample_ids == ["b", "c"] and meta.slice(5, 9).size == 0
    other = SampleMeta(partition_id="p", sample_ids=["d"], sequence_lengths=[4], extra_info={"other": 1})
    joined = meta.concat(other)
    assert joined.sample_ids == ["a", "b", "c", "d"] and joined.sequence_lengths == [1, 2, 3, 4]
    assert joined.tags is None and joined.fields == ["x"] and joined.extra_info == {"pad_to_multiple": 8}
    with pytest.raises(ValueError, match="partition 'p'"):
        meta.concat(SampleMeta(partition_id="q"))
    assert meta.drop([0, 0, 2]).sample_ids == ["b"] and meta.drop([2, 1, 0]) is None
    assert meta.with_fields(["y", "x"]).fields == ["x", "y"]
    with pytest.raises(ValueError, match="one per sample id"):
        SampleMeta(partition_id="p", sample_ids=["a"], tags=[])
    assert SampleMeta(partition_id="p").size == 0
