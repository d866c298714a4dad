"""`preflight`: everything that can be checked about a run without starting it, all problems at once.

Called first in every run, and alone by `--preflight`. A check is a function that is given the `Subject` and returns a
line per problem, or raises a `UserError`; a new one is one line in `CHECKS`.

Checks of the machine: GPUs, CPUs, memory, disk, folders. Of a Ray cluster that runs already, only folders.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from nemo_rl.algorithms.preflight import inputs
from nemo_rl.algorithms.preflight.inputs import Subject, nearest_folder, with_teacher_folder
from nemo_rl.algorithms.preflight.model_check import packs
from nemo_rl.algorithms.processes import logical_cpus, num_engine_bundles, too_few_cpus
from nemo_rl.algorithms.run_folder import CONFIG_FILE, first_start, run_folders, saved_steps, used_folder_problems
from nemo_rl.config.base import AUTO
from nemo_rl.config.load import load_config
from nemo_rl.config.policy import PolicyConfig
from nemo_rl.config.rules.policy import packing_decided
from nemo_rl.config.run import ClusterConfig
from nemo_rl.config.schema import MasterConfig
from nemo_rl.config.yaml_text import masked
from nemo_rl.data_plane.metrics_endpoint import check_metrics_port
from nemo_rl.data_plane.store_kinds import kind_named
from nemo_rl.errors import ConfigError, PreflightError, RunFolderError, UserError, name_some
from nemo_rl.models.hf.loading import local_folders
from nemo_rl.utils.console import bytes_text
from nemo_rl.utils.deadlines import seconds_left
from nemo_rl.utils.memory import available_bytes
from nemo_rl.utils.object_store import ObjectStore
from nemo_rl.utils.run_lock import lock_problem

__all__ = [
    "CHECKS",
    "busy_machine",
    "check_checkpoint",
    "check_conversations",
    "check_cpus",
    "check_disk",
    "check_folders",
    "check_gpus",
    "check_memory",
    "check_run_folder",
    "check_storage",
    "checks_of",
    "decide_resume",
    "preflight",
    "run_checks",
]

logger = logging.getLogger(__name__)


BUSY_LOAD = 0.75
"""Load per core from which a machine counts as busy: on two cores, one and a half processes that always run."""
WORKERS_PER_CORE, FEW_WORKERS = 16, 64
"""More processes than that on a core are a slip; on any machine so many are believed."""
PARAMETER_BYTES, GRADIENT_BYTES, MOMENT_BYTES = 4, 4, 4
ROWS_LOOKED_AT = 64
"""Finished conversations that are read before a run starts; all of them are before its first step."""
LOG_BYTES = 16 * 2**20
"""Bytes of logs, rollouts and TensorBoard files of a short run."""


def check_gpus(subject: Subject) -> list[str]:
    """Check that there are as many GPUs as policy workers and non-colocated engines need."""
    cluster = subject.config.cluster
    if cluster.gpus_per_node == 0 or cluster.address is not None:
        return []
    have, asked = torch.cuda.device_count(), cluster.gpus_per_node + num_engine_bundles(subject.config)
    if have >= asked:
        return []
    return [
        f"cluster.gpus_per_node: {asked} GPUs are asked for, this machine has {have}; lower it, or set it to 0 with "
        "cluster.cpu_workers_per_node to train on CPU"
    ]


def check_data_plane(subject: Subject) -> list[str]:
    """Check that the packages of the store are installed, and that the port of the metrics is free."""
    plane = subject.config.data_plane
    if plane.enabled and plane.impl is not None:
        kind_named(plane.impl).check_installed(plane)
    return check_metrics_port(plane.observability.metrics_port)


def check_cpus(subject: Subject) -> list[str]:
    """Logical CPUs that Ray may hand out, and a number of processes that somebody can have meant."""
    config, cores = subject.config, os.cpu_count() or 1
    if config.cluster.address is not None:
        return []
    cluster = config.cluster
    limit = max(FEW_WORKERS, WORKERS_PER_CORE * cores)
    lines = [
        f"{key}: {count} processes on {cores} cores are more than can work; expected at most {limit}"
        for key, count in (
            ("cluster.cpu_workers_per_node", cluster.num_workers if cluster.gpus_per_node == 0 else 0),
            ("policy.generation.num_replicas", config.policy.generation.num_replicas),
            *((f"{path}.num_workers", env.num_workers) for path, env in config.envs.items()),
        )
        if count > limit
    ]
    if cluster.launcher == "ray" and cluster.num_cpus is not None and cluster.num_cpus < logical_cpus(config):
        lines.append(too_few_cpus(config, have=cluster.num_cpus))
    return lines


def busy_machine(cluster: ClusterConfig) -> str | None:
    """Return a line about what slows a run down on this machine's CPUs: other processes, or too many threads."""
    if cluster.gpus_per_node > 0 or cluster.address is not None:
        return None
    cores, load = os.cpu_count() or 1, os.getloadavg()[0]
    workers, num_threads = cluster.num_workers, cluster.num_workers * cluster.threads_per_worker
    is_busy, has_several = load >= BUSY_LOAD * cores and load + num_threads > cores, cluster.threads_per_worker > 1
    if is_busy and not has_several:
        return f"busy machine: load {load:.1f} on {cores} cores, steps take longer"
    if is_busy or (has_several and num_threads > cores):
        most = 1 if is_busy else max(1, cores // workers)
        return f"load {load:.1f} and {num_threads} threads on {cores} cores; set cluster.threads_per_worker={most}"
    return None


def check_memory(subject: Subject) -> list[str]:
    """Weights, gradients and optimizer state of the workers and the copies of the engines fit, as a lower bound."""
    config, policy = subject.config, subject.config.policy
    if config.cluster.address is not None:
        return []
    count, sizes = subject.num_parameters, policy.parallel_sizes
    precision = policy.generation.precision or policy.precision
    engine = count * (4 if precision == "float32" else 2)
    # FSDP2 shards over all ranks; megatron-core's ranks hold a copy per replica group, of which states may be shared.
    copies = config.cluster.num_workers // sizes.replica_size if policy.megatron_cfg.enabled else 1
    states = count * (PARAMETER_BYTES + GRADIENT_BYTES) * max(1, copies) + count * _optimizer_bytes(policy)
    if config.cluster.gpus_per_node == 0 or policy.dtensor_cfg.cpu_offload:
        needed, have = states + engine * policy.generation.num_replicas, available_bytes()
        return [] if needed <= have else [_too_little("memory", needed, have, count)]
    if torch.cuda.device_count() < config.cluster.gpus_per_node:
        return []
    needed = states // config.cluster.num_workers + engine
    have = torch.cuda.get_device_properties(0).total_memory
    return [] if needed <= have else [_too_little("memory of each GPU", needed, have, count)]


def check_disk(subject: Subject) -> list[str]:
    """A checkpoint fits where it is written, and logs where they are."""
    config, lines = subject.config, list[str]()
    log_dir = nearest_folder(config.logger.log_dir)
    free = shutil.disk_usage(log_dir).free
    if free < LOG_BYTES:
        lines.append(f"logger.log_dir: {log_dir} has {bytes_text(free)} free; free some, or choose another folder")
    if not config.checkpointing.enabled:
        return lines
    folder = nearest_folder(config.checkpoint_dir)
    states = _optimizer_bytes(config.policy) if config.checkpointing.save_optimizer else 0
    needed, free = subject.num_parameters * (PARAMETER_BYTES + states), shutil.disk_usage(folder).free
    if needed > free:
        lines.append(
            f"{config.checkpointing.folder_key}: a checkpoint has about {bytes_text(needed)}, {folder} has "
            f"{bytes_text(free)} free; free some, choose another folder, or set checkpointing.enabled=false"
        )
    return lines


def check_folders(subject: Subject) -> list[str]:
    config = subject.config
    folders = {"logger.log_dir": config.logger.log_dir}
    if config.checkpointing.enabled:
        folders[config.checkpointing.folder_key] = config.checkpoint_dir
    return [line for key, folder in folders.items() for line in _folder_problem(key, folder)]


def check_storage(subject: Subject) -> list[str]:
    """Check that checkpoints can be written to their URL, read and removed, with a small file."""
    section = subject.config.checkpointing
    if section.enabled and section.url is not None:
        ObjectStore(section.url).probe()
    return []


def check_run_folder(subject: Subject) -> list[str]:
    """The folders hold no other run, neither a live one nor what one has left."""
    config = subject.config
    folders = run_folders(config.logger, config.checkpointing, durable=config.data_plane.durable.path)
    in_use = [problem for problem in map(lock_problem, folders) if problem is not None]
    return in_use or used_folder_problems(config.logger, config.checkpointing)


def check_time_limit(subject: Subject) -> list[str]:
    """Check that the end of the job is known where it counts."""
    limit = subject.config.checkpointing.must_save_by
    if limit is not None:
        seconds_left(limit)
    return []


def check_checkpoint(subject: Subject) -> list[str]:
    """Check that there is a checkpoint to resume from; the run itself compares its contents."""
    found = subject.resume_from
    return (
        [] if found is None or found.url is not None or found.path.is_dir() else [f"checkpoint {found.path}: is gone"]
    )


def check_conversations(subject: Subject) -> list[str]:
    """The finished conversations of supervised training become rows, of which there are enough for a step."""
    from nemo_rl.data.finished import finished_encoder, load_finished  # noqa: PLC0415 - a run of GRPO does without

    config, now = subject.config, first_start(subject.resume_from)
    found = load_finished(
        config.data,
        finished_encoder(subject.tokenizer, stop_ids=subject.stop_ids, now=now),
        max_length=config.policy.max_total_sequence_length,
        min_reward=config.sft.min_reward,
        max_rows=None if subject.is_alone else max(ROWS_LOOKED_AT, 2 * config.grpo.num_prompts_per_step),
    )
    lines = []
    if not config.data.train.named and len(found["data.train"].rows) < config.grpo.num_prompts_per_step:
        lines.append(
            f"data.train: expected at least policy.train_global_batch_size={config.grpo.num_prompts_per_step} rows, "
            f"got {len(found['data.train'].rows)}; add rows or lower it"
        )
    for where, each in found.items():
        ids = tuple({token for row in each.rows for token in row.ids})
        lines += inputs.unknown_tokens(subject, f"tokens of rows of {where}", ids)
    return lines


def _folder_problem(key: str, folder: Path) -> list[str]:
    try:
        found = nearest_folder(folder)
        if not found.is_dir():
            return [f"{key}: {folder}: expected a folder, but {found} is a file; choose another"]
    except OSError as error:
        return [f"{key}: {folder}: cannot be looked at: {error.strerror}; choose another folder"]
    if not os.access(found, os.W_OK | os.X_OK):
        return [f"{key}: {folder}: {found} cannot be written by this user; change its permissions, or choose another"]
    return []


def _optimizer_bytes(policy: PolicyConfig) -> int:
    """Per parameter: Adam and its kin keep two moments, others may keep nothing."""
    name = policy.megatron_cfg.optimizer.optimizer if policy.megatron_cfg.enabled else policy.optimizer.name
    return 2 * MOMENT_BYTES if "adam" in name.lower() else 0


def _too_little(what: str, needed: int, have: int, count: int) -> str:
    return (
        f"policy.model_name: {count:,} parameters need at least {bytes_text(needed)} of {what} for weights, "
        f"gradients, optimizer and engines, {bytes_text(have)} are there; take a smaller model, or "
        "fewer engines"
    )


Check = Callable[[Subject], list[str]]

CHECKS: Mapping[str, Check] = {
    "storage": check_storage,
    "run folder": check_run_folder,
    "checkpoint": check_checkpoint,
    "time limit": check_time_limit,
    "folders": check_folders,
    "model": inputs.check_model,
    "optimizer": inputs.check_optimizer,
    "tokenizer": inputs.check_tokenizer,
    "teacher": inputs.check_teacher,
    "prompts": inputs.check_prompts,
    "conversations": check_conversations,
    "reward": inputs.check_reward,
    "gold answers": inputs.check_answers,
    "turns": inputs.check_turns,
    "identity": inputs.check_identity,
    "parts": inputs.check_parts,
    "engine": inputs.check_engine,
    "trackers": inputs.check_trackers_are_installed,
    "records": inputs.check_records,
    "data plane": check_data_plane,
    "GPUs": check_gpus,
    "CPUs": check_cpus,
    "memory": check_memory,
    "disk": check_disk,
}
NEED_MODEL = (
    "model",
    "tokenizer",
    "teacher",
    "prompts",
    "conversations",
    "turns",
    "gold answers",
    "identity",
    "memory",
    "disk",
)
"""Checks that would only repeat that a model's name on the hub leads nowhere."""
OF_ROLLOUTS = ("teacher", "prompts", "reward", "gold answers", "turns", "identity", "engine")
"""Checks of what supervised training does not have, or looks at by itself."""
OF_CONVERSATIONS = ("conversations",)
"""Checks of supervised training alone."""
ALONGSIDE = ("reward",)
"""Checks that wait for their own process, and run alongside the others."""


def preflight(config: MasterConfig, *, is_alone: bool = False) -> MasterConfig:
    """Runs every check; returns the config with folders in place of names on the hub, and with `auto` decided for
    `checkpointing.resume` and `policy.sequence_packing.enabled`.

    Args:
        is_alone: no run follows: also looks at all rows of the datasets, which a run does when it loads them.

    Raises:
        UserError: the only one that a check has met.
        PreflightError: all of them, a line each.
    """
    config, names = decide_resume(config), checks_of(config)
    return run_checks(config.as_supervised if config.sft.enabled else config, names, is_alone=is_alone)


def checks_of(config: MasterConfig) -> tuple[str, ...]:
    """Return the names of the checks of a run."""
    others = OF_ROLLOUTS if config.sft.enabled else OF_CONVERSATIONS
    return tuple(name for name in CHECKS if name not in others)


def run_checks(config: MasterConfig, names: Iterable[str], *, is_alone: bool = False) -> MasterConfig:
    """Some of `CHECKS`; returns the config with folders in place of names on the hub, and packing decided. Raises as
    `preflight`."""
    errors: list[UserError] = []
    wanted = {name: CHECKS[name] for name in names}
    try:
        config = config.model_copy(update={"policy": local_folders(config.policy)})
        config = packing_decided(with_teacher_folder(config), fits=packs)
    except UserError as error:
        errors.append(error)
        wanted = {name: check for name, check in wanted.items() if name not in NEED_MODEL}
    subject = Subject(config, is_alone=is_alone)
    with ThreadPoolExecutor(len(ALONGSIDE), thread_name_prefix="preflight") as pool:
        alongside = {name: pool.submit(_run, wanted[name], subject) for name in ALONGSIDE if name in wanted}
        for name, check in wanted.items():
            found = alongside[name].result() if name in alongside else _run(check, subject)
            errors += [error for error in found if str(error) not in map(str, errors)]
    busy = busy_machine(config.cluster) if "CPUs" in wanted else None
    if errors:
        problems = [line for error in errors for line in _lines(error)]
        refused = errors[0] if len(errors) == 1 else PreflightError(problems)
        if busy is not None:
            refused.add_note(busy)
        raise refused
    if busy is not None:
        logger.warning("%s", busy)
    return config


def _run(check: Check, subject: Subject) -> list[UserError]:
    try:
        return [UserError(line) for line in check(subject)]
    except UserError as error:
        return [error]


def _lines(error: UserError) -> list[str]:
    return error.problems if isinstance(error, ConfigError) else [str(error)]


COMPARED = {"grpo", "loss_fn", "policy", "data", "env"}
"""Sections that say what is learned; the others say where and with what."""
MAY_CHANGE = ("grpo.max_num_steps", "grpo.max_num_epochs", "env.preflight_reward")
"""A run may be made longer, and checked otherwise."""


def decide_resume(config: MasterConfig) -> MasterConfig:
    """The config with true or false in place of `auto`.

    Where an earlier start of this recipe has come to no checkpoint, what it wrote is removed as by `logger.overwrite`.

    Raises:
        RunFolderError: there are checkpoints of another recipe.
    """
    if config.checkpointing.resume != AUTO:
        return config
    path = config.logger.log_dir / CONFIG_FILE
    has_checkpoint = bool(saved_steps(config.checkpointing, config.logger.log_dir))
    if not path.is_file():
        # Checkpoints alone may have been copied here on purpose.
        return _decided(config, resume=has_checkpoint, overwrite=False)
    others = _differences(config, path)
    if has_checkpoint and others:
        raise RunFolderError(
            f"checkpointing.resume: auto continues runs of the same recipe, but in {path} others are "
            f"{name_some(others)}; set checkpointing.resume=true to continue it all the same, logger.overwrite=true "
            "with checkpointing.resume=false to remove it, or another logger.log_dir"
        )
    return _decided(config, resume=has_checkpoint, overwrite=not has_checkpoint and not others)


def _decided(config: MasterConfig, *, resume: bool, overwrite: bool) -> MasterConfig:
    checkpointing = config.checkpointing.model_copy(update={"resume": resume})
    logger = config.logger.model_copy(update={"overwrite": overwrite})
    return config.model_copy(update={"checkpointing": checkpointing, "logger": logger})


def _differences(config: MasterConfig, path: Path) -> list[str]:
    """Dotted names of keys whose values differ from those of an earlier start."""
    try:
        earlier = load_config(path, with_masked=True)
    except ConfigError:
        return [f"keys that cannot be read ({path})"]
    trees = (masked(one.model_dump(mode="json", include=COMPARED)) for one in (earlier, config))
    before, now = (dict(_leaves(tree, "")) for tree in trees)
    return sorted(
        name for name in before.keys() | now.keys() if before.get(name) != now.get(name) and name not in MAY_CHANGE
    )


def _leaves(value: object, name: str) -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _leaves(item, f"{name}.{key}" if name else str(key))
    else:
        yield name, value
