"""Files and folders of rows, as Hugging Face `datasets` (extra `data`) has them. The only file that names the library.

`rows` reads local files: a folder written by `save_to_disk`, or files whose names or card say their splits. `hub_rows`
reads a dataset of the hub: the files of one subset are downloaded to the cache of huggingface_hub; without a network
the cache alone is read. `json_rows` is shared with the source of JSON Lines files. Invariants: no code of a dataset
runs, and a value is what its file says; no type is guessed.
"""

from __future__ import annotations

import csv
import gzip
import importlib.util
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path, PurePath
from typing import IO, Any, TextIO, cast

from huggingface_hub import DatasetCard, constants, snapshot_download
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

from nemo_rl.errors import DatasetError, boundary, name_some, shorten
from nemo_rl.utils.files import open_plain
from nemo_rl.utils.hub_reach import ETAG_TIMEOUT_S, why_unreachable

__all__ = ["has_datasets", "hub_rows", "json_rows", "open_text", "rows", "split_named"]

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

_CARD = "README.md"
_ANY_FILE = tuple(f"*{kind}{packed}" for kind in KINDS for packed in ("", ".gz", ".zst"))
"""Files of a dataset whose card does not say which files its subsets have."""
_SAVED = ("dataset_info.json", "dataset_dict.json")


def has_datasets() -> bool:
    """Return whether the extra is installed."""
    return importlib.util.find_spec("datasets") is not None


def rows(
    path: Path,
    *,
    split: str | None,
    where: str,
    subset: str | None = None,
    tell: Callable[[str], object] = lambda line: None,
) -> Iterator[Mapping[str, object]]:
    """Yield the rows of the dataset at `path`.

    Args:
        tell: gets a line that says which files of a folder are read, before the first row.

    Raises:
        DatasetError: the extra is missing, `path` holds no dataset, or `subset` or `split` names none of its own.
    """
    _check_installed("huggingface", where)
    if not path.exists():
        raise DatasetError(f"{where}.data_path: {path} does not exist")
    if any((path / name).is_file() for name in _SAVED) and not _card(path):
        yield from _saved_rows(path, split, where)
        return
    yield from _files(_splits(path, subset, where), path, split, where, tell)


def hub_rows(
    name: str,
    *,
    subset: str | None,
    split: str | None,
    where: str,
    tell: Callable[[str], object] = lambda line: None,
) -> Iterator[Mapping[str, object]]:
    """Yield the rows of the dataset `owner/name` of the hub, as `rows` does.

    Raises:
        DatasetError: the extra is missing, the dataset is neither in the cache nor can be downloaded, or `subset` or
            `split` names none of its own.
    """
    _check_installed(name, where)
    folder = _hub_folder(name, subset, where)
    with boundary(DatasetError, f"{where}.dataset_name: {name!r} in {folder} cannot be read"):
        yield from _files(_splits(folder, subset, where), folder, split, where, tell)


def _check_installed(name: str, where: str) -> None:
    if not has_datasets():
        raise DatasetError(
            f"{where}.dataset_name: {name!r} needs the datasets library; run `pip install -e '.[data]'` in the checkout"
        )


def _hub_folder(name: str, subset: str | None, where: str) -> Path:
    """Return the snapshot with the files of the subset: downloaded, or without a network that of the cache."""
    key, again = f"{where}.dataset_name", f"hf download --repo-type dataset {name}"
    problem = why_unreachable()
    if problem is not None:
        try:
            folder = Path(snapshot_download(name, repo_type="dataset", local_files_only=True))
        except LocalEntryNotFoundError as error:
            raise DatasetError(
                f"{key}: {name!r} is not in the cache {constants.HF_HUB_CACHE}, and {problem}; run `{again}` where "
                "there is a network and the same HF_HOME, or take a file: dataset_name=jsonl with data_path"
            ) from error
        if any((folder.parents[1] / "blobs").glob("*.incomplete")):
            raise DatasetError(f"{key}: the download of {name!r} did not end, and {problem}; run `{again}` once more")
        return folder
    try:
        with boundary(DatasetError, f"{key}: {name!r} cannot be downloaded (`{again}` tries again)"):
            files = [_CARD]
            folder = Path(_download(name, files))
            return Path(_download(name, [*files, *_files_of(_subset(_card(folder), subset, where))]))
    except DatasetError as error:
        if isinstance(error.__cause__, GatedRepoError):
            raise DatasetError(
                f"{key}: {name!r} requires that its terms are accepted; accept them at "
                f"{constants.ENDPOINT}/datasets/{name}, and run `hf auth login`"
            ) from error
        if isinstance(error.__cause__, RepositoryNotFoundError):
            raise DatasetError(
                f"{key}: {constants.ENDPOINT} has no dataset {name!r}, or shows it only after `hf auth login`; correct "
                "the name, or take a file: dataset_name=jsonl with data_path"
            ) from error
        raise


def _download(name: str, files: list[str]) -> str:
    return str(snapshot_download(name, repo_type="dataset", allow_patterns=files, etag_timeout=ETAG_TIMEOUT_S))


def _card(folder: Path) -> list[Mapping[str, Any]]:
    """Return the subsets that the card of a dataset describes; empty where it describes none."""
    path = folder / _CARD
    if not path.is_file():
        return []
    with boundary(DatasetError, f"{path}: cannot be read"):
        return list(DatasetCard.load(path).data.to_dict().get("configs") or [])


def _subset(configs: list[Mapping[str, Any]], subset: str | None, where: str) -> Mapping[str, Any] | None:
    """Return the wanted subset, or the one that is meant when none is named; None where the card describes none."""
    if not configs and subset is None:
        return None
    found = [config for config in configs if config["config_name"] == (subset or "default")]
    found += [config for config in configs if subset is None and (config.get("default") or len(configs) == 1)]
    if not found:
        names = name_some([config["config_name"] for config in configs])
        expected = f"one of {names}" if names else "no subset, since the dataset has no card that names one"
        raise DatasetError(f"{where}.subset: expected {expected}, got {subset!r}")
    return found[0]


def _files_of(config: Mapping[str, Any] | None) -> list[str]:
    if config is None or not (config.get("data_files") or config.get("data_dir")):
        return list(_ANY_FILE)
    given = config.get("data_files") or f"{config['data_dir']}/*"
    listed = given if isinstance(given, list) else [given]
    paths = [part["path"] if isinstance(part, Mapping) else part for part in listed]
    return [str(each) for path in paths for each in (path if isinstance(path, list) else [path])]


def _splits(path: Path, subset: str | None, where: str) -> FolderFiles:
    """Return the files of a local path by their splits; raise DatasetError where there are none."""
    if path.is_file():
        if subset is not None:
            raise DatasetError(f"{where}.subset: {path} is one file and has no subsets; leave it out")
        found = FolderFiles(splits={split_named(path.name) or "train": [path]} if kind_of(path) else {})
    else:
        config = _subset(_card(path), subset, where)
        found = folder_splits(path) if config is None else splits_of(path, config, where)
    if not found.splits:
        names = sorted({file.name for file in found.left_out})
        raise DatasetError(
            f"{where}.data_path: {path}: expected a folder written by save_to_disk, or files among "
            f"{', '.join(KINDS)} (.gz and .zst are read too), got {name_some(names) or 'none'}"
        )
    return found


def _files(
    found: FolderFiles, path: Path, split: str | None, where: str, tell: Callable[[str], object]
) -> Iterator[Mapping[str, object]]:
    chosen = _pick_split(found.splits, split, where=where)
    files = found.splits[chosen]
    kinds = sorted({kind_of(file) or "" for file in files})
    if len(kinds) > 1:
        raise DatasetError(
            f"{where}.data_path: {path}: expected files of one kind for split {chosen}, got {name_some(files)}, "
            "which may be the same rows twice; name one file"
        )
    if path.is_dir():
        tell(found.remark(chosen, path))
    for file in files:
        yield from file_rows(file)


def _saved_rows(path: Path, split: str | None, where: str) -> Iterator[Mapping[str, object]]:
    import datasets  # noqa: PLC0415  (optional extra)

    try:
        loaded = datasets.load_from_disk(str(path), keep_in_memory=True)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise DatasetError(f"{where}.data_path: {path} cannot be read: {error}") from error
    if isinstance(loaded, dict):
        loaded = loaded[_pick_split(loaded, split, where=where)]
    elif split is not None:
        raise DatasetError(f"{where}.split: {split!r}: the dataset has no splits; leave it out")
    yield from loaded


def _pick_split(splits: Mapping[str, object], split: str | None, *, where: str) -> str:
    if split is None and len(splits) == 1:
        return next(iter(splits))
    chosen = split if split in splits or split is None else split_named(split)
    if chosen not in splits:
        raise DatasetError(f"{where}.split: expected one of {sorted(splits)}, got {split!r}")
    return str(chosen)


# ---- files


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
    given, part_of = config.get("data_files"), Path(str(config.get("data_dir") or "."))
    if not given and not part_of.is_absolute() and ".." not in part_of.parts:
        return folder_splits(folder / part_of)
    given = given or str(part_of)
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
    open_plain(path).close()  # nothing waits for the writer of a pipe
    if path.suffix.lower() == ".gz":
        raw = cast("IO[bytes]", gzip.GzipFile(path, "rb"))
    elif path.suffix.lower() == ".zst":
        import pyarrow  # noqa: PLC0415  (optional extra)

        raw = pyarrow.input_stream(str(path), compression="zstd")
    else:
        raw = path.open("rb")
    return io.TextIOWrapper(raw, encoding="utf-8-sig", newline="")


def _begins_a_list(path: Path) -> bool:
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
                "its own line?"
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
