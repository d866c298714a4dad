"""The reward of sums in a fixed form: half for the form, half for the sum in it."""

from __future__ import annotations

import re

FORM = re.compile(r"<think>[^<]+</think><answer>(\d+)</answer>")


def form_and_sum(prompt: str, response: str, answer: object) -> dict[str, float]:
    """Return 1 for the form where the response has it, and 1 for the sum where it stands in the form."""
    found = FORM.fullmatch(response.strip())
    return {"form": float(found is not None), "sum": float(found is not None and found[1] == str(answer))}
