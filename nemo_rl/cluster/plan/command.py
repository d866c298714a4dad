"""`plan_recipe`: from what a person asks to a plan, or to the refusal of a recipe that does not fit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from nemo_rl.cluster.known_models import planned_model_config
from nemo_rl.cluster.plan.gpus import GPU, GPUS, gpu_named
from nemo_rl.cluster.plan.plan import Plan, make_plan
from nemo_rl.cluster.plan.report import refusal
from nemo_rl.cluster.plan.search import cheapest_change, nodes_overrides
from nemo_rl.cluster.plan.setting import Model, Setting
from nemo_rl.config.load import load_config
from nemo_rl.config.schema import MasterConfig
from nemo_rl.errors import ConfigError, ResourceError

__all__ = ["PlanRequest", "plan_recipe"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRequest:
    """What is asked for."""

    recipe: Path
    overrides: tuple[str, ...] = ()
    gpu: str | None = None
    nodes: int | None = None
    model_config: Path | None = None


def plan_recipe(request: PlanRequest) -> tuple[Plan, ResourceError | None]:
    """The plan, and what to raise where it does not fit.

    Raises:
        ConfigError: the recipe is wrong, or cannot run in its layout; the GPU is not known.
        ModelFolderError: the model is neither here nor known.
    """
    overrides = request.overrides + (() if request.nodes is None else nodes_overrides(request.nodes))
    config = load_config(request.recipe, overrides)
    gpu = _gpu(request, config)
    model = Model(planned_model_config(config.policy.model_name, given=request.model_config))

    def replan(further: tuple[str, ...]) -> Plan:
        changed = load_config(request.recipe, (*overrides, *further))
        return make_plan(Setting(config=changed, model=model, gpu=gpu))

    plan = make_plan(Setting(config=config, model=model, gpu=gpu))
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
