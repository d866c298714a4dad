"""The interface of a generation engine; its records, of `requests`, can be imported from here as well.

A user-defined engine (`policy.generation.backend: module:name`) is a class or function that is given `spec`,
an `EngineSpec`, and returns a `GenerationInterface` that is a `RefitTarget` as well. Each replica has its own worker.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from nemo_rl.errors import UserError
from nemo_rl.models.generation.continuous import ContinuousDecoding
from nemo_rl.models.generation.requests import (
    BASE,
    EngineLoad,
    EngineSpec,
    GenerationOutput,
    GenerationRequest,
    GroupSamples,
    RankMemoryChange,
    SamplingParams,
    SleepReport,
)
from nemo_rl.routes.shape import RecordedRoutes

__all__ = [
    "BASE",
    "EngineLoad",
    "EngineSpec",
    "GenerationInterface",
    "GenerationOutput",
    "GenerationRequest",
    "GroupSamples",
    "RankMemoryChange",
    "RecordedEngine",
    "RecordedRoutes",
    "SamplingParams",
    "SleepReport",
    "TracedEngine",
    "traced_row",
]


class GenerationInterface(ABC):
    """A generation backend, possibly of several replicas."""

    _decoding: ContinuousDecoding | None = None
    """The running batch that feeds and `abort` go to; None: the engine has no continuous mode."""

    @abstractmethod
    def generate(self, request: GenerationRequest) -> GenerationOutput:
        """Samples all rows; an empty request gives an empty output."""

    def stream(self, request: GenerationRequest) -> Iterator[GroupSamples]:
        """Yield whole groups as their rows end, each group once; their metrics add up to those of `generate`.

        An engine that does not override it yields all groups at the end.
        """
        if request.prompt_ids:
            yield GroupSamples(groups=tuple(range(len(request.prompt_ids))), output=self.generate(request))

    def abort(self, names: Sequence[str]) -> None:
        """Take running groups out of a continuous engine, by `GenerationRequest.names`; no stream gives them.

        Raises:
            NotImplementedError: the engine has no continuous mode.
        """
        self._running().abort(names)

    def feed(self, name: str) -> Iterator[GroupSamples]:
        """Yield rows that `add_to_feed` brings over time, as they end, until `close_feed`.

        Calls for a feed may come in any order; a name is used once in the life of an engine.

        Raises:
            NotImplementedError: the engine has no continuous mode.
        """
        return self._running().feed(name)

    def add_to_feed(self, name: str, request: GenerationRequest, first: int) -> None:
        """Let a request with groups of one row join a feed.

        Args:
            first: number in the feed of the first prompt of the request.
        """
        self._running().add_to_feed(name, request, first)

    def abort_in_feed(self, name: str, numbers: Sequence[int]) -> None:
        """Take rows with these numbers out of a feed, which never gives them; those that have ended stay."""
        self._running().abort_in_feed(name, numbers)

    def close_feed(self, name: str) -> None:
        """Take all rows of a feed out, and end it. Idempotent."""
        self._running().close_feed(name)

    def _running(self) -> ContinuousDecoding:
        if self._decoding is None:
            raise NotImplementedError(
                f"{type(self).__name__} has no continuous mode, so that rows cannot come one by one; set "
                "grpo.async.enabled=false and experience.conversation.enabled=false, or use another engine"
            )
        return self._decoding

    def take_load(self) -> EngineLoad:
        """Return what a continuous engine has done since the last call."""
        return EngineLoad() if self._decoding is None else self._decoding.take_load()

    @abstractmethod
    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]], *, version: int) -> int:
        """Loads every weight by HF name and returns the version now in use.

        Raises:
            ValueError: a name is missing, unknown or of another shape; the old weights and version stay in use.
        """

    def update_adapter(self, adapter: Iterable[tuple[str, torch.Tensor]], *, version: int) -> int:
        """Hold an adapter, A and s B of every adapted layer, beside the frozen weights; rows that begin have it.

        Raises:
            NotImplementedError: the engine serves no adapters.
            ValueError: a name is missing, unknown or of another shape; the adapter that is in use stays in use.
        """
        raise self._no_adapters()

    def _no_adapters(self) -> NotImplementedError:
        return NotImplementedError(
            f"{type(self).__name__} serves no adapters beside its weights; set policy.lora.serve=merged, or use "
            "another engine"
        )

    @abstractmethod
    def prepare_for_generation(self) -> None:
        """Makes the engine ready; idempotent."""

    @abstractmethod
    def finish_generation(self) -> None:
        """Frees caches between rollouts; idempotent."""

    def sleep(self, level: int) -> SleepReport:
        """Free memory while nobody samples, until `prepare_for_generation`; a refit may come before. Idempotent.

        Args:
            level: 1: weights go to the CPU's memory, caches are dropped; 2: both are dropped, and a refit must bring
                weights.

        Raises:
            NotImplementedError: the engine cannot sleep. WorkerError: rows are running.
        """
        raise NotImplementedError(
            f"{type(self).__name__} cannot sleep; set policy.generation.sleep_level=0, or use another engine"
        )

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
        """Stop showing the step. Idempotent."""


class RecordedEngine:
    """An engine whose tensors can be recorded while it decodes (`EngineSpec.record`)."""

    _recording: Any
    """`WorkersRecording` or `DecodeRecording`; None: nothing can be recorded."""

    def begin_recording(self, step: int) -> None:
        """Record the requests that follow and have keys, until `end_recording`."""
        if self._recording is None:
            raise UserError(f"step {step}: this engine was started without anything to record; see diagnostics.record")
        self._recording.begin(step)

    def end_recording(self) -> None:
        """End the records of the step. Idempotent."""
        if self._recording is not None:
            self._recording.end()


def traced_row(engine: int, row: int) -> str:
    """Name of a row in the tracer's pictures of decoding: where it is decoded its key is not known.

    Args:
        row: counted from 0 through all requests that the engine got in the step.
    """
    return f"engine {engine} row {row}"
