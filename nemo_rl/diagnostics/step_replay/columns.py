"""`SnapshotColumns`: the columns of a kept step, as dense batches of the rows that a rank works on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from nemo_rl.algorithms.kept_steps.folder import ROLLOUT_FILE, STEP_FILE, UPDATE_FILE, SnapshotFolder
from nemo_rl.algorithms.kept_steps.record import StepSnapshot
from nemo_rl.data_plane.chunks.ragged import materialize
from nemo_rl.data_plane.extra_columns import is_listed, rows_as_list
from nemo_rl.data_plane.schema import ROUTE_FIELDS, FieldSpec
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.errors import CheckpointError
from nemo_rl.jagged import nest, offsets_of
from nemo_rl.models.policy.routes.worker_replay import ROUTES
from nemo_rl.routes.columns import decode_routes
from nemo_rl.routes.shape import MISSING, RouteShape

__all__ = ["SnapshotColumns"]

INPUT_IDS = "input_ids"


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotColumns:
    """The columns of one step; rows are counted in the order of the rollout."""

    keys: tuple[str, ...]
    lengths: tuple[int, ...]
    path: Path
    """Folder of the step."""
    rollout: dict[str, torch.Tensor]
    update: dict[str, torch.Tensor]
    places: dict[int, int]
    """Row -> its place in the columns of the update."""
    lists: tuple[str, ...] = ()
    """Columns of which a batch holds one tensor per row."""

    @classmethod
    def read(cls, folder: SnapshotFolder, step: StepSnapshot, *, extras: Sequence[FieldSpec] = ()) -> SnapshotColumns:
        """
        Raises:
            CheckpointError: a file is torn, or holds columns of other rows than the step's.
        """
        assert step.rows is not None, "a step without rows has no columns"
        rollout, update = folder.columns()
        for name, columns, count in (
            (ROLLOUT_FILE, rollout, len(step.rows.keys)),
            (UPDATE_FILE, update, len(step.trained or ())),
        ):
            for column, values in columns.items():
                found = values.size(0) if values.dim() else 0
                if found != count:
                    raise CheckpointError(
                        f"{folder.path / name}: column {column!r}: expected {count} rows as in {STEP_FILE}, got {found}"
                    )
        if rollout and INPUT_IDS not in rollout:
            raise CheckpointError(
                f"{folder.path / ROLLOUT_FILE}: expected the columns of a rollout with {INPUT_IDS!r}, got "
                f"{', '.join(sorted(rollout))}"
            )
        return cls(
            keys=step.rows.keys,
            lengths=step.rows.lengths,
            path=folder.path,
            rollout=rollout,
            update=update,
            places={row: place for place, row in enumerate(step.trained or ())},
            lists=tuple(spec.name for spec in extras if is_listed(spec)),
        )

    def has(self, name: str, rows: Sequence[int]) -> bool:
        """Return whether the column was kept of all these rows."""
        if name in self.update:
            return all(row in self.places for row in rows)
        return name in self.rollout

    def rows(self, name: str, rows: Sequence[int]) -> torch.Tensor:
        """Return the column of these rows, jagged where it is kept so; of the update where it is there."""
        in_update = name in self.update
        if not in_update and name not in self.rollout:
            raise CheckpointError(f"{self.path}: neither {ROLLOUT_FILE} nor {UPDATE_FILE} has the column {name!r}")
        column = self.update[name] if in_update else self.rollout[name]
        index = [self.places[row] for row in rows] if in_update else list(rows)
        if not column.is_nested:
            return column[torch.tensor(index, dtype=torch.int64)]
        offsets, values = offsets_of(column).tolist(), column.values()
        parts = [values[offsets[at] : offsets[at + 1]] for at in index]
        return nest(torch.cat(parts), torch.tensor([len(part) for part in parts], dtype=torch.int64))

    def batch(self, fields: Sequence[str], rows: Sequence[int], *, width: int, pad_token_id: int) -> BatchedDataDict:
        """Return the columns of these rows, dense, as a worker gets them from the data plane."""
        columns = {name: self.rows(name, rows) for name in fields}
        listed = {name: rows_as_list(columns.pop(name)) for name in self.lists if name in columns}
        batch = materialize(columns, pad_values={"input_ids": float(pad_token_id)}, pad_to=width)
        batch.update(listed)
        batch["keys"] = [self.keys[row] for row in rows]
        return batch

    def add_routes(self, batch: BatchedDataDict, rows: Sequence[int], shape: RouteShape) -> None:
        """Add the kept routes, decoded, where there are any."""
        names = [name for name in ROUTE_FIELDS if self.has(name, rows)]
        if not names:
            return
        routes = decode_routes({name: self.rows(name, rows) for name in names}, shape)
        width = batch.tensor("input_ids").shape[1]
        batch.update(materialize({ROUTES: routes}, pad_values={ROUTES: float(MISSING)}, pad_to=width))
