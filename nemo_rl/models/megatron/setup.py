"""Process groups and model of one Megatron rank.

`initialize_parallel` and `build_model` are collective: every rank of the job calls them in this order. Invariant: ranks
lie as `ParallelLayout` says, and every group inherits the deadline of the job.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from transformers import PretrainedConfig

from nemo_rl.config.policy import PolicyConfig
from nemo_rl.errors import ConfigError
from nemo_rl.models.adapters.lora import adapted_layers
from nemo_rl.models.head.logits import LazyLogits
from nemo_rl.models.hf.loading import ADAPTER_PART, model_without_weights
from nemo_rl.models.megatron.adapters import LinearAdapters, attach_parallel_adapters
from nemo_rl.models.megatron.architecture import Architecture
from nemo_rl.models.megatron.attention import PackedSegments, Rotary
from nemo_rl.models.megatron.balance import average_over_microbatches, count_tokens_without_padding
from nemo_rl.models.megatron.convert_table import Weight, adapter_weights, check_adapters_fit
from nemo_rl.models.megatron.cpu_compat import as_if_cuda
from nemo_rl.models.megatron.mcore import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    Float16Module,
    GPTModel,
    MoELayer,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    model_parallel_cuda_manual_seed,
    parallel_state,
)
from nemo_rl.models.megatron.transformer_config import (
    DecoderConfig,
    block_spec,
    transformer_config,
    uses_distributed_optimizer,
)

__all__ = ["MegatronModel", "PolicyGPT", "build_model", "destroy_parallel", "forget_last_pass", "initialize_parallel"]


class PolicyGPT(GPTModel):  # type: ignore[misc]
    """A pipeline stage; a pass hands it `PackedSegments`."""

    def __init__(self, *args: Any, padding_token: int | None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._padding_token = padding_token
        if self.pre_process and padding_token is not None:
            self.embedding.register_forward_hook(self._leave_padding_out, with_kwargs=True)
        if self.post_process and self.output_layer.sequence_parallel:
            # The head gets positions that are gathered already, the same ones on every tensor rank.
            self.output_layer.sequence_parallel = False
            self.output_layer.allreduce_dgrad = True

    def _leave_padding_out(
        self, _: torch.nn.Module, __: tuple[object, ...], kwargs: Mapping[str, Any], hidden: torch.Tensor
    ) -> torch.Tensor:
        """End the gradient of the embedding `[s, n, H]` where the padding token was read.

        The layers get a view: an observer of its gradient sees it whole, as in a Hugging Face model.
        """
        if not hidden.requires_grad:
            return hidden
        is_padding = (kwargs["input_ids"] == self._padding_token).T[..., None]
        if self.config.sequence_parallel:
            group = self.pg_collection.tp
            is_padding = is_padding.chunk(group.size())[group.rank()]
        hidden.register_hook(lambda grad: grad.masked_fill(is_padding, 0.0))
        return hidden.view_as(hidden)

    def _postprocess(
        self, hidden_states: torch.Tensor, *, packed_seq_params: PackedSegments, **_: object
    ) -> torch.Tensor:
        """Return what the last stage's head multiplies, `[n, K, H]`; before it the activations `[s, n, H]` as they are.

        Args:
            packed_seq_params: its `keep_K` are the positions; None means all, and logits `[n, s, V]` of this rank.
        """
        if not self.post_process:
            return hidden_states
        if self.config.sequence_parallel:
            # Every rank gets the whole gradient from the head, of which it keeps its own part.
            hidden_states = gather_from_sequence_parallel_region(
                hidden_states, tensor_parallel_output_grad=False, group=self.pg_collection.tp
            )
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        if packed_seq_params.keep_K is None:
            logits, _bias = self.output_layer(hidden_states, weight=weight)
            return logits.transpose(0, 1).contiguous()
        hidden_states = hidden_states.index_select(0, packed_seq_params.keep_K)
        if self.output_layer._forward_hooks:
            # Somebody looks at the logits; the pass computes its own, one tile at a time.
            with torch.no_grad():
                self.output_layer(hidden_states, weight=weight)
        return hidden_states.transpose(0, 1)

    def logits_of(self, hidden_nKH: torch.Tensor) -> LazyLogits:
        """Return the logits of the last stage's output, of this tensor rank's part of the vocabulary."""
        layer = self.output_layer
        for hook in layer._forward_pre_hooks.values():
            # The gradient buffers wait here for weights that are still on their way.
            hook(layer, ())
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else layer.weight
        hidden_nKH = hidden_nKH.to(weight.dtype)
        narrow, wide = None, None
        adapters = layer._modules.get(ADAPTER_PART)
        if isinstance(adapters, LinearAdapters) and adapters.is_on:
            narrow, wide = adapters.factors(hidden_nKH)
        group = self.pg_collection.tp
        if group.size() > 1:
            hidden_nKH = copy_to_tensor_model_parallel_region(hidden_nKH, group=group)
        return LazyLogits(hidden_MD=hidden_nKH, weight_VD=weight, narrow_Mr=narrow, wide_Vr=wide)


RANK_ORDER = "tp-cp-ep-dp-pp"
"""Innermost axis first, as in `ParallelLayout`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MegatronModel:
    """This rank's part of the policy."""

    shape: Architecture
    config: DecoderConfig
    module: PolicyGPT
    """The layers of this pipeline stage, without wrappers."""
    ddp: DistributedDataParallel
    """`module` with gradient buffers, in half precision also with casts at both ends of the pipeline."""
    adapters: tuple[Weight, ...] = ()
    """A and B of every adapter of the whole model, in the order in which they are sent and stored."""


def initialize_parallel(policy: PolicyConfig, *, timeout_s: float, seed: int) -> None:
    """(collective) Make megatron-core's groups and seed its random states."""
    sizes = policy.parallel_sizes
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=sizes.tensor,
        pipeline_model_parallel_size=sizes.pipeline,
        context_parallel_size=sizes.context,
        expert_model_parallel_size=sizes.expert,
        expert_tensor_parallel_size=sizes.expert_tensor,
        distributed_timeout_minutes=timeout_s / 60,
        order=RANK_ORDER,
        create_gloo_process_groups=False,
    )
    model_parallel_cuda_manual_seed(seed)


def destroy_parallel() -> None:
    """End this rank's groups of megatron-core, which itself only forgets them: each has threads. Idempotent."""
    if dist.is_initialized():
        for group in parallel_state._global_process_group_list or ():
            # None stands for the default group, which its owner ends.
            if group is not None:
                dist.destroy_process_group(group)
    parallel_state.destroy_model_parallel()


def forget_last_pass(model: MegatronModel) -> None:
    """Let the model be freed. It runs no more after this.

    Layers with experts keep tensors of their last pass, whose graph holds the gradient hooks, which hold the model: a
    ring that Python does not see.
    """
    for part in model.module.modules():
        if isinstance(part, MoELayer):
            part.token_dispatcher = None


def build_model(hf_config: PretrainedConfig, policy: PolicyConfig, *, device: torch.device) -> MegatronModel:
    """(collective) Return this rank's part, on its device, with random weights.

    Raises:
        ConfigError: megatron-core refuses the settings, or the positions are of an unknown kind.
    """
    shape, section = Architecture.of(hf_config), policy.megatron_cfg
    try:
        config, module = _build_module(hf_config, shape, policy, device)
    except (AssertionError, ImportError, ValueError) as error:
        raise ConfigError(f"policy.megatron_cfg: megatron-core refuses these settings: {error}") from error
    adapters = _add_adapters(hf_config, shape, policy, config, module) if policy.lora.enabled else ()
    if section.freeze_moe_router:
        _freeze_routers(module)
    _mark_experts(module)
    average_over_microbatches(module)
    count_tokens_without_padding(module)
    ddp_section = section.distributed_data_parallel_config
    options = DistributedDataParallelConfig(
        grad_reduce_in_fp32=ddp_section.grad_reduce_in_fp32,
        overlap_grad_reduce=ddp_section.overlap_grad_reduce,
        overlap_param_gather=ddp_section.overlap_param_gather,
        use_distributed_optimizer=uses_distributed_optimizer(policy),
    )
    wrapped = Float16Module(config, module) if policy.precision != "float32" else module
    ddp = DistributedDataParallel(config, options, wrapped)
    config.no_sync_func = ddp.no_sync
    return MegatronModel(shape=shape, config=config, module=module, ddp=ddp, adapters=adapters)


def _build_module(
    hf_config: PretrainedConfig, shape: Architecture, policy: PolicyConfig, device: torch.device
) -> tuple[DecoderConfig, PolicyGPT]:
    """megatron-core warns of its own defaults and of what the rules of the config allow on purpose."""
    with warnings.catch_warnings(), as_if_cuda():
        warnings.simplefilter("ignore")
        rotary = Rotary(hf_config)
        config = transformer_config(
            shape, policy, is_cuda=device.type == "cuda", attention_scaling=rotary.attention_scaling
        )
        module = PolicyGPT(
            config,
            block_spec(config, shape, has_adapters=policy.lora.enabled),
            vocab_size=shape.vocab_size,
            padding_token=shape.padding_token,
            max_sequence_length=shape.max_positions,
            position_embedding_type="rope",
            share_embeddings_and_output_weights=shape.is_tied,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=True),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=True),
            parallel_output=True,
        )
    module.rotary_pos_emb = rotary
    module.to(device)
    return config, module


def _add_adapters(
    hf_config: PretrainedConfig, shape: Architecture, policy: PolicyConfig, config: DecoderConfig, module: PolicyGPT
) -> tuple[Weight, ...]:
    layers = adapted_layers(model_without_weights(hf_config, policy.model_name), policy.lora)
    check_adapters_fit(shape, layers, policy)
    attach_parallel_adapters(module, layers, policy.lora, shape=shape, config=config)
    return adapter_weights(shape, layers, rank=policy.lora.rank, size=policy.parallel_sizes.tensor)


def _freeze_routers(module: PolicyGPT) -> None:
    for name, weight in module.named_parameters():
        if ".router." in name:
            weight.requires_grad_(False)


def _mark_experts(module: PolicyGPT) -> None:
    """Mark the experts' gradients, which are reduced over the ranks that hold the same experts.

    megatron-core marks them only with expert parallelism. Without it, and with experts less split than the dense
    weights, every tensor rank sees other tokens, whose gradients would never be added up.
    """
    for name, weight in module.named_parameters():
        if ".experts." in name:
            weight.allreduce = False
