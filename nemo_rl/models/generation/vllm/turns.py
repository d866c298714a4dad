"""`VllmTurns`: the rows of one vLLM engine, as `ContinuousDecoding` asks for them, a step of vLLM at a time.

Invariant: what vLLM has cached of a prompt is found by rows of the same weights alone, since a salt of the weights is
part of every block's name; so nothing is reset at a refit, but where running rows are computed anew.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager

import numpy as np
import torch
import vllm

from nemo_rl.errors import NonFiniteError, WorkerError, name_some
from nemo_rl.models.generation.interfaces import GenerationOutput, GenerationRequest, SamplingParams
from nemo_rl.models.generation.recording import ROW_KEY
from nemo_rl.models.generation.rows import RowRequest
from nemo_rl.models.generation.turn_batch import TurnBatch, TurnRow
from nemo_rl.models.generation.vllm.decoding import join_routes
from nemo_rl.routes.shape import RouteShape

__all__ = ["FORCED", "VllmTurns", "row_params"]

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
