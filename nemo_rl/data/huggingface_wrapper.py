"""Local files through Hugging Face `datasets` (extra `data`). The only file that names the library.

A folder written by `save_to_disk`, or JSON, JSON Lines, CSV or parquet files. Nothing is looked up on a network.
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from nemo_rl.errors import DatasetError

__all__ = ["has_datasets", "rows"]

_BUILDERS: Mapping[str, str] = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}
_SAVED = ("dataset_info.json", "dataset_dict.json")


def has_datasets() -> bool:
    """Whether the extra is installed."""
    return importlib.util.find_spec("datasets") is not None


def rows(path: Path, *, split: str | None, where: str) -> Iterator[Mapping[str, object]]:
    """The rows of the dataset at `path`.

    Raises:
        DatasetError: the extra is missing, `path` holds no dataset, or `split` does not name one of its splits.
    """
    if not has_datasets():
        raise DatasetError(
            f"{where}.dataset_name: 'huggingface' needs the datasets library; run `pip install -e "
            "'.[data]'` in the checkout"
        )
    if not path.exists():
        raise DatasetError(f"{where}.data_path: {path} does not exist")
    with tempfile.TemporaryDirectory(prefix="nemo_rl_datasets_") as cache:
        loaded = _load(path, cache=cache, where=where)
        yield from _pick_split(loaded, split, where=where)


def _load(path: Path, *, cache: str, where: str) -> Any:
    import datasets  # noqa: PLC0415  (optional extra)

    try:
        if any((path / name).is_file() for name in _SAVED):
            return datasets.load_from_disk(str(path), keep_in_memory=True)
        files = sorted(p for p in path.rglob("*") if p.suffix in _BUILDERS) if path.is_dir() else [path]
        kinds = {_BUILDERS.get(p.suffix) for p in files}
        if len(kinds) != 1 or None in kinds:
            raise DatasetError(
                f"{where}.data_path: {path}: expected a folder written by save_to_disk, or files of one kind among "
                f"{', '.join(_BUILDERS)}, got {sorted({p.suffix for p in files}) or 'none'}"
            )
        data_files = _files_by_split(files)
        return datasets.load_dataset(kinds.pop(), data_files=data_files, cache_dir=cache, keep_in_memory=True)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise DatasetError(f"{where}.data_path: {path} cannot be read: {error}") from error


def _files_by_split(files: list[Path]) -> dict[str, list[str]]:
    """Files named `train*`, `validation*` and so on are splits of their own; all others are `train`."""
    known = ("train", "validation", "test")
    splits: dict[str, list[str]] = {}
    for file in files:
        name = next((split for split in known if file.stem.startswith(split)), "train")
        splits.setdefault(name, []).append(str(file))
    return splits


def _pick_split(loaded: Any, split: str | None, *, where: str) -> Any:
    if not isinstance(loaded, dict):
        if split is not None:
            raise DatasetError(f"{where}.split: {split!r}: the dataset has no splits; leave it out")
        return loaded
    if split is None and len(loaded) == 1:
        return next(iter(loaded.values()))
    if split not in loaded:
        raise DatasetError(f"{where}.split: expected one of {sorted(loaded)}, got {split!r}")
    return loaded[split]
