"""Routes of a model on given rows, as one file: recorded in any layout, replayed in any other.

safetensors with a manifest in its header: `ids` `[S, L, K]`, `tokens` `[S]`, `lengths` `[N]`, rows end to end in global
order, -1 where a route is missing. Invariant: a file that does not belong to the model, or to the rows, is refused by
name before any pass.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from nemo_rl.diagnostics.runner.prompts import Rows
from nemo_rl.errors import UserError
from nemo_rl.routes.columns import validate_routes
from nemo_rl.routes.digest import route_digests
from nemo_rl.routes.shape import RouteShape
from nemo_rl.utils.files import give_usual_mode, replace_file

__all__ = ["RoutesFile", "read_routes", "write_routes"]

FORMAT, VERSION = "nemo_rl.routes", 1


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutesFile:
    """What a file holds."""

    shape: RouteShape
    model: Mapping[str, object]
    rows: Rows
    routes: torch.Tensor
    """`[S, L, K]` int16, decoded, row after row."""

    def for_rows(self, rows: Rows, *, shape: RouteShape, model: Mapping[str, object], where: Path) -> torch.Tensor:
        """`[N, T, L, K]` int16 for these rows, found by their tokens; -1 in the padding.

        Raises:
            UserError: of another model, or a row is not in the file.
        """
        if self.shape != shape or dict(self.model) != dict(model):
            theirs, ours = {**self.model, **asdict(self.shape)}, {**model, **asdict(shape)}
            differ = [
                f"{name} {theirs.get(name)!r} instead of {ours[name]!r}"
                for name in ours
                if theirs.get(name) != ours[name]
            ]
            raise UserError(f"{where}: routes of another model: {', '.join(differ)}; record them with this one")
        start_of: dict[tuple[int, ...], int] = {}
        start = 0
        for row in self.rows.ids:
            start_of.setdefault(row, start)
            start += len(row)
        width = max(len(row) for row in rows.ids)
        found = torch.full((len(rows.ids), width, *self.routes.shape[1:]), -1, dtype=torch.int16)
        for number, row in enumerate(rows.ids):
            if row not in start_of:
                raise UserError(f"{where}: {_why_not(rows.keys[number], row, self.rows)}; record its routes first")
            found[number, : len(row)] = self.routes[start_of[row] : start_of[row] + len(row)]
        return found


def write_routes(
    path: Path, routes_NTLK: torch.Tensor, rows: Rows, *, shape: RouteShape, model: Mapping[str, object]
) -> Path:
    """Writes the file, or leaves what was there.

    Raises:
        UserError: the disk refuses, or a route is none.
    """
    routes = torch.cat([routes_NTLK[number, : len(row)] for number, row in enumerate(rows.ids)]).contiguous()
    lengths = torch.tensor([len(row) for row in rows.ids])
    tokens = torch.tensor([token for row in rows.ids for token in row])
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "model": dict(model),
        "layers": list(shape.layers),
        "top_k": shape.top_k,
        "num_experts": shape.num_experts,
        "keys": list(rows.keys),
        "digests": _row_digests(routes, rows.ids, shape),
    }
    tensors = {"ids": routes, "tokens": tokens, "lengths": lengths}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, lambda temporary: save_file(tensors, temporary, metadata={FORMAT: json.dumps(manifest)}))
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: routes cannot be written: {error}") from error
    give_usual_mode(path)
    return path


def read_routes(path: Path) -> RoutesFile:
    """Raises:
    UserError: no file of routes, of another version, or damaged.
    """
    try:
        with safe_open(str(path), framework="pt") as file:
            manifest = json.loads((file.metadata() or {})[FORMAT])
            tensors = {name: file.get_tensor(name) for name in ("ids", "tokens", "lengths")}
        if manifest["version"] != VERSION:
            raise UserError(f"{path}: expected version {VERSION} of the routes format, got {manifest['version']!r}")
        shape = RouteShape(
            layers=tuple(manifest["layers"]), top_k=manifest["top_k"], num_experts=manifest["num_experts"]
        )
        lengths = [int(n) for n in tensors["lengths"].tolist()]
        ids = tuple(tuple(part.tolist()) for part in tensors["tokens"].split(lengths))
        rows = Rows(keys=tuple(manifest["keys"]), ids=ids)
        is_whole = manifest["digests"] == _row_digests(tensors["ids"], ids, shape)
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file of routes") from error
    except (OSError, SafetensorError, KeyError, ValueError, TypeError, RuntimeError) as error:
        raise UserError(f"{path}: no file of routes, or a damaged one: {error}") from error
    if not is_whole:
        raise UserError(f"{path}: damaged: its routes are not those that were recorded")
    routes = torch.nested.nested_tensor_from_jagged(tensors["ids"], torch.tensor([0, *lengths]).cumsum(0))
    validate_routes(routes, shape, keys=rows.keys)
    return RoutesFile(shape=shape, model=manifest["model"], rows=rows, routes=tensors["ids"])


def _row_digests(routes: torch.Tensor, rows: Sequence[Sequence[int]], shape: RouteShape) -> list[str]:
    """Of each row: its tokens and their routes."""
    digests_SL = route_digests(routes.long(), shape.layers)
    parts = digests_SL.split([len(row) for row in rows])
    return [
        blake2b(json.dumps([list(row), part.tolist()]).encode(), digest_size=8).hexdigest()
        for row, part in zip(rows, parts, strict=True)
    ]


def _why_not(key: str, row: Sequence[int], held: Rows) -> str:
    same_key = dict(zip(held.keys, held.ids, strict=True)).get(key)
    if same_key is None:
        return f"it has no routes of {key}"
    if len(same_key) != len(row):
        return f"its {key} has {len(same_key)} tokens, this one {len(row)}"
    at = next(i for i, (a, b) in enumerate(zip(same_key, row, strict=True)) if a != b)
    return f"its {key} has token {same_key[at]} at position {at}, this one {row[at]}"
