"""From the logits of one pass to log-probabilities of the selected tokens, or to the largest logits of every position.

Called by the models of every policy worker, where their forward pass ends. Shapes: n rows, S positions of the pass, s
of them on this context rank, K kept positions, M selected tokens, m of them predicted here, V vocabulary columns here,
c 1 and more: log-probabilities, and what is computed besides them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nemo_rl.distributed.differentiable import gather_along, reduce_from
from nemo_rl.models.logprobs import (
    Sampling,
    VocabShard,
    logprobs_with_entropy,
    logprobs_with_squares,
    token_logprobs,
)
from nemo_rl.models.policy.interfaces import ENTROPY, SQUARED_PROBS, UNFILTERED_LOGPROBS
from nemo_rl.models.policy.microbatch import ForwardInputs
from nemo_rl.models.varlen_attention import Segments

__all__ = ["selected_logprobs", "top_k_logits"]


def selected_logprobs(
    logits_nKV: torch.Tensor,
    inputs: ForwardInputs,
    *,
    sampling: Sampling,
    shard: VocabShard | None,
    computed: Sequence[str] = (),
) -> torch.Tensor:
    """`[1, M]` float32, the same on every tensor and context rank (collective over both), differentiable.

    Args:
        logits_nKV: at `inputs.keep_K`.
        shard: this rank's part of the vocabulary where the head is split.
        computed: `SQUARED_PROBS`, or some of `COMPUTED_FIELDS` in their order: a line more for each.
    """
    logits_mV = logits_nKV[inputs.row_m, inputs.kept_m]
    if ENTROPY in computed:
        found_cm = logprobs_with_entropy(logits_mV, inputs.target_m, sampling=sampling, shard=shard, kept=inputs.kept)
    elif SQUARED_PROBS in computed:
        found_cm = logprobs_with_squares(logits_mV, inputs.target_m, sampling=sampling, shard=shard, kept=inputs.kept)
    else:
        logprobs_m = token_logprobs(logits_mV, inputs.target_m, sampling=sampling, shard=shard, kept=inputs.kept)
        # No view: FSDP warns of one that its module returns, since an in-place op on it would drop its hook.
        found_cm = torch.stack([logprobs_m])
    if UNFILTERED_LOGPROBS in computed:
        unfiltered_m = token_logprobs(logits_mV, inputs.target_m, sampling=sampling.unfiltered, shard=shard)
        found_cm = torch.cat([found_cm, unfiltered_m[None]])
    if inputs.segments.group is None:
        return found_cm
    # Every context rank gets the tokens of all, so that a loss sees whole rows.
    places = torch.arange(len(found_cm), device=found_cm.device)[:, None], inputs.selected_m[None]
    zeros_cM = found_cm.new_zeros(len(found_cm), inputs.num_selected)
    return reduce_from(zeros_cM.index_put(places, found_cm), inputs.segments.group)


def top_k_logits(
    logits_nsV: torch.Tensor, segments: Segments, *, k: int, shard: VocabShard | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and ids `[n, S, k]` at every position (collective over tensor and context ranks)."""
    if shard is not None:
        logits_nsV = gather_along(logits_nsV, shard.group, dim=2)
    values, ids = logits_nsV.float().topk(k, dim=-1)
    if segments.group is None:
        return values, ids
    order = segments.row_order
    whole = [gather_along(part, segments.group, dim=1).index_select(1, order) for part in (values, ids)]
    return whole[0], whole[1]
