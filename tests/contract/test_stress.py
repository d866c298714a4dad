"""Eight writers and readers at once: no lost, duplicated or foreign row. 100,000 operations over all adapters in
`make test-full`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from nemo_rl.data_plane.adapters.noop import NoopStore
from nemo_rl.data_plane.address import DataPlaneAddress
from nemo_rl.data_plane.client.ledger_client import LedgerClient
from nemo_rl.data_plane.interfaces import Parts
from nemo_rl.data_plane.ledger.host import InProcessHost, LedgerService, build_ledger
from tests.helpers.case_selection import num_examples
from tests.helpers.data_plane_workload import FIELDS, TASK, run_all, stress
from tests.helpers.data_planes import NOOP, Plane, open_plane

VERY_MANY_TURNS = 1500
TURNS = {"noop": 60, "noop-socket": 120, "shm": 150, "ray-producer": 30, "ray-holder": 12, "ray-node": 40}
"""Turns of six operations and more for each worker; under Ray and sockets an operation takes milliseconds."""
FEW_TURNS = 10
"""Of the other adapters."""


@pytest.mark.slow
@pytest.mark.few_planes
def test_no_row_is_lost_duplicated_or_foreign(plane: Plane) -> None:
    stress(plane, num_examples(TURNS.get(plane.name, FEW_TURNS)))


@pytest.mark.slow
@pytest.mark.full
def test_no_row_is_lost_in_very_many_operations() -> None:
    # A short lease ends while a thread waits for a core, and its rows are then rightly handed out again.
    with open_plane("noop", validate=False, lease_s=60.0) as plane:
        stress(plane, VERY_MANY_TURNS)
        plane.settle()


class SwappingStore(NoopStore):
    """Once, two chunks of a read change places."""

    num_gets = 0

    def get(self, chunk_ids: Sequence[str], *, timeout_s: float, handles: Mapping[str, object]) -> list[Parts]:
        payloads = super().get(chunk_ids, timeout_s=timeout_s, handles=handles)
        self.num_gets += 1
        if self.num_gets > 20 and len(payloads) > 1 and len(payloads[0]) and _size(payloads[0]) == _size(payloads[1]):
            payloads[:2] = payloads[1::-1]
        return payloads


def _size(parts: Parts) -> int:
    return sum(part.nbytes for part in parts)


def test_two_rows_that_change_places_do_not_go_unseen() -> None:
    config = NOOP.model_copy(update={"chunk_bytes": 64})
    service = LedgerService(build_ledger(config, run_id="r"))
    host = InProcessHost(service, is_owner=True)
    address = DataPlaneAddress(run_id="r", config=config, ledger=host.address, process_id=1)
    client = LedgerClient(host=host, store=SwappingStore(), address=address)
    for partition in ("rows", "to claim"):
        client.register_partition(partition, list(FIELDS), 100_000, [TASK])
    with pytest.raises(AssertionError, match="foreign or torn content"):
        run_all([(client, False)], ("rows", "to claim"), 50)
    client.close()
