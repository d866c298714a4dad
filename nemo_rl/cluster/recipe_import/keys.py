"""The keys of a NeMo-RL recipe: how they are read, and `KeyRule`, the record of what becomes of one key.

`defaults:`, `_override_` and interpolations are read as in recipes of this library, but parents may be missing. Where
the exemplar recipe that all others inherit from is missing, its values of August 2026 stand in for it.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from nemo_rl.config.compose import Layer, compose
from nemo_rl.config.interpolate import resolve_interpolations
from nemo_rl.config.schema_walk import lookup
from nemo_rl.errors import ConfigError, boundary

__all__ = [
    "EXEMPLAR",
    "EXEMPLAR_NAME",
    "MANDATORY",
    "MANY",
    "OFF",
    "Fate",
    "Given",
    "KeyOutcome",
    "KeyRule",
    "Table",
    "becomes",
    "lacks",
    "moved",
    "no_effect",
    "not_supported",
    "read_recipe",
    "refused",
    "same",
    "with_others",
]

MANY = "*"
"""Ends a key of a table that stands for all keys that begin so."""
OFF: tuple[object, ...] = (None, False)
"""Values that ask for nothing."""


class Fate(StrEnum):
    """The fate of a key."""

    SAME = "same"
    """The same key with the same value; or switched off there, and not here at all."""
    MAPPED = "mapped"
    """Another key, or another value."""
    NOT_SUPPORTED = "not supported"
    IGNORED = "without effect"
    """The key has no effect here."""
    UNKNOWN = "unknown"
    """Neither NeMo-RL's nor ours."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyRule:
    """The rule for one key of NeMo-RL."""

    fate: Fate
    to: str = ""
    """Key here; empty for the same one."""
    why: str = ""
    """The reason, or the meaning of the value here, for people."""
    off: tuple[object, ...] = ()
    """Values of an unsupported key that ask for nothing."""
    convert: Callable[[object], object] | None = None
    """Value there -> value here; None takes it as it is."""
    is_with_others: bool = False
    """Several keys are converted together, see `sections`."""
    must_decide: bool = False
    """True where something else is trained without this unsupported key, so that the import ends with exit code 2."""


Table = Mapping[str, KeyRule]


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyOutcome:
    """The outcome for one key of a recipe."""

    key: str
    """The key in NeMo-RL; empty for one that was added here."""
    fate: Fate
    to: str = ""
    """The key in this library."""
    value: object = None
    """The value in this library, where it has a key."""
    why: str = ""
    must_decide: bool = False
    """Left out, the run would train something else: somebody has to decide."""


def same(*, convert: Callable[[object], object] | None = None, why: str = "") -> KeyRule:
    """Make the rule of a key that is here as well."""
    return KeyRule(fate=Fate.SAME if convert is None else Fate.MAPPED, convert=convert, why=why)


def moved(to: str, *, convert: Callable[[object], object] | None = None, why: str = "") -> KeyRule:
    """Make the rule of a key with another name here."""
    return KeyRule(fate=Fate.MAPPED, to=to, convert=convert, why=why)


def not_supported(why: str, *, off: tuple[object, ...] = OFF) -> KeyRule:
    """Make the rule of a key whose feature does not exist here."""
    return KeyRule(fate=Fate.NOT_SUPPORTED, why=why, off=off)


def refused(why: str, *, off: tuple[object, ...] = OFF) -> KeyRule:
    """Make the rule of a key whose feature does not exist here and without which a run trains another model, other data
    or another loss."""
    return KeyRule(fate=Fate.NOT_SUPPORTED, why=why, off=off, must_decide=True)


def no_effect(why: str) -> KeyRule:
    """Make the rule of a key that would change nothing here."""
    return KeyRule(fate=Fate.IGNORED, why=why)


def with_others(why: str) -> KeyRule:
    """Make the rule of a key that is converted together with others of its section."""
    return KeyRule(fate=Fate.MAPPED, why=why, is_with_others=True)


def becomes(key: str, here: str, value: object, why: str) -> KeyOutcome:
    """Return the outcome of a key that becomes one of ours; an empty one is added."""
    return KeyOutcome(key=key, fate=Fate.MAPPED, to=here, value=value, why=why)


def lacks(key: str, why: str, *, must_decide: bool = False) -> KeyOutcome:
    """Return the outcome of a key that has no counterpart here."""
    return KeyOutcome(key=key, fate=Fate.NOT_SUPPORTED, why=why, must_decide=must_decide)


TOML = ".toml"
EXEMPLAR_NAME = "grpo_math_1B.yaml"
MANDATORY = "???"
MB_TOKENS = "${mul:${policy.max_total_sequence_length},${policy.train_micro_batch_size}}"
EXEMPLAR: Mapping[str, object] = {
    "grpo.num_prompts_per_step": 32,
    "grpo.num_generations_per_prompt": 16,
    "grpo.max_num_epochs": 1,
    "grpo.max_num_steps": 1000000,
    "grpo.normalize_rewards": True,
    "grpo.use_leave_one_out_baseline": True,
    "grpo.val_period": 10,
    "grpo.val_at_start": False,
    "grpo.val_at_end": False,
    "grpo.max_val_samples": 256,
    "grpo.seed": 42,
    "loss_fn.reference_policy_kl_penalty": 0.01,
    "loss_fn.reference_policy_kl_type": "k3",
    "loss_fn.ratio_clip_min": 0.2,
    "loss_fn.ratio_clip_max": 0.2,
    "loss_fn.token_level_loss": True,
    "policy.model_name": "Qwen/Qwen2.5-1.5B",
    "policy.train_global_batch_size": 512,
    "policy.train_micro_batch_size": 4,
    "policy.max_total_sequence_length": 512,
    "policy.precision": "bfloat16",
    "policy.max_grad_norm": 1.0,
    "policy.sequence_packing.enabled": True,
    "policy.sequence_packing.train_mb_tokens": MB_TOKENS,
    "policy.sequence_packing.logprob_mb_tokens": "${policy.sequence_packing.train_mb_tokens}",
    "policy.sequence_packing.algorithm": "modified_first_fit_decreasing",
    "policy.dynamic_batching.enabled": False,
    "policy.dtensor_cfg.enabled": True,
    "policy.megatron_cfg.enabled": False,
    "policy.megatron_cfg.freeze_moe_router": True,
    "policy.megatron_cfg.moe_router_dtype": "fp64",
    "policy.generation.backend": "vllm",
    "policy.generation.max_new_tokens": "${policy.max_total_sequence_length}",
    "policy.generation.temperature": 1.0,
    "policy.generation.top_p": 1.0,
    "policy.generation.vllm_cfg.tensor_parallel_size": 1,
    "data.max_input_seq_length": "${policy.max_total_sequence_length}",
    "data.shuffle": True,
    "data.train.dataset_name": "OpenMathInstruct-2",
    "data.train.split_validation_size": 0.05,
    "data.default.prompt_file": "examples/prompts/cot.txt",
    "data.default.env_name": "math",
    "env.math.num_workers": 8,
    "checkpointing.enabled": True,
    "checkpointing.metric_name": "val:accuracy",
    "checkpointing.keep_top_k": 3,
    "checkpointing.save_period": 10,
    "data_plane.enabled": False,
    "cluster.gpus_per_node": 1,
    "cluster.num_nodes": 1,
}
"""Values of NeMo-RL's grpo_math_1B.yaml that decide numbers or layout."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Given:
    """A NeMo-RL recipe as one tree."""

    file: Path
    tree: Mapping[str, Any]
    missing: tuple[str, ...] = ()
    """Parents that are not here."""
    assumed: tuple[str, ...] = ()
    """Keys that the recipe leaves to a missing exemplar."""
    unresolved: Mapping[str, str] = field(default_factory=dict)
    """Key -> why its interpolation has no value, or that it must be set."""

    @property
    def lost_parents(self) -> tuple[str, ...]:
        """Return the missing parents that nothing stands in for."""
        return tuple(parent for parent in self.missing if Path(parent).name != EXEMPLAR_NAME)

    def get(self, key: str, default: object = None) -> Any:
        is_set, value = lookup(self.tree, key.split("."))
        return value if is_set else default

    def has(self, key: str) -> bool:
        return lookup(self.tree, key.split("."))[0]

    def section(self, key: str) -> Mapping[str, Any]:
        """Return a section that may be missing, or null."""
        found = self.get(key)
        return found if isinstance(found, Mapping) else {}


def read_recipe(path: Path) -> Given:
    """
    Raises:
        ConfigError: the file is missing, is no YAML mapping, or inherits from itself.
    """
    if path.suffix == TOML:
        # prime-rl's: one file, which inherits nothing.
        with boundary(ConfigError, str(path)):
            return Given(file=path, tree=tomllib.loads(path.read_text(encoding="utf-8")))
    recipe = compose(path, needs_parents=False)
    assumed = []
    if any(Path(parent).name == EXEMPLAR_NAME for parent in recipe.missing):
        for key, value in EXEMPLAR.items():
            if _is_left(recipe.tree, key.split(".")):
                recipe.set(key.split("."), value, layer=Layer(order=0, name=EXEMPLAR_NAME))
                assumed.append(key)
    unresolved = {".".join(place): text for place, text in resolve_interpolations(recipe, defaults={}).items()}
    unresolved |= {".".join(place): "must be set" for place, value in recipe.leaves() if value == MANDATORY}
    for key in unresolved:
        _remove(recipe.tree, key.split("."))
    return Given(
        file=path, tree=recipe.tree, missing=tuple(recipe.missing), assumed=tuple(assumed), unresolved=unresolved
    )


def _is_left(tree: Mapping[str, Any], path: list[str]) -> bool:
    """Return whether neither the key nor a section above it is null or a value."""
    node: Any = tree
    for name in path[:-1]:
        node = node.get(name, {})
        if not isinstance(node, dict):
            return False
    return path[-1] not in node


def _remove(tree: dict[str, Any], path: list[str]) -> None:
    node: Any = tree
    for name in path[:-1]:
        if not isinstance(node, dict) or not isinstance(node.get(name), dict):
            break
        node = node[name]
    if isinstance(node, dict):
        node.pop(path[-1], None)
