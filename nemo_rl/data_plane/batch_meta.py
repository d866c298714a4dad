"""`KVBatchMeta`: the rows that a call is about. Keys, lengths, tags, versions, claims, the pack plan; never tensors.

Made by the client, handed from process to process in compact form. The one invariant: everything per row is aligned
with `keys`, whatever the meta was cut from or joined from. `extra_info` holds facts about a batch as a whole, for
people and for code of the user's own: JSON-like, copied, with finite numbers; nothing there decides what runs. A meta
that was cut keeps them; one that was joined has those of all parts. `shard_meta_for_dp` cuts a meta by the driver's
plan. `RowFunction` is work on rows without the model: workers run it next to the data plane (`TQWorkerMixin.map_rows`),
and the driver gets a few numbers per row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from math import isfinite
from types import MappingProxyType
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np
import torch

from nemo_rl.data_plane.chunks.tags import Tags, TagTable, TagValue, picker, plain_column
from nemo_rl.data_plane.chunks.wire import Counted, Packed, message_bytes, pack_rows, unpack_rows
from nemo_rl.distributed.packing import PackPlan
from nemo_rl.errors import SchemaMismatch, name_some

__all__ = ["KVBatchMeta", "RowFunction", "RowMapOutput", "RowMapResult", "RowResults", "Version", "shard_meta_for_dp"]


JsonLike: TypeAlias = "bool | int | float | str | Sequence[JsonLike] | Mapping[str, JsonLike] | None"
_PLANS = frozenset(
    ("micro_batch_indices", "micro_batch_lengths", "elem_counts_per_gb", "pad_to_multiple", "global_forward_pad_seqlen")
)
"""Names under which NeMo-RL keeps a plan in its `extra_info`; here it has a typed field."""
_PLAIN_INTS = {int}
_DEPTH = 32
"""Containers in one another: deeper ones are a loop, or no facts about a batch."""


def checked_info(given: Mapping[str, JsonLike], where: str) -> dict[str, JsonLike]:
    """Return a copy.

    Raises:
        SchemaMismatch: a value is not JSON-like, or an entry has the name of a plan.
    """
    where = f"{where}: extra_info"
    if not isinstance(given, Mapping):
        raise SchemaMismatch(f"{where}: expected a mapping, got {type(given).__name__}")
    for name in given.keys() & _PLANS:
        raise SchemaMismatch(f"{where}: {name!r} is a plan; it belongs in KVBatchMeta.pack")
    return {_text_key(name, where): _copied(value, f"{where}[{name!r}]") for name, value in given.items()}


def join_info(parts: Sequence[Mapping[str, JsonLike]]) -> dict[str, JsonLike]:
    """Return the entries of all parts.

    Raises:
        SchemaMismatch: two parts have other values under one name.
    """
    joined: dict[str, JsonLike] = {}
    for part in parts:
        for name, value in part.items():
            if joined.setdefault(name, value) != value:
                raise SchemaMismatch(
                    f"concat: extra_info[{name!r}] differs: {joined[name]!r} and {value!r}; give one value to all parts"
                )
    return joined


def _text_key(name: object, where: str) -> str:
    if not isinstance(name, str):
        raise SchemaMismatch(f"{where}: expected texts as names, got {name!r}")
    return name


def _copied(value: JsonLike, where: str, depth: int = 0) -> JsonLike:
    """Return a JSON-like value that shares nothing with the given one; tuples become lists, as JSON has them."""
    if depth > _DEPTH:
        raise SchemaMismatch(f"{where}: expected at most {_DEPTH} containers in one another")
    # Exact types: numbers of numpy are floats, too, and a pickle of them is not small.
    if value is None or type(value) in (bool, int, str) or (type(value) is float and isfinite(value)):
        return value
    if isinstance(value, Mapping):
        return {_text_key(name, where): _copied(part, f"{where}[{name!r}]", depth + 1) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_copied(part, f"{where}[{at}]", depth + 1) for at, part in enumerate(value)]
    shown = value if isinstance(value, float) else type(value).__name__
    raise SchemaMismatch(f"{where}: expected a JSON-like value (texts, finite numbers, lists, mappings), got {shown}")


_T = TypeVar("_T")

Version: TypeAlias = int | tuple[int, ...]
"""One number for all rows, or one per row, aligned with the keys."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KVBatchMeta(Counted):
    """The rows of a batch by key: keys, lengths, tags and the pack plan; never tensors.

    Example:
        >>> meta = KVBatchMeta(partition_id="train", keys=("a_g0", "a_g1"), sequence_lengths=(3, 5))
        >>> meta.subset([1]).keys
        ('a_g1',)
    """

    partition_id: str
    keys: tuple[str, ...]
    task_name: str | None = None
    """The consumer that claimed these rows, or None."""
    fields: tuple[str, ...] = ()
    """Columns known to be written for every row."""
    sequence_lengths: tuple[int, ...] | None = None
    """Tokens per row, aligned with `keys`."""
    tags: Sequence[Tags] | None = None
    """Small primitives per row, aligned with `keys`."""
    versions: Mapping[str, Version] = field(default_factory=dict)
    """Family -> version the ledger gave it; a fetch that finds another one fails. Rows that were rewritten alone have
    versions of their own: then one per row."""
    claims: tuple[int, ...] | None = None
    """The claim under which each row was handed out, for `release` and for writes by a client that has this meta;
    None when nothing was claimed."""
    pack: PackPlan | None = None
    """The rows of each microbatch on each rank, as indices into `keys`; None without a plan."""
    extra_info: Mapping[str, JsonLike] = field(default_factory=dict)
    """Facts about the batch as a whole; the library reads none of them."""
    _packed: list[Packed] = field(default_factory=list, init=False, repr=False, compare=False)
    """The compact form of keys, lengths and tags, once it was needed."""

    def __post_init__(self) -> None:
        set_ = object.__setattr__
        for what in ("keys", "fields"):
            if isinstance(getattr(self, what), str):
                raise SchemaMismatch(f"partition {self.partition_id!r}: {what}: expected names, got a string")
        set_(self, "keys", tuple(self.keys))
        set_(self, "fields", tuple(dict.fromkeys(self.fields)))
        versions = {family: self._aligned_version(family, version) for family, version in self.versions.items()}
        set_(self, "versions", MappingProxyType(versions))
        if len(set(self.keys)) != len(self.keys):
            seen: set[str] = set()
            twice = [key for key in self.keys if key in seen or seen.add(key)]  # type: ignore[func-returns-value]
            raise SchemaMismatch(f"partition {self.partition_id!r}: duplicate keys: {name_some(twice)}")
        if self.sequence_lengths is not None:
            if set(map(type, self.sequence_lengths)) != _PLAIN_INTS or type(self.sequence_lengths) is not tuple:
                set_(self, "sequence_lengths", tuple(map(int, self.sequence_lengths)))
            self._check_aligned("sequence_lengths", len(self.sequence_lengths))
            if min(self.sequence_lengths, default=0) < 0:
                raise SchemaMismatch(f"partition {self.partition_id!r}: a sequence length is negative")
        if self.tags is not None:
            set_(self, "tags", TagTable.of(self.tags, where=f"partition {self.partition_id!r}"))
            self._check_aligned("tags", len(self.tags))
        set_(self, "extra_info", MappingProxyType(checked_info(self.extra_info, f"partition {self.partition_id!r}")))
        if self.claims is not None:
            set_(self, "claims", tuple(self.claims))
            self._check_aligned("claims", len(self.claims))

    def __reduce__(self) -> tuple[object, ...]:
        # Metas travel between the driver and every worker in each stage: keys, lengths and tags go in compact form.
        return _rebuild_meta, self._message()

    def _message(self) -> tuple[Packed, str, int | tuple[int, ...] | None, dict[str, Any]]:
        claims = self.claims[0] if self.claims and len(set(self.claims)) == 1 else self.claims
        more: dict[str, Any] = {"task_name": self.task_name, "fields": self.fields, "versions": dict(self.versions)}
        more |= {"pack": self.pack, "extra_info": dict(self.extra_info)}
        return self._rows(), self.partition_id, claims, more

    def _rows(self) -> Packed:
        if not self._packed:
            self._packed.append(pack_rows(self.keys, self.sequence_lengths, self.tags))
        return self._packed[0]

    def num_bytes(self) -> int:
        """About the bytes of this meta in a message to another process."""
        return len(_rebuild_meta.__module__) + len(_rebuild_meta.__name__) + message_bytes(self._message())

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def size(self) -> int:
        return len(self.keys)

    def subset(self, indices: Iterable[int]) -> KVBatchMeta:
        """Return the rows at `indices`, in that order; the pack plan is cleared."""
        picked = [int(i) for i in indices]
        if picked and (min(picked) < 0 or max(picked) >= len(self.keys) or len(set(picked)) < len(picked)):
            raise self._no_rows(picked)
        return self._picked(picked, pack=None)

    def _no_rows(self, picked: Sequence[int]) -> SchemaMismatch:
        outside = [i for i in picked if not 0 <= i < len(self.keys)]
        if outside:
            return SchemaMismatch(f"subset: rows {name_some(outside)} are outside 0..{len(self.keys) - 1}")
        twice = [self.keys[row] for row, count in Counter(picked).items() if count > 1]
        return SchemaMismatch(f"partition {self.partition_id!r}: duplicate keys: {name_some(twice)}")

    def _picked(self, picked: Sequence[int], *, pack: PackPlan | None) -> KVBatchMeta:
        """Return the rows at `picked`, which are there and none of them twice, in that order, with another plan."""
        of_rows, versions = picker(picked), self.versions.items()
        changed: dict[str, object] = {
            "keys": of_rows(self.keys),
            "sequence_lengths": self.sequence_lengths and of_rows(self.sequence_lengths),
            "tags": None if (tags := self._tag_table()) is None else tags.pick(picked),
            "versions": MappingProxyType(
                {f: v if isinstance(v, int) else _one_or_all(of_rows(v)) for f, v in versions}
            ),
            "claims": self.claims and of_rows(self.claims),
            "pack": pack,
            "extra_info": MappingProxyType(checked_info(self.extra_info, self.partition_id)),
            "_packed": [],
        }
        # A part of what was checked: to check it once more would take most of the time.
        part = object.__new__(KVBatchMeta)
        for name in _FIELDS:
            object.__setattr__(part, name, changed[name] if name in changed else getattr(self, name))
        return part

    def slice(self, start: int, stop: int) -> KVBatchMeta:
        """Return rows `start` to `stop`, clamped to what exists; the pack plan is cleared."""
        size = len(self.keys)
        first = min(max(start, 0), size)
        return self.subset(range(first, min(max(stop, first), size)))

    def concat(self, *others: KVBatchMeta) -> KVBatchMeta:
        """Return rows of this meta, then those of the others; the pack plan is cleared. Metas without rows add nothing.

        Raises:
            SchemaMismatch: another partition, task, field set or set of known families; lengths, tags or claims on one
                side only; another value under one name of `extra_info`.
        """
        for other in others:
            self._check_same("partition_id", self.partition_id, other.partition_id)
        parts = [part for part in (self, *others) if part.keys]
        first, *rest = parts or [self]
        if not rest:
            return replace(first, pack=None)
        for part in rest:
            first._check_joins(part)
        return replace(
            first,
            keys=tuple(chain.from_iterable(p.keys for p in parts)),
            sequence_lengths=_join([p.sequence_lengths for p in parts]),
            tags=None
            if (tags := first._tag_table()) is None
            else tags.join([t for p in parts[1:] if (t := p._tag_table()) is not None]),
            versions={f: tuple(chain.from_iterable(p._versions_by_row(f) for p in parts)) for f in first.versions},
            claims=_join([p.claims for p in parts]),
            pack=None,
            extra_info=join_info([p.extra_info for p in parts]),
        )

    def drop(self, indices: Iterable[int]) -> KVBatchMeta:
        """Return all rows but those at `indices` (any order, repeats allowed); dropping all gives an empty meta."""
        gone = {int(i) for i in indices}
        if outside := sorted(i for i in gone if not 0 <= i < len(self.keys)):
            raise SchemaMismatch(f"drop: rows {name_some(outside)} are outside 0..{len(self.keys) - 1}")
        return self.subset(i for i in range(len(self.keys)) if i not in gone)

    def tag_values(self, name: str) -> Sequence[TagValue]:
        """Return one tag of every row; empty without tags.

        Raises:
            KeyError: a row lacks the tag.
        """
        table = self._tag_table()
        return [] if table is None else table.values_of(name)

    def with_tags(self, columns: Mapping[str, Sequence[TagValue] | torch.Tensor | np.ndarray]) -> KVBatchMeta:
        """Add or replace tags, one value per row and name; numbers of torch and numpy become Python's."""
        where = f"partition {self.partition_id!r}"
        plain = {name: plain_column(name, values, where=where) for name, values in columns.items()}
        for name, values in plain.items():
            self._check_aligned(f"tag {name!r}", len(values))
        old = self._tag_table() or TagTable.empty(len(self.keys))
        return replace(self, tags=old.with_columns(plain))

    def with_fields(self, names: Iterable[str], *, versions: Mapping[str, Version] | None = None) -> KVBatchMeta:
        """Add field names (each once, order kept) and, if given, family versions."""
        if isinstance(names, str):
            raise SchemaMismatch(f"with_fields: expected names of fields, got the string {names!r}")
        return replace(self, fields=(*self.fields, *names), versions={**self.versions, **(versions or {})})

    def with_written(self, shards: Sequence[KVBatchMeta]) -> KVBatchMeta:
        """Return the same rows with the fields and versions of `shards`, which hold each row once, in any order."""
        first, *rest = shards
        if all(shard.versions == first.versions for shard in rest) and all(
            isinstance(version, int) for version in first.versions.values()
        ):
            return self.with_fields(first.fields, versions=first.versions)
        bare = [replace(shard, sequence_lengths=None, tags=None, claims=None, extra_info={}) for shard in shards]
        joined = bare[0].concat(*bare[1:])
        places = {key: i for i, key in enumerate(joined.keys)}
        ordered = joined.subset(places[key] for key in self.keys)
        return self.with_fields(ordered.fields, versions=ordered.versions)

    def claims_by_key(self) -> dict[str, int]:
        """Return key -> the claim under which the row was handed out; empty when nothing was claimed."""
        return dict(zip(self.keys, self.claims, strict=True)) if self.claims is not None else {}

    def with_pack(self, pack: PackPlan | None) -> KVBatchMeta:
        return replace(self, pack=pack)

    def _check_aligned(self, what: str, count: int) -> None:
        if count != len(self.keys):
            raise SchemaMismatch(
                f"partition {self.partition_id!r}: {what}: expected {len(self.keys)} values, one per key, got {count}"
            )

    def _aligned_version(self, family: str, version: Version | Sequence[int]) -> Version:
        if isinstance(version, int):
            return version
        self._check_aligned(f"versions of family {family!r}", len(version))
        return version[0] if len(set(version)) == 1 else tuple(version)

    def _tag_table(self) -> TagTable | None:
        return self.tags  # type: ignore[return-value]  # made one in __post_init__

    def _versions_by_row(self, family: str) -> tuple[int, ...]:
        version = self.versions[family]
        return (version,) * len(self.keys) if isinstance(version, int) else version

    def _check_joins(self, other: KVBatchMeta) -> None:
        self._check_same("task_name", self.task_name, other.task_name)
        self._check_same("fields", sorted(self.fields), sorted(other.fields))
        self._check_same("families with versions", sorted(self.versions), sorted(other.versions))
        for what in ("sequence_lengths", "tags", "claims"):
            has = getattr(self, what) is not None, getattr(other, what) is not None
            self._check_same(f"{what} present", *has)

    def _check_same(self, what: str, mine: object, theirs: object) -> None:
        if mine != theirs:
            raise SchemaMismatch(f"concat: {what} differ: {mine!r} and {theirs!r}")


_FIELDS = tuple(each.name for each in fields(KVBatchMeta))


def _rebuild_meta(
    rows: Packed, partition_id: str, claims: int | tuple[int, ...] | None, more: Mapping[str, Any]
) -> KVBatchMeta:
    keys, sequence_lengths, tags = unpack_rows(rows)
    meta = KVBatchMeta(
        partition_id=partition_id,
        keys=keys,
        sequence_lengths=sequence_lengths,
        tags=tags,
        claims=(claims,) * len(keys) if isinstance(claims, int) else claims,
        **more,
    )
    # What has come is what would be sent, and what is counted.
    meta._packed.append(rows)
    return meta


def _join(parts: Sequence[tuple[_T, ...] | None]) -> tuple[_T, ...] | None:
    return None if parts[0] is None else tuple(chain.from_iterable(part or () for part in parts))


def _one_or_all(versions: tuple[int, ...]) -> Version:
    """Return the number that all rows have, or one for each of them."""
    return versions[0] if len(set(versions)) == 1 else versions


def shard_meta_for_dp(meta: KVBatchMeta, plan: PackPlan) -> list[KVBatchMeta]:
    """Rank r's rows in the order in which its microbatches meet them, with its sealed part of the plan.

    Tags, lengths and versions are kept. Rows that the plan leaves out go to no rank.

    Raises:
        SchemaMismatch: the plan names a row twice, or one that the meta does not have.
    """
    rows = [plan.rows_of_rank(rank) for rank in range(plan.num_ranks)]
    planned = list(chain.from_iterable(rows))
    is_known = not planned or (min(planned) >= 0 and max(planned) < meta.size)
    if not is_known or len(set(planned)) < len(planned):
        counts = Counter(planned)
        outside = sorted(row for row in counts if not 0 <= row < meta.size)
        twice = sorted(row for row, count in counts.items() if count > 1)
        raise SchemaMismatch(
            f"pack plan for partition {meta.partition_id!r} with {meta.size} rows: rows that do not exist: "
            f"{name_some(outside) or 'none'}; rows named more than once: {name_some(twice) or 'none'}"
        )
    return [meta._picked(mine, pack=view) for mine, view in zip(rows, plan.rank_plans(), strict=True)]


@dataclass(frozen=True, kw_only=True, slots=True)
class RowMapOutput:
    """The result of the work on the rows of one shard."""

    numbers: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Numbers per row for the driver; nothing per token."""
    columns: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Columns for the data plane, `[N, T]`."""


class RowFunction(Protocol):
    """Sent by the driver to the workers; must be picklable."""

    @property
    def input_fields(self) -> tuple[str, ...]:
        """Columns that it reads."""

    def __call__(self, batch: Mapping[str, torch.Tensor]) -> RowMapOutput:
        """
        Args:
            batch: `input_fields` of the shard's rows, on the CPU, `[N, T]` with padding on the right, or `[N]`.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class RowMapResult:
    """The result that one rank returns."""

    meta: KVBatchMeta
    """Its rows, with the columns that were written."""
    numbers: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Empty on a rank that does not write, and for a shard without rows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowResults:
    """The result of `RowFunction` over all data-parallel shards."""

    meta: KVBatchMeta
    """The meta of all rows, with the columns that were written."""
    shards: tuple[Mapping[str, torch.Tensor], ...]
    """Numbers of each shard, its rows in the order of the plan."""
    plan: PackPlan

    def by_row(self) -> dict[str, torch.Tensor]:
        """Return numbers of which every shard has one per row, `[N]` in the order of the meta."""
        rows = [row for rank in range(self.plan.num_ranks) for row in self.plan.rows_of_rank(rank)]
        index = torch.tensor(rows, dtype=torch.int64)
        parts = [numbers for numbers in self.shards if numbers]
        joined = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        return {name: torch.empty_like(found).index_copy_(0, index, found) for name, found in joined.items()}
