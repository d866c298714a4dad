"""`BatchedDataDict`: named columns of the same rows, inside one process."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Mapping, Sequence

import torch

__all__ = ["BatchedDataDict", "Column"]

Column = torch.Tensor | list[object]


class BatchedDataDict(UserDict[str, Column]):
    """Columns `name -> tensor [N, ...] | list of N objects`; every column has the same N.

    Example:
        >>> batch = BatchedDataDict({"input_ids": torch.zeros(4, 7), "text": ["a", "b", "c", "d"]})
        >>> batch.size, batch.select_indices([3, 0])["text"]
        (4, ['d', 'a'])
    """

    def __setitem__(self, name: str, column: Column) -> None:
        others = [other for other in self.data if other != name]
        if others and len(column) != len(self.data[others[0]]):
            raise ValueError(
                f"column {name!r}: expected {len(self.data[others[0]])} rows as in {others[0]!r}, got {len(column)}"
            )
        super().__setitem__(name, column)

    @property
    def size(self) -> int:
        """Number of rows; 0 without columns."""
        return len(next(iter(self.data.values()))) if self.data else 0

    def tensor(self, name: str) -> torch.Tensor:
        column = self.data[name]
        if not isinstance(column, torch.Tensor):
            raise TypeError(f"column {name!r}: expected a tensor, got {type(column).__name__}")
        return column

    def select_indices(self, indices: Sequence[int]) -> BatchedDataDict:
        """Return the rows at `indices`, in that order (a copy)."""
        rows = [int(i) for i in indices]
        index = torch.as_tensor(rows, dtype=torch.long)
        return BatchedDataDict(
            {
                name: column[index] if isinstance(column, torch.Tensor) else [column[i] for i in rows]
                for name, column in self.data.items()
            }
        )

    def slice(self, start: int, stop: int) -> BatchedDataDict:
        """Return rows `start` to `stop` as views."""
        return BatchedDataDict({name: column[start:stop] for name, column in self.data.items()})

    def chunk(self, num_chunks: int) -> list[BatchedDataDict]:
        """Return equal consecutive parts; the rows must divide."""
        if num_chunks < 1 or self.size % num_chunks:
            raise ValueError(f"{self.size} rows do not divide into {num_chunks} chunks")
        rows = self.size // num_chunks
        return [self.slice(i * rows, (i + 1) * rows) for i in range(num_chunks)]

    def repeat_interleave(self, repeats: int) -> BatchedDataDict:
        """Return each row `repeats` times in a row: a, a, b, b."""
        return self.select_indices([i for i in range(self.size) for _ in range(repeats)])

    def to(self, device: torch.device | str) -> BatchedDataDict:
        """Tensors on another device; lists as they are."""
        return BatchedDataDict(
            {n: c.to(device, non_blocking=True) if isinstance(c, torch.Tensor) else c for n, c in self.data.items()}
        )

    @classmethod
    def from_batches(
        cls, batches: Sequence[Mapping[str, Column]], *, pad_values: Mapping[str, float] | None = None
    ) -> BatchedDataDict:
        """Return rows of all batches; tensors whose second axis differs are padded on the right (0 unless named).

        Raises:
            ValueError: a batch lacks a column that another one has.
        """
        merged = cls()
        names = list(dict.fromkeys(name for batch in batches for name in batch))
        for name in names:
            if lacking := [index for index, batch in enumerate(batches) if name not in batch]:
                raise ValueError(
                    f"column {name!r}: expected in all {len(batches)} batches, batches {lacking} lack it; fill it in "
                    "or drop it everywhere"
                )
            columns = [batch[name] for batch in batches]
            tensors = [column for column in columns if isinstance(column, torch.Tensor)]
            if len(tensors) == len(columns):
                merged[name] = _cat_padded(tensors, (pad_values or {}).get(name, 0))
            else:
                merged[name] = [row for column in columns for row in column]
        return merged


def _cat_padded(columns: Sequence[torch.Tensor], pad: float) -> torch.Tensor:
    if columns[0].dim() < 2:
        return torch.cat(list(columns))
    width = max(column.shape[1] for column in columns)
    padded = [
        torch.cat([c, c.new_full((c.shape[0], width - c.shape[1], *c.shape[2:]), pad)], dim=1)
        if c.shape[1] < width
        else c
        for c in columns
    ]
    return torch.cat(padded)
