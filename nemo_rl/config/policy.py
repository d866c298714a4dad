"""Settings of the policy (`policy` section): model, workers and batches, and the rules over them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pydantic import (
    Field,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from nemo_rl.config.base import AUTO, Section, Text
from nemo_rl.config.diagnostics import TracerSwitches
from nemo_rl.config.dtensor import DTensorConfig, OptimizerConfig, SchedulerConfig
from nemo_rl.config.generation import GenerationConfig
from nemo_rl.config.lora import LoraConfig
from nemo_rl.config.megatron import MegatronConfig
from nemo_rl.config.router_replay import RouterReplayConfig
from nemo_rl.config.rule import keys_besides_the_switch, would_be_ignored
from nemo_rl.errors import ConfigError

if TYPE_CHECKING:
    from nemo_rl.config.schema import MasterConfig

__all__ = [
    "DynamicBatchingConfig",
    "MicrobatchOrder",
    "PackingAlgorithm",
    "ParallelSizes",
    "PolicyConfig",
    "SequencePackingConfig",
    "TokenizerConfig",
    "VisionConfig",
    "packing_decided",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelSizes:
    """The number of workers that share one model, along each axis.

    Example:
        >>> sizes = ParallelSizes(tensor=2, pipeline=2, context=2, sequence_parallel=True)
        >>> sizes.replica_size, sizes.length_multiple
        (8, 8)
    """

    tensor: int = 1
    """Ranks that share every weight matrix."""
    pipeline: int = 1
    """Ranks that share the layers, one run of them each."""
    context: int = 1
    """Ranks that share every sequence."""
    expert: int = 1
    """Ranks that share the experts of a mixture, some whole experts each."""
    expert_tensor: int = 1
    """Ranks that share every weight matrix of an expert."""
    sequence_parallel: bool = False
    """Activations between the blocks are split over the tensor axis along the sequence."""

    @property
    def replica_size(self) -> int:
        """Return the number of workers that share one data-parallel shard."""
        return self.tensor * self.pipeline * self.context

    @property
    def length_multiple(self) -> int:
        """Return the number to a multiple of which the tokens of every sequence are rounded up: two chunks per context
        rank, whole tensor splits."""
        chunks = 2 * self.context if self.context > 1 else 1
        return chunks * (self.tensor if self.sequence_parallel else 1)


CUBLAS_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
REPEATABLE_WORKSPACES = (":4096:8", ":16:8")
"""Values of the variable with which products on CUDA repeat; the first is set where none is given."""
PackingAlgorithm = Literal[
    "balanced",
    "first_fit_decreasing",
    "modified_first_fit_decreasing",
    "first_fit_shuffle",
    "concatenative",
    "karmarkar_karp",
]
MicrobatchOrder = Literal["packer", "largest_first"]


class TokenizerConfig(Section):
    """Tokenizer and chat template."""

    name: Text | None = None
    """Folder of the tokenizer; null uses `policy.model_name`."""
    chat_template: Text | None = None
    """Jinja template that replaces the tokenizer's own."""


class SequencePackingConfig(Section):
    """Microbatches of whole sequences laid end to end in one row, without padding between them."""

    enabled: bool | Literal["auto"] = "auto"
    """Excludes the other way of batching; with neither, microbatches have a fixed number of rows. `auto` packs unless
    `dynamic_batching` is on, `train_micro_batch_size` or `logprob_batch_size` is changed, or a small model of the same
    class has other numbers with packed rows; a cap that is too small for the longest sequence is raised to it."""
    train_mb_tokens: PositiveInt = 8192
    """Most tokens in one training microbatch: a hard cap."""
    logprob_mb_tokens: PositiveInt = 8192
    """The same for log-probability passes, which need less memory."""
    algorithm: PackingAlgorithm = "balanced"
    """`balanced` equalizes the cost of ranks in the fewest microbatches; the others are as in the literature,
    assigned in turn."""
    microbatch_order: MicrobatchOrder = "packer"
    """`packer`: as the algorithm leaves them; `largest_first`: most tokens first, so that memory peaks at the start."""

    @property
    def is_on(self) -> bool:
        """Return whether rows are packed; `auto` packs nothing before `packing_decided` has settled it."""
        return self.enabled is True


class DynamicBatchingConfig(Section):
    """Microbatches of padded rows, as many as fit under a token cap."""

    enabled: bool = False
    """Excludes the other way of batching; with neither, microbatches have a fixed number of rows."""
    train_mb_tokens: PositiveInt = 8192
    """Most tokens in one training microbatch, padding included: a hard cap."""
    logprob_mb_tokens: PositiveInt = 8192
    """The same for log-probability passes, which need less memory."""
    microbatch_order: MicrobatchOrder = "packer"
    """`packer`: most expensive first on every rank; `largest_first`: most tokens first, so that memory peaks at the
    start."""

    @property
    def is_on(self) -> bool:
        """Return `enabled`, under the name that it has for packing too."""
        return self.enabled


class ProfileConfig(Section):
    """Steps in which the policy workers are profiled, from the rollout to the end of the update."""

    steps: list[PositiveInt] = Field(default_factory=list)
    """Steps that are profiled; empty profiles none, and costs nothing."""
    kind: Literal["torch", "nsys"] = "torch"
    """`torch`: a trace of each rank in `profile/step_N` of the log folder, of the CPU's calls and a GPU's kernels, for
    chrome://tracing or Perfetto. `nsys`: the range that `nsys profile --capture-range=cudaProfilerApi` records."""


class VisionConfig(Section):
    """Settings of the vision tower of a model; models of text have none."""

    freeze_tower: bool = False
    """Leave the vision tower and its projection to the language model as they are, and train the rest."""


class PolicyConfig(Section):
    """The trained model and how it is trained."""

    model_name: Text
    """Folder of a Hugging Face causal language model (config, safetensors, tokenizer)."""
    tokenizer: TokenizerConfig = Field(default_factory=TokenizerConfig)
    precision: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Computation dtype; parameters and optimizer stay in float32."""
    train_global_batch_size: PositiveInt = 512
    """Samples per optimizer step."""
    train_micro_batch_size: PositiveInt = 4
    """Rows per microbatch when neither packing nor dynamic batching is on."""
    logprob_batch_size: PositiveInt | None = None
    """Rows per log-probability microbatch; null uses `train_micro_batch_size`."""
    max_total_sequence_length: PositiveInt = 1024
    """Prompt and response together, in tokens."""
    make_sequence_length_divisible_by: PositiveInt = 1
    """Padded width is rounded up to a multiple of this."""
    max_grad_norm: PositiveFloat | None = 1.0
    """Gradients are scaled down to this global norm; null never scales them."""
    deterministic: bool = False
    """Passes of the policy give the same bits in every run on GPUs of one kind, at some cost in speed: torch takes
    deterministic algorithms, and raises where it has none. On CPUs they do so anyway."""
    sequence_packing: SequencePackingConfig = Field(default_factory=SequencePackingConfig)
    dynamic_batching: DynamicBatchingConfig = Field(default_factory=DynamicBatchingConfig)
    dtensor_cfg: DTensorConfig = Field(default_factory=DTensorConfig)
    megatron_cfg: MegatronConfig = Field(default_factory=MegatronConfig)
    lora: LoraConfig = Field(default_factory=LoraConfig)
    vision: VisionConfig = Field(default_factory=VisionConfig)
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    scheduler: SchedulerConfig = Field(default_factory=SchedulerConfig)
    generation: GenerationConfig = Field(default_factory=GenerationConfig)
    router_replay: RouterReplayConfig = Field(default_factory=RouterReplayConfig)
    tracer: TracerSwitches = Field(default_factory=TracerSwitches)
    profile: ProfileConfig = Field(default_factory=ProfileConfig)

    @model_validator(mode="before")
    @classmethod
    def _without_torch_optimizer(cls, given: object) -> object:
        """Drop `optimizer: null` and `scheduler: null`, by which recipes of the Megatron worker drop what a parent has
        set."""
        if not isinstance(given, dict):
            return given
        megatron = given.get("megatron_cfg")
        if not isinstance(megatron, dict) or megatron.get("enabled") is not True:
            return given
        return {
            key: value for key, value in given.items() if value is not None or key not in ("optimizer", "scheduler")
        }

    @property
    def longest_response(self) -> int:
        """Return the most tokens of a response: `generation.max_new_tokens`, with null decided for the
        shortest prompt."""
        return self.generation.max_new_tokens or max(1, self.max_total_sequence_length - 1)

    @property
    def logprob_growth(self) -> float:
        """Return how many times as large as a training microbatch one of log-probabilities is."""
        for section in (self.sequence_packing, self.dynamic_batching):
            if section.is_on:
                return section.logprob_mb_tokens / section.train_mb_tokens
        return (self.logprob_batch_size or self.train_micro_batch_size) / self.train_micro_batch_size

    @property
    def parallel_section(self) -> str:
        """Return the dotted path of the section that `parallel_sizes` comes from, for messages."""
        return "policy.megatron_cfg" if self.megatron_cfg.enabled else "policy.dtensor_cfg"

    @property
    def worker_env_vars(self) -> dict[str, str]:
        """Return the variables of the worker that is enabled."""
        return self.megatron_cfg.env_vars if self.megatron_cfg.enabled else self.dtensor_cfg.env_vars

    @property
    def replica_keys(self) -> tuple[str, ...]:
        """Return the dotted paths of the sizes whose product is the replica group, for messages."""
        if self.megatron_cfg.enabled:
            axes: tuple[str, ...] = ("tensor_model", "pipeline_model", "context")
        else:
            axes = ("tensor", "context")
        return tuple(f"{self.parallel_section}.{axis}_parallel_size" for axis in axes)

    @property
    def parallel_sizes(self) -> ParallelSizes:
        """Return the sizes of the axes of the worker that is enabled."""
        if self.megatron_cfg.enabled:
            given = self.megatron_cfg
            return ParallelSizes(
                tensor=given.tensor_model_parallel_size,
                pipeline=given.pipeline_model_parallel_size,
                context=given.context_parallel_size,
                expert=given.expert_model_parallel_size,
                expert_tensor=given.expert_tensor_parallel_size or given.tensor_model_parallel_size,
                sequence_parallel=given.sequence_parallel,
            )
        sizes = self.dtensor_cfg
        return ParallelSizes(
            tensor=sizes.tensor_parallel_size,
            context=sizes.context_parallel_size,
            expert_tensor=sizes.tensor_parallel_size,
            sequence_parallel=sizes.sequence_parallel,
        )


# ---- the worker


def rule_exactly_one_worker_is_enabled(config: MasterConfig) -> Iterator[str]:
    policy = config.policy
    if policy.dtensor_cfg.enabled and policy.megatron_cfg.enabled:
        yield (
            "policy.megatron_cfg.enabled: true, and so is policy.dtensor_cfg.enabled unless set otherwise, but one "
            "worker trains; set policy.dtensor_cfg.enabled=false"
        )
    elif not policy.dtensor_cfg.enabled and not policy.megatron_cfg.enabled:
        yield (
            "policy.dtensor_cfg.enabled: false, and so is policy.megatron_cfg.enabled: nothing trains; set "
            "one of them to true"
        )


def rule_worker_keys_fit_the_worker(config: MasterConfig) -> Iterator[str]:
    policy = config.policy
    dtensor, megatron = policy.dtensor_cfg, policy.megatron_cfg
    for prefix, section, other in (
        ("policy.dtensor_cfg", dtensor, megatron),
        ("policy.megatron_cfg", megatron, dtensor),
    ):
        if not section.enabled and other.enabled:
            names, switch = keys_besides_the_switch(section), f"{prefix}.enabled"
            yield from would_be_ignored(section, prefix, names, switch=switch)
    if megatron.enabled and not dtensor.enabled:
        for name in ("optimizer", "scheduler"):
            because = f"the Megatron worker takes policy.megatron_cfg.{name}"
            yield from would_be_ignored(policy, "policy", [name], switch="policy.megatron_cfg.enabled", because=because)


def rule_profile_kind_fits_the_devices(config: MasterConfig) -> Iterator[str]:
    profile = config.policy.profile
    if profile.kind == "nsys" and profile.steps and not config.cluster.gpus_per_node:
        yield (
            "policy.profile.kind: nsys records CUDA, and the workers are on CPUs (cluster.gpus_per_node: 0); set torch"
        )
    elif not profile.steps:
        because = "policy.profile.steps is empty"
        yield from would_be_ignored(profile, "policy.profile", ["kind"], switch="policy.profile.steps", because=because)


def rule_deterministic_products_repeat(config: MasterConfig) -> Iterator[str]:
    policy = config.policy
    found = {**config.cluster.env_vars, **policy.worker_env_vars}.get(CUBLAS_VARIABLE, REPEATABLE_WORKSPACES[0])
    if not policy.deterministic or found in REPEATABLE_WORKSPACES:
        return
    yield (
        f"policy.deterministic: products on CUDA do not repeat with {CUBLAS_VARIABLE} {found!r} of cluster.env_vars or "
        f"{policy.parallel_section}.env_vars; leave it out, or set {' or '.join(REPEATABLE_WORKSPACES)}"
    )


# ---- parallel sizes


def rule_parallel_sizes_divide_the_workers(config: MasterConfig) -> Iterator[str]:
    policy, workers = config.policy, config.cluster.num_workers
    sizes = policy.parallel_sizes
    if workers % sizes.replica_size == 0:
        return
    axes = (
        (sizes.tensor, sizes.pipeline, sizes.context) if policy.megatron_cfg.enabled else (sizes.tensor, sizes.context)
    )
    first, *others = policy.replica_keys
    product = "".join(f" x {key.rsplit('.', 1)[-1]} {size}" for key, size in zip(others, axes[1:], strict=True))
    yield (
        f"{first}: {sizes.tensor}{product} does not divide {workers} workers; change cluster.cpu_workers_per_node or "
        "cluster.gpus_per_node to a multiple"
    )


# ---- batches


def rule_packing_excludes_dynamic_batching(config: MasterConfig) -> Iterator[str]:
    policy = config.policy
    if policy.sequence_packing.is_on and policy.dynamic_batching.enabled:
        yield "policy.dynamic_batching.enabled: packing and dynamic batching exclude each other; turn one of them off"


def rule_batching_keys_need_their_switch(config: MasterConfig) -> Iterator[str]:
    policy = config.policy
    sections: tuple[tuple[str, SequencePackingConfig | DynamicBatchingConfig], ...] = (
        ("policy.sequence_packing", policy.sequence_packing),
        ("policy.dynamic_batching", policy.dynamic_batching),
    )
    for prefix, section in sections:
        why_off = _why_auto_is_off(policy) if section.enabled == AUTO else None
        if why_off is not None or not section.enabled:
            names, switch = keys_besides_the_switch(section), f"{prefix}.enabled"
            because = f"{switch} is false" if why_off is None else f"policy.{why_off}"
            yield from would_be_ignored(section, prefix, names, switch=switch, because=because)
        elif section.is_on:
            longest = _longest_row(policy)
            for name, cap in (
                ("train_mb_tokens", section.train_mb_tokens),
                ("logprob_mb_tokens", section.logprob_mb_tokens),
            ):
                if cap < longest:
                    yield f"{prefix}.{name}: {cap} tokens do not hold one sequence; expected at least {longest}"
    if policy.sequence_packing.is_on or policy.dynamic_batching.enabled:
        switch = f"policy.{'sequence_packing' if policy.sequence_packing.is_on else 'dynamic_batching'}.enabled"
        yield from would_be_ignored(policy, "policy", FIXED_ROWS, switch=switch, because=f"{switch} is true")


FIXED_ROWS = ("train_micro_batch_size", "logprob_batch_size")
"""Keys that say how many rows a microbatch has."""


def packing_decided(config: MasterConfig, *, fits: Callable[[PolicyConfig], bool]) -> MasterConfig:
    """Return the config with true or false in place of `policy.sequence_packing.enabled: auto`.

    Args:
        fits: whether the model keeps its numbers where rows are packed, asked of a policy that packs them.

    Raises:
        ConfigError: rows are not packed, and the global batch does not divide into microbatches.
    """
    policy = config.policy
    if policy.sequence_packing.enabled != AUTO:
        return config
    longest, packing = _longest_row(policy), policy.sequence_packing
    train = max(packing.train_mb_tokens, longest)
    caps = {"train_mb_tokens": train, "logprob_mb_tokens": max(packing.logprob_mb_tokens, train)}
    policy = policy.model_copy(update={"sequence_packing": packing.model_copy(update={"enabled": True, **caps})})
    if _why_auto_is_off(config.policy) is not None or not fits(policy):
        policy = policy.model_copy(update={"sequence_packing": packing.model_copy(update={"enabled": False})})
    config = config.model_copy(update={"policy": policy})
    problems = list(rule_fixed_microbatches_divide(config))
    if problems:
        raise ConfigError(problems)
    return config


def _why_auto_is_off(policy: PolicyConfig) -> str | None:
    """Return what in the recipe keeps `auto` from packing rows, or None."""
    if policy.dynamic_batching.enabled:
        return "dynamic_batching.enabled is true"
    if policy.megatron_cfg.moe_router_load_balancing_type == "seq_aux_loss":
        return "megatron_cfg.moe_router_load_balancing_type is 'seq_aux_loss'"
    fixed = (name for name in FIXED_ROWS if getattr(policy, name) != PolicyConfig.model_fields[name].default)
    return next((f"{name} is set" for name in fixed), None)


def _longest_row(policy: PolicyConfig) -> int:
    multiple = math.lcm(policy.make_sequence_length_divisible_by, policy.parallel_sizes.length_multiple)
    return -(-policy.max_total_sequence_length // multiple) * multiple


def rule_logprob_microbatch_tokens_not_below_train(config: MasterConfig) -> Iterator[str]:
    for name, section in (
        ("sequence_packing", config.policy.sequence_packing),
        ("dynamic_batching", config.policy.dynamic_batching),
    ):
        if section.is_on and section.logprob_mb_tokens < section.train_mb_tokens:
            yield (
                f"policy.{name}.logprob_mb_tokens: expected at least train_mb_tokens {section.train_mb_tokens} (a pass "
                f"without gradients needs less memory), got {section.logprob_mb_tokens}"
            )


def rule_fixed_microbatches_divide(config: MasterConfig) -> Iterator[str]:
    policy = config.policy
    # Where the model may still turn `auto` off, `packing_decided` asks again.
    may_pack = policy.sequence_packing.enabled == AUTO and _why_auto_is_off(policy) is None
    if may_pack or policy.sequence_packing.is_on or policy.dynamic_batching.enabled:
        return
    ranks = max(1, config.cluster.num_workers // policy.parallel_sizes.replica_size)
    unit = ranks * policy.train_micro_batch_size
    if policy.train_global_batch_size % unit:
        yield (
            f"policy.train_global_batch_size: {policy.train_global_batch_size} does not divide into {ranks} "
            f"data-parallel workers x policy.train_micro_batch_size {policy.train_micro_batch_size}; expected a "
            f"multiple of {unit}, or policy.dynamic_batching.enabled=true, which needs no such thing"
        )


def rule_step_divides_into_global_batches(config: MasterConfig) -> Iterator[str]:
    grpo, batch = config.grpo, config.policy.train_global_batch_size
    samples = grpo.num_prompts_per_step * grpo.num_generations_per_prompt
    if samples % batch:
        yield (
            f"policy.train_global_batch_size: expected a divisor of grpo.num_prompts_per_step x "
            f"num_generations_per_prompt = {samples}, got {batch}"
        )


def rule_adapters_leave_the_tower(config: MasterConfig) -> Iterator[str]:
    if not config.policy.vision.freeze_tower or not config.policy.lora.enabled:
        return
    yield (
        "policy.vision.freeze_tower: true would be ignored: policy.lora.enabled is true, and adapters leave the vision "
        "tower as it is; leave the key out"
    )


def rule_megatron_has_no_vision_tower(config: MasterConfig) -> Iterator[str]:
    if config.policy.vision.freeze_tower and config.policy.megatron_cfg.enabled:
        yield (
            "policy.vision.freeze_tower: true, but the Megatron worker trains models of text alone; set "
            "policy.dtensor_cfg.enabled=true and policy.megatron_cfg.enabled=false"
        )
