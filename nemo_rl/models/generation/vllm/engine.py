"""`VllmEngine`: generation by vLLM, in a process of its own, and `VllmWorker`, which takes new weights from a refit.

Called by rollout actors. Invariant: every output names the version that produced it, and between the first new weight
and the last one nothing is sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext

import numpy as np
import torch
import vllm
from transformers import PreTrainedModel
from vllm.v1.metrics.reader import Counter

from nemo_rl.config.policy import PolicyConfig
from nemo_rl.errors import ConfigError, NonFiniteError, ResourceError, WorkerError, boundary, name_some, shorten
from nemo_rl.models.adapter_folder import served_adapter
from nemo_rl.models.generation.continuous import ContinuousDecoding
from nemo_rl.models.generation.interfaces import (
    EngineLoad,
    EngineSpec,
    GenerationInterface,
    GenerationOutput,
    GenerationRequest,
    GroupSamples,
    SamplingParams,
)
from nemo_rl.models.generation.rows import RowRequest, rows_of
from nemo_rl.models.generation.turn_batch import ContinuousSpec, TurnRow
from nemo_rl.models.generation.vllm.adapters import VllmAdapters
from nemo_rl.models.generation.vllm.decoding import join_routes
from nemo_rl.models.generation.vllm.extension import VllmWeights, expected_weights, pack
from nemo_rl.models.generation.vllm.start import EngineArguments, engine_arguments
from nemo_rl.models.hf_modules import HFRouters
from nemo_rl.models.weight_sync.buckets import RefitPlan, WeightSlot, free_bytes, match_adapter, match_slots
from nemo_rl.models.weight_sync.target import RefitReceiver, RefitTarget
from nemo_rl.models.weight_sync.transport import IpcHandle, RefitGroupSpec, device_id
from nemo_rl.routes.shape import RouteShape

__all__ = ["FORCED", "VllmEngine", "VllmWorker", "row_params"]

ALL_TOKENS = 0
"""vLLM's top-k that leaves nothing out."""
FORCED = "nemo_rl_forced"
"""Extra argument of a request with the tokens of its response, for `force_rows`."""
SEEDS = 2**63
"""Seeds of a torch generator; vLLM takes -1 for none."""
STAGE = "generation"
STOPPED, CUT = "stop", "length"
"""Ends of a row: at a stop token or string, or at its limit."""
SHUT_DOWN = "this engine was shut down; build a new one"


def row_params(sampling: SamplingParams, row: RowRequest, *, replays: bool) -> vllm.SamplingParams:
    """Stop are those of the request alone, whatever the model's own files say.

    Args:
        replays: whether vLLM replays given responses by itself, as its second model runner does.
    """
    given = None if row.forced is None else list(row.forced)
    return vllm.SamplingParams(
        trace_decode_token_ids=given if replays else None,
        extra_args=None if given is None or replays else {FORCED: given},
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=ALL_TOKENS if sampling.top_k is None else sampling.top_k,
        seed=row.seed % SEEDS,
        max_tokens=row.max_new_tokens,
        stop_token_ids=list(sampling.stop_token_ids),
        stop=list(sampling.stop_strings),
        include_stop_str_in_output=True,
        detokenize=bool(sampling.stop_strings),
        skip_special_tokens=False,
        ignore_eos=True,
        # 0: only the log-probability of the sampled token.
        logprobs=0,
        flat_logprobs=True,
        # `step` returns a row when it has ended.
        output_kind=vllm.sampling_params.RequestOutputKind.FINAL_ONLY,
    )


class VllmEngine(GenerationInterface):
    """A vLLM engine of one model.

    Raises:
        ConfigError: vLLM cannot serve this model, or not with these settings.
        ResourceError: its cache does not fit.
    """

    def __init__(self, spec: EngineSpec) -> None:
        config, weight_version, generation = spec.policy, spec.weight_version, spec.policy.generation
        self._number, self._weight_version = spec.number, weight_version
        self._max_total_length = config.max_total_sequence_length
        self._expected = expected_weights(config.model_name, precision=generation.precision or config.precision)
        self.route_shape = _route_shape(self._expected) if config.router_replay.enabled else None
        arguments = engine_arguments(
            config,
            use_gpu=spec.use_gpu,
            loads_folder=weight_version >= 0,
            continuous=spec.continuous,
            adapter_slots=spec.adapter_slots,
        )
        sizes = generation.vllm_cfg
        self._is_alone = sizes.tensor_parallel_size * sizes.pipeline_parallel_size == 1
        self._is_continuous = spec.continuous
        self._llm: vllm.LLM | None = _start(arguments, config)
        self._weights = VllmWeights(self._expected, self._hand)
        self._adapters: VllmAdapters | None = None
        if config.lora.is_native:
            self._adapters = VllmAdapters(self._expected, config.lora, self._rpc, most=spec.adapter_slots)
            self._adapters.prepare()
            if config.lora.adapter is not None and weight_version >= 0:
                known = {name: slot.shape for name, slot in self._adapters.known.items()}
                self._adapters.add(weight_version, served_adapter(config.lora, known).items())
                self._adapters.versions.use(weight_version)
        self._broken: str | None = None if weight_version >= 0 else "no weights were received yet"
        self._num_loads = 0
        places = sizes.max_num_seqs or generation.max_batch_size
        self._decoding = ContinuousDecoding(
            VllmTurns(self, self._engine), ContinuousSpec.of(spec, places=places), version=lambda: self._weight_version
        )

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
        return self._decoding.generate(request)

    def stream(self, request: GenerationRequest) -> Iterator[GroupSamples]:
        """Yield groups as their rows end.

        Raises:
            ConfigError, NonFiniteError, ValueError, WorkerError: as `generate`.
        """
        yield from self._decoding.stream(request)

    def rows_of(self, request: GenerationRequest) -> list[RowRequest]:
        self._engine()
        if self._broken is not None and not self._decoding.is_frozen:
            raise WorkerError(
                f"generation engine {self._number} has no complete weights to sample from: {self._broken}", stage=STAGE
            )
        if self._adapters is not None:
            self._adapters.versions.check_request(request.adapters)
        elif request.adapters:
            raise self._no_adapters()
        if request.with_routes and self.route_shape is None:
            raise ConfigError("policy.router_replay.enabled: false, so vLLM was started without routes; set it to true")
        if request.forced is not None and not request.sampling.is_plain:
            raise ValueError("vLLM decodes forced responses at temperature 1 without top-p and top-k alone")
        return rows_of(request, max_total_length=self._max_total_length)

    def salt_of(self, row: RowRequest) -> str:
        # Also the number of loads: weights that are loaded again may be others.
        return f"{self._weight_version}.{self._num_loads}"

    def adapter_of(self, row: TurnRow) -> int | None:
        """Return the version of the adapter that a row gets, or `BASE`; None where there are no adapters."""
        return None if self._adapters is None else self._adapters.versions.resolved(row.adapter)

    def update_adapter(self, adapter: Iterable[tuple[str, torch.Tensor]], *, version: int) -> int:
        self.hold_adapter(adapter, version=version)
        return self.use_adapter(version)

    def hold_adapter(self, adapter: Iterable[tuple[str, torch.Tensor]], *, version: int) -> None:
        """Hold a version of the adapter, which rows have from `use_adapter` on. Waits while rows have all slots."""
        slots, found = self.adapter_slots, dict(adapter)

        def attempt(live: set[int]) -> bool:
            if not slots.versions.has_room(version, live):
                return False
            slots.add(version, found.items(), live=live)
            return True

        self._decoding.between_turns(attempt, waits_for=f"a slot for version {version} of the adapter")

    def use_adapter(self, version: int) -> int:
        """Let rows that begin from here on have a version that is held; return the version in use."""

        def use() -> None:
            self.adapter_slots.versions.use(version)
            self._weight_version = version

        if self._is_continuous:
            self._decoding.switch(use)
        else:
            use()
        return self._weight_version

    @property
    def adapter_slots(self) -> VllmAdapters:
        """Return the versions of the adapter.

        Raises:
            NotImplementedError: the engine serves none.
        """
        if self._adapters is None:
            raise self._no_adapters()
        return self._adapters

    def named(self) -> str:
        return f"generation engine {self._number}, weight version {self._weight_version}"

    def abort(self, names: Sequence[str]) -> None:
        self._decoding.abort(names)

    def feed(self, name: str) -> Iterator[GroupSamples]:
        yield from self._decoding.feed(name)

    def add_to_feed(self, name: str, request: GenerationRequest, first: int) -> None:
        self._decoding.add_to_feed(name, request, first)

    def abort_in_feed(self, name: str, numbers: Sequence[int]) -> None:
        self._decoding.abort_in_feed(name, numbers)

    def close_feed(self, name: str) -> None:
        self._decoding.close_feed(name)

    def take_load(self) -> EngineLoad:
        return self._decoding.take_load()

    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]], *, version: int) -> int:
        """Replace every weight; a tied weight may come under either of its names, or both."""
        given = dict(weights)
        state = self._expected.state_dict(keep_vars=True)
        slots, targets = match_slots({name: tuple(weight.shape) for name, weight in given.items()}, state)
        with self._decoding.at_rest() if self._is_continuous else nullcontext():
            self.begin_weights()
            for slot, target in zip(slots, targets, strict=True):
                self.take_weight(slot.name, given[slot.name].detach().to(target.dtype, copy=True))
            self.finish_weights(version)
        return version

    def begin_weights(self) -> None:
        """Begin new weights; nothing can be sampled until `finish_weights`."""
        if self._is_continuous:
            self._decoding.check_rest()
        self._weight_version, self._broken = -1, "a weight update was interrupted"
        self._weights.begin()

    def take_weight(self, name: str, weight: torch.Tensor) -> None:
        """Take one of the new weights, under its Hugging Face name, in the engine's dtype."""
        try:
            self._weights.take(name, weight)
        except Exception as error:
            self._broken = f"vLLM could not load {name!r}: {type(error).__name__}: {shorten(str(error))}"
            raise

    def finish_weights(self, version: int) -> None:
        """Finish new weights, when all have come: vLLM computes with them, and with nothing that it knows of the old
        ones."""
        try:
            self._weights.finish()
        except Exception as error:
            self._broken = f"vLLM could not load version {version}: {type(error).__name__}: {shorten(str(error))}"
            raise
        self._weight_version, self._broken = version, None
        self._num_loads += 1

    def counters(self) -> dict[str, float]:
        """Return vLLM's own counts since its start, such as `vllm:num_preemptions`; it counts with
        `disable_log_stats: false` in `policy.generation.vllm_kwargs`."""
        return {each.name: each.value for each in self._engine().get_metrics() if isinstance(each, Counter)}

    def prepare_for_generation(self) -> None:
        """Let rows that stand still go on; weights and cache stay where they are."""
        self._engine()
        if self._is_continuous:
            self._decoding.thaw()

    def finish_generation(self) -> None:
        """Let rows stand still until `prepare_for_generation`, in continuous mode alone; memory stays reserved."""
        if self._llm is not None and self._is_continuous:
            self._decoding.freeze()

    def shutdown(self) -> None:
        if self._llm is not None:
            self._decoding.end(RuntimeError(SHUT_DOWN))
        llm, self._llm = self._llm, None
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()

    def _hand(self, method: str, named: Sequence[tuple[str, torch.Tensor]]) -> Sequence[object]:
        payload: list[object] = []
        if named:
            payload = [list(named) if self._is_alone else pack(list(named))]
        found: list[object] = self._engine().collective_rpc(method, args=tuple(payload))
        return found

    def _rpc(self, method: str, *arguments: object) -> list[object]:
        found: list[object] = self._engine().collective_rpc(method, args=arguments)
        return found

    def _engine(self) -> vllm.LLM:
        if self._llm is None:
            raise RuntimeError(SHUT_DOWN)
        return self._llm


class VllmTurns:
    """The rows of one vLLM engine, a step of vLLM at a time.

    Invariant: what vLLM has cached of a prompt is found by rows of the same weights alone, since a salt of the weights
    is part of every block's name; so nothing is reset at a refit, but where running rows are computed anew.

    Args:
        llm: returns vLLM.
    """

    def __init__(self, engine: VllmEngine, llm: Callable[[], vllm.LLM]) -> None:
        self._engine, self._llm = engine, llm
        self._running: dict[int, tuple[str, RowRequest]] = {}
        """Key -> vLLM's own name, and the row."""
        self._ended: dict[int, vllm.RequestOutput] = {}

    def rows_of(self, request: GenerationRequest) -> list[RowRequest]:
        return self._engine.rows_of(request)

    def join(self, rows: Sequence[TurnRow]) -> None:
        engine = self._llm().llm_engine
        replays = engine.vllm_config.use_v2_model_runner
        for each in rows:
            adapter = self._engine.adapter_of(each)
            salt = self._engine.salt_of(each.row)
            if adapter is not None:
                salt = f"{salt}.{self._engine.adapter_slots.salt_of(adapter)}"
            prompt = {"prompt_token_ids": list(each.row.prompt), "cache_salt": salt}
            params = row_params(each.request.sampling, each.row, replays=replays)
            lora = None if adapter is None else self._engine.adapter_slots.request_of(adapter)
            name = engine.add_request(str(each.key), prompt, params, lora_request=lora)
            self._running[each.key] = name, each.row

    def turn(self, *, with_named: bool) -> Collection[int]:
        """Run one step; a row whose prompt is read in chunks, or that waits for room in the cache, gets no token."""
        ended = []
        for output in self._llm().llm_engine.step():
            key = int(output.request_id)
            _, row = self._running.pop(key)
            reason = output.outputs[0].finish_reason
            if reason not in (STOPPED, CUT):
                raise WorkerError(f"vLLM ended row {row.number} by {reason!r}", stage=STAGE)
            self._ended[key] = output
            ended.append(key)
        return ended

    def recompute(self) -> None:
        if not self._llm().reset_prefix_cache(reset_running_requests=True):
            raise WorkerError("vLLM did not let go of the caches of running rows", stage=STAGE)

    def lengths(self) -> Mapping[int, int]:
        states = self._llm().llm_engine.output_processor.request_states
        return {
            key: states[name].detokenizer.num_output_tokens()
            for key, (name, _) in self._running.items()
            if name in states
        }

    def take(self, request: GenerationRequest, keys: Sequence[int]) -> GenerationOutput:
        found = [self._ended.pop(key) for key in keys]
        outputs = [each.outputs[0] for each in found]
        logprobs = [_logprobs(output) for output in outputs]
        self._check_finite(logprobs)
        shape = self._engine.route_shape if request.with_routes else None
        return GenerationOutput(
            token_ids=torch.tensor([token for output in outputs for token in output.token_ids], dtype=torch.int32),
            logprobs=torch.from_numpy(np.concatenate(logprobs)),
            lengths=torch.tensor([len(output.token_ids) for output in outputs], dtype=torch.int64),
            truncated=torch.tensor([output.finish_reason == CUT for output in outputs], dtype=torch.bool),
            weight_version=-1,
            routes=None if shape is None else join_routes([output.routed_experts for output in outputs], shape),
            cached_tokens=torch.tensor([each.num_cached_tokens or 0 for each in found], dtype=torch.int64),
        )

    def drop(self, keys: Collection[int]) -> None:
        names = [self._running.pop(key)[0] for key in keys if key in self._running]
        if names:
            self._llm().llm_engine.abort_request(names, internal=True)
        for key in keys:
            self._ended.pop(key, None)

    def _check_finite(self, logprobs: Sequence[np.ndarray]) -> None:
        bad = [row for row, values in enumerate(logprobs) if not bool(np.isfinite(values).all())]
        if bad:
            raise NonFiniteError(
                f"{self._engine.named()}: NaN or inf in the log-probabilities of row {name_some(bad)} of a group. "
                "Training has diverged, or the weights were broken from the start: resume from an earlier checkpoint "
                "with a lower learning rate, or check policy.model_name"
            )


def _logprobs(output: vllm.CompletionOutput) -> np.ndarray:
    """Return `[tokens]` float32; the sampled token comes first at every position."""
    flat = output.logprobs
    return np.asarray(flat.logprobs, dtype=np.float32)[np.asarray(flat.start_indices, dtype=np.int64)]


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
            return llm
        except ValueError as error:
            if "memory" not in str(error).lower():
                raise
            key = "kv_cache_gib" if "kv_cache_memory_bytes" in arguments else "gpu_memory_utilization"
            raise ResourceError(
                f"policy.generation.vllm_cfg.{key}: vLLM's cache of keys and values does not fit; change it, or lower "
                f"policy.max_total_sequence_length. vLLM says: {shorten(' '.join(str(error).split()))}"
            ) from error


class VllmWorker(RefitTarget, VllmEngine):
    """A `VllmEngine` that `WeightSync` brings new weights to.

    Buckets are joined to weights on the engine's device, and each weight goes to vLLM when it is whole. vLLM holds the
    weights of a layer until all of them are there. For deltas a copy of all weights stays in this process, on the CPU.
    """

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec)
        self._device = torch.device("cuda" if spec.use_gpu else "cpu")
        self._receiver = RefitReceiver(self._expected, self._device, take=self.take_weight)

    def report_device_id(self) -> str:
        return device_id(self._device)

    def refit_free_bytes(self, *, on_device: bool) -> int:
        return free_bytes(self._device if on_device else torch.device("cpu"))

    def match_refit(self, offered: Mapping[str, tuple[int, ...]]) -> tuple[WeightSlot, ...]:
        return self._receiver.match(offered)

    def delta_base(self) -> int | None:
        return self._receiver.delta_base

    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]], *, version: int) -> int:
        self._receiver.forget_base()
        return super().update_weights(weights, version=version)

    def match_adapter(self, offered: Mapping[str, tuple[int, ...]]) -> tuple[WeightSlot, ...]:
        return match_adapter(offered, self.adapter_slots.known)

    def use_adapter(self, version: int) -> int:
        return VllmEngine.use_adapter(self, version)

    def adapter_fingerprints(self, version: int) -> Mapping[str, str]:
        return self.adapter_slots.fingerprints(version)

    def adapter_versions(self) -> tuple[int, ...]:
        return self.adapter_slots.versions.held

    def begin_refit(self, plan: RefitPlan, *, handle: IpcHandle | None = None) -> None:
        if plan.kind == "weights":
            self.begin_weights()
        self._receiver.begin(plan, handle)

    def load_bucket(self, bucket: np.ndarray | None = None) -> None:
        self._receiver.load(bucket)

    def join_refit_group(self, spec: RefitGroupSpec) -> None:
        self._receiver.join(spec)

    def receive_weights(self) -> None:
        self._receiver.receive()

    def finish_refit(self, *, version: int) -> int:
        self._receiver.finish()
        adapter = self._receiver.take_adapter()
        if adapter is None:
            self.finish_weights(version)
        else:
            self.hold_adapter(adapter.items(), version=version)
        return version

    def fingerprints(self) -> Mapping[str, str]:
        return self._weights.fingerprints()

    def shutdown(self) -> None:
        self._receiver.close()
        super().shutdown()
