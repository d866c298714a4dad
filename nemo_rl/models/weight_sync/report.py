"""`RefitReport`: what a refit took and moved, and how it was proved."""

from __future__ import annotations

from dataclasses import dataclass

from nemo_rl.models.weight_sync.receipt.records import Receipt
from nemo_rl.utils.console import bytes_text

__all__ = ["RefitReport"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RefitReport:
    """One refit that succeeded."""

    version: int
    ms: float
    """From the first call to the last answer of the engines, without those of the receipt."""
    bytes_dense: int
    """Of all weights in the engines' dtypes."""
    bytes_sent: int
    """That policy rank 0 put into buckets; each engine gets them."""
    receipt: Receipt | None = None
    """None where none was taken."""

    def text(self) -> str:
        """A few words for the terminal.

        Example:
            >>> RefitReport(version=1, ms=31.7, bytes_dense=1 << 20, bytes_sent=1 << 20).text()
            '32 ms/1MiB'
        """
        whole = "" if self.bytes_sent == self.bytes_dense else f" of {bytes_text(self.bytes_dense)}"
        moved = f"{self.ms:.0f} ms/{bytes_text(self.bytes_sent)}{whole}"
        return moved if self.receipt is None else f"{moved}, {self.receipt.text()}"

    def metrics(self) -> dict[str, float]:
        """As a run logs them."""
        proved = {} if self.receipt is None else self.receipt.metrics()
        return {
            "refit/ms": self.ms,
            "refit/bytes_dense": float(self.bytes_dense),
            "refit/bytes_sent": float(self.bytes_sent),
            **{f"refit/{name}": value for name, value in proved.items()},
        }
