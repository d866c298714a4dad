"""`write_rollout_page`: rollouts as one HTML file that needs nothing else: no script, no font, no picture."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from nemo_rl.diagnostics.compare.markup import Markup, tag
from nemo_rl.diagnostics.rollouts.choice import Group, ShownRollouts
from nemo_rl.diagnostics.rollouts.pieces import BOUNDS, Grade, Piece, difference_text, pieces_of, signed
from nemo_rl.diagnostics.rollouts.row import RolloutRow, RowTokens
from nemo_rl.utils.files import write_text
from nemo_rl.utils.plain_text import printable

__all__ = ["page_text", "write_rollout_page"]

STYLE = """
:root { color-scheme: light dark; --back: #fff; --text: #1f2328; --soft: #59636e; --line: #d1d9e0; --box: #f6f8fa;
  --apart: #ffe9a8; --apart-line: #9a6700; --far: #ffc9c4; --far-line: #b42318; }
@media (prefers-color-scheme: dark) { :root { --back: #0d1117; --text: #e6edf3; --soft: #9198a1; --line: #3d444d;
  --box: #151b23; --apart: #4d3800; --apart-line: #e3b341; --far: #6b1a16; --far-line: #ff8f86; } }
body { font: 14px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 1000px; padding: 0 1em;
  background: var(--back); color: var(--text); }
h1 { font-size: 1.4em; } h2 { font-size: 1.1em; margin: 2em 0 .2em; overflow-wrap: anywhere; }
p { margin: .3em 0; color: var(--soft); overflow-wrap: anywhere; }
pre { font: 13px/1.7 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; margin: .4em 0;
  padding: .5em .7em; background: var(--box); border: 1px solid var(--line); border-radius: 5px; }
article { border-left: 3px solid var(--line); padding-left: .8em; margin: 1em 0; }
article.out pre, .masked { opacity: .5; }
.apart { background: var(--apart); border-bottom: 2px dotted var(--apart-line); }
.far { background: var(--far); border-bottom: 2px solid var(--far-line); }
.masked { text-decoration: line-through; }
b { color: var(--text); font-variant-numeric: tabular-nums; }
"""
POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""What a browser may load: should something get past the escaping, it still can do nothing."""
CLASSES = {Grade.CLOSE: "close", Grade.APART: "apart", Grade.FAR: "far"}
NAME_SHOWN = 200
"""Characters of a name that the file gives."""


def write_rollout_page(path: Path, shown: ShownRollouts) -> Path:
    """`path` holds the page, or what it held before."""
    return write_text(path, page_text(shown))


def page_text(shown: ShownRollouts) -> str:
    """The page."""
    title = f"Rollouts of {_plain(shown.run)}, step {shown.step}"
    head = tag(
        "head",
        tag("meta", {"charset": "utf-8"}),
        tag("meta", {"http-equiv": "Content-Security-Policy", "content": POLICY}),
        tag("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}),
        tag("title", title),
        tag("style", Markup(STYLE)),
    )
    low, high = BOUNDS
    body = tag(
        "body",
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
        *(_group(group) for group in shown.groups),
    )
    return f"<!DOCTYPE html>\n{tag('html', {'lang': 'en'}, head, body)}\n"


def _group(group: Group) -> Markup:
    return tag(
        "section",
        tag("h2", f"Group {_plain(group.uid)}"),
        tag("p", ", ".join(group.summary()), "; ", difference_text(group.rows)),
        *(
            tag("pre", {"class": "prompt"}, _lines(prompt))
            for prompt in dict.fromkeys(row.prompt for row in group.rows)
        ),
        *(_row(row) for row in group.rows),
    )


def _row(row: RolloutRow) -> Markup:
    is_left_out = row.sample_mask == 0
    facts: list[tuple[str, object]] = [("reward", f"{row.reward:.4g}")]
    facts += [(_plain(name), "none" if part is None else f"{part:.4g}") for name, part in row.components.items()]
    facts += [("advantage", signed(row.advantage)), ("ended by", _plain(row.finish_reason))]
    facts += [("tokens", row.response_tokens), ("weights", row.weight_version)]
    parts = [tag("span", f" {name} ", tag("b", value), ", ") for name, value in facts if value is not None]
    left_out = f"{_plain(row.left_out)}; " if is_left_out else ""
    response = list(_tokens(row.tokens)) if row.tokens is not None else [_lines(row.response)]
    return tag(
        "article",
        {"class": "out"} if is_left_out else {},
        tag("p", tag("b", _plain(row.key)), ": ", *parts, left_out, difference_text([row])),
        tag("pre", {"class": "response"}, *response),
    )


def _tokens(tokens: RowTokens) -> Iterator[Markup]:
    for piece in pieces_of(tokens):
        shade = "masked" if piece.is_masked else CLASSES[piece.grade or Grade.CLOSE]
        said = "\n".join(_values(tokens, at) for at in piece.tokens)
        yield tag("span", {"class": shade, "title": said}, _visible(piece))


def _visible(piece: Piece) -> str:
    """A line feed is seen before it acts."""
    return _lines(piece.text).replace("\n", "\\n\n")


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
