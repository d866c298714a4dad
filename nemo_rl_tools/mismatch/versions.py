"""The weights of each version: the initial model, checkpoints of the run, or the replay of kept steps.

Invariant: version v are the weights after v steps.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from nemo_rl.algorithms.kept_steps.folder import StepStatus
from nemo_rl.algorithms.losses.policy_loss import build_loss
from nemo_rl.distributed.worker_pass import WorkerPass
from nemo_rl.errors import name_some
from nemo_rl.utils.checkpoint import WEIGHTS
from nemo_rl.utils.remote_checkpoints import fetched
from nemo_rl_tools.mismatch.progress import Progress
from nemo_rl_tools.mismatch.tokens import StepTokens
from nemo_rl_tools.step_replay.chain import (
    ChainLink,
    ReplayChain,
    ReplayProblem,
    ReplayRequest,
    SnapshotColumns,
    checkpoints_of,
    find_chain,
)
from nemo_rl_tools.step_replay.rank import RankJob, ReplayRank
from nemo_rl_tools.step_replay.settings import ReplaySettings
from nemo_rl_tools.step_replay.work import StepWork, make_work
from nemo_rl_tools.verdict import Verdict

__all__ = ["KeptWeights", "Versions"]

ROWS, LOGPROBS, PASS = "rows", "logprobs", "pass_{rank}.safetensors"
REACHED = "reached_{version}"
"""Rank 0 makes such a file at each version of the replay: the progress that the caller reads."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Versions:
    """The versions whose weights are there."""

    trainer: int
    """Version of the trainer's weights."""
    folders: dict[int, Path]
    """Version -> Hugging Face folder."""
    trainer_M: torch.Tensor | None = None
    """Log-probabilities of the trainer's pass, run again; None where the kept ones are taken."""
    notes: tuple[str, ...] = field(default=())


@dataclass(frozen=True, kw_only=True, slots=True)
class _Keep:
    """The work of every rank between the steps of a replay."""

    folder: Path
    versions: tuple[int, ...]
    target: StepWork | None
    """The step whose pass is run again; None where it was kept."""

    def __call__(self, rank: ReplayRank, version: int) -> None:
        """(collective) Write weights, the log-probabilities of this rank's rows, and how far the replay is."""
        if rank.worker.rank == 0:
            (self.folder / REACHED.format(version=version)).touch()
        if version in self.versions:
            rank.worker.save_checkpoint(weights=self.folder / _name(version), optimizer=None, tokenizer=None)
        if self.target is None or version != self.target.step.policy_version:
            return
        columns = SnapshotColumns.read(self.target.folder, self.target.step)
        rows, got_NT = rank.logprobs(WorkerPass.PREV_LOGPROBS, self.target, columns)
        path = self.folder / PASS.format(rank=rank.worker.rank)
        save_file({ROWS: torch.tensor(rows, dtype=torch.int64), LOGPROBS: got_NT.contiguous()}, path)


class KeptWeights:
    """The weights of a run by their versions: those that are there, and those that a replay of kept steps makes.

    Args:
        scratch: folder for what the replay makes.
    """

    def __init__(
        self, request: ReplayRequest, settings: ReplaySettings, target: ChainLink, *, scratch: Path, progress: Progress
    ) -> None:
        self._request, self._settings, self._target = request, settings, target
        self._scratch, self._progress = scratch, progress
        self._checkpoints = checkpoints_of(settings.config.checkpointing, request.run)
        self._here = {0: Path(settings.policy.model_name)}
        self._here |= {found.step: found.weights for found in self._checkpoints}

    def find(self, versions: Collection[int]) -> dict[int, Path]:
        """Return the folders of these versions.

        Raises:
            ReplayProblem: a version cannot be had.
        """
        missing = set(versions) - self._here.keys()
        here = self._here | self._replay(self._chain(missing), missing)
        return {version: self._folder(version, here) for version in sorted(versions)}

    def find_around(self, tokens: StepTokens) -> Versions:
        """Return the trainer's weights, those that the tags name, and the ones next to them, as far as they can be had.

        Raises:
            ReplayProblem: the trainer's weights, or those of the tags, cannot be had.
        """
        trainer, with_pass = self._target.step.policy_version, tokens.trainer_M is None
        needed = {trainer, *tokens.versions}
        around = {version + by for version in tokens.versions for by in (-1, 1) if 0 <= version + by <= trainer}
        notes: list[str] = []
        missing = (needed | around) - self._here.keys()
        try:
            chain = self._chain(missing, with_pass=with_pass)
        except ReplayProblem as problem:
            notes.append(f"weights of version {name_some(sorted(missing - needed))} cannot be tried: {problem}")
            missing = needed - self._here.keys()
            chain = self._chain(missing, with_pass=with_pass)
        here = self._here | self._replay(chain, missing, with_pass=with_pass)
        return Versions(
            trainer=trainer,
            folders={version: self._folder(version, here) for version in sorted((needed | around) & here.keys())},
            trainer_M=_trainer_pass(self._scratch, tokens) if with_pass else None,
            notes=tuple(notes),
        )

    def _folder(self, version: int, here: Mapping[int, Path]) -> Path:
        found = next((each for each in self._checkpoints if each.step == version), None)
        return here[version] if found is None else fetched(found, prefix=f"{WEIGHTS}/").weights

    def _chain(self, missing: Collection[int], *, with_pass: bool = False) -> ReplayChain | None:
        """Return the steps from before the first missing version to the last one; None where nothing is to be run."""
        trainer = self._target.step.policy_version
        if not missing:
            loaded = next((found for found in self._checkpoints if found.step == trainer), None)
            at_hand = None if loaded is None else fetched(loaded, prefix=f"{WEIGHTS}/")
            return ReplayChain(links=(), checkpoint=at_hand, with_optimizer=False) if with_pass else None
        start = self._to(min(missing))
        links = list(start.links)
        for number in range(min(missing) + 1, (trainer if with_pass else max(missing)) + 1):
            links.append(self._to(number).links[-1])
        unfinished = [link.step.number for link in links if link.step.status is not StepStatus.COMPLETE]
        if unfinished:
            raise ReplayProblem(f"step {name_some(unfinished)} did not end", verdict=Verdict.INCOMPLETE)
        return ReplayChain(links=tuple(links), checkpoint=start.checkpoint, with_optimizer=start.with_optimizer)

    def _to(self, number: int) -> ReplayChain:
        reads_optimizer = not self._settings.is_other_worker
        return find_chain(self._request.run, number, self._checkpoints, reads_optimizer=reads_optimizer)

    def _replay(
        self, chain: ReplayChain | None, missing: Collection[int], *, with_pass: bool = False
    ) -> dict[int, Path]:
        """Run the steps, and the pass of the target where it is wanted; return the folders of the missing versions."""
        if chain is None:
            return {}
        run, settings, scratch = chain.links[-1].step.run if chain.links else None, self._settings, self._scratch
        target = make_work(self._target, settings, only=self._request.rows) if with_pass else None
        steps = [link.step.number for link in chain.links]
        what = f"replaying steps {name_some(steps)} for their weights" if steps else "running the trainer's pass again"
        # The first file is there before a step has been run.
        files = REACHED.format(version="*")
        self._progress.begin(what, total=len(steps), count=lambda: max(0, len(list(scratch.glob(files))) - 1))
        job = RankJob(
            settings=settings,
            chain=chain,
            steps=tuple(make_work(link, settings) for link in chain.links),
            loss_fn=build_loss(settings.config.loss_fn, settings.config.grpo),
            # The kept columns are taken; only what the loss itself computes is run again.
            stages=(),
            train_fields=run.train_fields if run is not None else (),
            visit=_Keep(folder=scratch, versions=tuple(missing), target=target),
        )
        job.run()
        return {version: scratch / _name(version) for version in missing}


def _trainer_pass(scratch: Path, tokens: StepTokens) -> torch.Tensor:
    """Return `[M]`, from what all ranks wrote."""
    places = {row: place for place, row in enumerate(tokens.rows)}
    found_NT = torch.full(tokens.is_sampled_NT.shape, float("nan"))
    for path in sorted(scratch.glob(PASS.format(rank="*"))):
        parts = load_file(path)
        width = min(found_NT.shape[1], parts[LOGPROBS].shape[1])
        for row, scored in zip(parts[ROWS].tolist(), parts[LOGPROBS], strict=True):
            found_NT[places[row], :width] = scored[:width]
    return found_NT[tokens.is_sampled_NT]


def _name(version: int) -> str:
    return f"version_{version}"
