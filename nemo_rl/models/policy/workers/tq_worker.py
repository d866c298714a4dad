"""`TQWorker`: the data plane half of every policy worker, in front of the one that holds the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from nemo_rl.data_plane.interfaces import KVBatchMeta
from nemo_rl.data_plane.schema import DP_TRAIN_FIELDS
from nemo_rl.data_plane.worker_mixin import TQWorkerMixin
from nemo_rl.distributed.collectives import destroy_process_group
from nemo_rl.models.policy.interfaces import TrainResult
from nemo_rl.models.policy.workers.training_worker import TrainingWorker
from nemo_rl.utils.metrics import merge_metrics

__all__ = ["TQWorker"]


class TQWorker(TQWorkerMixin, TrainingWorker):
    """A policy worker on the data plane; combined with an engine's worker behind it."""

    pad_values: Mapping[str, float]

    def train_presharded(
        self, meta: KVBatchMeta, loss_fn: object, *, fields: Sequence[str] = DP_TRAIN_FIELDS, eval_mode: bool = False
    ) -> TrainResult:
        """(collective) As in the mixin. The metrics of all microbatches go to the driver as one."""
        result = super().train_presharded(meta, loss_fn, fields=fields, eval_mode=eval_mode)
        assert isinstance(result, TrainResult)
        return replace(result, metrics=(merge_metrics(result.metrics),))

    def shutdown(self) -> None:
        """Ends the client and leaves the process group. Idempotent."""
        self.close_data_plane()
        if self.watch is not None:
            self.watch.close()
        super().shutdown()
        destroy_process_group()
