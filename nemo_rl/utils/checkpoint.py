"""Step folders that are either complete or absent, which of them to keep, and which to resume from.

A checkpoint is written into `tmp_step_N.TOKEN`, gets a manifest, and is renamed to `step_N`; a crash or a full disk
leaves the previous one as it was. The trainer's `Saver` calls the parts of `save`; `checkpoint_to_resume` calls `clean`
and `choose`. Invariant: a folder named `step_N` is removed only when it is intact and others are better, or when its
step is saved again.

`manifest.json`: size and checksum of every file of a checkpoint, written last and compared before it is loaded.

Called by `CheckpointManager` and for kept steps. CRC-32 finds damage, not forgery; it reads 1.7 GB/s per thread,
several files at a time.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import shutil
import stat
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, runtime_checkable

from nemo_rl.errors import CheckpointError, NemoRLError, WorkerError
from nemo_rl.utils import interrupt
from nemo_rl.utils.files import open_plain, read_plain, read_plain_text, write_text

__all__ = [
    "MANIFEST_FILE",
    "WEIGHTS",
    "Checkpoint",
    "CheckpointManager",
    "Choice",
    "Damaged",
    "Manifest",
    "Unfinished",
    "Upload",
    "checkpoint_of",
    "checkpoint_paths",
    "read_checkpoint",
]

logger = logging.getLogger(__name__)


MANIFEST_FILE = "manifest.json"
BLOCK_BYTES = 1 << 22
THREADS = 4
"""More do not help: storage is the limit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _FileEntry:
    num_bytes: int
    crc32: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """The files of a folder.

    Example:
        >>> Manifest.parse('{"files": {"a/b.bin": {"bytes": 3, "crc32": "352441c2"}}}').paths
        ('a/b.bin',)
    """

    entries: Mapping[str, _FileEntry]
    """Entries by path relative to the folder, with forward slashes."""

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple(self.entries)

    @classmethod
    def write(cls, folder: Path, names: Iterable[str] | None = None) -> Manifest:
        """Read every file of `folder` back, or those named, and write the manifest next to them.

        Raises:
            OSError: a file cannot be read, or the manifest not written.
        """
        if names is None:
            names = (str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
        paths = sorted(names)
        entries = _in_threads(lambda name: _entry(folder / name), paths)
        manifest = cls(entries=entries)
        write_text(folder / MANIFEST_FILE, json.dumps({"files": manifest.as_json()}, indent=1))
        return manifest

    def as_json(self) -> dict[str, dict[str, object]]:
        """Return the entries as `parse` takes them."""
        return {name: {"bytes": entry.num_bytes, "crc32": entry.crc32} for name, entry in self.entries.items()}

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """
        Raises:
            OSError, ValueError: there is none, or it is damaged.
        """
        return cls.parse(read_plain(folder / MANIFEST_FILE).decode("utf-8"))

    @classmethod
    def parse(cls, text: str) -> Manifest:
        try:
            files = json.loads(text)["files"].items()
            entries = {str(n): _FileEntry(num_bytes=int(f["bytes"]), crc32=str(f["crc32"])) for n, f in files}
        except (KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise ValueError(f"{MANIFEST_FILE} is damaged: {error!r}") from error
        return cls(entries=entries)

    def without(self, prefix: str) -> Manifest:
        """Return the manifest without the files whose paths start with `prefix`."""
        kept = {name: entry for name, entry in self.entries.items() if not name.startswith(prefix)}
        return Manifest(entries=kept)

    def only(self, prefix: str, *, is_relative: bool = False) -> Manifest:
        """Return the files whose paths start with `prefix`; relative ones are without it."""
        kept = {name: entry for name, entry in self.entries.items() if name.startswith(prefix)}
        return Manifest(entries={name.removeprefix(prefix): e for name, e in kept.items()} if is_relative else kept)

    def missing(self, folder: Path) -> str | None:
        """Return the first file that is absent or of another size, in words; reads no file."""
        for name, entry in self.entries.items():
            try:
                status = (folder / name).stat()
            except (OSError, ValueError):
                return f"{name} is missing"
            if not stat.S_ISREG(status.st_mode):
                return f"{name} is not a plain file"
            size = status.st_size
            if size != entry.num_bytes:
                return f"{name} has {size} bytes, expected {entry.num_bytes}"
        return None

    def damage(self, folder: Path) -> str | None:
        """Return the first file that is not as it was written, in words; reads every file."""
        problem = self.missing(folder)
        if problem is not None:
            return problem
        try:
            found = _in_threads(lambda name: _entry(folder / name), list(self.entries))
        except OSError as error:
            return f"cannot be read: {error}"
        changed = [name for name, entry in self.entries.items() if found[name] != entry]
        return f"{changed[0]} is corrupt: its checksum differs" if changed else None


def _in_threads(read: Callable[[str], _FileEntry], names: list[str]) -> dict[str, _FileEntry]:
    with ThreadPoolExecutor(THREADS) as pool:
        return dict(zip(names, pool.map(read, names), strict=True))


def _entry(path: Path) -> _FileEntry:
    checksum, num_bytes = 0, 0
    with open_plain(path) as file:
        while block := file.read(BLOCK_BYTES):
            checksum = zlib.crc32(block, checksum)
            num_bytes += len(block)
    return _FileEntry(num_bytes=num_bytes, crc32=f"{checksum:08x}")


STATE_FILE = "training_info.json"
LATEST_FILE = "latest"
WEIGHTS, OPTIMIZER = "policy/weights", "policy/optimizer"
"""Folders in a checkpoint."""
STEP = re.compile(r"step_(0|[1-9][0-9]{0,17})")
UNFINISHED, REPLACED, REMOVED = "tmp_", "old_", "removed_"
"""Prefixes of folders that are being written, exchanged and removed; what a kill leaves of them is cleaned up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A complete checkpoint on disk, or at a URL."""

    step: int
    path: Path
    """The folder; of one at a URL the folder to which it is downloaded."""
    url: str | None = None
    state: Mapping[str, object]
    """Contents of `training_info.json`."""
    manifest: Manifest

    @property
    def weights(self) -> Path:
        return self.path / WEIGHTS

    @property
    def optimizer(self) -> Path:
        return self.path / OPTIMIZER

    @property
    def place(self) -> str:
        """Return the folder or the URL, for people."""
        return self.url or str(self.path)

    @property
    def has_optimizer(self) -> bool:
        """Return whether the checkpoint was saved with optimizer state."""
        return any(name.startswith(f"{OPTIMIZER}/") for name in self.manifest.paths)


@dataclass(frozen=True, kw_only=True, slots=True)
class Damaged:
    """A folder or a URL that is named like a checkpoint and is none."""

    place: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """The checkpoint to resume from."""

    checkpoint: Checkpoint
    reason: str
    """The reason for this checkpoint, in words."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Upload:
    """The place to which the ranks upload what they have written of a checkpoint."""

    url: str
    folder: Path
    """The folder that corresponds to the URL."""
    timeout_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Unfinished:
    """A checkpoint that is being written."""

    step: int
    folder: Path
    """The folder into which its content is written."""
    target: Path
    """The final name of the folder."""
    state_text: str
    upload: Upload | None = None
    """None: it stays where it is written."""


@runtime_checkable
class _Listable(Protocol):
    """A number or an array of numpy or torch."""

    def tolist(self) -> object: ...


class CheckpointManager:
    """Writes, prunes and chooses checkpoints in one folder, which belongs to this run alone.

    Args:
        folder: holds `step_N` folders and the file `latest`.
        keep_top_k: best checkpoints to keep besides the latest; None keeps all.
        metric_name: key of `state["metrics"]` to rank by; checkpoints without it, or where it is NaN, rank last.
    """

    def __init__(
        self, folder: Path, *, keep_top_k: int | None, metric_name: str, higher_is_better: bool = True
    ) -> None:
        self._folder = folder
        self._keep_top_k = keep_top_k
        self._metric_name = metric_name
        self._sign = 1.0 if higher_is_better else -1.0
        self._token = uuid.uuid4().hex[:8]

    def save(self, step: int, *, write: Callable[[Path], None], state: Mapping[str, object]) -> str | Path:
        """Run `write(tmp folder)`, add `state` and a manifest, rename the folder, update `latest`, and prune.

        Raises:
            CheckpointError: as in `begin` and `guarded`. WorkerError, KeyboardInterrupt: as in `guarded`.
        """
        unfinished = self.begin(step, state=state)
        with self.guarded(unfinished):
            write(unfinished.folder)
        return self.complete(unfinished)

    def begin(self, step: int, *, state: Mapping[str, object]) -> Unfinished:
        """Make a folder for the content of a checkpoint, to be written and then completed.

        Args:
            state: JSON values; numbers and arrays of numpy and torch are saved as plain ones, as they are now.

        Raises:
            CheckpointError: `state` holds something else, or there can be no folder.
        """
        text = self._state_text(step, state)
        target = self._folder / f"step_{step}"
        unfinished = Unfinished(step=step, folder=self._aside(UNFINISHED, target), target=target, state_text=text)
        with self.guarded(unfinished):
            unfinished.folder.mkdir(parents=True)
        return unfinished

    def complete(self, unfinished: Unfinished) -> str | Path:
        """Add state and manifest, rename the folder, update `latest`, and prune; return the folder under its name, or
        its URL.

        May run in a thread beside the training, where nothing else is done with this manager's folder.

        Raises:
            CheckpointError, KeyboardInterrupt: as in `guarded`.
        """
        with self.guarded(unfinished):
            write_text(unfinished.folder / STATE_FILE, unfinished.state_text)
            place = self._publish(unfinished, Manifest.write(unfinished.folder))
        self._prune(latest=unfinished.step)
        return place

    @contextmanager
    def guarded(self, unfinished: Unfinished) -> Iterator[None]:
        """Guard the work for a checkpoint; after an error the partly written folder is removed.

        Raises:
            CheckpointError: a write failed; earlier checkpoints and `latest` are untouched.
            WorkerError: a worker failed or died meanwhile; likewise.
            KeyboardInterrupt: an interrupt arrived, also where a library made another error of it.
        """
        try:
            yield
        except BaseException as error:
            shutil.rmtree(unfinished.folder, ignore_errors=True)
            if not isinstance(error, OSError | NemoRLError):
                raise
            interrupt.raise_if_received()
            if isinstance(error, WorkerError):
                # A worker that died, not a disk that refuses.
                raise
            try:
                kept = self.latest()
                rest = f"the latest valid checkpoint is {kept.place}" if kept else "there is no earlier checkpoint"
            except CheckpointError:
                rest = "earlier checkpoints stay as they are"
            raise CheckpointError(
                f"checkpoint of step {unfinished.step} in {self._folder}: {error}; {rest}. Free some space or change "
                "checkpointing.checkpoint_dir, then run again with checkpointing.resume=true"
            ) from error

    def latest(self) -> Checkpoint | None:
        """Return the checkpoint named by `latest`, or the newest when that file is missing or stale; contents are not
        compared."""
        found, _ = self.scan()
        return next(iter(_in_order(found, self._pointer())), None)

    def best(self) -> Checkpoint | None:
        """Return the checkpoint with the best metric, the newest of equals; None where none has a number. Contents are
        not compared.

        Pruning keeps it.
        """
        ranked = [checkpoint for checkpoint in self._whole() if not math.isnan(self._metric(checkpoint))]
        return max(ranked, key=self._rank, default=None)

    def all(self) -> list[Checkpoint]:
        """Return the complete checkpoints in order of their steps; contents are not compared."""
        return self.scan()[0]

    def scan(self) -> tuple[list[Checkpoint], list[Damaged]]:
        """Return the complete checkpoints in order of their steps, and the folders that are none."""
        found: list[Checkpoint] = []
        damaged: list[Damaged] = []
        for path in sorted(self._folder.glob("step_*")):
            try:
                found.append(read_checkpoint(path))
            except (OSError, ValueError, RecursionError) as error:
                damaged.append(Damaged(place=str(path), reason=str(error) or type(error).__name__))
        return sorted(found, key=lambda checkpoint: checkpoint.step), damaged

    def choose(self, *, with_optimizer: bool = True, reads_files: bool = True) -> Choice:
        """Return the checkpoint to resume from: the one that `latest` names, else the newest, of those that are intact.

        Damaged ones are named in a warning and left where they are.

        Args:
            with_optimizer: whether its optimizer state is needed.
            reads_files: compare the contents of the one that is taken, too; without it nothing is warned of.

        Raises:
            CheckpointError: there is none, or it has no optimizer state.
        """
        found, damaged = self.scan()
        pointer = self._pointer()
        passed_over = {item.place: item.reason for item in damaged}
        for checkpoint in _in_order(found, pointer):
            manifest = checkpoint.manifest if with_optimizer else checkpoint.manifest.without(f"{OPTIMIZER}/")
            problem = self.problem(checkpoint, manifest, reads_files=reads_files)
            if problem is None:
                if with_optimizer and not checkpoint.has_optimizer:
                    raise CheckpointError(
                        f"{checkpoint.place} holds no optimizer state: it was saved with checkpointing."
                        "save_optimizer=false; checkpointing.load_optimizer=false resumes with a fresh optimizer"
                    )
                if reads_files:
                    _warn(passed_over)
                return Choice(checkpoint=checkpoint, reason=_why(checkpoint, found, pointer, passed_over))
            passed_over[checkpoint.place] = problem
        listed = "".join(f"\n  {place}: {reason}" for place, reason in passed_over.items())
        raise CheckpointError(
            f"checkpointing.resume is true, but {self.place} holds no complete checkpoint; set it to false to start "
            "afresh, or point checkpointing.checkpoint_dir to the run to continue"
            + (f". Corrupt, and left in place:{listed}" if listed else "")
        )

    @property
    def place(self) -> str:
        """Return where the checkpoints lie, for people."""
        return str(self._folder)

    def problem(self, checkpoint: Checkpoint, manifest: Manifest, *, reads_files: bool) -> str | None:
        """Return what is missing or damaged of the files of a manifest, in words; None where all is well.

        Args:
            reads_files: compare the contents; else the sizes alone.
        """
        return manifest.damage(checkpoint.path) if reads_files else manifest.missing(checkpoint.path)

    def clean(self) -> None:
        """Remove what a killed run was writing or removing; give back what it was about to exchange."""
        for path in _aside_paths(self._folder):
            name = path.name.split(".")[0].removeprefix(REPLACED)
            if path.name.startswith(REPLACED) and not (self._folder / name).exists():
                path.rename(self._folder / name)
            else:
                shutil.rmtree(path, ignore_errors=True)

    def _pointer(self) -> str | None:
        try:
            return read_plain_text(self._folder / LATEST_FILE).strip()
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            logger.warning("%s cannot be read and is ignored: %s", self._folder / LATEST_FILE, error)
            return None

    def _state_text(self, step: int, state: Mapping[str, object]) -> str:
        try:
            return json.dumps(_plain({**state, "step": step}), indent=2, sort_keys=True)
        except (TypeError, ValueError, RecursionError) as error:
            raise CheckpointError(
                f"checkpoint of step {step} in {self._folder}: {STATE_FILE}: expected text, numbers, lists and "
                f"mappings by name: {error}"
            ) from error

    def _prune(self, *, latest: int) -> None:
        if self._keep_top_k is None:
            return
        ranked = sorted(self._whole(), key=self._rank, reverse=True)
        for checkpoint in ranked[self._keep_top_k :]:
            if checkpoint.step != latest:
                logger.info("removing %s", checkpoint.place)
                self._remove(checkpoint)

    def _whole(self) -> list[Checkpoint]:
        """Return the checkpoints with all their files: a damaged one is no reason to remove an intact one, and is not
        ours to remove."""
        return [each for each in self.all() if self.problem(each, each.manifest, reads_files=False) is None]

    def _rank(self, checkpoint: Checkpoint) -> tuple[float, int]:
        metric = self._metric(checkpoint)
        return float("-inf") if math.isnan(metric) else self._sign * metric, checkpoint.step

    def _metric(self, checkpoint: Checkpoint) -> float:
        """Return the metric of a checkpoint, NaN where it has none."""
        metrics = checkpoint.state.get("metrics")
        value = metrics.get(self._metric_name) if isinstance(metrics, Mapping) else None
        return float(value) if isinstance(value, int | float) else math.nan

    def _publish(self, unfinished: Unfinished, manifest: Manifest) -> str | Path:
        """Give a checkpoint with all its files its name, and return it."""
        self._replace_folder(unfinished.folder, unfinished.target)
        write_text(self._folder / LATEST_FILE, unfinished.target.name)
        return unfinished.target

    def _remove(self, checkpoint: Checkpoint) -> None:
        # Renamed first: a kill in the middle must not leave half a checkpoint under its name.
        gone = self._aside(REMOVED, checkpoint.path)
        os.replace(checkpoint.path, gone)
        shutil.rmtree(gone, ignore_errors=True)

    def _replace_folder(self, source: Path, target: Path) -> None:
        """Rename `source` to `target`; a folder already there survives until the new one is in place."""
        old = self._aside(REPLACED, target)
        if target.exists():
            logger.warning("%s is replaced: the run reached this step again", target)
            os.replace(target, old)
        os.replace(source, target)
        shutil.rmtree(old, ignore_errors=True)

    def _aside(self, prefix: str, path: Path) -> Path:
        """Return a name that no other process uses."""
        return path.with_name(f"{prefix}{path.name}.{self._token}")


def checkpoint_paths(folder: Path) -> list[Path]:
    """Return everything in `folder` that checkpoints have written, damaged and unfinished ones included."""
    steps = [path for path in sorted(folder.glob("step_*")) if STEP.fullmatch(path.name) and path.is_dir()]
    pointer = folder / LATEST_FILE
    return [*steps, *_aside_paths(folder), *([pointer] if pointer.is_file() else [])]


def is_of_checkpoint(path: Path) -> bool:
    """Return whether a folder named like a checkpoint has been written as one, damaged or not; an empty one has not."""
    content = {child.name for child in path.iterdir()}
    return not content or not content.isdisjoint((STATE_FILE, MANIFEST_FILE, WEIGHTS.partition("/")[0]))


def _plain(value: object) -> object:
    """Return JSON values in place of those of numpy and torch, also as keys."""
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value.tolist() if isinstance(value, _Listable) else value


def _aside_paths(folder: Path) -> Iterator[Path]:
    for prefix in (UNFINISHED, REPLACED, REMOVED):
        for path in sorted(folder.glob(f"{prefix}step_*")):
            if STEP.fullmatch(path.name.split(".")[0].removeprefix(prefix)) and path.is_dir():
                yield path


def read_checkpoint(path: Path) -> Checkpoint:
    """Read the description of a checkpoint folder; its files are not compared.

    Raises:
        OSError, ValueError, RecursionError: it is not a complete checkpoint.
    """
    if not STEP.fullmatch(path.name):
        raise ValueError("is not named like a checkpoint: expected step_ and a number")
    state = json.loads(read_plain(path / STATE_FILE).decode("utf-8"))
    found = checkpoint_of(path, state, Manifest(entries={}))
    return replace(found, manifest=Manifest.read(path))


def checkpoint_of(path: Path, state: object, manifest: Manifest, *, url: str | None = None) -> Checkpoint:
    """Return a checkpoint whose folder is named `step_N`.

    Raises:
        ValueError: the state is not one of this step.
    """
    if not isinstance(state, dict) or not isinstance(state.get("sampler"), dict):
        raise ValueError(f"{STATE_FILE}: expected an object with the data position in 'sampler'")
    step = int(path.name.removeprefix("step_"))
    if state.get("step") != step:
        raise ValueError(f"{STATE_FILE}: expected step {step}, got {state.get('step')!r}")
    return Checkpoint(step=step, path=path, url=url, state=state, manifest=manifest)


def _in_order(found: Sequence[Checkpoint], pointer: str | None) -> list[Checkpoint]:
    """Return the checkpoint that is pointed to, then the newest first."""
    return sorted(found, key=lambda checkpoint: (checkpoint.path.name == pointer, checkpoint.step), reverse=True)


def _why(chosen: Checkpoint, found: Sequence[Checkpoint], pointer: str | None, damaged: Mapping[str, str]) -> str:
    newest = max(checkpoint.step for checkpoint in found)
    if chosen.path.name == pointer:
        later = "" if chosen.step == newest else f", though step_{newest} is there"
        return f"named by `{LATEST_FILE}`{later}"
    missing = "" if pointer is None else f"; `{LATEST_FILE}` names {pointer[:80]!r}, which is damaged or missing"
    return f"the newest intact one{missing}" + ("; see the warnings above" if damaged else "")


def _warn(damaged: Mapping[str, str]) -> None:
    for place, reason in damaged.items():
        logger.warning("checkpoint %s is corrupt and skipped: %s; its files are left in place", place, reason)
