"""The files of the page of `nemo-rl view`, by their path, as the folders of the runs are now.

    index.html, *.css, *.js     the page itself
    data.js                     the table of runs, and the settings in which they differ
    run-ID.js                   curves of a run, and what else it holds; read when somebody looks at it
    rollouts-ID-STEP.html       rollouts of a step
    row-ID.js?key=KEY           the life of a row                         served only
    rows-ID.js                  the lives of the rows that are written    written only
    trace-ID.js                 the verdict on a trace of routes          served only

A served page and a written one are the same files, so both can be opened in a browser; a written one needs no server,
and has the newest steps of rollouts alone. Data are scripts, since a page of a file can read nothing else.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Iterator
from functools import lru_cache, partial
from pathlib import Path
from threading import Lock
from typing import Any, TypeAlias
from urllib.parse import urlencode

from nemo_rl.data_plane.ledger.events import EVENTS_FILE, RowHistory, histories_of_keys
from nemo_rl.errors import UserError, boundary
from nemo_rl.utils.files import open_plain, replace_file
from nemo_rl.utils.rollout_file import steps_with_rollouts
from nemo_rl_tools.rollouts.choice import ShownRollouts, choose_rollouts
from nemo_rl_tools.rollouts.page import PageLinks, page_text, problem_text
from nemo_rl_tools.tracer import PAGE_FOLDER
from nemo_rl_tools.view.runs import COLUMNS, DEPTH, ViewedRun, find_runs, id_of

__all__ = ["INDEX", "ViewPages"]

Fingerprint: TypeAlias = tuple[tuple[str, int, int], ...]
"""Name, time and size of each file of a folder."""

FILES = {
    path.name: path
    for path in (*sorted((Path(__file__).parent / "page").iterdir()), *sorted(PAGE_FOLDER.glob("uPlot.*")))
    if path.is_file()
}
"""The fixed files; both pages draw with one copy of uPlot."""
INDEX, DATA = "index.html", "data.js"
SCRIPT_BEGIN = b"(window.nemoRlFiles ??= {})"
PATH = re.compile(r"(run|rollouts|row|rows|trace)-([0-9a-f]{12})(?:-([0-9]{1,18}))?\.(?:js|html)")
MOST_ROWS = 64
"""Rows of a step on the page of its rollouts."""
WRITTEN_STEPS = 5
"""Steps of a run whose rollouts are written: the newest."""
FIRST_EVENTS, LAST_EVENTS = 16, 48
"""Events of a row that are shown of a longer life."""


class ViewPages:
    """The files of the page.

    Args:
        results: folder of a run, or one above several.
        is_served: the page can ask for more than what is written.

    Raises:
        UserError: no run is there.
    """

    def __init__(self, results: Path, *, is_served: bool) -> None:
        self.results, self._is_served = results, is_served
        self._one_by_one = Lock()
        self.num_runs = len(self._runs())

    def run(self, run_id: str) -> ViewedRun | None:
        return next((run for run in self._runs() if run.id == run_id), None)

    def read(self, path: str, *, key: str = "") -> bytes | None:
        """Return the content of a file as it is now; None: there is no such file.

        Args:
            key: the row that is asked for.
        """
        # Only names that the folder has: a path of a request never reaches the file system.
        if path in FILES:
            return FILES[path].read_bytes()
        if path == DATA:
            return _script(path, self._data())
        match = PATH.fullmatch(path)
        if match is None:
            return None
        kind, found_id, step = match.groups()
        if kind == "trace":
            folder = next((folder for name, folder in self._traces().items() if id_of(name) == found_id), None)
            if folder is None or not self._is_served:
                return None
            try:
                with boundary(UserError, f"{folder}: a trace of routes"):
                    return _script(path, _checked(folder, _fingerprint(folder)))
            except UserError as error:
                return _script(path, {"problem": str(error)})
        run = self.run(found_id)
        if run is None:
            return None
        if kind == "run":
            with self._one_by_one:  # so that the first of many runs is there soon
                return _script(path, {**run.details(), "traces": self._traces_of(run)})
        if kind == "row" and self._is_served:
            return _script(path, next(iter(_lives(run, [key]).values())))
        if kind == "rows":
            return _script(path, _lives(run, _written_keys(run)))
        return self._rollouts(run, int(step)).encode() if kind == "rollouts" and step else None

    def write(self, folder: Path) -> Path:
        """Write the files into their own folder; return the path of the first page.

        Raises:
            UserError: the folder has other files already.
        """
        fixed = {*FILES, DATA}
        there = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
        others = sorted(name for name in there if not _is_of_page(folder / name, fixed))
        if there and not others and not _is_of_page(folder / DATA, fixed):
            others = [
                INDEX if INDEX in there else min(there)
            ]  # named as a file of the page, but no page was written here
        if others:
            raise UserError(f"--export {folder}: expected a new folder, it has {others[0]}; name another one")
        folder.mkdir(parents=True, exist_ok=True)
        names = [*sorted(fixed), *(name for run in self._runs() for name in _written_of(run))]
        for name in names:
            content = self.read(name)
            if content is not None:
                replace_file(folder / name, partial(_fill, content))
        for name in there - set(names):  # of steps that an earlier page had
            (folder / name).unlink()
        return folder / INDEX

    def _runs(self) -> list[ViewedRun]:
        return find_runs(self.results)

    def _data(self) -> dict[str, Any]:
        runs = [run.overview() for run in self._runs()]
        keys = dict.fromkeys(key for run in runs for key in run["settings"])
        equal = {key for key in keys if len({run["settings"].get(key) for run in runs}) == 1}
        for run in runs:
            run["settings"] = {key: value for key, value in run["settings"].items() if key not in equal}
        return {"isServed": self._is_served, "mostSteps": WRITTEN_STEPS, "columns": list(COLUMNS), "runs": runs}

    def _rollouts(self, run: ViewedRun, step: int) -> str:
        links = PageLinks(
            above=dict(self._links_above(run, step)),
            of_row=lambda key: _part(run, "rows", key=key),
        )
        try:
            return page_text(_chosen(run, step), links)
        except UserError as error:
            return problem_text(f"Rollouts of {run.name}, step {step}", str(error), links)

    def _links_above(self, run: ViewedRun, step: int) -> Iterator[tuple[str, str]]:
        yield f"run {run.name}", _part(run, "rollouts")
        steps = steps_with_rollouts(run.folder) if self._is_served else _written_steps(run)
        before, after = [other for other in steps if other < step], [other for other in steps if other > step]
        near = {"before": before[-1:], "after": after[:1], "newest": after[1:][-1:]}
        for word, found in near.items():
            for other in found:
                yield f"{word}: step {other}", f"rollouts-{run.id}-{other}.html"

    def _traces_of(self, run: ViewedRun) -> list[dict[str, object]]:
        """Return the traces of routes below the folder that is shown, those of the run first."""
        found = [
            {"id": id_of(name), "name": name, "isOwn": folder.is_relative_to(run.folder), "command": _quoted(folder)}
            for name, folder in self._traces().items()
        ]
        return sorted(found, key=lambda trace: not trace["isOwn"])

    def _traces(self) -> dict[str, Path]:
        from nemo_rl_tools.route_chain.records import trace_folders  # noqa: PLC0415  (numpy)

        found = trace_folders(self.results, depth=DEPTH + 1)
        return {folder.relative_to(self.results).as_posix(): folder for folder in found}


def _script(path: str, value: object) -> bytes:
    text = json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return SCRIPT_BEGIN + f"[{json.dumps(path)}] = {text};\n".encode()


def _fill(content: bytes, path: Path) -> None:
    path.write_bytes(content)


def _is_of_page(path: Path, fixed: set[str]) -> bool:
    """Return whether a file is one that an earlier `write` may have made: by its name, and `DATA` by its beginning."""
    if path.is_symlink() or not path.is_file() or not (path.name in fixed or PATH.fullmatch(path.name)):
        return False
    if path.name != DATA:
        return True
    with open_plain(path) as file:
        return file.read(len(SCRIPT_BEGIN)) == SCRIPT_BEGIN


def _part(run: ViewedRun, part: str, **more: str) -> str:
    return f"{INDEX}#{urlencode({'run': run.id, 'part': part, **more}, errors='replace')}"


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))


def _chosen(run: ViewedRun, step: int) -> ShownRollouts:
    return choose_rollouts(run.folder, step=step, group=None, limit=MOST_ROWS)


def _written_steps(run: ViewedRun) -> tuple[int, ...]:
    return steps_with_rollouts(run.folder)[-WRITTEN_STEPS:]


def _written_of(run: ViewedRun) -> Iterator[str]:
    yield f"run-{run.id}.js"
    yield f"rows-{run.id}.js"
    yield from (f"rollouts-{run.id}-{step}.html" for step in _written_steps(run))


def _written_keys(run: ViewedRun) -> Iterator[str]:
    for step in _written_steps(run):
        try:
            shown = _chosen(run, step)
        except UserError:  # the page of the step says so
            continue
        yield from (row.key for group in shown.groups for row in group.rows)


def _lives(run: ViewedRun, keys: Iterable[str]) -> dict[str, dict[str, object]]:
    path, wanted = run.folder / EVENTS_FILE, list(keys)
    nothing = f"no event of {path} names it; expected a key such as those of the rollouts, `<group uid>_g<index>`"
    try:
        with boundary(UserError, str(path)):
            found = {key: _life(history) for key, history in histories_of_keys(path, wanted).items()}
    except UserError as error:
        found, nothing = {}, str(error)
    return {key: found.get(key, {"key": key, "problem": nothing}) for key in wanted}


def _life(history: RowHistory) -> dict[str, object]:
    moments = [(moment.seconds, moment.clock, moment.name, moment.details) for moment in history.moments()]
    num_left_out = max(0, len(moments) - FIRST_EVENTS - LAST_EVENTS)
    shown = [*moments[:FIRST_EVENTS], *moments[-LAST_EVENTS:]] if num_left_out else moments
    facts = {"key": history.key, "partition": history.partition, "outcome": history.outcome}
    return {**facts, "moments": shown, "leftOut": num_left_out}


def _fingerprint(folder: Path) -> Fingerprint:
    found = ((path.name, path.stat()) for path in sorted(folder.iterdir()))
    return tuple((name, state.st_mtime_ns, state.st_size) for name, state in found)


@lru_cache(maxsize=16)
def _checked(folder: Path, _: Fingerprint) -> dict[str, object]:
    """Return the verdict on a trace; made once for each state of its files."""
    from nemo_rl_tools.route_chain.chain import verify_trace  # noqa: PLC0415  (numpy)

    report = verify_trace(folder)
    return {"verdict": report.verdict.name, "lines": report.lines()}
