"""The config as YAML: a resolved one (`to_yaml`), and the commented defaults (`commented_defaults`).

`to_yaml` serves `--print-config` and the file next to the logs of a run; `python -m nemo_rl.config.render FILE` writes
`configs/grpo_base.yaml` from the schema and its docstrings, and a test checks that the two agree.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from nemo_rl.config.base import keys_of
from nemo_rl.config.schema import MasterConfig
from nemo_rl.config.schema_walk import section_class

__all__ = ["MASKED", "commented_defaults", "masked", "to_yaml", "write_recipe"]

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
