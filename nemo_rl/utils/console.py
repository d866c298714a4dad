"""One rich console for all terminal output; log records go through it, so that the live panel stays whole.

Called by launchers; library code only uses `logging.getLogger(__name__)`.
"""

from __future__ import annotations

import io
import logging
import sys

from rich.console import Console
from rich.logging import RichHandler

__all__ = ["configure_logging", "make_console"]


def make_console(*, stderr: bool = False) -> Console:
    """Standard output or error; without markup and emoji, so that `[x]` and `:smile:` in a text stay as they are.

    What the terminal's encoding lacks is written as an escape: a path or a response may hold anything.
    """
    stream = sys.stderr if stderr else sys.stdout
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")
    return Console(stderr=stderr, markup=False, emoji=False, highlight=False, soft_wrap=True)


def configure_logging(console: Console, *, level: int = logging.INFO) -> None:
    """Records of this package at `level`, those of others from WARNING on."""
    handler = RichHandler(console=console, show_path=False, markup=False, log_time_format="%H:%M:%S")
    handler.setFormatter(logging.Formatter("%(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("nemo_rl").setLevel(level)
    # torch warns about an internal name whenever a library asks whether it is being traced.
    logging.getLogger("torch.fx._symbolic_trace").addFilter(lambda record: record.levelno >= logging.ERROR)
