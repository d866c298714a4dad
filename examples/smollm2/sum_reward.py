"""The reward of the sums: the last number of the response is the answer."""

from __future__ import annotations

import re


def last_number(prompt: str, response: str, answer: object) -> float:
    """Return 1 where the last number of the response is the sum, else 0."""
    numbers = re.findall(r"\d+", response)
    return float(bool(numbers) and numbers[-1] == str(answer))
