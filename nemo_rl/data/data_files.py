"""Files of rows: which ones of a folder belong to which split, and the values that each one has.

`folder_splits` sorts the files of a folder, `file_rows` reads one. Both sources of files call `json_rows`, so that a
JSON Lines file has the same rows for either. Invariant: a value is what the file says; no type is guessed.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path, PurePath
from typing import IO, Any, TextIO, cast

from nemo_rl.errors import DatasetError, name_some, shorten

__all__ = [
    "KINDS",
    "FolderFiles",
    "file_rows",
    "folder_splits",
    "json_rows",
    "kind_of",
    "open_text",
    "split_named",
    "splits_of",
]

MAX_ROW_CHARACTERS = 2**26
"""Most characters of one line of a file: more than any prompt that fits a context, little enough to be held."""
ROWS_AT_ONCE = 1024
KINDS: Mapping[str, str] = {".json": "json", ".jsonl": "json", ".csv": "csv", ".tsv": "csv", ".parquet": "parquet"}
"""Kinds of files by their suffix; `.gz` and `.zst` may follow it."""
_COMPRESSED = (".gz", ".zst")
_HALF_PAIR = re.compile(r"\\u[dD][89a-fA-F]")
_KEYWORDS: Mapping[str, tuple[str, ...]] = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_NO_ROWS = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "config.json", "state.json")


@dataclass(frozen=True, kw_only=True, slots=True)
class FolderFiles:
    """Files of a folder by their split, and what is none of its data."""

    splits: Mapping[str, list[Path]]
    left_out: list[Path] = field(default_factory=list)
    """Hidden files, those of editors and caches, other kinds, and beside files of a split those of none."""

    def remark(self, chosen: str, folder: Path) -> str:
        """Return what was taken for a split and what was left out, in one line."""
        others = [
            f"{name} ({name_some([str(file.relative_to(folder)) for file in files])})"
            for name, files in self.splits.items()
            if name != chosen
        ]
        others += [name_some([str(file.relative_to(folder)) for file in self.left_out])] if self.left_out else []
        taken = name_some([str(file.relative_to(folder)) for file in self.splits[chosen]])
        return f"{folder}: split {chosen} is read from {taken}; left out: {'; '.join(others) or 'nothing'}"


def split_named(name: str) -> str | None:
    """Return the split that a name of a file or folder says, or None.

    Example:
        >>> split_named("gsm8k-dev.jsonl"), split_named("training_1"), split_named("trainers")
        ('validation', 'train', None)
    """
    words = re.split(r"[-._ 0-9]+", name.lower())
    return next(
        (split for split, keywords in _KEYWORDS.items() if split != "train" and set(words) & {*keywords}), None
    ) or ("train" if set(words) & {*_KEYWORDS["train"]} else None)


def kind_of(path: PurePath) -> str | None:
    """Return the kind of a file by its suffixes, or None for one that holds no rows."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in _COMPRESSED:
        suffixes.pop()
    return KINDS.get(suffixes[-1]) if suffixes and path.name not in _NO_ROWS else None


def folder_splits(folder: Path) -> FolderFiles:
    """Return the files of a folder by the split that a folder, or else their own name, says.

    Where none says one, all of them are `train`.
    """
    found: dict[str, list[Path]] = {}
    unnamed, left_out = list[Path](), list[Path]()
    for file in sorted(file for file in folder.rglob("*") if file.is_file()):
        parts = file.relative_to(folder).parts
        if kind_of(file) is None or any(part.startswith((".", "__", "#", "~")) for part in parts):
            left_out.append(file)
            continue
        named = next(filter(None, map(split_named, parts)), None)
        (unnamed if named is None else found.setdefault(named, [])).append(file)
    if not found and unnamed:
        return FolderFiles(splits={"train": unnamed}, left_out=left_out)
    return FolderFiles(splits=found, left_out=[*unnamed, *left_out])


def splits_of(folder: Path, config: Mapping[str, Any], where: str) -> FolderFiles:
    """Return the files of a subset as the card of a folder tells them."""
    given = config.get("data_files")
    if not given:
        return folder_splits(folder / str(config.get("data_dir") or "."))
    if isinstance(given, Mapping):
        given = [{"split": split, "path": path} for split, path in given.items()]
    found: dict[str, list[Path]] = {}
    for part in given if isinstance(given, list) else [given]:
        split, paths = (part.get("split", "train"), part["path"]) if isinstance(part, Mapping) else ("train", part)
        for pattern in [paths] if isinstance(paths, str) else paths:
            if Path(pattern).is_absolute() or ".." in Path(pattern).parts:
                raise DatasetError(f"{where}: {folder}: its card names {pattern!r}, which is outside of the folder")
            files = sorted(file for file in folder.glob(pattern) if file.is_file() and kind_of(file) is not None)
            found.setdefault(str(split), []).extend(file for file in files if not file.name.startswith("."))
    taken = {file for files in found.values() for file in files}
    others = [file for file in sorted(folder.rglob("*")) if file.is_file() and file not in taken]
    return FolderFiles(splits={split: files for split, files in found.items() if files}, left_out=others)


def file_rows(path: Path) -> Iterator[Mapping[str, object]]:
    """Yield the rows of one file.

    Values of JSON are its own, those of CSV are texts, and those of parquet have the types of its columns.

    Raises:
        DatasetError: the file is damaged, or a row has another number of cells than the head.
    """
    kind = kind_of(path)
    if kind == "parquet":
        yield from _parquet_rows(path)
        return
    try:
        with open_text(path) as file:
            if kind == "csv":
                yield from _csv_rows(file, path)
            elif _begins_a_list(path):
                yield from _listed_rows(file, path)
            else:
                for _, row in json_rows(file, path):
                    yield row
    except (UnicodeDecodeError, gzip.BadGzipFile, EOFError) as error:
        raise DatasetError(f"{path} is damaged, or no UTF-8 text: {error}; write it again") from error


def json_rows(file: TextIO, path: Path) -> Iterator[tuple[str, Mapping[str, object]]]:
    """Yield the place and the object of each line of a JSON Lines file, empty lines left out."""
    for number, line in enumerate(_lines(file, path), start=1):
        if line.strip():
            place = f"{path}:{number}"
            yield place, _json_object(line, place=place)


def open_text(path: Path) -> TextIO:
    """Open a text, compressed or not. Some editors begin their files with a byte order mark."""
    raw: IO[bytes]
    if path.suffix.lower() == ".gz":
        raw = cast("IO[bytes]", gzip.GzipFile(path, "rb"))
    elif path.suffix.lower() == ".zst":
        import pyarrow  # noqa: PLC0415  (optional extra)

        raw = pyarrow.input_stream(str(path), compression="zstd")
    else:
        raw = path.open("rb")
    return io.TextIOWrapper(raw, encoding="utf-8-sig", newline="")


def _begins_a_list(path: Path) -> bool:
    """Return whether a file is one JSON list of rows."""
    with open_text(path) as file:
        while (character := file.read(1)).isspace():
            pass
        following = file.readline(MAX_ROW_CHARACTERS).strip()
    return character == "[" and ".jsonl" not in path.suffixes and (not following or following[0] in "{]")


def _listed_rows(file: TextIO, path: Path) -> Iterator[Mapping[str, object]]:
    found = _parsed(file.read(), place=str(path))
    for number, row in enumerate(cast("list[object]", found)):
        if not isinstance(row, dict):
            raise DatasetError(f"{path}: row {number}: expected a JSON object, got {type(row).__name__}")
        yield row


def _csv_rows(file: TextIO, path: Path) -> Iterator[Mapping[str, object]]:
    csv.field_size_limit(MAX_ROW_CHARACTERS)
    delimiter = "\t" if ".tsv" in (suffix.lower() for suffix in path.suffixes) else ","
    reader = csv.reader(file, delimiter=delimiter, strict=True)
    try:
        head = next(reader, [])
        for cells in reader:
            if cells and len(cells) != len(head):
                raise DatasetError(
                    f"{path}:{reader.line_num}: expected {len(head)} cells as in its head, got {len(cells)}; quote "
                    "texts that have a comma"
                )
            if cells:
                yield dict(zip(head, cells, strict=True))
    except csv.Error as error:
        raise DatasetError(f"{path}:{reader.line_num}: expected a row of CSV: {error}") from error


def _parquet_rows(path: Path) -> Iterator[Mapping[str, object]]:
    import pyarrow  # noqa: PLC0415  (optional extra)
    import pyarrow.parquet  # noqa: PLC0415  (optional extra)

    try:
        source = path if path.suffix.lower() == ".parquet" else pyarrow.py_buffer(_bytes(path))
        with pyarrow.parquet.ParquetFile(source) as file:
            for batch in file.iter_batches(batch_size=ROWS_AT_ONCE):
                yield from batch.to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise DatasetError(f"{path}: expected a parquet file: {shorten(str(error))}") from error


def _bytes(path: Path) -> bytes:
    with open_text(path) as file:
        return bytes(file.buffer.read())


def _lines(file: TextIO, path: Path) -> Iterable[str]:
    """Yield the lines of a file; one that has no end is refused before it fills the memory."""
    number = 0
    while line := file.readline(MAX_ROW_CHARACTERS + 1):
        number += 1
        if len(line) > MAX_ROW_CHARACTERS:
            raise DatasetError(
                f"{path}:{number}: expected a line of at most {MAX_ROW_CHARACTERS} characters; is each JSON object on "
                "a line of its own?"
            )
        yield line


def _json_object(line: str, *, place: str) -> Mapping[str, object]:
    row = _parsed(line, place=place)
    if not isinstance(row, dict):
        raise DatasetError(f"{place}: expected a JSON object, got {type(row).__name__}")
    return row


def _parsed(text: str, *, place: str) -> object:
    try:
        found = json.loads(text, parse_float=_number)
        if _HALF_PAIR.search(text):
            json.dumps(found, ensure_ascii=False).encode("utf-8")
    except json.JSONDecodeError as error:
        raise DatasetError(f"{place}: expected a JSON object per line: {error}") from error
    except UnicodeEncodeError as error:
        raise DatasetError(f"{place}: expected Unicode texts, got half a surrogate pair: {error.reason}") from error
    except (ValueError, RecursionError) as error:
        # A number of thousands of digits, or lists in lists in lists.
        raise DatasetError(f"{place}: expected a JSON object that can be read: {shorten(str(error))}") from error
    return found


def _number(digits: str) -> float | str:
    """Return a number with a point or an exponent; as a text where a float would have other digits."""
    found = float(digits)
    return found if Decimal(repr(found)) == Decimal(digits) else digits
