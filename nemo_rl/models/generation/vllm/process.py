"""Variables of an engine's process, which vLLM reads when it is imported and started."""

from __future__ import annotations

import os

from nemo_rl.config.policy import PolicyConfig

__all__ = ["prepare_process"]

IN_PROCESS = "VLLM_ENABLE_V1_MULTIPROCESSING"
VARIABLES = {
    # Cores belong to everybody here: bound threads would wait for each other at barriers.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # It warns of rotary embeddings, which have no weights, at every refit.
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}


def prepare_process(config: PolicyConfig, *, use_gpu: bool) -> None:
    """Sets what `policy.generation.env_vars` has not set; before anything imports vLLM."""
    sizes = config.generation.vllm_cfg
    # One device needs no further process; several have vLLM's own.
    is_alone = sizes.tensor_parallel_size * sizes.pipeline_parallel_size == 1
    wanted = {**VARIABLES, IN_PROCESS: "0" if is_alone else "1"}
    if sizes.enforce_eager is not False and not use_gpu:
        # vLLM compiles a few functions of its sampler all the same, which takes half a minute.
        wanted["TORCHDYNAMO_DISABLE"] = "1"
    for name, value in wanted.items():
        os.environ.setdefault(name, value)
