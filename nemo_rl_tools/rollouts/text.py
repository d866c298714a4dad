"""`rollout_lines`: rollouts on a terminal, in lines that fit it; control characters are spelt out, never sent.

Under a line of a response stands a line of marks where there is something to mark, so that nothing needs colour.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich.cells import cell_len
from rich.text import Text

from nemo_rl.utils.console import printable
from nemo_rl_tools.rollouts.choice import ShownGroup, ShownRollouts
from nemo_rl_tools.rollouts.row import Grade, RolloutRow, TokenPiece, difference_text, legend, pieces_of, signed

__all__ = ["rollout_lines"]

LEAST_WIDTH = 20
INDENT = "    "
NAME_SHOWN = 60
"""Characters of a name that the file gives."""
SAID_SHOWN = 400
"""Characters of what was said in a turn; the row has all of it, token by token."""
MASKED, WORD = "dim", "bold"
COLORS = {Grade.CLOSE: "", Grade.APART: "black on yellow", Grade.FAR: "white on red"}


def rollout_lines(shown: ShownRollouts, *, width: int) -> Iterator[Text]:
    """Yield lines of at most `width` cells (at least 20)."""
    width = max(width, LEAST_WIDTH)
    run = printable(str(shown.run), limit=len(str(shown.run)))
    head = [f"{run}, {shown.title}:", f"{shown.num_shown} of {shown.num_rows} rows,"]
    yield from _words([*head, f"groups: {len(shown.groups)}"], width, style=WORD)
    yield from _words(legend().split(" "), width)
    for group in shown.groups:
        yield Text()
        yield from _group_lines(group, width, of_step=f" of step {group.step}" if len(shown.steps) > 1 else "")


def _group_lines(group: ShownGroup, width: int, *, of_step: str) -> Iterator[Text]:
    yield from _words([f"group {_plain(group.uid)}{of_step}:", *_listed(group.summary())], width, style=WORD)
    yield from _words(difference_text(group.rows).split(" "), width, indent="  ")
    prompts = dict.fromkeys(row.prompt for row in group.rows)
    for prompt in prompts:
        yield Text("  prompt")
        yield from _folded([(prompt, "", " ")], width)
    for answer in dict.fromkeys(row.answer for row in group.rows if row.answer is not None):
        yield Text("  gold answer")
        yield from _folded([(answer, "", " ")], width)
    for row in group.rows:
        yield from _row_lines(row, width)


def _row_lines(row: RolloutRow, width: int) -> Iterator[Text]:
    is_left_out = row.sample_mask == 0
    style = MASKED if is_left_out else ""
    facts = [
        f"reward {row.reward:.4g}",
        *(f"{_plain(name)} {'none' if part is None else f'{part:.4g}'}" for name, part in row.components.items()),
        *(f"{_plain(name)} {printable(value, limit=SAID_SHOWN)}" for name, value in row.extras.items()),
        f"advantage {signed(row.advantage)}",
        _plain(row.finish_reason),
        *([f"{row.response_tokens} tokens"] if row.response_tokens is not None else []),
        *([f"weights {row.weight_version}"] if row.weight_version is not None else []),
        *([_plain(row.left_out)] if is_left_out else []),
    ]
    facts += [printable(fact, limit=SAID_SHOWN) for fact in row.of_conversation()]
    yield from _words([f"{_plain(row.key)}:", *_listed(facts)], width, indent="  ", style=style)
    for turn in row.turns:
        yield from _words([f"turn {turn.number}:", *_listed(turn.facts())], width, indent=INDENT, style=style)
        for said in turn.said:
            text = printable(said.text, limit=SAID_SHOWN)
            yield from _words([f"{_plain(said.who)}:", *text.split(" ")], width, indent=f"{INDENT}  ", style=style)
    if row.tokens is None:
        yield from _folded([(row.response, style, " ")], width)
        return
    yield from _words(difference_text([row]).split(" "), width, indent=INDENT, style=style)
    yield from _folded([_drawn(piece, is_left_out=is_left_out) for piece in pieces_of(row.tokens)], width)


def _drawn(piece: TokenPiece, *, is_left_out: bool) -> tuple[str, str, str]:
    if piece.is_masked:
        return piece.text, MASKED, "-"
    grade = piece.grade or Grade.CLOSE
    dim = f"{MASKED} " if is_left_out else ""
    return piece.text, f"{dim}{COLORS[grade]}".strip(), grade.mark


def _folded(parts: Iterable[tuple[str, str, str]], width: int) -> Iterator[Text]:
    """Yield texts in lines of their own, each with a line of marks where it has any; a line feed is spelt and ends its
    line.

    Args:
        parts: text, style and mark of each.
    """
    line, plain, marks = Text(INDENT), INDENT, INDENT
    is_empty = True
    for text, style, mark in parts:
        for char in text:
            spelt = printable(char, limit=1)
            # As a whole: what follows may join what is before it.
            if cell_len(plain + spelt) > width:
                yield from _marked(line, marks)
                line, plain, marks = Text(INDENT), INDENT, INDENT
            before = cell_len(plain)
            line.append(spelt, style=style or None)
            plain += spelt
            marks += mark * max(cell_len(plain) - before, 0)
            is_empty = False
            if char == "\n":
                yield from _marked(line, marks)
                line, plain, marks = Text(INDENT), INDENT, INDENT
    if plain != INDENT or is_empty:
        yield from _marked(line if not is_empty else Text(f"{INDENT}(empty)"), marks)


def _marked(line: Text, marks: str) -> Iterator[Text]:
    yield line
    if marks.strip():
        yield Text(marks.rstrip())


def _words(words: Sequence[str], width: int, *, indent: str = "", style: str = "") -> Iterator[Text]:
    """Yield words side by side, in as many lines as they need; only one that is longer than a line is cut."""
    line = indent
    for word in words:
        gap = " " if line != indent else ""
        if gap and cell_len(line + gap + word) > width:
            yield Text(line, style=style)
            line, gap = indent + "  ", ""
        line += gap + word
        while cell_len(line) > width:
            cut = next(at for at in range(len(line), 0, -1) if cell_len(line[:at]) <= width)
            yield Text(line[:cut], style=style)
            line = indent + "  " + line[cut:]
    if line.strip():
        yield Text(line, style=style)


def _listed(facts: Sequence[str]) -> list[str]:
    return [f"{fact}," for fact in facts[:-1]] + list(facts[-1:])


def _plain(text: object) -> str:
    return printable(str(text), limit=NAME_SHOWN)
