"""The boundary of YAML: `parse_yaml` reads recipes and overrides as plain, bounded values, `to_yaml` writes a config.

Invariant: what `parse_yaml` gives is made of dicts with text keys, lists, texts, 64-bit integers, floats, booleans and
null, is not nested deeply, and is small: everything later can rely on that. Dates, bytes, sets, cycles and aliases that
multiply are refused with their line. `to_yaml` serves `--print-config` and the file next to the logs of a run;
`python -m nemo_rl.config.yaml_text FILE` writes `configs/grpo_base.yaml` (`commented_defaults`) from the schema and its
docstrings, and a test checks that the two agree.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from nemo_rl.config.base import keys_of
from nemo_rl.config.schema import MasterConfig
from nemo_rl.config.schema_walk import section_class

__all__ = [
    "MASKED",
    "MAX_DEPTH",
    "MAX_INTEGER",
    "MAX_TEXT",
    "MAX_VALUES",
    "YamlProblem",
    "commented_defaults",
    "masked",
    "parse_yaml",
    "text_problem",
    "to_yaml",
    "write_recipe",
    "yaml_line",
]


MASKED = re.compile(r"<masked [0-9a-f]{16}>")
"""Text in place of a secret: equal ones have equal digests, so that two starts can be compared."""
_NAME = r"(?:(?:api|access|private|secret)[_.-]?key|token|secret|passw(?:or)?d|credentials?)"
_SECRET = rf"(?:key|(?:[^=&#?]*[_.-])?{_NAME})"
_SECRET_KEY = re.compile(_SECRET, re.IGNORECASE)
_IN_URL = re.compile(rf"(?<=://)[^/@\s]+(?=@)|(?<=[?&])(?P<name>{_SECRET})=(?P<value>[^&#\s]+)", re.IGNORECASE)
_FLAG = rf"--?(?:key|(?:[\w.-]*[_.-])?{_NAME})"
_IN_WORDS = re.compile(
    rf"(?<![\w./-])(?P<name>{_FLAG}(?:=|\s+)|(?:[\w.]*[_.])?{_NAME}=)(?P<value>[\"']?(?![-\"'])[^\s\"']+[\"']?)",
    re.IGNORECASE,
)
"""Secrets as words of a command: `--api-key K`, `--token=K`, `SOME_TOKEN=K`."""
_IS_FLAG = re.compile(_FLAG, re.IGNORECASE)
_WORDS_BELOW = ("command", "options")
"""Keys whose texts may be commands; in others, such as prompts, `token=` is a text like any other."""

_HEAD = """\
# Every key with its default. Written by `make configs` from nemo_rl/config; do not edit by hand.
# A recipe starts from this file (`defaults: grpo_base.yaml`) and holds only what differs.
# `???` must be set by the recipe.
"""
_WIDTH = 116


def to_yaml(config: MasterConfig) -> str:
    """Return every key of `config`; the text loads again as a recipe, but for secrets, which are masked."""
    # JSON is YAML too, but nobody reads it; dumping the JSON values keeps paths and tuples plain.
    tree = masked(config.model_dump(mode="json"))
    return str(yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, width=_WIDTH))


def masked(value: Any, key: str = "", *, in_words: bool = False) -> Any:
    """Return JSON values in which texts are masked whose key looks like that of a secret, and the passwords of URLs.

    Args:
        in_words: the texts may be words of a command, of which `--api-key K` and `SOME_TOKEN=K` are masked too; so
            they may below the keys `command` and `options`.

    Example:
        >>> masked({"api_key": "k", "url": "http://me:pw@host/x"})["url"].startswith("http://<masked ")
        True
    """
    in_words = in_words or key in _WORDS_BELOW
    if isinstance(value, dict):
        return {name: masked(item, str(name), in_words=in_words) for name, item in value.items()}
    if isinstance(value, list):
        flags = ["", *map(_flag_of, value)] if in_words else [""] * len(value)
        return [
            masked(item, flag if flag and not str(item).startswith("--") else key, in_words=in_words)
            for item, flag in zip(value, flags, strict=False)
        ]
    if not isinstance(value, str) or not value or MASKED.search(value):
        return value
    if _SECRET_KEY.fullmatch(key):
        return _mask(value)
    text = _IN_URL.sub(_mask_part, value)
    return _IN_WORDS.sub(_mask_word, text) if in_words else text


def write_recipe(path: Path, text: str) -> None:
    """Write a recipe, in place of a file that is there; one that holds secrets can be read by its owner alone."""
    tree = yaml.safe_load(text)
    mode = 0o666 if masked(tree) == tree else 0o600
    with open(path, "w", encoding="utf-8", opener=lambda name, flags: os.open(name, flags, mode)) as file:
        if mode == 0o600 and path.is_file():
            os.fchmod(file.fileno(), mode)
        file.write(text)


def _flag_of(item: object) -> str:
    """Return the name of a secret that a word of a command announces; empty where it announces none."""
    return item.lstrip("-") if isinstance(item, str) and _IS_FLAG.fullmatch(item) else ""


def _mask_part(found: re.Match[str]) -> str:
    return _mask(found[0]) if found["name"] is None else f"{found['name']}={_mask(found['value'])}"


def _mask_word(found: re.Match[str]) -> str:
    return found[0] if MASKED.match(found["value"]) else f"{found['name']}{_mask(found['value'])}"


def _mask(text: str) -> str:
    return f"<masked {hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}>"


def commented_defaults() -> str:
    """Return the schema's defaults as YAML, each key under its docstring."""
    return _HEAD + "\n".join(_section_lines(MasterConfig, indent=0)) + "\n"


def _section_lines(section: type[BaseModel], *, indent: int) -> Iterator[str]:
    pad = "  " * indent
    for name, field in keys_of(section).items():
        inner = section_class(field.annotation)
        is_nested = inner is not None and (
            field.is_required() or field.get_default(call_default_factory=True) is not None
        )
        about = field.description or (inner.__doc__ if inner is not None else None) or ""
        if indent == 0:
            yield ""
        yield from (f"{pad}# {line}" for line in textwrap.wrap(" ".join(about.split()), _WIDTH - len(pad)))
        if is_nested and inner is not None:
            yield f"{pad}{name}:"
            yield from _section_lines(inner, indent=indent + 1)
        elif field.is_required():
            yield f"{pad}{name}: ???"
        else:
            yield f"{pad}{name}: {_inline(field.get_default(call_default_factory=True))}"


def _inline(value: Any) -> str:
    plain = str(value) if isinstance(value, Path) else value
    text = yaml.safe_dump(plain, default_flow_style=True, width=10_000, allow_unicode=True)
    return str(text).removesuffix("...\n").strip()


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(commented_defaults(), encoding="utf-8")


MAX_TEXT = 256 * 1024
"""Characters of a recipe; the largest of ours has 20 thousand."""
MAX_VALUES = 5_000
"""Values of a recipe, aliases written out; ours have up to 400."""
MAX_DEPTH = 32
MAX_INTEGER = 2**63 - 1
"""The largest integer that every consumer (torch, numpy, the seeds of generators) can hold."""
_MAX_DIGITS = 20

_TAG = "tag:yaml.org,2002:"
# YAML 1.2's numbers and `1e-4`; of 1.1, `1:30` for 90 and `017` for 15 surprise everybody and are texts here.
_NUMBERS: Mapping[str, str] = {
    "int": r"[-+]?(?:0|[1-9][0-9_]*)|0x[0-9a-fA-F_]+",
    "float": r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+"
    r"|\.[0-9]+(?:[eE][-+]?[0-9]+)?|\.(?:inf|Inf|INF))|\.(?:nan|NaN|NAN)",
}
_TRUE = frozenset({"true", "yes", "on"})
_NON_FINITE: Mapping[str, str] = {".inf": "inf", "+.inf": "inf", "-.inf": "-inf", ".nan": "nan"}


class YamlProblem(ValueError):
    """One line that says why a text is no recipe."""


class _Composer(yaml.SafeLoader):  # type: ignore[misc]
    """Text to nodes; stops at a depth that Python's own stack can hold."""

    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise YamlProblem(f"{_place(self.peek_event().start_mark)}: nested deeper than {MAX_DEPTH} levels")
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


_Composer.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in found if tag.removeprefix(_TAG) not in (*_NUMBERS, "timestamp")]
    for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _kind, _pattern in _NUMBERS.items():
    _Composer.add_implicit_resolver(_TAG + _kind, re.compile(f"^(?:{_pattern})$"), list("-+0123456789."))


class _Emitter(yaml.SafeDumper):  # type: ignore[misc]
    """Values as YAML: a text that this reader, or a reader of YAML 1.1, takes for something else gets quotes."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_text(self, text: str) -> yaml.Node:
        """Write a text of several lines, or with characters that cannot be seen, with escapes."""
        return self.represent_scalar(f"{_TAG}str", text, style=None if text.isprintable() else '"')


_Emitter.yaml_implicit_resolvers = {
    first: [
        *yaml.SafeDumper.yaml_implicit_resolvers.get(first, []),
        *_Composer.yaml_implicit_resolvers.get(first, []),
    ]
    for first in {*yaml.SafeDumper.yaml_implicit_resolvers, *_Composer.yaml_implicit_resolvers}
}
_Emitter.add_representer(str, _Emitter.represent_text)


def yaml_line(value: Any) -> str:
    """Return a value, or the name of a key, on one line; `parse_yaml` reads the same from it."""
    text = yaml.dump(value, Dumper=_Emitter, default_flow_style=True, width=sys.maxsize, allow_unicode=True)
    return str(text).removesuffix("\n").removesuffix("\n...")


def parse_yaml(text: str) -> Any:
    """Return the only document in `text`; None for an empty one.

    Raises:
        YamlProblem: it is no YAML, or holds what no setting can be.
    """
    if len(text) > MAX_TEXT:
        raise YamlProblem(f"expected at most {MAX_TEXT} characters, got {len(text)}")
    node = _composed(text)
    return None if node is None else _Reader().value(node, depth=0)


# Every recipe is written over the base, whose text is parsed once.
@lru_cache(maxsize=32)
def _composed(text: str) -> yaml.Node | None:
    try:
        composer = _Composer(text)
        try:
            return composer.get_single_node()
        finally:
            composer.dispose()
    except YamlProblem:
        raise
    except (yaml.YAMLError, RecursionError, ValueError, ArithmeticError) as error:
        # The last two: what escapes such as \\UFFFFFFFF make of Python's own chr().
        raise YamlProblem(" ".join(str(error).split())) from error


def text_problem(text: str) -> str | None:
    """Return why a text cannot stand in a file or in the name of one; None where it can."""
    if "\0" in text:
        return "holds a NUL character"
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return f"holds half a surrogate pair, {text[error.start]!a}"
    return None


class _Reader:
    """Nodes to values; counts them, because an alias is a node that is read again."""

    def __init__(self) -> None:
        self._num_values = 0

    def value(self, node: yaml.Node, *, depth: int) -> Any:
        self._num_values += 1
        if self._num_values > MAX_VALUES:
            raise YamlProblem(f"{_place(node.start_mark)}: more than {MAX_VALUES} values, aliases (*name) written out")
        if depth > MAX_DEPTH:
            raise YamlProblem(f"{_place(node.start_mark)}: contains itself through an alias (*name)")
        tag = str(node.tag).removeprefix(_TAG)
        if isinstance(node, yaml.ScalarNode):
            return _scalar(tag, str(node.value), node)
        if isinstance(node, yaml.SequenceNode) and tag == "seq":
            return [self.value(item, depth=depth + 1) for item in node.value]
        if isinstance(node, yaml.MappingNode) and tag == "map":
            return self._mapping(node, depth=depth)
        raise _unexpected(tag, node)

    def _mapping(self, node: yaml.MappingNode, *, depth: int) -> dict[str, Any]:
        own: dict[str, Any] = {}
        inherited: dict[str, Any] = {}
        for key, item in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise YamlProblem(f"{_place(key.start_mark)}: expected a name before the colon, got a section or list")
            if key.tag == _TAG + "merge":
                value = self.value(item, depth=depth + 1)
                for part in value if isinstance(value, list) else [value]:
                    if not isinstance(part, dict):
                        raise YamlProblem(f"{_place(key.start_mark)}: expected sections after <<, got {part!r}")
                    inherited = {**part, **inherited}
                continue
            name = _checked(str(key.value), key)
            if name in own:
                raise YamlProblem(f"{_place(key.start_mark)}: found duplicate key {name!r}")
            own[name] = self.value(item, depth=depth + 1)
        return {**inherited, **own}


def _scalar(tag: str, text: str, node: yaml.Node) -> Any:
    if tag == "str":
        return _checked(text, node)
    if tag == "null":
        return None
    if tag == "bool":
        return text.lower() in _TRUE
    if tag not in _NUMBERS:
        raise _unexpected(tag, node)
    digits = text.replace("_", "")
    try:
        if tag == "float":
            return float(_NON_FINITE.get(digits.lower(), digits))
        if len(digits) > _MAX_DIGITS:
            raise YamlProblem(
                f"{_place(node.start_mark)}: expected an integer of at most 64 bits, got {len(digits)} digits"
            )
        number = int(digits, 0)
    except ValueError as error:
        if isinstance(error, YamlProblem):
            raise
        raise YamlProblem(f"{_place(node.start_mark)}: expected a number, got {text[:80]!r}") from None
    if not -MAX_INTEGER <= number <= MAX_INTEGER:
        raise YamlProblem(f"{_place(node.start_mark)}: expected an integer of at most 64 bits, got {number}")
    return number


def _checked(text: str, node: yaml.Node) -> str:
    problem = text_problem(text)
    if problem is not None:
        raise YamlProblem(f"{_place(node.start_mark)}: the text {problem}")
    return text


def _unexpected(tag: str, node: yaml.Node) -> YamlProblem:
    return YamlProblem(
        f"{_place(node.start_mark)}: expected a text, a number, true, false, null, a list or a section, got {tag!r}; "
        "write a text in quotes and leave the tag out"
    )


def _place(mark: yaml.Mark) -> str:
    return f"line {mark.line + 1}"
