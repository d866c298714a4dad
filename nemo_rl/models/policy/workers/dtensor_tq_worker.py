"""`DTensorTQWorker`: the DTensor worker on the data plane; the worker itself runs where that is not installed."""

from __future__ import annotations

from nemo_rl.models.policy.workers.dtensor_policy_worker import DTensorPolicyWorker
from nemo_rl.models.policy.workers.tq_worker import TQWorker

__all__ = ["DTensorTQWorker"]


class DTensorTQWorker(TQWorker, DTensorPolicyWorker):
    """Reads its shard from the data plane and writes its results back."""
