"""`ObjectStore`: whole files below a URL, over fsspec, with retries and a deadline.

The one place that imports fsspec. Called by `RemoteCheckpoints` on the driver, and by the policy workers, which upload
what they wrote. Invariant: no error shows a secret of the environment, of fsspec's configuration or of the URL.
"""

from __future__ import annotations

import base64
import os
import re
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

import fsspec

from nemo_rl.config.base import url_problem
from nemo_rl.config.yaml_text import masked
from nemo_rl.errors import CheckpointError, shorten
from nemo_rl.utils.exits import text_of

__all__ = ["TIMEOUT_S", "ObjectStore", "StoredFile"]

T = TypeVar("T")

TIMEOUT_S = 1800.0
"""Deadline of a call where the caller has none."""
SMALL_S = 120.0
"""Deadline of a call that moves a few kilobytes, with its retries."""
RETRY_WAITS_S = (0.5, 2.0, 5.0)
"""Seconds before each further try; most clients try several times by themselves first."""
THREADS = 8
"""Files at a time; a client that is not asynchronous takes one."""
FINAL = (FileNotFoundError, PermissionError, NotADirectoryError, IsADirectoryError, NotImplementedError)
"""Errors that another try does not mend."""
MKDIRS = ("file", "local")
"""Protocols whose folders are made as those of a path; elsewhere the folder or bucket of the URL has to exist."""
FEWEST_CHARACTERS = 6
"""Shorter values are not looked for in error texts: they would be found in words."""
_SECRET_NAME = re.compile(r"key|secret|token|passw|credential|sas|connection", re.IGNORECASE)
_MD5 = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredFile:
    """A file as the store lists it."""

    num_bytes: int
    md5: str | None
    """MD5 of its content in hexadecimal digits; None where the store lists none. Of encrypted files some stores list
    another number."""


class ObjectStore:
    """Files below a URL, by their names relative to it.

    Args:
        url: as fsspec takes it; credentials are those of fsspec's own configuration.
        timeout_s: deadline of one upload or download, with all its files and retries.

    Raises:
        CheckpointError: by every method, where the package of the protocol is not installed, or the store refuses or
            does not answer in time.
    """

    def __init__(self, url: str, *, timeout_s: float = TIMEOUT_S) -> None:
        problem = url_problem(url)
        if problem is not None:
            raise CheckpointError(problem)
        self.url, self._timeout_s = url, timeout_s
        protocol = url.partition("://")[0]
        options = {"auto_mkdir": True} if protocol in MKDIRS else {}
        try:
            self._fs, root = fsspec.core.url_to_fs(url, **options)
        except (ImportError, ValueError) as error:
            raise CheckpointError(
                f"{url}: no package for the protocol {protocol!r}: {_plain(error)}; install it beside nemo-rl, or take "
                "another checkpointing.checkpoint_dir"
            ) from None
        except Exception as error:  # noqa: BLE001 - each client has errors of its own
            raise self._failed("the store could not be opened", error) from None
        self._root = str(root).rstrip("/")

    def probe(self) -> None:
        """Write, read and delete a small file."""
        name, content = f".nemo_rl_probe.{uuid.uuid4().hex[:8]}", b"nemo-rl"
        self.write(name, content)
        found = self.read(name)
        if found != content:
            raise CheckpointError(f"{self.url}: a file that was written reads as {found!r}, expected {content!r}")
        self.remove(name)

    def names(self) -> list[str]:
        """Return the names of files and folders right below the URL; empty where nothing is there."""
        listed = self._call("list the files", self._ls)
        return sorted(str(name).rstrip("/").rpartition("/")[2] for name in listed)

    def files(self, folder: str) -> dict[str, StoredFile]:
        """Return the files below a folder by their names relative to it; empty where there is no folder."""
        path = self._path(folder)

        def find() -> dict[str, Any]:
            self._fs.invalidate_cache()
            try:
                return dict(self._fs.find(path, detail=True))
            except FileNotFoundError:
                return {}

        found = self._call(f"list {folder}", find)
        inside = f"{path}/".lstrip("/")
        return {
            name.lstrip("/").removeprefix(inside): StoredFile(num_bytes=int(each["size"]), md5=_md5(each))
            for name, each in found.items()
        }

    def read(self, name: str) -> bytes | None:
        """Return the content of a small file; None where there is none."""

        def read() -> bytes | None:
            try:
                return bytes(self._fs.cat_file(self._path(name)))
            except FileNotFoundError:
                return None

        return self._call(f"read {name}", read)

    def write(self, name: str, content: bytes) -> None:
        """Write a small file, in place of one that is there."""
        path = self._path(name)
        self._call(f"write {name}", lambda: self._put(path, lambda: self._fs.pipe_file(path, content)))

    def upload(self, files: Mapping[str, Path]) -> None:
        """Upload files, several at a time; what is there is replaced.

        Args:
            files: name in the store -> file.
        """

        def put(name: str, file: Path) -> Callable[[], None]:
            path = self._path(name)
            return lambda: self._put(path, lambda: self._fs.put_file(str(file), path))

        self._all([(f"upload {name}", put(name, file)) for name, file in files.items()], self._timeout_s)

    def download(self, files: Mapping[str, Path]) -> None:
        """Download files, several at a time, into folders that are there."""

        def get(name: str, file: Path) -> Callable[[], None]:
            return lambda: self._fs.get_file(self._path(name), str(file))

        self._all([(f"download {name}", get(name, file)) for name, file in files.items()], self._timeout_s)

    def remove(self, name: str) -> None:
        """Remove a file or a folder with all files in it; nothing where there is none."""
        path = self._path(name)

        def remove() -> None:
            self._fs.invalidate_cache()
            with suppress(FileNotFoundError):
                self._fs.rm(path, recursive=True)

        self._call(f"remove {name}", remove)

    def _ls(self) -> list[str]:
        self._fs.invalidate_cache()
        try:
            return list(self._fs.ls(self._root, detail=False))
        except FileNotFoundError:
            return []

    def _path(self, name: str) -> str:
        assert name, "the URL itself is neither written nor removed"
        return f"{self._root}/{name}"

    def _put(self, path: str, put: Callable[[], object]) -> None:
        try:
            put()
        except FileNotFoundError:
            # A file server wants folders. Where the URL itself is not there nothing is made: it may be a bucket.
            if not self._fs.exists(self._root):
                raise
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            put()

    def _call(self, what: str, action: Callable[[], T]) -> T:
        return self._all([(what, action)], min(SMALL_S, self._timeout_s))[0]

    def _all(self, actions: Sequence[tuple[str, Callable[[], T]]], timeout_s: float) -> list[T]:
        """Call all actions in threads, each with its retries; after the first error no other is begun.

        The threads are daemons, so that a process that has to end does not wait for a store that does not answer.
        """
        deadline = time.monotonic() + timeout_s
        futures: list[Future[T]] = [Future() for _ in actions]
        queue = deque(zip(futures, actions, strict=True))

        def work() -> None:
            while queue:
                try:
                    future, (what, action) = queue.popleft()
                except IndexError:
                    return
                try:
                    future.set_result(self._tried(what, action, deadline))
                except BaseException as error:  # noqa: BLE001 - raised by the caller's thread
                    queue.clear()
                    future.set_exception(error)

        for _ in range(min(len(actions), THREADS if self._fs.async_impl else 1)):
            Thread(target=work, name="object store", daemon=True).start()
        done, _ = wait(futures, timeout=timeout_s, return_when=FIRST_EXCEPTION)
        for future in done:
            future.result()
        if len(done) < len(futures):
            queue.clear()
            late = [what for future, (what, _) in zip(futures, actions, strict=True) if not future.done()]
            raise CheckpointError(
                f"{self.url}: could not {late[0]} within {timeout_s:.0f} s, with {len(late)} of {len(actions)} not "
                "done; raise cluster.stage_timeout_s if the connection is only slow"
            )
        return [future.result() for future in futures]

    def _tried(self, what: str, action: Callable[[], T], deadline: float) -> T:
        waits = iter(RETRY_WAITS_S)
        while True:
            try:
                return action()
            except Exception as error:  # noqa: BLE001 - each client has errors of its own
                wait_s = next(waits, None)
                if isinstance(error, FINAL) or wait_s is None or time.monotonic() + wait_s > deadline:
                    raise self._failed(f"could not {what}", error) from None
            time.sleep(wait_s)

    def _failed(self, what: str, error: Exception) -> CheckpointError:
        advice = "is it reachable from this machine?"
        if isinstance(error, FileNotFoundError):
            advice = "expected a bucket or folder that is there; make it, or correct checkpointing.checkpoint_dir"
        elif isinstance(error, PermissionError):
            advice = (
                "credentials are those of fsspec (environment, ~/.config/fsspec); correct them, or "
                "checkpointing.checkpoint_dir"
            )
        return CheckpointError(f"{self.url}: {what}: {type(error).__name__}: {_plain(error)}; {advice}")


def _plain(error: Exception) -> str:
    """Return the text of an error in one line, without secrets."""
    text = " ".join(text_of(error).split())
    for secret in sorted(_secrets(dict(os.environ)) | _secrets(fsspec.config.conf), key=len, reverse=True):
        text = text.replace(secret, "<masked>")
    return shorten(str(masked(text, in_words=True)))


def _secrets(tree: Mapping[str, Any], *, is_secret: bool = False) -> set[str]:
    """Return the values below names that sound like those of secrets."""
    found: set[str] = set()
    for name, value in tree.items():
        sounds = is_secret or _SECRET_NAME.search(name) is not None
        if isinstance(value, Mapping):
            found |= _secrets(value, is_secret=sounds)
        elif sounds and isinstance(value, str) and len(value) >= FEWEST_CHARACTERS:
            found.add(value)
    return found


def _md5(listed: Mapping[str, Any]) -> str | None:
    """Return the MD5 that an entry of a listing has: `ETag` of S3, `md5Hash` of Google."""
    if isinstance(in_base64 := listed.get("md5Hash"), str):
        return base64.b64decode(in_base64).hex()
    tag = str(listed.get("ETag", "")).strip('"')
    return tag if _MD5.fullmatch(tag) else None
