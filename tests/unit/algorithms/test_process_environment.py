"""Variables of a run's processes: the recipe wins over what a run sets by itself, and each says where it is from."""

from __future__ import annotations

from nemo_rl.algorithms.process_environment import environment_lines, run_environment
from nemo_rl.config.load import load_config
from nemo_rl.config.schema import MasterConfig

DEMO = "configs/grpo_sort_cpu.yaml"


def config(*overrides: str) -> MasterConfig:
    return load_config(DEMO, list(overrides))


def test_variables_of_the_recipe_win_and_numbers_are_texts() -> None:
    given = config("cluster.env_vars={HF_HUB_OFFLINE: 0, NCCL_IB_HCA: mlx5}", "cluster.threads_per_worker=3")
    found = run_environment(given)
    assert (found["HF_HUB_OFFLINE"], found["NCCL_IB_HCA"], found["OMP_NUM_THREADS"]) == ("0", "mlx5", "3")
    assert found["TQ_NUM_THREADS"] == "1"


def test_each_variable_is_listed_once_with_what_set_it_last() -> None:
    given = config("cluster.env_vars={HF_HUB_OFFLINE: 0}", "policy.dtensor_cfg.env_vars={A: b}")
    lines = [line for line in environment_lines(given) if "HF_HUB_OFFLINE" in line]
    assert lines == ["  all processes: HF_HUB_OFFLINE=0 (cluster.env_vars)"]
    assert "  policy workers: A=b (policy.dtensor_cfg.env_vars)" in environment_lines(given)


def test_one_process_has_its_own_environment() -> None:
    local = ("cluster.launcher=local", "cluster.cpu_workers_per_node=1", "policy.generation.num_replicas=1")
    assert environment_lines(config(*local, "data_plane.impl=noop")) == ["environment: that of this process"]


def test_memory_of_freed_tensors_is_kept_on_cpus_and_returned_beside_gpus() -> None:
    on_cpus = run_environment(config())
    on_gpus = run_environment(config("cluster.gpus_per_node=2", "cluster.cpu_workers_per_node=null"))
    assert set(on_cpus) - set(on_gpus) == {"MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_"}
    changed = run_environment(config("cluster.env_vars={MALLOC_TRIM_THRESHOLD_: 0}"))
    assert changed["MALLOC_TRIM_THRESHOLD_"] == "0"
