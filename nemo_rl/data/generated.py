"""Generated problems: digits to sort, and those for environments with turns and tools.

Called by the sources of prompts. Invariant: the same arguments give the same problems on every machine, and no prompt
of `exclude` is among them, so that a held-out split stays apart.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from nemo_rl.errors import DatasetError

__all__ = [
    "MOVES",
    "SortProblem",
    "TurnProblem",
    "guess_problems",
    "moved",
    "problems",
    "puzzle_problems",
    "puzzle_text",
    "sum_problems",
]


MAX_DIGITS = 9
MAX_SIDE = 5
MOVES = ("up", "down", "left", "right")


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnProblem:
    """One prompt, and what its environment knows of it.

    Example:
        `TurnProblem(prompt="game 4711: guess 1 to 9", answer=7)`
    """

    prompt: str
    answer: object


def guess_problems(
    n: int, *, seed: int, numbers: int = 9, games: int = 100_000, exclude: Collection[str] = frozenset()
) -> list[TurnProblem]:
    """Draw `n` games of guessing a number from 1 to `numbers`.

    The number of a game, below `games`, says nothing of the number that is to be guessed; it makes prompts differ, so
    that a split can be held out.

    Raises:
        DatasetError: `numbers` or `games` is below 2, or `exclude` leaves too little.
    """
    if numbers < 2 or games < 2:
        raise DatasetError(
            f"guess: expected numbers and games of at least 2, got {numbers} and {games}; correct options"
        )

    def draw(rng: random.Random) -> TurnProblem:
        game, answer = rng.randrange(games), rng.randint(1, numbers)
        return TurnProblem(prompt=f"game {game}: guess 1 to {numbers}", answer=answer)

    return _drawn(draw, n, seed=seed, exclude=exclude, name="guess")


def sum_problems(
    n: int,
    *,
    seed: int,
    min_digits: int = 3,
    max_digits: int = 3,
    smallest: int = 0,
    exclude: Collection[str] = frozenset(),
) -> list[TurnProblem]:
    """Draw `n` products of two numbers of at least `smallest`, which nobody knows by heart.

    Raises:
        DatasetError: the digits are not 1 <= min_digits <= max_digits, `smallest` has more than `min_digits`, or
            `exclude` leaves too little.
    """
    if not 1 <= min_digits <= max_digits <= MAX_DIGITS:
        raise DatasetError(
            f"calculator_sums: expected 1 <= min_digits <= max_digits <= {MAX_DIGITS}, got min_digits={min_digits} and "
            f"max_digits={max_digits}; correct data.*.options"
        )

    if smallest >= 10**min_digits:
        raise DatasetError(
            f"calculator_sums: expected smallest to have at most min_digits={min_digits} digits, got {smallest}; "
            "correct data.*.options"
        )

    def draw(rng: random.Random) -> TurnProblem:
        digits = [rng.randint(min_digits, max_digits) for _ in range(2)]
        left, right = (rng.randrange(max(smallest, 10 ** (count - 1)), 10**count) for count in digits)
        return TurnProblem(prompt=f"calculate {left}*{right}", answer=str(left * right))

    return _drawn(draw, n, seed=seed, exclude=exclude, name="calculator_sums")


def puzzle_problems(
    n: int, *, seed: int, side: int = 2, moves: int = 3, exclude: Collection[str] = frozenset()
) -> list[TurnProblem]:
    """Draw `n` boards of `side` x `side` tiles that at most `moves` moves solve; the answer is that number.

    Raises:
        DatasetError: `side` or `moves` is out of range, or `exclude` leaves too little.
    """
    if not 2 <= side <= MAX_SIDE or moves < 1:
        raise DatasetError(
            f"sliding_puzzle: expected side of 2 to {MAX_SIDE} and moves of at least 1, got side={side} and "
            f"moves={moves}; correct data.*.options"
        )
    solved = [*range(1, side * side), 0]

    def draw(rng: random.Random) -> TurnProblem:
        board = solved
        while board == solved:
            for _ in range(moves):
                steps = [step for move in MOVES if (step := moved(board, move)) is not None]
                board = rng.choice(steps)
        return TurnProblem(prompt=f"slide\n{puzzle_text(board)}", answer=moves)

    return _drawn(draw, n, seed=seed, exclude=exclude, name="sliding_puzzle")


def moved(board: Sequence[int], move: str) -> list[int] | None:
    """Return the board after the gap (0) has moved; None where it cannot.

    Example:
        >>> moved([1, 2, 3, 0], "up")
        [1, 0, 3, 2]
    """
    side = round(len(board) ** 0.5)
    gap = board.index(0)
    row, column = divmod(gap, side)
    down, right = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}[move]
    if not (0 <= row + down < side and 0 <= column + right < side):
        return None
    after, other = list(board), gap + down * side + right
    after[gap], after[other] = after[other], after[gap]
    return after


def puzzle_text(board: Sequence[int]) -> str:
    """Return the rows of a board, a line each; the gap is `_`.

    Example:
        >>> puzzle_text([1, 2, 3, 0])
        '1 2\\n3 _'
    """
    side = round(len(board) ** 0.5)
    tiles = [str(tile) if tile else "_" for tile in board]
    return "\n".join(" ".join(tiles[start : start + side]) for start in range(0, len(board), side))


def _drawn(
    draw: Callable[[random.Random], TurnProblem], n: int, *, seed: int, exclude: Collection[str], name: str
) -> list[TurnProblem]:
    rng = random.Random(seed)
    drawn: list[TurnProblem] = []
    for _ in range(n * MAX_DRAWS_PER_PROBLEM):
        if len(drawn) == n:
            break
        problem = draw(rng)
        if problem.prompt not in exclude:
            drawn.append(problem)
    if len(drawn) < n:
        raise DatasetError(
            f"{name}: only {len(drawn)} of {n} problems are left after excluding {len(exclude)}; ask for fewer, or "
            "change data.*.options"
        )
    return drawn


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
