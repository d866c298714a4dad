"""Which runs have a fork server and what it imports: nothing that imports Ray, nothing of the user's own; and variables
of processes: the recipe wins over what a run sets by itself, and each says where it is from."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from nemo_rl.algorithms import processes
from nemo_rl.config.load import load_config
from nemo_rl.config.schema import MasterConfig

ROOT = Path(__file__).parents[3]
RECIPES = ("configs/grpo_sort_cpu.yaml", "configs/recipes/grpo_sort_moe_r3_megatron_cpu.yaml")


def modules(recipe: str, *overrides: str) -> tuple[str, ...]:
    return processes.forked_modules(load_config(ROOT / recipe, overrides))


def recipe(*overrides: str) -> MasterConfig:
    return load_config(ROOT / RECIPES[0], list(overrides))


@pytest.mark.parametrize(
    "overrides",
    [
        ("cluster.launcher=local", "cluster.cpu_workers_per_node=1", "policy.generation.num_replicas=1"),
        ("cluster.address=127.0.0.1:6379",),
        ("cluster.gpus_per_node=2",),
    ],
)
def test_other_runs_have_none(overrides: tuple[str, ...]) -> None:
    config = load_config(
        ROOT / RECIPES[0], [*overrides, "data_plane.impl=noop"] if "local" in overrides[0] else overrides
    )
    with processes.worker_forks(config) as forks:
        assert forks is None


def test_the_model_and_the_engines_are_imported(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    found = modules(RECIPES[0], f"policy.model_name={tmp_path}")
    assert "transformers.models.qwen3.modeling_qwen3" in found
    assert any("dtensor" in name for name in found) and any("torch_engine" in name for name in found)
    assert any("megatron" in name for name in modules(RECIPES[1]))
    own = modules(RECIPES[0], "policy.generation.backend=my_package.engine:build")
    assert not any("my_package" in name or "torch_engine" in name for name in own)


@pytest.mark.parametrize("text", ['{"model_type": "../x"}', '{"model_type": 3}', "[]", "{", '{"model_type": "a.b"}'])
def test_a_folder_that_cannot_be_read_is_left_to_the_checks(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    assert not any(name.startswith("transformers") for name in modules(RECIPES[0], f"policy.model_name={tmp_path}"))


@pytest.mark.slow
def test_none_of_them_imports_ray() -> None:
    imports = "\n".join(f"import {name}" for recipe in RECIPES for name in modules(recipe))
    code = f"{imports}\nimport sys\nsys.exit('ray' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


def test_it_can_be_opened_before_torch_is_imported() -> None:
    code = "import sys, nemo_rl.algorithms.processes; sys.exit('torch' in sys.modules or 'ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=300, check=False).returncode == 0


def test_variables_of_the_recipe_win_and_numbers_are_texts() -> None:
    given = recipe("cluster.env_vars={HF_HUB_OFFLINE: 0, NCCL_IB_HCA: mlx5}", "cluster.threads_per_worker=3")
    found = processes.run_environment(given)
    assert "CUBLAS_WORKSPACE_CONFIG" not in found
    assert processes.run_environment(recipe("policy.deterministic=true"))["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert (found["HF_HUB_OFFLINE"], found["NCCL_IB_HCA"], found["OMP_NUM_THREADS"]) == ("0", "mlx5", "3")
    assert found["TQ_NUM_THREADS"] == "1"


def test_each_variable_is_listed_once_with_what_set_it_last() -> None:
    given = recipe("cluster.env_vars={HF_HUB_OFFLINE: 0}", "policy.dtensor_cfg.env_vars={A: b}")
    lines = [line for line in processes.environment_lines(given) if "HF_HUB_OFFLINE" in line]
    assert lines == ["  all processes: HF_HUB_OFFLINE=0 (cluster.env_vars)"]
    assert "  policy workers: A=b (policy.dtensor_cfg.env_vars)" in processes.environment_lines(given)


def test_one_process_has_its_own_environment() -> None:
    local = ("cluster.launcher=local", "cluster.cpu_workers_per_node=1", "policy.generation.num_replicas=1")
    assert processes.environment_lines(recipe(*local, "data_plane.impl=noop")) == ["environment: that of this process"]


def test_memory_of_freed_tensors_is_kept_on_cpus_and_returned_beside_gpus() -> None:
    on_cpus = processes.run_environment(recipe())
    on_gpus = processes.run_environment(recipe("cluster.gpus_per_node=2", "cluster.cpu_workers_per_node=null"))
    assert set(on_cpus) - set(on_gpus) == {"MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_"}
    changed = processes.run_environment(recipe("cluster.env_vars={MALLOC_TRIM_THRESHOLD_: 0}"))
    assert changed["MALLOC_TRIM_THRESHOLD_"] == "0"
