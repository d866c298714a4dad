"""Several generation engines behind one `GenerationInterface`.

The rollout worker calls `generate`; new weights come through `WeightSync`, past this class. Engines take blocks of
prompts one after another; the block of an engine that dies or hangs is sampled by another one, to the same bits.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from threading import Condition, Thread
from typing import TypeVar

import torch

from nemo_rl.distributed.calls import Call, Request, ask
from nemo_rl.distributed.worker_fleet import WorkerFleet
from nemo_rl.errors import WorkerLate, WorkerLost
from nemo_rl.models.generation.interfaces import GenerationInterface, GenerationOutput, GenerationRequest
from nemo_rl.models.generation.work import cut_request, join_outputs
from nemo_rl.utils.metrics import Mean, Min, Reduction, Sum

__all__ = ["GenerationReplicas"]

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

STAGE = "generation"
ENGINE_KEY = "policy.generation.engine_timeout_s"
GRACE_S = 5.0
"""After the deadline of a block, until its own caller has to have said so."""


class GenerationReplicas(GenerationInterface):
    """Engines of a fleet.

    Args:
        engines: each worker is a `GenerationInterface`.
        batch_rows: rows that an engine decodes at once.
        timeout_s: deadline of one block; an engine that is later is lost.
    """

    def __init__(self, engines: WorkerFleet, *, batch_rows: int, timeout_s: float) -> None:
        self._engines, self._batch_rows, self._timeout_s = engines, batch_rows, timeout_s
        self._version = -1

    def generate(self, request: GenerationRequest) -> GenerationOutput:
        """Samples all rows.

        Raises:
            UserError, WorkerError: an engine failed, or all are lost: the first cause.
        """
        blocks = cut_request(request, num_engines=self._engines.size, batch_rows=self._batch_rows)
        round_ = _Round(blocks, self._engines, timeout_s=self._timeout_s)
        output = join_outputs(round_.run())
        return replace(output, metrics={**output.metrics, **round_.metrics()})

    def use(self, engines: WorkerFleet) -> None:
        """From here on these: some have been replaced."""
        self._engines = engines

    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]], *, version: int) -> int:
        held = self._run(ask(GenerationInterface.update_weights, weights=list(weights), version=version))
        self._version = next(iter(held.values()))
        return self._version

    def prepare_for_generation(self) -> None:
        self._run(ask(GenerationInterface.prepare_for_generation))

    def finish_generation(self) -> None:
        self._run(ask(GenerationInterface.finish_generation))

    @property
    def weight_version(self) -> int:
        return self._version

    def shutdown(self) -> None:
        self._engines.shutdown()

    def _run(self, request: Request[_T]) -> dict[int, _T]:
        return self._engines.run(request, stage=STAGE, timeout_s=self._timeout_s)


class _Round:
    """The blocks of one request on their way through the engines; one thread for each engine."""

    def __init__(self, blocks: list[GenerationRequest], engines: WorkerFleet, *, timeout_s: float) -> None:
        self._blocks, self._engines, self._timeout_s = blocks, engines, timeout_s
        self._waiting = deque(range(len(blocks)))
        self._outputs: dict[int, GenerationOutput] = {}
        self._failure: Exception | None = None
        self._changed = Condition()
        self._num_serving = 0
        self._num_lost = self._num_again = 0
        self._speeds: dict[int, Mean] = {}

    def run(self) -> list[GenerationOutput]:
        """Outputs of the blocks, in their order."""
        numbers = self._engines.numbers
        if not numbers:
            raise self._engines.none_left(STAGE)
        self._num_serving = len(numbers)
        if len(numbers) == 1:
            # An engine of this process belongs to this thread.
            self._serve(numbers[0])
        else:
            for number in numbers:
                Thread(target=self._serve, args=(number,), name=f"engine {number}", daemon=True).start()
        with self._changed:
            while len(self._outputs) < len(self._blocks) and self._failure is None and self._num_serving:
                self._changed.wait(self._timeout_s)
        if self._failure is not None:
            raise self._failure
        if len(self._outputs) < len(self._blocks):
            raise self._engines.none_left(STAGE)
        return [self._outputs[block] for block in range(len(self._blocks))]

    def metrics(self) -> dict[str, Reduction]:
        """What became of the engines."""
        speeds = {f"engine_{number}/tokens_per_s": speed for number, speed in sorted(self._speeds.items())}
        return {
            **speeds,
            "engines": Min(float(len(self._engines))),
            "engines_lost": Sum(float(self._num_lost)),
            "rows_sampled_again": Sum(float(self._num_again)),
        }

    def _serve(self, number: int) -> None:
        """One engine takes block after block."""
        try:
            while (block := self._take()) is not None:
                try:
                    self._sample(number, block)
                except WorkerLost as error:
                    self._give_back(number, block, error)
                    return
        except Exception as error:  # noqa: BLE001 - raised by `run`
            with self._changed:
                self._failure = self._failure or error
        finally:
            with self._changed:
                self._num_serving -= 1
                self._changed.notify_all()

    def _take(self) -> int | None:
        """The next block; waits while others may still give theirs back. None: all have been sampled."""
        give_up = time.monotonic() + self._timeout_s + GRACE_S
        with self._changed:
            while not self._waiting and len(self._outputs) < len(self._blocks) and self._failure is None:
                if not self._changed.wait(max(0.0, give_up - time.monotonic())):
                    return None
            return self._waiting.popleft() if self._waiting and self._failure is None else None

    def _sample(self, number: int, block: int) -> None:
        request = ask(GenerationInterface.generate, request=self._blocks[block])
        began = time.monotonic()
        output = self._engines.run_one(
            number, Call(request=request, stage=STAGE, timeout_s=self._timeout_s, deadline_key=ENGINE_KEY)
        )
        spent = Mean(float(len(output.token_ids)), time.monotonic() - began)
        with self._changed:
            self._outputs[block] = output
            self._speeds[number] = self._speeds.get(number, Mean(0.0, 0.0)).merge(spent)
            self._changed.notify_all()

    def _give_back(self, number: int, block: int, error: WorkerLost) -> None:
        rows = len(self._blocks[block].seeds)
        with self._changed:
            self._waiting.appendleft(block)
            self._num_lost += 1
            self._num_again += rows
            self._changed.notify_all()
        why = "hangs" if isinstance(error, WorkerLate) else "is gone"
        logger.warning("engine %d %s; its %d rows are sampled again by another one", number, why, rows)
