"""The built-in environments with turns: the best policy reaches the score that each states."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping

import pytest

from nemo_rl.config.data import DatasetConfig
from nemo_rl.config.parts import ENVIRONMENTS, TURN_ENVIRONMENTS
from nemo_rl.data.datasets import RawPrompt, raw_prompts
from nemo_rl.data.generated import MOVES, moved
from nemo_rl.environments.conversation import ConversationRow, Reply, Turn
from nemo_rl.environments.tools import calculator
from nemo_rl.environments.turn_environments import CalculatorTask, Guess, ReasoningGymTurns, SlidingPuzzle


def rows(name: str, size: int, *, task: str | None = None, **options: int) -> list[ConversationRow]:
    return [as_row(raw) for raw in drawn(name, size, task=task, **options)]


def drawn(name: str, size: int, *, seed: int = 3, task: str | None = None, **options: int) -> list[RawPrompt]:
    cfg = DatasetConfig(dataset_name=name, size=size, seed=seed, task=task, options=options)
    return list(raw_prompts(cfg, "data.train"))


def as_row(raw: RawPrompt) -> ConversationRow:
    metadata = raw.metadata if isinstance(raw.metadata, Mapping) else {}
    return ConversationRow(prompt=raw.text, answer=raw.answer, metadata=metadata)


def turn(text: str, number: int = 0, *, truncated: bool = False) -> Turn:
    return Turn(number=number, text=text, num_tokens=1, truncated=truncated)


def said(reply: Reply) -> str:
    (message,) = reply.messages
    assert message.role == "user" and not reply.done and reply.reward == 0.0
    return message.content


def bisect(row: ConversationRow, *, numbers: int, turns: int) -> float:
    game, low, high = Guess().open(row), 1, numbers
    for number in range(turns):
        middle = (low + high) // 2
        reply = game.reply(turn(f"<think>{low} {high}</think>{middle}", number))
        if reply.done:
            return reply.reward
        low, high = (middle + 1, high) if said(reply) == "higher" else (low, middle - 1)
    return 0.0


def test_bisection_finds_every_number() -> None:
    games = rows("guess", 200, numbers=15)
    assert {row.answer for row in games} == set(range(1, 16))
    assert all(bisect(row, numbers=15, turns=4) == 1.0 for row in games)
    each = [ConversationRow(prompt="", answer=number) for number in range(1, 16)]
    assert sum(bisect(row, numbers=15, turns=3) for row in each) / 15 == (2**3 - 1) / 15


def test_a_guess_without_a_number_is_told_so() -> None:
    game = Guess().open(ConversationRow(prompt="", answer=3))
    assert said(game.reply(turn("three"))) == "say a number"
    assert said(game.reply(turn("9" * 5000))) == "say a number"


def test_only_the_exact_product_counts() -> None:
    for row in rows("calculator_sums", 50):
        expression = row.prompt.removeprefix("calculate ")
        assert re.fullmatch(r"\d{3}\*\d{3}", expression)
        answer = calculator(expression)
        assert CalculatorTask().open(row).reply(turn(f"<think>1</think> it is {answer}")) == Reply(
            done=True, reward=1.0
        )
        assert CalculatorTask().open(row).reply(turn(f"{answer}0")).reward == 0.0
        assert CalculatorTask().open(row).reply(turn(answer, truncated=True)).reward == 0.0


def solution(board: list[int]) -> list[str]:
    """The shortest moves, by breadth."""
    ways, seen = deque([(board, list[str]())]), {tuple(board)}
    while ways:
        board, moves = ways.popleft()
        if board == [*range(1, len(board)), 0]:
            return moves
        for move in MOVES:
            after = moved(board, move)
            if after is not None and tuple(after) not in seen:
                seen.add(tuple(after))
                ways.append((after, [*moves, move]))
    raise AssertionError("no solution")


@pytest.mark.parametrize("side", [2, 3])
def test_puzzles_are_solved_by_as_many_moves_as_made_them(side: int) -> None:
    for row in rows("sliding_puzzle", 20, side=side, moves=4):
        board = [0 if tile == "_" else int(tile) for tile in re.findall(r"\d+|_", row.prompt)]
        moves, game = solution(board), SlidingPuzzle().open(row)
        assert 1 <= len(moves) <= 4
        *before, last = [game.reply(turn(f"I go {move}.", number)) for number, move in enumerate(moves)]
        assert all("_" in said(reply) for reply in before)
        assert last == Reply(done=True, reward=1.0)


def test_a_move_that_is_none_leaves_the_board() -> None:
    game = SlidingPuzzle().open(ConversationRow(prompt="slide\n1 2\n_ 3"))
    assert said(game.reply(turn("left"))) == "no way\n1 2\n_ 3"
    assert said(game.reply(turn("what?"))) == "say up, down, left or right"
    assert game.reply(turn("right")).done


def test_reasoning_gym_gives_several_attempts() -> None:
    pytest.importorskip("reasoning_gym")
    (row,) = rows("reasoning_gym", 1, task="chain_sum")
    environment = ReasoningGymTurns(attempts=2)
    attempts = environment.open(row)
    assert "attempts left: 1" in said(attempts.reply(turn("no idea")))
    assert attempts.reply(turn(f"<think>so</think>{row.answer}", 1)).reward == 1.0
    attempts = environment.open(row)
    attempts.reply(turn("no idea"))
    last = attempts.reply(turn("no idea", 1))
    assert last.done and last.reward < 1.0


@pytest.mark.parametrize("name", ["guess", "calculator_sums", "sliding_puzzle"])
def test_a_held_out_split_shares_no_prompt(name: str) -> None:
    options = {"side": 3, "moves": 20} if name == "sliding_puzzle" else {}
    cfg = DatasetConfig(dataset_name=name, size=200, seed=1, options=options)
    held = {raw.text for raw in list(raw_prompts(cfg, "data.validation"))[:30]}
    train = [raw.text for raw in raw_prompts(cfg, "data.train", held)]
    assert len(train) == 200 and not held & set(train)
    assert train == [raw.text for raw in raw_prompts(cfg, "data.train", held)]


def test_every_name_is_a_class_that_opens_conversations() -> None:
    for name in TURN_ENVIRONMENTS:
        assert callable(vars(ENVIRONMENTS.load(name, key="env.name"))["open"])
