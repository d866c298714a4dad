"""The models of `test_data_plane_model` and `test_ledger` find these faults when they are planted, one by one.

Each fault is one that a data plane once had. The ledger's own invariants are off: the model alone must see it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, run_state_machine_as_test

from nemo_rl.data_plane.client.leases import LeaseRenewer
from nemo_rl.data_plane.client.ledger_client import LedgerClient
from nemo_rl.data_plane.ledger import claims as ledger_claims
from nemo_rl.data_plane.ledger import state as ledger_state
from nemo_rl.data_plane.ledger.capacity import Capacity
from tests.property.test_data_plane_model import DataPlaneHistory
from tests.property.test_ledger import LedgerHistory

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

Plant = Callable[[pytest.MonkeyPatch], None]


class _Bag(set[str]):
    """Counts what was added, again and again."""

    def __init__(self) -> None:
        self._num_added = 0

    def add(self, key: str) -> None:
        super().add(key)
        self._num_added += 1

    def __len__(self) -> int:
        return self._num_added


def groups_count_puts(patch: pytest.MonkeyPatch) -> None:
    group = ledger_state.LedgerGroup
    patch.setattr(ledger_state, "LedgerGroup", lambda: group(put=_Bag()))


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


class PureHistory(LedgerHistory):
    validate = False


CASES: list[tuple[Plant, type[RuleBasedStateMachine]]] = [
    (groups_count_puts, HistoryOfGroups),
    (claims_hold_one_version, HistoryOfGroups),
    (old_metas_match_rows_made_again, History),
    (claims_stay_with_the_client, History),
    (writes_ignore_the_claim_of_their_meta, History),
    (late_releases_end_the_heartbeat_of_a_new_claim, History),
    (lapsed_claims_still_count, History),
    (cleared_rows_keep_their_bytes, PureHistory),
    (rewritten_rows_keep_their_bytes, PureHistory),
]


@pytest.mark.slow
@pytest.mark.parametrize(("plant", "machine"), CASES, ids=[plant.__name__ for plant, _ in CASES])
def test_the_model_finds(plant: Plant, machine: type[RuleBasedStateMachine], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        run_state_machine_as_test(machine, settings=SETTINGS)
