"""Settings of what trains: adapters (`policy.lora`), the DTensor and the Megatron worker."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)
from pydantic_core import PydanticCustomError

from nemo_rl.config.base import EnvVars, Section, Text

__all__ = [
    "ALL_LINEAR",
    "Choice",
    "DTensorConfig",
    "LoraConfig",
    "MegatronConfig",
    "MegatronDDPConfig",
    "MegatronOptimizerConfig",
    "MegatronSchedulerConfig",
    "OptimizerConfig",
    "Recomputation",
    "RecomputeModule",
    "SchedulerConfig",
    "SchedulerPhase",
]


ALL_LINEAR = "all-linear"


class LoraConfig(Section):
    """Low-rank adapters: the model's weights stay as they are, and two small matrices A and B beside each adapted one
    are trained, y = x W^T + s (x A^T) B^T."""

    enabled: bool = False
    """Train adapters instead of the weights."""
    rank: PositiveInt = 16
    """Rows of A, columns of B."""
    alpha: PositiveFloat = 32.0
    """The scale s is alpha / rank, or alpha / sqrt(rank) with `rslora`."""
    targets: Literal["all-linear"] | Annotated[list[Text], Field(min_length=1)] = "all-linear"
    """`all-linear`: every linear layer but the head and routers; or ends of names of modules such as `q_proj`, of which
    each must match one. `experts.gate_up_proj` and `experts.down_proj` adapt each expert of a mixture."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the adapters' inputs that training drops. The sampler drops none, so that above 0 the ratios of a first
    update are not 1."""
    rslora: bool = False
    """Scale by alpha / sqrt(rank)."""
    init: Literal["kaiming", "gaussian"] = "kaiming"
    """Start of A: uniform as in a linear layer, or normal with deviation 1 / rank. B starts at 0."""
    adapter: Text | None = None
    """Folder with an adapter in peft's format to start from; its rank, alpha and targets must be those given here."""
    reference: Literal["base", "start"] = "base"
    """Reference policy: the model without an adapter, or with the one of `adapter`."""
    serve: Literal["native", "merged"] = "native"
    """`native`: engines hold base and adapters, and a refit sends the adapters alone. `merged`: a refit sends
    W + s B A of every weight; an engine in 16 bit loses a part of each update, which is measured and logged."""

    @property
    def scale(self) -> float:
        """Return the factor s of the product of B and A."""
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)

    @property
    def is_native(self) -> bool:
        """Return whether engines serve adapters beside the base."""
        return self.enabled and self.serve == "native"


def _import_path(text: str) -> str:
    parts = text.replace(":", ".", 1).split(".")
    if len(parts) < 2 or not all(map(str.isidentifier, parts)):
        raise PydanticCustomError("import_path", "module:name, such as my_package.plans:PLAN")
    return text


ImportPath = Annotated[str, AfterValidator(_import_path)]
"""`module:name` or `module.name`."""


def _mode_of(given: object) -> object:
    return {True: "full", False: "none"}[given] if isinstance(given, bool) else given


def _word_of(given: object) -> object:
    """Return the word that YAML takes for a switch."""
    return {True: "on", False: "off"}[given] if isinstance(given, bool) else given


Recomputation = Annotated[Literal["none", "full", "selective"], BeforeValidator(_mode_of)]

Choice = Annotated[Literal["auto", "on", "off"], BeforeValidator(_word_of)]
"""YAML reads `on` and `off` as true and false."""


class DTensorConfig(Section):
    """The DTensor worker: FSDP2 over data x context parallel ranks, or copies of it, with tensor parallelism."""

    enabled: bool = True
    """Train with it; false where `policy.megatron_cfg.enabled` is true."""
    tensor_parallel_size: PositiveInt = 1
    """Ranks that share every weight matrix, and the experts of a mixture."""
    context_parallel_size: PositiveInt = 1
    """Ranks that share every sequence."""
    replicate_size: PositiveInt = 1
    """Copies of the weights' shards (HSDP): data x context ranks are parted into so many groups, each of which shards
    all weights, gradients and optimizer state over its own ranks; gradients are reduced within a group, then over the
    copies. The size of a node's ranks per group keeps the gathers of weights off the network."""
    sequence_parallel: bool = False
    """Split activations between the blocks over the tensor-parallel ranks; needs `tensor_parallel_size` above 1."""
    custom_parallel_plan: dict[str, str] | ImportPath | None = None
    """Module pattern (`model.layers.*.mlp.up_proj`) -> style (`colwise`, `rowwise`, ...), or where such a dictionary is
    imported from (`my_package.plans:PLAN`, `my_package.plans.PLAN`); null takes the model's."""
    cpu_offload: bool = False
    """Keep weights, gradients and optimizer state on the CPU and move each layer to the GPU when it runs."""
    activation_checkpointing: Recomputation = "none"
    """Activations that the backward pass computes again: `full` each layer from its input; `selective` each layer but
    its matrix products and attention; `none` nothing. true and false mean `full` and `none`."""
    compile: Choice = "auto"
    """Run each decoder layer through `torch.compile`: fewer and larger kernels, after a first step that takes a minute
    longer; numbers differ in the last bits. `auto` does so on CUDA where tensor and context parallelism, router
    replay and `policy.deterministic` are off and a small model of the same class compiles when the worker starts, and
    never on a CPU."""
    gradient_accumulation: Literal["sharded", "whole", "auto"] = "sharded"
    """Sum of gradients over microbatches: `sharded` reduces them after each one, so that a rank holds its part alone;
    `whole` reduces them once, after the last, and holds 4 bytes per trained parameter meanwhile, for slow networks;
    `auto` is whole on GPUs that have room for it by the sum of `nemo-rl plan`."""
    env_vars: EnvVars = {}
    """Variables of the policy workers' processes; they win over `cluster.env_vars`."""


class OptimizerConfig(Section):
    """An optimizer of the DTensor worker by import path; null where `policy.megatron_cfg.enabled` is true."""

    name: str = "torch.optim.AdamW"
    """`module.Class` of a torch optimizer."""
    kwargs: dict[str, float | bool | int | list[float]] = {"lr": 1e-6, "weight_decay": 0.01}
    """Arguments of the optimizer; `lr` is the peak that the scheduler's factor multiplies."""


class SchedulerPhase(Section):
    """One torch scheduler of a chain."""

    name: str
    """`module.Class` of a torch scheduler, such as `torch.optim.lr_scheduler.LinearLR`."""
    kwargs: dict[str, float | bool | int | str | list[float]] = {}
    """Arguments of the scheduler besides the optimizer."""


class SchedulerConfig(Section):
    """Learning rate of the DTensor worker as a factor of the optimizer's `lr`, advanced once per GRPO step.

    Null where `policy.megatron_cfg.enabled` is true. A list of `{name, kwargs}`, one of them `{milestones}`, is taken
    for `phases` and `milestones`.
    """

    name: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after the warm-up: flat, a straight line or half a cosine down to `min_factor`."""
    warmup_steps: NonNegativeInt = 0
    """Steps of linear warm-up from zero."""
    decay_steps: PositiveInt | None = None
    """Step at which `min_factor` is reached; null uses `grpo.max_num_steps`."""
    min_factor: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Factor at the end of the decay and from there on."""
    phases: list[SchedulerPhase] = []
    """Torch schedulers by import path, one by one, in place of the shape above; `scheduler: [...]` means this."""
    milestones: list[PositiveInt] = []
    """Steps at which the second, third, ... phase begins."""

    @model_validator(mode="before")
    @classmethod
    def _from_list(cls, given: object) -> object:
        """Accept the forms that torch users write: a list of schedulers with an element of milestones, or one
        scheduler."""
        if isinstance(given, dict) and "." in str(given.get("name", "")):
            phase = {key: value for key, value in given.items() if key in SchedulerPhase.model_fields}
            return {**{key: value for key, value in given.items() if key not in phase}, "phases": [phase]}
        if not isinstance(given, list):
            return given
        chain: dict[str, object] = {"phases": [part for part in given if not _is_milestones(part)]}
        for part in given:
            chain |= part if _is_milestones(part) else {}
        return chain


def _is_milestones(part: object) -> bool:
    return isinstance(part, dict) and set(part) == {"milestones"}


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
