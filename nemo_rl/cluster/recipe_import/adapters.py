"""Keys of adapters: NeMo-RL's `lora_cfg` and `peft`, verl's of its model section, TRL's and prime-rl's.

Of recipes of verl, TRL and prime-rl these keys, and those of turns, alone are converted. Called by `convert_sections`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from nemo_rl.cluster.recipe_import.keys import (
    Fate,
    Given,
    KeyOutcome,
    Table,
    becomes,
    lacks,
    no_effect,
    not_supported,
    refused,
    with_others,
)
from nemo_rl.config.lora import ALL_LINEAR

__all__ = ["ADAPTERS", "convert_adapters"]

HERE = "policy.lora"
BECOMES = "becomes policy.lora"
BELONGS = "belongs to adapters, which are off there"
EXCLUDED = "layers are named by policy.lora.targets alone; list those that are left"
OTHER_ADAPTERS = "adapters of A and B alone are here"
QUANTISED = "the base is trained beside in full precision; quantised weights are not here"
START = "A starts uniform or normal (policy.lora.init), B at 0"
SPEED = "a matter of speed that has no switch here"
FUSED: Mapping[str, tuple[str, ...]] = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
    "experts": ("experts.gate_up_proj", "experts.down_proj"),
}
"""Fused layers of megatron-core, and prime-rl's name for all experts -> the layers of Hugging Face models."""
WILDCARD = "*"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Dialect:
    """The names by which a framework asks for adapters, and what it takes where a recipe does not say."""

    section: str
    """Dotted path of its keys; empty for keys at the top."""
    defaults: tuple[int, float, float]
    """Rank, alpha and dropout."""
    switch: str | None = None
    """Key that switches adapters on; None: the section does so by being there, or `rank` by being above 0."""
    rank: str = "rank"
    alpha: str = "alpha"
    dropout: str = "dropout"
    targets: str = "target_modules"
    rslora: str = ""
    excluded: str = ""
    adapter: str = ""
    merges: str = ""
    parameters: str = ""

    def key(self, name: str) -> str:
        return f"{self.section}.{name}" if self.section else name

    def is_on(self, given: Given) -> bool:
        if self.switch is not None:
            return bool(given.get(self.key(self.switch)))
        return bool(given.get(self.key(self.rank), self.defaults[0] if self.section and self._is_there(given) else 0))

    def _is_there(self, given: Given) -> bool:
        return bool(given.section(self.section))


_DTENSOR = _Dialect(
    section="policy.dtensor_cfg.lora_cfg",
    switch="enabled",
    rank="dim",
    excluded="exclude_modules",
    defaults=(8, 32.0, 0.0),
)
_MEGATRON = _Dialect(
    section="policy.megatron_cfg.peft",
    switch="enabled",
    rank="dim",
    excluded="exclude_modules",
    defaults=(32, 32.0, 0.0),
)
_VERL_MODEL = "actor_rollout_ref.model"
_VERL = _Dialect(
    section=_VERL_MODEL,
    rank="lora_rank",
    alpha="lora_alpha",
    dropout="lora_dropout",
    excluded="exclude_modules",
    adapter="lora_adapter_path",
    # Its section is there in every recipe: the rank decides.
    defaults=(0, 16.0, 0.0),
)
_VERL_MEGATRON = _Dialect(
    section=f"{_VERL_MODEL}.lora",
    excluded="exclude_modules",
    adapter="adapter_path",
    merges="merge",
    defaults=(0, 32.0, 0.0),
)
_TRL = _Dialect(
    section="",
    switch="use_peft",
    rank="lora_r",
    alpha="lora_alpha",
    dropout="lora_dropout",
    targets="lora_target_modules",
    parameters="lora_target_parameters",
    rslora="use_rslora",
    defaults=(16, 32.0, 0.05),
)
_PRIME, _PRIME_TRAINER = (
    _Dialect(
        section=section,
        defaults=(16, 32.0, 0.0),
    )
    for section in ("model.lora", "trainer.model.lora")
)
DIALECTS = (_DTENSOR, _MEGATRON, _VERL, _VERL_MEGATRON, _TRL, _PRIME, _PRIME_TRAINER)


def _rows(dialect: _Dialect) -> Iterator[str]:
    names = (dialect.switch, dialect.rank, dialect.alpha, dialect.dropout, dialect.targets, dialect.rslora)
    others = (dialect.excluded, dialect.adapter, dialect.merges, dialect.parameters)
    return (dialect.key(name) for name in (*names, *others) if name)


ADAPTERS: Table = {
    **{key: with_others(BECOMES) for dialect in DIALECTS for key in _rows(dialect)},
    "policy.dtensor_cfg.lora_cfg": no_effect("an empty section asks for nothing"),
    "policy.dtensor_cfg.lora_cfg.match_all_linear": with_others(BECOMES),
    "policy.dtensor_cfg.lora_cfg.dropout_position": no_effect("what goes into A is dropped"),
    "policy.dtensor_cfg.lora_cfg.lora_A_init": no_effect(START),
    "policy.dtensor_cfg.lora_cfg.lora_dtype": no_effect("adapters are trained in float32"),
    "policy.dtensor_cfg.lora_cfg.use_triton": no_effect(SPEED),
    "policy.dtensor_cfg.lora_cfg.use_dora": refused(OTHER_ADAPTERS),
    "policy.dtensor_cfg.lora_cfg.*": no_effect("belongs to lora_cfg.enabled"),
    "policy.megatron_cfg.peft": no_effect("an empty section asks for nothing"),
    "policy.megatron_cfg.peft.dropout_position": no_effect("what goes into A is dropped"),
    "policy.megatron_cfg.peft.lora_A_init_method": no_effect(START),
    "policy.megatron_cfg.peft.lora_B_init_method": no_effect(START),
    "policy.megatron_cfg.peft.*": no_effect("belongs to peft.enabled"),
    "checkpointing.is_peft": no_effect("a run with policy.lora saves adapters"),
    f"{_VERL_MODEL}.lora.type": not_supported("peft's layers are here", off=(None, "lora", "canonical_lora")),
    f"{_VERL_MODEL}.lora.*": no_effect(START),
    "actor_rollout_ref.rollout.layered_summon": no_effect("weights are gathered one at a time"),
    "actor_rollout_ref.rollout.load_format": no_effect("engines get the base once, from the trainer"),
    "lora_task_type": no_effect("the model is a causal language model"),
    "lora_modules_to_save": refused(OTHER_ADAPTERS),
    "use_dora": refused(OTHER_ADAPTERS),
    "load_in_4bit": refused(QUANTISED),
    "load_in_8bit": refused(QUANTISED),
    "model.lora.modules_to_save": refused(OTHER_ADAPTERS, off=(None, [])),
    "trainer.model.lora.modules_to_save": refused(OTHER_ADAPTERS, off=(None, [])),
}
"""Rules by key."""


def convert_adapters(given: Given) -> Iterator[KeyOutcome]:
    """Convert the adapters of the first framework that asks for them."""
    for dialect in DIALECTS:
        if dialect.is_on(given) and not _is_of_other_worker(dialect, given):
            yield from _converted(dialect, given)
            return
    for dialect in DIALECTS:
        for key in _rows(dialect):
            if given.has(key) and (dialect.section or given.has("use_peft")):
                yield KeyOutcome(key=key, fate=Fate.IGNORED, why=BELONGS)


def _is_of_other_worker(dialect: _Dialect, given: Given) -> bool:
    """Return whether the keys are of NeMo-RL's worker that does not train."""
    is_megatron = bool(given.get("policy.megatron_cfg.enabled"))
    return (dialect is _DTENSOR and is_megatron) or (dialect is _MEGATRON and not is_megatron)


def _converted(dialect: _Dialect, given: Given) -> Iterator[KeyOutcome]:
    switch = dialect.key(dialect.switch or dialect.rank)
    yield becomes(switch if dialect.switch else "", f"{HERE}.enabled", True, "adapters are trained there")
    for name, here, default in zip(
        (dialect.rank, dialect.alpha, dialect.dropout), ("rank", "alpha", "dropout"), dialect.defaults, strict=True
    ):
        key = dialect.key(name)
        if given.has(key):
            yield becomes(key, f"{HERE}.{here}", given.get(key), "")
        else:
            yield becomes("", f"{HERE}.{here}", default, f"the default of {key}")
    if dialect.rslora and given.has(dialect.key(dialect.rslora)):
        key = dialect.key(dialect.rslora)
        yield becomes(key, f"{HERE}.rslora", bool(given.get(key)), "")
    if dialect.adapter and given.get(dialect.key(dialect.adapter)):
        key = dialect.key(dialect.adapter)
        yield becomes(key, f"{HERE}.adapter", given.get(key), "")
    if dialect.merges and given.get(dialect.key(dialect.merges)):
        yield becomes(dialect.key(dialect.merges), f"{HERE}.serve", "merged", "weights are merged for the engines")
    if dialect.excluded and given.get(dialect.key(dialect.excluded)):
        yield lacks(dialect.key(dialect.excluded), EXCLUDED, must_decide=True)
    yield from _targets(dialect, given)


def _targets(dialect: _Dialect, given: Given) -> Iterator[KeyOutcome]:
    key = dialect.key(dialect.targets)
    named, everything = given.get(key), dialect.key("match_all_linear")
    if dialect is _DTENSOR and given.has(everything):
        if given.get(everything) or not named:
            yield becomes(everything, f"{HERE}.targets", ALL_LINEAR, "")
            return
        yield KeyOutcome(key=everything, fate=Fate.MAPPED, why="the targets are named")
    parameters = given.get(dialect.key(dialect.parameters)) if dialect.parameters else None
    if named in (None, [], ALL_LINEAR, "all_linear") and not parameters:
        yield becomes(key if given.has(key) else "", f"{HERE}.targets", ALL_LINEAR, "all but the head and routers")
        return
    names = [named] if isinstance(named, str) else list(named or ())
    found = [layer for name in names for layer in FUSED.get(str(name), (str(name).removeprefix("*."),))]
    wild = [name for name in found if WILDCARD in name]
    if wild:
        yield lacks(key, f"{wild[0]!r} is a pattern; list ends of names such as q_proj", must_decide=True)
        return
    yield becomes(key, f"{HERE}.targets", [*dict.fromkeys([*found, *(parameters or ())])], "")
    if parameters:
        yield KeyOutcome(key=dialect.key(dialect.parameters), fate=Fate.MAPPED, why="listed among policy.lora.targets")
