"""A payload store of your own: a file per chunk in one folder, for example of a file system that nodes share."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from nemo_rl.config.data_plane import DataPlaneConfig
from nemo_rl.data_plane.address import DataPlaneAddress, Handles
from nemo_rl.data_plane.interfaces import Parts, PayloadStore, StoreHealth
from nemo_rl.errors import KeysNotFound, name_some
from nemo_rl.utils.deadlines import StartUp

__all__ = ["FolderStore"]


class FolderStore(PayloadStore):
    """The ledger knows rows, versions and leases; a store only keeps bytes under ids that are used once.

    Options: `folder`, where the run's own folder is made; default: the temporary folder.
    """

    def __init__(self, folder: Path, *, is_owner: bool) -> None:
        self._folder, self._is_owner = folder, is_owner

    @classmethod
    def start(cls, config: DataPlaneConfig, *, run_id: str, start: StartUp) -> FolderStore:
        """The owner's store."""
        del start  # no server to wait for
        parent = config.options.get("folder")
        folder = tempfile.mkdtemp(prefix=f"{run_id}-", dir=None if parent is None else str(parent))
        return cls(Path(folder), is_owner=True)

    @classmethod
    def join(cls, address: DataPlaneAddress) -> FolderStore:
        """The store of another process."""
        return cls(Path(address.store), is_owner=False)

    @property
    def address(self) -> str:
        return str(self._folder)

    def put(self, chunks: Mapping[str, Parts], *, timeout_s: float) -> None:
        for chunk_id, parts in chunks.items():
            # Readable only when it is whole: the last step is a rename.
            unfinished = self._path(chunk_id).with_suffix(".tmp")
            unfinished.write_bytes(b"".join(parts))
            unfinished.rename(self._path(chunk_id))

    def get(self, chunk_ids: Sequence[str], *, timeout_s: float, handles: Handles) -> list[Parts]:
        gone = [chunk_id for chunk_id in chunk_ids if not self._path(chunk_id).is_file()]
        if gone:
            raise KeysNotFound(f"{len(gone)} of {len(chunk_ids)} chunks have no file: {name_some(gone)}")
        return [[memoryview(self._path(chunk_id).read_bytes())] for chunk_id in chunk_ids]

    def drop(self, chunk_ids: Sequence[str], *, timeout_s: float) -> None:
        for chunk_id in chunk_ids:
            self._path(chunk_id).unlink(missing_ok=True)

    def health(self) -> StoreHealth:
        return StoreHealth(is_alive=self._folder.is_dir(), detail=str(self._folder))

    def close(self) -> None:
        if self._is_owner:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _path(self, chunk_id: str) -> Path:
        return self._folder / chunk_id.replace("/", "_")
