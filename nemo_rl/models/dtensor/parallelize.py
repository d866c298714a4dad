"""The trained model as FSDP2 sees it: `PolicyModel` around the Hugging Face model, sharded per layer and at the root.

Called by the DTensor worker. Invariant: parameters are resharded after every forward pass, so a pass always sees the
current shards, also after the shards were written in place. Shapes: n rows, S width, K kept positions, M selected
tokens, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from nemo_rl.models.loading import DTYPES
from nemo_rl.models.logprobs import SamplingView, token_logprobs

__all__ = ["ForwardInputs", "PolicyModel", "copy_into_shard", "full_weight", "local_shard", "parallelize"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardInputs:
    """One forward pass: tokens in, and which tokens' log-probabilities out."""

    input_ids: torch.Tensor
    """`[n, S]` int64."""
    position_ids: torch.Tensor | None
    """`[1, S]` int64, restarting per sequence, for packed rows; None for padded rows."""
    keep_K: torch.Tensor
    """`[K]` positions whose logits are computed, the same for every row."""
    row_M: torch.Tensor
    """`[M]` row of each selected token."""
    kept_M: torch.Tensor
    """`[M]` index into `keep_K` of the position that predicts it."""
    target_M: torch.Tensor
    """`[M]` the selected tokens."""


class PolicyModel(torch.nn.Module):
    """The unit that FSDP wraps: its forward runs the model and ends in log-probabilities, never in full logits."""

    def __init__(self, hf: PreTrainedModel) -> None:
        super().__init__()
        self.hf = hf

    def forward(
        self, inputs: ForwardInputs, *, view: SamplingView, top_k_logits: int | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """`[M]` float32 log-probabilities; with `top_k_logits` values and ids `[n, K, k]` of the largest logits."""
        # Neither form passes a mask. Padded rows: padding is on the right, so causal attention never reaches it.
        # Packed rows: the model derives the segments from the restarts in position_ids, which it does only without a
        # mask and without a cache.
        logits_nKV = self.hf(
            input_ids=inputs.input_ids,
            attention_mask=None,
            position_ids=inputs.position_ids,
            use_cache=False,
            logits_to_keep=inputs.keep_K,
        ).logits
        if top_k_logits is not None:
            values, ids = logits_nKV.float().topk(top_k_logits, dim=-1)
            return values, ids
        return token_logprobs(logits_nKV[inputs.row_M, inputs.kept_M], inputs.target_M, view=view)


def parallelize(
    hf: PreTrainedModel, *, mesh: DeviceMesh, precision: str, activation_checkpointing: bool
) -> PolicyModel:
    """Wraps and shards the model over the data-parallel mesh (collective).

    Parameters stay float32; with another precision they are cast for computation and gradients are reduced in float32.
    """
    if activation_checkpointing:
        hf.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model = PolicyModel(hf)
    policy = MixedPrecisionPolicy()
    if precision != "float32":
        policy = MixedPrecisionPolicy(param_dtype=DTYPES[precision], reduce_dtype=torch.float32)
    layer_names = set(hf._no_split_modules or ())
    for module in list(hf.modules()):
        if type(module).__name__ in layer_names:
            fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    return model


def as_fsdp(model: PolicyModel) -> FSDPModule:
    """The same object under the interface that `fully_shard` gave it."""
    if not isinstance(model, FSDPModule):
        raise TypeError("the model is not sharded; call parallelize first")
    return model


def local_shard(weight: torch.Tensor) -> torch.Tensor:
    """This rank's part, sharing memory."""
    return weight.to_local() if isinstance(weight, DTensor) else weight


def full_weight(weight: torch.Tensor) -> torch.Tensor:
    """The whole tensor on every rank (collective), detached."""
    detached = weight.detach()
    return detached.full_tensor() if isinstance(detached, DTensor) else detached


def copy_into_shard(weight: torch.Tensor, full: torch.Tensor) -> None:
    """Writes this rank's part of a whole tensor that every rank holds; no communication."""
    with torch.no_grad():
        if isinstance(weight, DTensor):
            full = distribute_tensor(full.to(weight.device), weight.device_mesh, weight.placements, src_data_rank=None)
        weight.copy_(full)
