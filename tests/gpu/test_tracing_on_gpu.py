"""Parts that the tracer makes of a tensor on a GPU are those of the same tensor on the CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nemo_rl.models.policy.trace_parts import ReducedValues, part_of
from nemo_rl.tracer.reducer import Span, parse_reducer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

REDUCERS = [
    "stats",
    "norm",
    "histogram",
    "digest",
    "tiles(3, rms)",
    "tiles(5, absmax)",
    "topk(4)",
    "full",
    "project(v)",
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("text", REDUCERS)
def test_parts_do_not_depend_on_the_device(text: str, dtype: torch.dtype) -> None:
    tensor = torch.randn(64, 96, generator=torch.Generator().manual_seed(0)).to(dtype)
    tensor[3, 7], tensor[9, 1], tensor[9, 2] = torch.nan, torch.inf, 0.0
    if text.startswith("topk"):
        tensor = tensor.nan_to_num(0.0, 0.0, 0.0) + torch.arange(96) * 1e-3
    span, vectors = Span(0, 96, 96), {"v": torch.linspace(-1, 1, 96)}
    parts = [
        part_of(parse_reducer(text), ReducedValues(given, span, vectors, lambda: np.arange(64, dtype="u8")))
        for given in (tensor, tensor.cuda())
    ]
    np.testing.assert_allclose(parts[1], parts[0], rtol=1e-5, atol=1e-5)
