"""`RunFacts`: what the hub knows of a run beside its pictures, as viewers get it."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nemo_rl.tracer.protocol import RunState

__all__ = ["RunFacts"]

METRICS_KEPT = 1000
"""Steps whose metrics viewers that come later get."""


@dataclass(kw_only=True, slots=True)
class RunFacts:
    """One run."""

    run: str
    name: str = ""
    model: Mapping[str, Any] = field(default_factory=dict)
    layout: Mapping[str, Any] = field(default_factory=dict)
    unobserved: Mapping[str, str] = field(default_factory=dict)
    """Kinds of sites that cannot be looked at, and why."""
    state: RunState = RunState.RUNNING
    text: str = ""
    """Why it ended."""
    step: int | None = None
    """The newest that is known."""
    world: int = 0
    """Ranks that send."""
    first_non_finite: Mapping[str, object] | None = None
    metrics: deque[Mapping[str, object]] = field(default_factory=lambda: deque(maxlen=METRICS_KEPT))
    """`metrics` messages of the last steps."""

    def as_record(self) -> dict[str, object]:
        """As it is in messages."""
        return {
            "run": self.run,
            "name": self.name,
            "model": dict(self.model),
            "layout": dict(self.layout),
            "unobserved": dict(self.unobserved),
            "state": self.state.value,
            "text": self.text,
            "step": self.step,
            "world": self.world,
            "first_non_finite": self.first_non_finite,
        }

    def take(self, record: Mapping[str, Any]) -> None:
        """Facts of a record, as far as it has them and they can be read."""
        for name in ("name", "text"):
            if isinstance(value := record.get(name), str):
                setattr(self, name, value)
        for name in ("model", "layout", "unobserved"):
            if isinstance(value := record.get(name), Mapping):
                setattr(self, name, dict(value))
        if record.get("state") in list(RunState):
            self.state = RunState(record["state"])
        for name in ("step", "world"):
            if type(value := record.get(name)) is int:
                setattr(self, name, value)
        if isinstance(found := record.get("first_non_finite"), Mapping):
            self.first_non_finite = dict(found)
