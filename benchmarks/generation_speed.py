"""How fast rollouts are sampled: the embedded engine, vLLM and Hugging Face's `generate`, for `generation.py`.

Every engine is asked for the same tokens, so lengths are equal between them: responses are given, and decoded as if
they had been drawn. Each has a process of its own, of which CPU seconds count.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel

from nemo_rl.config.generation import GenerationConfig, VllmConfig
from nemo_rl.config.policy import PolicyConfig
from nemo_rl.models.generation.interfaces import EngineSpec, GenerationInterface, GenerationRequest, SamplingParams
from nemo_rl.models.generation.torch_engine.worker import build_engine_worker
from nemo_rl.models.generation.vllm.worker import build_vllm_worker
from nemo_rl.models.hf.loading import load_causal_lm, named_weights

__all__ = [
    "ENGINES",
    "MODES",
    "WORKLOADS",
    "SpeedCase",
    "SpeedSample",
    "Workload",
    "measure_modes",
    "measure_speed",
    "request_of",
]

logger = logging.getLogger(__name__)

ENGINES = ("embedded", "vllm", "hf_generate")
CONTINUOUS = "continuous"
MODES = ("request_mode", CONTINUOUS)
"""Of the embedded engine: a batch after the other, or rows that join as places are free."""
EOS, SMALLEST_ID, LARGEST_ID = 2, 7, 500
"""Ids of the random model."""
GROUP = 8
SPREAD = 1.2
"""Sigma of the logarithm of unequal lengths."""
TAIL = 30
"""The longest response over the median one."""
TIMEOUT_S = 600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """What is asked for."""

    name: str
    is_unequal: bool
    """Log-normal lengths with a long tail; else all are alike."""
    is_shared: bool
    """Groups of samples share their prompt; else every row has its own."""


WORKLOADS = tuple(
    Workload(
        name=f"{'unequal' if is_unequal else 'equal'}{'_shared' if is_shared else ''}",
        is_unequal=is_unequal,
        is_shared=is_shared,
    )
    for is_unequal in (False, True)
    for is_shared in (False, True)
)


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeedCase:
    """How much."""

    rows: int = 128
    batch: int = 32
    """Rows that an engine decodes together."""
    prompt_tokens: int = 96
    median_tokens: int = 16
    equal_tokens: int = 48
    repeats: int = 2

    @property
    def longest(self) -> int:
        return self.median_tokens * TAIL


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeedSample:
    """One request."""

    engine: str
    workload: str
    tokens: int
    """Of all responses."""
    wall_s: float
    cpu_s: float
    """Of all threads of the engine's process."""

    def as_record(self) -> dict[str, object]:
        return {
            "engine": self.engine,
            "workload": self.workload,
            "tokens": self.tokens,
            "wall_s": self.wall_s,
            "cpu_s": self.cpu_s,
        }


def request_of(workload: Workload, case: SpeedCase, *, seed: int) -> GenerationRequest:
    """Random prompts, and the responses that are to be decoded."""
    rng = np.random.default_rng(seed)
    lengths = np.full(case.rows, case.equal_tokens)
    if workload.is_unequal:
        drawn = case.median_tokens * np.exp(SPREAD * rng.standard_normal(case.rows))
        lengths = np.clip(drawn.round().astype(int), 1, case.longest)
        lengths[rng.integers(case.rows)] = case.longest

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(rng.integers(SMALLEST_ID, LARGEST_ID, count).tolist())

    num_prompts = case.rows // (GROUP if workload.is_shared else 1)
    return GenerationRequest(
        prompt_ids=tuple(tokens(case.prompt_tokens) for _ in range(num_prompts)),
        seeds=tuple(range(case.rows)),
        sampling=SamplingParams(temperature=1.0, max_new_tokens=case.longest, stop_token_ids=(EOS,)),
        # The last one ends the row, in every engine.
        forced=tuple((*tokens(length - 1), EOS) for length in lengths.tolist()),
    )


def measure_speed(model: Path, case: SpeedCase, *, engines: Sequence[str] = ENGINES) -> list[SpeedSample]:
    """All workloads on all engines."""
    os.environ["OMP_NUM_THREADS"] = "1"
    found: list[SpeedSample] = []
    for engine in engines:
        # vLLM changes the process that it is in.
        with ProcessPoolExecutor(max_workers=1, mp_context=multiprocessing.get_context("spawn")) as pool:
            found += pool.submit(_measure_engine, engine, model, case).result(timeout=TIMEOUT_S)
        logger.info("%s: %.0f CPU seconds", engine, sum(each.cpu_s for each in found if each.engine == engine))
    return found


def _measure_engine(engine: str, model: Path, case: SpeedCase) -> list[SpeedSample]:
    torch.set_num_threads(1)
    generate, end = _opened(engine, model, case)
    found = []
    for workload in WORKLOADS:
        for repeat in range(-1, case.repeats):
            # Other prompts in every workload: a prefix cache has none of them.
            request = request_of(workload, case, seed=len(WORKLOADS) * (repeat + 1) + WORKLOADS.index(workload))
            sample = _timed(engine, workload, request, generate)
            # The first one warms the engine up.
            if repeat >= 0:
                found.append(sample)
    end()
    return found


def _timed(
    engine: str, workload: Workload, request: GenerationRequest, generate: Callable[[GenerationRequest], int]
) -> SpeedSample:
    began, cpu_began = time.perf_counter(), time.process_time()
    tokens = generate(request)
    wall_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu_began
    expected = sum(len(response) for response in request.forced or ())
    if tokens != expected:
        raise RuntimeError(f"{engine}, {workload.name}: expected {expected} tokens, got {tokens}")
    return SpeedSample(engine=engine, workload=workload.name, tokens=tokens, wall_s=wall_s, cpu_s=cpu_s)


def measure_modes(model: Path, case: SpeedCase) -> list[SpeedSample]:
    """All workloads on the embedded engine, request by request in both of its modes; samples of a pair follow each
    other."""
    os.environ["OMP_NUM_THREADS"] = "1"
    with ProcessPoolExecutor(max_workers=1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_measure_modes, model, case).result(timeout=TIMEOUT_S)


def _measure_modes(model: Path, case: SpeedCase) -> list[SpeedSample]:
    torch.set_num_threads(1)
    workers = {mode: _worker("embedded", model, case, continuous=mode == CONTINUOUS) for mode in MODES}
    found = []
    for workload in WORKLOADS:
        for repeat in range(-1, 2 * case.repeats):
            request = request_of(workload, case, seed=len(WORKLOADS) * (repeat + 1) + WORKLOADS.index(workload))
            named = replace(request, names=tuple(f"{group}.0" for group in range(len(request.prompt_ids))))
            pair = [
                _timed(mode, workload, named, partial(_num_streamed, workers[mode]))
                for mode in (MODES if repeat % 2 else MODES[::-1])
            ]
            if repeat >= 0:
                found += sorted(pair, key=lambda each: MODES.index(each.engine))
    return found


def _num_streamed(worker: GenerationInterface, request: GenerationRequest) -> int:
    return sum(len(samples.output.token_ids) for samples in worker.stream(request))


def _opened(engine: str, model: Path, case: SpeedCase) -> tuple[Callable[[GenerationRequest], int], Callable[[], None]]:
    """(samples a request and returns its tokens, ends)."""
    if engine == "hf_generate":
        lm = load_causal_lm(model)
        return (lambda request: hf_generate(lm, request, batch=case.batch)), (lambda: None)
    worker = _worker(engine, model, case)
    return (lambda request: len(worker.generate(request).token_ids)), worker.shutdown


def _worker(engine: str, model: Path, case: SpeedCase, *, continuous: bool = False) -> GenerationInterface:
    policy = PolicyConfig(
        model_name=str(model),
        precision="float32",
        max_total_sequence_length=case.prompt_tokens + case.longest,
        generation=GenerationConfig(
            backend="vllm" if engine == "vllm" else "torch",
            max_batch_size=case.batch,
            max_new_tokens=case.longest,
            vllm_cfg=VllmConfig(kv_cache_gib=0.5),
        ),
    )
    spec = EngineSpec(policy=policy, continuous=continuous)
    worker: GenerationInterface = build_vllm_worker(spec) if engine == "vllm" else build_engine_worker(spec)
    weights = named_weights(load_causal_lm(model))
    worker.update_weights([(name, weight.detach()) for name, weight in weights], version=0)
    return worker


def hf_generate(model: PreTrainedModel, request: GenerationRequest, *, batch: int) -> int:
    """Samples the rows of a request with Hugging Face's `generate`, `batch` at a time; returns their tokens.

    As trainers use it: prompts are padded on the left, and log-probabilities come from the logits.
    """
    prompts = [prompt for prompt in request.prompt_ids for _ in range(request.group_size)]
    responses, total = request.forced or (), 0
    for start in range(0, len(prompts), batch):
        given = responses[start : start + batch]
        longest = max(map(len, given))
        forced = torch.full((len(given), longest), EOS)
        for row, response in enumerate(given):
            forced[row, : len(response)] = torch.tensor(response)
        ids = torch.tensor(prompts[start : start + batch])
        output = model.generate(  # type: ignore[operator]
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            top_k=0,
            top_p=1.0,
            temperature=1.0,
            max_new_tokens=longest,
            eos_token_id=EOS,
            pad_token_id=EOS,
            logits_processor=LogitsProcessorList([_Forced(forced, ids.shape[1])]),
            return_dict_in_generate=True,
            output_logits=True,
        )
        drawn = output.sequences[:, ids.shape[1] :]
        torch.stack(output.logits, 1).log_softmax(-1).gather(-1, drawn[:, :, None])
        is_real = (drawn == EOS).cumsum(1) - (drawn == EOS).long() == 0
        total += int(is_real.sum())
    return total


class _Forced(LogitsProcessor):
    """Leaves one token at each position."""

    def __init__(self, forced: torch.Tensor, prompt_tokens: int) -> None:
        self._forced, self._prompt_tokens = forced, prompt_tokens

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        place = self._forced[:, input_ids.shape[1] - self._prompt_tokens, None]
        return torch.full_like(scores, -torch.inf).scatter(1, place, 0.0)


def small(case: SpeedCase) -> SpeedCase:
    """A smoke test of it: figures mean nothing."""
    return replace(case, rows=16, batch=8, prompt_tokens=16, median_tokens=2, equal_tokens=4, repeats=1)
