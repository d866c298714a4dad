r"""Writings of answers of the math reward: those of one value are equal in both directions, others are not."""

from __future__ import annotations

from itertools import permutations

import pytest

from nemo_rl.environments.rewards import make_math_reward, read_answer

EQUAL: dict[str, tuple[str, ...]] = {
    "ten thousand": (
        "10000", "10,000", "10 000", r"10\,000", "10{,}000", r"10,\!000", "10\u202f000", "10~000", "10_000", "10'000",
        "1e4", "1E+4", r"10^4", r"10^{4}", "10**4", r"1 \times 10^{4}", r"1\cdot10^4", "1 x 10^4", "$10000$", "10000.",
    ),
    "seven halves": (
        "3 1/2", r"3\frac{1}{2}", r"3 \frac12", r"3\dfrac{1}{2}", r"3\tfrac12", "3½", "7/2", r"\frac{7}{2}", "3.5",
        "3 and 1/2",
    ),
    "minus seven quarters": ("-1 3/4", r"-1\frac{3}{4}", "-1.75", "-7/4", r"-\frac{7}{4}", "\u22121.75", "-1¾"),
    "small": ("2.5e-3", r"2.5 \times 10^{-3}", "0.0025", r"\frac{1}{400}", "2.5E-03", r"2.5\cdot 10^{-3}"),
    "large": ("6.02e23", r"6.02 \times 10^{23}", "602000000000000000000000", "6.02*10**23", r"6.02\mathrm{e}23"),
    "percent": ("50%", r"50\%", "50 %", "50 percent", r"50\text{ percent}", r"$50\%$", r"50\text{\%}"),
    "degrees": ("90°", r"90^\circ", r"90^{\circ}", "90 degrees", r"90\text{ degrees}", r"90\degree"),
    "dollars": (r"\$18", "$18", "18 dollars", r"\$18.00", r"18\text{ dollars}", "18 USD", "USD 18"),
    "length": ("5 cm", r"5\text{ cm}", r"5\ \mathrm{cm}", "5cm", "5 centimeters", r"5~\text{centimetres}"),
    "area": (r"5\text{ cm}^2", "5 cm^2", "5 square centimeters", r"5\text{ square cm}", "5 cm²"),
    "no": ("no", "No", r"\text{no}", r"\text{No}", r"\textbf{no}", "No."),
    "north east": ("north east", r"\text{north east}", r"\text{North East}", "North-East"),
    "pi": ("pi", r"\pi", "π"),
    "root": (r"2\sqrt{2}", "2sqrt(2)", r"\sqrt{8}"),
    "product": ("2xy", "2yx", r"2x \cdot y"),
    "half a million": ("0.5 million", "500,000", "500 thousand", r"0.5\text{ million}", "5e5"),
    "million": ("1,234,567", r"1\,234\,567", "1234567", "1{,}234{,}567"),
}  # fmt: skip
EXPRESSIONS = ("pi", "root", "product")
"""They need a box, or dollars."""
UNEQUAL = (
    ("10 000", "0"), ("10 000", "10"), ("1,234", "1.234"), ("3 1/2", "3/2"), ("3 1/2", "31/2"), ("3 1/2", "2"),
    ("-1 3/4", "-1/4"), ("1e5", "5e"), ("2e", "200"), ("6.02e23", "6.02e24"), ("1e-9", "2e-9"), ("50%", "5%"),
    ("50%", "0.5"), ("50%", "50°"), ("5 cm", "5 kg"), ("5 cm", "5 m"), (r"\$5", "€5"),
    ("50 cents", "$0.50"), ("cat", "act"),
    ("no", "on"), ("cat", r"\text{act}"), ("listen", "silent"), ("north east", "east north"), ("Monday", "1"),
    ("3:30", "3/30"), ("3:30", "0.1"), ("2024-01-05", "2018"), ("H2O", "OH2"), ("2xy", "2xz"), ("2ab", "2"),
    ("1, 2", "12"), ("(1,234)", "1234"),
    ("90^\\circ", "91°"), ("5 cm^2", "5 cm"), ("90°30'", "9030"), ("1.5 million", "1.5"),
)  # fmt: skip


def boxed(text: str) -> str:
    return "\\boxed{" + text + "}"


@pytest.mark.slow
def test_writings_of_one_value_are_equal_in_both_directions() -> None:
    reward = make_math_reward()
    pairs = [pair for writings in EQUAL.values() for pair in permutations(writings, 2)]
    assert len(pairs) > 300
    assert [(gold, text) for gold, text in pairs if reward("", boxed(text), gold) != 1] == []
    said = [
        (writings[0], f"The answer is {writings[-1]}") for name, writings in EQUAL.items() if name not in EXPRESSIONS
    ]
    assert [(gold, text) for gold, text in said if reward("", text, gold) != 1] == []
    both = [pair for gold, text in UNEQUAL for pair in ((gold, text), (text, gold))]
    assert [(gold, text) for gold, text in both if reward("", boxed(text), gold)] == []


@pytest.mark.parametrize("writings", ["50%", "90°", "5 cm", r"\$50"])
def test_a_unit_may_be_left_out(writings: str) -> None:
    reward, number = make_math_reward(), read_answer(writings).latex
    assert reward("", boxed(number), writings) == reward("", boxed(writings), number) == 1
    assert reward("", f"It is {writings}.", number) == 1


@pytest.mark.parametrize(
    "gold", ["1 2", "0,123", "1.234,56", "1.234.567", "12,34,567", "10 0000", "3 5/2", "1 000,5", "1e400000"]
)
def test_gold_answers_that_can_be_read_in_two_ways_are_refused(gold: str) -> None:
    reward = make_math_reward()
    assert "can be read in more ways than one" in str(reward.check_answer(gold))
    assert reward("", boxed(gold), "3") == 0


def test_long_texts_are_read_in_a_moment() -> None:
    for text in ("a" * 20_000 + "!", "1 " * 20_000, "1," * 20_000, "{" * 20_000, "1e" * 20_000, "\\text{" * 5_000):
        read_answer(text)
