"""`build_vllm_worker`: the start of one vLLM engine in the process of its actor."""

from __future__ import annotations

import torch

from nemo_rl.models.generation.interfaces import EngineSpec, GenerationInterface
from nemo_rl.models.generation.vllm.start import check_vllm_spec, prepare_process

__all__ = ["build_vllm_worker"]


def build_vllm_worker(spec: EngineSpec) -> GenerationInterface:
    """Start one replica.

    Raises:
        ConfigError: vLLM cannot serve this model, or not with these settings. ResourceError: its cache does not fit.
    """
    check_vllm_spec(spec)
    torch.set_num_threads(spec.threads)
    prepare_process(spec)
    from nemo_rl.models.generation.vllm.engine import VllmWorker  # noqa: PLC0415 - takes seconds, reads the variables

    return VllmWorker(spec)
