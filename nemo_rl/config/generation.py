"""Settings of the rollout engines (`policy.generation` section), and the rules over them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import (
    Field,
    JsonValue,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)

from nemo_rl.config.base import EnvVars, Options, Section, Text
from nemo_rl.config.parts import ENGINE_CAPABILITIES, ENGINES, EngineCapabilities
from nemo_rl.config.rule import would_be_ignored

if TYPE_CHECKING:
    from nemo_rl.config.schema import MasterConfig

__all__ = ["ColocatedConfig", "DeviceSharing", "GenerationConfig", "ReceiptConfig", "RefitDeltaConfig", "VllmConfig"]


class VllmConfig(Section):
    """Settings of vLLM (`policy.generation.backend: vllm`); an argument of vLLM without a key here goes to
    `policy.generation.vllm_kwargs`."""

    tensor_parallel_size: PositiveInt = 1
    """Ranks of one engine that share every weight matrix: GPUs of one node, or processes on CPUs."""
    pipeline_parallel_size: PositiveInt = 1
    """Stages of one engine that have a part of the layers each, of `tensor_parallel_size` ranks; they may stand on
    several nodes. Routes of experts, and rows that go on while weights change, need 1."""
    enable_expert_parallel: bool = False
    """Tensor ranks divide the experts among themselves, not the matrices of each expert; on GPUs alone."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of the GPU's memory for weights and cache together; with `policy.generation.sleep_level` 0 the engine also
    keeps it while the policy trains."""
    kv_cache_gib: PositiveFloat = 1.0
    """Cache of keys and values of an engine on CPUs, in GiB; on a GPU `gpu_memory_utilization` decides."""
    max_model_len: PositiveInt | None = None
    """Prompt and response together, in tokens; null uses `policy.max_total_sequence_length`, and less is refused."""
    enforce_eager: bool | None = None
    """True runs layer by layer, false compiles first, which takes a minute on CPUs; null: eager on CPUs alone."""
    block_size: PositiveInt | None = None
    """Tokens of a block of the cache; whole blocks of a prompt are shared. On CPUs a multiple of 32. Null: 32 on CPUs,
    vLLM's choice on GPUs."""
    enable_prefix_caching: bool = True
    """Samples of a group share the blocks of their prompt."""
    max_num_batched_tokens: PositiveInt | None = None
    """Most tokens of one forward pass; longer prompts run in chunks. Null: vLLM's choice."""
    max_num_seqs: PositiveInt | None = None
    """Rows decoded together; null uses `policy.generation.max_batch_size`."""

    @property
    def num_ranks(self) -> int:
        """Return the number of ranks of one engine, each on a GPU of its own where there are GPUs."""
        return self.tensor_parallel_size * self.pipeline_parallel_size


class ReceiptConfig(Section):
    """Every engine proves after a refit that it samples from the weights it was sent; else the run stops."""

    enabled: bool = True
    """Compare fingerprints of all weights, and log-probabilities of fixed rows, before anything is sampled."""
    every: PositiveInt | None = None
    """Refits from one whose rows are scored to the next; an engine that was replaced is scored at once, and
    fingerprints are compared after each refit. null: after each, or as often as 2 % of the time allow."""
    num_tokens: PositiveInt = 18
    """Tokens that each engine decodes, and the policy scores, for one receipt: 6 rows of at least one."""
    tolerance: PositiveFloat | None = None
    """Largest mean difference of log-probabilities between policy and engine, and between engines; null measures it at
    the first refit, with the same weights on both sides."""


DeviceSharing = Literal["alone", "turns", "crowded"]
"""The other users of the memory of a policy worker's GPU. `alone`: none, so that nothing moves to the CPU; `turns`:
engines that sleep while the policy works; `crowded`: its own log-probability pass, or a teacher, besides."""


NO_SLEEP, KEEPS_WEIGHTS, DROPS_WEIGHTS = 0, 1, 2
"""Levels of sleep: nothing is freed; caches are dropped, and weights kept on the CPU; both are dropped."""
Probability = Annotated[float, Field(gt=0, le=1)]
RefitTransport = Literal["payload", "ipc", "broadcast"]
InFlight = Literal["drain", "recompute", "keep", "finish"]


class ColocatedConfig(Section):
    """The placement of engines: on the GPUs of the policy workers, or on others."""

    enabled: bool = True
    """True: on GPUs an engine takes turns with a policy worker on the same one; on CPUs Ray places the engines. False:
    non-colocated engines, on GPUs or nodes of their own."""
    num_nodes: NonNegativeInt = 0
    """Nodes with engines alone, besides `cluster.num_nodes`; 0: on the policy's nodes. Only with `enabled: false`."""
    gpus_per_node: NonNegativeInt = 0
    """GPUs of each node with engines, one for each rank of an engine, besides those of policy workers. Only with
    `enabled: false`."""


class RefitDeltaConfig(Section):
    """Refits that send only what has changed in the engines' precision; the engines hold the same bits either way."""

    enabled: bool = False
    """Policy rank 0, and each vLLM engine, keep a copy of all weights on the CPU in the engines' precision. Wins where
    little changes in a step (bfloat16 engines, small learning rates) and the way to the engines is slow."""
    full_every: Annotated[int, Field(ge=2)] = 50
    """One of so many refits sends all weights; so does each one after an engine was replaced or a refit failed."""

    @property
    def period(self) -> int | None:
        """Return the number of refits from one with all weights to the next; None where every refit sends all."""
        return self.full_every if self.enabled else None


class GenerationConfig(Section):
    """The engines of the rollouts, and how they sample."""

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
    batch_invariant: bool = False
    """The embedded engine decodes each row by itself, so that its bits do not depend on the rows beside it: runs with
    conversations are repeated and replayed to the last bit, and sampling takes several times as long."""
    in_flight: InFlight = "recompute"
    """Rows that are being sampled when new weights come, in an asynchronous run. `drain`: they end first, with the old
    weights; `recompute`: they go on with the new ones, and their caches are computed anew from the tokens so far;
    `keep`: they go on with the old cache, which is approximate; `finish`, with adapters that engines serve
    (`policy.lora.serve: native`): they go on with the adapter that they began with, beside rows with the new one."""
    refit_transport: Literal["auto"] | RefitTransport = "auto"
    """The transport of new weights to the engines: `payload` through memory of policy rank 0 on the CPU, `ipc` through
    GPU memory that engine and policy worker share, `broadcast` from policy rank 0 to all; `auto`: on GPUs `ipc`, or
    `broadcast` to non-colocated engines; else `payload`."""
    refit_buffer_ratio: Probability = 0.3
    """Most of the free memory (of the GPU with `ipc`, else RAM) that the buckets of a refit take."""
    sleep_level: Literal[0, 1, 2] | None = None
    """Memory that engines free while the policy trains. 0: none; 1: caches are dropped, and weights go to the CPU's
    memory; 2: both are dropped, and the next refit brings weights; null: 2 where engines and policy share GPUs by
    turns (1 where a refit does not bring all weights), else 0."""
    refit_delta: RefitDeltaConfig = Field(default_factory=RefitDeltaConfig)
    receipt: ReceiptConfig = Field(default_factory=ReceiptConfig)

    @property
    def ranks_per_engine(self) -> int:
        """Return the number of GPUs of one engine where there are GPUs, and of its processes where there are none."""
        return self.vllm_cfg.num_ranks if self.backend == "vllm" else 1


def rule_sampling_mask_needs_top_p_or_top_k(config: MasterConfig) -> Iterator[str]:
    generation, key = config.policy.generation, "policy.generation.record_support"
    if not generation.record_support:
        return
    if generation.top_p == 1 and generation.top_k is None:
        yield (
            f"{key}: policy.generation.top_p is 1 and policy.generation.top_k is null: every token is kept; set it to "
            "false"
        )
    if generation.backend != "torch":
        yield (
            f"{key}: policy.generation.backend is {generation.backend!r}, and only the embedded engine, torch, records "
            "the sampling masks; set it to false"
        )


_APART = "policy.generation.colocated"


def rule_engine_fits_launcher(config: MasterConfig) -> Iterator[str]:
    backend = config.policy.generation.backend
    capabilities = ENGINE_CAPABILITIES.get(backend, EngineCapabilities())
    if config.cluster.launcher == "local" and capabilities.needs_own_process:
        yield (
            f"policy.generation.backend: {backend!r} needs a process of its own, and cluster.launcher 'local' runs "
            "everything in one; set cluster.launcher=ray, or policy.generation.backend=torch"
        )


def rule_engine_keys_fit_the_engine(config: MasterConfig) -> Iterator[str]:
    generation = config.policy.generation
    switch = "policy.generation.backend"
    for name, capabilities in ENGINE_CAPABILITIES.items():
        if name != generation.backend:
            because = f"{switch} is {generation.backend!r}"
            yield from would_be_ignored(
                generation, "policy.generation", capabilities.keys, switch=switch, because=because
            )


def rule_engines_fit_their_gpus(config: MasterConfig) -> Iterator[str]:
    """Engines of several ranks take whole neighbouring GPUs of one node, or all GPUs of several."""
    generation, cluster = config.policy.generation, config.cluster
    if cluster.launcher != "ray" or cluster.gpus_per_node == 0:
        return
    apart = not generation.colocated.enabled
    per_node = generation.colocated.gpus_per_node if apart else cluster.gpus_per_node
    nodes = (generation.colocated.num_nodes if apart else 0) or cluster.num_nodes
    ranks, sizes, prefix = generation.ranks_per_engine, generation.vllm_cfg, "policy.generation.vllm_cfg"
    if apart and not per_node:
        # Another rule has said so.
        return
    if ranks > per_node and (ranks % per_node or per_node % sizes.tensor_parallel_size):
        yield (
            f"{prefix}.tensor_parallel_size: {sizes.tensor_parallel_size} with pipeline_parallel_size "
            f"{sizes.pipeline_parallel_size}: an engine over several nodes takes all {per_node} GPUs of each, and the "
            "tensor ranks of a stage stand on one node; choose sizes that divide so"
        )
        return
    fit = nodes * (per_node // ranks) if ranks <= per_node else nodes * per_node // ranks
    if generation.num_replicas > fit:
        what = "apart" if apart else "with policy workers"
        yield (
            f"policy.generation.num_replicas: {nodes} nodes with {per_node} GPUs {what} hold {fit} engines of {ranks} "
            f"GPUs, got {generation.num_replicas}; lower it" + ("" if apart else f", or set {_APART}.enabled=false")
        )


def rule_expert_parallel_fits_the_ranks(config: MasterConfig) -> Iterator[str]:
    sizes, key = config.policy.generation.vllm_cfg, "policy.generation.vllm_cfg.enable_expert_parallel"
    if not sizes.enable_expert_parallel:
        return
    if config.cluster.gpus_per_node == 0:
        yield f"{key}: true, but vLLM's kernels for CPUs crash on divided experts; set it to false"
    elif sizes.tensor_parallel_size == 1:
        yield f"{key}: true would be ignored, tensor_parallel_size is 1 and its ranks divide the experts"


def rule_refit_transport_fits_the_processes(config: MasterConfig) -> Iterator[str]:
    cluster, transport = config.cluster, config.policy.generation.refit_transport
    key = f"policy.generation.refit_transport: {transport!r}"
    if transport in ("ipc", "broadcast") and cluster.launcher == "local":
        yield f"{key} moves weights between processes, but cluster.launcher is 'local'; set it to payload or auto"
    elif transport == "ipc" and cluster.gpus_per_node == 0:
        yield f"{key} shares GPU memory, but cluster.gpus_per_node is 0; set it to payload, broadcast or auto"
    elif transport == "ipc" and not config.policy.generation.colocated.enabled:
        yield f"{key} needs engines on the workers' GPUs, but {_APART}.enabled is false; set it to broadcast or auto"


def rule_sleep_level_fits_the_run(config: MasterConfig) -> Iterator[str]:
    generation, key = config.policy.generation, "policy.generation.sleep_level"
    level = generation.sleep_level
    if not level:
        return
    if config.grpo.samples_ahead:
        yield f"{key}: {level}, but engines sample while the policy trains (grpo.async.enabled); set it to 0"
    elif not generation.colocated.enabled:
        yield f"{key}: {level}, but engines that are not colocated leave the policy no memory by it; set it to 0"
    elif level == DROPS_WEIGHTS and config.policy.lora.is_native:
        yield (
            f"{key}: {level} drops the frozen weights, which a refit with policy.lora.serve 'native' does not bring "
            "again; set it to 1"
        )
    elif level == DROPS_WEIGHTS and generation.refit_delta.enabled and generation.backend == "torch":
        yield (
            f"{key}: {level} drops the weights that a delta changes (policy.generation.refit_delta.enabled); set it "
            "to 1"
        )


def rule_delta_refit_needs_processes(config: MasterConfig) -> Iterator[str]:
    delta, key = config.policy.generation.refit_delta, "policy.generation.refit_delta"
    if not delta.enabled:
        switch = f"{key}.enabled"
        yield from would_be_ignored(delta, key, ("full_every",), switch=switch)
    elif config.cluster.launcher == "local":
        yield (
            f"{key}.enabled: true, but with cluster.launcher 'local' weights never leave the process, so that a delta "
            "saves nothing; set it to false, or cluster.launcher=ray"
        )


def rule_colocated_keys_need_non_colocated_engines(config: MasterConfig) -> Iterator[str]:
    colocated = config.policy.generation.colocated
    if not colocated.enabled:
        return
    switch = f"{_APART}.enabled"
    yield from would_be_ignored(
        colocated, _APART, ("num_nodes", "gpus_per_node"), switch=switch, because=f"{switch} is true"
    )


def rule_non_colocated_engines_need_their_own_gpus(config: MasterConfig) -> Iterator[str]:
    cluster, colocated = config.cluster, config.policy.generation.colocated
    if colocated.enabled:
        return
    if cluster.launcher == "local":
        yield f"{_APART}.enabled: false needs processes, but cluster.launcher is 'local'; set launcher=ray"
        return
    lines = []
    if colocated.num_nodes and cluster.address is None:
        lines.append(f"{_APART}.num_nodes: nodes of their own need a running Ray cluster; set cluster.address=auto")
    if (colocated.gpus_per_node > 0) != (cluster.gpus_per_node > 0):
        expected = "at least 1" if cluster.gpus_per_node > 0 else "0"
        lines.append(
            f"{_APART}.gpus_per_node: expected {expected} as cluster.gpus_per_node is {cluster.gpus_per_node}, got "
            f"{colocated.gpus_per_node}; engines and policy workers are both on GPUs, or both on CPUs"
        )
    yield from lines or _engines_per_node(config)


def _engines_per_node(config: MasterConfig) -> list[str]:
    colocated, replicas = config.policy.generation.colocated, config.policy.generation.num_replicas
    nodes, key = colocated.num_nodes or config.cluster.num_nodes, "policy.generation.num_replicas"
    gpus, ranks = nodes * colocated.gpus_per_node, config.policy.generation.ranks_per_engine
    if gpus and replicas * ranks != gpus:
        return [
            f"{key}: expected {gpus // ranks}, with {ranks} of the {colocated.gpus_per_node} GPUs on each of {nodes} "
            f"nodes for each engine, got {replicas}"
        ]
    if not gpus and replicas % nodes:
        return [f"{key}: expected a multiple of the {nodes} nodes that engines stand on, got {replicas}"]
    return []


def rule_engine_timeout_below_stage_timeout(config: MasterConfig) -> Iterator[str]:
    engine_s, stage_s = config.policy.generation.engine_timeout_s, config.cluster.stage_timeout_s
    if engine_s is None or engine_s < stage_s:
        return
    yield (
        f"policy.generation.engine_timeout_s: expected less than cluster.stage_timeout_s={stage_s:g}, so that another "
        f"engine still has time for the rows, got {engine_s:g}"
    )


def rule_training_temperature_above_zero(config: MasterConfig) -> Iterator[str]:
    if config.policy.generation.temperature == 0:
        yield (
            "policy.generation.temperature: 0 is greedy: all samples of a group are equal and nothing is learned; "
            "expected a number > 0 (greedy validation is val_temperature=0)"
        )
