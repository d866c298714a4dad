"""`nemo-rl checkpoints convert`: files that a resumed run reads, from the formats of earlier releases to today's."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from struct import Struct
from typing import Annotated, BinaryIO

import msgpack
import typer
import xxhash

from nemo_rl.cli.doors import Verbs
from nemo_rl.errors import RunFolderError, UserError
from nemo_rl.utils.console import make_console
from nemo_rl.utils.files import open_plain, replace_file
from nemo_rl.utils.framed_log import EARLIER_GROUPS, GROUPS, begin, frame, write_all

__all__ = ["app", "convert_segment"]

_FRAME = Struct("<4sIQQ")
"""A frame before release 0.2: magic, bytes of the text, bytes of the body, xxh3_64 of both."""

app = typer.Typer(cls=Verbs, no_args_is_help=True, help="Make files of earlier releases readable.")


@app.callback()
def _group() -> None:
    """Make files of earlier releases readable."""


@app.command()
def convert(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="data_plane.durable.path of a run that has ended")],
) -> None:
    """Rewrite finished groups that a release before 0.2 has kept in files; those of today stay as they are."""
    if not folder.is_dir():
        raise UserError(f"{folder}: expected a folder of finished groups (data_plane.durable.path), got none")
    console = make_console()
    for path in sorted(folder.glob("*.seg")):
        count = convert_segment(path)
        console.print(f"{path}: {'as it was' if count is None else f'converted, frames of groups: {count}'}")


def convert_segment(path: Path) -> int | None:
    """Rewrite a segment; return its frames of groups, or None for a file of another format, which stays as it is.

    Raises:
        RunFolderError: its beginning is damaged. A frame behind that was cut, or is damaged, ends the new file.
    """
    with open_plain(path) as file:
        if file.read(len(EARLIER_GROUPS)) != EARLIER_GROUPS:
            return None
        frames = list(_frames(file))
    if not frames or not isinstance(frames[0][0], dict):
        raise RunFolderError(f"{path}: its beginning is damaged, so nothing of it can be used; remove it")
    content = bytearray(begin(GROUPS, {"identity": frames[0][0].get("identity")}))
    for text, body in frames[1:]:
        content += frame(msgpack.packb(text), body, at=len(content))

    def write(temporary: Path) -> None:
        with temporary.open("wb", buffering=0) as out:
            write_all(out.fileno(), bytes(content))
            os.fsync(out.fileno())

    replace_file(path, write)
    return len(frames) - 1


def _frames(file: BinaryIO) -> Iterator[tuple[object, bytes]]:
    """Yield text and body of each whole frame."""
    file.seek(0)
    while len(head := file.read(_FRAME.size)) == _FRAME.size:
        magic, text_bytes, body_bytes, check = _FRAME.unpack(head)
        text, body = file.read(text_bytes), file.read(body_bytes)
        if magic != EARLIER_GROUPS or xxhash.xxh3_64_intdigest(text + body) != check:
            return
        yield msgpack.unpackb(text, strict_map_key=False), body
