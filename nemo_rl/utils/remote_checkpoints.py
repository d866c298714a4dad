"""Checkpoints at a URL: `RemoteCheckpoints`, and `open_checkpoints`, which decides between a folder and a URL.

    step_20.3f9a1c22/...   the files of one save: those of a folder `step_20`, under a name that no other save has
    step_20.json           the record: its folder, the manifest and `training_info.json`; it makes a checkpoint complete
    latest                 `step_20`

    begin      a folder in the staging folder, which the ranks fill and upload      (`upload_together`)
    complete   uploads the rest, compares what the store lists, and writes the record last
    problem    compares what the store lists, or downloads to the staging folder and compares checksums

Object stores cannot rename, but replace one object at once: saving a step again exchanges its record. Invariant: what
no record names is never read, and is removed by the next save.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import logging
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath

from nemo_rl.config.run import CheckpointingConfig
from nemo_rl.errors import CheckpointError
from nemo_rl.utils.checkpoint import (
    BLOCK_BYTES,
    LATEST_FILE,
    MANIFEST_FILE,
    STEP,
    UNFINISHED,
    Checkpoint,
    CheckpointManager,
    Damaged,
    Manifest,
    Unfinished,
    Upload,
    checkpoint_of,
)
from nemo_rl.utils.files import open_plain
from nemo_rl.utils.object_store import TIMEOUT_S, ObjectStore

__all__ = ["RemoteCheckpoints", "fetched", "open_checkpoints"]

logger = logging.getLogger(__name__)

RECORD = re.compile(rf"({STEP.pattern})\.json")
FOLDER = re.compile(rf"({STEP.pattern})\.[0-9a-f]{{8}}")


def open_checkpoints(
    config: CheckpointingConfig,
    log_dir: Path,
    *,
    keep_top_k: int | None = None,
    metric_name: str = "",
    timeout_s: float = TIMEOUT_S,
) -> CheckpointManager:
    """Return the checkpoints of a run, at its URL or in its folder.

    Args:
        log_dir: `logger.log_dir`.
        keep_top_k: None to read alone: nothing is pruned.
        timeout_s: deadline of one upload or download.

    Raises:
        CheckpointError: the package for the URL is not installed.
    """
    folder, is_up = config.folder(log_dir), config.higher_is_better
    if config.url is None:
        return CheckpointManager(folder, keep_top_k=keep_top_k, metric_name=metric_name, higher_is_better=is_up)
    return RemoteCheckpoints(
        ObjectStore(config.url, timeout_s=timeout_s),
        staging=folder,
        timeout_s=timeout_s,
        keep_top_k=keep_top_k,
        metric_name=metric_name,
        higher_is_better=is_up,
    )


def fetched(checkpoint: Checkpoint, *, prefix: str = "") -> Checkpoint:
    """Return a checkpoint whose files are on this machine: those of one at a URL are downloaded once per process, to a
    temporary folder that goes when the process ends.

    Args:
        prefix: of the paths of the files that are needed.

    Raises:
        CheckpointError: it is not there, or damaged.
    """
    if checkpoint.url is None:
        return checkpoint
    manager = RemoteCheckpoints(ObjectStore(checkpoint.url.rpartition("/")[0]), staging=checkpoint.path.parent)
    return manager.fetched(manager.one(checkpoint.step), prefix=prefix)


_COPIES: dict[tuple[str, str], Checkpoint] = {}
"""What `fetched` has downloaded, by URL with the folder of its record, and prefix."""


class RemoteCheckpoints(CheckpointManager):
    """Writes, prunes and chooses checkpoints at a URL, which belongs to this run alone.

    Args:
        staging: holds the checkpoint that is being written, or the one that was downloaded.
        timeout_s: deadline of one upload or download.
    """

    def __init__(
        self,
        store: ObjectStore,
        *,
        staging: Path,
        timeout_s: float = TIMEOUT_S,
        keep_top_k: int | None = None,
        metric_name: str = "",
        higher_is_better: bool = True,
    ) -> None:
        super().__init__(staging, keep_top_k=keep_top_k, metric_name=metric_name, higher_is_better=higher_is_better)
        self._store, self._timeout_s = store, timeout_s
        self._folders: dict[str, str] = {}
        """URL of a checkpoint -> name of its folder there, of those that were read or written."""

    @property
    def place(self) -> str:
        return self._store.url

    def begin(self, step: int, *, state: Mapping[str, object]) -> Unfinished:
        """See `CheckpointManager.begin`. What was downloaded has been loaded by now, and is removed."""
        for path in self._folder.glob("step_*"):
            if STEP.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)
        unfinished = super().begin(step, state=state)
        url = f"{self._store.url}/{unfinished.folder.name.removeprefix(UNFINISHED)}"
        return replace(unfinished, upload=Upload(url=url, folder=unfinished.folder, timeout_s=self._timeout_s))

    def scan(self) -> tuple[list[Checkpoint], list[Damaged]]:
        """Return the checkpoints whose records can be read, in order of their steps, and the other records."""
        found: list[Checkpoint] = []
        damaged: list[Damaged] = []
        for record in self._store.names():
            if not (named := RECORD.fullmatch(record)):
                continue
            url = f"{self._store.url}/{named[1]}"
            try:
                found.append(self._read(named[1], url))
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                damaged.append(Damaged(place=url, reason=f"{record}: {error or type(error).__name__}"))
        return sorted(found, key=lambda checkpoint: checkpoint.step), damaged

    def problem(self, checkpoint: Checkpoint, manifest: Manifest, *, reads_files: bool) -> str | None:
        """See `CheckpointManager.problem`; with `reads_files` the files are in the folder `checkpoint.path` then."""
        folder = self._folders[checkpoint.url or ""]
        listed = self._store.files(folder)
        for name, entry in manifest.entries.items():
            if name not in listed:
                return f"{name} is missing"
            if listed[name].num_bytes != entry.num_bytes:
                return f"{name} has {listed[name].num_bytes} bytes, expected {entry.num_bytes}"
        return self._download(folder, manifest, checkpoint.path) if reads_files else None

    def one(self, step: int) -> Checkpoint:
        """Return the checkpoint of a step, whose files are not compared.

        Raises:
            CheckpointError: there is none, or its record cannot be read.
        """
        url = f"{self._store.url}/step_{step}"
        try:
            return self._read(f"step_{step}", url)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            known = ", ".join(map(str, self.steps())) or "none"
            raise CheckpointError(f"{url}: is not a complete checkpoint: {error}; steps there: {known}") from error

    def remove_all(self) -> None:
        """Remove every checkpoint, and what killed saves have left."""
        names = self._store.names()
        # Records first: no kill leaves one without its files.
        for kind in (RECORD, FOLDER):
            for name in names:
                if kind.fullmatch(name):
                    self._store.remove(name)
        if LATEST_FILE in names:
            self._store.remove(LATEST_FILE)

    def steps(self) -> list[int]:
        """Return the steps that have a record; contents are not compared."""
        found = (RECORD.fullmatch(name) for name in self._store.names())
        return sorted(int(each[1].removeprefix("step_")) for each in found if each)

    def fetched(self, checkpoint: Checkpoint, *, prefix: str) -> Checkpoint:
        """Return a checkpoint of this URL, downloaded as `fetched` does."""
        key = f"{checkpoint.url}/{self._folders[checkpoint.url or '']}"
        copy = _COPIES.get((key, prefix))
        if copy is None:
            folder = Path(tempfile.mkdtemp(prefix="nemo_rl_checkpoint_"))
            atexit.register(shutil.rmtree, folder, ignore_errors=True)
            copy = replace(checkpoint, path=folder / checkpoint.path.name)
            problem = self.problem(copy, copy.manifest.only(prefix), reads_files=True)
            if problem is not None:
                raise CheckpointError(f"{checkpoint.url}: {problem}; take another checkpoint")
            _COPIES[key, prefix] = copy
        return copy

    def _read(self, step: str, url: str) -> Checkpoint:
        content = self._store.read(f"{step}.json")
        record = json.loads((content or b"").decode("utf-8"))
        folder, manifest = str(record["folder"]), Manifest.parse(json.dumps(record))
        if not FOLDER.fullmatch(folder):
            raise ValueError(f"names the folder {folder[:80]!r}")
        for name in manifest.paths:
            if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
                raise ValueError(f"names the file {name[:80]!r}, which lies outside of it")
        checkpoint = checkpoint_of(self._folder / step, record["state"], manifest, url=url)
        self._folders[url] = folder
        return checkpoint

    def _pointer(self) -> str | None:
        content = self._store.read(LATEST_FILE)
        return None if content is None else content.decode("utf-8", "replace").strip()

    def _publish(self, unfinished: Unfinished, manifest: Manifest) -> str:
        """Upload what the ranks have not, and name the folder in a record once the store lists all of it."""
        folder, step = unfinished.folder.name.removeprefix(UNFINISHED), unfinished.target.name
        listed = self._store.files(folder)
        sizes = {name: (listed[name].num_bytes if name in listed else None) for name in manifest.paths}
        rest = [name for name, entry in manifest.entries.items() if sizes[name] != entry.num_bytes]
        self._store.upload({f"{folder}/{name}": unfinished.folder / name for name in (*rest, MANIFEST_FILE)})
        self._compare(folder, manifest, unfinished.folder)
        record = {"folder": folder, "files": manifest.as_json(), "state": json.loads(unfinished.state_text)}
        self._store.write(f"{step}.json", json.dumps(record).encode())
        self._store.write(LATEST_FILE, step.encode())
        url = f"{self._store.url}/{step}"
        self._folders[url] = folder
        shutil.rmtree(unfinished.folder, ignore_errors=True)
        return url

    def _compare(self, folder: str, manifest: Manifest, source: Path) -> None:
        """Compare what the store lists with what was written: sizes, and MD5s where it lists them.

        Of an encrypted file some stores list another number than its MD5: the first that differs is read back.
        """
        listed, has_md5 = self._store.files(folder), True
        for name, entry in manifest.entries.items():
            there = listed.get(name)
            if there is None or there.num_bytes != entry.num_bytes:
                got = "none" if there is None else f"{there.num_bytes} bytes"
                raise CheckpointError(
                    f"{self._store.url}/{folder}/{name}: expected {entry.num_bytes} bytes, the store lists {got}; does "
                    "another run write to this URL?"
                )
            if has_md5 and there.md5 is not None and there.md5 != _md5_of(source / name):
                back = source.with_name(f"{source.name}.back")
                try:
                    problem = self._download(folder, Manifest(entries={name: entry}), back)
                finally:
                    shutil.rmtree(back, ignore_errors=True)
                if problem is not None:
                    raise CheckpointError(f"{self._store.url}/{folder}: {problem}, though it was just uploaded")
                has_md5 = False

    def _remove(self, checkpoint: Checkpoint) -> None:
        # The record first: a kill in the middle leaves files that nothing names.
        self._store.remove(f"step_{checkpoint.step}.json")
        self._store.remove(self._folders[checkpoint.url or ""])

    def _prune(self, *, latest: int) -> None:
        try:
            super()._prune(latest=latest)
            self._remove_unnamed()
        except CheckpointError as error:
            logger.warning(
                "the checkpoint of step %d is complete, but older files could not be removed: %s", latest, error
            )

    def _remove_unnamed(self) -> None:
        """Remove what killed saves have left; that of a record that cannot be read may be its own."""
        found, damaged = self.scan()
        named = {self._folders[checkpoint.url or ""] for checkpoint in found}
        unreadable = tuple(f"{each.place.rpartition('/')[2]}." for each in damaged)
        for name in self._store.names():
            if FOLDER.fullmatch(name) and name not in named and not name.startswith(unreadable):
                self._store.remove(name)

    def _download(self, folder: str, manifest: Manifest, target: Path) -> str | None:
        """Download the files of a manifest that are not there yet; return the first that is not what was uploaded."""
        absent = {
            name: entry for name, entry in manifest.entries.items() if Manifest(entries={name: entry}).damage(target)
        }
        for name in absent:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
        self._store.download({f"{folder}/{name}": target / name for name in absent})
        return Manifest(entries=absent).damage(target)


def _md5_of(file: Path) -> str:
    digest = hashlib.md5(usedforsecurity=False)
    with open_plain(file) as stream:
        while block := stream.read(BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()
