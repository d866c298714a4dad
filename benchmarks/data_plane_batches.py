"""The batch that `data_plane.py` moves: ragged GRPO samples, the same on every side of a comparison.

A large batch carries routes `[T, 24, 8]`, a small one does not. What arrives is what a policy worker takes: columns of
one number per token padded, routes row after row. It is checked by the sum of each column in its own dtype, which
touches every byte.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from tensordict import TensorDict
from torch.nn.utils.rnn import pad_sequence

from nemo_rl.data_plane.schema import FieldSpec, extra_field
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.jagged import nest

__all__ = ["ROUTES", "Batch", "make_batch", "pad_raw", "padded_batch", "sums"]

NUM_LAYERS, TOP_K = 24, 8
ROUTES = "routes"


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Jagged columns in memory, as a rollout leaves them."""

    keys: list[str]
    columns: dict[str, torch.Tensor]
    fields: list[str | FieldSpec]
    lengths: list[int]

    @property
    def num_bytes(self) -> int:
        return sum(column.values().nbytes for column in self.columns.values())

    def tensordict(self) -> TensorDict:
        return TensorDict(dict(self.columns), batch_size=[len(self.keys)])


def make_batch(*, routes: bool, num_rows: int, longest: int, seed: int = 0) -> Batch:
    """`num_rows` samples of `longest / 8` to `longest` tokens."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(longest // 8, longest + 1, (num_rows,), generator=generator)
    tokens = int(lengths.sum())
    flat = {
        "input_ids": torch.randint(0, 150_000, (tokens,), generator=generator, dtype=torch.int32),
        "token_mask": torch.ones(tokens, dtype=torch.bool),
        "generation_logprobs": torch.randn(tokens, generator=generator),
    }
    fields: list[str | FieldSpec] = [*flat, "input_lengths", "sample_mask", "prev_logprobs"]
    if routes:
        shape = (tokens, NUM_LAYERS, TOP_K)
        flat[ROUTES] = torch.randint(0, 128, shape, generator=generator, dtype=torch.int16)
        fields.append(extra_field(ROUTES, dtypes=["int16"], dims=("T", NUM_LAYERS, TOP_K)))
    return Batch(
        keys=[f"u{i // 8}_g{i % 8}" for i in range(num_rows)],
        columns={name: nest(values, lengths) for name, values in flat.items()},
        fields=fields,
        lengths=lengths.tolist(),
    )


def padded_batch(batch: Batch) -> BatchedDataDict:
    """The batch as a rollout worker has it: padded, its routes row after row, with lengths and weights of the rows."""
    columns = {
        name: column if name == ROUTES else pad_sequence(list(column.unbind()), batch_first=True)
        for name, column in batch.columns.items()
    }
    columns["input_lengths"] = torch.tensor(batch.lengths, dtype=torch.int32)
    columns["sample_mask"] = torch.ones(len(batch.keys))
    return BatchedDataDict(columns)


def pad_raw(rows: TensorDict, *, with_routes: bool) -> dict[str, torch.Tensor]:
    """What a user of a raw transport does with jagged columns: pads them, and the routes where asked for."""
    columns = {str(name): rows[name] for name in rows.keys()}  # noqa: SIM118
    return {
        name: column if name == ROUTES and not with_routes else pad_sequence(list(column.unbind()), batch_first=True)
        for name, column in columns.items()
    }


def sums(columns: Mapping[str, object]) -> dict[str, float]:
    """The sum of each column in its own dtype (bools as counts)."""
    found: dict[str, float] = {}
    for name, column in columns.items():
        assert isinstance(column, torch.Tensor)
        flat = column.values() if column.is_nested else column
        values = flat.view(torch.uint8) if flat.dtype is torch.bool else flat
        total = values.sum(dtype=torch.int64 if flat.dtype is torch.bool else values.dtype)
        found[name] = float(total)
    return found
