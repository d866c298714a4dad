"""Bytes that are not those that were put are found, with row, field and hop; without checksums they may pass."""

from __future__ import annotations

import random

import pytest
import torch

from nemo_rl.config.data_plane import DataPlaneConfig
from nemo_rl.data_plane.adapters.noop import NoopStore
from nemo_rl.data_plane.address import DataPlaneAddress
from nemo_rl.data_plane.client.ledger_client import LedgerClient
from nemo_rl.data_plane.ledger.host import InProcessHost, LedgerService, build_ledger
from nemo_rl.errors import PayloadCorrupt
from nemo_rl.jagged import nest
from tests.helpers.corrupt_payloads import FIELDS, BlockStore, CorruptingStore, Trials


def client_over(store: NoopStore, *, checksums: bool = True) -> LedgerClient:
    config = DataPlaneConfig(impl="noop", checksums=checksums, chunk_bytes=400)
    host = InProcessHost(LedgerService(build_ledger(config, run_id="r")), is_owner=True)
    address = DataPlaneAddress(run_id="r", config=config, ledger=host.address, process_id=1)
    client = LedgerClient(host=host, store=store, address=address)
    client.register_partition("p", list(FIELDS), 99, [])
    return client


@pytest.mark.parametrize("store", [NoopStore, BlockStore])
def test_every_flipped_cut_exchanged_or_stale_payload_is_found(store: type[NoopStore]) -> None:
    client = client_over(store())
    trials = Trials(client, "p", random.Random(0))
    trials.run(300)
    assert trials.problems == [] and set(trials.counts) == {"flip", "cut", "exchange", "stale"}
    client.close()


def test_an_error_names_row_column_and_where_the_bytes_changed() -> None:
    client = client_over(BlockStore())
    store = CorruptingStore(client._link.store)
    client._link.store = store  # type: ignore[assignment]
    ids = nest(torch.arange(60, dtype=torch.int32), torch.tensor([20, 20, 20]))
    meta = client.kv_batch_put(["a_g0", "b_g0", "c_g0"], "p", {"input_ids": ids})
    for num_flipped, hop in ((1, "on the way from the store"), (2, "in the store, or on the way to it")):
        calls: list[int] = []

        def flipped(found: list, calls: list[int] = calls, most: int = num_flipped) -> list:
            calls.append(len(found))
            if len(calls) > most:
                return found
            content = bytearray(found[1][0])
            content[0] ^= 4
            return [found[0], [memoryview(bytes(content))], *found[2:]]

        store.corrupt = flipped
        with pytest.raises(PayloadCorrupt, match=rf"field 'input_ids' of rows .*b_g0.*changed {hop}"):
            client.get_data(meta, ["input_ids"])
        store.corrupt = None
        assert len(calls) == 2, "a second read tells where the bytes changed"
    assert client.get_data(meta, ["input_ids"])["input_ids"].values().tolist() == list(range(60))
    client.close()


def test_without_checksums_a_flipped_value_passes() -> None:
    client = client_over(NoopStore(), checksums=False)
    trials = Trials(client, "p", random.Random(0))
    trials.run(40)
    assert any("not found" in problem for problem in trials.problems)
    client.close()


def test_columns_that_are_not_read_are_not_checked() -> None:
    client = client_over(BlockStore())
    store = CorruptingStore(client._link.store)
    client._link.store = store  # type: ignore[assignment]
    lengths = torch.tensor([30, 30])
    columns = {
        "input_ids": nest(torch.arange(60, dtype=torch.int32), lengths),
        "token_mask": nest(torch.ones(60).bool(), lengths),
    }
    meta = client.kv_batch_put(["a_g0", "b_g0"], "p", columns)

    def last_byte(found: list) -> list:
        content = bytearray(found[0][-1])
        content[-1] ^= 1
        return [[*found[0][:-1], memoryview(bytes(content))], *found[1:]]

    store.corrupt = last_byte
    assert client.get_data(meta, ["input_ids"])["input_ids"].values().tolist() == list(range(60))
    with pytest.raises(PayloadCorrupt, match="token_mask"):
        client.get_data(meta, ["token_mask"])
    client.close()
