"""What a failed test of a GPU would leave to those behind it: process groups, and tensors that its traceback holds."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator

import pytest

from nemo_rl.distributed.collectives import destroy_process_group


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    megatron = sys.modules.get("megatron.core.parallel_state")
    if megatron is not None:
        megatron.destroy_model_parallel()
    destroy_process_group()
    gc.collect()
