"""Records of a receipt: how it is to be taken, what an engine answers, and what was found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from nemo_rl.models.weight_sync.receipt.probe import Probe

__all__ = ["Answer", "Receipt", "ReceiptSpec", "Scored", "Sent", "Tolerance"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReceiptSpec:
    """How receipts of a run are taken."""

    probe: Probe
    every: int | None
    """Syncs from one with the probe to the next; None: as `ProbeTurns` has it. Fingerprints are compared after each."""
    tolerance: float | None
    """Largest mean difference of log-probabilities; None: measured at the first sync."""
    precision: str
    """The lower one of policy and engine, such as `bfloat16`."""
    has_experts: bool
    """Whether a router may choose otherwise for a token where two experts are nearly equal."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sent:
    """What a rank of the policy has sent in a refit."""

    num_bytes: int
    """That were put into its buffer."""
    fingerprints: Mapping[str, str]
    """Of each weight, under its Hugging Face name, in the engines' dtype; rank 0 has them where receipts are taken."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """How a rank of the policy scores the probe."""

    logprobs: tuple[float, ...]
    """Of the responses, laid end to end; none on ranks that write no results."""
    seconds: float
    """That it took."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What an engine says of itself after a refit."""

    fingerprints: Mapping[str, str]
    """Of each weight, under its Hugging Face name, as it lies in the engine or was handed to it."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Name -> that of the sent weight that it is tied to, for names that are not sent."""
    version: int
    """Of the weights that have scored the probe."""
    token_ids: tuple[int, ...] = ()
    """Of the responses, laid end to end; none without a probe."""
    logprobs: tuple[float, ...] = ()
    cached_tokens: tuple[int, ...] = ()
    """Of the prompt of each row, which a prefix cache had; none where the engine does not say."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tolerance:
    """Mean differences of log-probabilities: the largest that are found, or allowed."""

    of_policy: float
    """Between an engine and the policy."""
    of_replicas: float
    """Between engines."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Receipt:
    """A refit that was proved."""

    version: int
    num_engines: int
    num_tensors: int
    seconds: float
    gap: float | None = None
    """Mean difference of log-probabilities between engine and policy, of the engine that is furthest; None where the
    probe was left out."""
    replica_gap: float | None = None
    """The same between engines."""
    moved: float | None = None
    """How far the policy's own log-probabilities of the probe have moved since it was scored last."""
    tolerance: Tolerance | None = None
    cached_tokens: int = 0

    @property
    def tells_versions(self) -> bool:
        """Whether an engine that samples from the weights before would be further away than is allowed."""
        return self.moved is None or self.tolerance is None or self.moved > self.tolerance.of_policy

    def text(self) -> str:
        """A few words for the terminal.

        Example:
            >>> Receipt(version=3, num_engines=2, num_tensors=52, seconds=0.01).text()
            'receipt ok'
            >>> limits = Tolerance(of_policy=0.12, of_replicas=0.01)
            >>> Receipt(version=3, num_engines=2, num_tensors=52, seconds=0.01, gap=0.02, moved=0.001,
            ...         tolerance=limits).text()
            'receipt ok, gap 2.0e-02 (stale weights known by fingerprint alone: the update moved 1.0e-03)'
        """
        if self.gap is None:
            return "receipt ok"
        alone = f" (stale weights known by fingerprint alone: the update moved {self.moved or 0.0:.1e})"
        return f"receipt ok, gap {self.gap:.1e}{'' if self.tells_versions else alone}"

    def tolerance_text(self) -> str:
        """For the terminal, after the first refit.

        Example:
            >>> limits = Tolerance(of_policy=0.12, of_replicas=0.01)
            >>> Receipt(version=0, num_engines=2, num_tensors=52, seconds=0.01, gap=0.02, replica_gap=0.0,
            ...         tolerance=limits).tolerance_text()
            'receipts: engines are 0.02 from the policy with the same weights; tolerance 0.12, between engines 0.01'
        """
        if self.gap is None or self.tolerance is None:
            return "receipts: weights alone were compared"
        limits = self.tolerance
        return (
            f"receipts: engines are {self.gap:.2g} from the policy with the same weights; tolerance "
            f"{limits.of_policy:.2g}, between engines {limits.of_replicas:.2g}"
        )

    def metrics(self) -> dict[str, float]:
        """Under `refit/`."""
        found = {"receipt_ms": self.seconds * 1e3, "receipt_tensors": float(self.num_tensors)}
        if self.gap is not None and self.replica_gap is not None and self.tolerance is not None:
            found |= {
                "receipt_gap": self.gap,
                "receipt_replica_gap": self.replica_gap,
                "receipt_tolerance": self.tolerance.of_policy,
                "receipt_cached_tokens": float(self.cached_tokens),
            }
            if self.moved is not None:
                found["receipt_moved"] = self.moved
        return found
