"""Recomputation of decoder layers in the backward pass, whole or but for the operations that cost most.

Called by `parallelize`. With `selective` the outputs of matrix products and of attention are kept, and all else of a
layer is computed again. Batched products are not kept: attention that no kernel fuses would keep its scores.
"""

from __future__ import annotations

from functools import partial

from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import PreTrainedModel

from nemo_rl.config.dtensor import Recomputation

__all__ = ["KEPT_OPERATIONS", "recompute_layers"]

_SDPA = "aten._scaled_dot_product_"
KEPT_OPERATIONS = frozenset(
    {
        *(f"aten.{name}.default" for name in ("mm", "addmm", "_grouped_mm")),
        *(f"{_SDPA}{name}.default" for name in ("flash_attention", "flash_attention_for_cpu", "efficient_attention")),
        *(f"{_SDPA}{name}.default" for name in ("cudnn_attention", "fused_attention_overrideable")),
        "torch_attn._varlen_attn.default",
        "transformers.grouped_mm_fallback.default",
    }
)
"""Operations whose outputs `selective` keeps, besides those of this package: attention differs between devices."""
OWN_OPERATIONS = "nrl."
"""Prefix of the attention of this package."""


def recompute_layers(hf: PreTrainedModel, mode: Recomputation) -> None:
    """Let the layers of a model be computed again in the backward pass of a training step."""
    if mode == "none":
        return
    options: dict[str, object] = {"use_reentrant": False}
    if mode == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    # The old name warns where the new one exists.
    is_new = hasattr(hf, "activation_checkpointing_enable")
    enable = hf.activation_checkpointing_enable if is_new else hf.gradient_checkpointing_enable
    enable(options)


def _policy(_: object, operation: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    """Decide by the operation alone: torch 2.11 asks again while it recomputes, torch 2.13 does not."""
    name = str(operation)
    is_kept = name in KEPT_OPERATIONS or name.startswith(OWN_OPERATIONS)
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE
