"""Settings of processes and machines (`cluster` section)."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from nemo_rl.config.base import START_TIMEOUT_S, EnvVars, Section, Text

__all__ = ["ClusterConfig"]


class ClusterConfig(Section):
    """Processes and machines."""

    launcher: Literal["ray", "local"] = "ray"
    """`ray`: workers are actors; `local`: everything in this process (one worker)."""
    address: Text | None = None
    """Address of a running Ray cluster (`auto` finds it); null starts one on this machine."""
    num_nodes: PositiveInt = 1
    """Machines with policy workers."""
    gpus_per_node: NonNegativeInt = 0
    """Policy workers per node, one GPU each; 0 means CPU workers."""
    cpu_workers_per_node: PositiveInt | None = None
    """Policy workers per node on CPU; only with `gpus_per_node: 0` (default there: 1)."""
    num_cpus: PositiveInt | None = None
    """Logical CPUs that Ray may hand out on this machine; null: as many as the actors need, at least the cores."""
    threads_per_worker: PositiveInt = 1
    """Torch threads in every process of the run. With 2 a step on CPU is about 1.3 times faster while every thread has
    a core to itself, and up to ten times slower when another process takes one of the cores: threads of one operation
    wait for the slowest."""
    env_vars: EnvVars = {}
    """Variables of all processes of the run, such as `NCCL_SOCKET_IFNAME`, `NCCL_IB_HCA` or `GLOO_SOCKET_IFNAME`; they
    win over what was exported, and over what a run sets by itself. `--print-config` lists them."""
    worker_start_timeout_s: PositiveFloat = START_TIMEOUT_S
    """Deadline of each start at the beginning of a run (Ray, workers, stores, servers, ledger), in seconds."""
    collective_timeout_s: PositiveFloat = 120.0
    """Deadline of one collective between workers, in seconds."""
    stage_timeout_s: PositiveFloat = 1800.0
    """Deadline of one stage (rollout, logprobs, train, refit, checkpoint), in seconds."""
    grace_s: PositiveFloat = 25.0
    """Seconds in which the step that runs at SIGTERM or SIGUSR1 must end, to be saved before the run ends; Slurm kills
    30 s after SIGTERM. A step that takes longer is interrupted."""

    @property
    def num_workers(self) -> int:
        """Return the number of policy workers over all nodes."""
        return self.num_nodes * (self.gpus_per_node or self.cpu_workers_per_node or 1)
