"""The record of one tensor, and the tokens that its rows belong to.

Written by `writer`, read by `reader`. Invariant: a record names the row and position of every token that it holds, so
that records of any layout can be put together without knowing how it laid tokens out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields

import torch

from nemo_rl.records.sites import Direction, SiteKind
from nemo_rl.utils.files import FileFormat

__all__ = ["FORMAT", "DimSplit", "RecordManifest", "RecordPlace", "TokenTable"]

FORMAT = "nemo_rl.record"


@dataclass(frozen=True, kw_only=True, slots=True)
class DimSplit:
    """The equal part of the last dimension that a rank holds."""

    index: int
    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordPlace:
    """The site, the pass and the step in which a tensor was seen."""

    kind: SiteKind
    layer: int | None = None
    """Counted from 0 over the whole model; None outside the layers."""
    name: str | None = None
    """Name of the parameter, for its gradient."""
    direction: Direction = Direction.FORWARD
    phase: str = "forward"
    """Pass of the worker: `forward`, `prev_logprobs`, `reference_logprobs` or `train`."""
    update: int = 0
    """Optimizer step within the call."""
    microbatch: int = 0
    """Number of the microbatch on this rank within the optimizer step."""
    is_recomputed: bool = False
    """Seen again when a backward pass ran a layer once more."""

    def as_record(self) -> dict[str, object]:
        """Return the JSON form; what is at its default is left out."""
        return {part.name: value for part in fields(self) if (value := getattr(self, part.name)) != part.default}

    @classmethod
    def of_record(cls, record: Mapping[str, object]) -> RecordPlace:
        """Raises:
        ValueError, TypeError, KeyError: no such record.
        """
        known = {part.name: record[part.name] for part in fields(cls) if part.name in record}
        known["kind"] = SiteKind(str(record["kind"]))
        if "direction" in known:
            known["direction"] = Direction(str(known["direction"]))
        return cls(**known)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenTable:
    """The tokens of a pass on one rank, in the order of a record's rows.

    Example:
        The first two tokens of row "a", and the first one of row "b".
        >>> table = TokenTable(keys=("a", "b"), row_R=torch.tensor([0, 0, 1]), position_R=torch.tensor([0, 1, 0]),
        ...                    token_R=torch.tensor([5, 6, 5]))
        >>> len(table)
        3
    """

    keys: tuple[str, ...]
    """Keys of the rows of the pass."""
    row_R: torch.Tensor
    """`[R]` int64 index into `keys`."""
    position_R: torch.Tensor
    """`[R]` int64 position in the row."""
    token_R: torch.Tensor
    """`[R]` int64 token ids."""

    def __len__(self) -> int:
        return len(self.row_R)


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordManifest:
    """The description of a folder of records: `manifest.json`."""

    run_id: str
    model: Mapping[str, object]
    """Values that must agree between two sides: type, layers, hidden size, vocabulary, experts."""
    layout: Mapping[str, int]
    """Sizes of the parallel axes; `world` is the number of ranks, each of which writes a file."""
    engine: str
    """`dtensor` or `megatron`."""
    precision: str
    selector: str
    phases: tuple[str, ...]
    sites: tuple[Mapping[str, object], ...] = ()
    """Sites that a complete folder holds: `kind`, `layer`, `direction` of each site, over all ranks."""
    unobserved: Mapping[str, str] = field(default_factory=dict)
    """Sites that were asked for and that this model cannot give -> why."""
    tokenizer: str = ""
    """Folder, for texts of tokens."""
    weights: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, object] = field(default_factory=dict)
    """Anything else that a reader may want to see."""
    format: str = FORMAT
    version: int = FileFormat.TENSORS.version

    def as_record(self) -> dict[str, object]:
        return asdict(self)

    @classmethod
    def of_record(cls, record: Mapping[str, object]) -> RecordManifest:
        """Raises:
        TypeError: fields are missing.
        """
        known = {part.name: record[part.name] for part in fields(cls) if part.name in record}
        for name in ("phases", "sites"):
            value = known.get(name, ())
            known[name] = tuple(value) if isinstance(value, list | tuple) else ()
        for name in ("model", "layout", "unobserved"):
            if not isinstance(known.get(name, {}), Mapping):
                raise TypeError(f"{name}: expected an object, got {known[name]!r}")
        sizes = known.get("layout", {})
        if not all(type(size) is int for size in sizes.values()):  # type: ignore[attr-defined]
            raise TypeError(f"layout: expected whole numbers, got {sizes!r}")
        if not all(isinstance(phase, str) for phase in known["phases"]):  # type: ignore[attr-defined]
            raise TypeError(f"phases: expected names, got {known['phases']!r}")
        return cls(**known)  # type: ignore[arg-type]
