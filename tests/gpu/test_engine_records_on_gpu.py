"""Tensors of generation engines on a CUDA device: those of the embedded engine on the CPU, and of the worker beside it.

The comparison has the bounds of `nemo-rl probe --compare`, and names the first site that differs.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from nemo_rl.config.run import ClusterConfig
from tests.helpers.model_families import write_dense
from tests.helpers.tiny_model import tiny_policy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("msgpack") is None, reason="needs msgpack: pip install -e ."),
]

GPUS = 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dense(tmp_path_factory.mktemp("model"))


def recorded(folder: Path, layout: str, out: Path, *, gpus: int = GPUS) -> Path:
    """Return the records of three rows that run through the layout."""
    # All that a machine without msgpack lacks is imported where the test is not skipped.
    from nemo_rl_tools.runner.layout_text import LayoutText
    from nemo_rl_tools.runner.prompts import PromptSpec
    from nemo_rl_tools.runner.run import RECORDS, ProbeSpec, run_probe

    sizes = {"gpu_memory_utilization": 0.2, "enforce_eager": True}
    spec = ProbeSpec(
        policy=tiny_policy(folder, generation={"vllm_cfg": sizes}),
        cluster=ClusterConfig(gpus_per_node=gpus),
        seed=42,
        layout=LayoutText.parse(layout),
        prompt=PromptSpec(length=21, num_rows=3),
        dump="*",
        out=out,
    )
    run_probe(spec)
    return out / RECORDS


def check(expected: Path, found: Path) -> None:
    from nemo_rl_tools.compare.folders import compare_folders
    from nemo_rl_tools.verdict import Verdict

    comparison = compare_folders(expected, found)
    assert comparison.verdict is Verdict.PASS, list(comparison.lines())
    assert len(comparison.sites) > 20


def test_the_embedded_engine_has_the_tensors_of_one_on_the_cpu(folder: Path, tmp_path: Path) -> None:
    expected = recorded(folder, "engine=torch", tmp_path / "cpu", gpus=0)
    check(expected, recorded(folder, "engine=torch", tmp_path / "gpu"))


def test_the_embedded_engine_has_the_tensors_of_the_worker(folder: Path, tmp_path: Path) -> None:
    expected = recorded(folder, "worker=dtensor", tmp_path / "worker")
    check(expected, recorded(folder, "engine=torch", tmp_path / "engine"))


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed; run `make vllm`")
def test_an_eager_vllm_has_the_tensors_of_the_worker(folder: Path, tmp_path: Path) -> None:
    expected = recorded(folder, "worker=dtensor precision=bfloat16", tmp_path / "worker")
    check(expected, recorded(folder, "engine=vllm precision=bfloat16", tmp_path / "vllm"))
