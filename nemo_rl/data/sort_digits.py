"""Procedural problems "sort 41735986" -> "13456789", the task of the CPU demo.

Called by the dataset loader and by the starter checkpoint. Invariant: the same arguments give the same problems on
every machine.
"""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass

from nemo_rl.errors import DatasetError

__all__ = ["SortProblem", "problems"]

# Draws per wanted problem before giving up: only an `exclude` that covers nearly everything comes this far.
MAX_DRAWS_PER_PROBLEM = 100
MAX_DIGITS = 10_000


@dataclass(frozen=True, kw_only=True, slots=True)
class SortProblem:
    """One prompt and the only right answer.

    Example:
        >>> SortProblem(prompt="sort 4135", answer="1345").answer
        '1345'
    """

    prompt: str
    answer: str


def problems(
    n: int, *, seed: int, min_digits: int = 6, max_digits: int = 8, exclude: Collection[str] = frozenset()
) -> list[SortProblem]:
    """Draw `n` problems; prompts named in `exclude` are left out, repeats are allowed.

    Raises:
        DatasetError: the digits are not 1 <= min_digits <= max_digits, or `exclude` leaves too little.
    """
    if not 1 <= min_digits <= max_digits <= MAX_DIGITS:
        raise DatasetError(
            f"sort_digits: expected 1 <= min_digits <= max_digits <= {MAX_DIGITS}, got min_digits={min_digits} and "
            f"max_digits={max_digits}; correct data.*.options"
        )
    rng = random.Random(seed)
    drawn: list[SortProblem] = []
    for _ in range(n * MAX_DRAWS_PER_PROBLEM):
        if len(drawn) == n:
            break
        digits = "".join(rng.choice("0123456789") for _ in range(rng.randint(min_digits, max_digits)))
        prompt = f"sort {digits}"
        if prompt not in exclude:
            drawn.append(SortProblem(prompt=prompt, answer="".join(sorted(digits))))
    if len(drawn) < n:
        raise DatasetError(
            f"sort_digits: only {len(drawn)} of {n} problems with {min_digits} to {max_digits} digits are left "
            f"after excluding {len(exclude)}; ask for fewer or for more digits"
        )
    return drawn
