"""Starts one vLLM engine: the process is prepared before anything imports vLLM."""

from __future__ import annotations

import torch

from nemo_rl.models.generation.interfaces import EngineSpec, GenerationInterface
from nemo_rl.models.generation.vllm.process import prepare_process

__all__ = ["build_vllm_worker"]


def build_vllm_worker(spec: EngineSpec) -> GenerationInterface:
    """One replica.

    Raises:
        ConfigError: vLLM cannot serve this model, or not with these settings. ResourceError: its cache does not fit.
    """
    torch.set_num_threads(spec.threads)
    prepare_process(spec.policy, use_gpu=spec.use_gpu)
    from nemo_rl.models.generation.vllm.worker import VllmWorker  # noqa: PLC0415 - takes seconds, reads the variables

    return VllmWorker(spec.policy, use_gpu=spec.use_gpu, weight_version=spec.weight_version, number=spec.number)
