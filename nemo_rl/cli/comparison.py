"""Comparing two recordings and showing what was found, for the commands that do it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from nemo_rl.diagnostics.compare.folders import compare_folders
from nemo_rl.diagnostics.compare.limits import DEFAULT, read_limits
from nemo_rl.diagnostics.compare.noise import propose_limits
from nemo_rl.diagnostics.compare.page import write_page
from nemo_rl.diagnostics.verdict import Verdict
from nemo_rl.utils.console import make_console
from nemo_rl.utils.files import write_text

__all__ = ["show_comparison"]


def show_comparison(
    a: Path,
    b: Path,
    *,
    limits: Path | None,
    noise: Sequence[Path],
    propose: Path | None,
    html: Path | None,
    show_all: bool,
    as_json: bool,
) -> Verdict:
    """Prints what differs between two folders of records, and writes what was asked for.

    Args:
        noise: folders recorded like `a`, out of which limits are proposed.
        propose: where to write them.
        html: where to write a page.

    Raises:
        UserError: a file cannot be read or written.
    """
    chosen = DEFAULT if limits is None else read_limits(limits)
    comparison = compare_folders(a, b, limits=chosen)
    proposal = propose_limits([a, *noise]) if noise else None
    if propose is not None and proposal is not None:
        write_text(propose, proposal.text)
    if html is not None:
        write_page(html, comparison)
    console = make_console()
    if as_json:
        record = comparison.as_record() | ({} if proposal is None else {"proposed_limits": proposal.text})
        console.print_json(json.dumps(record, allow_nan=False), ensure_ascii=True)
        return comparison.verdict
    for line in comparison.lines(is_all=show_all):
        console.print(line)
    if proposal is not None:
        console.print(f"proposed limits:\n{proposal.text}", end="")
    return comparison.verdict
