"""Engines with planted faults: processes that die or stand still in a request, and refits that go wrong.

Recipes name `build_dying_engine` and `build_dying_vllm`. `policy.generation.options` has `signal` (a name such as
SIGKILL), `victims` (such as `engine 1 at 2, engine 1 at 3`: the request, counted from 1, in which the first process of
engine 1 ends, and the one in which its successor does) and `notes`, a folder where each victim leaves a file.

Faults of a refit are planted by name, one at a time; a receipt must find each. A fault is planted behind the
fingerprints where the engine has room there: in vLLM between what was handed over and what it computes with, in the
embedded engine in the weights of its module.
"""

from __future__ import annotations

import importlib
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import torch
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from nemo_rl.config.generation import VllmConfig
from nemo_rl.config.policy import PolicyConfig
from nemo_rl.models.generation.interfaces import (
    EngineSpec,
    GenerationInterface,
    GenerationOutput,
    GenerationRequest,
    GroupSamples,
)
from nemo_rl.models.generation.torch_engine.worker import EngineWorker
from nemo_rl.models.generation.vllm.worker import build_vllm_worker
from nemo_rl.models.weight_sync.buckets import BucketSink, RefitPlan, flat_bytes
from nemo_rl.models.weight_sync.receipt import LONG
from nemo_rl.models.weight_sync.transport import IpcHandle
from tests.helpers.model_families import VLLM_SIZES, write_with_tokenizer

ENDED_SUFFIX = ".ended"
"""Suffix of the file that an engine makes just before it ends."""
INTO_DECODING_S = 0.02
"""Time after which a request of vLLM is being decoded."""


class DyingEngine(EngineWorker):
    """The embedded engine, which ends itself in a request."""

    deadly: Callable[[], None] | None = None
    requests_left = 0

    def generate(self, request: GenerationRequest) -> GenerationOutput:
        # The probe of a receipt is no request of a rollout.
        self.requests_left -= request.forced is None
        if self.deadly is not None and request.forced is None and self.requests_left == 0:
            self.deadly()
        return super().generate(request)


def build_dying_engine(spec: EngineSpec) -> DyingEngine:
    """Starts one replica."""
    engine = cast("DyingEngine", DyingEngine.from_config(spec.policy, number=spec.number))
    deadly = _planned_end(spec)
    if deadly is not None:
        engine.deadly, engine.requests_left = deadly
    return engine


def build_dying_vllm(spec: EngineSpec) -> GenerationInterface:
    """Starts one replica of vLLM, with a small cache."""
    worker = build_vllm_worker(_with_small_cache(spec))
    deadly = _planned_end(spec)
    if deadly is None:
        return worker
    stream, (end, left) = worker.stream, deadly

    def dying(request: GenerationRequest) -> Iterator[GroupSamples]:
        nonlocal left
        left -= 1
        if left == 0:
            threading.Timer(INTO_DECODING_S, end).start()
        yield from stream(request)

    # The probe of a receipt comes by `generate`.
    worker.stream = dying  # type: ignore[method-assign]
    return worker


def _with_small_cache(spec: EngineSpec) -> EngineSpec:
    generation = spec.policy.generation.model_copy(update={"vllm_cfg": VllmConfig(kv_cache_gib=0.05)})
    policy: PolicyConfig = spec.policy.model_copy(update={"generation": generation})
    return replace(spec, policy=policy)


def _planned_end(spec: EngineSpec) -> tuple[Callable[[], None], int] | None:
    """Return how the process ends and in which request, or None for an engine that lives."""
    options = spec.policy.generation.options
    ends = re.findall(rf"engine {spec.number} at (\d+)", str(options["victims"]))
    notes = [Path(str(options["notes"])) / f"engine_{spec.number}_{life}" for life in range(len(ends))]
    left = [(note, at) for note, at in zip(notes, ends, strict=True) if not note.exists()]
    if not left:
        return None
    note, at = left[0]
    note.touch()

    def end() -> None:
        note.with_suffix(ENDED_SUFFIX).touch()
        os.kill(os.getpid(), signal.Signals[str(options["signal"])])

    return end, int(at)


Named = list[tuple[str, torch.Tensor]]
LAYER_0, LAYER_1 = "model.layers.0.", "model.layers.1."
NORM, SQUARE = f"{LAYER_1}post_attention_layernorm.weight", f"{LAYER_1}self_attn.o_proj.weight"
Q, K = f"{LAYER_0}self_attn.q_proj.weight", f"{LAYER_0}self_attn.k_proj.weight"
HEAD = "lm_head.weight"
EXPERTS = f"{LAYER_1}mlp.experts"


def receipt_model(*, seed: int = 0) -> PreTrainedModel:
    """Return a model with room for every fault: two like layers with experts, a tied head, as many keys as queries."""
    torch.manual_seed(seed)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
    sizes = {**VLLM_SIZES, "num_key_value_heads": 2, "num_hidden_layers": 2, "tie_word_embeddings": True}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**sizes, **experts})).eval()


def write_receipt_model(folder: Path) -> Path:
    return write_with_tokenizer(folder, receipt_model())


class FaultyWorker(EngineWorker):
    """The embedded engine; `plant` names the fault of the refits that follow."""

    fault: str | None = None

    def plant(self, fault: str | None) -> None:
        self.fault = fault
        model = self._loaded_model()
        model.lm_head.weight = model.model.embed_tokens.weight
        self._old = {name: weight.detach().clone() for name, weight in self._state().items()}

    def begin_refit(self, plan: RefitPlan, *, handles: Sequence[IpcHandle] = ()) -> None:
        super().begin_refit(plan, handles=handles)
        if self.fault == "not delivered":
            self._drop(plan, SQUARE)

    def _drop(self, plan: RefitPlan, name: str) -> None:
        """Drop what is sent for one weight."""
        receiver = self._refit()
        kept = [
            torch.empty_like(target) if slot.name == name else target
            for slot, target in zip(plan.slots, receiver._targets, strict=True)
        ]
        if plan.delta is None:
            receiver._sink = BucketSink(plan, kept)
        else:
            receiver._held._bytes = [flat_bytes(target) for target in kept]

    def load_bucket(self, bucket: np.ndarray | None = None) -> None:
        if self.fault != "version without weights":
            super().load_bucket(bucket)

    @torch.no_grad()
    def finish_refit(self, *, version: int) -> int:
        if self.fault == "version without weights":
            self.hold_version(version)
            return version
        held = super().finish_refit(version=version)
        state = self._state()
        for name, value in _changed(self.fault, {name: weight.clone() for name, weight in state.items()}, self).items():
            state[name].copy_(value)
        if self.fault == "tied head left behind":
            self._loaded_model().lm_head.weight = torch.nn.Parameter(self._old[HEAD])
        return held

    def _state(self) -> dict[str, torch.Tensor]:
        return dict(self._loaded_model().state_dict(keep_vars=True))


def _changed(fault: str | None, now: dict[str, torch.Tensor], worker: FaultyWorker) -> dict[str, torch.Tensor]:
    """Return the weights to write into the module in place of those received."""
    if fault == "previous version":
        return {NORM: worker._old[NORM]}
    if fault == "experts swapped":
        return {name: value[[1, 0, 2, 3]] for name, value in now.items() if name.startswith(EXPERTS)}
    if fault == "q and k swapped":
        return {Q: now[K], K: now[Q]}
    if fault == "transposed":
        return {SQUARE: now[SQUARE].T.clone()}
    if fault == "norm scaled":
        return {NORM: now[NORM] * 1.01}
    if fault == "layers off by one":
        return {name: now[name.replace(LAYER_0, LAYER_1)] for name in now if name.startswith(LAYER_0)}
    return {}


class FaultyVllm:
    """A vLLM worker of this process, in which `plant` plants a fault; anything else goes to the worker."""

    def __init__(self, spec: EngineSpec) -> None:
        self._worker = build_vllm_worker(spec)
        self._extension = importlib.import_module("nemo_rl.models.generation.vllm.extension")
        self._experts = self._extension.RoutedExperts
        self._finalize = self._extension.RefitExtension._finalize
        # The one rank of the engine is in this process.
        rank = self._worker._llm.llm_engine.model_executor.driver_worker.worker
        self._refit = rank.rank_refit
        self._load, self._salt_of = rank.load, self._worker.salt_of
        rank.load = self._load_changed
        self._fault: str | None = None
        self._last: dict[str, torch.Tensor] = {}
        self._old: dict[str, torch.Tensor] = {}

    def __getattr__(self, name: str) -> object:
        return getattr(self._worker, name)

    def plant(self, fault: str | None) -> None:
        worker, extension = self._worker, self._extension
        self._old = dict(self._last)
        extension.RoutedExperts, extension.RefitExtension._finalize = self._experts, self._finalize
        old_salt = self._salt_of(None)
        worker.salt_of = self._salt_of
        if fault == "stale prefix cache":
            worker.salt_of = lambda row: old_salt
        elif fault == "one stale block":
            # The longest prompt of the probe has one block and a few tokens.
            worker.salt_of = lambda row: old_salt if len(row.prompt) == LONG else self._salt_of(row)
        if fault == "experts not packed":
            extension.RoutedExperts = type(None)
        if fault == "tied head left behind":
            extension.ParallelLMHead = type(None)
        else:
            extension.ParallelLMHead = importlib.import_module(
                "vllm.model_executor.layers.vocab_parallel_embedding"
            ).ParallelLMHead
        self._fault = fault
        is_skipped = fault == "version without weights"
        for name in ("_take", "begin_weights", "finish"):
            self._refit.__dict__.pop(name, None)
        if is_skipped:
            self._refit._take = lambda name, weight: None
            self._refit.begin_weights = lambda: None
            self._refit.finish = lambda: None
        self._refit._receiver._take = self._refit._take

    def _load_changed(self, named: Named) -> None:
        changed = self._changed(self._fault, list(named))
        if changed:
            self._load(changed)

    def _changed(self, fault: str | None, named: Named) -> Named:
        for name, weight in named:
            self._last[name] = weight.clone()
        rename: Callable[[str], str] = lambda name: name  # noqa: E731
        if fault == "experts swapped":
            one, other = f"{EXPERTS}.0.", f"{EXPERTS}.1."
            rename = lambda name: name.replace(one, "*").replace(other, one).replace("*", other)  # noqa: E731
        if fault == "q and k swapped":
            rename = lambda name: {Q: K, K: Q}.get(name, name)  # noqa: E731
        if fault == "layers off by one":
            one, other = LAYER_0, LAYER_1
            rename = lambda name: name.replace(one, "*").replace(other, one).replace("*", other)  # noqa: E731
        given = [(rename(name), weight) for name, weight in named]
        if fault == "not delivered":
            given = [(name, weight) for name, weight in given if name != SQUARE]
        if fault == "previous version":
            given = [(name, self._old[name] if name == NORM else weight) for name, weight in given]
        if fault == "transposed":
            given = [(name, weight.T.contiguous() if name == SQUARE else weight) for name, weight in given]
        if fault == "norm scaled":
            given = [(name, weight * 1.01 if name == NORM else weight) for name, weight in given]
        return given
