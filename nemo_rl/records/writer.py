"""Writes the records of one rank.

    FOLDER/manifest.json       what this is about; written by rank 0
    FOLDER/rank_00000.jsonl    a line per record: place, dtype, shape, digest, where its bytes are
    FOLDER/rank_00000.bin      the bytes, little-endian, one record after the other
    FOLDER/rank_00000.end      written last: how many records there are

Invariant: a folder without an `end` of every rank says that it is incomplete; nothing is ever pickled.
"""

from __future__ import annotations

import json
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

import torch

from nemo_rl.errors import UserError
from nemo_rl.records.record import DimSplit, RecordManifest, RecordPlace, TokenTable
from nemo_rl.utils.files import write_text

__all__ = ["MANIFEST", "RecordWriter", "bytes_of", "digest_of", "end_path", "lines_path", "new_folder", "payload_path"]

MANIFEST = "manifest.json"
DIGEST_BYTES = 8
PAYLOAD_MODE = "xb"
"""A file that is there belongs to another recording."""


def lines_path(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank:05d}.jsonl"


def payload_path(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank:05d}.bin"


def end_path(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank:05d}.end"


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a tensor, contiguous and in its own dtype."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def digest_of(payload: bytes) -> str:
    return blake2b(payload, digest_size=DIGEST_BYTES).hexdigest()


def new_folder(folder: Path, manifest: RecordManifest) -> Path:
    """Make the folder and write its manifest; called by rank 0 before any rank writes.

    Raises:
        UserError: the folder holds records already, or cannot be written.
    """
    if (folder / MANIFEST).exists():
        raise UserError(f"{folder}: holds records already; give another folder, or remove this one")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / MANIFEST, json.dumps(manifest.as_record(), indent=1, sort_keys=True) + "\n")
    except OSError as error:
        raise _cannot_write(folder, error) from error
    return folder


class RecordWriter:
    """The records of one rank.

    Raises:
        UserError: from every method, where the disk does not take it.
    """

    def __init__(self, folder: Path, *, rank: int) -> None:
        self.folder, self._rank = folder, rank
        self._count, self._offset, self._tables = 0, 0, 0
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lines = lines_path(folder, rank).open("x", encoding="utf-8")
            self._payload = payload_path(folder, rank).open(PAYLOAD_MODE)
        except OSError as error:
            raise _cannot_write(folder, error) from error

    def tokens(self, table: TokenTable) -> str:
        """Write a table of tokens; return the name by which records refer to it."""
        name = f"t{self._tables}"
        self._tables += 1
        packed_3R = torch.stack((table.row_R, table.position_R, table.token_R)).to(torch.int64)
        self._put({"tokens": name, "keys": list(table.keys)}, packed_3R)
        return name

    def tensor(
        self, place: RecordPlace, value: torch.Tensor, *, tokens: str | None, split: DimSplit | None = None
    ) -> None:
        """Write a tensor.

        Args:
            value: `[R, ...]` in the order of the table `tokens`; anything where that is None.
            split: this rank's part of the last dimension; None has all of it.
        """
        head: dict[str, object] = {"place": place.as_record(), "table": tokens}
        if split is not None and split.count > 1:
            head["split"] = [split.index, split.count]
        self._put(head, value)

    def close(self) -> None:
        """End the files: they are complete. Idempotent."""
        if self._lines.closed:
            return
        try:
            self._payload.close()
            self._lines.close()
            write_text(end_path(self.folder, self._rank), json.dumps({"records": self._count}) + "\n")
        except OSError as error:
            self.abandon()
            raise _cannot_write(self.folder, error) from error

    def abandon(self) -> None:
        """End without a word: what is there stays, and lacks its end. Idempotent."""
        for file in (self._payload, self._lines):
            with suppress(OSError):
                file.close()

    def _put(self, head: dict[str, object], value: torch.Tensor) -> None:
        payload = bytes_of(value)
        head |= {
            "seq": self._count,
            "dtype": str(value.dtype).removeprefix("torch."),
            "shape": list(value.shape),
            "offset": self._offset,
            "bytes": len(payload),
            "digest": digest_of(payload),
        }
        try:
            self._payload.write(payload)
            # The line comes after its bytes have left this process: a line that is there can be read.
            self._payload.flush()
            self._lines.write(json.dumps(head) + "\n")
            self._lines.flush()
        except OSError as error:
            raise _cannot_write(self.folder, error) from error
        self._count += 1
        self._offset += len(payload)


def _cannot_write(folder: Path, error: OSError) -> UserError:
    return UserError(
        f"{folder}: records cannot be written: {error.strerror or error}; free space or choose another folder"
    )
