"""A worker follows the driver's plan or none: changed and unsealed views are refused by name."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nemo_rl.distributed.collectives import check_plans
from nemo_rl.distributed.packing import PackPlan
from nemo_rl.errors import SchemaMismatch

PLAN = PackPlan(microbatches=(((0, 3), (1,)), ((2,), (4,))), steps=(2,), pad_to=8)


def test_a_view_that_the_driver_made_passes_and_so_does_no_plan():
    check_plans(PLAN.for_rank(1), rank=1, replica=())
    check_plans(None, rank=0, replica=())


@pytest.mark.parametrize(
    "changed",
    [
        replace(PLAN.for_rank(1), pad_to=16),
        replace(PLAN.for_rank(1), steps=(1, 1)),
        replace(PLAN.for_rank(1), packed=True),
        replace(PLAN.for_rank(1), microbatches=(((1,), (0,)),)),
    ],
)
def test_a_view_that_changed_on_its_way_is_refused(changed):
    digest = PLAN.for_rank(1).sealed_digest
    with pytest.raises(SchemaMismatch, match=f"pack plan of rank 5: its part changed .* digest {digest}, got digest"):
        check_plans(changed, rank=5, replica=())


def test_a_plan_that_a_worker_made_itself_is_refused():
    with pytest.raises(SchemaMismatch, match="sealed it with no digest"):
        check_plans(PLAN, rank=0, replica=())
