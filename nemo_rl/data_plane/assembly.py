"""From located chunks to a `TensorDict`: the reading half of the client.

Ragged columns of equal row lengths share one offsets tensor, so that torch treats them as one ragged axis.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from nemo_rl.data_plane.codec import ChunkReader, gather
from nemo_rl.data_plane.columns import Lengths
from nemo_rl.data_plane.ledger import Reply
from nemo_rl.data_plane.schema import FieldSpec

__all__ = ["assemble"]


def assemble(
    specs: Sequence[FieldSpec], located: Reply, payloads: Sequence[memoryview], *, num_rows: int
) -> tuple[TensorDict, int]:
    """The columns of `specs` in the order asked for, and how many payload bytes they use."""
    readers = [ChunkReader(payload) for payload in payloads]
    placements = located["placements"]
    assert isinstance(placements, list), f"malformed reply: {located}"
    runs = {name: placement["runs"] for placement in placements for name in placement["fields"]}
    rows = TensorDict({}, batch_size=[num_rows])
    offsets: list[tuple[Lengths, torch.Tensor]] = []
    for spec in specs:
        column = gather(spec, readers=readers, runs=runs[spec.name])
        if column.objects is not None:
            rows.set(spec.name, NonTensorStack(*[NonTensorData(value) for value in column.objects]))
            continue
        assert column.values is not None
        if column.lengths is not None:
            rows.set(spec.name, _nest_shared(column.values, column.lengths, offsets))
        else:
            rows.set(spec.name, column.values)
    return rows, sum(reader.num_bytes_used for reader in readers)


def _nest_shared(values: torch.Tensor, lengths: Lengths, known: list[tuple[Lengths, torch.Tensor]]) -> torch.Tensor:
    for other, offsets in known:
        if np.array_equal(other, lengths):
            return torch.nested.nested_tensor_from_jagged(values, offsets)
    starts = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=starts[1:])
    known.append((lengths, torch.from_numpy(starts)))
    return torch.nested.nested_tensor_from_jagged(values, known[-1][1])
