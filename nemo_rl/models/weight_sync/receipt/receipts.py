"""`Receipts`: the driver's side of the proof that engines sample from the weights that they were sent.

`WeightSync.sync` opens a receipt before the weights move, while the policy is ready for a pass, and closes it when all
engines are ready, before anything is sampled. The driver compares small numbers alone: a fingerprint of each weight,
and log-probabilities of the probe. Invariant: `close` returns only for a refit that was proved.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Protocol, TypeVar

from nemo_rl.distributed.calls import Request, ask
from nemo_rl.errors import RefitMismatch, WorkerError
from nemo_rl.models.policy.workers.policy_worker import PolicyWorker
from nemo_rl.models.weight_sync.receipt.compare import CEILINGS, content_problems, gap, measured
from nemo_rl.models.weight_sync.receipt.records import Answer, Receipt, ReceiptSpec, Tolerance
from nemo_rl.models.weight_sync.target import RefitTarget

__all__ = ["Asks", "Receipts"]

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

STAGE = "refit"
NEXT = (
    "nothing was sampled from it. Resume from the latest checkpoint; if it happens again, another "
    "policy.generation.refit_transport or backend tells which part is at fault"
)


class Asks(Protocol):
    """Who takes part in a refit."""

    def run_policy(self, request: Request[_T], *, ranks: Sequence[int] | None = None) -> list[_T]:
        """Results in rank order."""

    def run_engines(self, request: Request[_T]) -> dict[int, _T]:
        """Results by the number of the engine."""


class Receipts:
    """Takes one receipt per refit."""

    def __init__(self, parties: Asks, spec: ReceiptSpec) -> None:
        self._parties, self._spec = parties, spec
        self._num_taken = 0
        self._before: Mapping[str, str] = {}
        self._expected: tuple[float, ...] | None = None
        self._seconds = 0.0
        self.tolerance: Tolerance | None = None
        """None before the first refit that was proved."""

    def open(self, *, has_new_engines: bool) -> None:
        """Before the weights move: the policy scores the probe, if it is its turn or an engine is new."""
        started = time.monotonic()
        self._expected = None
        if has_new_engines or self._num_taken % self._spec.every == 0:
            answers = self._parties.run_policy(ask(PolicyWorker.score_probe, probe=self._spec.probe))
            self._expected = next(answer for answer in answers if answer is not None)
        self._seconds = time.monotonic() - started

    def close(self, version: int) -> Receipt:
        """When all engines are ready: what they hold, and what they compute with it.

        Raises:
            RefitMismatch: an engine does not sample from these weights; names it, and weights or the difference.
        """
        started = time.monotonic()
        sent = self._parties.run_policy(ask(PolicyWorker.take_fingerprints), ranks=[0])[0]
        probe = None if self._expected is None else self._spec.probe
        answers = self._parties.run_engines(ask(RefitTarget.answer_receipt, probe=probe))
        self._check_content(version, sent, answers)
        gap_, replica_gap = self._check_behaviour(version, answers) if self._expected is not None else (None, None)
        self._before, self._num_taken = sent, self._num_taken + 1
        return Receipt(
            version=version,
            num_engines=len(answers),
            num_tensors=len(sent),
            seconds=self._seconds + time.monotonic() - started,
            gap=gap_,
            replica_gap=replica_gap,
            tolerance=self.tolerance,
            cached_tokens=min((answer.cached_tokens for answer in answers.values()), default=0),
        )

    def _check_content(self, version: int, sent: Mapping[str, str], answers: Mapping[int, Answer]) -> None:
        if not sent:
            raise WorkerError("the policy has no fingerprints of what it sent; expected those of a refit", stage=STAGE)
        found = {engine: content_problems(sent, self._before, answer) for engine, answer in answers.items()}
        self._raise(version, {engine: text for engine, text in found.items() if text is not None}, len(answers))

    def _check_behaviour(self, version: int, answers: Mapping[int, Answer]) -> tuple[float, float]:
        """Largest differences from the policy, and between engines."""
        assert self._expected is not None, "open comes first"
        expected_ids = tuple(token for response in self._spec.probe.responses for token in response)
        for engine, answer in answers.items():
            if answer.version != version:
                text = f"it scored the probe with weights of version {answer.version}"
                self._raise(version, {engine: text}, len(answers))
            if answer.token_ids != expected_ids:
                text = "it does not decode the tokens of GenerationRequest.forced"
                self._raise(version, {engine: text}, len(answers))
        from_policy = {engine: self._gap(answer.logprobs, self._expected) for engine, answer in answers.items()}
        first = min(answers)
        apart = {engine: self._gap(answer.logprobs, answers[first].logprobs) for engine, answer in answers.items()}
        worst, replica_gap = max(from_policy.values(), key=_rank), max(apart.values(), key=_rank)
        tolerance = self.tolerance or self._first_tolerance(worst, replica_gap)
        problems = {
            engine: f"its log-probabilities are {value:.3g} from the policy's on average, more than "
            f"{tolerance.of_policy:.3g}; the weights have come, so what it makes of them, or keeps of old ones, "
            "is wrong"
            for engine, value in from_policy.items()
            if not value <= tolerance.of_policy
        }
        problems |= {
            engine: f"its log-probabilities are {value:.3g} from those of engine {first} on average, more than "
            f"{tolerance.of_replicas:.3g}"
            for engine, value in apart.items()
            if engine not in problems and not value <= tolerance.of_replicas
        }
        self._raise(version, problems, len(answers))
        self._keep(tolerance, worst, replica_gap)
        return worst, replica_gap

    def _gap(self, ours: Sequence[float], theirs: Sequence[float]) -> float:
        return gap(ours, theirs, self._spec.probe.families, spares_one=self._spec.has_experts)

    def _first_tolerance(self, of_policy: float, of_replicas: float) -> Tolerance:
        """Of a first sync: what is given, or what it shows, unless that is more than precision explains."""
        given, precision = self._spec.tolerance, self._spec.precision
        if given is not None:
            return Tolerance(of_policy=given, of_replicas=given, is_measured=False)
        ceiling = CEILINGS[precision]
        if not (of_policy <= ceiling and of_replicas <= ceiling):
            return Tolerance(of_policy=ceiling, of_replicas=ceiling, is_measured=False)
        return measured(of_policy, of_replicas, precision=precision)

    def _keep(self, tolerance: Tolerance, of_policy: float, of_replicas: float) -> None:
        if self.tolerance is None:
            self.tolerance = tolerance
            logger.info(
                "receipts: engines are %.3g from the policy and %.3g from each other with the same weights in %s; "
                "tolerance %.3g and %.3g%s",
                of_policy,
                of_replicas,
                self._spec.precision,
                tolerance.of_policy,
                tolerance.of_replicas,
                "" if tolerance.is_measured else ", as set",
            )

    @staticmethod
    def _raise(version: int, problems: Mapping[int, str], num_engines: int) -> None:
        if problems:
            said = "; ".join(f"engine {engine} of {num_engines}: {text}" for engine, text in problems.items())
            raise RefitMismatch(f"weight version {version}: {said}; {NEXT}", stage=STAGE)


def _rank(value: float) -> float:
    """NaN is the worst."""
    return value if value == value else float("inf")
