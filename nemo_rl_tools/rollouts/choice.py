"""`choose_rollouts`: the rows of a run that somebody wants to see, group by group; or what there is instead."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from nemo_rl.errors import UserError, name_some
from nemo_rl.utils.console import printable
from nemo_rl.utils.rollout_file import ROLLOUTS, rollout_path, steps_with_rollouts
from nemo_rl_tools.rollouts.row import RolloutRow, read_rows

__all__ = ["ShownGroup", "ShownRollouts", "choose_rollouts"]

NAME_SHOWN = 80
"""Characters of a group's name in a message."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShownGroup:
    """Rows of one prompt."""

    uid: str
    step: int
    rows: tuple[RolloutRow, ...]
    num_rows: int

    def summary(self) -> list[str]:
        """Rows, rewards and ends, for people."""
        rewards, reasons = [row.reward for row in self.rows], [row.finish_reason for row in self.rows]
        rows = "1 row" if self.num_rows == 1 else f"{self.num_rows} rows"
        span = f" ({min(rewards):.4g} to {max(rewards):.4g})" if min(rewards) != max(rewards) else ""
        ends = (f"{_plain(reason)} {reasons.count(reason)}" for reason in dict.fromkeys(reasons))
        return [
            *([_plain(self.rows[0].source)] if self.rows[0].source else []),
            rows if len(rewards) == self.num_rows else f"{len(rewards)} of {rows}",
            f"reward {sum(rewards) / len(rewards):.4g}{span}",
            f"ended by {', '.join(ends)}",
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class ShownRollouts:
    """The rows of a step that are shown."""

    run: Path
    steps: tuple[int, ...]
    groups: tuple[ShownGroup, ...]
    num_rows: int
    """Rows of the files, shown or not."""

    @property
    def num_shown(self) -> int:
        return sum(len(group.rows) for group in self.groups)

    @property
    def title(self) -> str:
        """The steps, for people: `step 3`."""
        return f"step {self.steps[0]}" if len(self.steps) == 1 else _span(self.steps)


def choose_rollouts(
    run: Path,
    *,
    step: int | None,
    group: str | None,
    limit: int | None,
    every_step: bool = False,
    source: str | None = None,
) -> ShownRollouts:
    """Return rows of a run's folder.

    Args:
        step: None takes the newest.
        group: a uid or its beginning; None takes all.
        limit: at most so many rows of a step; None shows all.
        every_step: takes all steps that have rollouts.
        source: name of the source of the prompts; None takes all.

    Raises:
        UserError: there are none; the message says what there is.
    """
    steps = steps_with_rollouts(run)
    if not steps:
        raise UserError(_no_rollouts(run))
    number = steps[-1] if step is None else step
    if number not in steps:
        raise UserError(f"--step {number}: {run} has readable rollouts of {_span(steps)}")
    wanted = steps if every_step else (number,)
    groups, num_rows = [], 0
    for each in wanted:
        found, count = _of_step(run, each, group=group, limit=limit, source=source)
        groups += found
        num_rows += count
    return ShownRollouts(run=run, steps=wanted, groups=tuple(groups), num_rows=num_rows)


def _of_step(
    run: Path, step: int, *, group: str | None, limit: int | None, source: str | None
) -> tuple[list[ShownGroup], int]:
    path = rollout_path(run, step)
    rows = read_rows(path)
    sources = {row.source for row in rows}
    if source is not None and source not in sources:
        there = name_some(sorted(map(_plain, sources - {""}))) or "one source alone"
        raise UserError(f"--source {source!r}: {path} has rows of {there}")
    rows = [row for row in rows if source in (None, row.source)]
    # Stable: rows of a group that lie apart come together, groups stay in the order of their first rows.
    order = {uid: at for at, uid in enumerate(dict.fromkeys(row.group for row in rows))}
    rows.sort(key=lambda row: order[row.group])
    wanted = _wanted(list(order), group, path)
    groups, left = [], len(rows) if limit is None else limit
    for uid, members in groupby(rows, key=lambda row: row.group):
        of_group = tuple(members)
        if uid in wanted and left > 0:
            groups.append(ShownGroup(uid=uid, step=step, rows=of_group[:left], num_rows=len(of_group)))
            left -= len(groups[-1].rows)
    return groups, len(rows)


def _wanted(uids: list[str], group: str | None, path: Path) -> list[str]:
    if group is None:
        return uids
    found = [group] if group in uids else [uid for uid in uids if group and uid.startswith(group)]
    if len(found) != 1:
        why = f"begins {len(found)} groups" if found else "is no group"
        names = name_some([_plain(uid) for uid in found or uids])
        raise UserError(f"--group {group!r} {why} of {path}; expected one of {names}")
    return found


def _span(steps: tuple[int, ...]) -> str:
    if len(steps) == 1:
        return f"step {steps[0]} alone"
    is_whole = len(steps) == steps[-1] - steps[0] + 1
    return f"steps {steps[0]} to {steps[-1]}" if is_whole else f"steps {name_some(steps)}, the newest {steps[-1]}"


def _no_rollouts(run: Path) -> str:
    if not run.is_dir():
        near = [_plain(path.name) for path in sorted(run.parent.glob("*/")) if steps_with_rollouts(path)]
        there = f"runs with rollouts in {run.parent}: {name_some(near)}" if near else f"{run.parent} has no such run"
        return f"{run}: expected the log folder of a run (logger.log_dir), got no folder; {there}"
    what = sorted(_plain(path.name) for path in (run / ROLLOUTS if (run / ROLLOUTS).is_dir() else run).iterdir())
    return (
        f"{run}: expected {ROLLOUTS}/step_N.jsonl of a run, got {name_some(what) or 'an empty folder'}; a run writes "
        "them with logger.num_rollouts_to_log above 0"
    )


def _plain(name: str) -> str:
    return printable(name, limit=NAME_SHOWN)
