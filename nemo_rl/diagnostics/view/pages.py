"""The files of the page of `nemo-rl view`, by their path: fixed ones, `data.js`, and the rollouts of each run.

A served page and a written one are the same files, so both can be opened in a browser; a written one needs no server.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from nemo_rl.diagnostics.rollouts.choice import choose_rollouts
from nemo_rl.diagnostics.rollouts.page import page_text
from nemo_rl.diagnostics.view.runs import ViewedRun
from nemo_rl.errors import UserError
from nemo_rl.tracer import PAGE_FOLDER

__all__ = ["DATA", "INDEX", "page_files", "read_file", "rollouts_path", "write_pages"]

FILES = {
    path.name: path
    for path in (*sorted((Path(__file__).parent / "page").iterdir()), *sorted(PAGE_FOLDER.glob("uPlot.*")))
    if path.is_file()
}
"""The fixed files; both pages draw with one copy of uPlot."""
INDEX, DATA = "index.html", "data.js"
MOST_ROWS = 64
"""Rows of one step on the page of a run's rollouts."""


def page_files(runs: Sequence[ViewedRun]) -> list[str]:
    """Return the paths of all files of the page."""
    return [*FILES, DATA, *(rollouts_path(number) for number in range(len(runs)))]


def rollouts_path(number: int) -> str:
    """Return the path of the rollouts of a run, by its place in the list."""
    return f"rollouts-{number}.html"


def read_file(path: str, runs: Sequence[ViewedRun]) -> bytes | None:
    """Return the content of a file of the page as it is now; None: there is no such file."""
    if path == DATA:
        records = json.dumps([run.record() for run in runs], allow_nan=False).replace("<", "\\u003c")
        return f"window.nemoRlRuns = {records};\n".encode()
    for number, run in enumerate(runs):
        if path == rollouts_path(number):
            return _rollouts(run)
    # Only names that the folder has: a path of a request never reaches the file system.
    return FILES[path].read_bytes() if path in FILES else None


def _rollouts(run: ViewedRun) -> bytes | None:
    try:
        shown = choose_rollouts(run.folder, step=None, group=None, limit=MOST_ROWS)
    except UserError:
        return None
    return page_text(shown).encode()


def write_pages(folder: Path, runs: Sequence[ViewedRun]) -> Path:
    """Write all files into a folder of their own; return the path of the first page.

    Raises:
        UserError: the folder has other files already.
    """
    names = page_files(runs)
    others = sorted({path.name for path in folder.iterdir()} - set(names)) if folder.is_dir() else []
    if others:
        raise UserError(f"--export {folder}: expected a new folder, it has {others[0]}; name another one")
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        content = read_file(name, runs)
        if content is not None:
            (folder / name).write_bytes(content)
    return folder / INDEX
