"""Claims under a clock that the test moves."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from nemo_rl.config.data_plane import DataPlaneConfig
from nemo_rl.data_plane.adapters.noop import NoopStore, SharedNoopStore
from nemo_rl.data_plane.address import DataPlaneAddress, LedgerAddress
from nemo_rl.data_plane.client.ledger_client import LedgerClient
from nemo_rl.data_plane.column_io import write_columns
from nemo_rl.data_plane.interfaces import KVBatchMeta
from nemo_rl.data_plane.ledger.host import InProcessHost, LedgerService, build_ledger
from nemo_rl.data_plane.metrics_endpoint import view_of
from nemo_rl.errors import FieldNotProduced, KeysNotFound, LeaseExpired
from tests.helpers.data_planes import ids_column, keys_of

# So long that no heartbeat is sent during a test: only the test's clock makes claims expire.
CONFIG = DataPlaneConfig(impl="noop", lease_s=3600.0)


@dataclass
class Bench:
    """A ledger whose clock stands still, and clients of it."""

    now: float = 0.0
    clients: list[LedgerClient] = field(default_factory=list)

    def __post_init__(self) -> None:
        ledger = build_ledger(CONFIG, run_id="r", validate=True)
        self.service = LedgerService(ledger, clock=lambda: self.now)
        self.store = NoopStore()
        address = DataPlaneAddress(
            run_id="r", config=CONFIG, ledger=LedgerAddress(kind="in_process", run_id="r"), process_id=0
        )
        for _ in range(3):
            host = InProcessHost(self.service, is_owner=False)
            self.clients.append(LedgerClient(host=host, store=SharedNoopStore(self.store), address=address))
        self.clients[0].register_partition("p", ["input_ids", "prev_logprobs"], 99, ["prev_lp", "train"])
        self.clients[0].kv_batch_put(keys_of(1), "p", {"input_ids": ids_column([1] * 4)})

    def claim(self, client: int, count: int = 2, task: str = "prev_lp") -> KVBatchMeta:
        return self.clients[client].get_meta("p", task, ["input_ids"], count, consumer_id="c", blocking=False)

    def write(self, client: int, meta: KVBatchMeta) -> None:
        self.clients[client].kv_batch_put(meta.keys, "p", {"prev_logprobs": torch.zeros(len(meta), 1)})

    def pass_lease(self) -> None:
        self.now += CONFIG.lease_s + 1


@pytest.fixture
def bench() -> object:
    bench = Bench()
    yield bench
    for client in bench.clients:
        client.close()


def test_a_late_writer_whose_rows_were_handed_on_is_refused(bench: Bench) -> None:
    slow = bench.claim(0)
    bench.pass_lease()
    heir = bench.claim(1)
    assert heir.keys == slow.keys
    with pytest.raises(LeaseExpired, match="2 rows has ended; they went to consumer 'c@"):
        bench.write(0, slow)
    assert len(bench.store._chunks) == 1
    bench.write(1, heir)
    with pytest.raises(LeaseExpired, match="a consumer that finished them"):
        bench.write(0, slow)
    assert bench.clients[0].check_consumption_status("p", ["prev_lp"]) is False


def test_a_late_release_of_rows_that_were_handed_on_is_refused(bench: Bench) -> None:
    slow = bench.claim(0, task="train")
    bench.pass_lease()
    heir = bench.claim(1, task="train")
    with pytest.raises(LeaseExpired):
        bench.clients[0].release(slow)
    bench.clients[1].release(heir)


def test_a_watcher_sees_who_holds_what_and_a_lease_that_has_run_out_holds_nothing(bench: Bench) -> None:
    def seen() -> tuple[dict[str, int], dict[str, int]]:
        view = view_of(InProcessHost(bench.service, is_owner=False), timeout_s=5)
        return view.tasks["p"]["train"], view.rows_held()

    slow, held = bench.claim(0, task="train"), bench.clients[0]._link.label
    assert seen() == ({"pending": 2, "leased": 2, "done": 0}, {held: 2})
    bench.pass_lease()
    assert seen() == ({"pending": 4, "leased": 0, "done": 0}, {})
    heir, holds = bench.claim(1, count=3, task="train"), bench.clients[1]._link.label
    assert seen() == ({"pending": 1, "leased": 3, "done": 0}, {holds: 3})
    bench.clients[1].release(heir.subset([0]))
    assert seen() == ({"pending": 1, "leased": 2, "done": 1}, {holds: 2})
    bench.clients[1].kv_clear([heir.keys[0], heir.keys[1]], "p")
    assert seen() == ({"pending": 1, "leased": 1, "done": 0}, {holds: 1}) and slow.keys == heir.keys[:2]


@pytest.mark.parametrize("who", [0, 1, 2])
def test_a_meta_whose_claim_has_ended_ends_no_other_claim(bench: Bench, who: int) -> None:
    """Whoever uses it: the client that claimed, the one that holds the rows now, or a third one."""
    slow, slow_train = bench.claim(0), bench.claim(0, task="train")
    bench.pass_lease()
    heir, heir_train = bench.claim(1), bench.claim(1, task="train")
    assert (heir.keys, heir_train.keys) == (slow.keys, slow_train.keys)
    logprobs = {"prev_logprobs": torch.zeros(2, 1)}
    with pytest.raises(LeaseExpired, match="2 rows has ended; they went to consumer 'c@"):
        write_columns(bench.clients[who], slow, logprobs)
    with pytest.raises(LeaseExpired, match="they went to consumer"):
        bench.clients[who].release(slow_train)
    assert not bench.clients[0].check_consumption_status("p", ["train"])
    assert bench.clients[1]._leases.held("p", heir.keys).keys() == {"prev_lp", "train"}, "the heartbeat goes on"
    write_columns(bench.clients[1], heir, logprobs)
    bench.clients[1].release(heir_train)


def test_a_client_that_claims_its_own_rows_again_does_not_end_the_new_claim_with_the_old_meta(bench: Bench) -> None:
    slow = bench.claim(0, task="train")
    bench.pass_lease()
    again = bench.claim(0, task="train")
    with pytest.raises(LeaseExpired):
        bench.clients[0].release(slow)
    bench.clients[0].release(again)


def test_a_late_writer_is_refused_also_when_nobody_took_its_rows(bench: Bench) -> None:
    slow = bench.claim(0)
    bench.pass_lease()
    chunks = len(bench.store._chunks)
    with pytest.raises(LeaseExpired, match="nobody yet: no heartbeat came for 1.0 s beyond the lease"):
        bench.write(0, slow)
    assert len(bench.store._chunks) == chunks
    with pytest.raises(FieldNotProduced):
        bench.clients[1].kv_batch_get(slow.keys, "p", ["prev_logprobs"])
    assert bench.claim(1, 9).keys == ("u0_g0", "u0_g1", "u0_g2", "u0_g3")


def test_a_late_release_is_refused_also_when_nobody_took_its_rows(bench: Bench) -> None:
    slow = bench.claim(0, task="train")
    bench.pass_lease()
    with pytest.raises(LeaseExpired, match="nobody yet"):
        bench.clients[0].release(slow)
    with pytest.raises(LeaseExpired, match="nobody yet"):
        bench.clients[1].release(slow)
    assert bench.claim(1, 9, task="train").keys[:2] == slow.keys


def test_a_lease_holds_until_its_last_moment_and_each_heartbeat_renews_it(bench: Bench) -> None:
    mine, host = bench.claim(0), InProcessHost(bench.service, is_owner=False)
    for _ in range(3):
        bench.now += CONFIG.lease_s - 1
        assert host.call("heartbeat", {"claims": [1]}, timeout_s=1) == {"ended": []}
    bench.now += CONFIG.lease_s - 0.5
    bench.write(0, mine)
    assert bench.claim(1, 9).keys == ("u0_g2", "u0_g3")


def test_only_what_lapsed_is_handed_on_and_in_the_old_order(bench: Bench) -> None:
    first = bench.claim(0, 3)
    bench.write(0, first.subset([1]))
    bench.pass_lease()
    assert bench.claim(1, 9).keys == ("u0_g0", "u0_g2", "u0_g3")


def test_a_heartbeat_takes_a_lapsed_claim_up_again(bench: Bench) -> None:
    mine = bench.claim(0)
    bench.pass_lease()
    assert not bench.clients[1].check_consumption_status("p", ["prev_lp"])
    host = InProcessHost(bench.service, is_owner=False)
    assert host.call("heartbeat", {"claims": [1, 99]}, timeout_s=1) == {"ended": [99]}
    assert bench.claim(1, 9).keys == ("u0_g2", "u0_g3")
    bench.write(0, mine)
    assert bench.clients[0].check_consumption_status("p", ["prev_lp"])


def test_clearing_rows_ends_their_claims(bench: Bench) -> None:
    mine = bench.claim(0)
    bench.clients[1].kv_clear(None, "p")
    with pytest.raises(LeaseExpired, match="they were cleared"):
        bench.write(0, mine)
    with pytest.raises(KeysNotFound):
        bench.write(1, mine)
    bench.clients[0].release(mine)


def test_a_put_under_the_claim_of_another_task_keeps_that_claim(bench: Bench) -> None:
    train = bench.claim(1, 4, task="train")
    bench.write(0, bench.claim(0, 4))
    assert bench.claim(0, 4, task="train").keys == ()
    bench.clients[1].release(train)
    assert bench.clients[0].check_consumption_status("p", ["train", "prev_lp"])
