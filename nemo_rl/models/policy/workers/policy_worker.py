"""`PolicyWorker`: one rank of the policy, put together from its parts.

Made by `compose`, in plain Python without Ray. The driver names its methods (`worker_groups.ask`). Invariant: nothing
of a worker is set from outside after it was made; methods marked (collective) are called on every rank in the same
order.

    PolicyWorker
      passes   Passes                           train, log-probabilities      -> engine, device_states, replay
      device_states     DeviceStates                        states, memory, reference     -> engine
      refit    RefitSource                      weights to the engines        -> engine, device_states
      saving   Saving                           checkpoints                   -> engine, device_states
      replay   WorkerReplay | NoReplay          routes of each pass
      recording  Recording                      records of each pass
      tracing  Tracing                          what the hub is shown
      engine   DTensorEngine | MegatronEngine   model, optimizer, runner
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from nemo_rl.config.policy import PolicyConfig
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.collectives import destroy_process_group
from nemo_rl.distributed.packing import PackPlan
from nemo_rl.models.policy.interfaces import LossFunction, TensorInfo, TrainResult
from nemo_rl.models.policy.recording import Recording
from nemo_rl.models.policy.routes.slices import RouteSlices
from nemo_rl.models.policy.routes.worker_replay import Replay
from nemo_rl.models.policy.steps import RankInfo
from nemo_rl.models.policy.tracing import Tracing
from nemo_rl.models.policy.workers.base import DeviceSide, WorkerState
from nemo_rl.models.policy.workers.device_states import DeviceStates
from nemo_rl.models.policy.workers.engine import Engine
from nemo_rl.models.policy.workers.passes import Passes, RankRoutes
from nemo_rl.models.policy.workers.refit_source import RefitSource
from nemo_rl.models.policy.workers.saving import Saving
from nemo_rl.models.top_k import TopTokens
from nemo_rl.models.weight_sync.buckets import RefitPlan
from nemo_rl.models.weight_sync.channel import ChannelOffer, ChannelRequest
from nemo_rl.models.weight_sync.receipt import Probe, ScoredProbe, Sent
from nemo_rl.models.weight_sync.transport import RefitGroupSpec
from nemo_rl.models.weights_digest import WeightsDigest, digest_weights

__all__ = ["PolicyWorker", "WorkerParts"]


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerParts:
    """The parts of a worker."""

    config: PolicyConfig
    here: RankInfo
    tokenizer: PreTrainedTokenizerBase
    device_side: DeviceSide
    engine: Engine
    replay: Replay
    device_states: DeviceStates
    passes: Passes
    recording: Recording
    tracing: Tracing
    refit: RefitSource
    saving: Saving
    owns_group: bool
    """The default process group ends with the worker."""


class PolicyWorker:
    """One rank of the policy. Starts ready for training.

    Example:
        >>> worker = compose_worker(config, rank=0, world_size=1, num_steps=10,
        ...                         collective_timeout_s=60, seed=0)               # doctest: +SKIP
        >>> worker.train(batch, PolicyLoss(config=LossConfig())).loss           # doctest: +SKIP
        (0.0123,)
    """

    def __init__(self, parts: WorkerParts) -> None:
        self.config, self.rank, self.device = parts.config, parts.here.rank, parts.here.device
        self.layout, self.world_size = parts.here.layout, parts.here.layout.world_size
        self.engine, self.replay, self.device_states = parts.engine, parts.replay, parts.device_states
        self.passes, self.refit, self.saving = parts.passes, parts.refit, parts.saving
        self.recording, self.tracing = parts.recording, parts.tracing
        self._device_side, self._owns_group = parts.device_side, parts.owns_group

    # Training and log-probabilities.

    def train(  # noqa: PLR0913 - a published interface, and its routes
        self,
        batch: BatchedDataDict,
        loss_fn: LossFunction,
        *,
        eval_mode: bool = False,
        gbs: int | None = None,
        mbs: int | None = None,
        plan: PackPlan | None = None,
        routes: RouteSlices | None = None,
    ) -> TrainResult:
        """(collective) Train one optimizer step per global batch; see `Passes.train`."""
        return self.passes.train(batch, loss_fn, eval_mode=eval_mode, gbs=gbs, mbs=mbs, plan=plan, routes=routes)

    def get_logprobs(
        self,
        batch: BatchedDataDict,
        *,
        mbs: int | None = None,
        plan: PackPlan | None = None,
        routes: RouteSlices | None = None,
        replay: bool = True,
    ) -> torch.Tensor:
        """(collective) Return `[N, T]` float32, position 0 is 0, padding is 0; all 0 before the last pipeline stage.

        See `Passes.get_logprobs`.
        """
        return self.passes.get_logprobs(batch, mbs=mbs, plan=plan, routes=routes, replay=replay)

    def get_reference_policy_logprobs(
        self, batch: BatchedDataDict, *, mbs: int | None = None, plan: PackPlan | None = None
    ) -> torch.Tensor:
        """(collective) Return `get_logprobs` under the reference weights, whose routers choose for themselves."""
        return self.passes.get_reference_policy_logprobs(batch, mbs=mbs, plan=plan)

    def record_routes(self, batch: BatchedDataDict, *, plan: PackPlan | None = None) -> RankRoutes:
        """(collective) Return log-probabilities, and the routes that the routers chose for themselves."""
        return self.passes.record_routes(batch, plan=plan)

    def get_topk_logprobs(
        self,
        batch: BatchedDataDict,
        wanted: TopTokens,
        *,
        plan: PackPlan | None = None,
        routes: RouteSlices | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(collective) Return ids `[N, T, k]` int32 and log-probabilities `[N, T, k]` float32 of the most likely tokens
        in the place of each token; all 0 before the last pipeline stage. See `Passes.get_topk_logprobs`."""
        return self.passes.get_topk_logprobs(batch, wanted, plan=plan, routes=routes)

    def get_topk_logits(
        self, batch: BatchedDataDict, *, k: int, mbs: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(collective) Return values `[N, T, k]` float32 and ids `[N, T, k]` int64; all 0 before the last pipeline
        stage."""
        return self.passes.get_topk_logits(batch, k=k, mbs=mbs)

    def begin_recording(self, step: int) -> None:
        """Record the passes from here on, as the worker's `RecordSpec` says, until `end_recording`."""
        self.recording.begin(step)

    def end_recording(self) -> None:
        """Complete the records of the step. Idempotent."""
        self.recording.end()

    def begin_tracing(self, step: int, watches: Sequence[str], keys: Sequence[str]) -> None:
        """Show the hub what is watched of the passes from here on, until `end_tracing`; see `SiteTracing.begin`."""
        self.tracing.begin(step, watches=watches, keys=keys)

    def end_tracing(self) -> None:
        """End the traced step. Idempotent."""
        self.tracing.end()

    # States and memory.

    def prepare_for_lp_inference(self) -> None:
        """Bring weights to the device, drop gradients, optimizer state on the CPU."""
        self.device_states.change_state(WorkerState.LOGPROBS)

    def prepare_for_training(self) -> None:
        """Bring weights and optimizer state on the device."""
        self.device_states.change_state(WorkerState.TRAINING)

    def offload_before_refit(self) -> None:
        """Free what a weight export does not need: gradients and optimizer state."""
        self.device_states.change_state(WorkerState.REFIT)

    def offload_after_refit(self) -> None:
        """Free the device for generation: everything on the CPU."""
        self.device_states.change_state(WorkerState.OFFLOADED)

    def use_reference_model(self) -> AbstractContextManager[None]:
        """(collective) Put the reference weights in place; the policy's come back on exit, also after an error."""
        return self.device_states.use_reference_model()

    def memory_report(self) -> dict[str, int]:
        """Return bytes since the last report; see `DeviceStates.memory_report`."""
        return self.device_states.memory_report()

    # Refit; see `RefitSource`.

    def prepare_refit_info(self) -> dict[str, TensorInfo]:
        """Return name, shape and dtype of every weight in HF naming, in export order."""
        return self.engine.weight_infos()

    def prepare_adapter_info(self) -> dict[str, TensorInfo]:
        """Return name, shape and dtype of every tensor of the adapter, in the order in which it is sent."""
        return self.engine.adapter_infos()

    def refit_free_bytes(self, *, on_device: bool) -> int:
        """Return memory that a buffer may take a part of."""
        return self.refit.free_bytes(on_device=on_device)

    def offer_refit(
        self, *, kind: Literal["weights", "adapter"], on_device: bool
    ) -> tuple[dict[str, tuple[int, ...]], int]:
        """Return the shapes of what a refit would bring, empty but at rank 0, and `refit_free_bytes`."""
        free = self.refit_free_bytes(on_device=on_device)
        if self.rank:
            return {}, free
        infos = self.prepare_adapter_info() if kind == "adapter" else self.prepare_refit_info()
        return {name: info.shape for name, info in infos.items()}, free

    def begin_refit(self, plan: RefitPlan, *, on_device: bool) -> int:
        """Allocate the buffer; return the number of buckets."""
        return self.refit.begin(plan, on_device=on_device)

    def open_refit_channel(self, plan: RefitPlan, request: ChannelRequest) -> ChannelOffer | None:
        """Begin a refit whose buckets engines read by themselves; return where, or None for a rank that offers none."""
        return self.refit.open_channel(plan, request)

    def send_buckets(self, num_readers: Mapping[int, int]) -> None:
        """(collective, while the engines receive) Fill the buckets, one while the engines read the one before it.

        Args:
            num_readers: rank -> engines that read its buckets.
        """
        self.refit.send_buckets(num_readers)

    def hold_buckets(self) -> None:
        """(collective) Fill all buckets, which engines read one after the other until `end_refit`."""
        self.refit.hold_buckets()

    def next_bucket(self) -> np.ndarray | None:
        """(collective) Return the next bucket as uint8 at rank 0, None elsewhere."""
        return self.refit.next_bucket()

    def end_refit(self) -> Sent:
        """Free the buffer; say what was sent since `begin_refit`. Idempotent."""
        return self.refit.end()

    def score_probe(self, probe: Probe, *, of_base: bool = False) -> ScoredProbe:
        """(collective) Return how this policy scores the fixed rows of a receipt.

        Args:
            of_base: without its adapter.
        """
        started, batch, logprobs = time.monotonic(), probe.batch(), tuple[float, ...]()
        with self.engine.without_adapter() if of_base else nullcontext():
            scored_NT = self.passes.score(batch)
        if self.layout.is_writer(self.rank):
            logprobs = probe.spread(scored_NT[batch.tensor("token_mask")].tolist())
        return ScoredProbe(logprobs=logprobs, seconds=time.monotonic() - started)

    def open_refit_store(self, *, address: str, world_size: int, timeout_s: float) -> int:
        """(rank 0) Open the store of the refit group; return its port."""
        return self.refit.open_store(address=address, world_size=world_size, timeout_s=timeout_s)

    def join_refit_group(self, spec: RefitGroupSpec) -> None:
        """(rank 0, while every engine joins) Make the refit group."""
        self.refit.join_group(spec)

    def broadcast_weights(self) -> None:
        """(collective, while every engine receives) Send all buckets from rank 0."""
        self.refit.broadcast()

    def export_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(collective) Yield the full CPU weights in HF naming, one at a time, on every rank."""
        self.device_states.require("export_weights", WorkerState.TRAINING, WorkerState.LOGPROBS, WorkerState.REFIT)
        yield from self.engine.export_weights()

    def weights_digest(self) -> WeightsDigest | None:
        """(collective) Return the digest of the trained weights at rank 0, None elsewhere: of the adapter where one is
        trained, else of all exported ones."""
        weights = self.export_weights()
        if self.engine.adapter_infos():
            weights = ((name, weight.to("cpu")) for name, weight in self.engine.full_adapter())
        if self.rank == 0:
            return digest_weights(weights)
        for _ in weights:
            """Each is gathered from all ranks."""
        return None

    # Checkpoints; see `Saving`.

    def save_checkpoint(self, *, weights: Path, optimizer: Path | None, tokenizer: Path | None) -> None:
        """(collective) Write the HF folder at `weights`; optimizer, schedule and random state at `optimizer`."""
        self.saving.save(weights=weights, optimizer=optimizer, tokenizer=tokenizer)

    def begin_save(self, *, weights: Path, optimizer: Path | None, tokenizer: Path | None) -> None:
        """(collective) Begin a `save_checkpoint` of this moment; it is written beside what comes next, until
        `finish_save`."""
        self.saving.begin(weights=weights, optimizer=optimizer, tokenizer=tokenizer)

    def is_saving(self) -> bool:
        """Return whether this rank still writes."""
        return self.saving.is_running

    def finish_save(self, *, timeout_s: float) -> float:
        """(collective) Wait for what `begin_save` began; how many seconds that took."""
        return self.saving.finish(timeout_s=timeout_s)

    def load_checkpoint(self, *, weights: Path, optimizer: Path | None) -> None:
        """(collective) Continue from a checkpoint of any layout; the reference stays the initial model."""
        with self.device_states.ready_for_training():
            self.engine.load(weights=weights, optimizer=optimizer)

    # Device and process.

    def reset_peak_memory_stats(self) -> None:
        self._device_side.reset_peak_memory_stats()

    def get_gpu_info(self) -> dict[str, object]:
        return {"rank": self.rank, **self._device_side.info()}

    def report_device_id(self) -> str:
        return self._device_side.device_id()

    def start_gpu_profiling(self, folder: Path | None = None) -> None:
        """Profile this rank until `stop_gpu_profiling`.

        Args:
            folder: gets `rank_N.json.gz`, a trace of torch's profiler; None opens the range that
                `nsys --capture-range=cudaProfilerApi` records.
        """
        self._device_side.start_profiling(None if folder is None else folder / f"rank_{self.rank}.json.gz")

    def stop_gpu_profiling(self) -> None:
        """End the profile and write its trace. Idempotent."""
        self._device_side.stop_profiling()

    def is_alive(self) -> bool:
        return not self.device_states.is_shut_down

    def shutdown(self) -> None:
        """End the process groups that belong to the worker. Idempotent."""
        if self.device_states.is_shut_down:
            return
        self.device_states.shut_down()
        self.recording.end(is_complete=False)
        self.tracing.close()
        self.engine.close()
        self.refit.close()
        self.saving.close()
        self._device_side.stop_profiling(is_complete=False)
        if self._owns_group:
            destroy_process_group()
