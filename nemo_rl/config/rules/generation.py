"""Rules over `policy.generation`."""

from __future__ import annotations

from collections.abc import Iterator

from nemo_rl.config.generation import DROPS_WEIGHTS
from nemo_rl.config.parts import ENGINE_CAPABILITIES, EngineCapabilities
from nemo_rl.config.rules.rule import would_be_ignored
from nemo_rl.config.schema import MasterConfig

__all__ = []


def rule_sampling_mask_needs_top_p_or_top_k(config: MasterConfig) -> Iterator[str]:
    generation, key = config.policy.generation, "policy.generation.record_support"
    if not generation.record_support:
        return
    if generation.top_p == 1 and generation.top_k is None:
        yield (
            f"{key}: policy.generation.top_p is 1 and policy.generation.top_k is null: every token is kept; set it to "
            "false"
        )
    if generation.backend != "torch":
        yield (
            f"{key}: policy.generation.backend is {generation.backend!r}, and only the embedded engine, torch, records "
            "the sampling masks; set it to false"
        )


_APART = "policy.generation.colocated"


def rule_engine_fits_launcher(config: MasterConfig) -> Iterator[str]:
    backend = config.policy.generation.backend
    capabilities = ENGINE_CAPABILITIES.get(backend, EngineCapabilities())
    if config.cluster.launcher == "local" and capabilities.needs_own_process:
        yield (
            f"policy.generation.backend: {backend!r} needs its own process, and cluster.launcher 'local' runs "
            "everything in one; set cluster.launcher=ray, or policy.generation.backend=torch"
        )


def rule_engine_keys_fit_the_engine(config: MasterConfig) -> Iterator[str]:
    generation = config.policy.generation
    switch = "policy.generation.backend"
    for name, capabilities in ENGINE_CAPABILITIES.items():
        if name != generation.backend:
            because = f"{switch} is {generation.backend!r}"
            yield from would_be_ignored(
                generation, "policy.generation", capabilities.keys, switch=switch, because=because
            )


def rule_engines_fit_their_gpus(config: MasterConfig) -> Iterator[str]:
    """Engines of several ranks take whole neighbouring GPUs of one node, or all GPUs of several."""
    generation, cluster = config.policy.generation, config.cluster
    if cluster.launcher != "ray" or cluster.gpus_per_node == 0:
        return
    apart = not generation.colocated.enabled
    per_node = generation.colocated.gpus_per_node if apart else cluster.gpus_per_node
    nodes = (generation.colocated.num_nodes if apart else 0) or cluster.num_nodes
    ranks, sizes, prefix = generation.ranks_per_engine, generation.vllm_cfg, "policy.generation.vllm_cfg"
    if apart and not per_node:
        # Another rule has said so.
        return
    if ranks > per_node and (ranks % per_node or per_node % sizes.tensor_parallel_size):
        yield (
            f"{prefix}.tensor_parallel_size: {sizes.tensor_parallel_size} with pipeline_parallel_size "
            f"{sizes.pipeline_parallel_size}: an engine over several nodes takes all {per_node} GPUs of each, and the "
            "tensor ranks of a stage stand on one node; choose sizes that divide so"
        )
        return
    fit = nodes * (per_node // ranks) if ranks <= per_node else nodes * per_node // ranks
    if generation.num_replicas > fit:
        what = "apart" if apart else "with policy workers"
        yield (
            f"policy.generation.num_replicas: {nodes} nodes with {per_node} GPUs {what} hold {fit} engines of {ranks} "
            f"GPUs, got {generation.num_replicas}; lower it" + ("" if apart else f", or set {_APART}.enabled=false")
        )


def rule_expert_parallel_fits_the_ranks(config: MasterConfig) -> Iterator[str]:
    sizes, key = config.policy.generation.vllm_cfg, "policy.generation.vllm_cfg.enable_expert_parallel"
    if not sizes.enable_expert_parallel:
        return
    if config.cluster.gpus_per_node == 0:
        yield f"{key}: true, but vLLM's kernels for CPUs crash on divided experts; set it to false"
    elif sizes.tensor_parallel_size == 1:
        yield f"{key}: true would be ignored, tensor_parallel_size is 1 and its ranks divide the experts"


def rule_refit_transport_fits_the_processes(config: MasterConfig) -> Iterator[str]:
    cluster, transport = config.cluster, config.policy.generation.refit_transport
    key = f"policy.generation.refit_transport: {transport!r}"
    if transport in ("ipc", "broadcast", "shards") and cluster.launcher == "local":
        yield f"{key} moves weights between processes, but cluster.launcher is 'local'; set it to payload or auto"
    elif transport == "ipc" and cluster.gpus_per_node == 0:
        yield f"{key} shares GPU memory, but cluster.gpus_per_node is 0; set it to payload, broadcast or auto"
    elif transport == "ipc" and not config.policy.generation.colocated.enabled:
        yield f"{key} needs engines on the workers' GPUs, but {_APART}.enabled is false; set it to broadcast or auto"


def rule_shards_fit_what_is_sent(config: MasterConfig) -> Iterator[str]:
    policy = config.policy
    if policy.generation.refit_transport != "shards":
        return
    key = "policy.generation.refit_transport: 'shards'"
    if policy.generation.refit_delta.enabled:
        yield (
            f"{key} sends parts of weights, and a delta is of whole ones; set policy.generation.refit_delta.enabled to "
            "false, or refit_transport to another value"
        )
    if policy.lora.enabled and not policy.lora.is_native:
        yield (
            f"{key} sends parts of weights as they are held, and policy.lora.serve 'merged' adds the adapter to whole "
            "ones; set policy.lora.serve=native, or refit_transport=auto"
        )


def rule_sleep_level_fits_the_run(config: MasterConfig) -> Iterator[str]:
    generation, key = config.policy.generation, "policy.generation.sleep_level"
    level = generation.sleep_level
    if not level:
        return
    if config.grpo.samples_ahead:
        yield f"{key}: {level}, but engines sample while the policy trains (grpo.async.enabled); set it to 0"
    elif not generation.colocated.enabled:
        yield f"{key}: {level}, but engines that are not colocated leave the policy no memory by it; set it to 0"
    elif level == DROPS_WEIGHTS and config.policy.lora.is_native:
        yield (
            f"{key}: {level} drops the frozen weights, which a refit with policy.lora.serve 'native' does not bring "
            "again; set it to 1"
        )
    elif level == DROPS_WEIGHTS and generation.refit_delta.enabled and generation.backend == "torch":
        yield (
            f"{key}: {level} drops the weights that a delta changes (policy.generation.refit_delta.enabled); set it "
            "to 1"
        )


def rule_delta_refit_needs_processes(config: MasterConfig) -> Iterator[str]:
    delta, key = config.policy.generation.refit_delta, "policy.generation.refit_delta"
    if not delta.enabled:
        switch = f"{key}.enabled"
        yield from would_be_ignored(delta, key, ("full_every",), switch=switch)
    elif config.cluster.launcher == "local":
        yield (
            f"{key}.enabled: true, but with cluster.launcher 'local' weights never leave the process, so that a delta "
            "saves nothing; set it to false, or cluster.launcher=ray"
        )


def rule_colocated_keys_need_non_colocated_engines(config: MasterConfig) -> Iterator[str]:
    colocated = config.policy.generation.colocated
    if not colocated.enabled:
        return
    switch = f"{_APART}.enabled"
    yield from would_be_ignored(
        colocated, _APART, ("num_nodes", "gpus_per_node"), switch=switch, because=f"{switch} is true"
    )


def rule_non_colocated_engines_need_their_own_gpus(config: MasterConfig) -> Iterator[str]:
    cluster, colocated = config.cluster, config.policy.generation.colocated
    if colocated.enabled:
        return
    if cluster.launcher == "local":
        yield f"{_APART}.enabled: false needs processes, but cluster.launcher is 'local'; set launcher=ray"
        return
    lines = []
    if colocated.num_nodes and cluster.address is None:
        lines.append(f"{_APART}.num_nodes: nodes of their own need a running Ray cluster; set cluster.address=auto")
    if (colocated.gpus_per_node > 0) != (cluster.gpus_per_node > 0):
        expected = "at least 1" if cluster.gpus_per_node > 0 else "0"
        lines.append(
            f"{_APART}.gpus_per_node: expected {expected} as cluster.gpus_per_node is {cluster.gpus_per_node}, got "
            f"{colocated.gpus_per_node}; engines and policy workers are both on GPUs, or both on CPUs"
        )
    yield from lines or _engines_per_node(config)


def _engines_per_node(config: MasterConfig) -> list[str]:
    colocated, replicas = config.policy.generation.colocated, config.policy.generation.num_replicas
    nodes, key = colocated.num_nodes or config.cluster.num_nodes, "policy.generation.num_replicas"
    gpus, ranks = nodes * colocated.gpus_per_node, config.policy.generation.ranks_per_engine
    if gpus and replicas * ranks != gpus:
        return [
            f"{key}: expected {gpus // ranks}, with {ranks} of the {colocated.gpus_per_node} GPUs on each of {nodes} "
            f"nodes for each engine, got {replicas}"
        ]
    if not gpus and replicas % nodes:
        return [f"{key}: expected a multiple of the {nodes} nodes that engines stand on, got {replicas}"]
    return []


def rule_engine_timeout_below_stage_timeout(config: MasterConfig) -> Iterator[str]:
    engine_s, stage_s = config.policy.generation.engine_timeout_s, config.cluster.stage_timeout_s
    if engine_s is None or engine_s < stage_s:
        return
    yield (
        f"policy.generation.engine_timeout_s: expected less than cluster.stage_timeout_s={stage_s:g}, so that another "
        f"engine still has time for the rows, got {engine_s:g}"
    )


def rule_training_temperature_above_zero(config: MasterConfig) -> Iterator[str]:
    if config.policy.generation.temperature == 0:
        yield (
            "policy.generation.temperature: 0 is greedy: all samples of a group are equal and nothing is learned; "
            "expected a number > 0 (greedy validation is val_temperature=0)"
        )
