"""`plan_recipe`: the plan of a recipe, or its refusal with the cheapest single change that would make it fit.

Candidates are planned one by one, cheapest first: fewer rows decoded together and a smaller token cap (the same work in
more passes), recomputation (about a third more arithmetic), other splits over the same GPUs (more communication), state
in the node's memory, fewer engines (slower rollouts), more room in the data plane, more nodes. Of one kind the smallest
change comes first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from nemo_rl.cluster.known_models import planned_model_config
from nemo_rl.cluster.plan.plan import RunPlan, make_plan
from nemo_rl.cluster.plan.report import refusal
from nemo_rl.cluster.plan.setting import GPU, GPUS, Model, PlanSetting, gpu_named
from nemo_rl.config.distillation import teacher_config
from nemo_rl.config.load import load_config
from nemo_rl.config.schema import MasterConfig
from nemo_rl.errors import ConfigError, ResourceError

__all__ = ["PlanChange", "PlanRequest", "changes_of", "cheapest_change", "nodes_overrides", "plan_recipe"]

FACTORS = (2, 4, 8)
CPU_OFFLOADED = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanChange:
    """One change, as overrides of the command line."""

    overrides: tuple[str, ...]
    cost: str
    """The cost of the change, in a word or two."""


def cheapest_change(plan: RunPlan, replan: Callable[[tuple[str, ...]], RunPlan]) -> tuple[PlanChange, RunPlan] | None:
    """Return the first candidate that fits; None where none does.

    Args:
        replan: of the same recipe with further overrides.
    """
    for change in changes_of(plan.setting):
        try:
            found = replan(change.overrides)
        except ConfigError:
            # The rules of the recipe, or the model, do not allow it.
            continue
        if found.fits:
            return change, found
    return None


def changes_of(setting: PlanSetting) -> Iterator[PlanChange]:
    """Yield all candidates, the cheapest first."""
    yield from _smaller_batches(setting)
    yield from _recomputation(setting)
    yield from _splits(setting)
    yield from _offloads(setting)
    yield from _fewer_engines(setting)
    yield from _more_room(setting)
    nodes = setting.config.cluster.num_nodes
    for factor in FACTORS:
        yield PlanChange(overrides=nodes_overrides(nodes * factor), cost="more machines")


def nodes_overrides(count: int) -> tuple[str, ...]:
    """Return the overrides for so many machines; several are nodes of a running Ray."""
    return (f"cluster.num_nodes={count}", *(["cluster.address=auto"] if count > 1 else []))


def _smaller_batches(setting: PlanSetting) -> Iterator[PlanChange]:
    policy = setting.policy
    most = policy.generation.max_batch_size
    while most > 1:
        most //= 2
        yield PlanChange(overrides=(f"policy.generation.max_batch_size={most}",), cost="more rounds of decoding")
    for name, section in (
        ("sequence_packing", policy.sequence_packing),
        ("dynamic_batching", policy.dynamic_batching),
    ):
        if not section.enabled:
            continue
        train, logprob = section.train_mb_tokens, section.logprob_mb_tokens
        floor = policy.max_total_sequence_length
        while max(train, logprob) > floor:
            train, logprob = max(floor, train // 2), max(floor, logprob // 2)
            caps = (f"policy.{name}.train_mb_tokens={train}", f"policy.{name}.logprob_mb_tokens={logprob}")
            yield PlanChange(overrides=caps, cost="more microbatches")
    if not policy.sequence_packing.enabled and not policy.dynamic_batching.enabled:
        rows = policy.train_micro_batch_size
        while rows > 1:
            rows //= 2
            yield PlanChange(overrides=(f"policy.train_micro_batch_size={rows}",), cost="more microbatches")


def _recomputation(setting: PlanSetting) -> Iterator[PlanChange]:
    section = setting.policy.parallel_section
    is_on = setting.policy.megatron_cfg if setting.is_megatron else setting.policy.dtensor_cfg
    if not is_on.activation_checkpointing:
        yield PlanChange(overrides=(f"{section}.activation_checkpointing=true",), cost="a third more arithmetic")


def _splits(setting: PlanSetting) -> Iterator[PlanChange]:
    sizes, section = setting.policy.parallel_sizes, setting.policy.parallel_section
    sequence = f"{section}.sequence_parallel=true"
    if sizes.tensor > 1 and not sizes.sequence_parallel:
        yield PlanChange(overrides=(sequence,), cost="other communication")
    model = "_model" if setting.is_megatron else ""
    axes = [("context_parallel_size", sizes.context), (f"tensor{model}_parallel_size", sizes.tensor)]
    if setting.is_megatron:
        axes = [("expert_model_parallel_size", sizes.expert), *axes, ("pipeline_model_parallel_size", sizes.pipeline)]
        if sizes.expert_tensor > 1:
            one = (f"{section}.expert_tensor_parallel_size=1",)
            yield PlanChange(overrides=one, cost="other communication")
    for name, size in axes:
        for factor in FACTORS:
            more: tuple[str, ...] = (f"{section}.{name}={size * factor}",)
            if name.startswith("tensor") and sizes.tensor == 1:
                more += (sequence,)
            yield PlanChange(overrides=more, cost="more communication")


def _offloads(setting: PlanSetting) -> Iterator[PlanChange]:
    if not setting.is_megatron:
        if not setting.policy.dtensor_cfg.cpu_offload:
            yield PlanChange(
                overrides=("policy.dtensor_cfg.cpu_offload=true",), cost="weights cross to the GPU each pass"
            )
        return
    if not setting.policy.megatron_cfg.optimizer.optimizer_cpu_offload:
        optimizer = "policy.megatron_cfg.optimizer"
        both = (f"{optimizer}.optimizer_cpu_offload=true", f"{optimizer}.optimizer_offload_fraction={CPU_OFFLOADED}")
        yield PlanChange(overrides=both, cost="the optimizer steps on CPUs")


def _fewer_engines(setting: PlanSetting) -> Iterator[PlanChange]:
    count = setting.policy.generation.num_replicas
    while count > 1:
        count //= 2
        yield PlanChange(overrides=(f"policy.generation.num_replicas={count}",), cost="slower rollouts")


def _more_room(setting: PlanSetting) -> Iterator[PlanChange]:
    plane = setting.config.active_data_plane
    for factor in FACTORS:
        if plane.starts_mooncake:
            room = plane.mooncake.segment_bytes * factor
            yield PlanChange(overrides=(f"data_plane.mooncake.segment_bytes={room}",), cost="memory of the node")
        if plane.storage_capacity.bytes is not None:
            room = plane.storage_capacity.bytes * factor
            yield PlanChange(overrides=(f"data_plane.storage_capacity.bytes={room}",), cost="memory of the node")


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRequest:
    """The request of one plan, as the command line gives it."""

    recipe: Path
    overrides: tuple[str, ...] = ()
    gpu: str | None = None
    nodes: int | None = None
    model_config: Path | None = None


def plan_recipe(request: PlanRequest) -> tuple[RunPlan, ResourceError | None]:
    """Return the plan, and what to raise where it does not fit.

    Raises:
        ConfigError: the recipe is wrong, or cannot run in its layout; the GPU is not known.
        ModelFolderError: the model is neither here nor known.
    """
    overrides = request.overrides + (() if request.nodes is None else nodes_overrides(request.nodes))
    config = load_config(request.recipe, overrides)
    gpu = _gpu(request, config)
    model = Model(planned_model_config(config.policy.model_name, given=request.model_config))

    taught_by = config.loss_fn.distillation.teacher.model_name
    teacher = None if taught_by is None else Model(planned_model_config(taught_by, given=None))

    def setting_of(config: MasterConfig) -> PlanSetting:
        if teacher is None:
            return PlanSetting(config=config, model=model, gpu=gpu)
        taught = PlanSetting(config=teacher_config(config), model=teacher, gpu=gpu)
        return PlanSetting(config=config, model=model, gpu=gpu, teacher=taught)

    def replan(further: tuple[str, ...]) -> RunPlan:
        return make_plan(setting_of(load_config(request.recipe, (*overrides, *further))))

    plan = make_plan(setting_of(config))
    if plan.fits:
        return plan, None
    found = cheapest_change(plan, replan)
    change = None if found is None else (" ".join(found[0].overrides), found[0].cost)
    return plan, ResourceError(refusal(plan, change))


def _gpu(request: PlanRequest, config: MasterConfig) -> GPU | None:
    count = config.cluster.gpus_per_node
    if request.gpu is None:
        if count:
            raise ConfigError(
                f"--gpu: cluster.gpus_per_node is {count}; expected the name of the GPU, one of {', '.join(GPUS)}"
            )
        return None
    found = gpu_named(request.gpu)
    if not count:
        raise ConfigError(
            f"--gpu: expected a recipe with GPUs, but cluster.gpus_per_node is 0, so {found.name} would not be used; "
            "set it, or leave --gpu out"
        )
    return found
