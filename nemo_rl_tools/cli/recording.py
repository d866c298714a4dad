"""`nemo-rl inspect RUN tracer`: what a recording of the live tracer holds; `nemo-rl trace` shows it live."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from io import StringIO
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from nemo_rl.cli.doors import AsJson, selected, show
from nemo_rl.errors import UserError, name_some
from nemo_rl.records.sites import execution_order
from nemo_rl.tracer.frame import BadFrame, Frame
from nemo_rl.tracer.reducer import Stats
from nemo_rl.utils.console import bytes_text, make_console, printable
from nemo_rl.utils.files import write_text
from nemo_rl_tools.cli.trace_watch import RECORDING
from nemo_rl_tools.tracer.entry import EntryKind
from nemo_rl_tools.tracer.stream_reader import StreamReader, find_recording
from nemo_rl_tools.tracer.summary import (
    RUN_ORDER,
    Reading,
    RecordingSummary,
    SiteKey,
    SiteSummary,
    StreamSummary,
    summarize,
)

__all__ = ["tracer"]

SHOWN = 300
"""Characters of a text that the run has written."""
QUIET_S = 300.0
"""A run that is not finished and has written nothing for so long may be dead."""


def tracer(
    ctx: typer.Context,
    site: Annotated[
        str | None, typer.Option("--site", help="numbers of this site over steps, such as 'mlp.out[2]'")
    ] = None,
    csv_file: Annotated[Path | None, typer.Option("--csv", help="with --site: write them to a file")] = None,
    as_json: AsJson = False,
) -> None:
    """Show runs, steps, sites, what is missing and the first NaN of a recording of the live tracer.

    RUN is the log folder of a run or the folder of a recording. Exit code: 0, or 2 for no recording.
    """
    if csv_file is not None and site is None:
        raise UserError("--csv: expected --site, too: name the site whose numbers are wanted, such as 'mlp.out[2]'")
    reader = StreamReader(find_recording(selected(ctx, what=RECORDING).folders[0]))
    if site is not None:
        _show_site(reader, site, make_console(), csv_file=csv_file, as_json=as_json)
        return
    summary = summarize(reader)
    if not summary.num_entries:
        raise UserError(f"{reader.folder}: expected a recording, got files without one whole entry")
    show(_record(summary), _lines(summary), as_json=as_json)


def _lines(summary: RecordingSummary) -> Iterator[str]:
    yield f"{summary.folder}: {bytes_text(summary.num_bytes)}, {summary.num_entries} entries"
    if summary.num_damaged or summary.num_torn or summary.num_unreadable:
        yield (
            f"  skipped: {summary.num_damaged} damaged stretches, {summary.num_torn} torn ends, "
            f"{summary.num_unreadable} entries that this version cannot read"
        )
    for run in summary.runs.values():
        yield ""
        yield from _run_lines(run, summary.age_s)
    if summary.problems:
        yield ""
        yield "problems"
        yield from (f"  {_plain(text)}" for text in summary.problems)
    if summary.watches:
        yield ""
        yield "watched"
        yield from (f"  {_plain(text)}" for text in summary.watches)
    if summary.marks:
        yield "marks"
        yield from (f"  step {'?' if step is None else step}: {_plain(label)}" for step, label in summary.marks)


def _run_lines(run: StreamSummary, age_s: float) -> Iterator[str]:
    said = run.said
    yield f"run {_plain(run.run)}: {_plain(said.get('name', 'no name'))}"
    for name in ("model", "layout"):
        if said.get(name):
            yield f"  {name:<9} {_plain(said[name])}"
    yield f"  state     {run.state}{_state_detail(run, age_s)}"
    yield f"  steps     {_ranges(run.steps) or 'none'}, {run.num_frames} frames"
    first = run.first_non_finite
    yield f"  NaN, inf  {'none' if first is None else _plain(first.get('text', first))}"
    if run.dropped:
        worst = max(run.dropped, key=lambda at: run.dropped[at])
        yield f"  dropped   {sum(run.dropped.values())} frames by ranks, most in step {worst[0]}, {_plain(worst[1])}"
    for rank, num in sorted(run.missing.items()):
        yield f"  missing   rank {rank} in {num} frames"
    for kind, why in _unobserved(said).items():
        yield f"  unseen    {_plain(kind)}: {_plain(why)}"
    if run.sites:
        yield f"  {'site':<28} {'reducer':<20} {'frames':>7}  {'NaN, inf':>8}  steps; phases"
    for (kind, direction, is_recomputed, reducer), found in _in_order(run):
        place = f"[{_ranges(found.layers)}]" if found.layers else ""
        phases = ", ".join(sorted(found.phases, key=lambda phase: (RUN_ORDER.get(phase, len(RUN_ORDER)), phase)))
        names = f"; {_plain(name_some(sorted(found.names)))}" if found.names else ""
        way = ("" if direction == "forward" else f" {direction}") + (" recomputed" if is_recomputed else "")
        yield (
            f"  {kind.value + place + way:<28} {reducer:<20} {found.num_frames:>7}  {found.num_bad or '-':>8}  "
            f"{_ranges(found.steps)}; {_plain(phases)}{names}"
        )


def _in_order(run: StreamSummary) -> list[tuple[SiteKey, SiteSummary]]:
    return sorted(
        run.sites.items(), key=lambda item: (execution_order(item[0][0], None, item[0][1])[::2], *item[0][2:])
    )


def _state_detail(run: StreamSummary, age_s: float) -> str:
    if run.state == "running":
        quiet = f", and nothing was written for {age_s:.0f} s" if age_s > QUIET_S else ""
        return f" (no end is recorded{quiet})"
    return f" ({_plain(run.end_text)})" if run.end_text else ""


def _unobserved(said: Mapping[str, Any]) -> Mapping[str, Any]:
    found = said.get("unobserved")
    return found if isinstance(found, Mapping) else {}


def _ranges(numbers: set[int]) -> str:
    """Return ascending numbers, neighbours together.

    Example: `0..3, 7`.
    """
    found: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if found and found[-1][1] == number - 1:
            found[-1] = (found[-1][0], number)
        else:
            found.append((number, number))
    return name_some(f"{low}" if low == high else f"{low}..{high}" for low, high in found)


def _plain(said: object) -> str:
    if isinstance(said, Mapping):
        said = ", ".join(f"{name} {value}" for name, value in said.items())
    return printable(str(said), limit=SHOWN)


def _record(summary: RecordingSummary) -> dict[str, object]:
    return {
        "folder": str(summary.folder),
        "bytes": summary.num_bytes,
        "entries": summary.num_entries,
        "damaged": summary.num_damaged,
        "torn": summary.num_torn,
        "unreadable": summary.num_unreadable,
        "watches": summary.watches,
        "problems": summary.problems,
        "marks": [{"step": step, "label": label} for step, label in summary.marks],
        "runs": [_run_record(run) for run in summary.runs.values()],
    }


def _run_record(run: StreamSummary) -> dict[str, object]:
    return {
        "run": run.run,
        "name": run.said.get("name"),
        "model": run.said.get("model"),
        "layout": run.said.get("layout"),
        "state": run.state,
        "end": run.end_text,
        "steps": sorted(run.steps),
        "frames": run.num_frames,
        "first_non_finite": run.first_non_finite,
        "dropped": sum(run.dropped.values()),
        "missing": {str(rank): num for rank, num in sorted(run.missing.items())},
        "unobserved": dict(_unobserved(run.said)),
        "sites": [
            {
                "kind": kind.value,
                "direction": direction.value,
                "recomputed": is_recomputed,
                "reducer": reducer,
                "frames": found.num_frames,
                "not_finite": found.num_bad,
                "layers": sorted(found.layers),
                "names": sorted(found.names),
                "steps": sorted(found.steps),
                "phases": sorted(found.phases),
            }
            for (kind, direction, is_recomputed, reducer), found in _in_order(run)
        ],
    }


def _show_site(reader: StreamReader, site: str, console: Console, *, csv_file: Path | None, as_json: bool) -> None:
    readings = _readings(reader, " ".join(site.split()))
    if csv_file is not None:
        write_text(csv_file, _as_csv(readings))
        console.print(f"{csv_file}: {len(readings)} rows")
    elif as_json:
        console.print_json(json.dumps([reading.as_record() for reading in readings]))
    else:
        has_runs = len({reading.run for reading in readings}) > 1
        head = f"{'step':>8} {'phase':<22} " + " ".join(f"{name:>11}" for name in ("mean", "rms", "min", "max"))
        console.print(f"{head} {'NaN':>8} {'inf':>8}{'  run' if has_runs else ''}")
        for reading in readings:
            update = f", update {reading.update}" if reading.update else ""
            numbers = " ".join(f"{value:>11.4g}" for value in (reading.mean, reading.rms, reading.min, reading.max))
            console.print(
                f"{reading.step:>8} {_plain(reading.phase) + update:<22} {numbers} {reading.nan:>8} {reading.inf:>8}"
                f"{f'  {_plain(reading.run)}' if has_runs else ''}{reading.lack}"
            )


def _readings(reader: StreamReader, site: str) -> list[Reading]:
    """Yield the readings in the order of runs, steps and phases.

    Raises:
        UserError: the recording has no stats of this site.
    """
    found: list[Reading] = []
    others: dict[str, set[str]] = {}
    for entry in reader.entries():
        if entry.kind is not EntryKind.FRAME:
            continue
        try:
            frame = entry.frame()
            if isinstance(frame, Frame):
                others.setdefault(frame.where.site.text, set()).add(str(frame.where.reducer))
                if frame.where.site.text == site and isinstance(frame.where.reducer, Stats):
                    found.append(Reading.of(frame))
        except BadFrame:
            continue
    if not found:
        raise UserError(_no_such_site(site, others))
    last = len(RUN_ORDER)
    return sorted(
        found, key=lambda reading: (reading.run, reading.step, RUN_ORDER.get(reading.phase, last), reading.update)
    )


def _no_such_site(site: str, others: Mapping[str, set[str]]) -> str:
    shown = printable(site, limit=SHOWN)
    if site in others:
        return f"--site {shown}: expected one that is recorded by stats, got {', '.join(sorted(others[site]))} alone"
    near = get_close_matches(site, others, n=3) or sorted(others)
    return f"--site {shown}: this recording has no such site; it has {_plain(name_some(near)) or 'none at all'}"


def _as_csv(readings: Sequence[Reading]) -> str:
    names = [each.name for each in fields(Reading)]
    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(names)
    writer.writerows([getattr(reading, name) for name in names] for reading in readings)
    return text.getvalue()
