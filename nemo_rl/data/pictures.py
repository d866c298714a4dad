"""`Picture`: an image of a prompt as a dataset gives it, a file or its bytes, which is decoded where it is used.

Called by the sources of prompts and by what makes prompts for vision-language models. Invariant: what a row holds is
read once when the prompts are read, so that a picture that is missing or none is found before the first step; its
pixels are never kept.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from PIL import Image, UnidentifiedImageError

from nemo_rl.errors import DatasetError, shorten

__all__ = ["MAX_PIXELS", "EncodesPictures", "Picture", "PictureTensors", "pictures_of"]

MAX_PIXELS = 1 << 26
"""Most pixels of one picture: more than any camera's, few enough to be decoded."""
DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class Picture:
    """One image, by its file or by its bytes."""

    source: Path | bytes
    digest: str
    """Digest of the bytes of the file."""

    @classmethod
    def of(cls, source: Path | bytes) -> Picture:
        """Return the picture.

        Raises:
            DatasetError: the file cannot be read, or holds no picture.
        """
        content = _content(source)
        picture = cls(source, hashlib.blake2b(content, digest_size=DIGEST_BYTES).hexdigest())
        _opened(content, source).close()
        return picture

    def decode(self) -> Image.Image:
        """Return the pixels in RGB.

        Raises:
            DatasetError: the file cannot be read any more, has changed, or is damaged.
        """
        content = _content(self.source)
        if hashlib.blake2b(content, digest_size=DIGEST_BYTES).hexdigest() != self.digest:
            raise DatasetError(f"{_name(self.source)}: the file has changed since the prompts were read; start again")
        with _opened(content, self.source) as image:
            try:
                return image.convert("RGB")
            except (OSError, ValueError, SyntaxError) as error:
                raise DatasetError(f"{_name(self.source)}: the picture is damaged: {error}") from error


class PictureTensors(Protocol):
    """The tensors that a model takes for the pictures of one prompt."""

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Return the tensors by the names of their columns."""


class EncodesPictures(Protocol):
    """Makes prompts with pictures for one model."""

    @property
    def image_text(self) -> str:
        """Return what stands for a picture in a text without a chat template."""

    def count(self, ids: Sequence[int]) -> int:
        """Return the number of places for pictures among the ids."""

    def expand(self, ids: Sequence[int], pictures: Sequence[Image.Image]) -> tuple[tuple[int, ...], PictureTensors]:
        """Return the ids with a token for every feature of the pictures, and the tensors.

        Args:
            ids: with one place for each picture.
        """


def pictures_of(value: object, *, folder: Path | None) -> tuple[Picture, ...]:
    """Return the pictures of a row: a path, bytes, a decoded image, `{"bytes": ..., "path": ...}`, or a list of these.

    Args:
        folder: that relative paths start at; None: the working directory.

    Raises:
        DatasetError: something is none of these, or no picture.
    """
    if value is None:
        return ()
    if isinstance(value, list | tuple):
        return tuple(picture for item in value for picture in pictures_of(item, folder=folder))
    if isinstance(value, Mapping):
        given = value.get("bytes")
        return pictures_of(value.get("path") if given is None else given, folder=folder)
    if isinstance(value, bytes | bytearray):
        return (Picture.of(bytes(value)),)
    if isinstance(value, str) and value:
        path = Path(value).expanduser()
        return (Picture.of(path if path.is_absolute() or folder is None else folder / path),)
    if isinstance(value, Image.Image):
        buffer = io.BytesIO()
        value.convert("RGB").save(buffer, "PNG")
        return (Picture.of(buffer.getvalue()),)
    raise DatasetError(f"expected a path or the bytes of a picture, or a list of them, got {shorten(repr(value))}")


def _content(source: Path | bytes) -> bytes:
    if isinstance(source, bytes):
        return source
    try:
        return source.read_bytes()
    except OSError as error:
        raise DatasetError(f"{source}: the picture cannot be read: {error.strerror}") from error


def _opened(content: bytes, source: Path | bytes) -> Image.Image:
    try:
        image = Image.open(io.BytesIO(content))
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DatasetError(f"{_name(source)}: expected a picture (PNG, JPEG, ...): {error}") from error
    if image.width * image.height > MAX_PIXELS:
        raise DatasetError(f"{_name(source)}: expected at most {MAX_PIXELS} pixels, got {image.width} x {image.height}")
    return image


def _name(source: Path | bytes) -> str:
    return str(source) if isinstance(source, Path) else f"a picture of {len(source)} bytes"
