"""`ReplaySettings`: the config of the kept step, with other values, another layout or the other worker.

Invariant: what neither the request nor the other worker needs is as in the run.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import ValidationError

from nemo_rl.algorithms.kept_steps.folder import STEP_FILE, StepSnapshot
from nemo_rl.algorithms.run_folder import STEPS, differences, model_digest
from nemo_rl.config.backends import (
    DTensorConfig,
    MegatronConfig,
    MegatronOptimizerConfig,
    MegatronSchedulerConfig,
    OptimizerConfig,
    SchedulerConfig,
)
from nemo_rl.config.compose import apply_overrides, compose
from nemo_rl.config.load import load_config, parse_tree
from nemo_rl.config.policy import PolicyConfig
from nemo_rl.config.schema import MasterConfig
from nemo_rl.data.tokenizer import load_tokenizer, stop_token_ids, tokenizer_identity
from nemo_rl.distributed.layout import ParallelLayout
from nemo_rl.errors import ConfigError, shorten
from nemo_rl.utils.memory import package_versions
from nemo_rl_tools.compare.limits import ToleranceRules
from nemo_rl_tools.step_replay.chain import ReplayProblem, ReplayRequest, Worker
from nemo_rl_tools.verdict import Verdict

__all__ = ["ReplaySettings", "replay_settings"]

TRUSTED_PACKAGES = ("nemo_rl", "torch", "megatron", "transformers")
PART = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
IMPORT_KEYS = re.compile(r"policy\.(optimizer|scheduler)\.")
PLAN_KEY = "policy.dtensor_cfg.custom_parallel_plan"
"""A text there is imported; styles lie under keys below it."""
ADAMW = "torch.optim.AdamW"
TORCH_ADAMW: Mapping[str, object] = {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}
"""Torch's own defaults."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplaySettings:
    """The settings of the ranks of a replay."""

    config: MasterConfig
    """The kept config with the request's values over it: rewards, loss and plans follow it."""
    policy: PolicyConfig
    """Settings of the workers: `config.policy` in the layout and with the worker of the replay."""
    layout: ParallelLayout
    run_layout: ParallelLayout
    """The layout for which the run's plans were made."""
    worker: Worker
    is_other_worker: bool
    uses_gpu: bool
    differences: tuple[str, ...]
    """Reasons for which the numbers need not be the same to the last bit; empty without any."""
    limits: ToleranceRules
    """Limits of numbers that need not be the same to the last bit."""
    notes: tuple[str, ...] = ()

    @property
    def is_exact(self) -> bool:
        return not self.differences


def replay_settings(request: ReplayRequest, step: StepSnapshot) -> ReplaySettings:
    """
    Raises:
        ConfigError: an override is wrong.
        ReplayProblem: the other worker cannot take this recipe, or a folder holds another model than that of the run.
    """
    where = request.run / STEPS / f"step_{request.step}" / STEP_FILE
    foreign = _foreign_code(step.run.config)
    if foreign and not request.allows_code:
        raise ReplayProblem(
            f"{where}: its config names code outside the library, which a replay imports and so runs: "
            f"{'; '.join(foreign)}. Add --allow-code if you trust who wrote this folder",
            verdict=Verdict.USAGE,
        )
    try:
        config = _config(step.run.config, request.overrides)
    except ValidationError as error:
        raise ReplayProblem(
            f"{where}: its config does not fit this version: {shorten(' '.join(str(error).split()))}",
            verdict=Verdict.CORRUPT,
        ) from error
    _check_identity(config, step)
    run_layout = ParallelLayout.of_policy(config.policy, world_size=step.run.world_size)
    own: Worker = "megatron" if config.policy.megatron_cfg.enabled else "dtensor"
    worker = request.worker or own
    policy, differences = config.policy, []
    if worker != own:
        policy = _switched(policy, worker, one=request.in_one_process)
        differences.append(f"the {worker} worker in place of {own}")
    if request.in_one_process and step.run.world_size > 1:
        policy = _alone(policy)
        differences.append(f"one process in place of {step.run.world_size}")
    uses_gpu = config.cluster.gpus_per_node > 0 and torch.cuda.is_available()
    if config.cluster.gpus_per_node > 0 and not uses_gpu:
        differences.append("the CPU in place of GPUs")
    if worker == "dtensor" and policy.dtensor_cfg.compile in (("on", "auto") if uses_gpu else ("on",)):
        differences.append("layers that may be compiled, whose bits depend on the passes before the step")
    now, then = package_versions(), step.run.packages
    changed = [f"{name} {now.get(name)} in place of {then[name]}" for name in then if now.get(name) != then[name]]
    return ReplaySettings(
        config=config,
        policy=policy,
        layout=ParallelLayout.of_policy(policy, world_size=1 if request.in_one_process else step.run.world_size),
        run_layout=run_layout,
        worker=worker,
        is_other_worker=worker != own,
        uses_gpu=uses_gpu,
        differences=tuple(differences),
        limits=request.limits,
        notes=tuple(changed),
    )


def _config(kept: Mapping[str, object], overrides: Sequence[str]) -> MasterConfig:
    if not overrides:
        return parse_tree(kept)
    with tempfile.TemporaryDirectory(prefix="nemo_rl_replay_") as folder:
        path = Path(folder) / "kept_config.yaml"
        path.write_text(json.dumps(kept), encoding="utf-8")
        # A resolved config names keys that others switch off: the loader says so without any override, too.
        before = _problems(path, ())
        problems = [line for line in _problems(path, overrides) if line not in before]
        if problems:
            raise ConfigError([line.removeprefix(f"{path}: ") for line in problems])
        recipe = compose(path)
        apply_overrides(recipe, overrides)
    return parse_tree(recipe.tree)


def _check_identity(config: MasterConfig, step: StepSnapshot) -> None:
    """Model, tokenizer and chat template are those of the run; data and reward are not read again."""
    policy, before = config.policy, step.run.identity
    if not before:
        return
    tokenizer = load_tokenizer(policy.tokenizer.name or policy.model_name, chat_template=policy.tokenizer.chat_template)
    now = tokenizer_identity(tokenizer, stop_ids=stop_token_ids(policy.model_name, tokenizer))
    now["model"] = model_digest(policy.model_name)
    changed = differences(before, now, allowed=config.checkpointing.allow_changed)
    if changed:
        raise ReplayProblem(
            f"step {step.number} was kept by a run with other {', '.join(changed)}: {policy.model_name} has changed; "
            f"restore it, or continue anyway with --set checkpointing.allow_changed=[{','.join(changed)}]",
            verdict=Verdict.USAGE,
        )


def _foreign_code(kept: Mapping[str, object]) -> list[str]:
    """`key: name` of what a replay would import from outside: parts as `module:name`, optimizers and schedulers."""
    found = []
    for section in ("loss_fn", "grpo", "policy"):
        for key, text in _texts(kept.get(section), section):
            is_part = PART.fullmatch(text) is not None and key.rpartition(".")[2] in ("name", "backend", "impl")
            is_path = IMPORT_KEYS.match(key) is not None and key.endswith(".name") and "." in text
            is_plan = key == PLAN_KEY
            if (is_part or is_path or is_plan) and re.split("[.:]", text)[0] not in TRUSTED_PACKAGES:
                found.append(f"{key}: {text!r:.200}")
    return found


def _texts(value: object, key: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, Mapping):
        for name, child in value.items():
            yield from _texts(child, f"{key}.{name}")
    elif isinstance(value, list):
        for child in value:
            yield from _texts(child, key)


def _problems(path: Path, overrides: Sequence[str]) -> list[str]:
    try:
        load_config(path, overrides, with_masked=True)
    except ConfigError as error:
        return error.problems
    return []


def _alone(policy: PolicyConfig) -> PolicyConfig:
    """Every parallel size 1."""
    dtensor = policy.dtensor_cfg.model_copy(
        update={"tensor_parallel_size": 1, "context_parallel_size": 1, "replicate_size": 1, "sequence_parallel": False}
    )
    megatron = policy.megatron_cfg.model_copy(
        update={
            "tensor_model_parallel_size": 1,
            "pipeline_model_parallel_size": 1,
            "context_parallel_size": 1,
            "expert_model_parallel_size": 1,
            "expert_tensor_parallel_size": None,
            "sequence_parallel": False,
            "num_layers_in_first_pipeline_stage": None,
            "num_layers_in_last_pipeline_stage": None,
        }
    )
    return policy.model_copy(update={"dtensor_cfg": dtensor, "megatron_cfg": megatron})


def _switched(policy: PolicyConfig, worker: Worker, *, one: bool) -> PolicyConfig:
    """Return the recipe for the other worker: its layout, and its Adam; the learning rates are the kept ones."""
    sizes = policy.parallel_sizes
    common = {"context_parallel_size": sizes.context, "sequence_parallel": sizes.sequence_parallel, "enabled": True}
    if worker == "megatron":
        megatron = MegatronConfig().model_copy(
            update={
                **common,
                "tensor_model_parallel_size": sizes.tensor,
                "optimizer": _to_megatron(policy.optimizer),
                "scheduler": MegatronSchedulerConfig(),
            }
        )
        off = policy.dtensor_cfg.model_copy(update={"enabled": False})
        return policy.model_copy(update={"dtensor_cfg": off, "megatron_cfg": megatron})
    if sizes.pipeline > 1 and not one:
        raise _unsupported("the DTensor worker has no pipeline; add --layout one")
    dtensor = DTensorConfig().model_copy(update={**common, "tensor_parallel_size": sizes.tensor})
    off_megatron = policy.megatron_cfg.model_copy(update={"enabled": False})
    return policy.model_copy(
        update={
            "dtensor_cfg": dtensor,
            "megatron_cfg": off_megatron,
            "optimizer": _to_torch(policy.megatron_cfg.optimizer),
            "scheduler": SchedulerConfig(),
        }
    )


def _to_megatron(given: OptimizerConfig) -> MegatronOptimizerConfig:
    settings = {**TORCH_ADAMW, **given.kwargs}
    unknown = settings.keys() - TORCH_ADAMW.keys()
    if given.name != ADAMW or unknown:
        what = f"{given.name}" + (f" with {sorted(unknown)}" if unknown else "")
        raise _unsupported(f"policy.optimizer: the Megatron worker has {ADAMW}, got {what}")
    betas = settings["betas"]
    assert isinstance(betas, list), "betas are two numbers"
    return MegatronOptimizerConfig.model_validate(
        {
            "lr": settings["lr"],
            "adam_beta1": betas[0],
            "adam_beta2": betas[1],
            "adam_eps": settings["eps"],
            "weight_decay": settings["weight_decay"],
        }
    )


def _to_torch(given: MegatronOptimizerConfig) -> OptimizerConfig:
    if given.optimizer != "adam":
        raise _unsupported(f"policy.megatron_cfg.optimizer: the replay knows adam alone, got {given.optimizer!r}")
    if given.weight_decay and not given.decay_norms_and_biases:
        raise _unsupported("policy.megatron_cfg.optimizer.decay_norms_and_biases: torch's AdamW decays all weights")
    betas = [given.adam_beta1, given.adam_beta2]
    kwargs = {"lr": given.lr, "betas": betas, "eps": given.adam_eps, "weight_decay": given.weight_decay}
    return OptimizerConfig(name=ADAMW, kwargs=kwargs)


def _unsupported(what: str) -> ReplayProblem:
    return ReplayProblem(f"this run cannot be replayed with the other worker: {what}", verdict=Verdict.UNSUPPORTED)
