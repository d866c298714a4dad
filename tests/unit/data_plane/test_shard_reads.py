"""What one rank reads of its shard: the same rows in both forms, each once a step."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from nemo_rl.config.data_plane import DataPlaneConfig
from nemo_rl.data_plane.chunks.ragged import materialize
from nemo_rl.data_plane.factory import build_data_plane_client
from nemo_rl.data_plane.interfaces import DataPlaneClient, KVBatchMeta
from nemo_rl.data_plane.worker_mixin import ShardReads
from nemo_rl.jagged import nest

NAMES = ("input_ids", "sample_mask")
PADS = {"input_ids": 7.0}
LENGTHS = torch.tensor([3, 1, 4])


@pytest.fixture
def stored() -> Iterator[tuple[DataPlaneClient, KVBatchMeta]]:
    client = build_data_plane_client(DataPlaneConfig(impl="noop"), run_id="reads", role="owner")
    client.register_partition("train", NAMES, 3, ["train"])
    columns = {"input_ids": nest(torch.arange(8, dtype=torch.int32), LENGTHS), "sample_mask": torch.ones(3)}
    yield client, client.kv_batch_put(["a_g0", "b_g0", "c_g0"], "train", columns)
    client.close()


def num_gets(client: DataPlaneClient) -> int:
    operations = client.snapshot().operations
    return operations["get_data"].count if "get_data" in operations else 0


def test_both_forms_hold_the_same_rows(stored):
    client, meta = stored
    reads = ShardReads(client, cache_bytes=0)
    dense = reads.padded(meta, NAMES, pad_values=PADS, width=6)
    expected = materialize(reads.ragged(meta, NAMES), pad_values=PADS, pad_to=6)
    assert tuple(dense) == NAMES
    for name in NAMES:
        assert torch.equal(dense[name], expected.tensor(name)), name
    assert dense["input_ids"].tolist()[1] == [3, 7, 7, 7, 7, 7]


def test_a_column_is_fetched_once_until_the_step_ends_or_its_family_is_rewritten(stored):
    client, meta = stored
    reads = ShardReads(client, cache_bytes=1 << 20)
    reads.padded(meta, ["input_ids"], pad_values=PADS, width=4)
    both = reads.padded(meta, NAMES, pad_values=PADS, width=4)
    assert num_gets(client) == 2 and tuple(both) == NAMES, "one for each column"
    reads.padded(meta, NAMES, pad_values=PADS, width=4)
    assert num_gets(client) == 2
    assert reads.padded(meta, NAMES, pad_values=PADS, width=5)["input_ids"].shape == (3, 5)
    assert num_gets(client) == 3, "another width"
    reads.clear()
    reads.padded(meta, NAMES, pad_values=PADS, width=4)
    assert num_gets(client) == 4
    newer = client.kv_batch_put(meta.keys, "train", {"sample_mask": torch.zeros(3)})
    assert reads.padded(newer, ["sample_mask"], pad_values=PADS, width=4)["sample_mask"].sum() == 0


def test_what_does_not_fit_the_limit_is_read_again(stored):
    client, meta = stored
    reads = ShardReads(client, cache_bytes=20)
    for _ in range(2):
        reads.padded(meta, NAMES, pad_values=PADS, width=4)
    assert num_gets(client) == 2, "12 bytes of sample_mask are kept, 48 of input_ids are not"


def test_padding_is_not_counted_as_bytes(stored):
    client, meta = stored
    found = []
    for width in (4, 400):
        client.snapshot(reset=True)
        client.get_padded(meta, NAMES, pad_values=PADS, pad_to=width)
        found.append(client.snapshot().field_bytes)
    assert found == [{"input_ids": 8 * 4, "sample_mask": 3 * 4}] * 2
