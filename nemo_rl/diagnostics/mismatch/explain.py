"""`explain_mismatch`: a kept step's KL between rollout and trainer, split into its causes by scoring its rows again.

explain_mismatch
  |- read_tokens        rows, both sides' log-probabilities      (tokens)
  |- find_versions      weights: checkpoints, or kept steps replayed  (versions)
  |- split              one change after another                 (parts, hypotheses, scorer)
  `- MismatchReport     table, main cause, tokens, hint         (report, evidence)
"""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from nemo_rl.data.tokenizer import load_tokenizer
from nemo_rl.data_plane.schema import ROUTE_FIELDS
from nemo_rl.diagnostics.mismatch.parts import split
from nemo_rl.diagnostics.mismatch.progress import Progress
from nemo_rl.diagnostics.mismatch.report import MismatchReport, far_tokens, look_at
from nemo_rl.diagnostics.mismatch.scorer import Scorer
from nemo_rl.diagnostics.mismatch.setting import ScoreSetting, Stated
from nemo_rl.diagnostics.mismatch.tokens import StepTokens, read_tokens, route_columns
from nemo_rl.diagnostics.mismatch.versions import Versions, find_versions
from nemo_rl.diagnostics.step_replay.chain import ChainLink, ReplayProblem, ReplayRequest, read_link
from nemo_rl.diagnostics.step_replay.settings import ReplaySettings, replay_settings
from nemo_rl.diagnostics.verdict import Verdict
from nemo_rl.errors import CheckpointError
from nemo_rl.models.logprobs import Sampling

__all__ = ["explain_mismatch"]

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
    try:
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
            versions = find_versions(request, settings, target, tokens, scratch=Path(scratch), progress=progress)
            found = _explain(request, settings, target, tokens, versions, progress=progress)
            return replace(found, seconds=time.perf_counter() - started)
    except CheckpointError as error:
        raise ReplayProblem(str(error), verdict=Verdict.CORRUPT) from error


def _explain(
    request: ReplayRequest,
    settings: ReplaySettings,
    target: ChainLink,
    tokens: StepTokens,
    versions: Versions,
    *,
    progress: Progress,
) -> MismatchReport:
    stated = _stated(settings, target, has_sets=tokens.support_NS is not None)
    device = torch.device("cuda" if settings.uses_gpu else "cpu")
    routes_of = partial(route_columns, target.folder, target.step, tokens.rows)
    scorer = Scorer(
        tokens,
        versions,
        routes_of=routes_of if stated.can_replay else None,
        engine=ScoreSetting(lag=0, precision=stated.precision, routes=stated.routes, sampling=stated.sampling),
        device=device,
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
    )


def _stated(settings: ReplaySettings, target: ChainLink, *, has_sets: bool) -> Stated:
    policy = settings.config.policy
    rollout, update = target.folder.columns()
    has_routes = bool(set(ROUTE_FIELDS) & {*rollout, *update})
    # Routes that the trainer has recorded itself say nothing of the engine.
    can_replay = has_routes and policy.router_replay.source == "rollout"
    generation = policy.generation
    return Stated(
        precision=generation.precision or policy.precision,
        routes="replayed" if can_replay and policy.router_replay.enabled else "own",
        # As the workers have it: greedy rollouts have no distribution of their own.
        sampling=Sampling(temperature=generation.temperature or 1.0, top_k=generation.top_k, top_p=generation.top_p),
        sets="engine" if has_sets and generation.record_support else "own",
        can_replay=can_replay,
        has_sets=has_sets,
    )


def _words(setting: ScoreSetting, *, is_fresh: bool) -> str:
    sampling = setting.sampling
    support = f"temperature {sampling.temperature:.4g}, top-k {sampling.top_k}, top-p {sampling.top_p:.4g}"
    if sampling.has_filter:
        support += {"own": ", sets of its own", "engine": ", recorded sets"}[setting.sets]
    routes = {"own": "its own routes", "replayed": "replayed routes"}[setting.routes]
    whose = "its pass run again" if is_fresh else "its kept log-probabilities"
    return f"{whose}: {setting.precision}, {support}, {routes}"
