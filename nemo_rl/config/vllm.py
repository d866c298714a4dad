"""Settings of the vLLM engine (`policy.generation.vllm_cfg` section)."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, PositiveFloat, PositiveInt

from nemo_rl.config.base import Section

__all__ = ["VllmConfig"]


class VllmConfig(Section):
    """Only with `policy.generation.backend: vllm`; what has no key here goes to `policy.generation.vllm_kwargs`."""

    tensor_parallel_size: PositiveInt = 1
    """Processes of one engine that share every weight matrix."""
    pipeline_parallel_size: PositiveInt = 1
    """Processes of one engine that have a part of the layers each; routes of experts need 1."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Of the GPU's memory, weights and cache together, which the engine also keeps while the policy trains."""
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
