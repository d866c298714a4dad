"""Engines whose process dies or stands still in the middle of a step: the embedded one, and vLLM.

`policy.generation.options`: `signal` (a name such as SIGKILL), `victims` (such as `engine 0 engine 1`), `at` (the
request in which, counted from 1) and `notes`, a folder where each victim leaves a file, so that its successor lives.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import cast

from nemo_rl.config.generation import VllmConfig
from nemo_rl.config.policy import PolicyConfig
from nemo_rl.models.generation.interfaces import (
    EngineSpec,
    GenerationInterface,
    GenerationOutput,
    GenerationRequest,
)
from nemo_rl.models.generation.torch_engine.worker import EngineWorker
from nemo_rl.models.generation.vllm.start import build_vllm_worker

__all__ = ["build_mortal_engine", "build_mortal_vllm"]

LAST_WORD = ".ended"
"""Ending of the file that is made in the moment of its end."""
INTO_DECODING_S = 0.02
"""After which a request of vLLM is under way."""


class MortalEngine(EngineWorker):
    """Ends itself in a request."""

    deadly: Callable[[], None] | None = None
    requests_left = 0

    def generate(self, request: GenerationRequest) -> GenerationOutput:
        # The probe of a receipt is no request of a rollout.
        self.requests_left -= request.forced is None
        if self.deadly is not None and request.forced is None and self.requests_left == 0:
            self.deadly()
        return super().generate(request)


def build_mortal_engine(spec: EngineSpec) -> MortalEngine:
    """Starts one replica."""
    engine = cast("MortalEngine", MortalEngine.from_config(spec.policy, number=spec.number))
    deadly = _fate(spec)
    if deadly is not None:
        engine.deadly, engine.requests_left = deadly
    return engine


def build_mortal_vllm(spec: EngineSpec) -> GenerationInterface:
    """Starts one replica of vLLM, with a small cache."""
    worker = build_vllm_worker(_with_small_cache(spec))
    deadly = _fate(spec)
    if deadly is None:
        return worker
    generate, (end, left) = worker.generate, deadly

    def mortal(request: GenerationRequest) -> GenerationOutput:
        nonlocal left
        left -= request.forced is None
        if left == 0 and request.forced is None:
            threading.Timer(INTO_DECODING_S, end).start()
        return generate(request)

    worker.generate = mortal  # type: ignore[method-assign]
    return worker


def _with_small_cache(spec: EngineSpec) -> EngineSpec:
    generation = spec.policy.generation.model_copy(update={"vllm_cfg": VllmConfig(kv_cache_gib=0.05)})
    policy: PolicyConfig = spec.policy.model_copy(update={"generation": generation})
    return replace(spec, policy=policy)


def _fate(spec: EngineSpec) -> tuple[Callable[[], None], int] | None:
    """How its process ends, and in which request; None: this one lives."""
    options = spec.policy.generation.options
    note = Path(str(options["notes"])) / f"engine_{spec.number}"
    if f"engine {spec.number}" not in str(options["victims"]) or note.exists():
        return None
    note.touch()

    def end() -> None:
        note.with_suffix(LAST_WORD).touch()
        os.kill(os.getpid(), signal.Signals[str(options["signal"])])

    return end, int(str(options["at"]))
