"""Settings of the rollout engines (`policy.generation` section)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, JsonValue, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from nemo_rl.config.base import EnvVars, Options, Section, Text
from nemo_rl.config.parts import ENGINES

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
        """Return the number of ranks of one engine, each on its own GPU where there are GPUs."""
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

RefitTransport = Literal["payload", "ipc", "broadcast", "shards"]

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
    very set; false: the trainer finds its own set from its own logits, which moves with the weights."""
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
    GPU memory that engine and policy worker share, `broadcast` from policy rank 0 to all, `shards` from every policy
    rank to every rank of the engines, each the parts that it holds and the other one takes; `auto`: on GPUs `ipc`, or
    to non-colocated engines `shards` where the policy or an engine has several ranks, else `broadcast`; on CPUs
    `payload`."""
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
