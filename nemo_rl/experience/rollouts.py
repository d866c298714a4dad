"""Steps from prompts to scored samples: seeds, sampling settings, texts and rewards of single-turn rollouts.

Used by the rollout worker for training and by the evaluator for held-out prompts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock

from transformers import PreTrainedTokenizerBase

from nemo_rl.config.generation import GenerationConfig
from nemo_rl.data.datasets import Prompt
from nemo_rl.environments.interfaces import Environment, EnvReport, Response
from nemo_rl.errors import WorkerError, name_some
from nemo_rl.models.generation.interfaces import GenerationOutput, SamplingParams

__all__ = ["ResponseScorer", "ScoredSamples", "check_versions", "row_seeds", "sampling_params"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredSamples:
    """Responses with their rewards."""

    output: GenerationOutput
    texts: tuple[str, ...]
    """One per response, as it was scored."""
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
    """Decodes responses and scores them; one call at a time, whichever thread asks.

    Args:
        sampling: how responses are sampled; a stop token at their end is no part of their text.
    """

    def __init__(
        self, environment: Environment, tokenizer: PreTrainedTokenizerBase, *, sampling: SamplingParams
    ) -> None:
        self._environment, self._tokenizer = environment, tokenizer
        self._stop_ids = frozenset(sampling.stop_token_ids)
        self._lock = Lock()

    def score(self, prompts: Sequence[Prompt], output: GenerationOutput) -> ScoredSamples:
        """Score the rows of whole groups.

        Args:
            prompts: one per group.

        Raises:
            RewardError: a reward function failed.
        """
        with self._lock:
            texts = self._decode(output)
            measured = zip(texts, output.lengths.tolist(), output.truncated.tolist(), strict=True)
            responses = [Response(text=text, num_tokens=length, truncated=cut) for text, length, cut in measured]
            size = len(responses) // max(1, len(prompts))
            report = self._environment.score([prompt for prompt in prompts for _ in range(size)], responses)
        return ScoredSamples(output=output, texts=tuple(texts), report=report)

    def _decode(self, output: GenerationOutput) -> list[str]:
        """Texts of all responses, without the stop token that ended them."""
        flat, rows, start = output.token_ids.tolist(), [], 0
        for length in output.lengths.tolist():
            ids = flat[start : start + length]
            start += length
            rows.append(ids[:-1] if ids and ids[-1] in self._stop_ids else ids)
        return list(self._tokenizer.batch_decode(rows, skip_special_tokens=False))
