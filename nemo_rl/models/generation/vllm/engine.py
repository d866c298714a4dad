"""`VllmEngine`: generation by vLLM, in its own process, and `VllmWorker`, which takes new weights from a refit.

Called by rollout actors. Invariant: every output names the version that produced it, and between the first new weight
and the last one nothing is sampled.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import numpy as np
import torch
import vllm
from transformers import PreTrainedModel
from vllm.v1.metrics.reader import Counter

from nemo_rl.config.policy import PolicyConfig
from nemo_rl.errors import (
    ConfigError,
    ResourceError,
    WorkerError,
    WorkerLost,
    boundary,
    shorten,
)
from nemo_rl.models.adapters.folder import served_adapter
from nemo_rl.models.generation.adapter_versions import ServesAdapters
from nemo_rl.models.generation.continuous import ContinuousDecoding
from nemo_rl.models.generation.interfaces import (
    EngineSpec,
    GenerationOutput,
    GenerationRequest,
    GroupSamples,
    RankMemoryChange,
    RecordedEngine,
    SleepReport,
)
from nemo_rl.models.generation.recording import WorkersRecording
from nemo_rl.models.generation.requests import RowRequest, check_images, rows_of
from nemo_rl.models.generation.states import EngineStates, SleepingMemory
from nemo_rl.models.generation.turn_batch import ContinuousSpec, TurnRow
from nemo_rl.models.generation.vllm.adapters import VllmAdapters
from nemo_rl.models.generation.vllm.extension import expected_weights, one_answer, remove_names, same_on_all_ranks
from nemo_rl.models.generation.vllm.images import image_prompt, use_tensors
from nemo_rl.models.generation.vllm.start import EngineArguments, engine_arguments
from nemo_rl.models.generation.vllm.turns import FORCED, VllmTurns, row_params
from nemo_rl.models.hf.modules import HFRouters
from nemo_rl.models.vision import family_of
from nemo_rl.models.weight_sync.buckets import RefitPlan, WeightSlot, match_slots
from nemo_rl.models.weight_sync.shard_loader import joined_prints
from nemo_rl.models.weight_sync.shard_plan import Boxes, ShardPart
from nemo_rl.models.weight_sync.target import RefitTarget
from nemo_rl.models.weight_sync.transport import IpcHandle, RefitGroupSpec
from nemo_rl.routes.shape import RouteShape

__all__ = ["VllmEngine", "VllmWorker"]

STAGE = "generation"
SHUT_DOWN = "this engine was shut down; build a new one"


class VllmEngine(ServesAdapters[VllmAdapters], SleepingMemory):
    """A vLLM engine of one model, over one rank or several.

    vLLM's scheduler runs in this process, and with one rank the model does, too. The ranks of an engine with several
    are processes of their own: children of this one, or actors in the bundles of `EngineSpec.bundles`. Calls to them
    follow each other, and the engine is lost when one of them is.

    Raises:
        ConfigError: vLLM cannot serve this model, or not with these settings.
        ResourceError: its cache does not fit.
    """

    _decoding: ContinuousDecoding

    def __init__(self, spec: EngineSpec) -> None:
        config, weight_version, generation = spec.policy, spec.weight_version, spec.policy.generation
        self._number, self._weight_version = spec.number, weight_version
        self._max_total_length = config.max_total_sequence_length
        self._expected = expected_weights(config.model_name, precision=generation.precision or config.precision)
        self.route_shape = _route_shape(self._expected) if config.router_replay.enabled else None
        self.vision = family_of(self._expected.config)
        if self.vision is not None:
            use_tensors(self.vision.kind)
        sizes = generation.vllm_cfg
        self._is_alone, self._lock = sizes.num_ranks == 1, threading.RLock()
        self._is_continuous = spec.continuous
        self._llm: vllm.LLM | None = _start(engine_arguments(spec), config)
        self._rpc("prepare_refit", str(config.model_name), generation.precision or config.precision)
        self._recording: WorkersRecording | None = None
        if spec.record is not None:
            self._recording = WorkersRecording(
                spec.record, self._rpc, number=spec.number, num_engines=spec.num_engines, num_ranks=sizes.num_ranks
            )
        if config.lora.is_native:
            self._adapters = VllmAdapters(self._expected, config.lora, self._rpc, most=spec.adapter_slots)
            self._adapters.prepare()
            if config.lora.adapter is not None and weight_version >= 0:
                known = {name: slot.shape for name, slot in self._adapters.known.items()}
                self._adapters.add(weight_version, served_adapter(config.lora, known).items())
                self._adapters.versions.use(weight_version)
        self._broken: str | None = None if weight_version >= 0 else "no weights were received yet"
        self._num_loads = 0
        self._states = EngineStates(self, number=self._number)
        places = sizes.max_num_seqs or generation.max_batch_size
        self._decoding = ContinuousDecoding(
            VllmTurns(
                self.running, rows_of=self.rows_of, add=self._add, route_shape=self.route_shape, named=self.named
            ),
            ContinuousSpec.of(spec, places=places),
            version=lambda: self._weight_version,
        )
        if spec.sleep_level and weight_version < 0:
            # The policy takes the device first, and a refit brings the first weights.
            self.sleep(spec.sleep_level)

    @property
    def weight_version(self) -> int:
        return self._weight_version

    def generate(self, request: GenerationRequest) -> GenerationOutput:
        """Sample all rows, prompt by prompt.

        Raises:
            ConfigError: routes are asked for, and the engine was started without `policy.router_replay.enabled`.
            NonFiniteError: log-probabilities are NaN or inf; the text names row, engine and weight version.
            ValueError: seeds do not divide by prompts, or a prompt is empty or leaves no room for a token.
            WorkerError: the weights are not whole.
        """
        output = self._decoding.generate(request)
        if self._recording is not None:
            self._recording.output(request, output)
        return output

    def stream(self, request: GenerationRequest) -> Iterator[GroupSamples]:
        """Yield groups as their rows end.

        Raises:
            ConfigError, NonFiniteError, ValueError, WorkerError: as `generate`.
        """
        for samples in self._decoding.stream(request):
            if self._recording is not None:
                self._recording.output(request.of_groups(samples.groups), samples.output)
            yield samples

    def rows_of(self, request: GenerationRequest) -> list[RowRequest]:
        self._engine()
        if self._broken is None and not self._states.is_awake:
            raise self._states.not_awake()
        if self._broken is not None and not self._decoding.is_frozen:
            raise WorkerError(
                f"generation engine {self._number} has no complete weights to sample from: {self._broken}", stage=STAGE
            )
        if self._adapters is not None or request.adapters:
            self.adapter_slots.versions.check_request(request.adapters)
        if request.with_routes and self.route_shape is None:
            raise ConfigError("policy.router_replay.enabled: false, so vLLM was started without routes; set it to true")
        if request.forced is not None and not request.sampling.is_plain:
            raise ValueError("vLLM decodes forced responses at temperature 1 without top-p and top-k alone")
        check_images(request, self.vision)
        return rows_of(request, max_total_length=self._max_total_length)

    def _add(self, llm: vllm.LLM, each: TurnRow) -> str:
        """Give a row to vLLM, and return vLLM's own name of it."""
        row, request = each.row, each.request
        salt, lora = self.salt_of(row), None
        if self._adapters is not None:
            adapter = self._adapters.versions.resolved(each.adapter)
            salt, lora = f"{salt}.{self._adapters.salt_of(adapter)}", self._adapters.request_of(adapter)
        prompt: object = {"prompt_token_ids": list(row.prompt), "cache_salt": salt}
        if row.images is not None and self.vision is not None:
            prompt = image_prompt(row, self.vision, salt=salt)
        is_recorded = self._recording is not None and self._recording.is_on and bool(request.keys)
        params = row_params(
            request.sampling,
            row,
            replays=llm.llm_engine.vllm_config.use_v2_model_runner,
            key=request.keys[row.number] if is_recorded else None,
        )
        return llm.llm_engine.add_request(str(each.key), prompt, params, lora_request=lora)

    def salt_of(self, row: RowRequest) -> str:
        # Also the number of loads: weights that are loaded again may be others.
        return f"{self._weight_version}.{self._num_loads}"

    def named(self) -> str:
        return f"generation engine {self._number}, weight version {self._weight_version}"

    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]], *, version: int) -> int:
        """Replace every weight; a tied weight may come under either of its names, or both."""
        given = dict(weights)
        state = self._expected.state_dict(keep_vars=True)
        slots, targets = match_slots({name: tuple(weight.shape) for name, weight in given.items()}, state)
        with self._decoding.at_rest() if self._is_continuous else nullcontext():
            self.begin_weights()
            self._on_ranks("begin_weights")
            for slot, target in zip(slots, targets, strict=True):
                with self._breaks(f"vLLM could not load {slot.name!r}"):
                    self._on_ranks("take_weight", slot.name, given[slot.name].detach().to("cpu", target.dtype))
            with self._breaks(f"vLLM could not load version {version}"):
                self._on_ranks("finish_weights")
            self.hold_weights(version)
        return version

    def begin_weights(self) -> None:
        """Hold no weights until `hold_weights`; nothing can be sampled before."""
        if self._is_continuous:
            self._decoding.check_rest()
        self._states.wake_weights()
        self._weight_version, self._broken = -1, "a weight update was interrupted"

    @contextmanager
    def _breaks(self, what: str) -> Iterator[None]:
        """Remember what an error in the block has left undone."""
        try:
            yield
        except Exception as error:
            self._broken = f"{what}: {type(error).__name__}: {shorten(str(error))}"
            raise

    def hold_weights(self, version: int) -> None:
        """Hold new weights that vLLM has loaded: it computes with nothing that it knows of the old ones."""
        self._weight_version, self._broken = version, None
        self._states.has_weights = True
        self._num_loads += 1
        if self.vision is not None:
            # The ranks have forgotten the features of images, and vLLM's scheduler must know.
            with self.running() as llm:
                llm.llm_engine.reset_encoder_cache()

    def counters(self) -> dict[str, float]:
        """Return vLLM's own counts since its start, such as `vllm:num_preemptions`; it counts with
        `disable_log_stats: false` in `policy.generation.vllm_kwargs`."""
        return {each.name: each.value for each in self._engine().get_metrics() if isinstance(each, Counter)}

    def prepare_for_generation(self) -> None:
        """Wake up, and let rows that stand still go on."""
        self._engine()
        self._states.wake()
        if self._is_continuous:
            self._decoding.thaw()

    def finish_generation(self) -> None:
        """Let rows stand still until `prepare_for_generation`, in continuous mode alone; memory stays, until
        `sleep`."""
        if self._llm is not None and self._is_continuous:
            self._decoding.freeze()

    def sleep(self, level: int) -> SleepReport:
        self.finish_generation()
        self._decoding.check_idle()
        report = self._states.sleep(level)
        if not self._states.has_weights:
            self._weight_version, self._broken = -1, "its weights were dropped when it fell asleep"
        return report

    def free_memory(self, level: int) -> list[RankMemoryChange]:
        """Free the memory of all ranks, when nothing is cached of any prompt."""
        with self.running() as llm:
            if not llm.reset_prefix_cache():
                raise WorkerError("vLLM did not let go of the cache of prompts before it sleeps", stage=STAGE)
        return self._rpc("free_memory", level)

    def wake_weights(self) -> list[RankMemoryChange]:
        return self._rpc("wake", "weights")

    def wake_caches(self) -> list[RankMemoryChange]:
        return self._rpc("wake", "kv_cache")

    def shutdown(self) -> None:
        if self._llm is not None:
            self._decoding.end(RuntimeError(SHUT_DOWN))
        llm, self._llm = self._llm, None
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()

    def _on_ranks(self, method: str, *arguments: object, **named: object) -> list[Any]:
        """Call a method of `RankRefit` in every rank, and return the answers in the order of the ranks."""
        return self._rpc("on_refit", method, arguments, named)

    def _rpc(self, method: str, *arguments: object) -> list[Any]:
        """Call a method of `RefitExtension` in every rank."""
        with self.running() as llm:
            return llm.collective_rpc(method, args=arguments)

    @contextmanager
    def running(self) -> Iterator[vllm.LLM]:
        """Give vLLM, to one thread at a time where ranks are other processes.

        Raises:
            WorkerLost: a rank has died, with which the engine is lost. RuntimeError: it was shut down.
        """
        with nullcontext() if self._is_alone else self._lock:
            llm = self._engine()
            try:
                yield llm
            except Exception as error:
                if self._has_lost_ranks:
                    raise WorkerLost(
                        f"a rank of generation engine {self._number} has died: {shorten(str(error))}", stage=STAGE
                    ) from error
                raise

    @property
    def _has_lost_ranks(self) -> bool:
        return not self._is_alone and bool(self._engine().llm_engine.model_executor.is_failed)

    def _engine(self) -> vllm.LLM:
        if self._llm is None:
            raise RuntimeError(SHUT_DOWN)
        return self._llm


def _route_shape(model: PreTrainedModel) -> RouteShape:
    routers = HFRouters(model)
    return RouteShape(layers=routers.layers, top_k=routers.top_k, num_experts=routers.num_experts)


def _with_replay(arguments: EngineArguments) -> EngineArguments:
    """Return the arguments, with the replay of given responses where vLLM takes its second model runner: it has a
    switch.

    The first one is given `force_rows`, and refuses the switch.
    """
    is_second = vllm.EngineArgs(**arguments).create_engine_config().use_v2_model_runner
    return {"enable_trace_replay": True, **arguments} if is_second else arguments


def _start(arguments: EngineArguments, config: PolicyConfig) -> vllm.LLM:
    where = (
        f"policy.generation.backend: vLLM cannot start with {config.model_name!r} and these settings; change "
        "policy.generation.vllm_cfg or vllm_kwargs, or set backend=torch"
    )
    with boundary(ConfigError, where):
        try:
            llm = vllm.LLM(**_with_replay(arguments))
            llm.collective_rpc("prepare_rows", args=(FORCED,))
            # Kernels refuse a model when they first run.
            first = vllm.SamplingParams(temperature=0, max_tokens=2, logprobs=0)
            llm.generate({"prompt_token_ids": [0]}, first, use_tqdm=False)
            llm.collective_rpc("remove_names")
            remove_names()
            return llm
        except ValueError as error:
            if "memory" not in str(error).lower():
                raise
            key = "kv_cache_gib" if "kv_cache_memory_bytes" in arguments else "gpu_memory_utilization"
            raise ResourceError(
                f"policy.generation.vllm_cfg.{key}: vLLM's cache of keys and values does not fit; change it, or lower "
                f"policy.max_total_sequence_length. vLLM says: {shorten(' '.join(str(error).split()))}"
            ) from error


class VllmWorker(VllmEngine, RecordedEngine, RefitTarget):
    """A `VllmEngine` that `WeightSync` brings new weights to.

    Every rank receives them by itself: buckets are joined to weights on the rank's device, and each weight goes to
    vLLM's loaders when it is whole. vLLM holds the weights of a layer until all of them are there. For deltas a copy of
    all weights stays in the process of each rank, on the CPU.
    """

    def report_device_id(self) -> str:
        return self.report_device_ids()[0]

    def report_device_ids(self) -> tuple[str, ...]:
        return tuple(self._on_ranks("device_id"))

    def refit_free_bytes(self, *, on_device: bool) -> int:
        return min(self._on_ranks("free_bytes", on_device=on_device))

    def match_refit(self, offered: Mapping[str, tuple[int, ...]]) -> tuple[WeightSlot, ...]:
        # What is free is asked for after this.
        self._states.wake_weights()
        return match_slots(offered, self._expected.state_dict(keep_vars=True))[0]

    def delta_base(self) -> int | None:
        return one_answer(self._on_ranks("delta_base"), what="the version that they hold for deltas")

    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]], *, version: int) -> int:
        self._on_ranks("forget_base")
        return super().update_weights(weights, version=version)

    def begin_refit(self, plan: RefitPlan, *, handles: Sequence[IpcHandle] = ()) -> None:
        if plan.kind == "weights":
            self.begin_weights()
        else:
            self._states.wake_weights()
        self._on_ranks("begin", plan, handles)

    def load_bucket(self, bucket: np.ndarray | None = None) -> None:
        with self._loading():
            self._on_ranks("load", bucket)

    def join_refit_group(self, spec: RefitGroupSpec) -> None:
        self._on_ranks("join", spec)

    def receive_weights(self) -> None:
        with self._loading():
            self._on_ranks("receive")

    def report_parts(self, slots: tuple[WeightSlot, ...], kind: Literal["weights", "adapter"]) -> tuple[Boxes, ...]:
        if kind == "weights":
            self._slots = slots
        return tuple(self._on_ranks("record_parts", slots, kind))

    def take_parts(self, parts: tuple[ShardPart, ...], kind: Literal["weights", "adapter"]) -> None:
        self._on_ranks("keep_part", parts, kind)

    def receive_shards(self, kind: Literal["weights", "adapter"]) -> None:
        if kind == "weights":
            self.begin_weights()
        else:
            self._states.wake_weights()
        with self._loading():
            self._on_ranks("receive_shards", kind)

    _slots: tuple[WeightSlot, ...] = ()

    def finish_refit(self, *, version: int) -> int:
        with self._loading():
            [adapter, *_] = self._on_ranks("finish")
        if adapter is None:
            self.hold_weights(version)
        else:
            self.hold_adapter(adapter.items(), version=version)
        return version

    def fingerprints(self) -> Mapping[str, str]:
        parts = self._on_ranks("part_prints")
        if None in parts:
            return same_on_all_ranks(self._on_ranks("fingerprints"))
        stale = self._on_ranks("stale_copies")
        return {
            **joined_prints(parts, self._slots),
            **{name: text for of_rank in stale for name, text in of_rank.items()},
        }

    def shutdown(self) -> None:
        if self._llm is not None and not self._has_lost_ranks:
            self._on_ranks("close")
        super().shutdown()

    def _loading(self) -> AbstractContextManager[None]:
        """Remember an error of the block, unless a refit of an adapter leaves the weights as they are."""
        return nullcontext() if self._broken is None else self._breaks("vLLM could not load new weights")
