"""Rows of a batch as the inputs of one pass: what a loss and a model get of columns of one's own."""

from __future__ import annotations

import pytest
import torch

from nemo_rl.models.policy.microbatch import PassShape, build_microbatch
from tests.helpers.tiny_model import tiny_batch

OWN = "patches"


@pytest.mark.parametrize("is_packed", [False, True])
def test_extra_columns_follow_their_rows(is_packed: bool) -> None:
    batch = tiny_batch(4)
    batch[OWN] = [torch.full((row, 3), 1.0 + row) for row in range(4)]
    select_NT = torch.ones_like(batch.tensor("input_ids"), dtype=torch.bool)
    made = build_microbatch(
        batch, [3, 1], select_NT=select_NT, fields=(OWN, "advantages"), is_packed=is_packed, shape=PassShape()
    )
    assert [row.tolist() for row in made.inputs.extras[OWN]] == [[[4.0] * 3] * 3, [[2.0] * 3]]
    assert made.columns[OWN].tolist() == [[[4.0] * 3] * 3, [[2.0] * 3, [0.0] * 3, [0.0] * 3]]
    assert torch.equal(made.columns["advantages"].flatten(), batch.tensor("advantages")[[3, 1]].flatten())


def test_a_pass_without_rows_has_no_extra_rows() -> None:
    batch = tiny_batch(2)
    batch[OWN] = [torch.ones(1, 3)] * 2
    select_NT = torch.ones_like(batch.tensor("input_ids"), dtype=torch.bool)
    made = build_microbatch(batch, [], select_NT=select_NT, fields=(OWN,), is_packed=False, shape=PassShape())
    assert made.inputs.extras[OWN] == () and made.columns[OWN].numel() == 0
