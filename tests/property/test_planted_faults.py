"""The model of clients and the ledger's specification find these faults when they are planted, one by one.

Each fault is one that a data plane once had. The ledger's own invariants are off: the rules alone must see it. Faults
of one line are in `tests/mutants/data_plane.yaml`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, run_state_machine_as_test

from nemo_rl.data_plane.client.ledger_client import LedgerClient
from nemo_rl.data_plane.client.link import LeaseRenewer
from nemo_rl.data_plane.keys import group_uid
from nemo_rl.data_plane.ledger import claims as ledger_claims
from nemo_rl.data_plane.ledger import state as ledger_state
from nemo_rl.data_plane.ledger.capacity import Capacity
from tests.helpers.ledger_exhaustive import ALPHABETS, explore
from tests.helpers.ledger_random import search
from tests.property.test_data_plane_model import DataPlaneHistory

SETTINGS = settings(
    max_examples=200,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
    print_blob=False,
)
"""Examples until the fault is found; the same in each run."""

MOST_OPERATIONS = 8
"""Operations of the exhaustive histories; the full check has half as many again."""

Plant = Callable[[pytest.MonkeyPatch], None]


def groups_count_puts(patch: pytest.MonkeyPatch) -> None:
    add = ledger_state.Partition.add_row

    def add_row(self, key, *, owner, now):
        row = add(self, key, owner=owner, now=now)
        put = self.groups[group_uid(key)].put
        put.remove(key)
        put.add(f"put {row.sequence}")
        return row

    patch.setattr(ledger_state.Partition, "add_row", add_row)


def claims_hold_one_version(patch: pytest.MonkeyPatch) -> None:
    """A row that was rewritten alone, or made again, keeps its group from ever being handed out."""
    pick = ledger_claims.pick_rows

    def pick_of_one_version(partition, cursor, *, needed, batch_size, groups):
        keys = pick(partition, cursor, needed=needed, batch_size=batch_size, groups=groups)
        found = ledger_claims.versions_of(partition, keys, needed)
        return keys if all(isinstance(version, int) for version in found.values()) else []

    patch.setattr(ledger_claims, "pick_rows", pick_of_one_version)


def old_metas_match_rows_made_again(patch: pytest.MonkeyPatch) -> None:
    forget = ledger_state.Partition.remove_row

    def remove_row(self, key):
        pieces = forget(self, key)
        self.cleared.pop(key)
        return pieces

    patch.setattr(ledger_state.Partition, "remove_row", remove_row)


def claims_stay_with_the_client(patch: pytest.MonkeyPatch) -> None:
    """A release or a write with a meta of somebody else ends whatever claim there is."""
    patch.setattr(LeaseRenewer, "claims_of", lambda self, partition_id, keys, meta: self.held(partition_id, keys))
    check = ledger_claims.release

    def release(partition, task_name, *, keys, claims, now):
        held = dict(claims.get(task_name, {}))
        for key in keys:
            lease = partition.tasks[task_name].leases.get(key)
            if key not in held and lease is not None and lease.expires > now:
                held[key] = lease.claim_id
        return check(partition, task_name, keys=keys, claims={task_name: held}, now=now)

    patch.setattr(ledger_claims, "release", release)


def writes_ignore_the_claim_of_their_meta(patch: pytest.MonkeyPatch) -> None:
    put = LedgerClient._put
    patch.setattr(
        LedgerClient, "_put", lambda self, operation, asked: put(self, operation, replace(asked, claimed=None))
    )


def late_releases_end_the_heartbeat_of_a_new_claim(patch: pytest.MonkeyPatch) -> None:
    def forget(self: LeaseRenewer, partition_id: str, task_name: str, claims: Mapping[str, int]) -> None:
        with self._lock:
            for key in claims:
                self._held.get((partition_id, task_name), {}).pop(key, None)

    patch.setattr(LeaseRenewer, "forget_claims", forget)


def lapsed_claims_still_count(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ledger_claims, "check_held", lambda partition, keys, claims, *, now: None)


def cleared_rows_keep_their_bytes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Capacity, "shrink", lambda self, partition, piece: None)


def rewritten_rows_keep_their_bytes(patch: pytest.MonkeyPatch) -> None:
    attach = ledger_state.FamilyColumn.attach

    def attach_and_forget(self, keys, chunk):
        left = attach(self, keys, chunk)
        for piece in left:
            piece.chunk.cells -= len(piece.fields)
        return [piece._replace(fields=frozenset()) for piece in left]

    patch.setattr(ledger_state.FamilyColumn, "attach", attach_and_forget)


class History(DataPlaneHistory):
    validate = False


class HistoryOfGroups(History):
    @initialize(group_size=st.just(3))
    def register(self, group_size: int) -> None:
        super().register(group_size)


CLIENT_CASES: list[tuple[Plant, type[DataPlaneHistory]]] = [
    (groups_count_puts, HistoryOfGroups),
    (claims_hold_one_version, HistoryOfGroups),
    (old_metas_match_rows_made_again, History),
    (claims_stay_with_the_client, History),
    (writes_ignore_the_claim_of_their_meta, History),
    (late_releases_end_the_heartbeat_of_a_new_claim, History),
    (lapsed_claims_still_count, History),
]
LEDGER_CASES: list[tuple[Plant, str | None]] = [
    (groups_count_puts, "groups"),
    (claims_hold_one_version, "groups"),
    (old_metas_match_rows_made_again, "versions"),
    (claims_stay_with_the_client, None),
    (lapsed_claims_still_count, "rows"),
    (cleared_rows_keep_their_bytes, "versions"),
    (rewritten_rows_keep_their_bytes, "versions"),
]
"""A fault, and the alphabet whose histories show it; None when only random ones do."""


@pytest.mark.slow
@pytest.mark.parametrize(("plant", "machine"), CLIENT_CASES, ids=[plant.__name__ for plant, _ in CLIENT_CASES])
def test_the_model_of_clients_finds(
    plant: Plant, machine: type[RuleBasedStateMachine], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        run_state_machine_as_test(machine, settings=SETTINGS)


@pytest.mark.slow
@pytest.mark.parametrize(("plant", "alphabet"), LEDGER_CASES, ids=[plant.__name__ for plant, _ in LEDGER_CASES])
def test_the_specification_finds(plant: Plant, alphabet: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    difference = search(50_000, seed=0)
    assert difference is not None and difference.problem.startswith("Difference")
    print(f"{plant.__name__}: found after {difference.found_after}, {len(difference.history)} of them are enough")
    if alphabet is not None:
        (chosen,) = (known for known in ALPHABETS if known.name == alphabet)
        *_, last = explore(chosen, MOST_OPERATIONS, validate=False)
        assert last.difference is not None and last.difference.problem.startswith("Difference")
        print(f"{plant.__name__}: found after {last.difference.found_after}, with {last.depth} operations")
