"""Rules over switches, lengths, the data plane, diagnostics, files, processes and machines."""

from __future__ import annotations

from collections.abc import Iterator

from nemo_rl.config.base import Section, url_problem
from nemo_rl.config.data_plane import MooncakeConfig
from nemo_rl.config.parts import ENGINE_CAPABILITIES
from nemo_rl.config.rules.rule import keys_besides_the_switch, would_be_ignored
from nemo_rl.config.schema import MasterConfig

__all__ = []


def rule_keys_need_their_switch(config: MasterConfig) -> Iterator[str]:
    policy, tracer, steps = config.policy, config.diagnostics.tracer, config.diagnostics.keep_steps
    receipt = policy.generation.receipt
    sections: tuple[tuple[str, Section, bool], ...] = (
        ("policy.generation.receipt", receipt, receipt.enabled),
        ("policy.lora", policy.lora, policy.lora.enabled),
        ("policy.router_replay", policy.router_replay, policy.router_replay.enabled),
        ("diagnostics.keep_steps", steps, steps.enabled),
        ("diagnostics.tracer", tracer, tracer.enabled),
    )
    for prefix, section, is_on in sections:
        if not is_on:
            yield from would_be_ignored(section, prefix, keys_besides_the_switch(section), switch=f"{prefix}.enabled")
    if not tracer.enabled:
        switches = type(policy.tracer).model_fields
        yield from would_be_ignored(policy.tracer, "policy.tracer", switches, switch="diagnostics.tracer.enabled")


def rule_lengths_fit(config: MasterConfig) -> Iterator[str]:
    policy, prompt = config.policy, config.data.max_input_seq_length
    new, total = policy.generation.max_new_tokens, policy.max_total_sequence_length
    if config.sft.enabled:
        return
    if new is None and prompt >= total:
        yield (
            f"policy.max_total_sequence_length: {total} leaves no token for the response to a prompt of "
            f"data.max_input_seq_length {prompt}; lower that to at most {total - 1}"
        )
    elif new is not None and prompt + new > total:
        yield (
            f"policy.max_total_sequence_length: {total} does not hold data.max_input_seq_length {prompt} + "
            f"policy.generation.max_new_tokens {new} = {prompt + new}"
        )


# ---- files


def rule_checkpoint_keys_need_checkpointing(config: MasterConfig) -> Iterator[str]:
    checkpointing = config.checkpointing
    if checkpointing.enabled:
        return
    if checkpointing.resume:
        yield "checkpointing.resume: needs checkpointing.enabled=true"
        return
    ranking = ("keep_top_k", "metric_name", "higher_is_better")
    names = ("save_period", *ranking, "save_optimizer", "async_save", "must_save_by")
    switch = "checkpointing.enabled"
    yield from would_be_ignored(checkpointing, "checkpointing", names, switch=switch)


def rule_checkpoint_url_can_be_written(config: MasterConfig) -> Iterator[str]:
    section, key = config.checkpointing, "checkpointing.checkpoint_dir"
    url = section.url
    if url is None:
        because = f"{key} is a path"
        yield from would_be_ignored(section, "checkpointing", ("staging_dir",), switch=key, because=because)
        return
    problem = url_problem(url)
    if problem is not None:
        yield f"{key}: {problem}"


def rule_checkpoint_metric_is_logged(config: MasterConfig) -> Iterator[str]:
    checkpointing = config.checkpointing
    if not checkpointing.enabled:
        return
    if checkpointing.keep_top_k is None:
        names, switch = ("metric_name", "higher_is_better"), "checkpointing.keep_top_k"
        because = f"{switch} is null: all are kept"
        yield from would_be_ignored(checkpointing, "checkpointing", names, switch=switch, because=because)
        return
    area, _, metric = checkpointing.metric_name.partition(":")
    if area not in ("val", "train") or not metric:
        yield f"checkpointing.metric_name: expected val:NAME or train:NAME, got {checkpointing.metric_name!r}"
    elif config.checkpoint_metric.startswith("val:") and not config.has_validation:
        yield (
            f"checkpointing.metric_name: {checkpointing.metric_name!r} is never measured without validation; "
            "set train:reward, or keep_top_k=null, or add data.validation"
        )


def rule_resume_needs_the_optimizer(config: MasterConfig) -> Iterator[str]:
    section = config.checkpointing
    if section.resume and not section.save_optimizer:
        yield "checkpointing.save_optimizer: false cannot be resumed from; set it to true, or resume=false"
    elif not section.resume:
        switch = "checkpointing.resume"
        because = f"{switch} is false"
        # A replay of kept steps compares as well.
        names = ["load_optimizer"] if config.diagnostics.keep_steps.enabled else ["load_optimizer", "allow_changed"]
        yield from would_be_ignored(section, "checkpointing", names, switch=switch, because=because)


def rule_resume_excludes_overwrite(config: MasterConfig) -> Iterator[str]:
    if config.checkpointing.resume and config.logger.overwrite:
        yield "logger.overwrite: removes the run that checkpointing.resume continues; leave one of them out"


def rule_tracker_keys_need_their_tracker(config: MasterConfig) -> Iterator[str]:
    logger = config.logger
    trackers: list[tuple[str, bool, Section]] = [
        ("wandb", logger.wandb_enabled, logger.wandb),
        ("mlflow", logger.mlflow_enabled, logger.mlflow),
    ]
    for name, is_on, section in trackers:
        if not is_on:
            switch, names = f"logger.{name}_enabled", tuple(type(section).model_fields)
            yield from would_be_ignored(section, f"logger.{name}", names, switch=switch)


# ---- processes and machines


def rule_cpu_workers_need_no_gpus(config: MasterConfig) -> Iterator[str]:
    cluster = config.cluster
    if cluster.cpu_workers_per_node is not None and cluster.gpus_per_node > 0:
        because = f"cluster.gpus_per_node is {cluster.gpus_per_node}"
        yield from would_be_ignored(
            cluster, "cluster", ["cpu_workers_per_node"], switch="cluster.gpus_per_node", because=because
        )


def rule_local_launcher_needs_one_process(config: MasterConfig) -> Iterator[str]:
    cluster = config.cluster
    if cluster.launcher != "local":
        return
    if cluster.num_workers > 1:
        yield (
            f"cluster.launcher: 'local' runs one worker in this process, got {cluster.num_workers}; "
            "set cluster.cpu_workers_per_node=1 (or gpus_per_node=1) and num_nodes=1, or launcher=ray"
        )
    replicas = config.policy.generation.num_replicas
    if replicas > 1:
        yield f"policy.generation.num_replicas: one process holds one engine, got {replicas}; set it to 1"
    names = ("address", "num_cpus", "spare_nodes")
    because = "cluster.launcher is 'local'"
    yield from would_be_ignored(cluster, "cluster", names, switch="cluster.launcher", because=because)


def rule_several_nodes_need_an_address(config: MasterConfig) -> Iterator[str]:
    cluster = config.cluster
    if cluster.address is not None and cluster.num_cpus is not None:
        yield "cluster.num_cpus: would be ignored, because cluster.address names a running Ray cluster; leave it out"
    if cluster.launcher == "ray" and cluster.num_nodes > 1 and cluster.address is None:
        yield f"cluster.num_nodes: {cluster.num_nodes} nodes need a running Ray cluster; set cluster.address=auto"


def rule_spare_nodes_need_a_cluster_and_checkpoints(config: MasterConfig) -> Iterator[str]:
    cluster, saving = config.cluster, config.checkpointing
    if not cluster.spare_nodes or cluster.launcher == "local":
        return
    key, num_nodes = "cluster.spare_nodes", cluster.num_nodes + cluster.spare_nodes
    if cluster.address is None:
        yield f"{key}: needs a running Ray cluster of {num_nodes} nodes; set cluster.address=auto, or {key}=0"
    if not saving.enabled or not saving.save_optimizer:
        lacking = "save_optimizer" if saving.enabled else "enabled"
        yield (
            f"{key}: a run goes on from its last checkpoint, and checkpointing.{lacking} is false; set it to true, or "
            f"{key}=0"
        )


def rule_env_vars_need_processes(config: MasterConfig) -> Iterator[str]:
    if config.cluster.launcher != "local":
        return
    policy = config.policy
    sections: dict[str, Section] = {
        "cluster": config.cluster,
        "policy.generation": policy.generation,
        policy.parallel_section: policy.megatron_cfg if policy.megatron_cfg.enabled else policy.dtensor_cfg,
    }
    given = {"switch": "cluster.launcher", "because": "cluster.launcher is 'local': export them instead"}
    lines = [line for name, each in sections.items() for line in would_be_ignored(each, name, ("env_vars",), **given)]
    given["because"] = "cluster.launcher is 'local'"
    yield from lines + would_be_ignored(config.logger, "logger", ("worker_level",), **given)


# ---- the data plane


def rule_data_plane_fits_launcher(config: MasterConfig) -> Iterator[str]:
    impl, launcher = config.active_data_plane.impl, config.cluster.launcher
    if impl in ("noop", "shm") and launcher == "ray":
        reach = "keeps rows in one process" if impl == "noop" else "joins processes of one node without Ray"
        yield f"data_plane.impl: {impl!r} {reach}; set impl=ray (shared memory: ray.owner=node)"
    elif impl in ("ray", "transfer_queue") and launcher == "local":
        yield f"data_plane.impl: {impl!r} lives in Ray; set cluster.launcher=ray, or impl=noop"


def rule_ledger_host_fits_launcher(config: MasterConfig) -> Iterator[str]:
    host, cluster = config.data_plane.ledger_host, config.cluster
    if cluster.launcher == "local" and host == "ray_actor":
        yield "data_plane.ledger_host: 'ray_actor' needs Ray; set in_process or socket, or cluster.launcher=ray"
    elif cluster.launcher == "ray" and host == "in_process":
        yield "data_plane.ledger_host: 'in_process' cannot be reached by Ray actors; set ray_actor or socket"
    elif cluster.launcher == "ray" and host == "socket" and (cluster.num_nodes > 1 or cluster.address is not None):
        yield "data_plane.ledger_host: 'socket' serves one machine only; set ray_actor"


def rule_ledger_recovery_needs_a_process_of_its_own(config: MasterConfig) -> Iterator[str]:
    plane, launcher = config.data_plane, config.cluster.launcher
    if plane.ledger.recovery == "none":
        names = ("fsync", "journal_bytes")
        because = "data_plane.ledger.recovery is 'none'"
        switch = "data_plane.ledger.recovery"
        yield from would_be_ignored(plane.ledger, "data_plane.ledger", names, switch=switch, because=because)
    elif launcher == "local" or plane.ledger_host == "socket":
        what = "cluster.launcher=local" if launcher == "local" else "data_plane.ledger_host=socket"
        yield (
            f"data_plane.ledger.recovery: 'journal' needs the ledger in its own process; with {what} it lives in "
            "the driver, whose death ends the run; set cluster.launcher=ray and data_plane.ledger_host=ray_actor, or "
            "recovery=none"
        )
    elif plane.impl == "transfer_queue" and plane.transfer_queue.layout == "native":
        yield (
            "data_plane.ledger.recovery: 'journal' does not know which rows are being written under their own keys; "
            "set data_plane.transfer_queue.layout=chunks, or recovery=none"
        )


def rule_store_sections_need_their_store(config: MasterConfig) -> Iterator[str]:
    plane = config.active_data_plane
    is_node = plane.impl == "ray" and plane.ray.owner == "node"
    used = {
        "ray": plane.impl == "ray",
        "shm": plane.impl == "shm" or is_node,
        "transfer_queue": plane.impl == "transfer_queue",
        "simple": plane.impl == "transfer_queue" and plane.backend == "simple",
        "mooncake": plane.uses_mooncake,
    }
    switch = "data_plane.impl" if config.data_plane.enabled else "data_plane.enabled"
    because = f"the store is {plane.impl!r}" + (f" with owner {plane.ray.owner!r}" if plane.impl == "ray" else "")
    for name, is_used in used.items():
        if not is_used:
            section: Section = getattr(plane, name)
            names = type(section).model_fields
            yield from would_be_ignored(section, f"data_plane.{name}", names, switch=switch, because=because)


def rule_durable_rows_need_receipts(config: MasterConfig) -> Iterator[str]:
    durable, receipt = config.data_plane.durable, config.policy.generation.receipt
    if durable.path is None:
        yield from would_be_ignored(
            durable, "data_plane.durable", ("fsync",), switch="data_plane.durable.path", because="no path is set"
        )
        return
    if receipt.enabled:
        return
    yield (
        "data_plane.durable.path: a stored group is used only if this run has the weights that sampled it, which the "
        "receipts of refits prove; set policy.generation.receipt.enabled=true, or path=null"
    )


def rule_data_plane_impl_needs_its_switch(config: MasterConfig) -> Iterator[str]:
    plane = config.data_plane
    if plane.enabled or plane.impl is None:
        return
    switch, because = "data_plane.enabled", "data_plane.enabled is false"
    yield from would_be_ignored(plane, "data_plane", ("impl",), switch=switch, because=because)


def rule_leader_broadcast_needs_a_replica_group(config: MasterConfig) -> Iterator[str]:
    policy = config.policy
    if config.data_plane.fetch_policy == "leader_broadcast" and policy.parallel_sizes.replica_size <= 1:
        yield (
            "data_plane.fetch_policy: 'leader_broadcast' needs ranks that share rows; set auto, or "
            f"{' or '.join(policy.replica_keys)} above 1"
        )


def rule_backend_needs_transfer_queue(config: MasterConfig) -> Iterator[str]:
    plane = config.active_data_plane
    if plane.backend == "simple" or plane.impl == "transfer_queue":
        return
    yield (
        f"data_plane.backend: {plane.backend!r} would be ignored, the store is {plane.impl!r}; set impl=transfer_queue"
    )


def rule_connect_needs_a_cluster_that_runs(config: MasterConfig) -> Iterator[str]:
    if not config.active_data_plane.is_guest_of_queue or config.cluster.address is not None:
        return
    yield (
        "data_plane.transfer_queue.connect: the run starts its own Ray cluster, where no TransferQueue runs; set "
        "cluster.address to the cluster of the program whose TransferQueue it joins"
    )


def rule_connected_queue_brings_its_own_settings(config: MasterConfig) -> Iterator[str]:
    plane = config.active_data_plane
    if not plane.is_guest_of_queue:
        return
    because, switch = "the program that started TransferQueue has settled it", "data_plane.transfer_queue.connect"
    if plane.backend == "simple":
        names: tuple[str, ...] = ("num_storage_units", "placement")
        yield from would_be_ignored(plane.simple, "data_plane.simple", names, switch=switch, because=because)
        return
    names = tuple(MooncakeConfig.model_fields)
    yield from would_be_ignored(plane.mooncake, "data_plane.mooncake", names, switch=switch, because=because)


def rule_mooncake_keys_fit_the_store(config: MasterConfig) -> Iterator[str]:
    plane, nodes = config.active_data_plane, config.cluster.num_nodes
    if not plane.starts_mooncake:
        return
    if nodes > 1 and plane.mooncake.host.startswith("127."):
        yield (
            f"data_plane.mooncake.host: {nodes} nodes cannot reach {plane.mooncake.host}; set `node`, the driver's "
            "address in the Ray cluster, or another one in a trusted network"
        )
    if plane.is_queue_on_mooncake:
        names = ("master_address", "chunk_bytes")
        because = "TransferQueue names its objects alike in every run and makes its own sizes"
        switch = "data_plane.impl"
        yield from would_be_ignored(plane.mooncake, "data_plane.mooncake", names, switch=switch, because=because)


# ---- diagnostics


def rule_record_keys_need_steps(config: MasterConfig) -> Iterator[str]:
    section, prefix = config.diagnostics.record, "diagnostics.record"
    if section.steps:
        return
    switch = f"{prefix}.steps"
    yield from would_be_ignored(section, prefix, ("sites", "phases"), switch=switch, because=f"{switch} names no step")


def rule_generation_can_be_recorded(config: MasterConfig) -> Iterator[str]:
    if not config.diagnostics.record.has_generation:
        return
    key, generation, lines = "diagnostics.record.phases: generation", config.policy.generation, list[str]()
    capabilities = ENGINE_CAPABILITIES.get(generation.backend)
    if capabilities is None or not capabilities.records_decoding:
        yield f"{key}: the engine {generation.backend!r} cannot be recorded; leave generation out"
        return
    if config.has_continuous_engines:
        lines.append(f"{key}: rows join and leave the batch of an engine that samples ahead; leave it out")
    if config.experience.conversation.enabled:
        lines.append(f"{key}: a row of a conversation is read again in every turn; leave it out")
    sizes = generation.vllm_cfg
    if generation.backend == "vllm" and sizes.pipeline_parallel_size > 1:
        lines.append(f"{key}: a later pipeline stage of vLLM has no tokens; set vllm_cfg.pipeline_parallel_size to 1")
    if generation.backend == "vllm" and sizes.enforce_eager is not True and config.cluster.gpus_per_node > 0:
        lines.append(
            f"{key}: a compiled vLLM passes its modules by, so that hooks see nothing; set "
            "policy.generation.vllm_cfg.enforce_eager=true"
        )
    yield from lines


def rule_tracer_host_reachable(config: MasterConfig) -> Iterator[str]:
    section, num_nodes = config.diagnostics.tracer, config.cluster.num_nodes
    if section.enabled and num_nodes != 1 and section.host.startswith(("127.", "localhost", "::1")):
        yield (
            f"diagnostics.tracer.host: {section.host!r} is reached from one node alone, and cluster.num_nodes is "
            f"{num_nodes}; set it to 0.0.0.0: then others on the network reach it, too, who need a token"
        )
