"""A tenth of `make chaos`: what nobody else kills in a test, with the cause named and nothing left. `make test` kills a
worker and an actor of the ledger elsewhere.
"""

from __future__ import annotations

import pytest

from tests.helpers.chaos import NAMED, ROLES, Row, hit, table

# A row waits for a start, a step, an end and the last process: minutes where much else runs.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROWS = (
    Row(store="transfer_queue", signal="KILL", role="storage", stage="train"),
    Row(store="ray", signal="KILL", role="ledger", stage="train"),
    Row(store="ray", signal="KILL", role="raylet", stage="train"),
)


@pytest.mark.full
@pytest.mark.parametrize("row", ROWS, ids=[f"{row.store}-{row.signal}-{row.role}" for row in ROWS])
def test_the_run_ends_with_the_cause_named_and_nothing_left(tmp_path, model, row):
    outcome = hit(row, tmp_path, model)
    assert outcome.problems == (), f"{row}: exit code {outcome.code} after {outcome.seconds:.0f} s: {outcome.told}"


def test_the_table_kills_and_stops_every_process_at_every_stage():
    rows = list(table(["transfer_queue", "ray"]))
    assert len(set(rows)) == len(rows) and set(ROWS) <= set(rows)
    assert {row.role for row in rows} == set(ROLES) == set(NAMED) | {"driver"}
    assert {(row.signal, row.stage) for row in rows} == {("KILL", s) for s in ("start", "rollout", "train")} | {
        ("STOP", "train"),
        ("CONT", "train"),
    }
    assert {(row.signal, row.is_async) for row in rows} >= {("KILL", True), ("CONT", True), ("CONT", False)}
