"""The table of columns: one `FieldSpec` row per field, and every list that follows from it.

The codec, padding, fetch lists, the checks before a put, the check of stage declarations and the docs table are all
derived from `FIELDS`. A new column is one new row here, or an extra column (`extra_field`) declared by a partition.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, cast

from nemo_rl.distributed.worker_pass import RowPass, WorkerPass
from nemo_rl.errors import SchemaMismatch, name_some

__all__ = [
    "DP_TRAIN_FIELDS",
    "FIELDS",
    "LP_SEED_FIELDS",
    "ROUTE_FIELDS",
    "TOKEN_ALIGNED_FIELDS",
    "FieldSpec",
    "docs_table",
    "extra_field",
    "reads_of",
    "resolve_fields",
    "route_fields",
    "spec_from_record",
    "spec_to_record",
    "stage_of_task",
    "writes_of",
    "writes_that_end_claims",
]

Dim: TypeAlias = str | int
PadValue: TypeAlias = float | Literal["token"]

EXTRAS = "extras"
"""Family of extra columns, behind which those say who reads them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FieldSpec:
    """One column.

    Example:
        >>> FIELDS["input_ids"].is_token_aligned, FIELDS["sample_mask"].dims
        (True, ())
    """

    name: str
    dtypes: tuple[str, ...] = ()
    """Accepted torch dtypes by name (`int32`); the first write of a partition settles which one. Empty for objects."""
    dims: tuple[Dim, ...] = ()
    """Dims of one row. `T` is the row's token count, another leading name is a ragged axis of its own, later names
    are settled by the first write of a partition, integers are fixed."""
    is_object: bool = False
    """A JSON-like value per row instead of a tensor."""
    pad: PadValue = 0.0
    """Value to the right of a row in a dense batch; `token` is the tokenizer's pad id."""
    family: str
    """Fields of one family travel in the same chunks."""
    produced_by: str
    """The stage that writes the field first."""
    read_by: tuple[str, ...] = ()
    rewritten_by: tuple[str, ...] = ()
    condition: str | None = None
    """The field exists only when this holds; None means always."""
    may_be_absent: bool = False
    """True where only some runs write the field, so that neither fetch lists nor the end of a claim count on it."""

    @property
    def is_ragged(self) -> bool:
        """Rows differ in their first dim."""
        return not self.is_object and bool(self.dims) and isinstance(self.dims[0], str)

    @property
    def is_token_aligned(self) -> bool:
        return not self.is_object and self.dims[:1] == ("T",)


def _field(
    name: str,
    dtypes: str,
    dims: tuple[Dim, ...] = (),
    *,
    by: str = "rollout",
    to: tuple[str, ...] = (),
    family: str | None = None,
    when: str | None = None,
    always: bool = False,
    pad: PadValue = 0.0,
    rewritten_by: tuple[str, ...] = (),
) -> FieldSpec:
    """Return a row of the table: what depends on a condition may be absent, unless it is `always` counted on."""
    return FieldSpec(
        name=name,
        dtypes=tuple(dtypes.split()),
        dims=dims,
        pad=pad,
        family=family or name,
        produced_by=by,
        read_by=to,
        rewritten_by=rewritten_by,
        condition=when,
        may_be_absent=when is not None and not always,
    )


_PREV, _REFERENCE, _TOPK = WorkerPass.PREV_LOGPROBS, WorkerPass.REFERENCE_LOGPROBS, WorkerPass.TOPK_LOGITS
_TRAIN = (WorkerPass.TRAIN,)
_FORCED = (_PREV, *_TRAIN)
_ROWS = (
    _field("input_ids", "int32", ("T",), family="tokens", pad="token", to=(*WorkerPass, "log")),
    _field("input_lengths", "int32", family="tokens", to=tuple(WorkerPass)),
    _field("generation_logprobs", "float32", ("T",), to=(*RowPass, *_TRAIN, "log")),
    _field(_PREV.column, "float32", ("T",), by=_PREV, to=(*RowPass, *_TRAIN, "log")),
    _field("squared_probs", "float32", ("T",), by=_PREV, to=(RowPass.ADVANTAGES,), when="squared_probs"),
    _field(
        _REFERENCE.column, "float32", ("T",), by=_REFERENCE, to=(*RowPass, *_TRAIN), when="reference_kl", always=True
    ),
    _field("topk_ids", "int32", ("T", "top_k"), family="topk", by=_TOPK, to=_TRAIN, when="distillation"),
    _field("topk_logprobs", "float32", ("T", "events"), family="topk", by=_TOPK, to=_TRAIN, when="distillation"),
    _field("advantages", "float32", by="advantages", to=_TRAIN, when="row_advantages", always=True),
    _field("token_advantages", "float32", ("T",), by=RowPass.ADVANTAGES, to=_TRAIN, when="token_advantages"),
    _field("token_mask", "bool", ("T",), family="tokens", to=(*WorkerPass, *RowPass, "log")),
    _field("sample_mask", "float32", to=tuple(WorkerPass), rewritten_by=("advantages",)),
    _field("sampling_support", "uint8", ("S",), to=_FORCED, when="sampling_support"),
    _field("staleness", "int32", family="advantages", by="advantages", to=_TRAIN, when="staleness"),
    _field("version_spans", "int32", ("S", 2), when="async"),
    _field("turns", "int32", ("turns", 3), to=(RowPass.ADVANTAGES, "log"), when="turns"),
    _field("turn_rewards", "float32", ("turns",), family="turns", to=(RowPass.ADVANTAGES, "log"), when="turns"),
    _field("conversation", "uint8", ("bytes",), family="turns", to=("log",), when="turns"),
    _field("routed_experts", "uint8 int16", ("T", "L", "K"), to=_FORCED, when="routes_whole"),
    _field("routed_experts_bits", "uint8", ("T", "B"), family="routed_experts", to=_FORCED, when="routes_bit_packed"),
    _field("routed_experts_missing", "uint8", ("M",), family="routed_experts", to=_FORCED, when="routes"),
    _field("routed_experts_digests", "int64", ("T", "L"), to=_FORCED, when="route_digests"),
)

FIELDS: Mapping[str, FieldSpec] = {spec.name: spec for spec in _ROWS}


def stage_of_task(task_name: str) -> str:
    """Return the stage a consumer task runs: `prev_lp` runs `prev_logprobs`."""
    return WorkerPass.of_task(task_name) or task_name


def _holds(spec: FieldSpec, conditions: Collection[str] | None) -> bool:
    return conditions is None or spec.condition is None or spec.condition in conditions


def reads_of(stage: str, *, conditions: Collection[str] | None = None) -> tuple[str, ...]:
    """Return fields that `stage` reads, in table order; with `conditions`, without those whose condition is not among
    them.
    """
    return tuple(s.name for s in _ROWS if stage in s.read_by and _holds(s, conditions))


def writes_of(stage: str, *, conditions: Collection[str] | None = None, rewrites: bool = True) -> tuple[str, ...]:
    """Return fields that `stage` produces and, unless `rewrites` is off, those it rewrites."""
    return tuple(
        s.name
        for s in _ROWS
        if (s.produced_by == stage or (rewrites and stage in s.rewritten_by)) and _holds(s, conditions)
    )


def _always_there(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(name for name in names if not FIELDS[name].may_be_absent)


def route_fields(conditions: Collection[str]) -> tuple[str, ...]:
    """Return fields with routes of experts that exist under `conditions`; workers fetch them apart from the rest."""
    return tuple(s.name for s in _ROWS if s.name in ROUTE_FIELDS and s.condition in conditions)


_ROUTE_FAMILIES = ("routed_experts", "routed_experts_digests")
ROUTE_FIELDS: tuple[str, ...] = tuple(s.name for s in _ROWS if s.family in _ROUTE_FAMILIES)
DP_TRAIN_FIELDS: tuple[str, ...] = _always_there(reads_of(WorkerPass.TRAIN))
LP_SEED_FIELDS: tuple[str, ...] = _always_there(reads_of(WorkerPass.PREV_LOGPROBS))
TOKEN_ALIGNED_FIELDS: tuple[str, ...] = tuple(s.name for s in _ROWS if s.is_token_aligned)


def writes_that_end_claims(stage: str) -> tuple[str, ...]:
    """Return fields with which a task of `stage` is done with its rows; what it writes in some runs alone comes with
    them.
    """
    return _always_there(writes_of(stage, rewrites=False))


def extra_field(
    name: str,
    *,
    dtypes: Sequence[str] = (),
    dims: Sequence[Dim] = (),
    is_object: bool = False,
    pad: PadValue = 0.0,
    read_by: Sequence[str] = (),
) -> FieldSpec:
    """Return a column that a partition declares besides the table (image features, environment columns).

    Columns with the same readers are one family, so that a pass that reads one of them moves no others.

    Example:
        >>> extra_field("turn_lengths", dtypes=["int32"], dims=("turns",)).is_ragged
        True
    """
    return FieldSpec(
        name=name,
        dtypes=tuple(dtypes),
        dims=tuple(dims),
        is_object=is_object,
        pad=pad,
        family="+".join((EXTRAS, *sorted(read_by))),
        produced_by="rollout",
        read_by=tuple(read_by),
    )


def resolve_fields(fields: Iterable[str | FieldSpec], *, may_shadow: bool = False) -> tuple[FieldSpec, ...]:
    """Return the specs of a declaration: names of the table, or specs of family `extras`.

    Args:
        may_shadow: an extra column may have the name of a column of the table, and is then no such column.

    Raises:
        SchemaMismatch: an unknown name, a field given twice, or an extra column that is malformed.
    """
    specs: dict[str, FieldSpec] = {}
    for field in fields:
        if isinstance(field, FieldSpec):
            spec = field
            _check_extra(spec, may_shadow=may_shadow)
        else:
            known = FIELDS.get(field)
            if known is None:
                raise SchemaMismatch(
                    f"unknown field {field!r}: expected one of {', '.join(FIELDS)}, or an extra_field(...) declaration"
                )
            spec = known
        if spec.name in specs:
            raise SchemaMismatch(f"field {spec.name!r} is declared twice")
        specs[spec.name] = spec
    return tuple(specs.values())


def _check_extra(spec: FieldSpec, *, may_shadow: bool) -> None:
    if FIELDS.get(spec.name) == spec:
        return
    where = f"extra field {spec.name!r}"
    if spec.name in FIELDS and not may_shadow:
        raise SchemaMismatch(f"{where}: the name belongs to the table of fields; choose another one")
    if spec.family.split("+")[0] != EXTRAS:
        raise SchemaMismatch(
            f"{where}: expected family 'extras', got {spec.family!r}; declare it with extra_field(...)"
        )
    if spec.is_object and (spec.dims or spec.dtypes):
        raise SchemaMismatch(f"{where}: an object column has neither dtypes nor dims")
    if not spec.is_object and not spec.dtypes:
        raise SchemaMismatch(f"{where}: a tensor column needs at least one dtype")
    if "T" in spec.dims[1:]:
        raise SchemaMismatch(f"{where}: 'T' must be the first dim, got {spec.dims}")


def spec_to_record(spec: FieldSpec) -> dict[str, object]:
    return {
        "name": spec.name,
        "dtypes": list(spec.dtypes),
        "dims": list(spec.dims),
        "is_object": spec.is_object,
        "pad": spec.pad,
        "family": spec.family,
        "read_by": [*spec.read_by] if FIELDS.get(spec.name) != spec else [],
    }


def spec_from_record(record: Mapping[str, object]) -> FieldSpec:
    """Return the spec that `spec_to_record` described; fields of the table come back as their table row."""
    name = str(record["name"])
    known = FIELDS.get(name)
    if known is not None and record["family"] == known.family:
        return known
    dtypes, dims, pad, read_by = record["dtypes"], record["dims"], record["pad"], record.get("read_by", ())
    is_well_formed = all(isinstance(part, list | tuple) for part in (dtypes, dims, read_by))
    assert is_well_formed and (isinstance(pad, int | float) or pad == "token"), f"malformed field record: {record}"
    return extra_field(
        name,
        dtypes=cast("Sequence[str]", dtypes),
        dims=cast("Sequence[Dim]", dims),
        is_object=bool(record["is_object"]),
        pad=cast(PadValue, pad),
        read_by=cast("Sequence[str]", read_by),
    )


def docs_table() -> str:
    header = ("field", "dtype", "dims", "pad", "family", "written by", "rewritten by", "read by", "condition")
    rows = [
        (
            f"`{s.name}`",
            "object" if s.is_object else ", ".join(s.dtypes),
            "" if s.is_object else f"`[{', '.join(str(d) for d in s.dims)}]`",
            "" if s.is_object or not s.dims else ("pad token" if s.pad == "token" else f"{s.pad:g}"),
            s.family,
            s.produced_by,
            ", ".join(s.rewritten_by),
            name_some(s.read_by, limit=len(s.read_by)),
            s.condition or "",
        )
        for s in _ROWS
    ]
    lines = [header, tuple("---" for _ in header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"
