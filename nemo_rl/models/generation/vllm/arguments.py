"""Arguments of vLLM's engine, from the settings of a policy; imports no vLLM.

Called by `VllmEngine`, and by the checks before a run. Invariant: what has a key of ours is set by that key alone.
"""

from __future__ import annotations

from collections.abc import Mapping

from nemo_rl.config.policy import PolicyConfig

__all__ = ["KEYS", "OWN", "EngineArguments", "engine_arguments"]

EngineArguments = dict[str, object]

EXTENSION = "nemo_rl.models.generation.vllm.extension.RefitExtension"
KEYS: Mapping[str, str] = {
    **{
        name: f"policy.generation.vllm_cfg.{name}"
        for name in (
            *("tensor_parallel_size", "pipeline_parallel_size", "gpu_memory_utilization", "max_model_len"),
            *("enforce_eager", "block_size", "enable_prefix_caching", "max_num_batched_tokens", "max_num_seqs"),
        )
    },
    "kv_cache_memory_bytes": "policy.generation.vllm_cfg.kv_cache_gib",
    "model": "policy.model_name",
    "tokenizer": "policy.tokenizer.name",
    "dtype": "policy.generation.precision",
    "enable_return_routed_experts": "policy.router_replay.enabled",
}
"""Arguments that have keys of ours."""
OWN: Mapping[str, str] = {
    "logprobs_mode": "log-probabilities are those of the distribution sampled from",
    "worker_extension_cls": "new weights come through it",
    "worker_cls": "new weights come through its extension",
    "trust_remote_code": "code in a model folder is never run",
    "skip_tokenizer_init": "stop strings need the tokenizer",
    "generation_config": "a request says how it is sampled",
    "quantization": "new weights come in full precision",
    "runner": "rollouts are generation",
    "distributed_executor_backend": "each engine has a process of its own, on one machine",
    "data_parallel_size": "policy.generation.num_replicas says how many engines there are",
}
"""Arguments that are decided here, and why."""
CPU_BLOCK = 32
"""The smallest that vLLM's kernels for CPUs take: prompts share whole blocks alone."""
GIB = 2**30


def engine_arguments(config: PolicyConfig, *, use_gpu: bool, loads_folder: bool) -> EngineArguments:
    """What `vllm.LLM` is made with.

    Args:
        loads_folder: whether the weights of the folder are used; else a refit brings the first ones.
    """
    generation = config.generation
    given = generation.vllm_cfg
    found: EngineArguments = {
        "model": config.model_name,
        "tokenizer": config.tokenizer.name or config.model_name,
        "dtype": generation.precision or config.precision,
        "max_model_len": given.max_model_len or config.max_total_sequence_length,
        "max_num_seqs": given.max_num_seqs or generation.max_batch_size,
        "max_num_batched_tokens": given.max_num_batched_tokens,
        "tensor_parallel_size": given.tensor_parallel_size,
        "pipeline_parallel_size": given.pipeline_parallel_size,
        "enable_prefix_caching": given.enable_prefix_caching,
        "block_size": given.block_size,
        "enforce_eager": bool(given.enforce_eager),
        "enable_return_routed_experts": config.router_replay.enabled,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "load_format": "auto" if loads_folder else "dummy",
        "worker_extension_cls": EXTENSION,
        # Of the process's generators alone: every row has a seed of its own.
        "seed": 0,
    }
    if use_gpu:
        found["gpu_memory_utilization"] = given.gpu_memory_utilization
    else:
        found["kv_cache_memory_bytes"] = int(given.kv_cache_gib * GIB)
        found["block_size"] = given.block_size or CPU_BLOCK
        found["enforce_eager"] = given.enforce_eager is not False
    found |= generation.vllm_kwargs
    return {name: value for name, value in found.items() if value is not None}
