"""`write_rollout_page`: rollouts as one HTML file that needs nothing else: no font, no picture, one script of its own.

The script filters rows; without it all are shown. The page's policy names it by its digest, so no other can run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from nemo_rl.diagnostics.markup import Markup, tag, whole_page
from nemo_rl.diagnostics.rollouts.choice import ShownGroup, ShownRollouts
from nemo_rl.diagnostics.rollouts.row import (
    BOUNDS,
    Grade,
    RolloutRow,
    RowTokens,
    difference_text,
    pieces_of,
    shared_reason,
    signed,
)
from nemo_rl.diagnostics.rollouts.turns import RowTurn
from nemo_rl.utils.console import printable
from nemo_rl.utils.files import write_text

__all__ = ["PageLinks", "page_text", "problem_text", "write_rollout_page"]

STYLE = """
body { margin: 2em auto; max-width: 1000px; padding: 0 1em; }
nav { display: flex; flex-wrap: wrap; gap: .2em 1em; }
h1 { font-size: 1.4em; overflow-wrap: anywhere; } h2 { font-size: 1.1em; margin: 2em 0 .2em; overflow-wrap: anywhere; }
p { margin: .3em 0; color: var(--soft); overflow-wrap: anywhere; }
pre { font: 13px/1.7 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; margin: .4em 0;
  padding: .5em .7em; background: var(--box); border: 1px solid var(--line); border-radius: 5px; }
article { border-left: 3px solid var(--line); padding-left: .8em; margin: 1em 0; }
.time { display: flex; height: .7em; margin: .3em 0; border-radius: 3px; overflow: hidden; background: var(--line); }
.time .engine { background: #3b82d0; } .time .tool { background: #2f9e66; } .time .waiting { background: #b0b6bd; }
table.endings { margin: .6em 0; }
table.endings :is(th, td) { border-bottom: 1px solid var(--line); padding: .1em .8em .1em 0; text-align: left; }
details { margin: .2em 0 .2em .4em; color: var(--soft); } pre.said { border: 0; margin: .1em 0 .1em 1em; }
pre.said.error { border-left: 3px solid var(--far-line); }
article.out pre, .masked { opacity: .5; }
.apart { background: var(--apart); border-bottom: 2px dotted var(--apart-line); }
.far { background: var(--far); border-bottom: 2px solid var(--far-line); }
.masked { text-decoration: line-through; }
b { color: var(--text); font-variant-numeric: tabular-nums; }
form { position: sticky; top: 0; padding: .5em 0; background: var(--back); border-bottom: 1px solid var(--line); }
form label { margin-right: 1em; white-space: nowrap; } form input[type=number] { width: 5em; }
[hidden] { display: none !important; }
"""
SCRIPT = """
const form = document.querySelector("form"), rows = [...document.querySelectorAll("article")];
const texts = new Map(rows.map(row => [row,
  [row, ...row.parentElement.querySelectorAll("h2, .prompt")].map(part => part.textContent).join(" ").toLowerCase()]));
function filter() {
  const want = Object.fromEntries(new FormData(form)), text = want.text.toLowerCase();
  let shown = 0;
  for (const row of rows) {
    const reward = Number(row.dataset.reward);
    const fits = (want.least === "" || reward >= Number(want.least))
      && (want.most === "" || reward <= Number(want.most))
      && (want.answer === "" || row.dataset.answer === want.answer)
      && (want.step === "" || row.parentElement.dataset.step === want.step) && texts.get(row).includes(text);
    row.hidden = !fits;
    shown += fits;
  }
  for (const group of document.querySelectorAll("section"))
    group.hidden = !group.querySelector("article:not([hidden])");
  document.querySelector("output").textContent = `${shown} of ${rows.length} rows`;
}
form.addEventListener("input", filter);
form.addEventListener("submit", event => event.preventDefault());
form.hidden = false;
filter();
"""
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
    """Return a page that says why there are no rows."""
    return whole_page(_plain(title), *_above(links), tag("h1", _plain(title)), tag("p", problem), style=STYLE)


def page_text(shown: ShownRollouts, links: PageLinks = ALONE) -> str:
    """Return the page."""
    title = f"Rollouts of {_plain(shown.run)}, {shown.title}"
    reason = shared_reason(row for group in shown.groups for row in group.rows)
    conversations = [row for group in shown.groups for row in group.rows if row.turns or row.cause]
    low, high = BOUNDS
    return whole_page(
        title,
        *_above(links),
        tag("h1", title),
        tag(
            "p",
            f"{shown.num_shown} of {shown.num_rows} rows. Log-probabilities of rollout and trainer: ",
            tag("span", {"class": "apart"}, f"apart by more than {low}"),
            ", ",
            tag("span", {"class": "far"}, f"by more than {high}"),
            "; ",
            tag("span", {"class": "masked"}, "not trained"),
            ". Both values are shown under the pointer.",
        ),
        tag("p", _summary(shown)),
        *([_endings(conversations)] if conversations else []),
        *([] if reason is None else [tag("p", {"class": "reason"}, reason)]),
        _filters(shown),
        *(
            _group(group, of_step=len(shown.steps) > 1, is_said=reason is not None, links=links)
            for group in shown.groups
        ),
        style=STYLE,
        script=SCRIPT,
    )


def _above(links: PageLinks) -> list[Markup]:
    items = [tag("a", {"href": address}, word) for word, address in links.above.items()]
    return [tag("nav", {"aria-label": "other pages"}, *items)] if items else []


def _summary(shown: ShownRollouts) -> str:
    rows = [row for group in shown.groups for row in group.rows]
    num_cut = sum(row.finish_reason == "length" for row in rows)
    num_equal = sum(len({row.reward for row in group.rows}) == 1 for group in shown.groups if group.num_rows > 1)
    return (
        f"Rows: {len(rows)}, mean reward {fmean(row.reward for row in rows):.4g}, right "
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
        *(
            tag("pre", {"class": "prompt"}, _lines(prompt))
            for prompt in dict.fromkeys(row.prompt for row in group.rows)
        ),
        *(_row(row, is_said=is_said_here, links=links) for row in group.rows),
    )


def _row(row: RolloutRow, *, is_said: bool, links: PageLinks) -> Markup:
    is_left_out = row.sample_mask == 0
    facts: list[tuple[str, object]] = [("reward", f"{row.reward:.4g}")]
    facts += [(_plain(name), "none" if part is None else f"{part:.4g}") for name, part in row.components.items()]
    facts += [(_plain(name), printable(value, limit=SAID_SHOWN)) for name, value in row.extras.items()]
    facts += [("advantage", signed(row.advantage)), ("ended by", _plain(row.finish_reason))]
    facts += [("tokens", row.response_tokens), ("weights", row.weight_version)]
    about = [printable(fact, limit=SAID_SHOWN) for fact in row.of_conversation()]
    parts = [tag("span", f" {name} ", tag("b", value), ", ") for name, value in facts if value is not None]
    ends = [_plain(row.left_out)] if is_left_out else []
    ends += about
    ends += [] if is_said else [difference_text([row])]
    name = _plain(row.key)
    key = name if links.of_row is None else tag("a", {"href": links.of_row(row.key), "title": "its life"}, name)
    response = list(_tokens(row.tokens)) if row.tokens is not None else [_lines(row.response)]
    return tag(
        "article",
        {
            **({"class": "out"} if is_left_out else {}),
            "data-reward": row.reward,
            "data-answer": "right" if row.is_right else "wrong",
        },
        tag("p", tag("b", key), ": ", *parts, "; ".join(ends)),
        *([_time_bar(row)] if row.turns else []),
        *(_turn(turn) for turn in row.turns),
        tag("pre", {"class": "response"}, *response),
    )


def _time_bar(row: RolloutRow) -> Markup:
    """Return a bar with the shares of engine, tools and waiting in the time of a conversation."""
    total = row.time.total or 1.0
    parts = [
        tag("i", {"class": name, "style": f"width:{100 * seconds / total:.2f}%", "title": f"{name} {seconds:.3g} s"})
        for name, seconds in row.time.parts.items()
        if seconds > 0
    ]
    return tag("div", {"class": "time", "title": row.time.text()}, *parts)


def _turn(turn: RowTurn) -> Markup:
    """Return a turn: who said what; open where a call failed."""
    return tag(
        "details",
        {"open": ""} if any(said.is_error for said in turn.said) else {},
        tag("summary", f"turn {turn.number}: {', '.join(turn.facts())}"),
        *(
            tag(
                "pre",
                {"class": "said error" if said.is_error else "said"},
                tag("b", f"{_plain(said.who)}: "),
                _lines(said.text[:SAID_SHOWN]) + (" ..." if len(said.text) > SAID_SHOWN else ""),
            )
            for said in turn.said
        ),
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
        yield tag("span", {"class": shade, "title": said}, _lines(piece.text).replace("\n", "\\n\n"))


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
