"""Prompt datasets by name: `build_prompt_sets` for a run, `load_prompts` for one source.

Called by the rollout worker. A source yields `RawPrompt`s; everything after that (template, tokens, length limit,
overlap with validation) is the same for all. A source is a `Source`: a built-in one, listed in `config.parts`, or a
user-defined one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TextIO

from transformers import PreTrainedTokenizerBase

from nemo_rl.config.parts import DATASETS
from nemo_rl.config.schema import DataConfig, DatasetConfig
from nemo_rl.data import huggingface_wrapper, reasoning_gym_wrapper, sort_digits
from nemo_rl.data.messages import encode_prompt, prompt_messages
from nemo_rl.errors import DatasetError, boundary, shorten

__all__ = [
    "Prompt",
    "PromptSet",
    "RawPrompt",
    "Source",
    "build_prompt_sets",
    "load_held_out",
    "load_prompts",
    "raw_prompts",
]

MAX_ROW_CHARACTERS = 2**26
"""Of one line of a file: more than any prompt that fits a context, little enough to be held."""
CHARACTERS_PER_TOKEN = 256
"""More than the longest tokens have (runs of blanks): texts beyond the limit times this are not given to a tokenizer,
whose time grows faster than the text."""
_HALF_PAIR = re.compile(r"\\u[dD][89a-fA-F]")


@dataclass(frozen=True, kw_only=True, slots=True)
class RawPrompt:
    """What a source yields."""

    text: str
    answer: object
    """JSON-like; what an environment compares with."""
    metadata: Mapping[str, object] = field(default_factory=dict)
    """The other columns of its row, or what the source's own reward needs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One prompt, ready for generation.

    Example:
        `Prompt(index=3, text="sort 4135", answer="1345", ids=(258, 117, ...))`
    """

    index: int
    """Position in its `PromptSet`."""
    text: str
    """As the source gave it, without template."""
    answer: object
    ids: tuple[int, ...]
    """Tokens of the whole prompt, chat template included, up to where the assistant begins."""
    metadata: Mapping[str, object] = field(default_factory=dict)
    category: str | None = None
    """What `category_key` says of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptSet:
    """Prompts of one source, and what was left out."""

    prompts: tuple[Prompt, ...]
    num_skipped_overlong: int = 0
    """Prompts longer than `data.max_input_seq_length`."""
    num_skipped_overlap: int = 0
    """Training prompts whose text also occurs in validation."""

    def __len__(self) -> int:
        return len(self.prompts)


def build_prompt_sets(cfg: DataConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[PromptSet, Mapping[str, PromptSet]]:
    """Training prompts, and the held-out ones by the name of their set; a held-out text is not trained on.

    Raises:
        DatasetError: a source is missing, malformed or empty, or a prompt is too long and must not be skipped.
    """
    held_out = load_held_out(cfg, tokenizer)
    texts = frozenset(prompt.text for prompts in held_out.values() for prompt in prompts.prompts)
    return load_prompts(cfg.train, tokenizer, limits=cfg, where="data.train", exclude=texts), held_out


def load_held_out(cfg: DataConfig, tokenizer: PreTrainedTokenizerBase) -> Mapping[str, PromptSet]:
    """The validation sets by name, the main one first; raises as `build_prompt_sets`."""
    return {
        name: load_prompts(source, tokenizer, limits=cfg, where=cfg.held_out_key(name))
        for name, source in cfg.held_out.items()
    }


def load_prompts(
    cfg: DatasetConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    limits: DataConfig,
    where: str,
    exclude: Collection[str] = frozenset(),
) -> PromptSet:
    """The prompts of one source.

    Args:
        limits: length limit and what to do with longer prompts.
        where: dotted path of `cfg`, for messages.
        exclude: texts to leave out.
    """
    prompts: list[Prompt] = []
    num_overlong = num_overlap = num_read = 0
    for raw in raw_prompts(cfg, where, exclude):
        num_read += 1
        if raw.text in exclude:
            num_overlap += 1
            continue
        ids = _encode(raw, cfg, tokenizer, limit=limits.max_input_seq_length)
        if ids is None or len(ids) > limits.max_input_seq_length:
            if limits.overlong_prompts == "error":
                size = f"{len(raw.text)} characters" if ids is None else f"{len(ids)} tokens"
                raise DatasetError(
                    f"{where}: prompt {num_read - 1} has {size}, data.max_input_seq_length allows "
                    f"{limits.max_input_seq_length} tokens: {raw.text[:80]!r}; raise the limit or set "
                    "data.overlong_prompts=skip"
                )
            num_overlong += 1
            continue
        if not ids:
            raise DatasetError(f"{where}: prompt {num_read - 1} has no tokens: {raw.text[:80]!r}; leave it out")
        prompts.append(
            Prompt(
                index=len(prompts),
                text=raw.text,
                answer=raw.answer,
                ids=ids,
                metadata=raw.metadata,
                category=_category(raw, cfg, place=f"{where}: prompt {num_read - 1}"),
            )
        )
    if not prompts:
        raise DatasetError(
            f"{where}: no prompt is left of {num_read} read: {num_overlong} are longer than "
            f"data.max_input_seq_length {limits.max_input_seq_length} tokens, {num_overlap} also occur in validation"
        )
    return PromptSet(prompts=tuple(prompts), num_skipped_overlong=num_overlong, num_skipped_overlap=num_overlap)


def raw_prompts(cfg: DatasetConfig, where: str, exclude: Collection[str] = frozenset()) -> Iterator[RawPrompt]:
    """The prompts of one source, one by one, without template and limits.

    Raises:
        DatasetError: whatever is wrong with the source, with its place.
    """
    with boundary(DatasetError, f"{where}: dataset {cfg.dataset_name!r} {cfg.data_path or cfg.task or ''}".rstrip()):
        source: Source = DATASETS.load(cfg.dataset_name, key=f"{where}.dataset_name")
        yield from source(cfg, where, exclude)


def _category(raw: RawPrompt, cfg: DatasetConfig, *, place: str) -> str | None:
    if cfg.category_key is None:
        return None
    found = raw.metadata.get(cfg.category_key)
    if isinstance(found, str | int) and str(found):
        return str(found)
    raise DatasetError(
        f"{place}: category_key {cfg.category_key!r}: expected a text or a whole number, got {shorten(repr(found))}; "
        f"it has {shorten(str(sorted(raw.metadata)))}"
    )


def _encode(
    raw: RawPrompt, cfg: DatasetConfig, tokenizer: PreTrainedTokenizerBase, *, limit: int
) -> tuple[int, ...] | None:
    """Tokens of a prompt; None for a text that is too long whatever its tokens are."""
    if len(raw.text) > limit * CHARACTERS_PER_TOKEN:
        return None
    messages = prompt_messages(raw.text, system_prompt=cfg.system_prompt, prompt_template=cfg.prompt_template)
    return encode_prompt(tokenizer, messages)


Source = Callable[[DatasetConfig, str, Collection[str]], Iterator[RawPrompt]]
"""What `dataset_name` names: its section, the section's dotted path for messages, and texts that a generator should
avoid -> prompts."""


# ---- sources


def sort_digits_prompts(cfg: DatasetConfig, where: str, exclude: Collection[str]) -> Iterator[RawPrompt]:
    limits: dict[str, int] = {}
    for name, value in cfg.options.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise DatasetError(f"{where}.options.{name}: expected an integer, got {value!r}")
        limits[name] = value
    for problem in sort_digits.problems(cfg.size or 0, seed=cfg.seed, exclude=exclude, **limits):
        yield RawPrompt(text=problem.prompt, answer=problem.answer, metadata={"digits": len(problem.answer)})


def reasoning_gym_prompts(cfg: DatasetConfig, where: str, exclude: Collection[str]) -> Iterator[RawPrompt]:
    del exclude
    task = reasoning_gym_wrapper.Task(name=cfg.task or "", size=cfg.size or 0, seed=cfg.seed, options=dict(cfg.options))
    for index, item in enumerate(reasoning_gym_wrapper.questions(task, where=where)):
        yield RawPrompt(text=item.question, answer=item.answer, metadata={"task": task.to_json(), "index": index})


def jsonl_prompts(cfg: DatasetConfig, where: str, exclude: Collection[str]) -> Iterator[RawPrompt]:
    del exclude
    path = cfg.data_path
    assert path is not None, "rule_dataset_keys_fit_their_kind lets no jsonl dataset pass without data_path"
    try:
        if path.exists() and not path.is_file():
            raise DatasetError(f"{where}.data_path: {path} is no regular file; expected a JSON Lines file")
        # utf-8-sig: files of some editors begin with a byte order mark.
        with path.open(encoding="utf-8-sig") as file:
            filled = ((number, line) for number, line in enumerate(_lines(file, path), start=1) if line.strip())
            for number, line in islice(filled, cfg.size):
                yield _raw_prompt(_json_object(line, place=f"{path}:{number}"), cfg, place=f"{path}:{number}")
    except OSError as error:
        raise DatasetError(
            f"{where}.data_path: {path} cannot be read: {error.strerror}; expected a JSON Lines file"
        ) from error
    except UnicodeDecodeError as error:
        raise DatasetError(f"{where}.data_path: {path} is no UTF-8 text: {error}") from error


def _lines(file: TextIO, path: Path) -> Iterator[str]:
    """The lines of a file; one that has no end is refused before it fills the memory."""
    number = 0
    while line := file.readline(MAX_ROW_CHARACTERS + 1):
        number += 1
        if len(line) > MAX_ROW_CHARACTERS:
            raise DatasetError(
                f"{path}:{number}: expected a line of at most {MAX_ROW_CHARACTERS} characters; is each JSON object on "
                "a line of its own?"
            )
        yield line


def huggingface_prompts(cfg: DatasetConfig, where: str, exclude: Collection[str]) -> Iterator[RawPrompt]:
    del exclude
    path = cfg.data_path
    assert path is not None, "rule_dataset_keys_fit_their_kind lets no huggingface dataset pass without data_path"
    rows = huggingface_wrapper.rows(path, split=cfg.split, where=where)
    for number, row in enumerate(islice(rows, cfg.size)):
        yield _raw_prompt(row, cfg, place=f"{path} row {number}")


def _json_object(line: str, *, place: str) -> Mapping[str, object]:
    try:
        row = json.loads(line)
        if _HALF_PAIR.search(line):
            json.dumps(row, ensure_ascii=False).encode("utf-8")
    except json.JSONDecodeError as error:
        raise DatasetError(f"{place}: expected a JSON object per line: {error}") from error
    except UnicodeEncodeError as error:
        raise DatasetError(f"{place}: expected Unicode texts, got half a surrogate pair: {error.reason}") from error
    except (ValueError, RecursionError) as error:
        # A number of thousands of digits, or lists in lists in lists.
        raise DatasetError(f"{place}: expected a JSON object that can be read: {shorten(str(error))}") from error
    if not isinstance(row, dict):
        raise DatasetError(f"{place}: expected a JSON object, got {type(row).__name__}")
    return row


def _raw_prompt(row: Mapping[str, object], cfg: DatasetConfig, *, place: str) -> RawPrompt:
    missing = [key for key in (cfg.input_key, cfg.output_key) if key not in row]
    if missing:
        raise DatasetError(
            f"{place}: no {' and no '.join(map(repr, missing))}, got {shorten(str(sorted(row)))}; set input_key and "
            "output_key"
        )
    text = row[cfg.input_key]
    if not isinstance(text, str) or not text:
        raise DatasetError(f"{place}: {cfg.input_key!r}: expected a text, got {shorten(repr(text))}")
    others = {name: value for name, value in row.items() if name not in (cfg.input_key, cfg.output_key)}
    return RawPrompt(text=text, answer=row[cfg.output_key], metadata=others)
