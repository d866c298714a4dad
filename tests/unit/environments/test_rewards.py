"""Rewards of math and reasoning_gym: gold answers with right and wrong responses, written by hand."""

from __future__ import annotations

import pytest

from nemo_rl.data.reasoning_gym_wrapper import Task, questions
from nemo_rl.environments.rewards import make_math_reward, make_reasoning_gym_reward
from nemo_rl.experience.evaluation.measures import stated_answer

PAIRS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    # Whole numbers and numbers with separators.
    "42": (("42", r"\boxed{42}", "The answer is 42.", "$42$", "6 * 7 = 42"), ("43", r"\boxed{4}", "-42", "420", "two")),
    "-7": (("-7",), ("7", r"\boxed{7}", "-70")),
    "0": ((r"\boxed{0}", "0", "$0$"), ("1", "-1")),
    "1,234": ((r"\boxed{1,234}", r"\boxed{1234}"), ("1.234", r"\boxed{234}", "1235")),
    "1000000": (("1,000,000", r"\boxed{1000000}"), ("100,000",)),
    r"\$18": ((r"\boxed{18}", r"\boxed{\$18}", "$18"), (r"\boxed{81}", "$17")),
    "5 cm": ((r"\boxed{5}", r"\boxed{5 \text{ cm}}"), (r"\boxed{50}", "6 cm")),
    "She sells 72, of which 48 in April, so 24 in May.\n#### 72": (
        ("72", r"\boxed{72}"),
        ("48", r"\boxed{24}", "no idea"),
    ),
    # Fractions and decimals.
    r"\frac{1}{2}": (("0.5", "1/2", r"\boxed{\frac{2}{4}}"), ("2", r"\boxed{\frac{2}{1}}", "1.2")),
    "1/3": ((r"\boxed{\frac{1}{3}}", r"\boxed{\frac{2}{6}}"), ("3", "1")),
    "0.25": (("1/4", r"\boxed{.25}"), (r"\boxed{25}", "0.2", r"\boxed{\frac{1}{5}}")),
    r"-\frac{3}{4}": ((r"\boxed{\frac{-3}{4}}",), (r"\boxed{\frac{3}{4}}", "-3", "4")),
    r"2\frac{1}{2}": ((r"\boxed{\frac{5}{2}}",), (r"\boxed{1}", "2", "1/2")),
    "3.14": ((r"\boxed{3.14}", "3.14"), ("3", "3.1")),
    r"50\%": ((r"$50\%$",), (r"\boxed{5\%}", r"\boxed{60\%}")),
    # Roots, powers, constants.
    r"\sqrt{2}": ((r"\boxed{\frac{2}{\sqrt{2}}}",), ("1",)),
    r"2\sqrt{3}": ((r"\boxed{\sqrt{12}}",), ("3",)),
    r"\sqrt[3]{5}": ((r"\boxed{\sqrt[3]{5}}",), ("5",)),
    r"\frac{\pi}{4}": ((r"\boxed{\pi/4}",), ("1/4",)),
    r"\pi": ((r"\boxed{\pi}",), (r"\boxed{2\pi}",)),
    "e^2": ((r"\boxed{e \cdot e}",), ("2",)),
    "2^{10}": ((r"\boxed{4^5}",), (r"\boxed{20}", r"\boxed{10^2}", "10")),
    r"\log_2 8": ((r"\boxed{3}",), (r"\boxed{8}", r"\boxed{2}")),
    r"\ln 2": ((r"\boxed{\ln 2}",), (r"\boxed{2}",)),
    "5!": ((r"\boxed{5!}",), (r"\boxed{5}", r"\boxed{24}")),
    r"\binom{5}{2}": ((r"\boxed{\binom{5}{3}}",), (r"\boxed{\binom{5}{1}}", r"\boxed{2}")),
    r"\sin 30^\circ": ((r"\boxed{\sin 30^\circ}",), (r"\boxed{30}",)),
    r"\infty": ((r"\boxed{\infty}",), (r"\boxed{-\infty}", r"\boxed{0}")),
    # Complex numbers.
    "3 + 4i": ((r"\boxed{3+4i}",), ("4",)),
    # Polynomials and expressions.
    "x^2 + 2x + 1": ((r"\boxed{(x+1)^2}",), ("1",)),
    r"\frac{a}{b+c}": ((r"\boxed{\frac{a}{c+b}}",), (r"\boxed{\frac{a}{b}+c}",)),
    "(x-1)(x+2)": ((r"\boxed{(x+2)(x-1)}",), (r"\boxed{x^2-x-2}",)),
    r"\sin^2 x": ((r"\boxed{\sin^2 x}",), (r"\boxed{\cos^2 x}",)),
    "n(n+1)/2": ((r"\boxed{\frac{n(n+1)}{2}}",), (r"\boxed{\frac{n(n-1)}{2}}",)),
    "3^n - 1": ((r"\boxed{-1 + 3^n}",), (r"\boxed{3^n}",)),
    # Equations and inequalities.
    "x = 5": (("so $x = 5$",), ("6",)),
    "y = 2x + 3": ((r"\boxed{y = 3 + 2x}",), ("3",)),
    r"\frac{x^2}{4} + \frac{y^2}{3} = 1": (
        (r"\boxed{3x^2 + 4y^2 = 12}",),
        (r"\boxed{\frac{x^2}{3} + \frac{y^2}{4} = 1}", "The answer is 1.", r"\boxed{1}"),
    ),
    "x > 3": ((r"\boxed{x > 3}", r"\boxed{3 < x}"), ("3",)),
    "-1 < x < 2": ((r"\boxed{-1 < x < 2}",), ("2",)),
    # Sets, intervals, tuples.
    r"\{1, 2, 3\}": ((r"\boxed{1, 2, 3}",), (r"\boxed{3}",)),
    "1, -2": ((r"\boxed{-2, 1}", "$1$ and $-2$"), (r"\boxed{1}", r"\boxed{-2}", r"\boxed{1, 2}")),
    "[0, 1)": ((r"\boxed{[0,1)}",), ("0",)),
    r"(-\infty, 2) \cup (3, \infty)": ((r"\boxed{(3,\infty) \cup (-\infty, 2)}",), ("3",)),
    "(3, 4)": (("$(3, 4)$",), (r"\boxed{3}",)),
    "(1, 2, 3)": ((r"\boxed{(1,2,3)}",), ("3",)),
    r"\emptyset": ((r"\boxed{\emptyset}",), (r"\boxed{0}",)),
    # Matrices and vectors.
    r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}": (
        (r"\boxed{\begin{bmatrix} 1 & 2 \\ 3 & 4 \end{bmatrix}}",),
        (r"\boxed{4}", "4"),
    ),
    r"\begin{pmatrix} 1 \\ -1 \end{pmatrix}": (
        (r"\boxed{\begin{pmatrix} 1 \\ -1 \end{pmatrix}}",),
        (r"\boxed{-1}", "1"),
    ),
    # Words and choices.
    "A": ((r"\boxed{A}",), (r"\boxed{B}", "1")),
    r"\text{(C)}": ((r"\boxed{C}", r"\boxed{\text{(C)}}"), (r"\boxed{D}", r"\boxed{\text{(B)}}")),
    r"\text{Yes}": ((r"\boxed{\text{Yes}}",), (r"\boxed{\text{No}}", "1")),
    r"\text{Monday}": ((r"\boxed{\text{Monday}}",), (r"\boxed{\text{Tuesday}}", r"\boxed{1}")),
    # Golds with their own box, and with dollars.
    r"We get \boxed{12} apples": ((r"\boxed{12}", "12"), (r"\boxed{21}", "13")),
    r"$\frac{3}{7}$": ((r"\boxed{\frac{3}{7}}", "3/7"), (r"\boxed{\frac{7}{3}}", "3", "7")),
    r"\(x+1\)": ((r"\boxed{1+x}",), (r"\boxed{x-1}", "1")),
    # Golds that are no LaTeX: only the same text is right, never a number inside it.
    "Eq(x**2/4 + y**2/3, 1)": (
        (r"\boxed{Eq(x**2/4 + y**2/3, 1)}",),
        (r"\boxed{\frac{x^2}{9} + y^2 = 1}", "The answer is 1.", r"\boxed{1}", r"\boxed{x = 1}"),
    ),
    "Matrix([[1, 2], [3, 4]])": ((r"\boxed{Matrix([[1, 2], [3, 4]])}",), (r"\boxed{4}", "4", r"\boxed{1}")),
    "p^2 | n, p = 3": ((r"\boxed{p^2 | n, p = 3}",), (r"\boxed{3}", "3", r"\boxed{p = 3}")),
    "Sum(1/k**2, 1)": ((r"\boxed{Sum(1/k**2, 1)}",), (r"\boxed{1}", "1", r"\boxed{k = 1}")),
    "Interval(0, 5)": ((r"\boxed{Interval(0, 5)}",), (r"\boxed{5}", "5", r"\boxed{0}")),
    "f(x) := 7": ((r"\boxed{f(x) := 7}",), (r"\boxed{7}", "7")),
    # Responses that are no LaTeX in their box: a number inside it is no answer.
    "4": ((r"\boxed{4}", r"1, 2, 3, so \boxed{4}"), (r"\boxed{Matrix([[1, 2], [3, 4]])}", r"\boxed{1} or 4")),
    "1": (
        (r"\boxed{1}", r"\boxed{\frac{4}{4}}", "at first 5, then 1"),
        (r"\boxed{Eq(x**2/4 + y**2/3, 1)}", r"\boxed{Sum(1/k**2, 1)}", "", "no number", r"1 is wrong: \boxed{2}"),
    ),
    "3": ((r"\boxed{3}", "final answer is $3$"), (r"\boxed{p^2 | n, p = 3}", r"3 and then \boxed{5}", r"\boxed{33}")),
}


@pytest.mark.slow
def test_right_responses_get_one_and_wrong_ones_zero() -> None:
    reward = make_math_reward()
    pairs = [
        (gold, response, expected)
        for gold, (right, wrong) in PAIRS.items()
        for expected, responses in ((1.0, right), (0.0, wrong))
        for response in responses
    ]
    assert len(pairs) >= 200 and sum(expected for *_, expected in pairs) >= 80
    found = [(gold, response, expected, reward("", response, gold)) for gold, response, expected in pairs]
    assert [pair for pair in found if pair[2] != pair[3]] == []


@pytest.mark.parametrize("gold", ["", " ", r"\boxed{}"])
def test_a_gold_answer_without_content_is_refused(gold: str) -> None:
    with pytest.raises(ValueError, match="cannot read the gold answer"):
        make_math_reward()("", "1", gold)


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (None, "got null"), ("", "empty text"), (" \n", "empty text"), (float("nan"), "got nan"), (["4"], "got"),
        ({"a": 1}, "got"), (True, "got True"), (r"\boxed{}", "cannot read"), ("#### ", "cannot read"),
        ("4", None), (4, None), (0.5, None), (r"\frac{1}{2}", None), ("B", None), ("so\n#### 72", None),
    ],
)  # fmt: skip
def test_gold_answers_that_cannot_be_read_are_told_from_others(answer: object, problem: str | None) -> None:
    found = make_math_reward().check_answer(answer)
    assert found is None if problem is None else problem in str(found)


@pytest.mark.parametrize(
    ("response", "gold", "expected"),
    [
        (r"<think>\boxed{4}</think> so 3", "3", 1.0),
        (r"<think>\boxed{4}</think> so 3", "4", 0.0),
        (r"<think>\boxed{3}</think> \boxed{4}", "4", 1.0),
        (r"\boxed{3} no, \boxed{4}", "4", 1.0),
        (r"\boxed{1} and \boxed{-2}", "1, -2", 1.0),
        (r"\boxed{1}, \boxed{2}, or \boxed{3}", r"\{1, 2, 3\}", 1.0),
        (r"thoughts of a prompt that opened them \boxed{9}</think>\boxed{\frac{1}{2}}", "0.5", 1.0),
        (r"<think>never ended \boxed{4}", "4", 1.0),
    ],
)
def test_reward_and_majority_vote_read_the_same_answer(response: str, gold: str, expected: float) -> None:
    reward, stated = make_math_reward(), stated_answer(response)
    assert reward("", response, gold) == expected
    has_box = "boxed" in response.rpartition("</think>")[2]
    assert reward("", f"\\boxed{{{stated}}}" if has_box else str(stated), gold) == expected


TASK = Task(name="chain_sum", size=1, seed=1)


@pytest.mark.parametrize(
    ("response", "is_right"),
    [("{}", True), (" {}\n", True), ("<think>1+1=2</think> {}", True), ("<think>{}</think>wrong", False)],
)
def test_what_follows_the_thoughts_is_scored(response: str, is_right: bool) -> None:
    ((question, gold),) = questions(TASK, where="test")
    answer = {"task": TASK.to_json(), "index": 0}
    score = make_reasoning_gym_reward()(question, response.format(gold), answer)
    assert (score == 1.0) is is_right
