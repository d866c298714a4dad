"""An evaluation as a table of text: a line for each set of prompts, and one for each of its categories."""

from __future__ import annotations

from collections.abc import Mapping

from nemo_rl.experience.evaluation.measures import SetMeasures
from nemo_rl.experience.evaluation.result import SetResult

__all__ = ["evaluation_lines"]


def evaluation_lines(sets: Mapping[str, SetResult], *, confidence: float) -> list[str]:
    """Columns are aligned; each measure is followed by its interval.

    Example:
        `validation      256  0.891 [0.846, 0.923]`
    """
    rows: list[tuple[str, SetMeasures]] = []
    for name, found in sets.items():
        rows.append((name, found.measures))
        rows += [(f"  {category}", part) for category, part in found.measures.categories.items()]
    measures = list(dict.fromkeys(measure for _, part in rows for measure in part.measures))
    cells = [["set", "prompts", *measures]]
    for name, part in rows:
        texts = [part.measures[measure].text() if measure in part.measures else "" for measure in measures]
        cells.append([name, str(part.num_prompts), *texts])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    samples = {found.num_samples for found in sets.values()}
    num = ", ".join(map(str, sorted(samples)))
    return [
        *lines,
        f"intervals hold the mean over such prompts with {confidence:.0%} confidence, and where there is one "
        f"prompt its mean over such samples; {num} samples a prompt",
    ]
