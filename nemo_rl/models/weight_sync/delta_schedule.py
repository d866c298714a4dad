"""`DeltaSchedule`: which refits send what has changed, and which send every weight whole.

Held by `WeightSync`, on the driver. Invariant: a delta is sent only to engines that all hold the version it builds on.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from nemo_rl.errors import ConfigError
from nemo_rl.models.weight_sync.buckets import DeltaRefit, WeightSlot
from nemo_rl.models.weight_sync.delta_buckets import NO_VERSION

__all__ = ["DeltaSchedule"]

logger = logging.getLogger(__name__)

KEY = "policy.generation.refit_delta"


class DeltaSchedule:
    """One of a run.

    Args:
        full_every: of so many refits one is whole, whatever happens.
    """

    def __init__(self, full_every: int) -> None:
        self._full_every = full_every
        self._num_since_full = 0
        self._slots: tuple[WeightSlot, ...] = ()
        self._births: Mapping[int, int] = {}

    def next(
        self,
        version: int,
        *,
        before: int,
        slots: tuple[WeightSlot, ...],
        births: Mapping[int, int],
        held: Mapping[int, int | None],
    ) -> DeltaRefit:
        """How version `version` is sent.

        Args:
            before: version of the last refit; -1 when there was none, or it failed.
            slots: what is sent.
            births: of the engines: another count is another process.
            held: version that each engine can build on; None: it takes whole buckets alone.

        Raises:
            ConfigError: an engine takes whole buckets alone.
        """
        deaf = [engine for engine, base in held.items() if base is None]
        if deaf:
            raise ConfigError(
                f"{KEY}.enabled: true, but engine {deaf[0]} takes whole weights alone: its `RefitTarget` has no "
                "`delta_base`; set it to false"
            )
        doubt = self._doubt(before, slots, births, held)
        if doubt is not None and self._slots:
            logger.info("refit to version %d sends all weights whole: %s", version, doubt)
        self._num_since_full = 0 if doubt is not None else self._num_since_full + 1
        self._slots, self._births = slots, dict(births)
        return DeltaRefit(base=before if doubt is None else NO_VERSION, version=version)

    def _doubt(
        self,
        before: int,
        slots: tuple[WeightSlot, ...],
        births: Mapping[int, int],
        held: Mapping[int, int | None],
    ) -> str | None:
        """Why a delta is not to be trusted; None: it is."""
        if before == NO_VERSION:
            return "no refit has succeeded since"
        if births != self._births:
            return "the engines are not the same processes"
        if slots != self._slots:
            return "other weights are sent than before"
        if set(held.values()) != {before}:
            return f"the engines do not all hold version {before}: {dict(held)}"
        return f"one of {self._full_every} is" if self._num_since_full + 1 >= self._full_every else None
