"""Runs with engines on GPUs: sleep levels, tensor and pipeline ranks, CUDA-IPC and NCCL refits of every rank.

Each case is a short run of a tiny mixture of experts with receipts, which end it unless every rank holds what was sent
and samples from it. Needs Ray, and vLLM for most cases: `make vllm` installs it. Engine and policy share GPUs by turns
unless a case says apart.
"""

from __future__ import annotations

import importlib.util
import io
import math
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

COUNT = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not COUNT, reason="needs a CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray: pip install -e ."),
]

GENERATION = "policy.generation"
SIZES = f"{GENERATION}.vllm_cfg"


@dataclass(frozen=True, kw_only=True)
class Case:
    """A layout of one run."""

    gpus: int
    """GPUs of the policy, which engines share unless they are apart."""
    settings: dict[str, str] = field(default_factory=dict)
    apart: int = 0
    """GPUs of engines alone."""
    backend: str = "vllm"
    level: int = 2

    @property
    def needed(self) -> int:
        return self.gpus + self.apart


CASES = {
    "vllm, level 2, 1 GPU": Case(gpus=1),
    "vllm, level 1, 1 GPU": Case(gpus=1, level=1),
    "vllm, level 0, 1 GPU": Case(gpus=1, level=0),
    "embedded, level 2, 1 GPU": Case(gpus=1, backend="torch"),
    "embedded, level 1, 1 GPU": Case(gpus=1, backend="torch", level=1),
    "tp2 by IPC, 2 GPUs": Case(gpus=2, settings={f"{SIZES}.tensor_parallel_size": "2"}),
    "tp2 with divided experts by IPC, 2 GPUs": Case(
        gpus=2, settings={f"{SIZES}.tensor_parallel_size": "2", f"{SIZES}.enable_expert_parallel": "true"}
    ),
    "tp2 with deltas, 2 GPUs": Case(
        gpus=2, settings={f"{SIZES}.tensor_parallel_size": "2", f"{GENERATION}.refit_delta.enabled": "true"}
    ),
    "pp2 by IPC, 2 GPUs": Case(
        gpus=2, settings={f"{SIZES}.pipeline_parallel_size": "2", "policy.router_replay.enabled": "false"}
    ),
    "one engine apart by NCCL, 2 GPUs": Case(gpus=1, apart=1, level=0),
    "tp4 twice by IPC, 8 GPUs": Case(
        gpus=8, settings={f"{SIZES}.tensor_parallel_size": "4", f"{GENERATION}.num_replicas": "2"}
    ),
    "tp2 pp2 twice by IPC, 8 GPUs": Case(
        gpus=8,
        settings={
            f"{SIZES}.tensor_parallel_size": "2",
            f"{SIZES}.pipeline_parallel_size": "2",
            f"{GENERATION}.num_replicas": "2",
            "policy.router_replay.enabled": "false",
        },
    ),
    "tp2 twice apart by NCCL, 8 GPUs": Case(
        gpus=4,
        apart=4,
        level=0,
        settings={f"{SIZES}.tensor_parallel_size": "2", f"{GENERATION}.num_replicas": "2"},
    ),
}


def _overrides(case: Case) -> list[str]:
    given = {
        "cluster.gpus_per_node": str(case.gpus),
        "data_plane.impl": "ray",
        f"{GENERATION}.backend": case.backend,
        f"{GENERATION}.num_replicas": "1",
        f"{GENERATION}.precision": "bfloat16",
        f"{GENERATION}.sleep_level": str(case.level),
        f"{GENERATION}.receipt.every": "1",
        "policy.router_replay.enabled": "true",
    }
    if case.backend == "vllm":
        given |= {f"{SIZES}.gpu_memory_utilization": "0.3", f"{SIZES}.enforce_eager": "true"}
    if case.apart:
        given |= {f"{GENERATION}.colocated.enabled": "false", f"{GENERATION}.colocated.gpus_per_node": str(case.apart)}
    pairs = (f"{name}={value}" for name, value in {**given, **case.settings}.items())
    return ["~cluster.cpu_workers_per_node", *pairs]


@pytest.mark.parametrize("name", CASES)
def test_every_rank_proves_its_refits_and_the_policy_trains_while_engines_sleep(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    if case.needed > COUNT:
        pytest.skip(f"needs {case.needed} CUDA devices, this machine has {COUNT}")
    if case.backend == "vllm" and importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed; run `make vllm`")
    # All that a machine without Ray lacks is imported here, where the test is not skipped.
    from rich.console import Console

    from nemo_rl.algorithms.run import run
    from nemo_rl.config.load import load_config
    from tests.helpers.model_families import write_moe
    from tests.helpers.runs import logged_steps, write_recipe

    config = load_config(write_recipe(tmp_path, write_moe(tmp_path / "moe")), _overrides(case))
    run(config, console=Console(file=io.StringIO()))
    steps = logged_steps(config.logger.log_dir)
    assert len(steps) == config.grpo.max_num_steps
    assert all(math.isfinite(step["train/grad_norm"]) and step["refit/receipt_gap"] < 0.4 for step in steps)
    logs = "".join(path.read_text() for path in (config.logger.log_dir / "workers").glob("generation_*.log"))
    assert logs.count("awake -> asleep") >= case.level and ("on GPU-" in logs) == (case.level > 0)
    print(f"\n{name}: mean differences of engine and policy {[step['refit/receipt_gap'] for step in steps]}")
