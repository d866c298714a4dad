"""Numbers with a unit, for people."""

from __future__ import annotations

__all__ = ["bytes_text"]


def bytes_text(count: int) -> str:
    """In the unit that suits it.

    Example:
        >>> bytes_text(512), bytes_text(3 << 20), bytes_text(3 << 30)
        ('512B', '3MiB', '3.0GiB')
    """
    for limit, unit in ((1024, "B"), (1024**2, "KiB"), (1024**3, "MiB")):
        if count < limit:
            return f"{count / (limit // 1024):.0f}{unit}"
    return f"{count / 1024**3:.1f}GiB"
