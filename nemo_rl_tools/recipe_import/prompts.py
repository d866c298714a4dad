"""Converts the prompts of a NeMo-RL recipe: their source, their wording, and the environment that scores responses.

Called by `sections`. Invariant: whatever decides prompts or rewards there is the same here, or is named as missing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Formatter
from typing import Any

from nemo_rl.config.compose import find_path
from nemo_rl.errors import ConfigError, boundary
from nemo_rl.utils.files import read_plain_text
from nemo_rl_tools.recipe_import.dialects import GAME, GRADED, names_of, no_held_out
from nemo_rl_tools.recipe_import.keys import OFF, Fate, Given, KeyOutcome, becomes, lacks

__all__ = ["convert_environments", "convert_prompts"]

PLAIN_PROCESSORS = ("math_hf_data_processor", "math_data_processor")
"""Processors that make the prompt's text, put into the template, the user's only message."""
INPUT = "{input}"
"""Stands for the prompt in a template of ours."""
MATH = "math"
SHARED = ("prompt_file", "system_prompt_file", "env_name", "input_key", "output_key", "split", "processor", "seed")
"""Keys that older recipes have beside the data sets."""
ENTRY = (*SHARED, "dataset_name", "data_path", "split_validation_size", "download_dir")
"""Keys of a data set that are known."""
GYM_KEYS = ("should_use_nemo_gym", "should_log_nemo_gym_responses", "nemo_gym")
"""Keys of `env` that are no environments."""
SAME_SCORES: Mapping[str, tuple[object, ...]] = {
    "math_verify_impl": (None, "hf_math_verify"),
    "verifier_type": (None, "math"),
}
"""Keys of the math environment, with the values that math-verify alone satisfies."""
NOT_HERE = "it decides how responses are scored, and there is nothing of the kind here"


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptSource:
    """One data set of a recipe, with the defaults that it takes."""

    where: str
    """Dotted path of its section here."""
    there: str
    """Dotted path of its section there."""
    own: Mapping[str, Any]
    default: Mapping[str, Any]
    """`data.default`."""
    beside: Mapping[str, Any]
    """Keys that stand beside the sections."""

    @property
    def entry(self) -> Mapping[str, Any]:
        return {**self.beside, **self.default, **self.own}

    def key(self, name: str) -> str:
        """Return the dotted path of where the recipe sets it."""
        if name in self.own:
            return f"{self.there}.{name}"
        return f"data.default.{name}" if name in self.default else f"data.{name}"

    @property
    def environment(self) -> str:
        return str(self.entry.get("env_name") or MATH)


def convert_prompts(given: Given) -> Iterator[KeyOutcome]:
    """Yield `data.train`, `data.validation` and `env.name`."""
    if not any(given.has(f"data.{name}") for name in ("train", "validation", "dataset_name", "data_path")):
        return
    train, held_out = _sources(given, "train"), _sources(given, "validation")
    for source in train:
        yield from _dataset(given, source, part="train")
    if len(train) > 1:
        why = "there all data sets are shuffled as one, so that each prompt is drawn equally often"
        yield becomes("data.train", "data.mixture.by", "size", why)
        if given.get("grpo.max_num_epochs") is not None:
            yield becomes("grpo.max_num_epochs", "grpo.max_num_epochs", None, "each data set begins anew when it ends")
    for source in held_out:
        yield from _dataset(given, source, part="validation")
    if not held_out:
        yield from no_held_out(given)
    yield from _reward(train[0], "env")
    for source in (*train[1:], *held_out):
        if source.environment != train[0].environment:
            yield from _reward(source, f"{source.where}.env")


def convert_environments(given: Given) -> Iterator[KeyOutcome]:
    """Convert the sections below `env`: of the environments that score, and of others, which nothing reads."""
    used = {source.environment for part in ("train", "validation") for source in _sources(given, part)}
    for name, section in given.section("env").items():
        if name in GYM_KEYS or name == GAME:
            continue
        for part, value in _parts(section):
            key = f"env.{name}.{part}" if part else f"env.{name}"
            if name not in used:
                why = f"no data set names {name!r} as its environment (env_name)"
                yield KeyOutcome(key=key, fate=Fate.IGNORED, why=why)
            elif part == "num_workers":
                yield becomes(key, "env.num_workers", value, "")
            else:
                yield _scoring(key, name, part, value)


def _parts(section: object, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield the values of a section by dotted name; of what is no section, the value itself without a name."""
    if not isinstance(section, Mapping) or not section:
        yield prefix.removesuffix("."), section
        return
    for name, value in section.items():
        yield from _parts(value, f"{prefix}{name}.")


def _scoring(key: str, name: str, part: str, value: object) -> KeyOutcome:
    off = SAME_SCORES.get(part, OFF) if name == MATH else OFF
    if value in ({}, [], "") or any(value == each and type(value) is type(each) for each in off):
        return KeyOutcome(key=key, fate=Fate.SAME, why="it asks for nothing that differs here")
    # Another environment is named by itself.
    return lacks(key, f"{value!r}: {NOT_HERE}; see docs/coming_from_nemo_rl.md", must_decide=name == MATH)


def _sources(given: Given, part: str) -> list[PromptSource]:
    """Return the sources of `train`, of which there is at least one, be it empty, or of `validation`."""
    data, default = given.section("data"), given.section("data.default")
    beside = {name: value for name, value in data.items() if name in SHARED}
    flat = {name: data[name] for name in ("dataset_name", "data_path") if name in data}
    entry = data.get(part)
    entries = [each for each in entry if isinstance(each, Mapping)] if isinstance(entry, list) else [entry]
    found = [dict(each) if isinstance(each, Mapping) else {} for each in entries] or [{}]
    if part == "train":
        found = [{**own, **flat} for own in found] if len(found) == 1 else found
    else:
        found = [own for own in found if own]
        [first, *_] = _sources(given, "train")
        if not found and first.entry.get("split_validation_size"):
            found = [{**first.own, "data_path": None}]
    names = _names_of(found)
    return [
        PromptSource(
            where=_where(part, name, number, len(found)),
            there=f"data.{part}" if len(found) == 1 else f"data.{part}.{number}",
            own=own,
            default=default,
            beside=beside,
        )
        for number, (own, name) in enumerate(zip(found, names, strict=True))
    ]


def _where(part: str, name: str, number: int, count: int) -> str:
    """Return the section here of one of several data sets: the first of those held out is the main one."""
    if part == "train":
        return "data.train" if count == 1 else f"data.train.{name}"
    return "data.validation" if number == 0 else f"data.validation_sets.{name}"


def _names_of(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a name for each data set, all different."""
    return names_of(
        [
            str(own.get("name") or own.get("dataset_name") or Path(str(own.get("data_path") or "data")).stem)
            for own in entries
        ]
    )


def _dataset(given: Given, source: PromptSource, *, part: str) -> Iterator[KeyOutcome]:
    entry, where = source.entry, source.where
    name, path = str(entry.get("dataset_name") or part), entry.get("data_path")
    if path:
        kind = "jsonl" if str(path).endswith((".jsonl", ".json")) else "huggingface"
        yield becomes(source.key("data_path"), f"{where}.dataset_name", kind, "")
        yield becomes(source.key("data_path"), f"{where}.data_path", str(path), "")
        for key in ("input_key", "output_key"):
            if entry.get(key):
                yield becomes(source.key(key), f"{where}.{key}", entry[key], "")
    else:
        split = f", split {entry['split']!r}," if entry.get("split") else ""
        why = f'nothing is downloaded here: write {name}{split} as lines {{"input": ..., "output": ...}} to this file'
        yield becomes(source.key("dataset_name"), f"{where}.dataset_name", "jsonl", "")
        yield becomes(source.key("dataset_name"), f"{where}.data_path", f"data/{name.lower()}/{part}.jsonl", why)
    yield from _rows(source, is_file=bool(path) and kind == "jsonl", is_folder=bool(path) and kind != "jsonl")
    yield from _wording(given, source)


def _rows(source: PromptSource, *, is_file: bool, is_folder: bool) -> Iterator[KeyOutcome]:
    """Convert the other keys that decide which rows there are and what they say."""
    entry, where = source.entry, source.where
    split = entry.get("split")
    if split and is_folder:
        yield becomes(source.key("split"), f"{where}.split", split, "")
    elif split not in (None, "train") and is_file:
        yield lacks(source.key("split"), f"{split!r}: a file has no splits; write these rows to one", must_decide=True)
    if entry.get("seed") is not None and entry.get("split_validation_size"):
        why = "it decides which rows are held out; they are those of the file that you write"
        yield KeyOutcome(key=source.key("seed"), fate=Fate.IGNORED, why=why)
    processor = entry.get("processor")
    if processor is not None and processor not in PLAIN_PROCESSORS:
        why = (
            f"{processor!r} words prompts in its own way; here the prompt's text goes into prompt_template (as with "
            f"{' and '.join(PLAIN_PROCESSORS)}): write its prompts to the file, and set this key to one of these"
        )
        yield lacks(source.key("processor"), why, must_decide=True)
    for name in source.own:
        if name not in (*ENTRY, "name"):
            yield lacks(f"{source.there}.{name}", "what it does to the prompts is not known here", must_decide=True)


# ---- texts


def _wording(given: Given, source: PromptSource) -> Iterator[KeyOutcome]:
    for name, here in (("prompt_file", "prompt_template"), ("system_prompt_file", "system_prompt")):
        if not source.entry.get(name):
            continue
        key, file = source.key(name), str(source.entry[name])
        text = _text_of_file(given, file)
        if text is None:
            why = f"{file} is not here, and its text is a part of every prompt: put the file beside the recipe"
            yield lacks(key, why, must_decide=True)
        elif name == "system_prompt_file":
            yield becomes(key, f"{source.where}.{here}", text, f"the text of {file}")
        else:
            try:
                yield becomes(key, f"{source.where}.{here}", our_template(text), f"the text of {file}")
            except ValueError as error:
                yield lacks(key, f"{file}: {error}", must_decide=True)


def _text_of_file(given: Given, name: str) -> str | None:
    """Return the text of a file that is looked for as every path of a recipe, then from each folder above it, one of
    which is the checkout's root."""
    found = find_path(name, recipe=str(given.file))
    above = (folder / name for folder in given.file.parents if (folder / name).is_file())
    path = found if found is not None and found.is_file() else next(above, None)
    if path is None:
        return None
    with boundary(ConfigError, f"{path}: cannot be read"):
        return read_plain_text(path).strip()


def our_template(text: str) -> str:
    r"""Return a prompt file that `str.format` fills with one problem, as a template with `{input}`.

    Example:
        `"Put it into \\boxed{{}}.\n{}"` becomes `"Put it into \\boxed{}.\n{input}"`.

    Raises:
        ValueError: `str.format(problem)` would fail, would leave the problem out, or does what no template here can.
    """
    made, fields, literal = "", list[str](), ""
    try:
        pieces = list(Formatter().parse(text))
    except ValueError as error:
        raise ValueError(f"is no template of str.format: {error}; write a brace of the text twice") from None
    for before, field, spec, conversion in pieces:
        literal += before
        if field is None:
            continue
        if field not in ("", "0") or spec or conversion:
            shown = "{" + field + (f"!{conversion}" if conversion else "") + (f":{spec}" if spec else "") + "}"
            raise ValueError(f"expected {{}} or {{0}} where the problem goes, got {shown}")
        made += _literal(literal) + INPUT
        fields.append(field)
        literal = ""
    if not fields:
        raise ValueError("has no {} where the problem goes, so that every prompt would be the same")
    if "" in fields and len(fields) > 1:
        raise ValueError("has several {}, and there is one problem; write {0} for each")
    return made + _literal(literal)


def _literal(text: str) -> str:
    if INPUT in text:
        raise ValueError(f"holds the text {INPUT}, which stands for the problem here; write it in another way")
    return text


# ---- scores


def _reward(source: PromptSource, section: str) -> Iterator[KeyOutcome]:
    """
    Args:
        section: dotted path of the environment's section here.
    """
    key, name = source.key("env_name"), source.environment
    if name == MATH:
        yield becomes(key, f"{section}.name", MATH, "")
        return
    yield lacks(f"env.{name}", f"the environment {name!r} is not here; {GRADED} stands for a reward of your own")
    yield becomes(key, f"{section}.name", "custom", f"{name!r} there")
    yield becomes(key, f"{section}.reward_function", GRADED, "write it: see docs/guide.md")
