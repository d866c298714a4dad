"""`write_rollout_page`: rollouts as one HTML file that needs nothing else: no font, no picture, its own script.

The script filters rows; without it all are shown. The page's policy names it by its digest, so no other can run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from nemo_rl.utils.console import printable
from nemo_rl.utils.files import write_text
from nemo_rl_tools.markup import Markup, tag, whole_page
from nemo_rl_tools.rollouts.choice import ShownGroup, ShownRollouts
from nemo_rl_tools.rollouts.row import (
    BOUNDS,
    Grade,
    RolloutRow,
    RowTokens,
    difference_text,
    pieces_of,
    shared_reason,
    signed,
)
from nemo_rl_tools.rollouts.turns import RowTurn

__all__ = ["PageLinks", "page_text", "problem_text", "write_rollout_page"]

STYLE, SCRIPT = (Path(__file__).with_suffix(kind).read_text(encoding="utf-8") for kind in (".css", ".js"))
CLASSES = {Grade.CLOSE: "close", Grade.APART: "apart", Grade.FAR: "far"}
SAID_SHOWN = 4000
"""Characters of what was said in a turn; the row has all of it, token by token."""
NAME_SHOWN = 200
"""Characters of a name that the file gives."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PageLinks:
    """Links of a page that lies among others."""

    above: Mapping[str, str] = field(default_factory=dict)
    """Links above the rows: their words and addresses."""
    of_row: Callable[[str], str] | None = None
    """Returns the address of a row's life by its key; None where there is none."""


ALONE = PageLinks()
"""A page that lies alone."""


def write_rollout_page(path: Path, shown: ShownRollouts) -> Path:
    """`path` holds the page, or what it held before."""
    return write_text(path, page_text(shown))


def problem_text(title: str, problem: str, links: PageLinks = ALONE) -> str:
    return whole_page(_plain(title), *_above(links), tag("h1", _plain(title)), tag("p", problem), style=STYLE)


def page_text(shown: ShownRollouts, links: PageLinks = ALONE) -> str:
    title = f"Rollouts of {_plain(shown.run)}, {shown.title}"
    short = f"Rollouts of {_plain(shown.run.absolute().name)}, {shown.title}"
    reason = shared_reason(row for group in shown.groups for row in group.rows)
    conversations = [row for group in shown.groups for row in group.rows if row.turns or row.cause]
    return whole_page(
        title,
        *_above(links),
        tag("h1", {"title": _plain(shown.run)}, short),
        tag("p", _summary(shown)),
        *([_legend()] if reason is None else [tag("p", {"class": "reason"}, reason)]),
        *([_endings(conversations)] if conversations else []),
        _filters(shown),
        *(
            _group(group, of_step=len(shown.steps) > 1, is_said=reason is not None, links=links)
            for group in shown.groups
        ),
        style=STYLE,
        script=SCRIPT,
    )


def _legend() -> Markup:
    low, high = BOUNDS
    apart = tag("span", {"class": "apart"}, f"apart by more than {low}")
    far, masked = tag("span", {"class": "far"}, f"by more than {high}"), tag("span", {"class": "masked"}, "not trained")
    words = ("Log-probabilities of rollout and trainer: ", apart, ", ", far, "; ", masked)
    return tag("p", *words, ". Both values are shown under the pointer.")


def _above(links: PageLinks) -> list[Markup]:
    items = [tag("a", {"href": address}, word) for word, address in links.above.items()]
    return [tag("nav", {"aria-label": "other pages"}, *items)] if items else []


def _summary(shown: ShownRollouts) -> str:
    rows = [row for group in shown.groups for row in group.rows]
    num_cut = sum(row.finish_reason == "length" for row in rows)
    num_equal = sum(len({row.reward for row in group.rows}) == 1 for group in shown.groups if group.num_rows > 1)
    whole = "" if len(rows) == shown.num_rows else f"{len(rows)} of {shown.num_rows} rows. "
    return (
        f"{whole}Rows: {len(rows)}, mean reward {fmean(row.reward for row in rows):.4g}, right "
        f"{sum(row.is_right for row in rows)}, truncated {num_cut}. Groups: {len(shown.groups)}, with equal rewards "
        f"{num_equal}."
    )


def _filters(shown: ShownRollouts) -> Markup:
    steps = [tag("option", {"value": step}, f"step {step}") for step in shown.steps]
    every = tag("option", {"value": ""}, "all")
    return tag(
        "form",
        {"hidden": ""},
        tag("label", "text ", tag("input", {"type": "search", "name": "text"})),
        tag("label", "reward from ", tag("input", {"type": "number", "step": "any", "name": "least"})),
        tag("label", "to ", tag("input", {"type": "number", "step": "any", "name": "most"})),
        tag(
            "label",
            {"title": "right: the component `correct`, or the reward where there is none, is above 0"},
            "answer ",
            tag("select", {"name": "answer"}, every, tag("option", "right"), tag("option", "wrong")),
        ),
        tag("label", "step ", tag("select", {"name": "step"}, every, *steps)),
        tag("output"),
    )


def _group(group: ShownGroup, *, of_step: bool, is_said: bool, links: PageLinks) -> Markup:
    """
    Args:
        of_step: the page has several steps.
        is_said: why there are no differences stands above all groups.
    """
    reason = shared_reason(group.rows)
    is_said_here = is_said or reason is not None or len(group.rows) == 1
    return tag(
        "section",
        {"data-step": group.step},
        tag("h2", f"Group {_plain(group.uid)}", f" of step {group.step}" if of_step else ""),
        tag("p", ", ".join(group.summary()), "" if is_said else f"; {difference_text(group.rows)}"),
        *(part for row in {row.prompt: row for row in group.rows}.values() for part in _prompt(row)),
        *(_row(row, is_said=is_said_here, links=links) for row in group.rows),
    )


def _prompt(row: RolloutRow) -> Iterator[Markup]:
    """Yield the messages of a prompt, then its text as the model reads it; that text alone where no more is known."""
    yield from (_said(said.who, _lines(said.text)) for said in row.messages)
    whole = tag("pre", {"class": "prompt"}, _lines(row.prompt))
    yield tag("details", tag("summary", "prompt as the model reads it"), whole) if row.messages else _said("", whole)


def _said(who: str, *parts: object, kind: str = "") -> Markup:
    head = [tag("i", _plain(who))] if who else []
    content = parts if all(isinstance(part, Markup) for part in parts) else [tag("pre", *parts)]
    return tag("div", {"class": f"said {kind}".strip()}, *head, *content)


def _row(row: RolloutRow, *, is_said: bool, links: PageLinks) -> Markup:
    response = list(_tokens(row.tokens)) if row.tokens is not None else [_lines(row.response)]
    whole = tag("pre", {"class": "response"}, *response)
    talk = [_said("assistant", whole, kind="model")]
    if row.turns:
        tokens = tag("details", tag("summary", "all of it, token by token"), whole)
        talk = [_time_bar(row), *(part for turn in row.turns for part in _turn(turn)), tokens]
    right = "right" if row.is_right else "wrong"
    return tag(
        "article",
        {**({"class": "out"} if row.sample_mask == 0 else {}), "data-reward": row.reward, "data-answer": right},
        tag("aside", {"class": right}, *_judged(row)),
        tag("div", *talk, tag("p", {"class": "facts"}, *_facts(row, is_said=is_said, links=links))),
    )


def _judged(row: RolloutRow) -> Iterator[Markup]:
    """Yield what stands beside a response: its reward with its components, and the gold answer."""
    yield tag("p", "reward ", tag("b", {"class": "reward"}, f"{row.reward:.4g}"))
    for name, part in row.components.items():
        yield tag("p", f"{_plain(name)} ", tag("b", "none" if part is None else f"{part:.4g}"))
    if row.answer is not None:
        yield tag("p", "gold answer ", tag("span", {"class": "gold"}, _lines(row.answer)))


def _facts(row: RolloutRow, *, is_said: bool, links: PageLinks) -> Iterator[Markup]:
    """Yield what else is known of a row."""
    facts = [(_plain(name), printable(value, limit=SAID_SHOWN)) for name, value in row.extras.items()]
    facts += [("advantage", signed(row.advantage)), ("ended by", _plain(row.finish_reason))]
    known = [("tokens", row.response_tokens), ("weights", row.weight_version)]
    facts += [(name, str(number)) for name, number in known if number is not None]
    yield from (tag("span", f"{name} ", tag("b", value), " ") for name, value in facts)
    if row.left_out:
        yield tag("span", {"class": "untrained"}, _plain(row.left_out), " ")
    texts = [printable(fact, limit=SAID_SHOWN) for fact in row.of_conversation()]
    yield from (tag("span", text, " ") for text in [*texts, *([] if is_said else [difference_text([row])])])
    name = _plain(row.key)
    key = name if links.of_row is None else tag("a", {"href": links.of_row(row.key), "title": "its life"}, name)
    yield tag("span", {"class": "key"}, key)


def _time_bar(row: RolloutRow) -> Markup:
    """Return a bar with the shares of engine, tools and waiting in the time of a conversation."""
    total = row.time.total or 1.0
    parts = [
        tag("i", {"class": name, "style": f"width:{100 * seconds / total:.2f}%", "title": f"{name} {seconds:.3g} s"})
        for name, seconds in row.time.parts.items()
        if seconds > 0
    ]
    return tag("div", {"class": "time", "title": row.time.text()}, *parts)


def _turn(turn: RowTurn) -> Iterator[Markup]:
    """Yield what was said in a turn, and what is known of it."""
    yield tag("p", f"turn {turn.number}: {', '.join(turn.facts())}")
    for said in turn.said:
        kind = "error" if said.is_error else "model" if said.who in ("assistant", "call") else ""
        yield _said(
            said.who, _lines(said.text[:SAID_SHOWN]) + (" ..." if len(said.text) > SAID_SHOWN else ""), kind=kind
        )


def _endings(rows: Sequence[RolloutRow]) -> Markup:
    """Return a table of the endings of conversations: how many, their mean reward, tokens, turns and times."""
    found: dict[str, list[RolloutRow]] = {}
    for row in rows:
        found.setdefault(row.finish_reason, []).append(row)
    names = ("ending", "conversations", "reward", "tokens", "turns", "engine s", "tool s", "waiting s")
    lines = [tag("tr", *(tag("th", name) for name in names))]
    for ending, of_it in sorted(found.items(), key=lambda each: -len(each[1])):
        times = [row.time for row in of_it]
        cells = [
            _plain(ending),
            len(of_it),
            f"{fmean(row.reward for row in of_it):.4g}",
            f"{fmean(sum(turn.num_tokens for turn in row.turns) for row in of_it):.4g}",
            f"{fmean(len(row.turns) for row in of_it):.3g}",
            *(f"{fmean(time.parts[name] for time in times):.3g}" for name in ("engine", "tool", "waiting")),
        ]
        lines.append(tag("tr", *(tag("td", cell) for cell in cells)))
    return tag("table", {"class": "endings"}, *lines)


def _tokens(tokens: RowTokens) -> Iterator[Markup]:
    for piece in pieces_of(tokens):
        shade = "masked" if piece.is_masked else CLASSES[piece.grade or Grade.CLOSE]
        said = "\n".join(_values(tokens, at) for at in piece.tokens)
        yield tag("span", {"class": shade, "title": said}, _lines(piece.text).replace("\n", "\u21b5\n"))


def _values(tokens: RowTokens, at: int) -> str:
    prev = None if tokens.prev_logprobs is None else tokens.prev_logprobs[at]
    return (
        f"token {tokens.ids[at]} at {at}: rollout {signed(tokens.generation_logprobs[at])}, "
        f"trainer {signed(prev)}, difference {signed(tokens.difference(at))}"
    )


def _lines(text: str) -> str:
    return printable(text, limit=len(text), keep_lines=True)


def _plain(text: object) -> str:
    return printable(str(text), limit=NAME_SHOWN)
