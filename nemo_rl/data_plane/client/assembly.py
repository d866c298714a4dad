"""From located chunks to columns: the reading half of the client.

`assemble` gives jagged columns, `assemble_padded` a dense batch straight from the chunks, so that each byte is copied
once. Ragged columns of equal row lengths share one offsets tensor, so that torch treats them as one ragged axis.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from nemo_rl.data_plane.chunks.columns import Lengths
from nemo_rl.data_plane.codec import ChunkReader, Run, gather, gather_padded
from nemo_rl.data_plane.interfaces import Parts
from nemo_rl.data_plane.ledger.ledger import Reply
from nemo_rl.data_plane.schema import FieldSpec
from nemo_rl.distributed.batched_data_dict import BatchedDataDict

if TYPE_CHECKING:
    from tensordict import TensorDict

__all__ = ["Located", "assemble", "assemble_padded"]


@dataclass(kw_only=True, slots=True)
class Located:
    """The chunks of one read, and where its rows are in them."""

    specs: Sequence[FieldSpec]
    """Fields in the order asked for."""
    reply: Reply
    payloads: Sequence[Parts]
    num_rows: int
    readers: list[ChunkReader] = field(init=False)
    runs: dict[str, Sequence[Run]] = field(init=False)

    def __post_init__(self) -> None:
        self.readers = [ChunkReader(payload) for payload in self.payloads]
        placements = self.reply["placements"]
        assert isinstance(placements, list), f"malformed reply: {self.reply}"
        self.runs = {name: placement["runs"] for placement in placements for name in placement["fields"]}

    @property
    def num_bytes(self) -> int:
        """Bytes that the store has moved."""
        return sum(part.nbytes for payload in self.payloads for part in payload)

    @property
    def num_bytes_used(self) -> int:
        """Bytes of the columns asked for."""
        return sum(reader.num_bytes_used for reader in self.readers)


def assemble(located: Located) -> TensorDict:
    """The columns in the order asked for, in memory of their own."""
    from tensordict import NonTensorData, NonTensorStack, TensorDict  # noqa: PLC0415 - see `tables`

    rows = TensorDict({}, batch_size=[located.num_rows])
    offsets: list[tuple[Lengths, torch.Tensor]] = []
    for spec in located.specs:
        column = gather(spec, readers=located.readers, runs=located.runs[spec.name])
        if column.objects is not None:
            rows.set(spec.name, NonTensorStack(*[NonTensorData(value) for value in column.objects]))
            continue
        assert column.values is not None
        if column.lengths is not None:
            rows.set(spec.name, _nest_shared(column.values, column.lengths, offsets))
        else:
            rows.set(spec.name, column.values)
    return rows


def assemble_padded(located: Located, *, pad_values: Mapping[str, float], pad_to: int | None = None) -> BatchedDataDict:
    """The columns as a dense batch; see `DataPlaneClient.get_padded`."""
    batch = BatchedDataDict()
    for spec in located.specs:
        runs = located.runs[spec.name]
        if spec.is_ragged:
            width = pad_to if spec.is_token_aligned else None
            pad = pad_values.get(spec.name, 0.0)
            batch[spec.name] = gather_padded(spec, readers=located.readers, runs=runs, pad=pad, width=width)
            continue
        column = gather(spec, readers=located.readers, runs=runs)
        rows = column.values if column.objects is None else column.objects
        assert rows is not None
        batch[spec.name] = rows
    return batch


def _nest_shared(values: torch.Tensor, lengths: Lengths, known: list[tuple[Lengths, torch.Tensor]]) -> torch.Tensor:
    for other, offsets in known:
        if np.array_equal(other, lengths):
            return torch.nested.nested_tensor_from_jagged(values, offsets)
    starts = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=starts[1:])
    known.append((lengths, torch.from_numpy(starts)))
    return torch.nested.nested_tensor_from_jagged(values, known[-1][1])
