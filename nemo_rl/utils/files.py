"""Atomic file replacement: written to a temporary name, then renamed.

Called by whatever leaves files for people or for a later run.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

__all__ = ["replace_file", "write_text"]


def replace_file(path: Path, write: Callable[[Path], object]) -> Path:
    """Lets `write` fill a temporary file beside `path`, then renames it; a failed write leaves `path` as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # The suffix stays last: matplotlib and others choose the format by it.
    temporary = path.with_name(f".{path.stem}.{os.getpid()}.tmp{path.suffix}")
    try:
        write(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def write_text(path: Path, text: str) -> Path:
    """`path` holds `text`, or what it held before."""
    return replace_file(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))
