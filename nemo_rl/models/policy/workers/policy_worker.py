"""`PolicyWorker`: one rank of the policy, which makes its parts.

Made by `compose` and `launch`, in plain Python without Ray. The driver names its methods (`worker_groups.ask`).
Invariant: nothing of a worker is set from outside after it was made; methods marked (collective) are called on every
rank in the same order.

    PolicyWorker
      Passes         train, log-probabilities; `replay`: routes of each pass
      RefitSource    weights to the generation engines
        DeviceStates   the base of both: states, memory, reference of the `engine`
      engine         DTensorEngine | MegatronEngine: model, optimizer, runner
      recording      SiteRecording: records of each pass
      tracing        SiteTracing: what the hub is shown
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nemo_rl.config.base import START_TIMEOUT_S
from nemo_rl.config.generation import DeviceSharing
from nemo_rl.config.parts import TRAINING_ENGINES
from nemo_rl.config.policy import PolicyConfig
from nemo_rl.config.r3_trace_env import router_replay_validate_enabled
from nemo_rl.data.tokenizer import load_tokenizer
from nemo_rl.distributed.collectives import RankSpec, destroy_process_group, new_group
from nemo_rl.distributed.layout import ParallelLayout
from nemo_rl.errors import CheckpointError, UserError
from nemo_rl.models.hf.checkpoint_folder import save_tokenizer, upload_together
from nemo_rl.models.hf.files import local_shard
from nemo_rl.models.policy.observer import HookObserver, HookObservers
from nemo_rl.models.policy.recording import RecordSpec, SiteRecording
from nemo_rl.models.policy.routes.worker_replay import WorkerReplay
from nemo_rl.models.policy.steps import RankInfo
from nemo_rl.models.policy.tracing import SiteTracing, TraceSpec
from nemo_rl.models.policy.workers.base import DeviceSide, check_workspace, gradients_decided
from nemo_rl.models.policy.workers.device_states import DeviceStates
from nemo_rl.models.policy.workers.engine import EngineFactory, Snapshot
from nemo_rl.models.policy.workers.passes import Passes
from nemo_rl.models.policy.workers.refit_source import RefitSource
from nemo_rl.models.weight_sync.receipt import Probe, ScoredProbe
from nemo_rl.utils.checkpoint import Upload
from nemo_rl.utils.console import bytes_text
from nemo_rl.utils.memory import available_bytes

__all__ = ["PolicyWorker", "WorkerSpec"]

logger = logging.getLogger(__name__)


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
        return ParallelLayout.of_policy(self.policy, world_size=self.rank.world_size)


class PolicyWorker(Passes, RefitSource):
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
        self._owns_group, self._model_folder = owns_group, Path(config.model_name)
        self._running: _Thread | None = None
        with ExitStack() as undo:
            undo.callback(engine.close)
            replay = None
            if config.router_replay.enabled:
                replay = WorkerReplay(engine.routers(validates=router_replay_validate_enabled()), here)
            record, trace = spec.record, spec.trace
            points = engine.hook_points() if record is not None or trace is not None or hook_observers else None
            self.recording = None if record is None or points is None else SiteRecording(record, points, here)
            self.tracing = None if trace is None or points is None else SiteTracing(trace, points, here)
            if self.tracing is not None:
                undo.callback(self.tracing.close)
            DeviceStates.__init__(
                self,
                engine,
                DeviceSide(here.device, planned=planned),
                here,
                keep_reference=spec.keep_reference,
                adapter_reference=config.lora.reference,
                sharing=spec.sharing,
            )
            group = new_group(range(here.layout.world_size), backend="gloo")
            assert group is not None, "every rank is in it"
            self._save_group = group
            undo.pop_all()
        observers = [each for each in (self.recording, self.tracing, *hook_observers) if each is not None]
        Passes.__init__(self, config, replay=replay, hook_observers=HookObservers(points, observers))
        lora = config.lora if config.lora.enabled else None
        RefitSource.__init__(self, takes_fingerprints=config.generation.receipt.enabled, lora=lora)

    # Checkpoints. A save beside the training copies what it writes first, and its threads talk in their own group,
    # so that no collective of the training meets one of theirs. At most one save runs.

    def save_checkpoint(
        self, *, weights: Path, optimizer: Path | None, tokenizer: Path | None, upload: Upload | None = None
    ) -> None:
        """(collective) Write the HF folder at `weights`; optimizer, schedule and random state at `optimizer`.

        Args:
            upload: where the ranks upload all of it then; None: nowhere.
        """
        self._check_none_runs()
        with self.ready_for_training():
            snapshot = self.engine.snapshot(with_optimizer=optimizer is not None, copies=False)
            self._write(snapshot, weights, optimizer, tokenizer)
        self._upload(upload)

    def begin_save(
        self,
        *,
        weights: Path,
        optimizer: Path | None,
        tokenizer: Path | None,
        most_share: float | None = None,
        upload: Upload | None = None,
    ) -> None:
        """(collective) Begin a `save_checkpoint` of this moment: copy what is to be saved, and write it beside what
        this rank does until `finish_save`.

        Args:
            most_share: of a node's free memory that the copies of its ranks may take; where they take more on any
                node, all is written here. None: as much as they need.
            upload: as in `save_checkpoint`; beside what this rank does in any case.
        """
        self._check_none_runs()
        has_optimizer = optimizer is not None
        if most_share is not None and not self._has_room(most_share, with_optimizer=has_optimizer):
            self.save_checkpoint(weights=weights, optimizer=optimizer, tokenizer=tokenizer)
            self._running = None if upload is None else _Thread(lambda: self._upload(upload))
            return
        with self.ready_for_training():
            snapshot = self.engine.snapshot(with_optimizer=has_optimizer, copies=True)

        def write() -> None:
            self._write(snapshot, weights, optimizer, tokenizer)
            self._upload(upload)

        self._running = _Thread(write)

    def _has_room(self, most_share: float, *, with_optimizer: bool) -> bool:
        """(collective) Return whether copies of what is saved take at most this share of each node's free memory."""
        trained = self.engine.adapters() if self.config.lora.enabled else self.engine.weights()
        needed = sum(local_shard(tensor).nbytes for _, tensor in trained)
        if with_optimizer:
            needed += sum(local_shard(tensor).nbytes for tensor in self.engine.moments())
        found: list[Any] = [None] * self.world_size
        dist.all_gather_object(found, (socket.gethostname(), needed, available_bytes()), group=self._save_group)
        for node in {node for node, _, _ in found}:
            bytes_of_node = sum(count for name, count, _ in found if name == node)
            free = min(available for name, _, available in found if name == node)
            if bytes_of_node > most_share * free:
                logger.info(
                    "the checkpoint is written before the training goes on: copies of it would take %s of %s that are "
                    "free on %s; checkpointing.async_save=true takes them all the same",
                    *(bytes_text(bytes_of_node), bytes_text(free), node),
                )
                return False
        return True

    def is_saving(self) -> bool:
        """Return whether a save is still being written; one that failed is no longer running."""
        return self._running is not None and self._running.is_alive

    def finish_save(self, *, timeout_s: float) -> float:
        """(collective) Wait until what was begun is written; the seconds it took, 0 where nothing was begun.

        Raises:
            CheckpointError: on every rank, it could not be written; or it is not written in time.
        """
        running, self._running = self._running, None
        return 0.0 if running is None else running.finish(timeout_s)

    def load_checkpoint(self, *, weights: Path, optimizer: Path | None) -> None:
        """(collective) Continue from a checkpoint of any layout; the reference stays the initial model."""
        with self.ready_for_training():
            self.engine.load(weights=weights, optimizer=optimizer)

    def _check_none_runs(self) -> None:
        if self._running is not None:
            raise RuntimeError("a save was begun: finish it before the next")

    def _write(self, snapshot: Snapshot, weights: Path, optimizer: Path | None, tokenizer: Path | None) -> None:
        snapshot.write(weights=weights, optimizer=optimizer, group=self._save_group)
        if tokenizer is not None:
            save_tokenizer(self.tokenizer, tokenizer, model=self._model_folder, group=self._save_group)

    def _upload(self, upload: Upload | None) -> None:
        if upload is not None:
            upload_together(upload, group=self._save_group)

    # Diagnostics.

    def begin_recording(self, step: int) -> None:
        """Record the passes from here on, as the worker's `RecordSpec` says, until `end_recording`."""
        if self.recording is None:
            raise UserError(f"step {step}: this worker was started without anything to record; see diagnostics.record")
        self.recording.begin(step)

    def end_recording(self) -> None:
        """Complete the records of the step. Idempotent."""
        if self.recording is not None:
            self.recording.end()

    def begin_tracing(self, step: int, watches: Sequence[str], keys: Sequence[str]) -> None:
        """Show the hub what is watched of the passes from here on, until `end_tracing`; see `SiteTracing.begin`."""
        if self.tracing is not None:
            self.tracing.begin(step, watches=watches, keys=keys)

    def end_tracing(self) -> None:
        """End the traced step. Idempotent."""
        if self.tracing is not None:
            self.tracing.end()

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

    def shutdown(self) -> None:
        """End the process groups that belong to the worker. Idempotent."""
        if self._is_shut_down:
            return
        self._is_shut_down = True
        if self.recording is not None:
            self.recording.end(is_complete=False)
        if self.tracing is not None:
            self.tracing.close()
        self.engine.close()
        self._close_refit()
        if dist.is_initialized():
            dist.destroy_process_group(self._save_group)
        self._device_side.stop_profiling(is_complete=False)
        if self._owns_group:
            destroy_process_group()


class _Thread:
    """A thread that calls one function and keeps its error."""

    def __init__(self, action: Callable[[], None]) -> None:
        self._action: Callable[[], None] | None = action
        self._error: BaseException | None = None
        self._seconds = 0.0
        # A daemon, so that a process that has to end does not wait: its part of a checkpoint has no name yet.
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def finish(self, timeout_s: float) -> float:
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise CheckpointError(
                f"the checkpoint is still being written after another {timeout_s:.0f} s; raise "
                "cluster.stage_timeout_s if the disk is only slow, or set checkpointing.async_save=false"
            )
        if self._error is not None:
            raise self._error
        return self._seconds

    def _run(self) -> None:
        started = time.monotonic()
        action, self._action = self._action, None
        assert action is not None
        try:
            action()
        except BaseException as error:  # noqa: BLE001 - raised by `finish`
            self._error = error
        # Free the copies, which the action holds.
        del action
        self._seconds = time.monotonic() - started
        logger.info("wrote a checkpoint in %.1f s beside the training", self._seconds)
