"""Datasets as Hugging Face `datasets` (extra `data`) has them. The only file that names the library.

`rows` reads local files: a folder written by `save_to_disk`, or the files of `data_files`. `hub_rows` reads a dataset
of the hub: the files of one subset are downloaded to the cache of huggingface_hub; without a network the cache alone
is read. No code of a dataset runs.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import DatasetCard, constants, snapshot_download
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

from nemo_rl.data.data_files import KINDS, FolderFiles, file_rows, folder_splits, kind_of, split_named, splits_of
from nemo_rl.errors import DatasetError, boundary, name_some
from nemo_rl.utils.hub_reach import ETAG_TIMEOUT_S, why_unreachable

__all__ = ["has_datasets", "hub_rows", "rows"]

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
    """Return the patterns of the files of a subset, as its card has them."""
    if config is None or not (config.get("data_files") or config.get("data_dir")):
        return list(_ANY_FILE)
    given = config.get("data_files") or f"{config['data_dir']}/*"
    listed = given if isinstance(given, list) else [given]
    paths = [part["path"] if isinstance(part, Mapping) else part for part in listed]
    return [str(each) for path in paths for each in (path if isinstance(path, list) else [path])]


def _splits(path: Path, subset: str | None, where: str) -> FolderFiles:
    """Return the files of a local path by their splits.

    Raises:
        DatasetError: there are none.
    """
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
    """Yield the rows of a split."""
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
