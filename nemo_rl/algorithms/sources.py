"""Builds the source of a run's batches: at once, by dynamic sampling, ahead of the trainer, or by a schedule."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from operator import attrgetter
from pathlib import Path

from nemo_rl.algorithms.async_batches import AsyncBatches, build_schedule
from nemo_rl.algorithms.batches import BatchSource, DynamicBatches, RolloutParts, SyncBatches
from nemo_rl.algorithms.preflight.inputs import too_few_prompts
from nemo_rl.algorithms.scheduled_batches import RunSchedule, ScheduledBatches, ScheduleFile, with_durable_groups
from nemo_rl.config.data import DataConfig, SourceConfig
from nemo_rl.config.data_plane import DurableConfig
from nemo_rl.config.grpo import GRPOConfig
from nemo_rl.config.policy import PolicyConfig
from nemo_rl.data.mixture import MixedSource, Phase, PromptMixture
from nemo_rl.data.sampler import PromptSampler, PromptStream
from nemo_rl.data_plane.interfaces import DataPlaneClient
from nemo_rl.errors import DatasetError
from nemo_rl.experience.rollout_handle import RolloutHandle
from nemo_rl.experience.rollout_records import RolloutInfo
from nemo_rl.models.weight_sync.base import WeightSync

__all__ = ["FollowedSchedule", "build_source", "loss_weights"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class FollowedSchedule:
    """The schedule that a run follows, in place of one of its own."""

    schedule: RunSchedule
    last_step: int
    """The last step that is done again."""


def build_source(
    config: GRPOConfig,
    data: DataConfig,
    policy: PolicyConfig,
    info: RolloutInfo,
    *,
    client: DataPlaneClient,
    rollout: RolloutHandle,
    weight_sync: WeightSync,
    rows_per_conversation: int,
    follows: FollowedSchedule | None,
    log_dir: Path,
    resume_step: int,
    timeout_s: float,
    note: Callable[[str], None],
    durable: DurableConfig,
    saves: bool,
) -> BatchSource:
    """Return the source that the recipe asks for; its finished groups are kept in files where `durable` has a path.

    Args:
        saves: the run writes checkpoints.
        follows: the schedule of a run that is done again.
        resume_step: step of the checkpoint that the run goes on from; 0: it starts.
        timeout_s: deadline of a rollout.

    Raises:
        DatasetError: there are too few training prompts.
        RunFolderError: the folder of finished groups has files of another run.
    """
    parts = RolloutParts(
        config=config,
        client=client,
        rollout=rollout,
        sampler=_sampler(config, data, info),
        weight_version=partial(attrgetter("version"), weight_sync),
        rows_per_conversation=rows_per_conversation,
    )
    if follows is not None:
        # What is done again leaves the files of the run alone.
        return ScheduledBatches(parts, follows.schedule, last_step=follows.last_step)
    source: BatchSource
    if not config.samples_ahead:
        source = DynamicBatches(parts) if config.use_dynamic_sampling else SyncBatches(parts)
    else:
        source = AsyncBatches(
            parts,
            build_schedule(config),
            record=ScheduleFile(log_dir, step=resume_step),
            timeout_s=timeout_s,
            note=note,
            restart_engines=weight_sync.restart_engines,
        )
    return with_durable_groups(source, durable, rollout, info, grpo=config, policy=policy, data=data, saves=saves)


def _sampler(config: GRPOConfig, data: DataConfig, info: RolloutInfo) -> PromptStream:
    if info.num_skipped_prompts:
        logger.warning(
            "%d prompts are longer than data.max_input_seq_length=%d and were skipped: %s",
            info.num_skipped_prompts,
            data.max_input_seq_length,
            "; ".join(info.skipped),
        )
    stream = _candidates(config, data, info.num_train_prompts)
    if not data.curriculum.is_on:
        return stream
    # Imported where a recipe asks for it.
    from nemo_rl.data.curriculum import CurriculumStream  # noqa: PLC0415

    sources = dict(zip(data.train.named or ("",), info.num_train_prompts, strict=True))
    return CurriculumStream(stream, data.curriculum, sources, seed=config.seed)


def _candidates(config: GRPOConfig, data: DataConfig, sizes: Sequence[int]) -> PromptStream:
    if data.train.named:
        return _mixture(config, data, sizes)
    [num_prompts] = sizes
    if num_prompts < config.prompts_at_once:
        raise DatasetError(too_few_prompts(config, num_prompts))
    return PromptSampler(num_prompts, seed=config.seed, shuffle=data.shuffle, max_num_epochs=config.max_num_epochs)


def loss_weights(data: DataConfig) -> dict[str, float]:
    """Return the weight of each source of prompts in the loss; none where all have the same."""
    weights = {name: _loss_weight(source) for name, source in data.train.named.items()}
    return weights if len(set(weights.values())) > 1 else {}


def _loss_weight(source: SourceConfig) -> float:
    return source.loss_weight


def _mixed(name: str, source: SourceConfig, first: int, num_prompts: int) -> MixedSource:
    return MixedSource(name=name, first=first, num_prompts=num_prompts, max_num_epochs=source.max_num_epochs)


def _weights(source: SourceConfig) -> Mapping[int, float]:
    return source.weights


def _mixture(config: GRPOConfig, data: DataConfig, sizes: Sequence[int]) -> PromptMixture:
    """
    Args:
        sizes: prompts of each source.
    """
    named = data.train.named
    places = zip(accumulate(sizes, initial=0), sizes, strict=False)
    sources = [_mixed(name, source, *place) for (name, source), place in zip(named.items(), places, strict=True)]
    by_size = [size ** (1 / data.mixture.size_temperature) if data.mixture.by == "size" else 1.0 for size in sizes]
    phases = []
    for step in sorted({step for source in named.values() for step in _weights(source)}):
        weights = [source.weight_at(step) * size for source, size in zip(named.values(), by_size, strict=True)]
        shares = tuple(weight / sum(weights) for weight in weights)
        phases.append(Phase(first=(step - 1) * config.num_prompts_per_step, shares=shares))
    by_tokens = data.mixture.unit == "tokens"
    return PromptMixture(sources, phases, seed=config.seed, shuffle=data.shuffle, by_tokens=by_tokens)
