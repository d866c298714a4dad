"""Single-turn rollouts: prompts -> samples -> texts -> rewards.

Called by the rollout worker, for training and for validation.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from nemo_rl.config.policy import GenerationConfig
from nemo_rl.data.datasets import Prompt
from nemo_rl.environments.interfaces import Environment, EnvReport, Response
from nemo_rl.errors import WorkerError, name_some
from nemo_rl.models.generation.interfaces import (
    GenerationInterface,
    GenerationOutput,
    GenerationRequest,
    SamplingParams,
)

__all__ = ["Rollouts", "row_seeds", "run_rollouts", "sampling_params"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollouts:
    """P prompts with G responses each, scored."""

    output: GenerationOutput
    texts: tuple[str, ...]
    """Of the responses, as they are scored."""
    report: EnvReport
    """Rewards of all rows, and what happened while scoring."""


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


def run_rollouts(
    prompts: Sequence[Prompt],
    *,
    group_size: int,
    generation: GenerationInterface,
    environment: Environment,
    tokenizer: PreTrainedTokenizerBase,
    sampling: SamplingParams,
    seeds: Sequence[int],
    version: int | None,
    with_routes: bool = False,
    with_support: bool = False,
) -> Rollouts:
    """Samples `group_size` responses per prompt and scores them.

    Args:
        seeds: one for each row, prompt by prompt.
        version: of the weights that every row must be sampled from; None takes any, and the rows say which.
        with_routes: the engines record the routes of experts.
        with_support: the engines record the sets that top-k and top-p kept.

    Raises:
        WorkerError: an engine holds other weights than `version`.
        RewardError: a reward function failed.
    """
    request = GenerationRequest(
        prompt_ids=tuple(prompt.ids for prompt in prompts),
        seeds=tuple(seeds),
        sampling=sampling,
        with_routes=with_routes,
        with_support=with_support,
    )
    output = generation.generate(request)
    others = set(output.row_versions) - {version}
    if version is not None and others:
        raise WorkerError(
            f"expected samples of weight version {version}, the engines hold {name_some(sorted(others))}",
            stage="rollout",
        )
    texts = decode_responses(output, tokenizer, sampling.stop_token_ids)
    measured = zip(texts, output.lengths.tolist(), output.truncated.tolist(), strict=True)
    responses = [Response(text=text, num_tokens=length, truncated=cut) for text, length, cut in measured]
    rows = [prompt for prompt in prompts for _ in range(group_size)]
    report = environment.score(rows, responses)
    return Rollouts(output=output, texts=tuple(texts), report=report)


def decode_responses(
    output: GenerationOutput, tokenizer: PreTrainedTokenizerBase, stop_token_ids: Sequence[int]
) -> list[str]:
    """Texts of all responses, without the stop token that ended them."""
    stops = set(stop_token_ids)
    flat, texts, start = output.token_ids.tolist(), [], 0
    for length in output.lengths.tolist():
        ids = flat[start : start + length]
        start += length
        texts.append(ids[:-1] if ids and ids[-1] in stops else ids)
    return list(tokenizer.batch_decode(texts, skip_special_tokens=False))
