"""`Receipts`: the driver's side of the proof that engines sample from the weights that they were sent.

`WeightSync.sync` opens a receipt when the policy has sent all weights, while it still has them ready, and closes it
when all engines have loaded them, before anything is sampled. The driver compares small numbers alone: a fingerprint
of each weight, and log-probabilities of the probe. Rows of one prompt are a family, and the worst one counts. A router
that chooses otherwise for one token, where two experts are nearly equal, changes all tokens after it: so for a model
with experts the median of all tokens counts, which no family decides alone, while those whose prompts may be cached are
more than half. Invariant: `close` returns only for a refit that was proved.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Protocol, TypeVar

from nemo_rl.distributed.worker_groups import Call, Pending, Request, WorkerGroup, ask
from nemo_rl.errors import RefitMismatch, WorkerError, name_some
from nemo_rl.models.generation.interfaces import BASE
from nemo_rl.models.policy.workers.policy_worker import PolicyWorker
from nemo_rl.models.weight_sync.receipt import (
    Answer,
    Probe,
    ProbeTurns,
    Receipt,
    ReceiptSpec,
    ScoredProbe,
    Sent,
    Tolerance,
)
from nemo_rl.models.weight_sync.target import RefitTarget

__all__ = ["Receipts", "behaviour_problems", "content_problems", "gap", "measured", "scoring_problems"]

FLOORS: Mapping[str, float] = {"float32": 2e-5, "bfloat16": 3e-2, "float16": 4e-3}
"""No measured tolerance is below: what the order of sums makes of one precision."""
REPLICA_FLOORS: Mapping[str, float] = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 2e-3}
CEILINGS: Mapping[str, float] = {"float32": 1e-2, "bfloat16": 0.4, "float16": 0.1}
"""More than this at the first sync is no matter of precision."""
FACTOR = 8.0
"""Multiple of the first difference that is allowed: it grows as a policy becomes more certain."""
SHOWN = 3
"""Weights that a message explains."""


def gap(
    ours: Sequence[float], theirs: Sequence[float], families: Iterable[Sequence[int]], *, has_experts: bool
) -> float:
    """Return mean difference of the worst family; of a model with experts the median of all tokens.

    Example:
        >>> gap([0.0, 0.0, 0.0], [1.0, 0.5, 0.1], [(0,), (1, 2)], has_experts=False)
        1.0
        >>> gap([0.0, 0.0, 0.0], [1.0, 0.5, 0.1], [(0,), (1, 2)], has_experts=True)
        0.5
    """
    apart = [abs(one - other) for one, other in zip(ours, theirs, strict=True)]
    # NaN is never below a tolerance.
    if any(math.isnan(value) for value in apart):
        return math.nan
    if has_experts:
        return median(apart)
    return max(math.fsum(apart[place] for place in family) / len(family) for family in families)


def measured(apart: Tolerance, *, precision: str) -> Tolerance:
    """Return the tolerance that the differences of a first sync give: no more than precision explains.

    Example:
        >>> measured(Tolerance(of_policy=0.02, of_replicas=0.0), precision="bfloat16")
        Tolerance(of_policy=0.16, of_replicas=0.01)
    """
    ceiling = CEILINGS[precision]

    def limit(value: float, floor: float) -> float:
        return max(floor, min(FACTOR * value, ceiling)) if math.isfinite(value) else ceiling

    return Tolerance(
        of_policy=limit(apart.of_policy, FLOORS[precision]),
        of_replicas=limit(apart.of_replicas, REPLICA_FLOORS[precision]),
    )


def scoring_problems(answers: Mapping[int, Answer], version: int, probe: Probe) -> dict[int, str]:
    """Return engine -> why what it says of the probe counts for nothing."""
    problems = {}
    for engine, answer in answers.items():
        firsts = zip(answer.cached_tokens, probe.is_first, strict=True) if answer.cached_tokens else ()
        stale = sum(count for count, is_first in firsts if is_first)
        if answer.version != version:
            problems[engine] = f"it scored fixed rows with weights of version {answer.version}"
        elif answer.token_ids != probe.token_ids:
            problems[engine] = "it draws tokens where GenerationRequest.forced gives them"
        elif stale:
            problems[engine] = f"its prefix cache has kept {stale} tokens of prompts that other weights have computed"
    return problems


def behaviour_problems(
    from_policy: Mapping[int, float], from_first: Mapping[int, float], limits: Tolerance, *, first: int
) -> dict[int, str]:
    """Return engine -> how far it is from the policy, or from engine `first`, where that is too far."""
    problems = {
        engine: f"its log-probabilities are {value:.3g} from the policy's, more than "
        f"{limits.of_policy:.3g}; the weights have come, so what it makes of them, or keeps of old ones, is wrong"
        for engine, value in from_policy.items()
        if not value <= limits.of_policy
    }
    return problems | {
        engine: f"its log-probabilities are {value:.3g} from those of engine {first}, more than "
        f"{limits.of_replicas:.3g}"
        for engine, value in from_first.items()
        if engine not in problems and not value <= limits.of_replicas
    }


def content_problems(sent: Mapping[str, str], before: Mapping[str, str], answer: Answer) -> str | None:
    """Return what an engine holds otherwise than it was sent, first weight first, or None where it holds the same.

    Args:
        before: fingerprints of the version before.
    """
    expected, before = ({**prints, **_under_aliases(prints, answer)} for prints in (sent, before))
    wrong = [name for name, print_ in expected.items() if answer.fingerprints.get(name) != print_]
    if not wrong:
        return None
    by_print: dict[str, list[str]] = {}
    for name, print_ in sent.items():
        by_print.setdefault(print_, []).append(name)
    lines = [_explain(name, answer.fingerprints.get(name), expected[name], before, by_print) for name in wrong[:SHOWN]]
    return f"{len(wrong)} of {len(expected)} weights are not what was sent: {name_some(lines, limit=SHOWN)}" + (
        f" and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
    )


def _under_aliases(prints: Mapping[str, str], answer: Answer) -> dict[str, str]:
    """Return the fingerprints of tied weights that are not sent themselves."""
    return {alias: prints[name] for alias, name in answer.aliases.items() if name in prints}


def _explain(
    name: str, found: str | None, expected: str, before: Mapping[str, str], sent: Mapping[str, Sequence[str]]
) -> str:
    if found is None:
        return f"{name} is missing"
    if found == before.get(name):
        return f"{name} is that of the version before"
    others = [other for other in sent.get(found, ()) if other != name]
    if others:
        return f"{name} has the values of {others[0]}"
    return f"{name} has other values (expected {expected}, got {found})"


_T = TypeVar("_T")

STAGE = "refit"
NEXT = (
    "nothing was sampled from it. Resume from the latest checkpoint; if it happens again, another "
    "policy.generation.refit_transport or backend tells which part is at fault"
)


class Parties(Protocol):
    """The policy and the engines of a refit."""

    @property
    def policy(self) -> WorkerGroup:
        """Return the workers that send weights."""

    @property
    def timeout_s(self) -> float:
        """Return deadline of each call."""

    def run_engines(self, request: Request[_T]) -> dict[int, _T]:
        """Return results by the number of the engine."""


class Receipts:
    """Takes one receipt per refit."""

    def __init__(self, parties: Parties, spec: ReceiptSpec) -> None:
        self._parties, self._spec = parties, spec
        self._turns = ProbeTurns(spec.every)
        self._before: Mapping[str, str] = {}
        self._scored_before: Sequence[float] | None = None
        """Log-probabilities of the policy when the probe was scored last."""
        self._scored: Pending[list[ScoredProbe]] = Pending.done([])
        self._probe: Probe | None = None
        self._base: Mapping[str, str] = {}
        """Fingerprints of frozen weights, where refits bring adapters."""
        self._base_scored: Pending[list[ScoredProbe]] = Pending.done([])
        self._base_scores: Sequence[float] | None = None
        """Log-probabilities of the policy without its adapter, which stay the same."""
        self._scored_version: int | None = None
        self.tolerance: Tolerance | None = None
        """Tolerance of the run, or None before the first refit that was proved."""

    def sent_base(self, sent: Sent) -> None:
        """Remember the frozen weights as they were sent.

        Raises:
            RefitMismatch: they are not those of the time before.
        """
        base = sent.fingerprints
        changed = [name for name, print_ in self._base.items() if base.get(name) != print_]
        if changed:
            raise RefitMismatch(
                f"{len(changed)} frozen weights of the policy have changed since they were sent first: "
                f"{name_some(changed)}; nothing but the adapter may be trained. {NEXT}",
                stage=STAGE,
            )
        self._base = base

    def close_adapter(self, version: int, ended: Pending[list[Sent]], use: Callable[[], None]) -> Receipt:
        """Close the receipt of a refit of an adapter when all engines have got it beside the one in use.

        Args:
            ended: what the policy says that it has sent.
            use: lets all engines change over, and be ready to generate; called when they hold what was sent.

        Raises:
            RefitMismatch: an engine holds something else, and goes on with the version before, or samples otherwise.
        """
        started = time.monotonic()
        held = self._parties.run_engines(ask(RefitTarget.adapter_fingerprints, version=version))
        first = ended.result()[0]
        if not first.fingerprints:
            raise WorkerError("the policy has no fingerprints of the adapter; expected those of a refit", stage=STAGE)
        self._check_content(
            version,
            first.fingerprints,
            {engine: Answer(fingerprints=prints, version=version) for engine, prints in held.items()},
        )
        checking_s = time.monotonic() - started
        use()
        started = time.monotonic()
        apart, moved, cached, scoring_s = None, None, 0, 0.0
        if self._probe is not None:
            answers = self._parties.run_engines(ask(RefitTarget.answer_receipt, probe=self._probe))
            self._check_base(version, answers)
            ranks = self._scored.result()
            logprobs = next(rank.logprobs for rank in ranks if rank.logprobs)
            scoring_s = max(rank.seconds for rank in ranks)
            apart = self._check_behaviour(version, logprobs, answers)
            self._check_mix(version, logprobs)
            moved = None if self._scored_before is None else self._gap(logprobs, self._scored_before)
            self._scored_before, self._scored_version = logprobs, version
            cached = min(sum(answer.cached_tokens) for answer in answers.values())
        self._before, seconds = first.fingerprints, checking_s + time.monotonic() - started
        self._turns.done(seconds + scoring_s, has_probe=self._probe is not None)
        return Receipt(
            version=version,
            num_engines=len(held),
            num_tensors=len(first.fingerprints),
            seconds=seconds,
            gap=None if apart is None else apart.of_policy,
            replica_gap=None if apart is None else apart.of_replicas,
            moved=moved,
            tolerance=self.tolerance,
            cached_tokens=cached,
            weights=Sent(num_bytes=0, fingerprints={**self._base, **first.fingerprints}).digest,
        )

    def _check_base(self, version: int, answers: Mapping[int, Answer]) -> None:
        found = {engine: content_problems(self._base, {}, answer) for engine, answer in answers.items()}
        self._raise(
            version,
            {engine: f"frozen weights have changed: {text}" for engine, text in found.items() if text is not None},
            len(answers),
        )

    def _check_mix(self, version: int, current: Sequence[float]) -> None:
        """Check a batch whose rows have no adapter, the one before and this one, side by side."""
        assert self._probe is not None and self.tolerance is not None, "the behaviour of this version was checked"
        if self._base_scores is None:
            self._base_scores = next(rank.logprobs for rank in self._base_scored.result() if rank.logprobs)
        expected = {BASE: self._base_scores, version: current}
        held = self._parties.run_engines(ask(RefitTarget.adapter_versions))
        before = self._scored_version
        if before is not None and self._scored_before is not None and all(before in own for own in held.values()):
            expected = {BASE: self._base_scores, before: self._scored_before, version: current}
        answers = self._parties.run_engines(
            ask(RefitTarget.score_versions, probe=self._probe, versions=tuple(expected))
        )
        names = {BASE: "no adapter", version: "this adapter"}
        problems = {
            engine: f"in a batch of rows with several adapters, rows with {names.get(own, 'the adapter before')} have "
            f"log-probabilities {apart:.3g} from the policy's, more than {self.tolerance.of_policy:.3g}"
            for engine, scores in answers.items()
            for own, logprobs in scores.items()
            if not (apart := self._gap(logprobs, expected[own])) <= self.tolerance.of_policy
        }
        self._raise(version, problems, len(answers))

    def open(self, *, has_new_engines: bool) -> None:
        """Open a receipt when the weights are sent, while the policy still has them ready: it scores without being
        waited for. The probe is scored when it is its turn, or an engine is new.

        The probe is scored when it is its turn, or an engine is new.
        """
        self._probe, self._scored = None, Pending.done([])
        if has_new_engines or self._turns.is_due():
            self._probe = self._spec.probe
            request = ask(PolicyWorker.score_probe, probe=self._probe)
            call = Call(request=request, stage=STAGE, timeout_s=self._parties.timeout_s)
            self._scored = self._parties.policy.submit(call)
            if self._base and self._base_scores is None:
                request = ask(PolicyWorker.score_probe, probe=self._probe, of_base=True)
                self._base_scored = self._parties.policy.submit(replace(call, request=request))

    def close(self, version: int, ended: Pending[list[Sent]]) -> Receipt:
        """Close the receipt when all engines have loaded: they are ready to generate, and say what they hold and
        compute with it.

        Args:
            ended: what the policy says that it has sent.

        Raises:
            RefitMismatch: an engine does not sample from these weights; names it, and weights or the difference.
        """
        started = time.monotonic()
        # The policy scores meanwhile.
        answers = self._parties.run_engines(ask(RefitTarget.answer_receipt, probe=self._probe))
        first, ranks = ended.result()[0], self._scored.result()
        sent = first.fingerprints
        logprobs = next((rank.logprobs for rank in ranks if rank.logprobs), None)
        self._check_content(version, sent, answers)
        apart = None if logprobs is None else self._check_behaviour(version, logprobs, answers)
        before, moved = self._scored_before, None
        if logprobs is not None:
            moved = None if before is None else self._gap(logprobs, before)
            self._scored_before = logprobs
        self._before, seconds = sent, time.monotonic() - started
        scoring_s = max((rank.seconds for rank in ranks), default=0.0)
        self._turns.done(seconds + scoring_s, has_probe=self._probe is not None)
        return Receipt(
            version=version,
            num_engines=len(answers),
            num_tensors=len(sent),
            seconds=seconds,
            gap=None if apart is None else apart.of_policy,
            replica_gap=None if apart is None else apart.of_replicas,
            moved=moved,
            tolerance=self.tolerance,
            cached_tokens=min(sum(answer.cached_tokens) for answer in answers.values()),
            weights=first.digest,
        )

    def _check_content(self, version: int, sent: Mapping[str, str], answers: Mapping[int, Answer]) -> None:
        if not sent:
            raise WorkerError("the policy has no fingerprints of what it sent; expected those of a refit", stage=STAGE)
        found = {engine: content_problems(sent, self._before, answer) for engine, answer in answers.items()}
        self._raise(version, {engine: text for engine, text in found.items() if text is not None}, len(answers))

    def _check_behaviour(self, version: int, expected: Sequence[float], answers: Mapping[int, Answer]) -> Tolerance:
        """Return the largest differences from the policy, and between engines."""
        self._raise(version, scoring_problems(answers, version, self._spec.probe), len(answers))
        first = min(answers)
        from_policy = {engine: self._gap(answer.logprobs, expected) for engine, answer in answers.items()}
        from_first = {engine: self._gap(answer.logprobs, answers[first].logprobs) for engine, answer in answers.items()}
        apart = Tolerance(of_policy=_worst(from_policy), of_replicas=_worst(from_first))
        limits = self.tolerance or self._first_tolerance(apart)
        self._raise(version, behaviour_problems(from_policy, from_first, limits, first=first), len(answers))
        if self.tolerance is None:
            self.tolerance = limits
        return apart

    def _gap(self, ours: Sequence[float], theirs: Sequence[float]) -> float:
        return gap(ours, theirs, self._spec.probe.families, has_experts=self._spec.has_experts)

    def _first_tolerance(self, apart: Tolerance) -> Tolerance:
        """Return the tolerance of a first sync: what is given, or what it shows, unless that is more than precision
        explains."""
        given = self._spec.tolerance
        if given is not None:
            return Tolerance(of_policy=given, of_replicas=given)
        return measured(apart, precision=self._spec.precision)

    @staticmethod
    def _raise(version: int, problems: Mapping[int, str], num_engines: int) -> None:
        if problems:
            said = "; ".join(f"engine {engine} of {num_engines}: {text}" for engine, text in problems.items())
            raise RefitMismatch(f"weight version {version}: {said}; {NEXT}", stage=STAGE)


def _worst(gaps: Mapping[int, float]) -> float:
    """Return the larger number; NaN is the worst."""
    return max(gaps.values(), key=lambda value: math.inf if math.isnan(value) else value)
