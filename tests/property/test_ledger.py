"""The ledger against its specification: every short history, random ones, and those that hypothesis thinks of.

`make check-ledger` tries every history of up to twelve operations, and `make stress-data-plane` a million random ones.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from nemo_rl.data_plane.ledger.claims import Claims
from nemo_rl.data_plane.ledger.ledger import Ledger
from nemo_rl.data_plane.ledger.state import Partition
from tests.helpers import ledger_random
from tests.helpers.case_selection import num_examples
from tests.helpers.checked_ledger import FIELDS, LEASE_S, WRITES, CheckedLedger, problem_of
from tests.helpers.data_plane_stress import stress_ledger
from tests.helpers.ledger_exhaustive import ALPHABETS, CLIENTS, Alphabet, explore
from tests.helpers.ledger_random import KEYS, search
from tests.helpers.ledger_states import digest

QUICK_DEPTH = 6
"""Operations of the histories that are all tried in the suite; two seconds for all alphabets."""
by_name = pytest.mark.parametrize("alphabet", ALPHABETS, ids=lambda alphabet: alphabet.name)


@by_name
def test_every_short_history_follows_the_specification(alphabet: Alphabet) -> None:
    for exploration in explore(alphabet, QUICK_DEPTH):
        assert exploration.difference is None, f"{exploration.difference}"
    assert exploration.depth == QUICK_DEPTH and exploration.num_states > 500


def test_random_histories_follow_the_specification() -> None:
    difference = search(8_000, seed=0, validate=True)
    assert difference is None, f"{difference}"


def release_without_a_look(
    partition: Partition, task_name: str, *, keys: list[str], claims: Claims, now: float
) -> list[str]:
    return [key for key in keys if key in partition.rows and key not in partition.tasks[task_name].done]


def test_a_difference_is_shrunk_to_a_history_that_can_be_run_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("nemo_rl.data_plane.ledger.claims.release", release_without_a_look)
    found = search(20_000, seed=0)
    assert found is not None and "release: expected LeaseExpired" in found.problem
    for at in range(len(found.history)):
        shorter = found.history[:at] + found.history[at + 1 :]
        assert problem_of(shorter, found.limits, validate=False) is None, "an operation can be left out"
    assert len(found.history) <= 12
    assert stress_ledger(20_000, seed=0) == 1
    path = tmp_path / "history.jsonl"
    path.write_text(capsys.readouterr().out.partition("FILE`:\n")[2])
    assert ledger_random.main([str(path)]) == 1
    assert "release: expected LeaseExpired" in capsys.readouterr().out
    monkeypatch.undo()
    assert ledger_random.main([str(path)]) == 0


@pytest.mark.parametrize("alphabet", (ALPHABETS[0], ALPHABETS[-1]), ids=lambda alphabet: alphabet.name)
def test_the_first_difference_of_all_histories_is_a_shortest_one(
    alphabet: Alphabet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It declares, stores, commits and claims, lets the lease end in two halves, and releases."""
    monkeypatch.setattr("nemo_rl.data_plane.ledger.claims.release", release_without_a_look)
    *_, last = explore(alphabet, QUICK_DEPTH)
    assert last.difference is not None and len(last.difference.history) == 7
    assert problem_of(last.difference.history, alphabet.limits, validate=True) == last.difference.problem


def copy_of(ledger: Ledger) -> Ledger:
    """Recover a ledger from its whole state."""
    checked = CheckedLedger(max_rows=1, max_bytes=None)
    checked.ledger = ledger
    saved = checked.save()
    checked.ledger = Ledger(run_id="r", capacity_rows=1, capacity_bytes=None, lease_s=LEASE_S, validate=True)
    checked.load(saved)
    return checked.ledger


def copy_without_claims(ledger: Ledger) -> Ledger:
    """Recover a ledger that has forgotten who renews what."""
    recovered = copy_of(ledger)
    recovered._claims = {}
    return recovered


def test_a_ledger_may_be_recovered_at_any_point_and_must_know_all_that_it_knew() -> None:
    *_, last = explore(ALPHABETS[0], 4, recover=copy_of)
    assert last.difference is None, f"{last.difference}"
    *_, last = explore(ALPHABETS[0], QUICK_DEPTH, recover=copy_without_claims)
    assert last.difference is not None and "heartbeat: ended" in last.difference.problem
    assert search(2_000, seed=0, recover=copy_of) is None
    found = search(20_000, seed=0, recover=copy_without_claims)
    assert found is not None and ("recover", {}) in found.history


def test_a_state_is_known_again_for_other_clients_and_at_another_time() -> None:
    def state_after(first: str, second: str, *, start: float = 0.0, later: float = 0.0) -> bytes:
        checked = CheckedLedger(max_rows=9, max_bytes=None)
        checked.do(ALPHABETS[0].declare)
        checked.do(("pass_time", {"seconds": start}))
        for who, keys in ((first, ["u0_g0"]), (second, ["u1_g0"])):
            checked.do(("put", {"put": who, "partition": "p", "keys": keys, "fields": ["input_ids"]}))
        claim = {"partition": "p", "task": "prev_lp", "fields": ["input_ids"], "count": 1}
        checked.do(("claim", {"claim": second, **claim}))
        checked.do(("pass_time", {"seconds": later}))
        return digest(checked, CLIENTS)

    assert state_after("a", "b") == state_after("c", "a", start=25.0)
    assert state_after("a", "b", later=LEASE_S) == state_after("a", "b", later=2 * LEASE_S)
    assert len({state_after("a", "b", later=later) for later in (0.0, LEASE_S / 2, LEASE_S)}) == 3


def futures_of(alphabet: Alphabet, checked: CheckedLedger) -> tuple[list[bytes], list[bytes]]:
    """Return the states that follow on one, as digests and as they are."""
    here = checked.save()
    digests, states = [], []
    for operation in list(alphabet.operations(checked)):
        checked.load(here)
        checked.do(operation)
        digests.append(digest(checked, CLIENTS))
        states.append(checked.save())
    return digests, states


@by_name
def test_states_that_are_the_same_have_the_same_futures(alphabet: Alphabet) -> None:
    """What the exhaustive check rests on, for every history of three operations."""
    checked = CheckedLedger(**alphabet.limits)
    checked.do(alphabet.declare)
    known: dict[bytes, list[bytes]] = {}
    level, num_met_again = [(digest(checked, CLIENTS), checked.save())], 0
    for _ in range(3):
        following = []
        for name, state in level:
            checked.load(state)
            digests, states = futures_of(alphabet, checked)
            num_met_again += name in known
            assert known.setdefault(name, sorted(digests)) == sorted(digests)
            following += zip(digests, states, strict=True)
        level = following
    assert num_met_again > 10


class LedgerHistory(RuleBasedStateMachine):
    """Puts, rewrites, claims of two tasks, releases, clears, crashes and time; every reply is checked."""

    puts, claims = Bundle("puts"), Bundle("claims")
    some_keys = st.lists(st.sampled_from(KEYS), unique=True, min_size=1, max_size=6)

    def __init__(self) -> None:
        super().__init__()
        self.checked = CheckedLedger(max_rows=24, max_bytes=600)
        self.labels = map(str, itertools.count())

    def do(self, name: str, **arguments: object) -> None:
        self.checked.do((name, arguments))

    @initialize(group_size=st.none() | st.just(3))
    def register(self, group_size: int | None) -> None:
        self.do("register", partition="p", group_size=group_size, num_samples=24)

    @rule(
        target=puts,
        keys=some_keys,
        fields=st.lists(st.sampled_from(FIELDS), unique=True, min_size=1),
        size=st.sampled_from([1, 1, 20, 90]),
        is_ragged=st.booleans(),
        rows_per_chunk=st.sampled_from([1, 2, 100]),
    )
    def store(self, **put: object) -> str:
        label = next(self.labels)
        self.do("store", put=label, partition="p", **put)
        return label

    @rule(target=puts, claim=claims, field=st.sampled_from(["prev_logprobs", "sample_mask"]))
    def store_under_a_claim(self, claim: str, field: str) -> str:
        label = next(self.labels)
        self.do("store", put=label, partition="p", keys=[], fields=[field], under=claim)
        return label

    @rule(put=puts)
    def commit(self, put: str) -> None:
        self.do("commit", put=put)

    @rule(put=puts)
    def crash(self, put: str) -> None:
        self.do("crash", who=put)

    @rule(target=claims, task=st.sampled_from(sorted(WRITES)), count=st.integers(3, 7))
    def claim(self, task: str, count: int) -> str:
        label = next(self.labels)
        self.do("claim", claim=label, partition="p", task=task, fields=["input_ids"], count=count)
        return label

    @rule(claim=claims, part=st.sampled_from([(None, None), (1, None), (None, 1)]))
    def release(self, claim: str, part: tuple[int | None, int | None]) -> None:
        self.do("release", claim=claim, partition="p", part=part)

    @rule(claim=claims)
    def heartbeat(self, claim: str) -> None:
        self.do("heartbeat", claims=[claim])

    @rule(keys=st.none() | some_keys)
    def clear(self, keys: list[str] | None) -> None:
        self.do("clear", partition="p", keys=keys)

    @rule(seconds=st.sampled_from([1.0, 4.0, LEASE_S + 1.0]))
    def pass_time(self, seconds: float) -> None:
        self.do("pass_time", seconds=seconds)

    @invariant()
    def all_that_can_be_read_is_right(self) -> None:
        self.do("look")


LedgerHistory.TestCase.settings = settings(max_examples=num_examples(100), stateful_step_count=40, deadline=None)
test_ledger_follows_the_specification = LedgerHistory.TestCase
