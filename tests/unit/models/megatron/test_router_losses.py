"""The sums of the balance losses that megatron-core's routers keep: read, and set to 0."""

from __future__ import annotations

import pytest
import torch

from nemo_rl.models.megatron.mcore import clear_router_losses, get_moe_metrics_tracker, moe_utils, router_losses

pytestmark = pytest.mark.slow


@pytest.mark.skipif(get_moe_metrics_tracker is not None, reason="megatron-core 0.17 and later keep them elsewhere")
def test_the_sums_of_the_routers_are_read_and_cleared() -> None:
    # Of other tests in this process.
    moe_utils.get_moe_layer_wise_logging_tracker().clear()
    for layer, value in ((1, 2.0), (3, 0.5)):
        moe_utils.save_to_aux_losses_tracker("load_balancing_loss", torch.tensor(value), layer, 3)
    assert [values.tolist() for values in router_losses()] == [[2.0, 0.0, 0.5]]
    clear_router_losses()
    assert sum(float(values.sum()) for values in router_losses()) == 0
