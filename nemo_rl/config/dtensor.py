"""Settings of the DTensor worker, its optimizer and its scheduler."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, NonNegativeInt, PositiveInt, model_validator
from pydantic_core import PydanticCustomError

from nemo_rl.config.base import EnvVars, Section

__all__ = ["Choice", "DTensorConfig", "OptimizerConfig", "Recomputation", "SchedulerConfig", "SchedulerPhase"]


def _import_path(text: str) -> str:
    parts = text.replace(":", ".", 1).split(".")
    if len(parts) < 2 or not all(map(str.isidentifier, parts)):
        raise PydanticCustomError("import_path", "module:name, such as my_package.plans:PLAN")
    return text


ImportPath = Annotated[str, AfterValidator(_import_path)]
"""`module:name` or `module.name`."""


def _mode_of(given: object) -> object:
    return {True: "full", False: "none"}[given] if isinstance(given, bool) else given


def _word_of(given: object) -> object:
    """Return the word that YAML takes for a switch."""
    return {True: "on", False: "off"}[given] if isinstance(given, bool) else given


Recomputation = Annotated[Literal["none", "full", "selective"], BeforeValidator(_mode_of)]

Choice = Annotated[Literal["auto", "on", "off"], BeforeValidator(_word_of)]
"""YAML reads `on` and `off` as true and false."""


class DTensorConfig(Section):
    """The DTensor worker: FSDP2 over data x context parallel ranks, with tensor parallelism."""

    enabled: bool = True
    """Train with it; false where `policy.megatron_cfg.enabled` is true."""
    tensor_parallel_size: PositiveInt = 1
    """Ranks that share every weight matrix, and the experts of a mixture."""
    context_parallel_size: PositiveInt = 1
    """Ranks that share every sequence."""
    sequence_parallel: bool = False
    """Split activations between the blocks over the tensor-parallel ranks; needs `tensor_parallel_size` above 1."""
    custom_parallel_plan: dict[str, str] | ImportPath | None = None
    """Module pattern (`model.layers.*.mlp.up_proj`) -> style (`colwise`, `rowwise`, ...), or where such a dictionary is
    imported from (`my_package.plans:PLAN`, `my_package.plans.PLAN`); null takes the model's."""
    cpu_offload: bool = False
    """Keep weights, gradients and optimizer state on the CPU and move each layer to the GPU when it runs."""
    activation_checkpointing: Recomputation = "none"
    """Activations that the backward pass computes again: `full` each layer from its input; `selective` each layer but
    its matrix products and attention; `none` nothing. true and false mean `full` and `none`."""
    compile: Choice = "auto"
    """Run each decoder layer through `torch.compile`: fewer and larger kernels, after a first step that takes a minute
    longer; numbers differ in the last bits. `auto` does so on CUDA where tensor and context parallelism, router
    replay and `policy.deterministic` are off and a small model of the same class compiles when the worker starts, and
    never on a CPU."""
    gradient_accumulation: Literal["sharded", "whole", "auto"] = "sharded"
    """Sum of gradients over microbatches: `sharded` reduces them after each one, so that a rank holds its part alone;
    `whole` reduces them once, after the last, and holds 4 bytes per trained parameter meanwhile, for slow networks;
    `auto` is whole on GPUs that have room for it by the sum of `nemo-rl plan`."""
    env_vars: EnvVars = {}
    """Variables of the policy workers' processes; they win over `cluster.env_vars`."""


class OptimizerConfig(Section):
    """An optimizer of the DTensor worker by import path; null where `policy.megatron_cfg.enabled` is true."""

    name: str = "torch.optim.AdamW"
    """`module.Class` of a torch optimizer."""
    kwargs: dict[str, float | bool | int | list[float]] = {"lr": 1e-6, "weight_decay": 0.01}
    """Arguments of the optimizer; `lr` is the peak that the scheduler's factor multiplies."""


class SchedulerPhase(Section):
    """One torch scheduler of a chain."""

    name: str
    """`module.Class` of a torch scheduler, such as `torch.optim.lr_scheduler.LinearLR`."""
    kwargs: dict[str, float | bool | int | str | list[float]] = {}
    """Arguments of the scheduler besides the optimizer."""


class SchedulerConfig(Section):
    """Learning rate of the DTensor worker as a factor of the optimizer's `lr`, advanced once per GRPO step.

    Null where `policy.megatron_cfg.enabled` is true. A list of `{name, kwargs}`, one of them `{milestones}`, is taken
    for `phases` and `milestones`.
    """

    name: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after the warm-up: flat, a straight line or half a cosine down to `min_factor`."""
    warmup_steps: NonNegativeInt = 0
    """Steps of linear warm-up from zero."""
    decay_steps: PositiveInt | None = None
    """Step at which `min_factor` is reached; null uses `grpo.max_num_steps`."""
    min_factor: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Factor at the end of the decay and from there on."""
    phases: list[SchedulerPhase] = []
    """Torch schedulers by import path, one by one, in place of the shape above; `scheduler: [...]` means this."""
    milestones: list[PositiveInt] = []
    """Steps at which the second, third, ... phase begins."""

    @model_validator(mode="before")
    @classmethod
    def _from_list(cls, given: object) -> object:
        """Accept the forms that torch users write: a list of schedulers with an element of milestones, or one
        scheduler."""
        if isinstance(given, dict) and "." in str(given.get("name", "")):
            phase = {key: value for key, value in given.items() if key in SchedulerPhase.model_fields}
            return {**{key: value for key, value in given.items() if key not in phase}, "phases": [phase]}
        if not isinstance(given, list):
            return given
        chain: dict[str, object] = {"phases": [part for part in given if not _is_milestones(part)]}
        for part in given:
            chain |= part if _is_milestones(part) else {}
        return chain


def _is_milestones(part: object) -> bool:
    return isinstance(part, dict) and set(part) == {"milestones"}
