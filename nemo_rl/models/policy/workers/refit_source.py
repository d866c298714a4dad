"""`RefitSource`: how a policy worker hands its weights to the generation engines.

A mixin of the worker; `WeightSync` drives it from outside, one bucket at a time. Invariant: every rank takes part in
gathering each weight, in the same order; the buffer is freed at the end.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from nemo_rl.models.policy.workers.base import WorkerState
from nemo_rl.models.policy.workers.life_cycle import LifeCycle
from nemo_rl.models.weight_sync.buckets import BucketFiller, RefitPlan, free_bytes
from nemo_rl.models.weight_sync.ipc_handle import IpcHandle
from nemo_rl.models.weight_sync.refit_group import RefitGroup, RefitGroupSpec, open_store

__all__ = ["RefitSource"]


class RefitSource(LifeCycle):
    """The sending side of a refit."""

    _filler: BucketFiller | None = None
    _buffer: torch.Tensor | None = None
    _num_buckets = 0
    _refit_group: RefitGroup | None = None
    _refit_store: object | None = None

    def refit_free_bytes(self, *, on_device: bool) -> int:
        """Memory that a buffer may take a part of: of the worker's device, or of this machine."""
        return free_bytes(self.device if on_device else torch.device("cpu"))

    def begin_refit(self, plan: RefitPlan, *, on_device: bool) -> int:
        """Allocates the buffer; returns the number of buckets.

        Args:
            on_device: the buffer is on the worker's device, else on the CPU, where only rank 0 needs one.
        """
        self._require("begin_refit", WorkerState.TRAINING, WorkerState.LOGPROBS, WorkerState.REFIT)
        self._filler = BucketFiller(plan, self._whole_weights())
        self._num_buckets = len(plan.buckets())
        self._buffer = None
        if on_device:
            with self._device_side.plain_segments():
                self._buffer = torch.empty(plan.bucket_bytes, dtype=torch.uint8, device=self.device)
        elif self.rank == 0:
            self._buffer = torch.empty(plan.bucket_bytes, dtype=torch.uint8)
        return self._num_buckets

    def share_refit_buffer(self) -> IpcHandle:
        """A handle by which an engine on the same GPU opens the buffer."""
        assert self._buffer is not None, "begin_refit comes first"
        return IpcHandle.share(self._buffer)

    def fill_bucket(self) -> None:
        """(collective) The next bucket is in the buffer, and the device is done with it."""
        self._fill()
        if self._device_side.is_cuda:
            torch.cuda.synchronize(self.device)

    def next_bucket(self) -> np.ndarray | None:
        """(collective) The next bucket as uint8 at rank 0, valid until the one after it; None elsewhere."""
        size = self._fill()
        return self._buffer[:size].numpy() if self._buffer is not None else None

    def end_refit(self) -> None:
        """Frees the buffer. Idempotent."""
        self._filler, self._buffer = None, None
        if self._device_side.is_cuda:
            # Memory that another process had open is only freed when torch looks for it.
            torch.cuda.ipc_collect()
        self._device_side.release_cache()

    def open_refit_store(self, *, address: str, world_size: int, timeout_s: float) -> int:
        """(rank 0) Opens the store of the refit group; returns its port."""
        store = open_store(address, world_size, timeout_s=timeout_s)
        self._refit_store = store
        return int(store.port)

    def join_refit_group(self, spec: RefitGroupSpec) -> None:
        """(rank 0, while every engine joins) Makes the refit group, which lives as long as the worker."""
        self._refit_group = RefitGroup(spec, device=self.device, store=self._refit_store)  # type: ignore[arg-type]

    def broadcast_weights(self) -> None:
        """(collective, while every engine receives) Sends all buckets from rank 0.

        Raises:
            CollectiveTimeout: an engine is gone or late. An error of rank 0 reaches the engines as text.
        """
        for _ in range(self._num_buckets):
            try:
                size = self._fill()
            except Exception as error:
                if self._refit_group is not None:
                    self._refit_group.send_error(f"{type(error).__name__}: {error}")
                raise
            if self._refit_group is not None and self._buffer is not None:
                self._refit_group.send(self._buffer[:size])

    def shutdown(self) -> None:
        if self._refit_group is not None:
            self._refit_group.close()
        self._refit_group, self._refit_store = None, None
        super().shutdown()

    def _fill(self) -> int:
        assert self._filler is not None, "begin_refit comes first"
        return self._filler.fill(self._buffer)

    def _whole_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(collective) Whole weights on the device, one at a time, in the order of `prepare_refit_info`."""
        raise NotImplementedError
