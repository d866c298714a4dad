"""`MegatronTQWorker`: the Megatron worker on the data plane; the worker itself runs where that is not installed."""

from __future__ import annotations

from nemo_rl.models.policy.workers.megatron_policy_worker import MegatronPolicyWorker
from nemo_rl.models.policy.workers.tq_worker import TQWorker

__all__ = ["MegatronTQWorker"]


class MegatronTQWorker(TQWorker, MegatronPolicyWorker):
    """Reads its shard from the data plane and writes its results back."""
