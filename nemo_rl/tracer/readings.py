"""`Reading`: the numbers of one frame of `stats`, for people and for tables.

Called by `nemo-rl trace ls|watch|play`.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from nemo_rl.tracer.frame import BadFrame, Frame
from nemo_rl.tracer.reducer import STATS, Stats

__all__ = ["Reading"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """What `stats` says of one site in one pass; extremes, mean and rms are those of the finite values, NaN without."""

    run: str
    step: int
    phase: str
    update: int
    site: str
    count: int
    mean: float
    rms: float
    min: float
    max: float
    absmax: float
    zeros: int
    nan: int
    inf: int
    missing: int
    """Ranks that are not in it."""
    dropped: int
    """Frames that ranks have dropped in this phase."""

    @classmethod
    def of(cls, frame: Frame) -> Reading:
        """
        Raises:
            BadFrame: it is none of `stats`.
        """
        if not isinstance(frame.where.reducer, Stats) or frame.payload.shape != (len(STATS),):
            raise BadFrame(f"expected stats of {len(STATS)} numbers, got {frame.where.reducer} {frame.payload.shape}")
        said = dict(zip(STATS, frame.payload.tolist(), strict=True))
        bad = said["nan"] + said["posinf"] + said["neginf"]
        finite, where = said["count"] - bad, frame.where
        return cls(
            run=where.run,
            step=where.step,
            phase=where.phase,
            update=where.update,
            site=where.site.text,
            count=int(said["count"]),
            mean=said["sum"] / finite if finite else math.nan,
            rms=math.sqrt(said["sumsq"] / finite) if finite else math.nan,
            min=said["min"] if finite else math.nan,
            max=said["max"] if finite else math.nan,
            absmax=said["absmax"] if finite else math.nan,
            zeros=int(said["zeros"]),
            nan=int(said["nan"]),
            inf=int(said["posinf"] + said["neginf"]),
            missing=len(frame.missing),
            dropped=frame.dropped,
        )

    @property
    def text(self) -> str:
        """One line for people."""
        update = f" update {self.update}" if self.update else ""
        numbers = "  ".join(
            f"{name} {getattr(self, name):< 11.4g}"  # the sign of a number takes no other place than its absence
            for name in ("mean", "rms", "absmax")
        )
        return (
            f"step {self.step:<6} {self.phase + update:<18} {self.site:<24} {numbers} nan {self.nan}  inf {self.inf}"
            f"{self.lack}"
        )

    @property
    def lack(self) -> str:
        """What the numbers may lack; empty where they lack nothing."""
        missing = f"  without {self.missing} ranks" if self.missing else ""
        return f"{missing}{f'  {self.dropped} dropped' if self.dropped else ''}"

    def as_record(self) -> dict[str, object]:
        """For JSON: null for NaN."""
        record = asdict(self)
        return {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in record.items()
        }
