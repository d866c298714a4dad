"""Terminal output: a text is printed as it is, whatever rich would make of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from rich.table import Table

import nemo_rl
from nemo_rl.utils.console import make_console


@pytest.mark.parametrize("text", [":smile: sort", "a:warning:b", "[red]x[/red]", "C:\\[bold]"])
@pytest.mark.parametrize("stderr", [False, True])
def test_codes_of_emoji_and_markup_are_printed_as_they_are(text, stderr, capsys):
    console = make_console(stderr=stderr)
    table = Table("what")
    table.add_row(text)
    console.print(text)
    console.print(table)
    shown = capsys.readouterr()
    assert (shown.err if stderr else shown.out).count(text) == 2


def test_every_console_of_the_library_is_made_in_one_place() -> None:
    root = Path(nemo_rl.__file__).parent
    made = [path.relative_to(root) for path in root.rglob("*.py") if re.search(r"\bConsole\(", path.read_text())]
    assert made == [Path("utils/console.py")]
