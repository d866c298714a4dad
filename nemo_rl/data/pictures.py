"""`Picture`: an image of a prompt as a dataset gives it, a file or its bytes, which is decoded where it is used.

Pixels are what the image processors of transformers make of a file: turned as its orientation says, on white where it
is transparent, the first frame of several. Called by the sources of prompts and by what makes prompts for
vision-language models. Invariant: what a row holds is read once when the prompts are read, so that a picture that is
missing or none is found before the first step; its pixels are never kept.
"""

from __future__ import annotations

import base64
import hashlib
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError

from nemo_rl.errors import DatasetError, boundary, name_some, shorten
from nemo_rl.utils.files import read_plain

__all__ = ["FORMATS", "IMAGE", "MAX_PIXELS", "EncodesPictures", "Picture", "PictureTensors", "pictures_of"]

IMAGE = "<image>"
"""Stands in the text of a row where one of its pictures belongs."""
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
"""Formats of Pillow that are read: others may start programs (EPS) or read other files."""
OWN_FRAMES = ("PNG", "WEBP", "GIF", "TIFF")
"""Formats whose further frames are pictures of their own, and no previews."""
KEYS = ("bytes", "path", "image", "url", "image_url")
"""Keys of a mapping that may hold a picture, the first that is not null counts."""
ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
DATA_URL = re.compile(r"data:image/[\w.+-]+;base64,")
MOST_BYTES = 256 << 20
"""Most bytes of a file."""
MAX_PIXELS = 1 << 26
"""Most pixels of one picture: more than any camera's, few enough to be decoded."""
DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class Picture:
    """One image, by its file or by its bytes."""

    source: Path | bytes
    digest: str
    """Digest of the bytes of the file."""
    num_frames: int = 1
    """Frames or pages of the file, of which the first one is the picture."""

    @classmethod
    def of(cls, source: Path | bytes) -> Picture:
        """Return the picture.

        Raises:
            DatasetError: the file cannot be read, or holds no picture.
        """
        content = _content(source)
        with _opened(content, source) as image:
            several: Any = image
            with boundary(DatasetError, f"{_name(source)}: the picture is damaged"):
                num_frames = several.n_frames if image.format in OWN_FRAMES else 1
            _check_mode(image, _name(source))
        return cls(source, hashlib.blake2b(content, digest_size=DIGEST_BYTES).hexdigest(), num_frames)

    def decode(self) -> Image.Image:
        """Return the pixels in RGB.

        Raises:
            DatasetError: the file cannot be read any more, has changed, or is damaged.
        """
        content = _content(self.source)
        if hashlib.blake2b(content, digest_size=DIGEST_BYTES).hexdigest() != self.digest:
            raise DatasetError(f"{_name(self.source)}: the file has changed since the prompts were read; start again")
        # Every decoder has exceptions of its own for wrong tags and pixels.
        with (
            _opened(content, self.source) as image,
            boundary(DatasetError, f"{_name(self.source)}: the picture is damaged"),
        ):
            return _in_rgb(image)


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
    """Return the pictures of a row: a path, a data URL, bytes, a decoded image, a mapping with one of `KEYS`, or a list
    of these; none for null and for a mapping with nulls.

    Args:
        folder: that relative paths start at; None: the working directory.

    Raises:
        DatasetError: something is none of these, no picture, or an address of another machine.
    """
    if value is None:
        return ()
    if isinstance(value, list | tuple):
        return tuple(picture for item in value for picture in pictures_of(item, folder=folder))
    if isinstance(value, Mapping):
        if not value.keys() & {*KEYS}:
            raise DatasetError(
                f"expected one of the keys {', '.join(KEYS)} of a picture, got {name_some(sorted(map(str, value)))}"
            )
        given = next((value[key] for key in KEYS if value.get(key) is not None), None)
        return pictures_of(given, folder=folder)
    if isinstance(value, bytes | bytearray):
        return (Picture.of(bytes(value)),)
    if isinstance(value, str) and DATA_URL.match(value):
        try:
            return (Picture.of(base64.b64decode(value.partition(",")[2], validate=True)),)
        except ValueError as error:
            raise DatasetError(f"{shorten(value)}: the data URL is damaged: {error}") from error
    if isinstance(value, str) and value:
        text = value.removeprefix("file://")
        if ADDRESS.match(text):
            raise DatasetError(
                f"{shorten(text)}: pictures of other machines are not fetched; download them, and give their paths"
            )
        with boundary(DatasetError, f"{shorten(text)!r} is no path of a picture"):
            path = Path(text).expanduser()
        return (Picture.of(path if path.is_absolute() or folder is None else folder / path),)
    if isinstance(value, Image.Image):
        buffer = io.BytesIO()
        _check_mode(value, "a picture")
        with boundary(DatasetError, "a decoded picture is damaged"):
            _in_rgb(value).save(buffer, "PNG")
        return (Picture.of(buffer.getvalue()),)
    raise DatasetError(f"expected a path or the bytes of a picture, or a list of them, got {shorten(repr(value))}")


def _content(source: Path | bytes) -> bytes:
    if isinstance(source, bytes):
        return source
    try:
        return read_plain(source, most_bytes=MOST_BYTES)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise DatasetError(f"{shorten(str(source))}: the picture cannot be read: {why}") from error


def _opened(content: bytes, source: Path | bytes) -> Image.Image:
    try:
        image = Image.open(io.BytesIO(content), formats=FORMATS)
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DatasetError(f"{_name(source)}: expected a picture ({', '.join(FORMATS)}): {error}") from error
    if image.width * image.height > MAX_PIXELS:
        raise DatasetError(f"{_name(source)}: expected at most {MAX_PIXELS} pixels, got {image.width} x {image.height}")
    return image


def _check_mode(image: Image.Image, name: str) -> None:
    """Refuse numbers without a known range."""
    if image.mode == "F" or (image.mode == "I" and image.format != "PNG"):
        raise DatasetError(f"{name}: its pixels are numbers without a known range; store it with 8 or 16 bits")


def _in_rgb(image: Image.Image) -> Image.Image:
    """Return the first frame as transformers' processors have it: turned, in 8 bits, on white."""
    turned = ImageOps.exif_transpose(image)
    if turned.mode == "I" or turned.mode.startswith("I;16"):
        # Pillow would cut what is above 255 off.
        turned = Image.fromarray(np.round(np.asarray(turned) / 257).clip(0, 255).astype(np.uint8))
    if "A" in turned.getbands() or turned.info.get("transparency") is not None:
        clear = turned.convert("RGBA")
        turned = Image.alpha_composite(Image.new("RGBA", clear.size, (255, 255, 255, 255)), clear)
    return turned.convert("RGB")


def _name(source: Path | bytes) -> str:
    return str(source) if isinstance(source, Path) else f"a picture of {len(source)} bytes"
