"""Terminal output: one rich console, the handler of log records, and texts that are safe to show.

Launchers make the console; log records go through it, so that the live panel stays whole. Library code only uses
`logging.getLogger(__name__)`.
"""

from __future__ import annotations

import io
import logging
import sys

from rich.console import Console
from rich.logging import RichHandler

__all__ = ["LOGGERS", "bytes_text", "configure_logging", "make_console", "printable"]

LOGGERS = ("nemo_rl", "nemo_rl_tools")
"""Loggers of this project's two packages."""


def make_console(*, stderr: bool = False) -> Console:
    """Make the console of standard output or error, without markup and emoji, so that `[x]` and `:smile:` in a text
    stay as they are.

    What the terminal's encoding lacks is written as an escape: a path or a response may hold anything.
    """
    stream = sys.stderr if stderr else sys.stdout
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")
    return Console(stderr=stderr, markup=False, emoji=False, highlight=False, soft_wrap=True)


def configure_logging(console: Console, *, level: int = logging.INFO) -> None:
    """Show records of this package at `level`, those of others from WARNING on."""
    handler = RichHandler(console=console, show_path=False, markup=False, log_time_format="%H:%M:%S")
    handler.setFormatter(logging.Formatter("%(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    for name in LOGGERS:
        logging.getLogger(name).setLevel(level)
    # torch warns about an internal name whenever a library asks whether it is being traced.
    logging.getLogger("torch.fx._symbolic_trace").addFilter(lambda record: record.levelno >= logging.ERROR)


def printable(text: str, *, limit: int, keep_lines: bool = False) -> str:
    """Return at most `limit` characters of `text`, control characters spelt out, and the number of cut characters.

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


def bytes_text(count: int) -> str:
    """Return a number of bytes in the unit that suits it.

    Example:
        >>> bytes_text(512), bytes_text(3 << 20), bytes_text(3 << 30)
        ('512B', '3MiB', '3.0GiB')
    """
    for limit, unit in ((1024, "B"), (1024**2, "KiB"), (1024**3, "MiB")):
        if count < limit:
            return f"{count / (limit // 1024):.0f}{unit}"
    return f"{count / 1024**3:.1f}GiB"
