"""Environment variables of a run's processes, and where each comes from."""

from __future__ import annotations

from collections.abc import Mapping

from nemo_rl.config.r3_trace_env import trace_environment
from nemo_rl.config.schema import MasterConfig
from nemo_rl.data_plane.store_kinds import transport_environment
from nemo_rl.distributed.environment import worker_environment

__all__ = ["environment_lines", "run_environment"]


def run_environment(config: MasterConfig) -> dict[str, str]:
    """Variables of every process of a run under Ray. What a worker has besides is in the section of its kind."""
    return {name: value for _, given in _common(config) for name, value in given.items()}


def environment_lines(config: MasterConfig) -> list[str]:
    """One line per variable and kind of process, with what set it last, for people."""
    if config.cluster.launcher == "local":
        return ["environment: that of this process"]
    policy = config.policy
    kinds: dict[str, list[tuple[str, Mapping[str, str]]]] = {
        "all processes": _common(config),
        "policy workers": [(f"{policy.parallel_section}.env_vars", policy.worker_env_vars)],
        "engines": [("policy.generation.env_vars", policy.generation.env_vars)],
    }
    lines = ["environment, besides what Ray was started with; a later line wins over an earlier one"]
    for kind, sources in kinds.items():
        values = {name: (value, source) for source, given in sources for name, value in given.items()}
        lines += [f"  {kind}: {name}={value} ({source})" for name, (value, source) in sorted(values.items())]
    return lines


def _common(config: MasterConfig) -> list[tuple[str, Mapping[str, str]]]:
    """Variables by what sets them; a later one wins."""
    cluster = config.cluster
    usual = worker_environment(cluster.threads_per_worker, uses_gpu=cluster.gpus_per_node > 0)
    return [
        ("cluster.threads_per_worker and defaults", usual),
        ("data_plane", transport_environment(config.active_data_plane)),
        ("route trace", trace_environment()),
        ("cluster.env_vars", config.cluster.env_vars),
    ]
