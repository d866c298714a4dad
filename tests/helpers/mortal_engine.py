"""The embedded engine, but the process of an engine that a recipe names dies or stands still in the middle of a step.

`policy.generation.options`: `signal` (a name such as SIGKILL), `victims` (such as `engine 0 engine 1`), `at` (the
request in which, counted from 1) and `notes`, a folder where each victim leaves a file, so that its successor lives.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import cast

from nemo_rl.models.generation.interfaces import EngineSpec, GenerationOutput, GenerationRequest
from nemo_rl.models.generation.torch_engine.worker import EngineWorker

__all__ = ["build_mortal_engine"]


class MortalEngine(EngineWorker):
    """Ends itself in a request."""

    deadly: signal.Signals | None = None
    requests_left = 0

    def generate(self, request: GenerationRequest) -> GenerationOutput:
        self.requests_left -= 1
        if self.deadly is not None and self.requests_left == 0:
            os.kill(os.getpid(), self.deadly)
        return super().generate(request)


def build_mortal_engine(spec: EngineSpec) -> MortalEngine:
    """Starts one replica."""
    options = spec.policy.generation.options
    engine = cast("MortalEngine", MortalEngine.from_config(spec.policy, number=spec.number))
    note = Path(str(options["notes"])) / f"engine_{spec.number}"
    if f"engine {spec.number}" in str(options["victims"]) and not note.exists():
        note.touch()
        engine.deadly, engine.requests_left = signal.Signals[str(options["signal"])], int(str(options["at"]))
    return engine
