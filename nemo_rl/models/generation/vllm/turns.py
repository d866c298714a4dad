"""`VllmTurns`: the rows of one vLLM engine, as `ContinuousDecoding` asks for them, a step of vLLM at a time.

Invariant: what vLLM has cached of a prompt is found by rows of the same weights alone, since a salt of the weights is
part of every block's name; so nothing is reset at a refit, but where running rows are computed anew.

Decoding of rows by vLLM: random numbers by seed and position, given responses, and routes.

`RefitExtension` puts the first two into vLLM's workers; `VllmEngine` reads the routes. Imports no vLLM. Invariants:

- What is drawn for a row depends on its seed and the position in its response alone, never on chunks, preemption or the
  batch. vLLM draws once too often for a row whose prompt runs in chunks or again after it was preempted, and winds its
  generator back, which on CPUs raises an error.
- A row with a given response is scheduled, cached and computed like any other; only what its sampler drew is replaced.
  vLLM's second model runner replays responses by itself.
- A row of routes that no router can have chosen is marked as missing, and never read as expert 0. vLLM returns one row
  of ids for every token that was fed, over all layers, out of a store that is zero where nothing was written.

Shapes: T tokens with a route, L layers with experts, A all layers, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
import vllm

from nemo_rl.errors import NonFiniteError, WorkerError, name_some
from nemo_rl.models.generation.interfaces import GenerationOutput, GenerationRequest, SamplingParams
from nemo_rl.models.generation.recording import ROW_KEY
from nemo_rl.models.generation.requests import RowRequest
from nemo_rl.models.generation.turn_batch import TurnBatch, TurnRow
from nemo_rl.routes.shape import MISSING, RecordedRoutes, RouteShape, route_dtype

__all__ = ["FORCED", "VllmTurns", "draw_by_position", "force_rows", "join_routes", "row_params"]


# splitmix64 (Steele, Lea, Flood 2014).
_GAMMA, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_BITS_64 = 2**64 - 1
_SEED_BITS = 63


class RowGenerator(torch.Generator):
    """A generator that is seeded for every token, so that winding it back means nothing."""

    def get_offset(self) -> int:
        return 0

    def set_offset(self, offset: int) -> torch.Generator:
        """vLLM takes back what it has drawn for a token that it discards."""
        return self


def draw_by_position(runner: Any) -> None:
    """Seed the generators of `runner`, a model runner of vLLM with one per request, anew for every token."""
    sample = runner._sample

    def seeded(*args: Any, **kwargs: Any) -> Any:
        batch = runner.input_batch
        for row, given in batch.generators.items():
            request = runner.requests[batch.req_ids[row]]
            generator = given if isinstance(given, RowGenerator) else RowGenerator(device=given.device)
            batch.generators[row] = generator
            generator.manual_seed(_mixed(request.sampling_params.seed, len(request.output_token_ids)))
        return sample(*args, **kwargs)

    runner._sample = seeded


def _mixed(seed: int, position: int) -> int:
    # The seed is mixed before the position is added: neighbouring seeds must not share a shifted stream. Of the result
    # torch's generator of CPUs reads 32 bits alone.
    return _mix(_mix(seed + _GAMMA) + (position + 1) * _GAMMA) >> (64 - _SEED_BITS)


def _mix(state: int) -> int:
    state &= _BITS_64
    state = ((state ^ (state >> 30)) * _MIX_1) & _BITS_64
    state = ((state ^ (state >> 27)) * _MIX_2) & _BITS_64
    return state ^ (state >> 31)


def force_rows(runner: Any, *, name: str) -> None:
    """Let `runner`, a model runner of vLLM, take the tokens of rows that bring theirs.

    Args:
        name: of the extra argument of a request that holds them.
    """
    sample = runner._sample

    def forcing(logits: torch.Tensor | None, *args: Any, **kwargs: Any) -> Any:
        given = {} if logits is None else _given(runner, name)
        if logits is None or not given:
            return sample(logits, *args, **kwargs)
        rows = torch.tensor(list(given), device=logits.device)
        tokens = torch.tensor(list(given.values()), device=logits.device)
        # Before the sampler, which changes the logits in place.
        logprobs = logits[rows].float().log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
        output = sample(logits, *args, **kwargs)
        output.sampled_token_ids[rows, 0] = tokens.to(output.sampled_token_ids.dtype)
        found = output.logprobs_tensors
        found.logprob_token_ids[rows, 0] = tokens.to(found.logprob_token_ids.dtype)
        found.logprobs[rows, 0] = logprobs.to(found.logprobs.dtype)
        return output

    runner._sample = forcing


def _given(runner: Any, name: str) -> dict[int, int]:
    """Return row of the batch -> its next token, for the rows that bring theirs."""
    batch, found = runner.input_batch, dict[int, int]()
    for row, request_id in enumerate(batch.req_ids[: batch.num_reqs]):
        request = runner.requests[request_id]
        response = (request.sampling_params.extra_args or {}).get(name)
        position = len(request.output_token_ids)
        if response is not None and position < len(response):
            found[row] = response[position]
    return found


def join_routes(rows_TAK: Sequence[np.ndarray], shape: RouteShape) -> RecordedRoutes:
    """Return all rows of a request.

    Args:
        rows_TAK: of each row, from its first prompt token on.
    """
    lengths = torch.tensor([len(row) for row in rows_TAK], dtype=torch.int64)
    layers, dtype = list(shape.layers), route_dtype(shape.num_experts)
    # Signed, because few operations support unsigned ids of 16 bits.
    parts = [torch.from_numpy(row[:, layers].astype(np.int32)) for row in rows_TAK]
    ids = torch.cat(parts) if parts else torch.zeros(0, len(layers), shape.top_k, dtype=torch.int32)
    is_missing = _impossible(ids, shape)
    if bool(is_missing.any()):
        ids[is_missing] = MISSING
        dtype = torch.int16
    return RecordedRoutes(ids=ids.to(dtype), starts=torch.zeros_like(lengths), lengths=lengths, shape=shape)


def _impossible(ids_TLK: torch.Tensor, shape: RouteShape) -> torch.Tensor:
    """Return `[T]` bool: the experts of a token differ from each other, in every layer."""
    ranked = ids_TLK.sort(dim=-1).values
    is_double = (ranked[..., 1:] == ranked[..., :-1]).any(-1)
    is_unknown = (ids_TLK >= shape.num_experts).any(-1)
    return (is_double | is_unknown).any(-1)


ALL_TOKENS = 0
"""vLLM's top-k that leaves nothing out."""
FORCED = "nemo_rl_forced"
"""Extra argument of a request with the tokens of its response, for `force_rows`."""
SEEDS = 2**63
"""Seeds of a torch generator; vLLM takes -1 for none."""
STAGE = "generation"
STOPPED, CUT = "stop", "length"
"""Ends of a row: at a stop token or string, or at its limit."""


def row_params(
    sampling: SamplingParams, row: RowRequest, *, replays: bool, key: str | None = None
) -> vllm.SamplingParams:
    """Return vLLM's parameters of a row, which stops where the request says, whatever the model's own files say.

    Args:
        replays: whether vLLM replays given responses by itself, as its second model runner does.
        key: of the row, where it is recorded.
    """
    given = None if row.forced is None else list(row.forced)
    extra: dict[str, object] = {} if given is None or replays else {FORCED: given}
    if key is not None:
        extra[ROW_KEY] = key
    return vllm.SamplingParams(
        trace_decode_token_ids=given if replays else None,
        extra_args=extra or None,
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


class VllmTurns(TurnBatch):
    """The rows of one vLLM engine, a step of vLLM at a time.

    Args:
        llm: gives vLLM to one thread at a time.
        rows_of: gives the rows of a request that the engine can sample, or raises.
        add: gives a row to vLLM, and returns vLLM's own name of it.
        route_shape: of the routes that vLLM records; None where it records none.
        named: names the engine and its weights, for errors.
    """

    def __init__(
        self,
        llm: Callable[[], AbstractContextManager[vllm.LLM]],
        *,
        rows_of: Callable[[GenerationRequest], list[RowRequest]],
        add: Callable[[vllm.LLM, TurnRow], str],
        route_shape: RouteShape | None,
        named: Callable[[], str],
    ) -> None:
        self._llm, self._rows_of, self._add, self._named = llm, rows_of, add, named
        self._route_shape = route_shape
        self._running: dict[int, tuple[str, RowRequest]] = {}
        """Key -> vLLM's own name, and the row."""
        self._ended: dict[int, vllm.RequestOutput] = {}

    def rows_of(self, request: GenerationRequest) -> list[RowRequest]:
        return self._rows_of(request)

    def join(self, rows: Sequence[TurnRow]) -> None:
        for each in rows:
            with self._llm() as llm:
                name = self._add(llm, each)
            self._running[each.key] = name, each.row

    def turn(self, *, with_named: bool) -> Collection[int]:
        """Run one step; a row whose prompt is read in chunks, or that waits for room in the cache, gets no token."""
        ended = []
        with self._llm() as llm:
            outputs = llm.llm_engine.step()
        for output in outputs:
            key = int(output.request_id)
            _, row = self._running.pop(key)
            reason = output.outputs[0].finish_reason
            if reason not in (STOPPED, CUT):
                raise WorkerError(f"vLLM ended row {row.number} by {reason!r}", stage=STAGE)
            self._ended[key] = output
            ended.append(key)
        return ended

    def recompute(self) -> None:
        with self._llm() as llm:
            if not llm.reset_prefix_cache(reset_running_requests=True):
                raise WorkerError("vLLM did not let go of the caches of running rows", stage=STAGE)

    def lengths(self) -> Mapping[int, int]:
        with self._llm() as llm:
            states = llm.llm_engine.output_processor.request_states
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
        shape = self._route_shape if request.with_routes else None
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
            with self._llm() as llm:
                llm.llm_engine.abort_request(names, internal=True)
        for key in keys:
            self._ended.pop(key, None)

    def _check_finite(self, logprobs: Sequence[np.ndarray]) -> None:
        bad = [row for row, values in enumerate(logprobs) if not bool(np.isfinite(values).all())]
        if bad:
            raise NonFiniteError(
                f"{self._named()}: NaN or inf in the log-probabilities of row {name_some(bad)} of a group. "
                "Training has diverged, or the weights were broken from the start: resume from an earlier checkpoint "
                "with a lower learning rate, or check policy.model_name"
            )


def _logprobs(output: vllm.CompletionOutput) -> np.ndarray:
    """Return `[tokens]` float32; the sampled token comes first at every position."""
    flat = output.logprobs
    return np.asarray(flat.logprobs, dtype=np.float32)[np.asarray(flat.start_indices, dtype=np.int64)]
