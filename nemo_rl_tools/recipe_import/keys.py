"""The keys of a NeMo-RL recipe: how they are read, and `KeyRule`, the record of what becomes of one key.

`defaults:`, `_override_` and interpolations are read as in recipes of this library, but parents may be missing. Where
the exemplar recipe that all others inherit from is missing, its values of August 2026 stand in for it.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from nemo_rl.config.compose import Layer, Recipe, compose
from nemo_rl.config.interpolate import resolve_interpolations
from nemo_rl.config.schema_walk import drop, lookup
from nemo_rl.config.yaml_text import parse_yaml
from nemo_rl.errors import ConfigError, boundary
from nemo_rl.utils.files import MOST_BYTES, read_plain

__all__ = [
    "MANDATORY",
    "MANY",
    "OFF",
    "Fate",
    "Given",
    "KeyOutcome",
    "KeyRule",
    "Table",
    "becomes",
    "each",
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


def each(rule: KeyRule, *lines: str) -> Table:
    """Return one rule for many keys.

    Args:
        lines: `section: name name ...`, or whole keys.
    """
    found: dict[str, KeyRule] = {}
    for line in lines:
        section, colon, names = line.rpartition(": ")
        found |= {f"{section}.{name}" if colon else name: rule for name in names.split()}
    return found


def becomes(key: str, here: str, value: object, why: str) -> KeyOutcome:
    """Return the outcome of a key that becomes one of ours; an empty one is added."""
    return KeyOutcome(key=key, fate=Fate.MAPPED, to=here, value=value, why=why)


def lacks(key: str, why: str, *, must_decide: bool = False) -> KeyOutcome:
    return KeyOutcome(key=key, fate=Fate.NOT_SUPPORTED, why=why, must_decide=must_decide)


TOML = ".toml"
EXEMPLAR_NAME = "grpo_math_1B.yaml"
MANDATORY = "???"
EXEMPLAR = """
grpo:
  {num_prompts_per_step: 32, num_generations_per_prompt: 16, max_num_epochs: 1, max_num_steps: 1000000,
   normalize_rewards: true, use_leave_one_out_baseline: true, val_period: 10, val_at_start: false, val_at_end: false,
   max_val_samples: 256, seed: 42}
loss_fn:
  {reference_policy_kl_penalty: 0.01, reference_policy_kl_type: k3, ratio_clip_min: 0.2, ratio_clip_max: 0.2,
   token_level_loss: true}
policy:
  model_name: Qwen/Qwen2.5-1.5B
  train_global_batch_size: 512
  train_micro_batch_size: 4
  max_total_sequence_length: 512
  precision: bfloat16
  max_grad_norm: 1.0
  sequence_packing:
    enabled: true
    train_mb_tokens: ${mul:${policy.max_total_sequence_length},${policy.train_micro_batch_size}}
    logprob_mb_tokens: ${policy.sequence_packing.train_mb_tokens}
    algorithm: modified_first_fit_decreasing
  dynamic_batching: {enabled: false}
  dtensor_cfg: {enabled: true}
  megatron_cfg: {enabled: false, freeze_moe_router: true, moe_router_dtype: fp64}
  generation:
    {backend: vllm, max_new_tokens: "${policy.max_total_sequence_length}", temperature: 1.0, top_p: 1.0,
     vllm_cfg: {tensor_parallel_size: 1}}
data:
  max_input_seq_length: ${policy.max_total_sequence_length}
  shuffle: true
  train: {dataset_name: OpenMathInstruct-2, split_validation_size: 0.05}
  default: {prompt_file: examples/prompts/cot.txt, env_name: math}
env: {math: {num_workers: 8}}
checkpointing: {enabled: true, metric_name: "val:accuracy", keep_top_k: 3, save_period: 10}
data_plane: {enabled: false}
cluster: {gpus_per_node: 1, num_nodes: 1}
"""
"""Values of NeMo-RL's grpo_math_1B.yaml that decide numbers or layout."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Given:
    """A NeMo-RL recipe as one tree."""

    file: Path
    tree: Mapping[str, Any]
    missing: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()
    """Keys that the recipe leaves to a missing exemplar."""
    unresolved: Mapping[str, str] = field(default_factory=dict)
    """Key -> why its interpolation has no value, or that it must be set."""

    @property
    def lost_parents(self) -> tuple[str, ...]:
        return tuple(parent for parent in self.missing if Path(parent).name != EXEMPLAR_NAME)

    def get(self, key: str, default: object = None) -> Any:
        is_set, value = lookup(self.tree, key.split("."))
        return value if is_set else default

    def has(self, key: str) -> bool:
        return lookup(self.tree, key.split("."))[0]

    def section(self, key: str) -> Mapping[str, Any]:
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
            return Given(file=path, tree=tomllib.loads(read_plain(path, most_bytes=MOST_BYTES).decode()))
    recipe = compose(path, needs_parents=False)
    assumed = []
    if any(Path(parent).name == EXEMPLAR_NAME for parent in recipe.missing):
        for place, value in Recipe(file=EXEMPLAR_NAME, tree=parse_yaml(EXEMPLAR)).leaves():
            if _is_left(recipe.tree, place):
                recipe.set(place, value, layer=Layer(order=0, name=EXEMPLAR_NAME))
                assumed.append(".".join(place))
    unresolved = {".".join(place): text for place, text in resolve_interpolations(recipe, defaults={}).items()}
    unresolved |= {".".join(place): "must be set" for place, value in recipe.leaves() if value == MANDATORY}
    for key in unresolved:
        drop(recipe.tree, key.split("."))
    return Given(
        file=path, tree=recipe.tree, missing=tuple(recipe.missing), assumed=tuple(assumed), unresolved=unresolved
    )


def _is_left(tree: Mapping[str, Any], path: Sequence[str]) -> bool:
    """Return whether neither the key nor a section above it is null or a value."""
    node: Any = tree
    for name in path[:-1]:
        node = node.get(name, {})
        if not isinstance(node, dict):
            return False
    return path[-1] not in node
