"""`explain_mismatch`: a kept step's KL between rollout and trainer, split into its causes by scoring its rows again.

explain_mismatch
  |- read_tokens        rows, both sides' log-probabilities      (tokens)
  |- KeptWeights        weights: checkpoints, or kept steps replayed  (versions)
  |- split              one change after another                 (parts, scorer)
  `- MismatchReport     table, main cause, tokens, hint

The `Evidence` concerns the part that no change has removed: which tokens are furthest apart, and what they have in
common.
"""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from nemo_rl.data.tokenizer import load_tokenizer
from nemo_rl.data_plane.schema import ROUTE_FIELDS
from nemo_rl.models.head.logprobs import Sampling, k3
from nemo_rl_tools.mismatch.parts import MismatchPart, TokenDivergence, named_first, split
from nemo_rl_tools.mismatch.progress import Progress
from nemo_rl_tools.mismatch.scorer import Scorer
from nemo_rl_tools.mismatch.setting import CAUSES, Cause, ScoreSetting, Stated
from nemo_rl_tools.mismatch.tokens import StepTokens, read_tokens
from nemo_rl_tools.mismatch.versions import KeptWeights
from nemo_rl_tools.step_replay.chain import (
    ChainLink,
    ReplayProblem,
    ReplayRequest,
    SnapshotColumns,
    damage_named,
    read_link,
)
from nemo_rl_tools.step_replay.settings import ReplaySettings, replay_settings
from nemo_rl_tools.verdict import Verdict

__all__ = ["MismatchReport", "explain_mismatch", "look_at"]

logger = logging.getLogger(__name__)


def _log(text: str) -> None:
    logger.info("%s", text)


def explain_mismatch(request: ReplayRequest, *, report: Callable[[str], None] = _log) -> MismatchReport:
    """
    Args:
        report: gets a line on the progress every few seconds, from another thread.

    Raises:
        ReplayProblem: the step was not kept, or lacks what is needed. ConfigError: an override is wrong.
        ChildFailed: a rank of the replay failed.
    """
    started = time.perf_counter()
    target = read_link(request.run, request.step)
    settings = replay_settings(request, target.step)
    with damage_named():
        tokens = read_tokens(target.folder, target.step, only=request.rows)
        if not len(tokens.rollout_M):
            raise ReplayProblem(f"step {request.step} has no sampled token", verdict=Verdict.VACUOUS)
        if not target.step.trained:
            raise ReplayProblem(
                f"step {request.step} trained no row, so its trainer scored none: every group had equal rewards",
                verdict=Verdict.VACUOUS,
            )
        report(f"scoring the {len(tokens.rows)} rows of step {request.step} again, one change at a time")
        with Progress(report) as progress, tempfile.TemporaryDirectory(prefix="nemo_rl_mismatch_") as scratch:
            kept = KeptWeights(request, settings, target, scratch=Path(scratch), progress=progress)
            versions = kept.find_around(tokens)
            stated = _stated(settings, target, has_sets=tokens.support_NS is not None)
            scorer = Scorer(
                tokens,
                versions,
                routes_of=(lambda shape: SnapshotColumns.read(target.folder, target.step).routes(tokens.rows, shape))
                if stated.can_replay
                else None,
                engine=replace(stated.setting, sets="own"),
                device="cuda" if settings.uses_gpu else "cpu",
                progress=progress,
            )
            trainer_M = tokens.trainer_M if versions.trainer_M is None else versions.trainer_M
            assert trainer_M is not None, "kept, or made anew"
            found = split(scorer, stated, trainer_M, precision=settings.config.policy.precision)
    named = settings.policy.tokenizer
    tokenizer = load_tokenizer(named.name or settings.policy.model_name, chat_template=named.chat_template)
    return MismatchReport(
        run=str(request.run),
        step=request.step,
        num_rows=len(tokens.rows),
        total=found.total,
        floor=found.floor,
        trainer=_words(found.trainer, is_fresh=tokens.trainer_M is None),
        parts=found.parts,
        evidence=look_at(tokens, found.rest_M),
        far=far_tokens(tokens, trainer_M, lambda ids: str(tokenizer.decode(ids))),
        notes=(*settings.notes, *versions.notes),
        seconds=time.perf_counter() - started,
    )


def _stated(settings: ReplaySettings, target: ChainLink, *, has_sets: bool) -> Stated:
    policy = settings.config.policy
    rollout, update = target.folder.columns()
    has_routes = bool(set(ROUTE_FIELDS) & {*rollout, *update})
    # Routes that the trainer has recorded itself say nothing of the engine.
    can_replay = has_routes and policy.router_replay.source == "rollout"
    generation = policy.generation
    setting = ScoreSetting(
        lag=0,
        precision=generation.precision or policy.precision,
        routes="replayed" if can_replay and policy.router_replay.enabled else "own",
        # As the workers have it: greedy rollouts have no distribution of their own.
        sampling=Sampling(temperature=generation.temperature or 1.0, top_k=generation.top_k, top_p=generation.top_p),
        sets="engine" if has_sets and generation.record_support else "own",
    )
    return Stated(setting=setting, can_replay=can_replay, has_sets=has_sets)


def _words(setting: ScoreSetting, *, is_fresh: bool) -> str:
    sampling = setting.sampling
    support = f"temperature {sampling.temperature:.4g}, top-k {sampling.top_k}, top-p {sampling.top_p:.4g}"
    if sampling.has_filter:
        support += {"own": ", sets of its own", "engine": ", recorded sets"}[setting.sets]
    routes = {"own": "its own routes", "replayed": "replayed routes"}[setting.routes]
    whose = "its pass run again" if is_fresh else "its kept log-probabilities"
    return f"{whose}: {setting.precision}, {support}, {routes}"


SHOWN_TOKENS = 8
CONTEXT = 6
"""Tokens before one that is shown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """The places in the rows where a difference lies."""

    first_tokens: float
    """Mean k3 of the first sampled token of each row."""
    early: float
    """Mean over the first third of each row's sampled tokens."""
    late: float
    """Mean over the last third."""
    top_share: float
    """Share of the sum in the 1 % of tokens that are furthest apart."""

    @property
    def text(self) -> str:
        grows = "grows along the row" if self.late > GROWTH * max(self.early, self.first_tokens) else "is everywhere"
        return (
            f"it {grows}: {self.first_tokens:.3g} at the first token of a row, {self.early:.3g} in the first third, "
            f"{self.late:.3g} in the last; {self.top_share:.0%} of it in 1 % of the tokens"
        )


GROWTH = 3.0
"""Late to early, beyond which a difference grows along the row."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FarToken:
    """One token."""

    key: str
    position: int
    text: str
    before: str
    rollout: float
    trainer: float

    @property
    def apart(self) -> float:
        return self.trainer - self.rollout


def look_at(tokens: StepTokens, logprobs_M: torch.Tensor) -> Evidence:
    """Compare log-probabilities with those of the rollout."""
    each_M = k3((logprobs_M - tokens.rollout_M).double()).nan_to_num(0.0)
    row_M = tokens.row_M
    counts_N = torch.bincount(row_M, minlength=len(tokens.rows))
    # Counted over sampled tokens: replies of a conversation lie between them.
    number_M = torch.arange(len(row_M)) - (counts_N.cumsum(0) - counts_N)[row_M]
    place_M = number_M.double() / counts_N[row_M].clamp(min=1)
    ranked = each_M.sort(descending=True).values
    top = ranked[: max(1, len(ranked) // 100)].sum()
    return Evidence(
        first_tokens=_mean(each_M[number_M == 0]),
        early=_mean(each_M[place_M < 1 / 3]),
        late=_mean(each_M[place_M >= 2 / 3]),
        top_share=float(top / ranked.sum()) if float(ranked.sum()) else 0.0,
    )


def far_tokens(
    tokens: StepTokens, logprobs_M: torch.Tensor, decode: Callable[[list[int]], str]
) -> tuple[FarToken, ...]:
    """Return the tokens with the largest |d|, one of each row."""
    apart_M = (logprobs_M - tokens.rollout_M).abs().nan_to_num(0.0)
    row_M, column_M = tokens.row_M, tokens.column_M
    found: dict[int, FarToken] = {}
    for place in apart_M.argsort(descending=True).tolist():
        row, column = int(row_M[place]), int(column_M[place])
        if row in found:
            continue
        ids = tokens.ids_NT[row].tolist()
        found[row] = FarToken(
            key=tokens.keys[row],
            position=column,
            text=decode(ids[column : column + 1]),
            before=decode(ids[max(0, column - CONTEXT) : column]),
            rollout=float(tokens.rollout_M[place]),
            trainer=float(logprobs_M[place]),
        )
        if len(found) == SHOWN_TOKENS:
            break
    return tuple(found.values())


def _mean(values: torch.Tensor) -> float:
    return float(values.mean()) if len(values) else 0.0


HINTS: Mapping[Cause, str] = {
    "weights": "compare the tags of the rows with what the engines hold: is a refit late, or lost on one replica?",
    "temperature": "give trainer and engine the same policy.generation.temperature; look for an engine's own default",
    "top_k": "give trainer and engine the same policy.generation.top_k; look for an engine's own default "
    "(generation_config.json)",
    "top_p": "give trainer and engine the same policy.generation.top_p; look for an engine's own default "
    "(generation_config.json), and whether its log-probabilities are those of the cut distribution",
    "sets": "set policy.generation.record_support=true, so that the trainer scores under the embedded engine's sets, "
    "or leave the filter out: policy.generation.top_p=1 and top_k=null",
    "routes": "set policy.router_replay.enabled=true and see `nemo-rl inspect DIR routes` for where routes are lost",
    "precision": "compare policy.precision with policy.generation.precision and with what the engine really "
    "computes in; raise the lower one, or correct for it with importance weights",
    "batching": "compare the trainer's pass with rows alone: `nemo-rl probe`, the layout of the run against one rank",
    "shift": "the engine's log-probabilities belong to the neighbouring token: look at how its output is aligned",
    "rope": "compare rope_theta and rope_scaling of the engine's model with config.json; are positions right after the "
    "prompt?",
    "engine": "compare the engine's weights with the trainer's after a refit, name by name, then its layers: `nemo-rl "
    "probe` records both sides at every site",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class MismatchReport:
    """One step."""

    run: str
    step: int
    num_rows: int
    total: TokenDivergence
    floor: float
    """Nats per token, below which a KL is noise."""
    trainer: str
    """The trainer's way of scoring, by its own numbers."""
    parts: tuple[MismatchPart, ...]
    evidence: Evidence
    far: tuple[FarToken, ...]
    notes: tuple[str, ...]
    seconds: float = 0.0
    """Duration of the whole command."""

    @property
    def first(self) -> MismatchPart | None:
        """The cause that is named first; None for a total within noise."""
        return None if self.total.kl <= self.floor else named_first(self.parts)

    @property
    def verdict(self) -> Verdict:
        if not self.total.num_tokens:
            return Verdict.VACUOUS
        return Verdict.PASS if self.first is None else Verdict.MISMATCH

    def lines(self) -> Iterator[str]:
        total = self.total
        yield f"mismatch of step {self.step} of {self.run}: {self.num_rows} rows, {total.num_tokens} sampled tokens"
        yield f"  trainer: {self.trainer}"
        for note in self.notes:
            yield f"  note: {note}"
        yield (
            f"KL(rollout || trainer) {total.kl:.4g} +- {total.std_error:.2g} nats per token (k3); |d| mean "
            f"{total.mean_abs:.3g}, largest {total.largest:.3g}; noise up to {self.floor:.2g}"
        )
        first = self.first
        if first is not None:
            yield from self._causes(first)
        yield f"{self.verdict.label} in {self.seconds:.1f} s"

    def as_record(self) -> dict[str, object]:
        first = self.first
        return {
            **asdict(self),
            "first": None if first is None else first.cause,
            "hint": None if first is None else HINTS[first.cause],
            "verdict": self.verdict.label,
        }

    def _causes(self, first: MismatchPart) -> Iterator[str]:
        yield f"  {'cause':<42} {'part':>11} {'share':>7}  changed"
        for part in [*sorted(self.parts[:-1], key=lambda part: -part.kl), self.parts[-1]]:
            yield f"  {CAUSES[part.cause]:<42} {part.kl:>11.4g} {part.share:>7.1%}  {part.what}"
        added = sum(part.kl for part in self.parts)
        yield f"  {'sum':<42} {added:>11.4g} {sum(part.share for part in self.parts):>7.1%}"
        if any(part.kl < 0 for part in self.parts):
            yield "  a negative part: the change made the two sides differ more, other causes have hidden it"
        if self.parts[-1].kl > self.floor:
            yield f"  of the rest: {self.evidence.text}"
        yield f"main cause: {CAUSES[first.cause]} ({first.share:.0%}): {first.what}"
        yield "tokens furthest apart (log-probability of rollout -> trainer):"
        for token in self.far:
            yield (
                f"  {token.key}[{token.position}] {token.rollout:9.4f} -> {token.trainer:9.4f}  "
                f"{token.before!r} then {token.text!r}"
            )
        yield f"hint: {HINTS[first.cause]}"
