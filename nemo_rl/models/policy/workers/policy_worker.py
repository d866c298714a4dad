"""`PolicyWorker`: one rank of the policy, which makes its parts.

Made by `compose` and `launch`, in plain Python without Ray. The driver names its methods (`worker_groups.ask`).
Invariant: nothing of a worker is set from outside after it was made; methods marked (collective) are called on every
rank in the same order.

    PolicyWorker(Passes)                        train, log-probabilities
      engine         DTensorEngine | MegatronEngine   model, optimizer, runner
      device_states  DeviceStates                     states, memory, reference     -> engine
      refit          RefitSource                      weights to the engines        -> engine, device_states
      saving         Saving                           checkpoints                   -> engine, device_states
      replay         Replay                           routes of each pass
      recording      Recording                        records of each pass
      tracing        Tracing                          what the hub is shown
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from nemo_rl.config.base import START_TIMEOUT_S
from nemo_rl.config.generation import DeviceSharing
from nemo_rl.config.parts import TRAINING_ENGINES
from nemo_rl.config.policy import PolicyConfig
from nemo_rl.config.r3_trace_env import router_replay_validate_enabled
from nemo_rl.data.tokenizer import load_tokenizer
from nemo_rl.distributed.collectives import RankSpec, destroy_process_group, new_group
from nemo_rl.distributed.layout import ParallelLayout
from nemo_rl.models.policy.interfaces import TensorInfo
from nemo_rl.models.policy.observer import HookObserver, HookObservers
from nemo_rl.models.policy.recording import NO_RECORDING, RecordSpec, SiteRecording
from nemo_rl.models.policy.routes.worker_replay import Replay, WorkerReplay
from nemo_rl.models.policy.steps import RankInfo
from nemo_rl.models.policy.tracing import NO_TRACING, SiteTracing, TraceSpec
from nemo_rl.models.policy.workers.base import DeviceSide, WorkerState, check_workspace
from nemo_rl.models.policy.workers.device_states import DeviceStates
from nemo_rl.models.policy.workers.engine import EngineFactory
from nemo_rl.models.policy.workers.out_of_memory import gradients_decided
from nemo_rl.models.policy.workers.passes import Passes
from nemo_rl.models.policy.workers.refit_source import RefitSource
from nemo_rl.models.policy.workers.saving import Saving
from nemo_rl.models.weight_sync.buckets import RefitPlan
from nemo_rl.models.weight_sync.channel import ChannelOffer, ChannelRequest
from nemo_rl.models.weight_sync.receipt import Probe, ScoredProbe, Sent
from nemo_rl.models.weight_sync.transport import RefitGroupSpec
from nemo_rl.models.weight_sync.weights_digest import WeightsDigest, digest_weights

__all__ = ["PolicyWorker", "WorkerSpec"]


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSpec:
    """Everything one rank needs to start."""

    policy: PolicyConfig
    rank: RankSpec
    num_steps: int
    """GRPO steps of the run, for the learning-rate schedule."""
    keep_reference: bool
    """Keep a copy of the first weights for the KL penalty."""
    seed: int
    use_gpu: bool = False
    threads: int = 1
    collective_timeout_s: float = 120.0
    record: RecordSpec | None = None
    """Records that the passes write, in steps that the driver names; None for none."""
    trace: TraceSpec | None = None
    """Hub to which passes show what is watched; None: none."""
    start_timeout_s: float = START_TIMEOUT_S
    """Seconds that the ranks wait for one another before the first collective."""
    sharing: DeviceSharing = "crowded"
    """The other users of the worker's device."""
    planned: dict[str, int] = field(default_factory=dict)
    """Bytes on the device by stage, as `nemo-rl plan` counts them; empty on CPUs, and where it is not installed."""
    joins_process: bool = False
    """True for a second model in the process of another worker, which has made the process group of one rank."""

    @property
    def layout(self) -> ParallelLayout:
        """Return the layout: which part each rank holds."""
        return ParallelLayout.of_policy(self.policy, world_size=self.rank.world_size)


class PolicyWorker(Passes):
    """One rank of the policy. Starts ready for training.

    Example:
        >>> worker = compose_worker(config, rank=0, world_size=1, num_steps=10,
        ...                         collective_timeout_s=60, seed=0)               # doctest: +SKIP
        >>> worker.train(batch, PolicyLoss(config=LossConfig())).loss           # doctest: +SKIP
        (0.0123,)
    """

    def __init__(
        self, spec: WorkerSpec, here: RankInfo, *, owns_group: bool, hook_observers: Sequence[HookObserver] = ()
    ) -> None:
        """(collective) Make one rank, in a process whose default process group exists.

        Args:
            owns_group: that group ends with the worker.
            hook_observers: who else sees the sites of its passes.
        """
        config, planned = spec.policy, spec.planned
        if config.deterministic:
            check_workspace(here.device)
        self.tokenizer = load_tokenizer(
            config.tokenizer.name or config.model_name, chat_template=config.tokenizer.chat_template
        )
        room = torch.cuda.get_device_properties(here.device).total_memory if here.device.type == "cuda" else 0
        config = gradients_decided(config, planned, room=room, device=here.device)
        name = "megatron" if config.megatron_cfg.enabled else "dtensor"
        # Imported here, by the processes that need it.
        start: EngineFactory = TRAINING_ENGINES.load(name, key=f"policy.{name}_cfg.enabled")
        engine = start(
            config, here, num_steps=spec.num_steps, collective_timeout_s=spec.collective_timeout_s, seed=spec.seed
        )
        self._device_side, self._owns_group = DeviceSide(here.device, planned=planned), owns_group
        with ExitStack() as undo:
            undo.callback(engine.close)
            replay = Replay()
            if config.router_replay.enabled:
                replay = WorkerReplay(engine.routers(validates=router_replay_validate_enabled()), here)
            record, trace = spec.record, spec.trace
            points = engine.hook_points() if record is not None or trace is not None or hook_observers else None
            self.recording = NO_RECORDING if record is None or points is None else SiteRecording(record, points, here)
            self.tracing = NO_TRACING if trace is None or points is None else SiteTracing(trace, points, here)
            undo.callback(self.tracing.close)
            device_states = DeviceStates(
                engine,
                self._device_side,
                rank=here.rank,
                keep_reference=spec.keep_reference,
                adapter_reference=config.lora.reference,
                sharing=spec.sharing,
            )
            group = new_group(range(here.layout.world_size), backend="gloo")
            assert group is not None, "every rank is in it"
            self.saving = Saving(engine, device_states, self.tokenizer, model=Path(config.model_name), group=group)
            undo.pop_all()
        observers = HookObservers(points, (self.recording, self.tracing, *hook_observers))
        super().__init__(config, here, engine, device_states, replay, observers)
        self.rank, self.device = here.rank, here.device
        self.layout, self.world_size = here.layout, here.layout.world_size
        self.refit = RefitSource(
            engine,
            device_states,
            self._device_side,
            rank=here.rank,
            takes_fingerprints=config.generation.receipt.enabled,
            lora=config.lora if config.lora.enabled else None,
        )

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
            scored_NT = self.score(batch)
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
