"""`DurableGroups`: finished groups in framed logs, so that they survive the end of every process of a run.

A rollout worker appends each group when its rows are in the data plane, in its own thread. A resumed run is given
the stored group in place of sampling it again, when it asks for the same prompt and seed and the weights that sampled
it are weights of the resumed run: their digests, which refit receipts prove, must be equal.

    <path>/<process>-<number>.seg    a frame for each put: what is known of the groups, and their columns

Invariants: a group is read only from a whole frame; what was cut by a kill is never read. A segment is removed when no
group in it can be asked for any more, by its writer, or by who finds it when the writer is gone. Files of another run
or format are refused.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import sys
import threading
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path
from queue import Full, Queue
from typing import Any, BinaryIO

import msgpack
import torch

from nemo_rl.config.data_plane import DurableConfig
from nemo_rl.data_plane.column_io import columns_of_bytes, columns_to_bytes
from nemo_rl.data_plane.interfaces import DataPlaneClient
from nemo_rl.data_plane.keys import cut_key, key_of
from nemo_rl.distributed.batched_data_dict import Column
from nemo_rl.errors import ResourceError, RunFolderError
from nemo_rl.experience.payload import SampleStats
from nemo_rl.experience.rollout_records import GroupRequest, RolloutResult
from nemo_rl.jagged import nest
from nemo_rl.utils.exits import machine_problem
from nemo_rl.utils.files import open_plain
from nemo_rl.utils.framed_log import (
    EARLIER_GROUPS,
    GROUPS,
    DamagedLog,
    ForeignLog,
    LogFrame,
    TornFrame,
    begin,
    frame,
    read_frame,
    read_frames,
    read_head,
    write_all,
)
from nemo_rl.utils.metrics import Reduction, Sum, reduction_of_json, reduction_to_json

__all__ = ["DurableGroups", "FinishedGroup", "check_segments", "rollout_identity"]

logger = logging.getLogger(__name__)

SEGMENT_BYTES = 64 << 20
"""A segment that has so many bytes is followed by another."""
MOST_WAITING = 16
"""Puts whose groups wait to be written; more make the rollout wait."""
FLUSH_S = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedGroup:
    """One group whose rows are in the data plane."""

    ordinal: int
    """Place of its prompt in the stream of prompts."""
    seed: int
    """Seed of its first row."""
    keys: tuple[str, ...]
    rows: tuple[int, int]
    """First row of the put that is the group's, and their number."""
    weights: Mapping[int, str]
    """Version -> digest of the weights that sampled its tokens."""
    tags: Sequence[Mapping[str, Any]]
    stats: SampleStats
    metrics: Mapping[str, Reduction]


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredGroup:
    """One group in a segment."""

    group: FinishedGroup
    path: Path
    offset: int
    """Byte of its frame."""


@dataclass(slots=True)
class _SegmentFile:
    """One file, and the ordinals of groups in it that may still be asked for."""

    ordinals: set[int] = field(default_factory=set)
    is_open: bool = False


@dataclass(frozen=True, slots=True)
class _Put:
    groups: Sequence[FinishedGroup]
    columns: Mapping[str, Column]


def rollout_identity(described: Mapping[str, Any]) -> str:
    """Return a digest of everything besides the weights that decides what a group is."""
    return hashlib.blake2b(json.dumps(described, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()


def check_segments(folder: Path, identity: str) -> None:
    """Refuse segments that a run of this identity cannot use.

    Raises:
        RunFolderError: they are of another run, of a newer format, or no segments.
    """
    for path in sorted(folder.glob("*.seg")):
        with suppress(FileNotFoundError), _opened(path) as file:
            _head(file, path, identity)


class DurableGroups:
    """The segments of one run, as one rollout worker reads and writes them. Thread-safe.

    Args:
        identity: as `rollout_identity` returns it.
    """

    def __init__(self, config: DurableConfig, *, identity: str) -> None:
        assert config.path is not None, "durable groups need a path"
        self._folder, self._fsync, self._identity = config.path, config.fsync, identity
        self._lock = threading.Lock()
        self._segments: dict[Path, _SegmentFile] = {}
        self._foreign: set[Path] = set()
        """Segments that other workers of the run were writing: those remove them."""
        self._stored: dict[int, list[StoredGroup]] = {}
        self._settled_below, self._settled = 0, frozenset[int]()
        self._failure: Exception | None = None
        self._name, self._number = f"{os.getpid()}-{uuid.uuid4().hex[:8]}", 0
        self._folder.mkdir(parents=True, exist_ok=True)
        for path in sorted(self._folder.glob("*.seg")):
            with suppress(FileNotFoundError):  # its writer has removed it just now
                self._load(path)
        self._queue: Queue[_Put | threading.Event | None] = Queue(maxsize=MOST_WAITING)
        self._thread = threading.Thread(target=self._write_all, name="durable-groups", daemon=True)
        self._thread.start()

    @property
    def ordinals(self) -> dict[int, int]:
        """Ordinal of each stored group -> the oldest version of its tokens' weights."""
        with self._lock:
            return {
                ordinal: max(min(stored.group.weights, default=-1) for stored in every)
                for ordinal, every in self._stored.items()
            }

    def add(self, groups: Sequence[FinishedGroup], columns: Mapping[str, Column]) -> None:
        """Append groups; their columns, as they were put, must not be changed any more.

        Raises:
            ResourceError: an earlier group could not be written, or none was for `FLUSH_S` seconds.
        """
        if self._failure is not None:
            raise ResourceError(
                f"data_plane.durable.path: finished groups cannot be written to {self._folder}: "
                f"{machine_problem(self._failure) or self._failure}; free space there, or set it to null"
            ) from self._failure
        self._pass_on(_Put(groups, columns))

    def find(self, ordinal: int, seed: int, *, weights: Mapping[int, str], oldest: int) -> StoredGroup | None:
        """Return a stored group that may be used in place of a new one.

        Args:
            weights: version -> digest, of the weights that this run has had.
            oldest: smallest version of the weights of its tokens.
        """
        with self._lock:
            for stored in self._stored.get(ordinal, ()):
                sampled = stored.group.weights
                is_ours = all(weights.get(version) == digest for version, digest in sampled.items())
                if sampled and is_ours and stored.group.seed == seed and min(sampled) >= oldest:
                    return stored
        return None

    def keep(
        self,
        groups: Sequence[GroupRequest],
        results: Sequence[RolloutResult],
        versions: Sequence[Collection[int]],
        columns: Mapping[str, Column],
        *,
        weights: Mapping[int, str],
    ) -> None:
        """Append the groups of one put, those whose weights this run can prove.

        Args:
            versions: of the weights that sampled the tokens of each group.
            columns: of all of their rows, as they were put.
            weights: version -> digest, of the weights that this run has had.
        """
        finished: list[FinishedGroup] = []
        first = 0
        for group, result, sampled in zip(groups, results, versions, strict=True):
            if group.ordinal >= 0 and all(version in weights for version in sampled):
                finished.append(
                    FinishedGroup(
                        ordinal=group.ordinal,
                        seed=group.seed,
                        keys=result.meta.keys,
                        rows=(first, len(result.meta)),
                        weights={version: weights[version] for version in sorted(sampled)},
                        tags=result.meta.tags or (),
                        stats=result.sample_stats,
                        metrics=result.metrics,
                    )
                )
            first += len(result.meta)
        if finished:
            self.add(finished, columns)

    def restore(
        self, groups: Sequence[GroupRequest], client: DataPlaneClient, *, weights: Mapping[int, str], partition_id: str
    ) -> tuple[list[RolloutResult], list[GroupRequest]]:
        """Put stored groups into the data plane; return the rows of those that there are, and the other requests."""
        asked = {
            group.uid: self.find(group.ordinal, group.seed, weights=weights, oldest=group.oldest_version)
            for group in groups
        }
        found = {uid: stored for uid, stored in asked.items() if stored is not None}
        others = [group for group in groups if group.uid not in found]
        if not found:
            return [], others
        starts = [0, *accumulate(len(stored.group.keys) for stored in found.values())]
        keys = [key_of(uid, index) for uid, stored in found.items() for index in stored.group.keys]
        tags = [tags for stored in found.values() for tags in stored.group.tags]
        meta = client.kv_batch_put(keys, partition_id, self.columns(list(found.values())), tags)
        restored: dict[str, Reduction] = {"restored_groups": Sum(1.0)}
        results = [
            RolloutResult(
                meta=meta.subset(range(first, stop)),
                sample_stats=stored.group.stats,
                metrics={**stored.group.metrics, **restored},
            )
            for (first, stop), stored in zip(pairwise(starts), found.values(), strict=True)
        ]
        return results, others

    def columns(self, stored: Sequence[StoredGroup]) -> dict[str, Column]:
        rows: dict[str, list[Any]] = {}
        dense: set[str] = set()
        known: dict[tuple[Path, int], dict[str, Column]] = {}
        for each in stored:
            place = each.path, each.offset
            if place not in known:
                with _opened(each.path) as file:
                    known[place] = columns_of_bytes(read_frame(file, each.offset).body, str(each.path))
            first, count = each.group.rows
            for name, column in known[place].items():
                is_tensor = isinstance(column, torch.Tensor)
                if is_tensor and not column.is_nested:  # type: ignore[union-attr]
                    dense.add(name)
                every = list(column.unbind()) if is_tensor else column  # type: ignore[union-attr]
                rows.setdefault(name, []).extend(every[first : first + count])
        return {name: _column(found, is_dense=name in dense) for name, found in rows.items()}

    def settle(self, below: int, done: Sequence[int]) -> None:
        """Forget groups that nobody asks for any more, and remove segments that have no others.

        Args:
            below: every smaller ordinal is settled.
            done: further ones.
        """
        with self._lock:
            self._settled_below, self._settled = below, frozenset(done)
            for ordinal in [each for each in self._stored if self._is_settled(each)]:
                del self._stored[ordinal]
            for path, segment in list(self._segments.items()):
                segment.ordinals = {each for each in segment.ordinals if not self._is_settled(each)}
                if not segment.ordinals and not segment.is_open:
                    path.unlink(missing_ok=True)
                    del self._segments[path]

    def flush(self) -> None:
        """Wait until what was added is written."""
        written = threading.Event()
        self._pass_on(written)
        if not written.wait(FLUSH_S):
            logger.warning("finished groups are not in %s after %.0f s", self._folder, FLUSH_S)

    def remove(self) -> None:
        self.settle(sys.maxsize, [])
        self.close()
        for path in self._foreign:
            with suppress(FileNotFoundError), _opened(path) as file:
                if _is_finished(file):  # its writer was killed
                    path.unlink()

    def close(self) -> None:
        """Write what was added, and end. Segments with groups that may be asked for stay."""
        self._pass_on(None)
        self._thread.join(FLUSH_S)
        with self._lock:
            for segment in self._segments.values():
                segment.is_open = False
            below, settled = self._settled_below, self._settled
        self.settle(below, sorted(settled))

    def _is_settled(self, ordinal: int) -> bool:
        return ordinal < self._settled_below or ordinal in self._settled

    def _pass_on(self, work: _Put | threading.Event | None) -> None:
        try:
            self._queue.put(work, timeout=FLUSH_S)
        except Full as error:
            raise ResourceError(
                f"data_plane.durable.path: {self._folder} has taken no finished group for {FLUSH_S:.0f} s; use a "
                "faster disk, or set it to null"
            ) from error

    # ---- files

    def _load(self, path: Path) -> None:
        segment = _SegmentFile()
        with _opened(path) as file:
            is_finished = _is_finished(file)
            for found in _frames(file, path, self._identity):
                try:
                    groups = [_of_record(record) for record in found.text["groups"]]
                except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
                    raise _odd_segment(path, f"the frame at byte {found.at} describes no groups") from error
                for group in groups:
                    self._keep(StoredGroup(group=group, path=path, offset=found.at), segment)
        if is_finished:
            self._segments[path] = segment
        else:
            self._foreign.add(path)

    def _keep(self, stored: StoredGroup, segment: _SegmentFile) -> None:
        ordinal = stored.group.ordinal
        self._stored.setdefault(ordinal, []).append(stored)
        segment.ordinals.add(ordinal)

    def _write_all(self) -> None:
        file: BinaryIO | None = None
        path = Path()
        while (put := self._queue.get()) is not None:
            if isinstance(put, threading.Event):
                put.set()
                continue
            if self._failure is not None:
                continue  # what stands behind a frame that is cut is never read
            try:
                if file is None or file.tell() > SEGMENT_BYTES:
                    if file is not None:
                        file.close()
                        with self._lock:
                            self._segments[path].is_open = False
                    path = self._folder / f"{self._name}-{self._number}.seg"
                    self._number += 1
                    file = path.open("xb", buffering=0)
                    with suppress(OSError):  # a file system without locks: others then leave the file alone
                        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    write_all(file.fileno(), begin(GROUPS, {"identity": self._identity}))
                    with self._lock:
                        self._segments[path] = _SegmentFile(is_open=True)
                offset = file.tell()
                described = msgpack.packb({"groups": list(map(_to_record, put.groups))})
                write_all(file.fileno(), frame(described, columns_to_bytes(put.columns), at=offset))
                if self._fsync:
                    os.fsync(file.fileno())
            except Exception as error:  # noqa: BLE001 - a thread has nobody to raise it to
                self._failure = error  # raised by the next `add`
                continue
            with self._lock:
                for group in put.groups:
                    if not self._is_settled(group.ordinal):
                        self._keep(StoredGroup(group=group, path=path, offset=offset), self._segments[path])
        if file is not None:
            file.close()


def _opened(path: Path) -> BinaryIO:
    try:
        return open_plain(path)
    except FileNotFoundError:
        if path.is_symlink():
            raise _odd_segment(path, "a link to nothing") from None
        raise
    except OSError as error:
        raise _odd_segment(path, error.strerror) from error


def _odd_segment(path: Path, found: object) -> RunFolderError:
    return RunFolderError(
        f"data_plane.durable.path: {path}: expected a file of finished groups, got: {found}; remove it, or use a "
        "folder of this run's own"
    )


def _is_finished(file: BinaryIO) -> bool:
    """Return whether nobody writes a segment any more: its writer holds a lock as long as it lives.

    An empty file has a writer that has not locked it yet.
    """
    if not os.fstat(file.fileno()).st_size:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    fcntl.flock(file, fcntl.LOCK_UN)
    return True


def _column(rows: list[Any], *, is_dense: bool) -> Column:
    if not isinstance(rows[0], torch.Tensor):
        return rows
    if is_dense:
        return torch.stack(rows)
    return nest(torch.cat(rows), torch.tensor([len(row) for row in rows], dtype=torch.int64))


def _to_record(group: FinishedGroup) -> dict[str, Any]:
    return {
        "ordinal": group.ordinal,
        "seed": str(group.seed),  # may need more than 64 bits
        "indices": [cut_key(key)[1] for key in group.keys],
        "rows": list(group.rows),
        "weights": [[version, digest] for version, digest in group.weights.items()],
        "tags": [dict(row) for row in group.tags],
        "stats": json.dumps(group.stats.to_json()),
        "metrics": {name: reduction_to_json(metric) for name, metric in group.metrics.items()},
    }


def _of_record(record: Mapping[str, Any]) -> FinishedGroup:
    first, count = record["rows"]
    return FinishedGroup(
        ordinal=record["ordinal"],
        seed=int(record["seed"]),
        keys=tuple(record["indices"]),
        rows=(first, count),
        weights=dict(record["weights"]),
        tags=record["tags"],
        stats=SampleStats.from_json(json.loads(record["stats"])),
        metrics={name: reduction_of_json(metric) for name, metric in record["metrics"].items()},
    )


def _head(file: BinaryIO, path: Path, identity: str) -> LogFrame | None:
    """Return the head frame of a segment of this run; None where a kill has cut it."""
    try:
        found = read_head(file, GROUPS)
    except (TornFrame, DamagedLog) as problem:
        logger.warning("%s: %s; nothing of it is used", path, problem)
        return None
    except ForeignLog as problem:
        file.seek(0)
        if file.read(len(EARLIER_GROUPS)) == EARLIER_GROUPS:
            raise RunFolderError(
                f"data_plane.durable.path: {path} is of a release before 0.2; make it readable with: nemo-rl "
                f"checkpoints convert {path.parent}"
            ) from problem
        raise _odd_segment(path, problem) from problem
    if found.text.get("identity") != identity:
        raise RunFolderError(
            f"data_plane.durable.path: {path} holds finished groups of a run with other data, tokenizer, reward, seed "
            "or sampling; use a folder of this run's own, or remove it"
        )
    return found


def _frames(file: BinaryIO, path: Path, identity: str) -> Iterator[LogFrame]:
    """Yield each whole frame of groups; the rest of a torn or damaged file is left out."""
    head = _head(file, path, identity)
    if head is None:
        return
    end = head.end
    try:
        for found in read_frames(file, end):
            end = found.end
            yield found
    except DamagedLog as problem:
        logger.warning("%s: %s; what follows is not used", path, problem)
        return
    if end < os.fstat(file.fileno()).st_size:
        logger.warning("%s: the frame at byte %d is cut; it is not used", path, end)
