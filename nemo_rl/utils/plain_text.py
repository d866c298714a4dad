"""Makes untrusted text (rewards, models, files) safe to show: cut, with control characters escaped.

Called wherever a message or a line on a terminal quotes a text that somebody else wrote.
"""

from __future__ import annotations

__all__ = ["printable"]


def printable(text: str, *, limit: int, keep_lines: bool = False) -> str:
    """At most `limit` characters of `text`, control characters spelt out; what was cut is counted.

    Args:
        keep_lines: line feeds and tabs stay.

    Example:
        >>> printable("a\\x1b[2Jb" + "c" * 50, limit=8)
        'a\\\\x1b[2Jbcc ... (48 more characters)'
    """
    kept = "\n\t" if keep_lines else ""
    shown = "".join(char if char.isprintable() or char in kept else _spelt_out(char) for char in text[:limit])
    return shown if len(text) <= limit else f"{shown} ... ({len(text) - limit} more characters)"


def _spelt_out(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")
