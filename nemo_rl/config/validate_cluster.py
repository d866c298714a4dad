"""Rules about processes and machines: launcher, nodes, where engines stand, how weights reach them."""

from __future__ import annotations

from nemo_rl.config.base import Section
from nemo_rl.config.ignored import would_be_ignored
from nemo_rl.config.parts import ENGINE_TRAITS, EngineTraits
from nemo_rl.config.rule import rules_in
from nemo_rl.config.schema import MasterConfig

__all__ = ["RULES"]

_APART = "policy.generation.colocated"


def rule_cpu_workers_only_without_gpus(config: MasterConfig) -> list[str]:
    cluster = config.cluster
    if cluster.cpu_workers_per_node is not None and cluster.gpus_per_node > 0:
        because = f"cluster.gpus_per_node is {cluster.gpus_per_node}"
        return would_be_ignored(
            cluster, "cluster", ["cpu_workers_per_node"], switch="cluster.gpus_per_node", because=because
        )
    return []


def rule_local_launcher_is_one_process(config: MasterConfig) -> list[str]:
    cluster = config.cluster
    if cluster.launcher != "local":
        return []
    lines = []
    if cluster.num_workers > 1:
        lines.append(
            f"cluster.launcher: 'local' runs one worker in this process, got {cluster.num_workers}; "
            "set cluster.cpu_workers_per_node=1 (or gpus_per_node=1) and num_nodes=1, or launcher=ray"
        )
    replicas = config.policy.generation.num_replicas
    if replicas > 1:
        lines.append(f"policy.generation.num_replicas: one process holds one engine, got {replicas}; set it to 1")
    names = ("address", "num_cpus")
    because = "cluster.launcher is 'local'"
    return lines + would_be_ignored(cluster, "cluster", names, switch="cluster.launcher", because=because)


def rule_engine_fits_launcher(config: MasterConfig) -> list[str]:
    backend = config.policy.generation.backend
    traits = ENGINE_TRAITS.get(backend, EngineTraits())
    if config.cluster.launcher == "local" and traits.needs_own_process:
        return [
            f"policy.generation.backend: {backend!r} needs a process of its own, and cluster.launcher 'local' runs "
            "everything in one; set cluster.launcher=ray, or policy.generation.backend=torch"
        ]
    return []


def rule_keys_of_the_other_engine_stay_out(config: MasterConfig) -> list[str]:
    generation, lines = config.policy.generation, list[str]()
    switch = "policy.generation.backend"
    for name, traits in ENGINE_TRAITS.items():
        if name != generation.backend:
            because = f"{switch} is {generation.backend!r}"
            lines += would_be_ignored(generation, "policy.generation", traits.keys, switch=switch, because=because)
    return lines


def rule_an_engine_stands_on_one_gpu(config: MasterConfig) -> list[str]:
    sizes, gpus = config.policy.generation.vllm_cfg, config.cluster.gpus_per_node
    return [
        f"policy.generation.vllm_cfg.{name}: {size} with cluster.gpus_per_node {gpus}: an engine stands on one GPU; "
        "set it to 1, and policy.generation.num_replicas to the number of engines"
        for name, size in (
            ("tensor_parallel_size", sizes.tensor_parallel_size),
            ("pipeline_parallel_size", sizes.pipeline_parallel_size),
        )
        if size > 1 and gpus > 0
    ]


def rule_address_and_nodes_agree(config: MasterConfig) -> list[str]:
    cluster = config.cluster
    lines = []
    if cluster.address is not None and cluster.num_cpus is not None:
        lines.append(
            "cluster.num_cpus: would be ignored, because cluster.address names a running Ray cluster; leave it out"
        )
    if cluster.launcher == "ray" and cluster.num_nodes > 1 and cluster.address is None:
        lines.append(
            f"cluster.num_nodes: {cluster.num_nodes} nodes need a running Ray cluster; set cluster.address=auto"
        )
    return lines


def rule_engines_share_gpus_with_workers(config: MasterConfig) -> list[str]:
    cluster, replicas = config.cluster, config.policy.generation.num_replicas
    is_shared = cluster.launcher == "ray" and cluster.gpus_per_node > 0 and config.policy.generation.colocated.enabled
    if is_shared and replicas > cluster.num_workers:
        return [
            f"policy.generation.num_replicas: an engine shares a GPU with a policy worker; expected at most "
            f"{cluster.num_workers}, got {replicas}; lower it, or set policy.generation.colocated.enabled=false"
        ]
    return []


def rule_refit_transport_fits_the_processes(config: MasterConfig) -> list[str]:
    cluster, transport = config.cluster, config.policy.generation.refit_transport
    key = f"policy.generation.refit_transport: {transport!r}"
    if transport in ("ipc", "broadcast") and cluster.launcher == "local":
        return [f"{key} moves weights between processes, but cluster.launcher is 'local'; set it to payload or auto"]
    if transport == "ipc" and cluster.gpus_per_node == 0:
        return [f"{key} shares GPU memory, but cluster.gpus_per_node is 0; set it to payload, broadcast or auto"]
    if transport == "ipc" and not config.policy.generation.colocated.enabled:
        return [f"{key} needs engines on the workers' GPUs, but {_APART}.enabled is false; set it to broadcast or auto"]
    return []


def rule_deltas_have_a_way_to_go(config: MasterConfig) -> list[str]:
    delta, key = config.policy.generation.refit_delta, "policy.generation.refit_delta"
    if not delta.enabled:
        switch = f"{key}.enabled"
        return would_be_ignored(delta, key, ("full_every",), switch=switch, because=f"{switch} is false")
    if config.cluster.launcher == "local":
        return [
            f"{key}.enabled: true, but with cluster.launcher 'local' weights never leave the process, so that a delta "
            "saves nothing; set it to false, or cluster.launcher=ray"
        ]
    return []


def rule_engines_stand_apart_only_when_asked(config: MasterConfig) -> list[str]:
    colocated = config.policy.generation.colocated
    if not colocated.enabled:
        return []
    switch = f"{_APART}.enabled"
    return would_be_ignored(
        colocated, _APART, ("num_nodes", "gpus_per_node"), switch=switch, because=f"{switch} is true"
    )


def rule_engines_that_stand_apart_have_a_place(config: MasterConfig) -> list[str]:
    cluster, colocated = config.cluster, config.policy.generation.colocated
    if colocated.enabled:
        return []
    if cluster.launcher == "local":
        return [f"{_APART}.enabled: false needs processes, but cluster.launcher is 'local'; set launcher=ray"]
    lines = []
    if colocated.num_nodes and cluster.address is None:
        lines.append(f"{_APART}.num_nodes: nodes of their own need a running Ray cluster; set cluster.address=auto")
    if (colocated.gpus_per_node > 0) != (cluster.gpus_per_node > 0):
        expected = "at least 1" if cluster.gpus_per_node > 0 else "0"
        lines.append(
            f"{_APART}.gpus_per_node: expected {expected} as cluster.gpus_per_node is {cluster.gpus_per_node}, got "
            f"{colocated.gpus_per_node}; engines and policy workers are both on GPUs, or both on CPUs"
        )
    return lines or _engines_per_node(config)


def _engines_per_node(config: MasterConfig) -> list[str]:
    colocated, replicas = config.policy.generation.colocated, config.policy.generation.num_replicas
    nodes, key = colocated.num_nodes or config.cluster.num_nodes, "policy.generation.num_replicas"
    if colocated.gpus_per_node and replicas != nodes * colocated.gpus_per_node:
        return [
            f"{key}: expected {nodes * colocated.gpus_per_node}, one for each of the {colocated.gpus_per_node} GPUs on "
            f"{nodes} nodes, got {replicas}"
        ]
    if replicas % nodes:
        return [f"{key}: expected a multiple of the {nodes} nodes that engines stand on, got {replicas}"]
    return []


def rule_variables_need_processes(config: MasterConfig) -> list[str]:
    if config.cluster.launcher != "local":
        return []
    policy = config.policy
    sections: dict[str, Section] = {
        "cluster": config.cluster,
        "policy.generation": policy.generation,
        policy.parallel_section: policy.megatron_cfg if policy.megatron_cfg.enabled else policy.dtensor_cfg,
    }
    given = {"switch": "cluster.launcher", "because": "cluster.launcher is 'local': export them instead"}
    lines = [line for name, each in sections.items() for line in would_be_ignored(each, name, ("env_vars",), **given)]
    given["because"] = "cluster.launcher is 'local'"
    return lines + would_be_ignored(config.logger, "logger", ("worker_level",), **given)


def rule_engines_are_given_up_before_the_stage(config: MasterConfig) -> list[str]:
    engine_s, stage_s = config.policy.generation.engine_timeout_s, config.cluster.stage_timeout_s
    if engine_s is None or engine_s < stage_s:
        return []
    return [
        f"policy.generation.engine_timeout_s: expected less than cluster.stage_timeout_s={stage_s:g}, so that another "
        f"engine still has time for the rows, got {engine_s:g}"
    ]


RULES = rules_in(globals())
