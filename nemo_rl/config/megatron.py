"""Settings of the Megatron worker (`policy.megatron_cfg` section)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from nemo_rl.config.base import EnvVars, Section

__all__ = [
    "MegatronConfig",
    "MegatronDDPConfig",
    "MegatronOptimizerConfig",
    "MegatronSchedulerConfig",
    "RecomputeModule",
]

Fraction = Annotated[float, Field(ge=0, le=1)]

Momentum = Annotated[float, Field(ge=0, lt=1)]

RecomputeModule = Literal["core_attn", "layernorm", "mlp", "moe", "moe_act", "shared_experts"]


class MegatronOptimizerConfig(Section):
    """The optimizer of the Megatron worker; `policy.max_grad_norm` clips its gradients."""

    optimizer: Literal["adam", "sgd"] = "adam"
    """`adam` decays weights apart from the gradient (AdamW)."""
    lr: PositiveFloat = 1e-6
    """Peak learning rate, reached at the end of the warm-up."""
    min_lr: NonNegativeFloat = 0.0
    """Learning rate at the end of the decay and from there on."""
    weight_decay: NonNegativeFloat = 0.01
    """Weight decay, unless `scheduler.weight_decay_incr_style` lets it rise."""
    adam_beta1: Momentum = 0.9
    """Decay of Adam's mean of gradients."""
    adam_beta2: Momentum = 0.999
    """Decay of Adam's mean of squared gradients."""
    adam_eps: PositiveFloat = 1e-8
    """The number that Adam adds to the root of the squared gradients."""
    sgd_momentum: Momentum = 0.9
    """Momentum of `sgd`."""
    decay_norms_and_biases: bool = True
    """True decays all weights, as torch's AdamW does; false leaves norms and biases out, as Megatron does."""
    use_distributed_optimizer: bool | None = None
    """Each data-parallel rank keeps a part of the optimizer state. Null: with `adam`, on GPUs, where Transformer Engine
    or apex is installed; nothing else restores it from a checkpoint."""
    use_precision_aware_optimizer: bool = False
    """The optimizer of Transformer Engine keeps the main weights with its state; needs the distributed optimizer."""
    optimizer_cpu_offload: bool = False
    """Keep `optimizer_offload_fraction` of the optimizer state on the CPU, and step there."""
    optimizer_offload_fraction: Fraction = 0.0
    """Part of the optimizer state that `optimizer_cpu_offload` moves; it must be above 0 then."""

    def is_distributed(self, *, has_fused_adam: bool) -> bool:
        """Return `use_distributed_optimizer`, with null decided.

        Args:
            has_fused_adam: on GPUs with Transformer Engine or apex, whose Adam alone can be restored then.
        """
        chosen = self.use_distributed_optimizer
        return self.optimizer == "adam" and has_fused_adam if chosen is None else chosen


class MegatronSchedulerConfig(Section):
    """Learning rate and weight decay of the Megatron worker, advanced once per GRPO step."""

    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root"] = "constant"
    """Shape after the warm-up, from `optimizer.lr` down to `optimizer.min_lr`."""
    lr_decay_iters: PositiveInt | None = None
    """Step at which `optimizer.min_lr` is reached; null uses `grpo.max_num_steps`."""
    lr_warmup_iters: NonNegativeInt = 0
    """Steps of linear warm-up: the first has `lr_warmup_init`, the one after the last has `optimizer.lr`."""
    lr_warmup_init: NonNegativeFloat = 0.0
    """Learning rate of the first step of a warm-up."""
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = "constant"
    """`constant`: `optimizer.weight_decay`; else a rise over `grpo.max_num_steps`."""
    start_weight_decay: NonNegativeFloat | None = None
    """Weight decay of the first step, where it rises."""
    end_weight_decay: NonNegativeFloat | None = None
    """Weight decay of the last step, where it rises."""

    def decay_iters(self, num_steps: int) -> int:
        """Return the step at which the decay ends in a run of so many steps: later than the warm-up, also in a short
        run."""
        given = None if self.lr_decay_style == "constant" else self.lr_decay_iters
        return given or max(num_steps, self.lr_warmup_iters + 1)


class MegatronDDPConfig(Section):
    """Reduction of gradients over the data-parallel ranks of the Megatron worker."""

    grad_reduce_in_fp32: bool = True
    """Gradients are summed over microbatches and ranks in float32, also when the model computes in bfloat16."""
    overlap_grad_reduce: bool = False
    """Reduce gradients while the backward pass still runs."""
    overlap_param_gather: bool = False
    """Gather weights while the forward pass runs; needs the distributed optimizer and `overlap_grad_reduce`."""


class MegatronConfig(Section):
    """The Megatron worker: megatron-core with tensor, sequence, pipeline, context and expert parallelism."""

    enabled: bool = False
    """Train with it; `policy.dtensor_cfg.enabled` must be false then."""
    tensor_model_parallel_size: PositiveInt = 1
    """Ranks that share every weight matrix and the vocabulary."""
    pipeline_model_parallel_size: PositiveInt = 1
    """Ranks that share the layers, one run of consecutive ones each."""
    context_parallel_size: PositiveInt = 1
    """Ranks that share every sequence."""
    expert_model_parallel_size: PositiveInt = 1
    """Ranks that share the experts of a mixture, some whole ones each."""
    expert_tensor_parallel_size: PositiveInt | None = None
    """Ranks that share every weight matrix of an expert; null uses `tensor_model_parallel_size`."""
    sequence_parallel: bool = False
    """Split activations between the blocks over the tensor-parallel ranks. A mixture of experts with
    `tensor_model_parallel_size` above 1 needs it."""
    num_layers_in_first_pipeline_stage: PositiveInt | None = None
    """Layers of the first stage, which has the embedding too; null: as many as the others."""
    num_layers_in_last_pipeline_stage: PositiveInt | None = None
    """Layers of the last stage, which has the vocabulary too; null: as many as the others."""
    virtual_pipeline_model_parallel_size: PositiveInt | None = None
    """Runs of layers per stage. Only null: interleaved pipelines are refused."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass instead of keeping them."""
    recompute_granularity: Literal["full", "selective"] = "full"
    """`full`: whole layers; `selective`: the parts named in `recompute_modules`."""
    recompute_method: Literal["uniform", "block"] = "uniform"
    """The way of `full`: `uniform` recomputes all layers, in runs of `recompute_num_layers`; `block` recomputes the
    first `recompute_num_layers` of a stage and keeps the others."""
    recompute_num_layers: PositiveInt = 1
    """Length of a run, or number of recomputed layers, with `full`."""
    recompute_modules: Annotated[list[RecomputeModule], Field(min_length=1)] = ["core_attn"]
    """Modules that `selective` recomputes: the attention between projections, norms, the dense feed-forward block, the
    experts with their routing, the activation inside the experts (`moe_act`, needs `moe_grouped_gemm`), shared experts.
    """
    freeze_moe_router: bool = False
    """Leave the weights of the routers as they are."""
    moe_router_dtype: Literal["fp32", "fp64"] | None = "fp32"
    """Precision of the routers and of the weighted sum over experts; null: the model's."""
    moe_router_load_balancing_type: Literal["none", "aux_loss", "seq_aux_loss", "global_aux_loss"] = "none"
    """Loss for an even load of the experts, within a microbatch, a sequence or the global batch."""
    moe_aux_loss_coeff: NonNegativeFloat = 0.0
    """Weight of that loss."""
    moe_router_bias_update_rate: NonNegativeFloat = 0.0
    """Step of the experts' bias towards an even load, in models that have one; 0 keeps it."""
    moe_token_dispatcher_type: Literal["alltoall", "allgather"] = "alltoall"
    """The way of tokens to the ranks of their experts; a pipeline needs `alltoall`."""
    moe_permute_fusion: bool = False
    """Sort tokens by expert in one kernel of Transformer Engine."""
    moe_grouped_gemm: bool | None = None
    """Run the experts of a rank in one kernel of Transformer Engine; null: where it is installed."""
    apply_rope_fusion: bool = False
    """Rotate queries and keys in one kernel of Transformer Engine."""
    env_vars: EnvVars = {}
    """Variables of the policy workers' processes; they win over `cluster.env_vars`."""
    optimizer: MegatronOptimizerConfig = Field(default_factory=MegatronOptimizerConfig)
    scheduler: MegatronSchedulerConfig = Field(default_factory=MegatronSchedulerConfig)
    distributed_data_parallel_config: MegatronDDPConfig = Field(default_factory=MegatronDDPConfig)
