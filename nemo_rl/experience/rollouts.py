"""Steps from prompts to scored samples: seeds, sampling settings, texts and rewards of single-turn rollouts.

Used by the rollout worker for training and by the evaluator for held-out prompts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from datetime import datetime
from threading import Lock
from typing import Protocol

from transformers import PreTrainedTokenizerBase

from nemo_rl.config.data import DataConfig, History, SourceConfig
from nemo_rl.config.env import EnvConfig, ExperienceConfig
from nemo_rl.config.generation import GenerationConfig
from nemo_rl.config.grpo import GRPOConfig
from nemo_rl.config.policy import PolicyConfig
from nemo_rl.config.run import EvaluationConfig, LoggerConfig
from nemo_rl.config.schema import MasterConfig
from nemo_rl.data.datasets import Prompt
from nemo_rl.environments.interfaces import Environment, EnvReport, Response, waits_for_others
from nemo_rl.errors import WorkerError, name_some
from nemo_rl.models.generation.interfaces import (
    GenerationInterface,
    GenerationOutput,
    GenerationRequest,
    SamplingParams,
)
from nemo_rl.models.vision.processor import PromptPictures

__all__ = [
    "EnvReport",
    "MeasuredSamples",
    "ResponseSampler",
    "ResponseScorer",
    "RolloutSpec",
    "SamplesPrompts",
    "SourceSampling",
    "check_versions",
    "row_seeds",
    "sampling_of_sources",
    "sampling_params",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutSpec:
    """The settings that a rollout worker is made from."""

    grpo: GRPOConfig
    policy: PolicyConfig
    data: DataConfig
    evaluation: EvaluationConfig
    env: EnvConfig
    envs: Mapping[str, EnvConfig]
    """Environments that score rows, by the dotted paths of their sections."""
    is_accuracy: bool
    """True where every reward is 0 or 1."""
    logger: LoggerConfig
    experience: ExperienceConfig = field(default_factory=ExperienceConfig)
    start_timeout_s: float
    """Deadline for the start of the processes that score."""
    names_rows: bool = False
    """True where the engines are told the keys of their rows, for a recording of their tensors."""
    now: datetime | None = None
    """The time that the chat template sees: that of the run's first start. None: the clock's."""
    min_reward: float | None = None
    """`sft.min_reward`."""
    history: History = "append"
    """`data.history` with `auto` decided."""

    @classmethod
    def of(cls, config: MasterConfig, *, now: datetime | None = None) -> RolloutSpec:
        return cls(
            grpo=config.grpo,
            policy=config.policy,
            data=config.data,
            evaluation=config.evaluation,
            env=config.env,
            envs=config.envs,
            is_accuracy=config.is_accuracy,
            experience=config.experience,
            logger=config.logger,
            names_rows=config.diagnostics.record.has_generation,
            start_timeout_s=config.cluster.worker_start_timeout_s,
            now=now,
            min_reward=config.sft.min_reward,
            history=config.history,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredSamples:
    """Samples of held-out prompts, for measures and for people; one entry per row, prompt by prompt."""

    rewards: tuple[float, ...]
    is_scored: tuple[bool, ...]
    """False where a failure of the infrastructure leaves the row without a reward."""
    texts: tuple[str, ...]
    """The response, or the last turn of a conversation, as it was scored."""
    responses: tuple[tuple[int, ...], ...]
    """All tokens behind the prompt."""
    num_tokens: tuple[int, ...]
    truncated: tuple[bool, ...]
    components: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    printed: tuple[str, ...] = ()
    endings: tuple[str, ...] = ()
    """Ending of each conversation; empty for single turns."""
    causes: tuple[str, ...] = ()
    """Causes of the failures of the infrastructure."""


class SamplesPrompts(Protocol):
    """Samples and scores held-out prompts."""

    def sample(
        self, prompts: Sequence[Prompt], seeds: Sequence[int], sampling: SamplingParams, *, version: int | None
    ) -> MeasuredSamples:
        """Return the samples of all prompts, as many of each.

        Args:
            version: of the weights, as in `check_versions`.

        Raises:
            WorkerError: an engine failed, or holds other weights. RewardError: a reward function failed.
        """
        ...


class ResponseSampler:
    """`SamplesPrompts` with one response to each prompt.

    Args:
        generation: engines, shared with the weight sync.
        pictures: images of the prompts.
    """

    def __init__(
        self, generation: GenerationInterface, scorer: ResponseScorer, *, pictures: PromptPictures | None = None
    ) -> None:
        self._generation, self._scorer = generation, scorer
        self._pictures = PromptPictures(None) if pictures is None else pictures

    def sample(
        self, prompts: Sequence[Prompt], seeds: Sequence[int], sampling: SamplingParams, *, version: int | None
    ) -> MeasuredSamples:
        """See `SamplesPrompts`."""
        ids = tuple(prompt.ids for prompt in prompts)
        images = self._pictures.of(prompts)
        request = GenerationRequest(prompt_ids=ids, seeds=tuple(seeds), sampling=sampling, images=images)
        output = self._generation.generate(request)
        check_versions(output, version)
        texts, report = self._scorer.score(prompts, output)
        lengths = output.lengths.tolist()
        return MeasuredSamples(
            rewards=report.rewards,
            is_scored=tuple(not why for why in report.unscored) or (True,) * len(lengths),
            texts=texts,
            responses=tuple(tuple(part.tolist()) for part in output.token_ids.split(lengths)),
            num_tokens=tuple(lengths),
            truncated=tuple(output.truncated.tolist()),
            components=report.components,
            printed=report.printed,
            causes=tuple(filter(None, report.unscored)),
        )


NO_LIMIT = 2**31 - 1
"""Tokens of a response that ends where its row is full: engines bound every row by the policy's longest sequence."""


def row_seeds(*parts: object, count: int) -> tuple[int, ...]:
    """Return `count` consecutive seeds below 2^63 that start at a hash of `parts`.

    A training group hashes the run's seed and its ordinal in the prompt stream, so its rows have the same seeds in
    whichever step, and on whichever engine, they are sampled.
    """
    digest = hashlib.blake2b(":".join(map(str, parts)).encode(), digest_size=7).digest()
    start = int.from_bytes(digest, "big")
    return tuple(range(start, start + count))


def sampling_params(config: GenerationConfig, stop_ids: Sequence[int], *, is_validation: bool) -> SamplingParams:
    """Sampling settings of training or validation rollouts; the config's own stop tokens go before `stop_ids`."""
    temperature = config.temperature
    if is_validation and config.val_temperature is not None:
        temperature = config.val_temperature
    chosen = config.stop_token_ids if config.stop_token_ids is not None else stop_ids
    return SamplingParams(
        temperature=temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        max_new_tokens=config.max_new_tokens or NO_LIMIT,
        stop_token_ids=tuple(chosen),
        stop_strings=tuple(config.stop_strings),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceSampling:
    """How prompts are sampled; those of equal settings go in one request."""

    group_size: int
    """Samples of a prompt."""
    sampling: SamplingParams


def sampling_of_sources(
    data: DataConfig, sampling: SamplingParams, *, group_size: int
) -> tuple[dict[str, SourceSampling], dict[str, int]]:
    """Return how the prompts of each source are sampled by the dotted path of its section, and the most tokens of a
    response to them, which may be fewer than those of `sampling`.

    Args:
        sampling: as the recipe samples where a source does not say.
        group_size: likewise.
    """
    plain = SourceSampling(group_size=group_size, sampling=sampling)
    found, limits = dict.fromkeys(data.sources, plain), dict.fromkeys(data.sources, sampling.max_new_tokens)
    for name, source in data.train.named.items():
        where = data.train_key(name)
        found[where], limits[where] = _of_source(source, plain)
    return found, limits


def _of_source(source: SourceConfig, plain: SourceSampling) -> tuple[SourceSampling, int]:
    stops, sampling = source.stop_strings, plain.sampling
    own = SourceSampling(
        group_size=source.num_generations_per_prompt or plain.group_size,
        sampling=sampling if stops is None else replace(sampling, stop_strings=tuple(stops)),
    )
    return own, source.max_new_tokens or sampling.max_new_tokens


def check_versions(output: GenerationOutput, version: int | None) -> None:
    """Check which weights sampled the rows.

    Args:
        version: of the weights that every row must be sampled from; None takes any.

    Raises:
        WorkerError: an engine holds other weights than `version`.
    """
    others = set(output.row_versions) - {version}
    if version is not None and others:
        raise WorkerError(
            f"expected samples of weight version {version}, the engines hold {name_some(sorted(others))}",
            stage="rollout",
        )


class ResponseScorer:
    """Decodes responses and scores them; one call at a time, whichever thread asks, unless scoring `overlaps`.

    Args:
        sampling: how responses are sampled; a stop token at their end is no part of their text.
    """

    def __init__(
        self, environment: Environment, tokenizer: PreTrainedTokenizerBase, *, sampling: SamplingParams
    ) -> None:
        self._environment, self._tokenizer = environment, tokenizer
        self.overlaps = waits_for_others(environment)
        """True where scoring waits for others, and goes on beside the sampling of further groups."""
        self._stop_ids = frozenset(sampling.stop_token_ids)
        self._lock = Lock()

    def score(self, prompts: Sequence[Prompt], output: GenerationOutput) -> tuple[tuple[str, ...], EnvReport]:
        """Return the texts of the rows of whole groups, as they were scored, and their rewards.

        Args:
            prompts: one per group.

        Raises:
            RewardError: a reward function failed.
        """
        with nullcontext() if self.overlaps else self._lock:
            texts = self._decode(output)
            measured = zip(texts, output.lengths.tolist(), output.truncated.tolist(), strict=True)
            responses = [Response(text=text, num_tokens=length, truncated=cut) for text, length, cut in measured]
            size = len(responses) // max(1, len(prompts))
            report = self._environment.score([prompt for prompt in prompts for _ in range(size)], responses)
        return tuple(texts), report

    def _decode(self, output: GenerationOutput) -> list[str]:
        """Texts of all responses, without the stop token that ended them."""
        flat, rows, start = output.token_ids.tolist(), [], 0
        for length in output.lengths.tolist():
            ids = flat[start : start + length]
            start += length
            rows.append(ids[:-1] if ids and ids[-1] in self._stop_ids else ids)
        return list(self._tokenizer.batch_decode(rows, skip_special_tokens=False))
