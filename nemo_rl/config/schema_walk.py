"""Questions about the config schema: what a dotted path leads to, what a misspelt name may have meant.

Called by the loader, the overrides and the renderer. The schema itself is the only source: nothing here names a key. A
recipe is a plain tree until it is validated; `lookup`, `put` and `drop` follow a path in one.
"""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from nemo_rl.config.base import Section, keys_of
from nemo_rl.config.parts import PluginKind
from nemo_rl.config.schema import MasterConfig

__all__ = [
    "SchemaPlace",
    "default_tree",
    "dotted",
    "drop",
    "iter_fields",
    "lookup",
    "named_class",
    "place_of",
    "put",
    "section_class",
    "suggest",
    "suggest_path",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class SchemaPlace:
    """The end of a dotted path in the schema."""

    is_known: bool
    is_free: bool = False
    """True inside a dictionary whose keys the schema does not list (`policy.optimizer.kwargs.lr`)."""
    field: FieldInfo | None = None
    unknown_at: int = 0
    """Index of the first part of the path that the schema does not have."""
    candidates: tuple[str, ...] = ()
    """Names that the schema has at `unknown_at`."""


def section_class(annotation: object) -> type[BaseModel] | None:
    """Return the section that a field holds, also when it may be null; None for a plain value."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for part in typing.get_args(annotation) if _is_union(annotation) else ():
        found = section_class(part)
        if found is not None:
            return found
    return None


def named_class(section: type[BaseModel]) -> type[Section] | None:
    """Return the class of the sections that have names of the user's in this one; see `Section.NAMED`."""
    return section.NAMED if issubclass(section, Section) else None


def place_of(path: Sequence[str]) -> SchemaPlace:
    """Follow `path` from the root of the schema."""
    section: type[BaseModel] = MasterConfig
    for index, name in enumerate(path):
        field = keys_of(section).get(name)
        is_last = index == len(path) - 1
        if field is None:
            named, candidates = named_class(section), tuple(keys_of(section))
            if named is None or is_last:
                return SchemaPlace(is_known=named is not None, unknown_at=index, candidates=candidates)
            section = named
            continue
        if is_last:
            return SchemaPlace(is_known=True, field=field)
        inner = section_class(field.annotation)
        if inner is None:
            is_free = typing.get_origin(field.annotation) is dict
            return SchemaPlace(is_known=is_free, is_free=is_free, field=field, unknown_at=index + 1)
        section = inner
    return SchemaPlace(is_known=True)


def iter_fields(section: type[BaseModel] = MasterConfig, *, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield every key with its dotted path, sections before what they hold."""
    for name, field in keys_of(section).items():
        path = f"{prefix}{name}"
        yield path, field
        inner = section_class(field.annotation)
        if inner is not None:
            yield from iter_fields(inner, prefix=f"{path}.")


def default_tree(section: type[BaseModel] = MasterConfig) -> dict[str, Any]:
    """Return the defaults as plain values; required keys are left out."""
    tree: dict[str, Any] = {}
    for name, field in keys_of(section).items():
        inner = section_class(field.annotation)
        if inner is not None and not (_is_union(field.annotation) and type(None) in typing.get_args(field.annotation)):
            tree[name] = default_tree(inner)
        elif not field.is_required():
            value = field.get_default(call_default_factory=True)
            tree[name] = value if isinstance(value, (str, int, float, bool, list, dict, type(None))) else str(value)
    return tree


def suggest(name: str, candidates: Iterable[str]) -> str:
    """Return `; did you mean 'x'?` or nothing."""
    close = difflib.get_close_matches(name, list(candidates), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""


_OF_ALL_ROWS = ("temperature", "top_p", "top_k", "stop_token_ids")
"""Keys of `policy.generation` that a source of prompts cannot have for itself."""

_KNOWN_ELSEWHERE: Mapping[str, str] = {
    "lora": "adapters (LoRA) have the section policy.lora",
    "peft": "adapters (LoRA) have the section policy.lora",
    "kl": "the KL penalty is loss_fn.reference_policy_kl_penalty, its estimate loss_fn.reference_policy_kl_type",
}
"""Words in names of other frameworks' keys -> where it is here."""


def suggest_path(path: Sequence[str], candidates: Iterable[str], tree: Mapping[str, Any]) -> str:
    """Suggest a name as `suggest` does; one that exists elsewhere is offered with its whole path, and with the values
    that it takes.

    Args:
        tree: the recipe; of several places those are left out that it switches off.
    """
    name = path[-1]
    if tuple(path[:-2]) == ("data", "train") and name in _OF_ALL_ROWS:
        return f"; it holds for the rows of all sources: set policy.generation.{name}"
    near = suggest(name, candidates)
    if near:
        return near
    for word, answer in _KNOWN_ELSEWHERE.items():
        if word in name.lower().split("_"):
            return f"; {answer}"
    elsewhere = [known for known in _all_paths() if known.rsplit(".", 1)[-1] == name]
    elsewhere = [known for known in elsewhere if not _is_off(known.split("."), tree)] or elsewhere
    shown = [f"{known!r}{_values_of(known)}" for known in elsewhere]
    return f"; did you mean {' or '.join(shown)}?" if shown else ""


def _all_paths() -> Iterator[str]:
    """Yield the keys of the schema, and those that free sections have by default (`policy.optimizer.kwargs.lr`)."""
    for known, field in iter_fields():
        yield known
        default = field.get_default(call_default_factory=True)
        if typing.get_origin(field.annotation) is dict and isinstance(default, dict):
            yield from (f"{known}.{key}" for key in default)


def _is_off(path: Sequence[str], tree: Mapping[str, Any]) -> bool:
    """Return whether a section above `path` is switched off, or belongs to the worker that does not train."""
    defaults = default_tree()

    def value(name: str) -> Any:
        is_set, found = lookup(tree, name.split("."))
        return found if is_set else lookup(defaults, name.split("."))[1]

    above = [".".join((*path[:end], "enabled")) for end in range(1, len(path))]
    is_torchs = path[0] == "policy" and path[1] in ("optimizer", "scheduler")
    return any(value(switch) is False for switch in above) or (
        is_torchs and value("policy.megatron_cfg.enabled") is True
    )


def _values_of(path: str) -> str:
    field = next((field for known, field in iter_fields() if known == path), None)
    if field is None:
        return ""
    annotation = field.annotation
    values = typing.get_args(annotation) if typing.get_origin(annotation) is typing.Literal else ()
    # A built-in part by its word; that `module:name` may stand there as well, the docstring says.
    values += tuple(word for kind in field.metadata if isinstance(kind, PluginKind) for word in kind.builtin)
    return f" ({', '.join(map(str, values))})" if values else ""


def lookup(tree: Mapping[str, Any], path: Sequence[str]) -> tuple[bool, Any]:
    """Return whether `path` is set in a plain tree, and its value."""
    node: Any = tree
    for part in path:
        if not isinstance(node, Mapping) or part not in node:
            return False, None
        node = node[part]
    return True, node


def put(tree: dict[str, Any], path: Sequence[str], value: object) -> None:
    """Set `path` in a plain tree; sections are made where there are none, also in place of a value."""
    for part in path[:-1]:
        if not isinstance(tree.get(part), dict):
            tree[part] = {}
        tree = tree[part]
    tree[path[-1]] = value


def drop(tree: dict[str, Any], path: Sequence[str]) -> None:
    """Remove `path` from a plain tree, where it is there; of a list with this element, the whole list."""
    for part in path[:-1]:
        if not isinstance(tree.get(part), dict):
            tree.pop(part, None)
            return
        tree = tree[part]
    tree.pop(path[-1], None)


def dotted(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return settings, some of which may be sections, by their dotted keys.

    Example:
        >>> dotted({"policy": {"precision": "float32"}, "grpo.seed": 3})
        {'policy.precision': 'float32', 'grpo.seed': 3}
    """
    found: dict[str, Any] = {}
    for name, value in settings.items():
        key = f"{prefix}{name}"
        found |= dotted(value, f"{key}.") if isinstance(value, Mapping) and value else {key: value}
    return found


def _is_union(annotation: object) -> bool:
    return typing.get_origin(annotation) in (typing.Union, types.UnionType)
