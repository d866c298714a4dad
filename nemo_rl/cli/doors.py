"""`Door`: a command whose words say what to look at before they name a view; `inspect` and `compare` are the two.

    nemo-rl inspect RUN [step N] [row KEY]... [VIEW] [OPTIONS]
    nemo-rl compare A B [step N] [row KEY]... [OPTIONS]

Words and options may stand in any order; `--step N` is the same as `step N`. A view gets the `Selected` and reads its
own options. `RENAMED` answers the commands that became views, with the line to type in their place.
"""

from __future__ import annotations

import inspect
import json
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from functools import partial, wraps
from pathlib import Path
from typing import Annotated, Any, ClassVar, NoReturn, Protocol, get_type_hints

import typer
from typer.core import TyperGroup

from nemo_rl.errors import UserError
from nemo_rl.utils.console import make_console

__all__ = [
    "AsJson",
    "Door",
    "Selected",
    "Verbs",
    "answer_old_names",
    "end_with",
    "refuse",
    "selected",
    "show",
    "with_records",
]

_NO_LIMIT = 10_000
AsJson = Annotated[bool, typer.Option("--json", help="machine-readable output")]


@dataclass(frozen=True, kw_only=True, slots=True)
class Selected:
    """The folders, the step and the rows that a command line names."""

    folders: tuple[Path, ...]
    step: int | None
    rows: tuple[str, ...]


class Verbs(TyperGroup):
    """A group whose help shows each command with its whole first sentence, below the heading of its kind."""

    headings: ClassVar[Mapping[str, Sequence[str]]] = {}
    """Heading -> names of the commands below it, in order. Other commands stand below the first heading."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands, without the limit of typer that cuts their sentences."""
        headings = self.headings or {"Commands": ()}
        named = {name for names in headings.values() for name in names}
        other = [name for name in self.list_commands(ctx) if name not in named]
        for heading, names in headings.items():
            given = [(name, self.get_command(ctx, name)) for name in (*names, *other)]
            rows = [(name, one.get_short_help_str(limit=_NO_LIMIT)) for name, one in given if one and not one.hidden]
            other = []
            if rows:
                with formatter.section(heading):
                    formatter.write_dl(rows)


class Door(Verbs):
    """A group that reads a `Selected` before the name of its view; without a name its first view is meant."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Leave the selection in `ctx.obj`, and the view with its options to the group."""
        if not args or args[0] == "--help":
            return super().parse_args(ctx, args)
        found: dict[str, list[str]] = {"step": [], "row": []}
        folders: list[str] = []
        views: list[str] = []
        options: list[str] = []
        words = iter(args)
        for word in words:
            name, has_value, value = word.removeprefix("--").partition("=")
            if name in found and (not has_value or word.startswith("--")):
                found[name].append(value if has_value else next(words, ""))
            elif options or word.startswith("-"):
                options.append(word)
            elif word in self.commands and (folders or "--help" in args):
                views.append(word)
            else:
                folders.append(word)
        if len(views) > 1:
            raise UserError(f"expected one view, got {' and '.join(views)}")
        ctx.obj = Selected(folders=tuple(map(Path, folders)), step=_step(found["step"]), rows=tuple(found["row"]))
        return super().parse_args(ctx, [*(views or [next(iter(self.commands))]), *options])


def _step(given: Sequence[str]) -> int | None:
    if not given:
        return None
    if len(given) > 1 or not given[0].isdecimal():
        raise UserError(f"step: expected one whole number, such as `step 3`, got {', '.join(given) or 'nothing'}")
    return int(given[0])


def selected(
    ctx: typer.Context, *, what: str = "log folder of a run", num: int = 1, step: bool = False, rows: bool = False
) -> Selected:
    """Return the subject of the command line.

    Args:
        what: the folders that the view needs.
        num: their number.
        step: the view takes a step.
        rows: the view takes rows.

    Raises:
        UserError: the view takes something else.
    """
    found: Selected = ctx.obj
    name = ctx.command_path
    if len(found.folders) != num:
        given = ", ".join(map(str, found.folders)) or "none"
        raise UserError(f"{name}: expected {num} of: {what}; got {given}. See `{name} --help`")
    if (found.step is not None and not step) or (found.rows and not rows):
        raise UserError(f"{name}: this view takes no {'row' if found.rows and not rows else 'step'}; leave it out")
    if "" in found.rows:
        raise UserError(f"{name}: row: expected the key of a row after it, `<group uid>_g<index>`")
    return found


def show(record: object, lines: Iterable[str], *, as_json: bool) -> None:
    """Print a report: its record for machines, or its lines for people."""
    console = make_console()
    if as_json:
        console.print_json(json.dumps(record), ensure_ascii=True)
        return
    for line in lines:
        console.print(line)


class Verdicted(Protocol):
    """The outcome of a check."""

    @property
    def verdict(self) -> Enum:
        """The member whose value is the exit code."""

    def lines(self) -> Iterable[str]: ...
    def as_record(self) -> Mapping[str, object]: ...


def end_with(report: Verdicted, *, as_json: bool) -> NoReturn:
    """Print a report and end the command; the verdict is its exit code."""
    show(report.as_record(), report.lines(), as_json=as_json)
    raise typer.Exit(report.verdict.value)


def with_records(command: Callable[..., None]) -> Callable[..., None]:
    """Give typer one option for each field of the records that `command` takes, and make the records of their values.

    A parameter is a record where its type is a dataclass; each field of it has an `Annotated` type and a default.
    """
    hints = get_type_hints(command, include_extras=True)
    hints.pop("return", None)
    records: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    spread: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        if parameter.name not in records:
            spread.append(parameter.replace(kind=parameter.KEYWORD_ONLY, annotation=hints[parameter.name]))
            continue
        record = records[parameter.name]
        types = get_type_hints(record, include_extras=True)
        spread += [
            inspect.Parameter(field.name, parameter.KEYWORD_ONLY, default=field.default, annotation=types[field.name])
            for field in fields(record)
        ]

    @wraps(command)
    def called(**given: Any) -> None:
        made: dict[str, Any] = {
            name: record(**{field.name: given.pop(field.name) for field in fields(record)})
            for name, record in records.items()
        }
        command(**given, **made)

    called.__signature__ = inspect.Signature(spread)  # type: ignore[attr-defined]
    called.__annotations__ = {parameter.name: parameter.annotation for parameter in spread}
    return called


RENAMED = {
    "trace ls": "inspect RUN tracer",
    "trace play": "inspect RUN play",
    "trace verify": "inspect RUN routes",
    "data-plane explain": "inspect RUN row KEY",
    "rollouts show": "inspect RUN rollouts",
    "replay": "compare RUN replay",
    "replay --explain-mismatch": "inspect RUN mismatch",
    "probe compare": "compare A B",
}
"""Command of earlier versions -> the line that does the same; what else was typed stays as it is."""
NAMED = {"--step": "step", "--rows": "row"}
"""Option of these commands -> its word."""


def answer_old_names(groups: Mapping[str, typer.Typer]) -> None:
    """Have each command of `RENAMED` end as bad usage, with the line to type.

    Args:
        groups: the commands by the first words of the old names; "" has those of one word. Old names in other
            groups are left out.
    """
    for old in RENAMED:
        *words, name = old.split(" --")[0].split(" ")
        if (group := " ".join(words)) in groups:
            refuse(groups[group], name, partial(_new_name, " ".join([*words, name])))


def refuse(group: typer.Typer, name: str, reason: Callable[[Sequence[str]], str]) -> None:
    """Give a group a hidden command that takes any words and ends as bad usage.

    Args:
        reason: returns the message; its argument is these words.
    """

    def answer(ctx: typer.Context) -> None:
        raise UserError(reason(ctx.args))

    settings = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
    group.command(name, hidden=True, context_settings=settings)(answer)


def _new_name(old: str, given: Sequence[str]) -> str:
    return f"`nemo-rl {old}` is now: {_new_line(old, given)}"


def _new_line(old: str, given: Sequence[str]) -> str:
    words = list(given)
    for flag in [name.removeprefix(f"{old} ") for name in RENAMED if name.startswith(f"{old} --")]:
        if flag in words:
            words.remove(flag)
            old = f"{old} {flag}"
    line, run = RENAMED[old].split(" "), ""
    if "--run" in words[:-1]:
        at = words.index("--run")
        _, run = words[at : at + 2]
        del words[at : at + 2]
    for blank in ("KEY", "A", "B", "RUN"):
        if blank == "RUN" and run:
            line[line.index(blank)] = run
        elif blank in line and words and not words[0].startswith("-"):
            line[line.index(blank)] = words.pop(0)
    return shlex.join(["nemo-rl", *line, *(NAMED.get(word, word) for word in words)])
