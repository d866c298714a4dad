"""What the rules about processes and machines refuse: rule -> (overrides of the demo, start of the message)."""

from __future__ import annotations

LOCAL = (
    "cluster.launcher=local",
    "cluster.cpu_workers_per_node=1",
    "policy.generation.num_replicas=1",
    "data_plane.impl=noop",
)
GPUS = ("~cluster.cpu_workers_per_node", "cluster.gpus_per_node=2")
APART = "policy.generation.colocated.enabled=false"

REFUSED_BY_CLUSTER: dict[str, list[tuple[tuple[str, ...], str]]] = {
    "rule_cpu_workers_need_no_gpus": [
        (("cluster.gpus_per_node=1", "cluster.cpu_workers_per_node=2"), "cluster.cpu_workers_per_node: 2 would be")
    ],
    "rule_local_launcher_needs_one_process": [
        ((*LOCAL, "cluster.cpu_workers_per_node=2"), "cluster.launcher: 'local' runs one worker"),
        ((*LOCAL, "policy.generation.num_replicas=2"), "policy.generation.num_replicas: one process holds one engine"),
        ((*LOCAL, "cluster.address=auto"), "cluster.address: 'auto' would be ignored"),
    ],
    "rule_colocated_engines_fit_the_workers": [
        (
            ("~cluster.cpu_workers_per_node", "cluster.gpus_per_node=1", "policy.generation.num_replicas=2"),
            "policy.generation.num_replicas: an engine shares a GPU",
        ),
    ],
    "rule_engine_timeout_below_stage_timeout": [
        (("policy.generation.engine_timeout_s=1800",), "policy.generation.engine_timeout_s: expected less than"),
    ],
    "rule_engine_fits_launcher": [
        ((*LOCAL, "policy.generation.backend=vllm"), "policy.generation.backend: 'vllm' needs a process of its own"),
    ],
    "rule_engine_keys_fit_the_engine": [
        (("policy.generation.vllm_cfg.block_size=64",), "policy.generation.vllm_cfg.block_size: 64 would be ignored"),
        (("+policy.generation.vllm_kwargs.x=1",), "policy.generation.vllm_kwargs: would be ignored"),
    ],
    "rule_engine_needs_one_gpu": [
        (
            (*GPUS, "policy.generation.backend=vllm", f"policy.generation.vllm_cfg.{axis}_parallel_size=2"),
            f"policy.generation.vllm_cfg.{axis}_parallel_size: 2 with cluster.gpus_per_node 2: an engine uses one GPU",
        )
        for axis in ("tensor", "pipeline")
    ],
    "rule_several_nodes_need_an_address": [
        (("cluster.num_nodes=2",), "cluster.num_nodes: 2 nodes need"),
        (("cluster.address=auto", "cluster.num_cpus=8"), "cluster.num_cpus: would be ignored"),
    ],
    "rule_delta_refit_needs_processes": [
        (
            (*LOCAL, "policy.generation.refit_delta.enabled=true"),
            "policy.generation.refit_delta.enabled: true, but with cluster.launcher 'local' weights never leave",
        ),
        (
            ("policy.generation.refit_delta.full_every=9",),
            "policy.generation.refit_delta.full_every: 9 would be ignored",
        ),
    ],
    "rule_refit_transport_fits_the_processes": [
        (
            ("policy.generation.refit_transport=broadcast", "cluster.launcher=local"),
            "policy.generation.refit_transport: 'broadcast' moves weights between processes",
        ),
        (("policy.generation.refit_transport=ipc",), "policy.generation.refit_transport: 'ipc' shares GPU memory"),
        (
            (APART, *GPUS, "policy.generation.colocated.gpus_per_node=2", "policy.generation.refit_transport=ipc"),
            "policy.generation.refit_transport: 'ipc' needs engines on the workers' GPUs",
        ),
    ],
    "rule_colocated_keys_need_non_colocated_engines": [
        (("policy.generation.colocated.num_nodes=1",), "policy.generation.colocated.num_nodes: 1 would be ignored"),
    ],
    "rule_non_colocated_engines_need_their_own_gpus": [
        ((*LOCAL, APART), "policy.generation.colocated.enabled: false needs processes"),
        ((APART, "policy.generation.colocated.num_nodes=1"), "policy.generation.colocated.num_nodes: nodes of their"),
        (
            (APART, "policy.generation.colocated.gpus_per_node=1"),
            "policy.generation.colocated.gpus_per_node: expected",
        ),
        ((APART, *GPUS), "policy.generation.colocated.gpus_per_node: expected at least 1"),
        (
            (APART, *GPUS, "policy.generation.colocated.gpus_per_node=3"),
            "policy.generation.num_replicas: expected 3, one for each",
        ),
        (
            (APART, "cluster.address=auto", "cluster.num_nodes=3", "cluster.cpu_workers_per_node=2"),
            "policy.generation.num_replicas: expected a multiple of the 3 nodes",
        ),
    ],
    "rule_env_vars_need_processes": [
        ((*LOCAL, "cluster.env_vars={A_B: 1}"), "cluster.env_vars: would be ignored"),
        ((*LOCAL, "policy.generation.env_vars={A: b}"), "policy.generation.env_vars: would be ignored"),
        ((*LOCAL, "logger.worker_level=DEBUG"), "logger.worker_level: 'DEBUG' would be ignored"),
        ((*LOCAL, "policy.dtensor_cfg.env_vars={A: b}"), "policy.dtensor_cfg.env_vars: would be ignored"),
    ],
}
