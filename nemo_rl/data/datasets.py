"""Prompt datasets by name: `build_prompt_sets` for a run, `load_prompts` for one source.

Called by the rollout worker. A source yields `RawPrompt`s; everything after that (JSON values, template, tokens, length
limit, overlap with validation) is the same for all. A source is a `Source`: a built-in one, listed in `config.parts`,
or a user-defined one. Invariant: every row is read once, before the first prompt is drawn, and all rows that cannot be
used are counted in one message.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any, Protocol, runtime_checkable
from uuid import UUID

from transformers import PreTrainedTokenizerBase

from nemo_rl.config.data import DataConfig, DatasetConfig
from nemo_rl.config.parts import DATASETS
from nemo_rl.data.conversation import Message
from nemo_rl.data.messages import PromptEncoder, prompt_messages
from nemo_rl.data.pictures import IMAGE, EncodesPictures, Picture, pictures_of
from nemo_rl.errors import NAMES_SHOWN, DatasetError, boundary, shorten

__all__ = [
    "MISSING",
    "Prompt",
    "PromptSet",
    "RawPrompt",
    "RowProblems",
    "Source",
    "build_prompt_sets",
    "json_value",
    "load_held_out",
    "load_prompts",
    "raw_prompts",
    "tools_of",
    "value_at",
]

CHARACTERS_PER_TOKEN = 256
"""More than the longest tokens have (runs of blanks): texts beyond the limit times this are not given to a tokenizer,
whose time grows faster than the text."""
DIGEST_BYTES = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class RawPrompt:
    """A prompt as a source yields it."""

    text: str
    """A row of a file may have anything here: what is no text is refused by `load_prompts`."""
    answer: object
    """JSON-like; what an environment compares with."""
    metadata: Mapping[str, object] = field(default_factory=dict)
    """The other columns of its row, or what the source's own reward needs."""
    place: str = ""
    """The place of the row, such as `train.jsonl:7`; empty for a generated one."""
    remark: str = ""
    """A line about its source, for the user; the first prompt of a source has it."""
    history: tuple[Message, ...] = ()
    """Messages before the text, which is the last one of the user."""
    images: object = None
    """Pictures as `pictures_of` takes them; None: the prompt has none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One prompt, ready for generation.

    Example:
        `Prompt(index=3, text="sort 4135", answer="1345", ids=(258, 117, ...))`
    """

    index: int
    """Position in its `PromptSet`."""
    text: str
    """The text as the source gave it, without template."""
    answer: object
    ids: tuple[int, ...]
    """Tokens of the whole prompt, chat template included, up to where the assistant begins."""
    metadata: Mapping[str, object] = field(default_factory=dict)
    category: str | None = None
    """The category that `category_key` names, or None without one."""
    place: str = ""
    """Number of its row, and where that stands."""
    section: str = ""
    """Dotted path of the section of its source."""
    messages: tuple[Message, ...] = ()
    """The conversation that it opens, of which `ids` are the tokens."""
    history: tuple[Message, ...] = ()
    """Messages of its row before the text."""
    pictures: tuple[Picture, ...] = ()
    """Its images, which stand before the text; `ids` have a token for every feature of them."""
    unexpanded: tuple[int, ...] = ()
    """The tokens with one place for each picture; empty without pictures."""

    @property
    def identity(self) -> str:
        """Return what tells prompts apart: equal texts with other pictures or after other messages are others."""
        return _identity(self.text, self.pictures, self.history)


def _identity(text: str, pictures: Sequence[Picture], history: Sequence[Message]) -> str:
    before = (f"{message.role}: {message.content}" for message in history)
    return "\0".join((text, *(picture.digest for picture in pictures), *before))


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptSet:
    """Prompts of one source, and what was left out."""

    prompts: tuple[Prompt, ...]
    num_skipped_overlong: int = 0
    """Prompts longer than `data.max_input_seq_length`."""
    skipped: tuple[str, ...] = ()
    """The first of the overlong ones, for people."""
    digest: str = ""
    """Return a digest of texts, answers and metadata in their order, and of what is put around the texts."""
    is_whole: bool = True
    """False where only the first rows were asked for and there are more."""
    prints_the_date: bool = False
    """True where the chat template makes other prompts of it on another day."""
    remarks: tuple[str, ...] = ()
    """Lines about rows that are unlike the others, for the user."""

    def __len__(self) -> int:
        return len(self.prompts)


class RowProblems:
    """Rows of one source that cannot be used: all are counted, the first of each kind are quoted.

    Args:
        where: dotted path of the source's section.
    """

    def __init__(self, where: str) -> None:
        self._where = where
        self._lines: dict[str, list[str]] = {}
        self._counts: dict[str, int] = {}

    def add(self, kind: str, line: str) -> None:
        """Note one row.

        Args:
            kind: what is wrong, the same for all rows of which it is.
            line: names the row.
        """
        self._counts[kind] = self._counts.get(kind, 0) + 1
        lines = self._lines.setdefault(kind, [])
        if len(lines) < NAMES_SHOWN:
            lines.append(line)

    def check(self, num_read: int) -> None:
        """
        Raises:
            DatasetError: there are such rows.
        """
        if not self._counts:
            return
        lines = [line for kind in self._lines.values() for line in kind]
        counts = "; ".join(f"{count} {kind}" for kind, count in self._counts.items())
        summary = f"{self._where}: of {num_read} rows read these cannot be used: {counts}"
        raise DatasetError("\n".join([*lines, summary] if sum(self._counts.values()) > 1 else lines))


def build_prompt_sets(
    cfg: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    now: datetime | None = None,
    max_rows: int | None = None,
    tools: Sequence[Mapping[str, Any]] = (),
    pictures: EncodesPictures | None = None,
) -> dict[str, PromptSet]:
    """Return the prompts of every source by the dotted path of its section, those of training first; a held-out text is
    not trained on.

    Args:
        now: the time that a chat template sees; None: that of the clock.
        max_rows: of each source; None reads all.
        tools: schemas that the chat template prints in every prompt whose section does not choose among them, in the
            form of OpenAI.
        pictures: of the model, where prompts have images.

    Raises:
        DatasetError: a source is missing, malformed or empty, or has rows that cannot be used.
    """
    held_out = load_held_out(cfg, tokenizer, now=now, max_rows=max_rows, tools=tools, pictures=pictures)
    texts = frozenset(prompt.identity for prompts in held_out.values() for prompt in prompts.prompts)
    found = {
        where: load_prompts(
            source,
            _encoder(source, tokenizer, now, tools_of(source, where, tools), pictures),
            limits=cfg,
            where=where,
            exclude=texts,
            max_rows=max_rows,
        )
        for where, source in cfg.sources.items()
    }
    return found | {cfg.held_out_key(name): prompts for name, prompts in held_out.items()}


def load_held_out(
    cfg: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    now: datetime | None = None,
    max_rows: int | None = None,
    tools: Sequence[Mapping[str, Any]] = (),
    pictures: EncodesPictures | None = None,
) -> Mapping[str, PromptSet]:
    """Return the validation sets by name, the main one first; arguments and errors as of `build_prompt_sets`."""
    return {
        name: load_prompts(
            source,
            _encoder(source, tokenizer, now, tools_of(source, cfg.held_out_key(name), tools), pictures),
            limits=cfg,
            where=cfg.held_out_key(name),
            max_rows=max_rows,
        )
        for name, source in cfg.held_out.items()
    }


def tools_of(cfg: DatasetConfig, where: str, tools: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    """Return the schemas of the tools that the prompts of a section have.

    Args:
        where: dotted path of the section.
        tools: schemas of all tools of the run.

    Raises:
        DatasetError: the section names a tool that there is none of.
    """
    if cfg.tools is None:
        return tuple(tools)
    by_name = {str(schema["function"]["name"]): schema for schema in tools}
    if unknown := [name for name in cfg.tools if name not in by_name]:
        raise DatasetError(f"{where}.tools: expected some of {sorted(by_name)}, got {unknown[0]!r}")
    return tuple(schema for name, schema in by_name.items() if name in cfg.tools)


def _encoder(
    cfg: DatasetConfig,
    tokenizer: PreTrainedTokenizerBase,
    now: datetime | None,
    tools: Sequence[Mapping[str, object]],
    pictures: EncodesPictures | None,
) -> PromptEncoder:
    return PromptEncoder(tokenizer, now=now, with_template=cfg.apply_chat_template, tools=tools, pictures=pictures)


def load_prompts(
    cfg: DatasetConfig,
    encoder: PromptEncoder,
    *,
    limits: DataConfig,
    where: str,
    exclude: Collection[str] = frozenset(),
    max_rows: int | None = None,
) -> PromptSet:
    """Return the prompts of one source.

    Args:
        limits: length limit and what to do with longer prompts.
        where: dotted path of `cfg`, for messages.
        exclude: texts to leave out.
        max_rows: as in `build_prompt_sets`.
    """
    rows = _PromptReader(cfg, encoder, limits=limits, where=where, exclude=exclude)
    is_whole = True
    for raw in raw_prompts(cfg, where, exclude):
        if rows.num_read == max_rows:
            is_whole = False
            break
        rows.take(raw)
    rows.problems.check(rows.num_read)
    if not rows.prompts:
        raise DatasetError(
            f"{where}: no prompt is left of {rows.num_read} read: {rows.num_overlong} are longer than "
            f"data.max_input_seq_length {limits.max_input_seq_length} tokens, {rows.num_overlap} also occur in "
            "validation"
        )
    return PromptSet(
        prompts=tuple(rows.prompts),
        num_skipped_overlong=rows.num_overlong,
        skipped=tuple(rows.skipped),
        digest=rows.digest.hexdigest(),
        is_whole=is_whole,
        prints_the_date=encoder.prints_the_date(),
        remarks=rows.remarks(),
    )


def raw_prompts(cfg: DatasetConfig, where: str, exclude: Collection[str] = frozenset()) -> Iterator[RawPrompt]:
    """Yield the prompts of one source, one by one, without template and limits.

    Raises:
        DatasetError: whatever is wrong with the source, with its place.
    """
    with boundary(DatasetError, f"{where}: dataset {cfg.dataset_name!r} {cfg.data_path or cfg.task or ''}".rstrip()):
        source: Source = DATASETS.load(cfg.dataset_name, key=f"{where}.dataset_name")
        yield from source(cfg, where, exclude)


class _PromptReader:
    """Makes the rows of one source into prompts, one by one."""

    def __init__(
        self, cfg: DatasetConfig, encoder: PromptEncoder, *, limits: DataConfig, where: str, exclude: Collection[str]
    ) -> None:
        self._cfg, self._encoder, self._limits, self._where, self._exclude = cfg, encoder, limits, where, exclude
        self.problems = RowProblems(where)
        self.prompts: list[Prompt] = []
        self.num_read = self.num_overlong = self.num_overlap = 0
        self._counts: Counter[str] = Counter()
        self.skipped: list[str] = []
        self._remarks: list[str] = []
        around: list[object] = [cfg.system_prompt, cfg.prompt_template, cfg.apply_chat_template]
        around += [] if cfg.tools is None else [sorted(cfg.tools)]
        self.digest = hashlib.blake2b(json.dumps(around).encode(), digest_size=DIGEST_BYTES)

    def take(self, raw: RawPrompt) -> None:
        """Add the row's prompt, or counts why there is none."""
        number, text = self.num_read, raw.text
        self._remarks += [f"{self._where}: {raw.remark}"] if raw.remark else []
        self.num_read += 1
        place = f"prompt {number}" + (f" ({raw.place})" if raw.place else "")
        if not isinstance(text, str) or not text.strip():
            what = f"expected a text, got {shorten(repr(text))}"
            self.problems.add("without a prompt", f"{raw.place or place}: {self._cfg.input_key!r}: {what}")
            return
        try:
            pictures = self._pictures(raw)
            if _identity(text, pictures, raw.history) in self._exclude:
                self.num_overlap += 1
                return
            prompt = self._prompt(raw, text, place, pictures)
        except _Unusable as error:
            self.problems.add(error.kind, f"{self._where}: prompt {number}{error.text}" + _at(raw.place))
            return
        if prompt is not None:
            self.prompts.append(prompt)
            row = json.dumps([prompt.identity, prompt.answer, prompt.metadata], sort_keys=True)
            self.digest.update(row.encode() + b"\n")

    def _pictures(self, raw: RawPrompt) -> tuple[Picture, ...]:
        folder = self._cfg.data_path.parent if self._cfg.data_path is not None else None
        if self._cfg.data_path is not None and self._cfg.data_path.is_dir():
            folder = self._cfg.data_path
        try:
            found = pictures_of(raw.images, folder=folder)
        except DatasetError as error:
            raise _Unusable("with a picture that cannot be used", f": {error}") from error
        has_places = bool(found) or self._cfg.has_images
        num_places = self._messages(raw)[-1].content.count(IMAGE) if has_places else 0
        if num_places not in {0, len(found)}:
            raise _Unusable(
                f"with another number of pictures than {IMAGE} in the text",
                f": {num_places} times {IMAGE} in {self._cfg.input_key!r}, and {len(found)} pictures"
                + (f" in {self._cfg.image_key!r}" if self._cfg.image_key else ""),
            )
        self._counts["without a picture"] += self._cfg.has_images and not found
        self._counts[f"with pictures at {IMAGE} in the text"] += num_places > 0
        self._counts["with animations, of which the first frame counts"] += any(each.num_frames > 1 for each in found)
        return found

    def remarks(self) -> tuple[str, ...]:
        """Return what is read of the source, and how many rows are unlike the others, each in one line."""
        told = [f"{count} {what}" for what, count in self._counts.items() if count]
        rows = (f"{self._where}: of {self.num_read} rows {', '.join(told)}",) if told else ()
        return (*self._remarks, *rows)

    def _prompt(self, raw: RawPrompt, text: str, place: str, pictures: tuple[Picture, ...]) -> Prompt | None:
        """Return the encoded prompt, or None for one that is too long and may be skipped."""
        answer, metadata = _checked_value(raw.answer, self._cfg.output_key), {}
        for name, value in raw.metadata.items():
            metadata[name] = _checked_value(value, name)
        limit = self._limits.max_input_seq_length
        messages = self._messages(raw)
        unexpanded, ids = self._ids(text, messages, limit, pictures)
        if ids is None or len(ids) > limit:
            size = f"{len(text)} characters" if ids is None else f"{len(ids)} tokens"
            if self._limits.overlong_prompts == "error":
                raise _Unusable(
                    "too long",
                    f" has {size}, data.max_input_seq_length allows {limit} tokens: {text[:80]!r}; raise the limit or "
                    "set data.overlong_prompts=skip",
                )
            self.num_overlong += 1
            if len(self.skipped) < NAMES_SHOWN:
                self.skipped.append(f"{place} with {size}")
            return None
        if not ids:
            raise _Unusable("without tokens", f" has no tokens: {text[:80]!r}; leave it out")
        return Prompt(
            index=len(self.prompts),
            text=text,
            answer=answer,
            ids=ids,
            metadata=metadata,
            category=_category(metadata, self._cfg),
            place=place,
            section=self._where,
            messages=messages,
            history=raw.history,
            pictures=pictures,
            unexpanded=unexpanded,
        )

    def _messages(self, raw: RawPrompt) -> tuple[Message, ...]:
        cfg = self._cfg
        return tuple(
            prompt_messages(
                str(raw.text),
                system_prompt=cfg.system_prompt,
                prompt_template=cfg.prompt_template,
                history=raw.history,
            )
        )

    def _ids(
        self, text: str, messages: Sequence[Message], limit: int, pictures: Sequence[Picture]
    ) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
        """Return the tokens of a prompt with one place per picture, and those with its features; None for a text that
        is too long whatever its tokens are."""
        if len(text) > limit * CHARACTERS_PER_TOKEN:
            return (), None
        try:
            if not pictures:
                return (), self._encoder.encode(messages)
            unexpanded = self._encoder.encode_with(messages, num_pictures=len(pictures))
            return unexpanded, self._encoder.expand(unexpanded, pictures)
        except DatasetError as error:
            raise _Unusable("that the chat template or the tokenizer does not keep", f": {error}") from error


class _Unusable(Exception):
    """A row that cannot be used: what is wrong with rows of its kind, and with this one."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind, self.text = kind, text


def _at(place: str) -> str:
    return f" ({place})" if place else ""


def _checked_value(value: object, column: str) -> object:
    try:
        return json_value(value)
    except ValueError as error:
        raise _Unusable("with columns that are not JSON", f": column {column!r}: {error}; leave it out") from error


MISSING = object()


def value_at(row: Mapping[str, object], key: str) -> object:
    """Return the value of a column, or of a dotted path into one; `MISSING` where there is none."""
    if key in row:
        return row[key]
    found: object = row
    for name in key.split("."):
        if not isinstance(found, Mapping) or name not in found:
            return MISSING
        found = found[name]
    return found


def _category(metadata: Mapping[str, object], cfg: DatasetConfig) -> str | None:
    if cfg.category_key is None:
        return None
    found = value_at(metadata, cfg.category_key)
    if isinstance(found, str | int) and str(found):
        return str(found)
    raise _Unusable(
        "without a category",
        f": category_key {cfg.category_key!r}: expected a text or a whole number, got "
        f"{'nothing' if found is MISSING else shorten(repr(found))}; it has "
        f"{shorten(str(sorted(metadata)))}",
    )


Source = Callable[[DatasetConfig, str, Collection[str]], Iterator[RawPrompt]]
"""The function that `dataset_name` names: its section, the section's dotted path for messages, and texts that a
generator should avoid -> prompts."""


# ---- values of columns


@runtime_checkable
class _ArrayLike(Protocol):
    """A number or an array of numpy or torch."""

    def tolist(self) -> object: ...


def json_value(value: object) -> object:
    """Return `value` as a reward gets it: JSON values, and others that have one way to be written as such.

    Dates and times become ISO texts, durations seconds, decimals and UUIDs their text, bytes the UTF-8 text that they
    are, arrays and tuples lists.

    Example:
        >>> json_value({"on": date(2025, 1, 2), "price": Decimal("1.50"), "of": (1, b"ab")})
        {'on': '2025-01-02', 'price': '1.50', 'of': [1, 'ab']}

    Raises:
        ValueError: it has none; names its type, and its place in lists and dictionaries.
    """
    return _json_value(value, "")


def _json_value(value: object, at: str) -> object:
    # Subclasses of them (numpy's texts and numbers) are written as they are.
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {_json_key(key, at): _json_value(item, f"{at}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json_value(item, f"{at}[{number}]") for number, item in enumerate(value)]
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, Decimal | UUID):
        return str(value)
    if isinstance(value, bytes | bytearray):
        try:
            return bytes(value).decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(
                f"expected a JSON value, got {len(value)} bytes that are not UTF-8 text{_of(at)}"
            ) from error
    if isinstance(value, _ArrayLike):
        return _json_value(value.tolist(), at)
    raise ValueError(f"expected a JSON value, got {type(value).__name__}{_of(at)}")


def _json_key(key: object, at: str) -> str:
    if isinstance(key, str | int):
        return str(key)
    raise ValueError(f"expected texts as keys, got {shorten(repr(key))}{_of(at)}")


def _of(at: str) -> str:
    return f" at {at.removeprefix('.')}" if at else ""
