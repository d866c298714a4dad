"""Three clients of one data plane against a plain dict, over random histories, with a clock that the test moves.

`PlaneModel` says what is right. Metas go from client to client. Every answer and every refusal must be the model's, and
the ledger checks its invariants after each request. `test_planted_faults` plants faults and sees that they are found.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, rule

from nemo_rl.config.data_plane import DataPlaneConfig
from nemo_rl.data_plane.adapters.noop import NoopStore, SharedNoopStore
from nemo_rl.data_plane.address import DataPlaneAddress
from nemo_rl.data_plane.client.ledger_client import LedgerClient
from nemo_rl.data_plane.interfaces import KVBatchMeta
from nemo_rl.data_plane.ledger import state as ledger_state
from nemo_rl.data_plane.ledger.host import InProcessHost, LedgerService, build_ledger
from nemo_rl.data_plane.ledger.host_socket import LedgerServer, SocketLedgerHost
from tests.helpers.case_selection import num_examples
from tests.helpers.data_plane_model import FIELDS, WRITES, Claim, PlaneModel, keys_in_groups

LEASE_S = 3000.0
"""On the test's clock; the real heartbeat, every third of it, never comes."""
CONFIG = DataPlaneConfig(impl="noop", timeout_s=20.0, lease_s=LEASE_S, chunk_bytes=48)
PARTITION = "p"
KEYS = keys_in_groups(3)

some_keys = st.lists(st.sampled_from(KEYS), unique=True, min_size=1, max_size=5)
some_fields = st.lists(st.sampled_from(FIELDS), unique=True, min_size=1, max_size=4)
client_index = st.sampled_from([0, 1, 2])


class DataPlaneHistory(RuleBasedStateMachine):
    """Puts, partial puts, rewrites, reads, claims, releases, writes under claims, clears and time."""

    host_kind = "in_process"
    validate = True
    metas = Bundle("metas")
    claims = Bundle("claims")

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.max_remembered, ledger_state.MAX_REMEMBERED_KEYS = ledger_state.MAX_REMEMBERED_KEYS, 2
        self.clients = self.connect()

    def connect(self) -> list[LedgerClient]:
        service = LedgerService(build_ledger(CONFIG, run_id="r", validate=self.validate), clock=lambda: self.now)
        if self.host_kind == "socket":
            server = LedgerServer(service)
            hosts = [SocketLedgerHost(server.address, server=server if i == 0 else None) for i in range(3)]
        else:
            hosts = [InProcessHost(service, is_owner=i == 0) for i in range(3)]
        owned = NoopStore()
        address = DataPlaneAddress(run_id="r", config=CONFIG, ledger=hosts[0].address, process_id=1)
        stores = (owned, SharedNoopStore(owned), SharedNoopStore(owned))
        return [LedgerClient(host=h, store=s, address=address) for h, s in zip(hosts, stores, strict=True)]

    def teardown(self) -> None:
        ledger_state.MAX_REMEMBERED_KEYS = self.max_remembered
        for client in reversed(self.clients):
            client.close()

    @initialize(group_size=st.sampled_from([None, 2, 3]))
    def register(self, group_size: int | None) -> None:
        self.model = PlaneModel(
            self.clients,
            partition=PARTITION,
            keys=KEYS,
            group_size=group_size,
            lease_s=LEASE_S,
            clock=lambda: self.now,
        )
        # Claims need rows: a history starts with some.
        self.model.put(0, KEYS[:5], ["input_ids", "sample_mask"], 2, is_wrong=False, with_tags=True)

    @rule(
        target=metas,
        who=client_index,
        keys=some_keys,
        names=st.lists(st.sampled_from(FIELDS), unique=True, max_size=4),
        length=st.integers(0, 4),
        is_wrong=st.integers(0, 9).map(lambda n: n == 0),
        with_tags=st.booleans(),
    )
    def put(self, who: int, keys: list[str], names: list[str], length: int, is_wrong: bool, with_tags: bool) -> object:
        return _if_any(self.model.put(who, keys, names, length, is_wrong=is_wrong, with_tags=with_tags))

    @rule(who=client_index, keys=st.lists(st.sampled_from(KEYS), unique=True, max_size=6), names=some_fields)
    def read(self, who: int, keys: list[str], names: list[str]) -> None:
        self.model.read(who, keys, names)

    @rule(who=client_index, meta=metas | claims.map(lambda claim: claim[1]), names=some_fields)
    def read_meta(self, who: int, meta: KVBatchMeta, names: list[str]) -> None:
        self.model.read_meta(who, meta, names)

    @rule(
        target=claims,
        who=client_index,
        task=st.sampled_from(list(WRITES)),
        names=st.lists(st.sampled_from(["input_ids", "sample_mask"]), unique=True, min_size=1),
        count=st.integers(3, 6),
    )
    def claim(self, who: int, task: str, names: list[str], count: int) -> object:
        return _if_any(self.model.claim(who, task, names, count))

    @rule(target=claims, who=client_index, task=st.sampled_from(list(WRITES)))
    def let_a_claim_lapse_and_claim_again(self, who: int, task: str) -> object:
        first = self.model.claim(who, task, ["input_ids"], 6)
        self.now += 3100
        again = self.model.claim(who, task, ["input_ids"], 6)
        return multiple(*[claim for claim in (first, again) if claim is not None])

    @rule(who=client_index, claim=claims, part=st.sampled_from([slice(None), slice(1), slice(1, None)]))
    def release(self, who: int, claim: Claim, part: slice) -> None:
        self.model.release(who, claim, part)

    @rule(
        who=client_index,
        claim=claims,
        name=st.sampled_from(["prev_logprobs", "sample_mask"]),
        seconds=st.sampled_from([0.0, 3100.0]),
    )
    def write_under_claim(self, who: int, claim: Claim, name: str, seconds: float) -> None:
        self.now += seconds
        self.model.write_under_claim(who, claim, name)

    @rule(who=client_index, task=st.sampled_from(list(WRITES)))
    def ask_whether_all_is_consumed(self, who: int, task: str) -> None:
        self.model.ask_whether_all_is_consumed(who, task)

    @rule(who=client_index, keys=st.lists(st.sampled_from(KEYS), max_size=2, unique=True))
    def clear_some(self, who: int, keys: list[str]) -> None:
        self.model.clear(who, keys)

    @rule(who=client_index, key=st.sampled_from(KEYS))
    def make_again(self, who: int, key: str) -> None:
        self.model.clear(who, [key])
        self.model.put(who, [key], ["input_ids", "sample_mask"], 1, is_wrong=False, with_tags=False)

    @rule(who=client_index, is_time=st.integers(0, 4).map(lambda n: n == 0))
    def clear_all(self, who: int, is_time: bool) -> None:
        if is_time:
            self.model.clear(who, None)

    @rule(seconds=st.sampled_from([100.0, 2000.0, 3100.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @staticmethod
    def held_by(client: LedgerClient) -> dict[str, dict[str, int]]:
        return client._leases.held(PARTITION, KEYS)

    @invariant()
    def the_list_and_the_counts_agree(self) -> None:
        if not hasattr(self, "model"):
            return
        for client, held in zip(self.clients, self.model.held, strict=True):
            known = {(task, key): number for task, keys in self.held_by(client).items() for key, number in keys.items()}
            assert known == held, "the heartbeat of a claim ended, or goes on in vain"
        self.model.check_list_and_counts()


class SocketHistory(DataPlaneHistory):
    """The same over the loopback socket."""

    host_kind = "socket"


def _if_any(made: object) -> object:
    """What a rule adds to its bundle: nothing when it made nothing."""
    return multiple() if made is None else made


DataPlaneHistory.TestCase.settings = settings(max_examples=num_examples(200), stateful_step_count=50, deadline=None)
SocketHistory.TestCase.settings = settings(max_examples=10, stateful_step_count=25, deadline=None)
test_clients_follow_the_model = DataPlaneHistory.TestCase
test_clients_over_a_socket_follow_the_model = SocketHistory.TestCase
