"""How vLLM samples one row of a request."""

from __future__ import annotations

import vllm

from nemo_rl.models.generation.interfaces import SamplingParams
from nemo_rl.models.generation.rows import RowRequest

__all__ = ["FORCED", "row_params"]

ALL_TOKENS = 0
"""vLLM's top-k that leaves nothing out."""
FORCED = "nemo_rl_forced"
"""Extra argument of a request with the tokens of its response, for `force_rows`."""
SEEDS = 2**63
"""Seeds of a torch generator; vLLM takes -1 for none."""


def row_params(sampling: SamplingParams, row: RowRequest, *, replays: bool) -> vllm.SamplingParams:
    """Stops are those of the request alone, whatever the model's own files say.

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
        # That of the sampled token.
        logprobs=0,
        flat_logprobs=True,
    )
