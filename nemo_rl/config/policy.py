"""Settings of the policy (`policy` section): model, workers and batches. Router replay (`policy.router_replay`) uses
the experts that the rollout chose again in training. What depends on the experts of the model is checked with the
model folder.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from nemo_rl.config.backends import DTensorConfig, LoraConfig, MegatronConfig, OptimizerConfig, SchedulerConfig
from nemo_rl.config.base import Section, Text
from nemo_rl.config.generation import GenerationConfig
from nemo_rl.config.run import TracerSwitches

__all__ = [
    "DynamicBatchingConfig",
    "MicrobatchOrder",
    "PackingAlgorithm",
    "ParallelSizes",
    "PolicyConfig",
    "RouterReplayConfig",
    "SequencePackingConfig",
    "TokenizerConfig",
    "VisionConfig",
    "adapter_warnings",
]


class RouterReplayConfig(Section):
    """Routes of a mixture of experts, recorded once and replayed in log-probability and training passes."""

    enabled: bool = False
    """The model must have routed experts of a kind that both the engine and the policy worker know."""
    source: Literal["rollout", "prev_logprobs"] = "rollout"
    """The recorder of the routes: the engine that samples, or the policy worker in its log-probability pass."""
    bit_packed: bool = False
    """Send ids in as many bits as they need; false: one byte each up to 256 experts, two above."""
    with_digests: bool = False
    """Digests of the rollout's routes travel with them, so that forward passes can be checked against the rollout.
    NRL_R3_TRACE together with NRL_R3_TRACE_VERIFY_FORWARD sets it."""
    max_missing_share: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Largest share of trainable tokens without a route, which then take the model's own; a step above it fails."""
    compare_microbatches: NonNegativeInt = 0
    """Microbatches per rank and step whose log-probabilities are also computed with the model's own routes, for the
    metrics that show what replay changes."""

    @property
    def records_at_rollout(self) -> bool:
        """Return whether the engines record routes."""
        return self.enabled and self.source == "rollout"


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
    copies: int = 1
    """Groups of data x context ranks that hold all weights each, where the DTensor worker shards them."""
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
    def longest_row(self) -> int:
        """Return the most tokens of a padded row."""
        multiple = math.lcm(self.make_sequence_length_divisible_by, self.parallel_sizes.length_multiple)
        return -(-self.max_total_sequence_length // multiple) * multiple

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
            copies=sizes.replicate_size,
            sequence_parallel=sizes.sequence_parallel,
        )


FIXED_ROWS = ("train_micro_batch_size", "logprob_batch_size")
"""Keys that say how many rows a microbatch has."""


LEAST_RATE = 5e-6
"""Five times the default learning rate of full training: below it a recipe has most likely kept that of all weights."""


def adapter_warnings(policy: PolicyConfig) -> list[str]:
    """Return what of a recipe with adapters is allowed and seldom meant, a line each."""
    lora = policy.lora
    if not lora.enabled:
        return []
    lines = []
    key, rate = "policy.optimizer.kwargs.lr", policy.optimizer.kwargs.get("lr")
    if policy.megatron_cfg.enabled:
        key, rate = "policy.megatron_cfg.optimizer.lr", policy.megatron_cfg.optimizer.lr
    if isinstance(rate, float | int) and rate < LEAST_RATE:
        lines.append(
            f"{key}: {rate:g} is a rate for all weights; adapters learn at about ten times of it, and below "
            f"{LEAST_RATE:g} hardly at all"
        )
    engines = policy.generation.precision or policy.precision
    if lora.serve == "merged" and engines != "float32":
        lines.append(
            f"policy.lora.serve: merged weights in {engines} lose a part of each update, most of a small one "
            "(refit/lora_merge_loss); native loses nothing"
        )
    if lora.dropout:
        lines.append(
            f"policy.lora.dropout: {lora.dropout:g} in training alone: the ratios of a first update are noise around 1"
        )
    return lines
