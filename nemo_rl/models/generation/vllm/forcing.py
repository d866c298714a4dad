"""Given responses in the place of drawn ones, through all of vLLM's decoding.

Put into vLLM's workers by `RefitExtension`; vLLM's second model runner replays responses by itself. Invariant: a row
with a given response is scheduled, cached and computed like any other; only what its sampler drew is replaced.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["force_rows"]


def force_rows(runner: Any, *, name: str) -> None:
    """From here on `runner`, a model runner of vLLM, takes the tokens of rows that bring theirs.

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
    """Row of the batch -> its next token, for the rows that bring theirs."""
    batch, found = runner.input_batch, dict[int, int]()
    for row, request_id in enumerate(batch.req_ids[: batch.num_reqs]):
        request = runner.requests[request_id]
        response = (request.sampling_params.extra_args or {}).get(name)
        position = len(request.output_token_ids)
        if response is not None and position < len(response):
            found[row] = response[position]
    return found
