"""vLLM over Ray without a GPU: each rank is an actor in a bundle with a logical GPU, and computes on the CPU.

vLLM lets Ray place ranks on platforms that Ray has a resource for; here a CPU is told to be one of these. All else is
vLLM's own: placement in bundles, the queues between scheduler and ranks, the end of an engine whose rank dies.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import ray

from nemo_rl.models.generation.interfaces import EngineSpec, GenerationInterface
from nemo_rl.models.generation.vllm.start import prepare_process
from nemo_rl.models.generation.vllm.worker import build_vllm_worker

__all__ = ["NOTES", "build_on_logical_gpus", "rank_notes"]

NOTES = "NEMO_RL_TEST_RANK_NOTES"
"""Variable with the folder in which each rank writes a file about its place."""


def build_on_logical_gpus(spec: EngineSpec) -> GenerationInterface:
    """Start one engine whose ranks compute on the CPU, wherever their bundles are."""
    prepare_process(spec)
    from vllm.platforms import current_platform
    from vllm.v1.executor import ray_executor_v2

    class LogicalRank(ray_executor_v2.RayWorkerProc):
        def get_node_and_physical_gpu_ids(self) -> tuple[str, list[int]]:
            context = ray.get_runtime_context()
            gpus = [int(number) for number in context.get_accelerator_ids()["GPU"]]
            note = {
                "rank": self._init_kwargs["rank"],
                "gpu": gpus[0],
                "node": context.get_node_id(),
                "pid": os.getpid(),
                "bundles": list(spec.bundles),
            }
            Path(os.environ[NOTES], f"{os.getpid()}.json").write_text(json.dumps(note))
            return context.get_node_id(), gpus

        def initialize_worker(self, *args: object, assigned_physical_gpu_ids: object = None, **named: object) -> None:
            super().initialize_worker(*args, **named)

    type(current_platform).ray_device_key = "GPU"
    ray_executor_v2.RayWorkerProc = LogicalRank
    return build_vllm_worker(spec)


def rank_notes(folder: Path) -> list[dict[str, object]]:
    """Return the places of the ranks that have started."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
