"""Datasets through Hugging Face `datasets` (extra `data`). The only file that names the library.

`rows` reads local files: a folder written by `save_to_disk`, or JSON, JSON Lines, CSV or parquet files. `hub_rows`
reads a dataset of the hub: the files of one subset are downloaded to the cache of huggingface_hub; without a network
the cache alone is read. No code of a dataset runs.
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import DatasetCard, constants, snapshot_download
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

from nemo_rl.errors import DatasetError, boundary, name_some
from nemo_rl.utils.hub_reach import ETAG_TIMEOUT_S, why_unreachable

__all__ = ["has_datasets", "hub_rows", "rows"]

_BUILDERS: Mapping[str, str] = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}
_CARD = "README.md"
_ANY_FILE = ("*.json", "*.jsonl", "*.csv", "*.parquet", "*.gz")
"""Files of a dataset whose card does not say which files its subsets have."""
_SAVED = ("dataset_info.json", "dataset_dict.json")


def has_datasets() -> bool:
    """Return whether the extra is installed."""
    return importlib.util.find_spec("datasets") is not None


def rows(path: Path, *, split: str | None, where: str) -> Iterator[Mapping[str, object]]:
    """Yield the rows of the dataset at `path`.

    Raises:
        DatasetError: the extra is missing, `path` holds no dataset, or `split` does not name one of its splits.
    """
    _check_installed("huggingface", where)
    if not path.exists():
        raise DatasetError(f"{where}.data_path: {path} does not exist")
    with tempfile.TemporaryDirectory(prefix="nemo_rl_datasets_") as cache:
        loaded = _load(path, cache=cache, where=where)
        yield from _pick_split(loaded, split, where=where)


def hub_rows(name: str, *, subset: str | None, split: str | None, where: str) -> Iterator[Mapping[str, object]]:
    """Yield the rows of the dataset `owner/name` of the hub.

    Raises:
        DatasetError: the extra is missing, the dataset is neither in the cache nor can be downloaded, or `subset` or
            `split` does not name one of its own.
    """
    _check_installed(name, where)
    folder = _hub_folder(name, subset, where)
    chosen = _subset(_card(folder), subset, where)
    import datasets  # noqa: PLC0415  (optional extra)

    with tempfile.TemporaryDirectory(prefix="nemo_rl_datasets_") as cache:
        with boundary(DatasetError, f"{where}.dataset_name: {name!r} in {folder} cannot be read"):
            options = {"cache_dir": cache, "keep_in_memory": True}
            loaded = datasets.load_dataset(
                str(folder), name=None if chosen is None else chosen["config_name"], **options
            )
        yield from _pick_split(loaded, split, where=where)


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
        names = name_some([config["config_name"] for config in configs]) or "the dataset has none; leave it out"
        raise DatasetError(f"{where}.subset: expected one of {names}, got {subset!r}")
    return found[0]


def _files_of(config: Mapping[str, Any] | None) -> list[str]:
    """Return the patterns of the files of a subset, as its card has them."""
    if config is None or not (config.get("data_files") or config.get("data_dir")):
        return list(_ANY_FILE)
    given = config.get("data_files") or f"{config['data_dir']}/*"
    listed = given if isinstance(given, list) else [given]
    paths = [part["path"] if isinstance(part, Mapping) else part for part in listed]
    return [str(each) for path in paths for each in (path if isinstance(path, list) else [path])]


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
    """Sort files by split: those named `train*`, `validation*` and so on are splits of their own; all others are
    `train`."""
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
