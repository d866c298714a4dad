"""tensordict is recognised where it is loaded, and loaded only by what makes a table."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from nemo_rl.data_plane.chunks.ragged import is_object_stack, is_object_value, is_table


def test_each_kind_is_recognised_and_nothing_else() -> None:
    value = NonTensorData("a")
    stack = NonTensorStack(NonTensorData("a"), NonTensorData("b"))
    assert is_table(TensorDict({}, batch_size=[2]))
    assert is_object_value(value) and not is_object_stack(value)
    assert is_object_stack(stack) and not is_object_value(stack)
    for other in ({"a": 1}, ["a"], torch.ones(2), "a", None):
        assert not is_table(other) and not is_object_value(other) and not is_object_stack(other)


@pytest.mark.slow
def test_a_process_that_makes_no_table_does_not_import_tensordict() -> None:
    modules = "nemo_rl.data_plane.factory, nemo_rl.experience.rollout_worker"
    code = f"import sys, {modules}; sys.exit('tensordict' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=300, check=False).returncode == 0
