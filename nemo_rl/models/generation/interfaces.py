"""The interface of a generation engine: what it is given and what it returns.

A user-defined engine (`policy.generation.backend: module:name`) is a class or function that is given `spec`,
an `EngineSpec`, and returns a `GenerationInterface` that is a `RefitTarget` as well. Each replica has its own worker.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from nemo_rl.config.policy import PolicyConfig
from nemo_rl.models.policy.tracing.phases import TraceSpec
from nemo_rl.routes.places import RecordedRoutes
from nemo_rl.utils.metrics import Reduction

__all__ = [
    "EngineSpec",
    "GenerationInterface",
    "GenerationOutput",
    "GenerationRequest",
    "RecordedRoutes",
    "SamplingParams",
    "TracedEngine",
    "traced_row",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSpec:
    """What one replica needs to start."""

    policy: PolicyConfig
    use_gpu: bool = False
    threads: int = 1
    number: int = 0
    """Of the replica."""
    num_engines: int = 1
    """Replicas of the run."""
    trace: TraceSpec | None = None
    """The tracer's hub; None: none."""
    weight_version: int = -1
    """Of the weights of `policy.model_name`; -1: a refit brings others before anything is sampled."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How tokens are drawn; the same for every row of a request."""

    temperature: float
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int | None = None
    max_new_tokens: int
    stop_token_ids: tuple[int, ...]
    stop_strings: tuple[str, ...] = ()

    @property
    def is_plain(self) -> bool:
        """Whether tokens are drawn from the model's own distribution."""
        return self.temperature == 1.0 and self.top_p == 1.0 and self.top_k is None


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationRequest:
    """P prompts, G samples of each. Rows come back prompt by prompt: row = p * G + g.

    Example:
        Two prompts, two samples each: `prompt_ids=[[1, 2], [3]]`, `seeds=[7, 8, 9, 10]`.
    """

    prompt_ids: tuple[tuple[int, ...], ...]
    seeds: tuple[int, ...]
    """P * G seeds. What a row samples depends on its seed, its prompt and the weights alone."""
    sampling: SamplingParams
    with_routes: bool = False
    """Whether the output has the routes of experts; the model must have such."""
    with_support: bool = False
    """Whether the output has the sets that top-k and top-p kept; of the embedded engine alone."""
    forced: tuple[tuple[int, ...], ...] | None = None
    """The response of each row, decoded token by token as if it had been drawn, so that the output has its
    log-probabilities; stops and limits hold as for drawn ones. None: rows are drawn."""

    @property
    def group_size(self) -> int:
        return len(self.seeds) // len(self.prompt_ids) if self.prompt_ids else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationOutput:
    """N responses laid end to end."""

    token_ids: torch.Tensor
    """`[sum(lengths)]` int32, response tokens, the stop token included."""
    logprobs: torch.Tensor
    """`[sum(lengths)]` float32, log-probability under the distribution sampled from (temperature, top-p, top-k)."""
    lengths: torch.Tensor
    """`[N]` int64, at least 1."""
    truncated: torch.Tensor
    """`[N]` bool, True when `max_new_tokens` ended the row."""
    weight_version: int | tuple[int, ...]
    """Version of the weights that produced a row: one number for all rows, or one per row."""
    routes: RecordedRoutes | None = None
    """Of prompts and responses; None unless the request asks for them."""
    support: tuple[torch.Tensor, ...] | None = None
    """Kept sets of each row's tokens, uint8, laid out by `nemo_rl.models.support`; None unless the request asks."""
    cached_tokens: torch.Tensor | None = None
    """`[N]` int64, tokens of the prompt that a prefix cache had; None where there is no such cache."""
    metrics: Mapping[str, Reduction] = field(default_factory=dict)
    """What the engine tells of its work; a run logs it under `rollout/`."""

    @property
    def row_versions(self) -> tuple[int, ...]:
        """The weight version of each row."""
        version = self.weight_version
        return (version,) * len(self.lengths) if isinstance(version, int) else version


class GenerationInterface(ABC):
    """A generation backend, possibly of several replicas."""

    @abstractmethod
    def generate(self, request: GenerationRequest) -> GenerationOutput:
        """Samples all rows; an empty request gives an empty output."""

    @abstractmethod
    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]], *, version: int) -> int:
        """Loads every weight by HF name and returns the version now in use.

        Raises:
            ValueError: a name is missing, unknown or of another shape; the old weights and version stay in use.
        """

    @abstractmethod
    def prepare_for_generation(self) -> None:
        """Makes the engine ready; idempotent."""

    @abstractmethod
    def finish_generation(self) -> None:
        """Frees caches between rollouts; idempotent."""

    @property
    @abstractmethod
    def weight_version(self) -> int:
        """-1 before the first `update_weights`."""

    @abstractmethod
    def shutdown(self) -> None:
        """Ends replicas. Idempotent."""


class TracedEngine(ABC):
    """An engine whose decoding the live tracer can show."""

    @abstractmethod
    def begin_tracing(self, step: int, watches: Sequence[str], keys: Sequence[str]) -> None:
        """The requests from here on show the hub what is watched of them, until `end_tracing`.

        Args:
            watches: texts of a `Plan`.
            keys: rows whose tokens are shown one by one, as `traced_row` names them.
        """

    @abstractmethod
    def end_tracing(self) -> None:
        """Nothing of the step is shown from here on. Idempotent."""


def traced_row(engine: int, row: int) -> str:
    """Name of a row in the tracer's pictures of decoding: where it is decoded its key is not known.

    Args:
        row: counted from 0 through all requests that the engine got in the step.
    """
    return f"engine {engine} row {row}"
