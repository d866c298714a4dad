"""The start of one vLLM engine: variables of its process, arguments, and checks of both before a run.

Imports no vLLM, which takes ten seconds and reads the variables: `build_vllm_worker` calls this before it does.
`preflight` calls `check_vllm` through `ENGINE_CAPABILITIES`; what only vLLM knows is found when the engines start,
before training. Invariant: an argument of vLLM that has a key of ours is set by that key alone.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path

from nemo_rl.config.policy import PolicyConfig
from nemo_rl.errors import ConfigError
from nemo_rl.models.generation.interfaces import EngineSpec
from nemo_rl.models.generation.vllm.adapters import GUARD_SLOTS, RANKS, served_layers
from nemo_rl.models.hf.loading import CONFIG_FILE, load_model_config, model_without_weights
from nemo_rl.models.vision import VisionFamily, family_of

__all__ = [
    "KEYS",
    "OWN",
    "EngineArguments",
    "check_vllm",
    "check_vllm_spec",
    "engine_arguments",
    "known_arguments",
    "prepare_process",
]

IN_PROCESS = "VLLM_ENABLE_V1_MULTIPROCESSING"
BUNDLES, GPU_SHARE = "VLLM_RAY_BUNDLE_INDICES", "VLLM_RAY_PER_WORKER_GPUS"
RAY_RANKS = "VLLM_USE_RAY_V2_EXECUTOR_BACKEND"
"""vLLM's second executor over Ray takes bundles that policy workers have as well, and needs no compiled graphs."""
VISIBLE = "CUDA_VISIBLE_DEVICES"
VARIABLES = {
    # All processes share the cores: bound threads would wait for each other at barriers.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # It warns of rotary embeddings, which have no weights, at every refit.
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}


def prepare_process(spec: EngineSpec) -> None:
    """Set what `policy.generation.env_vars` has not set; before anything imports vLLM. What a shell has left for
    another vLLM gives way where this engine depends on it."""
    # The scheduler runs in this process, so that between two of its steps nothing is under way in the ranks.
    needed = {IN_PROCESS: "0"}
    wanted = {**VARIABLES}
    if spec.bundles:
        needed |= {BUNDLES: ",".join(map(str, spec.bundles)), GPU_SHARE: str(spec.gpu_share), RAY_RANKS: "1"}
        if os.environ.get(VISIBLE) == "":
            # Ray hides all GPUs from an actor without one, and vLLM looks at them before its ranks are there.
            del os.environ[VISIBLE]
    if spec.policy.generation.vllm_cfg.enforce_eager is not False and not spec.use_gpu:
        # vLLM compiles a few functions of its sampler all the same, which takes half a minute.
        wanted["TORCHDYNAMO_DISABLE"] = "1"
    given = spec.policy.generation.env_vars
    os.environ.update({name: value for name, value in needed.items() if name not in given})
    for name, value in wanted.items():
        os.environ.setdefault(name, value)


EngineArguments = dict[str, object]

EXTENSION = "nemo_rl.models.generation.vllm.extension.RefitExtension"
VISION_EXTENSION = "nemo_rl.models.generation.vllm.vision_extension.VisionRefitExtension"
KEYS: Mapping[str, str] = {
    **{
        name: f"policy.generation.vllm_cfg.{name}"
        for name in (
            *("tensor_parallel_size", "pipeline_parallel_size", "gpu_memory_utilization", "max_model_len"),
            *("enforce_eager", "block_size", "enable_prefix_caching", "max_num_batched_tokens", "max_num_seqs"),
            "enable_expert_parallel",
        )
    },
    "kv_cache_memory_bytes": "policy.generation.vllm_cfg.kv_cache_gib",
    "model": "policy.model_name",
    "tokenizer": "policy.tokenizer.name",
    "dtype": "policy.generation.precision",
    "enable_return_routed_experts": "policy.router_replay.enabled",
    "enable_lora": "policy.lora.enabled",
    "max_lora_rank": "policy.lora.rank",
    "lora_target_modules": "policy.lora.targets",
    "enable_sleep_mode": "policy.generation.sleep_level",
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
    "distributed_executor_backend": "ranks stand in the bundles of their engine on GPUs, and are children on CPUs",
    "max_loras": "a slot is kept for each version of an adapter that rows may have, and one stays empty",
    "max_cpu_loras": "adapters are kept where they serve",
    **dict.fromkeys(
        ("data_parallel_size", "data_parallel_size_local", "data_parallel_rank", "data_parallel_backend"),
        "data-parallel ranks of vLLM take every step together, also those without rows, and engines here are asked one "
        "by one: policy.generation.num_replicas says how many there are",
    ),
}
"""Arguments that are decided here, and why."""
CPU_BLOCK = 32
"""The smallest that vLLM's kernels for CPUs take: prompts share whole blocks alone."""
GIB = 2**30


def engine_arguments(spec: EngineSpec) -> EngineArguments:
    """Return the arguments of `vllm.LLM`."""
    config, use_gpu = spec.policy, spec.use_gpu
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
        "enable_expert_parallel": given.enable_expert_parallel or None,
        "enable_prefix_caching": given.enable_prefix_caching,
        "block_size": given.block_size,
        "enforce_eager": bool(given.enforce_eager),
        "enable_return_routed_experts": config.router_replay.enabled,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "load_format": "auto" if spec.weight_version >= 0 else "dummy",
        "worker_extension_cls": EXTENSION,
        # Seeds the process's generators only: every row has a seed of its own.
        "seed": 0,
    }
    if use_gpu:
        found["gpu_memory_utilization"] = given.gpu_memory_utilization
        # Memory that can be freed comes from its own allocator.
        found["enable_sleep_mode"] = spec.sleep_level > 0
    else:
        found["kv_cache_memory_bytes"] = int(given.kv_cache_gib * GIB)
        found["block_size"] = given.block_size or CPU_BLOCK
        found["enforce_eager"] = given.enforce_eager is not False
    if spec.bundles:
        found["distributed_executor_backend"] = "ray"
    found |= _adapter_arguments(config, spec.adapter_slots, use_gpu=use_gpu)
    family = _vision_of(config)
    if family is not None:
        # Images come as tensors: nothing is made of pictures, neither examples to profile memory with.
        found |= {"skip_mm_profiling": True, "mm_processor_cache_gb": 0, "model_impl": VISION_MODELS[family.kind][0]}
        found["worker_extension_cls"] = VISION_EXTENSION
    found |= generation.vllm_kwargs
    if spec.continuous:
        # Rows of groups, and as many of validation and receipts, which must not wait for them.
        found["max_num_seqs"] = 2 * (given.max_num_seqs or generation.max_batch_size)
        # A step that was scheduled ahead would give a token of old weights after new ones have come.
        found["async_scheduling"] = False
    return {name: value for name, value in found.items() if value is not None}


def _adapter_arguments(config: PolicyConfig, slots: int, *, use_gpu: bool) -> EngineArguments:
    if not config.lora.is_native:
        return {}
    most = slots + GUARD_SLOTS
    model = model_without_weights(load_model_config(config.model_name), config.model_name)
    ends = sorted({layer.name.rpartition(".")[2] for layer in served_layers(model, config.lora, use_gpu=use_gpu)})
    return {
        "enable_lora": True,
        "max_loras": most,
        "max_cpu_loras": most,
        "max_lora_rank": min(rank for rank in RANKS if rank >= config.lora.rank),
        # What vLLM wraps besides is slower, and experts on CPUs it cannot wrap.
        "lora_target_modules": ends,
    }


VISION_MODELS: Mapping[str, tuple[str, str]] = {
    # vLLM's own Qwen2.5-VL imports an image processor that needs torchvision; this one wraps the Hugging Face model.
    "qwen2_5_vl": ("transformers", "transformers:TransformersMultiModalForCausalLM"),
    "smolvlm": ("vllm", "smolvlm:SmolVLMForConditionalGeneration"),
}
"""Model type -> vLLM's `model_impl`, and the class that serves it, in `vllm.model_executor.models`."""
KWARGS = "policy.generation.vllm_kwargs"
LEAST_TEMPERATURE = 0.01
"""vLLM samples at this one where a smaller one is asked for; 0 is greedy."""
NAMES_OFFERED = 3


def check_vllm(config: PolicyConfig) -> list[str]:
    folder = _folder()
    if folder is None:
        return ["policy.generation.backend=vllm needs vLLM: make vllm"]
    return [
        *_argument_problems(config, known_arguments(folder)),
        *_sampling_problems(config),
        *_size_problems(config),
        *_adapter_problems(config),
        *_vision_problems(config),
    ]


def known_arguments(folder: Path) -> frozenset[str]:
    """Return names of the engine's arguments, from the text of the package that is installed."""
    tree = ast.parse((folder / "engine" / "arg_utils.py").read_text(encoding="utf-8"))
    engine = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "EngineArgs")
    fields = (node.target for node in engine.body if isinstance(node, ast.AnnAssign))
    return frozenset(field.id for field in fields if isinstance(field, ast.Name))


def _folder() -> Path | None:
    found = importlib.util.find_spec("vllm")
    return None if found is None or found.origin is None else Path(found.origin).parent


def _argument_problems(config: PolicyConfig, known: frozenset[str]) -> list[str]:
    lines = []
    for name in config.generation.vllm_kwargs:
        if name in KEYS:
            lines.append(f"{KWARGS}.{name}: has a key of its own; set {KEYS[name]} instead")
        elif name in OWN:
            lines.append(f"{KWARGS}.{name}: cannot be set, because {OWN[name]}; leave it out")
        elif name not in known:
            near = [KEYS.get(each, each) for each in difflib.get_close_matches(name, known, n=NAMES_OFFERED)]
            hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else "; see vLLM's EngineArgs"
            lines.append(f"{KWARGS}.{name}: vLLM's engine has no such argument{hint}")
    return lines


def _sampling_problems(config: PolicyConfig) -> list[str]:
    generation = config.generation
    given = {"temperature": generation.temperature, "val_temperature": generation.val_temperature}
    return [
        f"policy.generation.{name}: vLLM samples at {LEAST_TEMPERATURE} or more, got {value}; raise it"
        for name, value in given.items()
        if value is not None and 0 < value < LEAST_TEMPERATURE
    ]


def _size_problems(config: PolicyConfig) -> list[str]:
    sizes, lines = config.generation.vllm_cfg, list[str]()
    prefix = "policy.generation.vllm_cfg"
    if sizes.max_model_len is not None and sizes.max_model_len < config.max_total_sequence_length:
        lines.append(
            f"{prefix}.max_model_len: {sizes.max_model_len} does not hold policy.max_total_sequence_length "
            f"{config.max_total_sequence_length}; leave it out, or raise it"
        )
    rows, tokens = sizes.max_num_seqs or config.generation.max_batch_size, sizes.max_num_batched_tokens
    if tokens is not None and tokens < rows:
        lines.append(
            f"{prefix}.max_num_batched_tokens: {tokens} is less than a token of each of {rows} rows; raise it, or "
            f"lower {prefix}.max_num_seqs"
        )
    if config.router_replay.enabled and sizes.pipeline_parallel_size > 1:
        lines.append(
            f"{prefix}.pipeline_parallel_size: {sizes.pipeline_parallel_size} cannot be combined with "
            "policy.router_replay.enabled: vLLM returns no routes of a pipeline; set it to 1"
        )
    return lines


def _adapter_problems(config: PolicyConfig) -> list[str]:
    lora, sizes, lines = config.lora, config.generation.vllm_cfg, list[str]()
    if not lora.is_native:
        return []
    if lora.rank > max(RANKS):
        lines.append(
            f"policy.lora.rank: vLLM serves ranks up to {max(RANKS)}, got {lora.rank}; lower it, or set "
            "policy.lora.serve=merged"
        )
    if sizes.num_ranks > 1:
        lines.append(
            "policy.lora.serve: native, but vLLM of several processes cuts adapters into parts, which no receipt can "
            "prove; set policy.lora.serve=merged, or policy.generation.vllm_cfg.tensor_parallel_size and "
            "pipeline_parallel_size to 1"
        )
    return lines


def _vision_of(config: PolicyConfig) -> VisionFamily | None:
    """Return what is known of a vision-language model; None also where the folder is not there yet."""
    is_there = (Path(config.model_name) / CONFIG_FILE).is_file()
    return family_of(load_model_config(config.model_name)) if is_there else None


def _vision_problems(config: PolicyConfig) -> list[str]:
    family, sizes, lines = _vision_of(config), config.generation.vllm_cfg, list[str]()
    if family is None:
        return []
    if sizes.pipeline_parallel_size > 1:
        lines.append(
            f"policy.generation.vllm_cfg.pipeline_parallel_size: a {family.kind!r} with its tower is served by one "
            "stage; set it to 1, or raise tensor_parallel_size"
        )
    if config.lora.is_native:
        lines.append(
            f"policy.lora.serve: native, but adapters of a {family.kind!r} have been served by the embedded engine "
            "alone; set policy.lora.serve=merged, or policy.generation.backend=torch"
        )
    return lines


def check_vllm_spec(spec: EngineSpec) -> None:
    """Raises:
    ConfigError: vLLM cannot decode so, whatever the model is.
    """
    sizes, key = spec.policy.generation.vllm_cfg, "policy.generation.backend: vLLM"
    problems = [*_adapter_problems(spec.policy), *_vision_problems(spec.policy)]
    if problems:
        raise ConfigError("; ".join(problems))
    if spec.script:
        raise ConfigError(
            f"{key} has no batches that can be made again, so that it cannot follow a schedule; use torch"
        )
    if not spec.continuous:
        return
    if sizes.pipeline_parallel_size > 1:
        raise ConfigError(
            f"{key} with a pipeline has a batch under way in each stage, so that rows cannot stand still between two "
            "tokens for new weights; set vllm_cfg.pipeline_parallel_size to 1 and raise vllm_cfg.tensor_parallel_size"
        )
    if spec.policy.router_replay.enabled and spec.policy.generation.in_flight == "recompute":
        raise ConfigError(
            "policy.router_replay.enabled: vLLM forgets the routes of running rows when it computes their caches anew; "
            "set policy.generation.in_flight to drain, or policy.generation.backend to torch"
        )
