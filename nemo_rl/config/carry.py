"""`carry_optimizer`: a recipe whose worker was switched by a later layer keeps its optimizer and its schedule.

A parent has `policy.optimizer` and `policy.scheduler`, which the DTensor worker reads; a child or the command line
switches to the Megatron worker and says nothing of its optimizer; or the other way round. Called by the loader.
What that layer, or a later one, sets of the section that is read goes before what is carried, key by key.
Invariant: the same numbers, or a line that says why not; null drops what the parent has set.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from nemo_rl.config.compose import Layer, Recipe
from nemo_rl.config.dtensor import OptimizerConfig, SchedulerConfig
from nemo_rl.config.megatron import MegatronOptimizerConfig
from nemo_rl.config.schema_walk import default_tree, lookup

__all__ = ["carry_optimizer"]

_SWITCH = ("policy", "megatron_cfg", "enabled")
_OPTIMIZER, _SCHEDULER = ("policy", "optimizer"), ("policy", "scheduler")
_MEGATRON_OPTIMIZER = ("policy", "megatron_cfg", "optimizer")
_MEGATRON_SCHEDULER = ("policy", "megatron_cfg", "scheduler")
_ADAMW = ("AdamW", "torch.optim.AdamW", "torch.optim.adamw.AdamW")
_PLAIN = {"lr": "lr", "weight_decay": "weight_decay", "eps": "adam_eps"}
"""Arguments of torch's AdamW by their names in `policy.megatron_cfg.optimizer`; the defaults of both are the same."""


def carry_optimizer(recipe: Recipe) -> list[str]:
    """Moves what an earlier layer has set to the worker that trains; returns a line for each part that it cannot."""
    is_megatron = lookup(recipe.tree, _SWITCH)[1] is True
    # Both on, or both off, is refused by a rule.
    if (lookup(recipe.tree, ("policy", "dtensor_cfg", "enabled"))[1] is not False) == is_megatron:
        return []
    switch = recipe.layer_of(_SWITCH)
    if is_megatron:
        return [*_to_megatron(recipe, switch)]
    return [*_to_dtensor(recipe, switch)]


def _given(recipe: Recipe, path: tuple[str, ...], switch: Layer | None, *, over: tuple[str, ...]) -> Any:
    """What a layer before the switch has set in a section; None where that layer, or one before it, has set the section
    that is read, `over`, too."""
    value, setter, reader = lookup(recipe.tree, path)[1], recipe.layer_of(path), recipe.layer_of(over)
    if switch is None or setter is None or setter.order >= switch.order or _is_default(recipe, path):
        return None
    if reader is not None and reader.order > setter.order:
        return value
    is_read_section_set = reader is not None and reader.order == setter.order
    return None if is_read_section_set or not _is_default(recipe, over) else value


def _set_later(recipe: Recipe, section: tuple[str, ...], *, than: tuple[str, ...]) -> set[str]:
    """Keys of a section that a later layer has set than the one that set the section `than`."""
    setter, value = recipe.layer_of(than), lookup(recipe.tree, section)[1]
    if setter is None or not isinstance(value, Mapping):
        return set()
    layers = {name: recipe.layer_of((*section, name)) for name in value}
    return {name for name, layer in layers.items() if layer is not None and layer.order > setter.order}


def _is_default(recipe: Recipe, path: tuple[str, ...]) -> bool:
    """Whether a section has nothing but defaults: the base recipe spells all of them out."""
    value, default = lookup(recipe.tree, path)[1], lookup(default_tree(), path)[1]
    if not isinstance(value, Mapping):
        return not value
    return isinstance(default, Mapping) and all(default.get(name) == each for name, each in value.items())


def _to_megatron(recipe: Recipe, switch: Layer | None) -> Iterator[str]:
    optimizer = _given(recipe, _OPTIMIZER, switch, over=_MEGATRON_OPTIMIZER)
    kwargs: Any = optimizer.get("kwargs") or OptimizerConfig().kwargs if isinstance(optimizer, Mapping) else None
    own = _set_later(recipe, _MEGATRON_OPTIMIZER, than=_OPTIMIZER)
    if isinstance(optimizer, Mapping) and isinstance(kwargs, Mapping) and "optimizer" not in own:
        betas = kwargs.get("betas") or []
        betas = betas if isinstance(betas, list) else [betas]
        unknown = set(kwargs) - {*_PLAIN, "betas"}
        is_known = optimizer.get("name", _ADAMW[1]) in _ADAMW and not unknown and len(betas) in (0, 2)
        if not is_known and "lr" not in own:
            what = ", ".join([str(optimizer.get("name", "AdamW")), *sorted(unknown)])
            yield _lost(recipe, _OPTIMIZER, _MEGATRON_OPTIMIZER, f"{what} has no counterpart there")
        elif is_known:
            carried = {_PLAIN[name]: value for name, value in kwargs.items() if name in _PLAIN}
            carried |= dict(zip(("adam_beta1", "adam_beta2"), betas, strict=False))
            _move(recipe, _OPTIMIZER, _MEGATRON_OPTIMIZER, carried, own=own)
    scheduler = _given(recipe, _SCHEDULER, switch, over=_MEGATRON_SCHEDULER)
    if scheduler is None:
        return
    own = _set_later(recipe, _MEGATRON_SCHEDULER, than=_SCHEDULER)
    if own and (not isinstance(scheduler, Mapping) or "lr_decay_style" in own):
        return
    if not isinstance(scheduler, Mapping) or scheduler.get("phases") or "." in str(scheduler.get("name", "")):
        yield _lost(recipe, _SCHEDULER, _MEGATRON_SCHEDULER, "torch's schedulers have no counterpart there")
        return
    _carry_shape(recipe, scheduler, own=own)


def _carry_shape(recipe: Recipe, scheduler: Mapping[str, Any], *, own: set[str]) -> None:
    """The first of W steps of warm-up has 1/W of the rate with the DTensor worker, and what is asked for with Megatron:
    the rates of a warm-up are the same, those of a decay differ by one step of its length."""
    default, layer = SchedulerConfig(), _layer(recipe, _SCHEDULER)
    peak = lookup(recipe.tree, (*_MEGATRON_OPTIMIZER, "lr"))[1] or MegatronOptimizerConfig().lr
    style, factor = scheduler.get("name", default.name), scheduler.get("min_factor", default.min_factor)
    warmup, end = scheduler.get("warmup_steps", default.warmup_steps), scheduler.get("decay_steps")
    if not all(isinstance(number, (int, float)) for number in (peak, factor, warmup)):
        # The schema says what is wrong with them.
        return
    shape = {"lr_decay_style": style}
    if warmup > 1 and not own & {"lr_warmup_iters", "lr_warmup_fraction", "lr_warmup_init"}:
        shape |= {"lr_warmup_iters": warmup - 1, "lr_warmup_init": peak / warmup}
    if style != default.name:
        shape |= {} if end is None else {"lr_decay_iters": end}
        if not lookup(recipe.tree, (*_MEGATRON_OPTIMIZER, "min_lr"))[1]:
            recipe.set((*_MEGATRON_OPTIMIZER, "min_lr"), peak * factor, layer=layer)
    _move(recipe, _SCHEDULER, _MEGATRON_SCHEDULER, shape, own=own)


def _to_dtensor(recipe: Recipe, switch: Layer | None) -> Iterator[str]:
    """Megatron's section says more than torch's AdamW knows, so that it is left to somebody."""
    for section, kept in ((_MEGATRON_OPTIMIZER, _OPTIMIZER), (_MEGATRON_SCHEDULER, _SCHEDULER)):
        if _given(recipe, section, switch, over=kept) is not None:
            yield _lost(recipe, section, kept, "the DTensor worker does not read it")


def _lost(recipe: Recipe, section: tuple[str, ...], kept: tuple[str, ...], why: str) -> str:
    name, drop = ".".join(section), "~" if section[1] == "megatron_cfg" else ""
    return (
        f"{recipe.source_of(section)}: {name}: would be lost with the worker that {'.'.join(_SWITCH)} selects: {why}; "
        f"set {'.'.join(kept)}, or drop it with {drop}{name}{'' if drop else '=null'}"
    )


def _move(
    recipe: Recipe, section: tuple[str, ...], to: tuple[str, ...], values: Mapping[str, Any], *, own: set[str]
) -> None:
    """
    Args:
        own: names of `to` that keep their values.
    """
    layer = _layer(recipe, section)
    for name, value in values.items():
        if name not in own:
            recipe.set((*to, name), value, layer=layer)
    recipe.tree[section[0]].pop(section[1])
    recipe.mark(section, None)


def _layer(recipe: Recipe, section: tuple[str, ...]) -> Layer:
    return recipe.layer_of(section) or Layer(order=0, name=recipe.file)
