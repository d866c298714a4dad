"""Settings of the policy: model, workers, batches, optimizer, generation (`policy` section)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    Field,
    JsonValue,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)
from pydantic_core import PydanticCustomError

from nemo_rl.config.base import EnvVars, Options, Section, Text
from nemo_rl.config.megatron import MegatronConfig
from nemo_rl.config.parallel import ParallelSizes
from nemo_rl.config.parts import ENGINES
from nemo_rl.config.receipt import ReceiptConfig
from nemo_rl.config.router_replay import RouterReplayConfig
from nemo_rl.config.tracer import TracerSwitches
from nemo_rl.config.vllm import VllmConfig

__all__ = [
    "ColocatedConfig",
    "DTensorConfig",
    "DynamicBatchingConfig",
    "GenerationConfig",
    "MicrobatchOrder",
    "OptimizerConfig",
    "PackingAlgorithm",
    "PolicyConfig",
    "RefitDeltaConfig",
    "SchedulerConfig",
    "SchedulerPhase",
    "SequencePackingConfig",
    "TokenizerConfig",
]

Probability = Annotated[float, Field(gt=0, le=1)]
PackingAlgorithm = Literal[
    "balanced",
    "first_fit_decreasing",
    "modified_first_fit_decreasing",
    "first_fit_shuffle",
    "concatenative",
    "karmarkar_karp",
]
MicrobatchOrder = Literal["packer", "largest_first"]
RefitTransport = Literal["payload", "ipc", "broadcast"]


class TokenizerConfig(Section):
    """Tokenizer and chat template."""

    name: Text | None = None
    """Folder of the tokenizer; null uses `policy.model_name`."""
    chat_template: Text | None = None
    """Jinja template that replaces the tokenizer's own."""


class SequencePackingConfig(Section):
    """Microbatches of whole sequences laid end to end in one row, without padding between them."""

    enabled: bool = False
    """Excludes the other way of batching; with neither, microbatches have a fixed number of rows."""
    train_mb_tokens: PositiveInt = 8192
    """Most tokens in one training microbatch: a hard cap."""
    logprob_mb_tokens: PositiveInt = 8192
    """The same for log-probability passes, which need less memory."""
    algorithm: PackingAlgorithm = "balanced"
    """`balanced` equalizes the cost of ranks in the fewest microbatches; the others are as in the literature,
    assigned in turn."""
    microbatch_order: MicrobatchOrder = "packer"
    """`packer`: as the algorithm leaves them; `largest_first`: most tokens first, so that memory peaks at the start."""


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


def _import_path(text: str) -> str:
    parts = text.replace(":", ".", 1).split(".")
    if len(parts) < 2 or not all(map(str.isidentifier, parts)):
        raise PydanticCustomError("import_path", "module:name, such as my_package.plans:PLAN")
    return text


ImportPath = Annotated[str, AfterValidator(_import_path)]
"""`module:name` or `module.name`."""


class DTensorConfig(Section):
    """The DTensor worker: FSDP2 over data x context parallel ranks, with tensor parallelism."""

    enabled: bool = True
    """Train with it; false where `policy.megatron_cfg.enabled` is true."""
    tensor_parallel_size: PositiveInt = 1
    """Ranks that share every weight matrix, and the experts of a mixture."""
    context_parallel_size: PositiveInt = 1
    """Ranks that share every sequence."""
    sequence_parallel: bool = False
    """Split activations between the blocks over the tensor-parallel ranks; needs `tensor_parallel_size` above 1."""
    custom_parallel_plan: dict[str, str] | ImportPath | None = None
    """Module pattern (`model.layers.*.mlp.up_proj`) -> style (`colwise`, `rowwise`, ...), or where such a dictionary is
    imported from (`my_package.plans:PLAN`, `my_package.plans.PLAN`); null takes the model's."""
    cpu_offload: bool = False
    """Keep weights, gradients and optimizer state on the CPU and move each layer to the GPU when it runs."""
    activation_checkpointing: bool = False
    """Recompute each layer in the backward pass instead of keeping its activations."""
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
        """The forms that torch users write: a list of schedulers with an element of milestones, or one scheduler."""
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


class ColocatedConfig(Section):
    """Whether engines share the GPUs of the policy workers, or where they stand instead."""

    enabled: bool = True
    """On GPUs an engine takes turns with a policy worker on the same one; on CPUs Ray places the engines. False:
    engines stand apart, on GPUs or nodes of their own."""
    num_nodes: NonNegativeInt = 0
    """Nodes with engines alone, besides `cluster.num_nodes`; 0: on the policy's nodes. Only with `enabled: false`."""
    gpus_per_node: NonNegativeInt = 0
    """GPUs of each node with engines, one engine each, besides those of policy workers. Only with `enabled: false`."""


class RefitDeltaConfig(Section):
    """Refits that send only what has changed in the engines' precision; the engines hold the same bits either way."""

    enabled: bool = False
    """Policy rank 0, and each vLLM engine, keep a copy of all weights on the CPU in the engines' precision. Wins where
    little changes in a step (bfloat16 engines, small learning rates) and the way to the engines is slow."""
    full_every: Annotated[int, Field(ge=2)] = 50
    """Of so many refits one sends all weights; so does each one after an engine was replaced or a refit failed."""

    @property
    def period(self) -> int | None:
        """None: every refit sends all weights."""
        return self.full_every if self.enabled else None


class GenerationConfig(Section):
    """Rollouts."""

    backend: Annotated[str, ENGINES] = "torch"
    """`torch`: the embedded engine, a batched KV-cache loop on the HF model; `vllm`: vLLM, which `make vllm` installs;
    or `module:name` of an engine of your own, see docs/extending.md."""
    options: Options = Field(default_factory=dict)
    """Settings of your own engine."""
    vllm_cfg: VllmConfig = Field(default_factory=VllmConfig)
    vllm_kwargs: dict[str, JsonValue] = Field(default_factory=dict)
    """Further arguments of vLLM's engine, by vLLM's own names."""
    precision: Literal["float32", "bfloat16"] | None = None
    """Weights and computation of the engines; null uses `policy.precision`."""
    engine_timeout_s: PositiveFloat | None = None
    """An engine that needs longer for its share of the rows is given up, and another one samples them; None: half of
    `cluster.stage_timeout_s`."""
    num_replicas: PositiveInt = 1
    """Engines that share the prompts of a step."""
    colocated: ColocatedConfig = Field(default_factory=ColocatedConfig)
    env_vars: EnvVars = {}
    """Variables of the engines' processes; they win over `cluster.env_vars`."""
    max_new_tokens: PositiveInt | None = 512
    """Longest response in tokens, the stop token included; null: what the prompt leaves of
    `policy.max_total_sequence_length`."""
    temperature: NonNegativeFloat = 1.0
    """Sampling temperature of training rollouts; 0 is greedy and refused for training."""
    top_p: Probability = 1.0
    """Sample from the smallest set of tokens with this probability; 1 keeps all."""
    top_k: PositiveInt | None = None
    """Sample from the k most likely tokens; null keeps all."""
    record_support: bool = False
    """The embedded engine records the set of tokens that `top_p` and `top_k` kept, and the trainer scores under that
    very set; false: the trainer finds a set of its own from its own logits, which moves with the weights."""
    val_temperature: NonNegativeFloat | None = None
    """Temperature in validation; null uses `temperature`; 0 is greedy."""
    stop_token_ids: list[NonNegativeInt] | None = None
    """Tokens that end a response; null uses the tokenizer's end-of-sequence token and those that the model folder's
    generation_config.json and config.json list."""
    stop_strings: list[Text] = Field(default_factory=list)
    """Strings that end a response at the token that completes them; the string stays in the response."""
    max_batch_size: PositiveInt = 1024
    """Rows decoded together by one engine."""
    refit_transport: Literal["auto"] | RefitTransport = "auto"
    """How new weights reach the engines: `payload` through the run's object store, `ipc` through GPU memory that engine
    and policy worker share, `broadcast` from policy rank 0 to all; `auto`: on GPUs `ipc`, or `broadcast` to engines
    that stand apart; else `payload`."""
    refit_buffer_ratio: Probability = 0.3
    """Most of the free memory (of the GPU with `ipc`, else RAM) that one bucket of weights takes in a refit."""
    refit_delta: RefitDeltaConfig = Field(default_factory=RefitDeltaConfig)
    receipt: ReceiptConfig = Field(default_factory=ReceiptConfig)


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
    sequence_packing: SequencePackingConfig = Field(default_factory=SequencePackingConfig)
    dynamic_batching: DynamicBatchingConfig = Field(default_factory=DynamicBatchingConfig)
    dtensor_cfg: DTensorConfig = Field(default_factory=DTensorConfig)
    megatron_cfg: MegatronConfig = Field(default_factory=MegatronConfig)
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    scheduler: SchedulerConfig = Field(default_factory=SchedulerConfig)
    generation: GenerationConfig = Field(default_factory=GenerationConfig)
    router_replay: RouterReplayConfig = Field(default_factory=RouterReplayConfig)
    tracer: TracerSwitches = Field(default_factory=TracerSwitches)

    @model_validator(mode="before")
    @classmethod
    def _without_torch_optimizer(cls, given: object) -> object:
        """`optimizer: null` and `scheduler: null` are how recipes of the Megatron worker drop what a parent has set."""
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
        """Tokens of a response at most: `generation.max_new_tokens`, with null decided for the shortest prompt."""
        return self.generation.max_new_tokens or max(1, self.max_total_sequence_length - 1)

    @property
    def parallel_section(self) -> str:
        """Dotted path of the section that `parallel_sizes` comes from, for messages."""
        return "policy.megatron_cfg" if self.megatron_cfg.enabled else "policy.dtensor_cfg"

    @property
    def worker_env_vars(self) -> dict[str, str]:
        """Variables of the worker that is enabled."""
        return self.megatron_cfg.env_vars if self.megatron_cfg.enabled else self.dtensor_cfg.env_vars

    @property
    def replica_keys(self) -> tuple[str, ...]:
        """Dotted paths of the sizes whose product is the replica group, for messages."""
        if self.megatron_cfg.enabled:
            axes: tuple[str, ...] = ("tensor_model", "pipeline_model", "context")
        else:
            axes = ("tensor", "context")
        return tuple(f"{self.parallel_section}.{axis}_parallel_size" for axis in axes)

    @property
    def parallel_sizes(self) -> ParallelSizes:
        """Sizes of the axes of the worker that is enabled."""
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
