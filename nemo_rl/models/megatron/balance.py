"""The balance of experts: a loss where `moe_router_load_balancing_type` asks for it, and the bias of a router.

megatron-core computes the loss in the routers, per microbatch. Invariant: its gradient is the mean over the
microbatches of the global batch, whatever the ranks that share them; padding does not count, for the bias neither.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch

from nemo_rl.models.megatron.mcore import TopKRouter, clear_router_losses, router_losses
from nemo_rl.models.megatron.transformer_config import DecoderConfig
from nemo_rl.models.policy.microbatch import Microbatch
from nemo_rl.models.policy.steps import all_reduce_sum
from nemo_rl.utils.metrics import Mean, Reduction

__all__ = ["AuxiliaryLoss", "average_over_microbatches", "count_tokens_without_padding"]

METRIC = "moe_load_balancing_loss"
"""Balancing loss of the routers, before its coefficient; 1 is a perfect balance."""


class AuxiliaryLoss:
    """Reports the balancing loss of each global batch; does nothing for a model or a config without it."""

    def __init__(self, config: DecoderConfig, *, num_shards: int, device: torch.device) -> None:
        """Args:
        num_shards: data-parallel shards of the job.
        """
        self._config, self._num_shards, self._device = config, num_shards, device
        self.is_on = bool(config.num_moe_experts and config.moe_router_load_balancing_type != "none")
        self._is_global = config.moe_router_load_balancing_type == "global_aux_loss"
        self._moves_bias = bool(config.num_moe_experts and config.moe_router_bias_update_rate)
        self._num_losses = 1

    def begin(self, num_microbatches: int) -> None:
        """Begin a global batch, before its first microbatch.

        Args:
            num_microbatches: of each rank; every one has a loss, or with `global_aux_loss` one over all shards.
        """
        if not self.is_on:
            return
        self._num_losses = num_microbatches * (1 if self._is_global else self._num_shards)
        clear_router_losses()
        # megatron-core scales both losses by this, the main one before its backward pass.
        self._config.grad_scale_func = lambda loss: loss / self._num_losses

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the main loss, so that what `grad_scale_func` makes of it is the loss itself."""
        return loss * self._num_losses if self.is_on else loss

    def padding(self, micro: Microbatch, *, tp_rank: int, is_first_stage: bool) -> torch.Tensor | None:
        """Return `[n, s]` bool: positions that routers leave out of the balance; None where all count or none.

        megatron-core splits it over the sequence parallel ranks in the first stage only.
        """
        # The loss of a pass without a token would be 0 / 0.
        if not (micro.rows if self.is_on else self._moves_bias):
            return None
        mask_ns = micro.inputs.is_padding_ns
        if self._config.sequence_parallel and not is_first_stage:
            return mask_ns.chunk(self._config.tensor_model_parallel_size, dim=1)[tp_rank]
        return mask_ns

    def metrics(self) -> list[dict[str, Reduction]]:
        """(collective over all ranks) Return the mean over the layers and losses since `begin`."""
        if not self.is_on:
            return []
        # Every rank holds its layers' and its tokens' part of each loss.
        own = sum(float(values.sum()) for values in router_losses())
        [total] = all_reduce_sum([own])
        return [{METRIC: Mean(total, sum(self._config.moe_layer_freq) * self._num_losses)}]


def average_over_microbatches(module: torch.nn.Module) -> None:
    """Take back megatron-core's weight of each router's loss, the tokens of one rank, which depends on the layout."""
    for part in module.modules():
        if isinstance(part, TopKRouter):
            part.calculate_per_token_loss = False


def count_tokens_without_padding(module: torch.nn.Module) -> None:
    """Replace the count of each expert's tokens, by which a router's bias moves.

    megatron-core's own takes the mask of the tokens for one of the experts (0.16.1): an error, or with as many experts
    as tokens other counts.
    """
    for part in module.modules():
        if isinstance(part, TopKRouter):
            part._apply_expert_bias = partial(_count_tokens, part)


def _count_tokens(router: TopKRouter, routing_map: torch.Tensor, padding_mask: torch.Tensor | None = None) -> None:
    # Not in the first pass of a layer that is recomputed, and not in evaluation.
    if not router.enable_expert_bias or not torch.is_grad_enabled():
        return
    with torch.no_grad():
        counted = routing_map if padding_mask is None else routing_map & ~padding_mask[:, None]
        router.local_tokens_per_expert += counted.sum(dim=0)


@contextmanager
def biases_kept_on_error(module: torch.nn.Module) -> Iterator[None]:
    """Surround a global batch: megatron-core moves the routers' biases with the gradients, before those are looked
    at."""
    kept = [(bias, bias.clone()) for name, bias in module.named_buffers() if name.endswith(".expert_bias")]
    try:
        yield
    except BaseException:
        for bias, before in kept:
            bias.copy_(before)
        raise
