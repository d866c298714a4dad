"""`RefitReport`: what a refit took and moved."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["RefitReport"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RefitReport:
    """One refit that succeeded."""

    version: int
    ms: float
    """From the first call to the last answer of the engines."""
    bytes_dense: int
    """Of all weights in the engines' dtypes."""
    bytes_sent: int
    """That policy rank 0 put into buckets; each engine gets them."""

    def metrics(self) -> dict[str, float]:
        """As a run logs them."""
        return {
            "refit/ms": self.ms,
            "refit/bytes_dense": float(self.bytes_dense),
            "refit/bytes_sent": float(self.bytes_sent),
        }
