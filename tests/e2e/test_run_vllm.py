"""Whole runs whose rollouts vLLM makes, as a user starts them: two engines, every store and refit in between real."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.engine_process import NO_VLLM, has_vllm
from tests.helpers.model_families import write_dense, write_family, write_moe
from tests.helpers.runs import ROOT, SMALL, logged_steps

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not has_vllm(), reason=NO_VLLM)]

TWO = {"policy.generation.num_replicas": "2"}
PACKED = {"policy.sequence_packing.train_mb_tokens": "128", "policy.sequence_packing.logprob_mb_tokens": "256"}
INSPECT = [sys.executable, "-m", "nemo_rl.cli.main", "inspect"]


def _heads_of_8(folder: Path) -> Path:
    """A model whose heads are smaller than vLLM's kernels for CPUs take."""
    return write_family(folder, "qwen3_moe")


def _run(recipe: str, folder: Path, changes: dict[str, str], **variables: str) -> list[dict[str, float]]:
    given = SMALL | TWO | changes | {"logger.log_dir": str(folder / "logs")}
    command = [sys.executable, "examples/run_grpo.py", "--config", f"configs/recipes/{recipe}.yaml"]
    ended = subprocess.run(
        [*command, *(f"{name}={value}" for name, value in given.items())],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
        capture_output=True,
        text=True,
        timeout=560,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return logged_steps(folder / "logs")


@pytest.mark.full
def test_two_engines_sample_and_learn(tmp_path: Path) -> None:
    # One update a step: what is trained is what was sampled from.
    on_policy = {
        "policy.train_global_batch_size": "32",
        "policy.generation.refit_transport": "broadcast",
        "policy.generation.refit_delta.enabled": "true",
    }
    model = {"policy.model_name": str(write_dense(tmp_path / "model"))}
    steps = _run("grpo_sort_vllm_cpu", tmp_path, on_policy | model)
    assert len(steps) == 2
    for step in steps:
        assert step["data_plane/live_rows"] == 0
        assert abs(step["train/token_mult_prob_error"] - 1) < 1e-4
    assert len({step["train/grad_norm"] for step in steps}) == 2, "weights must change, or a refit shows nothing"


@pytest.mark.full
def test_an_engine_of_two_ranks_that_sleeps_makes_the_steps_of_one_that_is_awake(tmp_path: Path) -> None:
    one = {"policy.model_name": str(write_dense(tmp_path / "model")), "policy.generation.num_replicas": "1"}
    asleep = {"policy.generation.sleep_level": "2", "policy.generation.vllm_cfg.tensor_parallel_size": "2"}
    saves = {"checkpointing.enabled": "true", "checkpointing.checkpoint_dir": str(tmp_path / "checkpoints")}
    expected = _run("grpo_sort_vllm_cpu", tmp_path / "awake", one)
    found = _run("grpo_sort_vllm_cpu", tmp_path / "asleep", one | asleep | saves)
    for name in ("train/reward", "train/grad_norm", "train/loss"):
        assert [step[name] for step in found] == pytest.approx([step[name] for step in expected], rel=1e-4)
    log = (tmp_path / "asleep" / "logs" / "workers" / "generation_0.log").read_text()
    assert "rank 1: awake -> asleep at level 2" in log and "rank 1: asleep -> weights awake at level 2" in log


@pytest.mark.full
def test_routes_of_vllm_are_replayed(tmp_path: Path) -> None:
    trace, model = tmp_path / "trace", write_moe(tmp_path / "model")
    switches = {"": "1", "_VERIFY_FORWARD": "1", "_DIR": str(trace), "_STEPS": "2"}
    steps = _run(
        "grpo_sort_moe_r3_vllm_megatron_cpu",
        tmp_path,
        PACKED | {"policy.model_name": str(model)},
        **{f"NRL_R3_TRACE{name}": value for name, value in switches.items()},
    )
    checked = subprocess.run(
        [*INSPECT, str(trace), "routes", "--require-forward-verify"], capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
    for step in steps:
        assert step["data_plane/live_rows"] == 0 and step["r3/train_missing_share"] == 0
        assert step["r3/k3_r3"] < 1e-3


CACHE = "policy.generation.vllm_cfg.kv_cache_gib"
OPTION = "policy.generation.vllm_kwargs.max_num_sequences"


@pytest.mark.full
@pytest.mark.parametrize(
    ("write", "change", "said"),
    [
        (write_dense, f"{CACHE}=0.00001", f"{CACHE}: vLLM's cache"),
        (write_dense, f"+{OPTION}=4", f"{OPTION}: vLLM's engine has no such argument; did you mean"),
        (_heads_of_8, f"{CACHE}=0.05", "policy.generation.backend: vLLM cannot start with"),
    ],
    ids=["too little memory", "an unknown option", "an unknown model"],
)
def test_what_vllm_cannot_serve_ends_with_exit_code_2_before_training(
    write: Callable[[Path], Path], change: str, said: str, tmp_path: Path
) -> None:
    ended = subprocess.run(
        [
            *(sys.executable, "examples/run_grpo.py", "--config", "configs/recipes/grpo_sort_vllm_cpu.yaml"),
            *(f"{name}={value}" for name, value in (SMALL | TWO).items()),
            f"policy.model_name={write(tmp_path / 'model')}",
            f"logger.log_dir={tmp_path / 'logs'}",
            change,
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert ended.returncode == 2, ended.stdout + ended.stderr
    assert said in " ".join((ended.stdout + ended.stderr).split())
    assert not (tmp_path / "logs" / "metrics.jsonl").exists() or not logged_steps(tmp_path / "logs")
    assert "Traceback" not in ended.stdout + ended.stderr
