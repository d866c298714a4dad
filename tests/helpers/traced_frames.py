"""Frames that a tracer's hub has recorded, and whether those of two layouts say the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from nemo_rl.records.sites import SiteKind
from nemo_rl.tracer.entry import EntryKind
from nemo_rl.tracer.frame import Frame, FrameTable
from nemo_rl.tracer.reducer import STATS, Stats, TopK
from nemo_rl.tracer.stream_reader import StreamReader

__all__ = ["differences", "frames_of", "num_frames", "tokens_of"]

Frames = dict[tuple[str, str, str], Frame]
"""By phase, site and reducer."""


def num_frames(folder: Path) -> int:
    """Pictures of a recording, also those that came too late for a rank on a busy machine."""
    return sum(entry.kind is EntryKind.FRAME for entry in StreamReader(folder).entries())


def frames_of(folder: Path) -> tuple[Frames, dict[str, FrameTable]]:
    """What a recording of one step holds."""
    frames, tables = {}, {}
    for entry in StreamReader(folder).entries():
        if entry.kind not in (EntryKind.FRAME, EntryKind.TABLE):
            continue
        message = entry.frame()
        if isinstance(message, FrameTable):
            tables[message.name] = message
        else:
            where = message.where
            assert not message.missing and not message.dropped, message
            frames[where.phase, where.site.text, str(where.reducer)] = message
    return frames, tables


def tokens_of(frame: Frame, tables: dict[str, FrameTable]) -> list[tuple[str, int, int]]:
    """Row, position and id of each token of a frame."""
    assert frame.table is not None
    table = tables[frame.table]
    rows, positions, ids = table.tokens
    return [(table.keys[row], int(at), int(token)) for row, at, token in zip(rows, positions, ids, strict=True)]


def differences(one: Frames, other: Frames) -> dict[tuple[str, str, str], float]:
    """How far apart the frames of the same name are, relative to the largest value of the site."""
    assert one.keys() == other.keys(), sorted(one.keys() ^ other.keys())
    return {name: _apart(one[name], other[name]) for name in one}


def _apart(one: Frame, other: Frame) -> float:
    a, b = one.payload.astype(np.float64), other.payload.astype(np.float64)
    assert a.shape == b.shape, (one, other)
    if isinstance(one.where.reducer, Stats):
        found, wanted = (dict(zip(STATS, payload, strict=True)) for payload in (a, b))
        if one.where.site.kind is SiteKind.LOSS:
            # Each microbatch has its share: the sum alone does not depend on how many there are.
            return abs(found["sum"] / wanted["sum"] - 1.0)
        exact = ("count", "nan", "posinf", "neginf")
        assert [found[name] for name in exact] == [wanted[name] for name in exact], one.where
        count, largest = max(found["count"], 1), max(wanted["absmax"], 1e-30)
        scales = {
            "sum": largest * count,
            "sumsq": largest**2 * count,
            "min": largest,
            "max": largest,
            "absmax": largest,
        }
        return max(abs(found[name] - wanted[name]) / scale for name, scale in scales.items())
    if isinstance(one.where.reducer, TopK):
        a, b = a[..., 0], b[..., 0]
    if np.array_equal(a, b, equal_nan=True):
        return 0.0
    return float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-30))
