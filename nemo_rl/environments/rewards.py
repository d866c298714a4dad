"""The built-in rewards: an exact match, equality by math-verify (extra `envs`), and the own score of reasoning_gym.

The only file that names math-verify. Rewards of the last two kinds run in scoring processes, because sympy can compute
for hours on a short text; those processes call `make_math_reward` and `make_reasoning_gym_reward`. `read_answer` reads
numbers, units and words of gold answers and responses before math-verify does, by the rules in docs/environments.md.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import math
import re
import unicodedata
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from nemo_rl.data.reasoning_gym_wrapper import Task, TaskScorer
from nemo_rl.data.thinking import final_answer, last_boxes

__all__ = [
    "answer_problem",
    "exact_match",
    "has_math_verify",
    "make_math_reward",
    "make_reasoning_gym_reward",
    "read_answer",
]

logger = logging.getLogger(__name__)


def exact_match(response: str, answer: object) -> float:
    """Return 1 when the response, white space at its ends aside, is the answer; else 0.

    Example:
        >>> exact_match(" 1345\\n", "1345"), exact_match("1354", "1345")
        (1.0, 0.0)
    """
    return float(response.strip() == str(answer).strip())


BOX = re.compile(r"\\boxed\{.+\}", re.DOTALL)
"""A boxed answer, as math-verify finds it."""


def has_math_verify() -> bool:
    """Return whether the extra is installed."""
    return importlib.util.find_spec("math_verify") is not None


def answer_problem(answer: object) -> str | None:
    """Return why no text can equal a gold answer; None where it is one.

    Example:
        >>> answer_problem(12), answer_problem(" "), answer_problem(None)
        (None, 'expected a text or a number, got an empty text', 'expected a text or a number, got null')
    """
    if isinstance(answer, str):
        return None if answer.strip() else "expected a text or a number, got an empty text"
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        return None if math.isfinite(answer) else f"expected a text or a number, got {answer}"
    return f"expected a text or a number, got {'null' if answer is None else repr(answer)[:80]}"


def make_math_reward() -> MathReward:
    """Import the library, which takes a second, before the first response has to be scored."""
    return MathReward()


class MathReward:
    """1 when a response states a value equal to the gold answer.

    What is boxed is read as LaTeX or not at all: the library's plain reader would take the last number in it, and
    `Matrix([[1, 2], [3, 4]])` would be 4. What cannot be read equals the same text only. Read is what `stated_answer`
    reads for majority votes: what follows the thoughts, and of that the last boxes.
    """

    def __init__(self) -> None:
        import math_verify  # noqa: PLC0415  (optional extra)

        self._library = math_verify
        self._latex = [math_verify.LatexExtractionConfig()]
        self._latex_or_plain = [*self._latex, math_verify.ExprExtractionConfig()]
        self._told_of_text = False
        # It warns at every call that it runs without its own limits; see below.
        logging.getLogger("math_verify").setLevel(logging.ERROR)

    def __call__(self, prompt: str, response: str, answer: object) -> float:
        """Args:
            answer: LaTeX or plain text, boxed or not.

        Raises:
            ValueError: the gold answer cannot be read.
        """
        del prompt
        stated, gold = self._gold(answer)
        text = stated.latex
        if not gold:
            raise ValueError(f"math-verify cannot read the gold answer {text!r}")
        if not self._told_of_text and stated.word is None and all(isinstance(part, str) for part in gold):
            self._told_of_text = True
            logger.warning(
                "gold answer %r is not LaTeX that math-verify can read: only the same text counts as right", text
            )
        said = final_answer(response)
        boxed = last_boxes(said)
        answers = [read_answer(each) for each in boxed if each.strip()] if boxed is not None else [_whole_answer(said)]
        is_equal = stated.equals(answers[0]) if len(answers) == 1 else None
        is_certain = boxed is not None or stated.word is not None or answers[0].number is not None
        if is_equal is not None and (is_certain or is_equal):
            return float(is_equal)
        if any(each.word is not None or each.problem for each in answers) and boxed is not None:
            return 0.0
        said = (
            " and ".join(f"\\boxed{{{each.latex}}}" for each in answers) if boxed is not None else plain_numbers(said)
        )
        found = self._parse(said, self._latex if BOX.search(said) else self._latex_or_plain)
        return float(self._library.verify(gold, found, timeout_seconds=None))

    def check_answer(self, answer: object) -> str | None:
        """Return why the gold answer cannot be read; None where it can."""
        problem = answer_problem(answer)
        if problem is not None:
            return problem
        stated, gold = self._gold(answer)
        if stated.problem is not None:
            return stated.problem
        return None if gold else f"math-verify cannot read {stated.latex[:80]!r}"

    def _gold(self, answer: object) -> tuple[MathAnswer, list[Any]]:
        """Return what the answer states and its parsed form, which is empty where it cannot be read."""
        # GSM8K's solutions end with their answer behind this mark.
        text = str(answer).rpartition("####")[2].strip()
        boxed = last_boxes(text)
        if boxed is not None and len(boxed) > 1:
            return MathAnswer(latex=text), self._parse(text, self._latex)
        stated = read_answer(text if boxed is None else boxed[0])
        if stated.word is not None:
            return stated, [stated.word]
        return stated, self._parse(f"\\boxed{{{stated.latex}}}", self._latex)

    def _parse(self, text: str, readers: list[Any]) -> list[Any]:
        # Its own limits use SIGALRM, which sympy can swallow; the process that runs this has a limit that it cannot.
        parsed: list[Any] = self._library.parse(text, extraction_config=readers, parsing_timeout=None)
        return parsed


def _whole_answer(said: str) -> MathAnswer:
    """Return what a response without a box states where it is nothing else: all of it, or what follows "answer is"."""
    return read_answer(re.split(r"answer is:?", said, flags=re.IGNORECASE)[-1].strip().strip("*"))


def make_reasoning_gym_reward() -> ReasoningGymReward:
    """Return a reward that makes each task once and keeps it."""
    return ReasoningGymReward()


class ReasoningGymReward:
    """Partial credit in 0..1 for what a response says after its thoughts (`</think>`), or for all of it."""

    def __init__(self) -> None:
        self._scorers: dict[str, TaskScorer] = {}

    def __call__(self, prompt: str, response: str, answer: Any) -> float:
        """Args:
        answer: `{"task": Task.to_json(), "index": i}`, as the dataset put it into the prompt's metadata.
        """
        key = json.dumps(answer["task"], sort_keys=True)
        if key not in self._scorers:
            self._scorers[key] = TaskScorer(Task(**answer["task"]))
        return self._scorers[key].score(answer["index"], final_answer(response), question=prompt)


# ---- writings of answers

MAX_EXPONENT = 400
"""The largest power of ten that is written out."""
_BLANK = r"(?:\\[,;:! ]|\\thinspace|\\quad|~|\s)"
_SPACED = rf"(?:{_BLANK}+|,\\!|\{{,\}}|['\u2019_])"
"""Marks between groups of three digits, besides the comma."""
_GROUPS = rf"[1-9]\d{{0,2}}(?:(?:,\d{{3}})+|(?:{_SPACED}\d{{3}})+)(?!\d)"
_DIGITS = rf"(?:{_GROUPS}|\d+)(?:\.\d+)?|\.\d+"
_TIMES = rf"{_BLANK}*(?:\\times|\\cdot|\\ast|[\u00d7\u00b7*x]){_BLANK}*"
_TEN = r"10{b}*(?:\^|\*\*){b}*".replace("{b}", _BLANK)
_EXPONENT = (
    rf"(?:(?:[eE]|\\(?:mathrm|text)\{{[eE]\}})(?P<e>[+-]?\d+)(?![\dA-Za-z.])"
    rf"|{_TIMES}{_TEN}(?:\{{(?P<braced>[+-]?\d+)\}}|(?P<bare>[+-]?\d+)))"
)
_PARTS = r"\\[dtc]?frac{b}*(?:\{{b}*(\d+){b}*\}|(\d)){b}*(?:\{{b}*(\d+){b}*\}|(\d))".replace("{b}", _BLANK)
_SIMPLE = rf"(\d+){_BLANK}*[/\u2044]{_BLANK}*(\d+)(?![\d.])"
_MIXED = re.compile(
    rf"(?<![\d.,^_A-Za-z}}])(\d+)(?:{_BLANK}*{_PARTS}|(?:{_BLANK}+(?:and\s+)?|\s*[-]\s*(?=\d+\u2044)){_SIMPLE})"
)
_NUMBER = re.compile(rf"(?<![\d.A-Za-z^_{{])(?P<digits>{_DIGITS}){_EXPONENT}?")
_GROUPED = re.compile(rf"(?<![\d.,A-Za-z]){_GROUPS}")
_POWER = re.compile(rf"{_TEN}(?:\{{(?P<braced>[+-]?\d+)\}}|(?P<bare>[+-]?\d+))")
_FRACTION = re.compile(rf"{_PARTS}|{_SIMPLE}")

_DEGREE = r"(?:\u00b0|\^\s*\{?\s*(?:\\circ|\u2218)\s*\}?)"
_CURRENCY = r"\\?\$|[\u20ac\u00a3\u00a5\u20b9]|\\(?:euro|pounds)(?![A-Za-z])|(?:USD|EUR|GBP)(?![A-Za-z])"
_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_SCALE = re.compile(rf"(?:{_BLANK}|\\text\{{)*({'|'.join(_SCALES)})(?![A-Za-z])\}}?", re.IGNORECASE)
_NAMES = """% percent pct percentage|\u00b0 degree deg \\degree|$ dollar usd|\u20ac euro eur|\u00a3 gbp|cent
mm millimeter|cm centimeter|m meter|km kilometer|in inch inches|ft foot feet|mi mile|yd yard|mg milligram|g gram
kg kilogram|lb pound|oz ounce|ml milliliter|l liter|s sec second|min minute|h hr hour|day|week|month|year"""
"""Units that are known: the sign of each, and its names."""
_UNITS = {
    name + plural: names.split()[0]
    for names in re.split(r"[|\n]", _NAMES)
    for name in names.split()
    for plural in ("", "s")
}
_SQUARE = re.compile(r"^(square|sq\.?|cubic|cu\.?)\s+(.+)$")

_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|textsf|mathrm|mathbf|mathsf|mbox|operatorname)\s*\{([^{}]*)\}")
_WRAPPED = re.compile(r"\$\$(.+)\$\$|\$(.+)\$|\\\((.+)\\\)|\\\[(.+)\\\]", re.DOTALL)
_FUNCTIONS = "sin|cos|tan|cot|sec|csc|arcsin|arccos|arctan|sinh|cosh|tanh|log|ln|exp|sqrt|lim|max|min|gcd|lcm|det|mod"
_CONSTANTS = {"pi": r"\pi", "\u03c0": r"\pi", "infinity": r"\infty", "\u221e": r"\infty", "oo": r"\infty"}
_WORDS = re.compile(r"[^\W\d_]+(?:[\s'\u2019,;.-]+[^\W\d_]+)*[.!]?")
_NO_NUMBER = re.compile(
    r"\d{1,2}:\d{2}(:\d{2})?(\s*[ap]\.?m\.?)?|\d+(\.\d+)?(\s*:\s*\d+(\.\d+)?)+"  # times and ratios
    r"|\d{4}-\d{1,2}-\d{1,2}|\d{1,2}/\d{1,2}/\d{2,4}|\d{1,2}\.\d{1,2}\.\d{2,4}"  # dates
    r"|(?=[A-Za-z])(?!(?:" + _FUNCTIONS + r")\d)[A-Za-z]+\d[A-Za-z0-9]*",  # formulas as H2O, names as P12
    re.IGNORECASE,
)
_TWO_WAYS = re.compile(
    r"[+-]?(?:0,\d+|\d+,0\d|\d+(?:\.\d{3})+,\d+|\d+\.\d+\.\d[\d.]*|\d{1,2}(?:,\d{2})+,\d{3}"
    rf"|\d+(?:[.,]\d+)?(?:{_BLANK}+\d+(?:[.,]\d+)?)+)"
    r"|.*\d[eE][+-]?\d{3,}"
)
r"""Decimal commas, groups of other lands, numbers with only blanks between them that are no groups of three, and
exponents that are too large."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MathAnswer:
    """An answer as it is written.

    Example:
        >>> read_answer("3 1/2 cm").number, read_answer("3 1/2 cm").unit, read_answer(r"\\text{no}").word
        (Fraction(7, 2), 'cm', 'no')
    """

    latex: str
    """The text for math-verify: numbers in digits, without percent signs, currencies and units."""
    number: Fraction | None = None
    unit: str = ""
    """A unit that is known, percent, degree and currency among them; empty for none and for other words."""
    word: str | None = None
    """A text that equals itself alone."""
    problem: str | None = None
    """The reason why the answer cannot be read for certain."""

    def equals(self, other: MathAnswer) -> bool | None:
        """Return whether two answers are equal, or None where math-verify has to say it.

        Numbers are equal to six digits behind the point, and small ones to six digits. A unit may be left out.
        """
        if self.problem or other.problem:
            return False
        if self.word is not None or other.word is not None:
            return self.word == other.word
        if self.number is None or other.number is None:
            return None
        if self.unit and other.unit and self.unit != other.unit:
            return False
        near = Fraction(1, 10**6) * min(Fraction(1), max(abs(self.number), abs(other.number)))
        is_whole = self.number.denominator == other.number.denominator == 1
        return self.number == other.number if is_whole else abs(self.number - other.number) <= near


def read_answer(text: str) -> MathAnswer:
    r"""Return what an answer states: a gold one, or the content of a box.

    Example:
        >>> read_answer("10 000").latex, read_answer("2.5e3").latex, read_answer("x = 1{,}000").latex
        ('10000', '2500', 'x = 1000')
    """
    text = _unwrapped(text)
    bare = " ".join(_TEXT.sub(r"\1", text).split())
    if bare.lower() in _CONSTANTS:
        return MathAnswer(latex=_CONSTANTS[bare.lower()])
    word = _word(text, bare)
    if word is not None:
        return MathAnswer(latex=text, word=word)
    number = _number(text)
    if isinstance(number, MathAnswer):
        return number
    if _TWO_WAYS.fullmatch(text) or _MIXED.fullmatch(text.lstrip("+-")):
        hint = "write digits, a point and no blanks; a list with a comma and a blank"
        return MathAnswer(latex=text, problem=f"{text[:80]!r} can be read in more ways than one; {hint}")
    # Two letters behind digits are no unit here, but may be one of math-verify's.
    letters = re.fullmatch(r"([+-]?\d+)([A-Za-z]{2,4})", text)
    return MathAnswer(latex=r" \cdot ".join((letters[1], *letters[2])) if letters else plain_numbers(text))


def plain_numbers(text: str) -> str:
    r"""Return a text with its numbers as math-verify reads them, wherever they stand in it.

    Example:
        >>> plain_numbers("It is 50%, or 3 1/2 times 10 000.")
        'It is 50, or \\frac{7}{2} times 10000.'
    """
    text = _MIXED.sub(lambda found: _latex(value) if (value := _mixed(found)) is not None else found[0], text)
    text = _NUMBER.sub(lambda found: _latex(value) if (value := _long(found)) is not None else found[0], text)
    text = _GROUPED.sub(_joined, text)
    text = re.sub(r"\\\$\s*(?=\d)", "", text)
    text = re.sub(r"(?<=[\d}])\s*(?:\\?%|percent\b|\bper cent\b)", "", text)
    if not re.search(rf"\b(?:{_FUNCTIONS})", text):
        text = re.sub(rf"(?<=[\d}}])\s*(?:{_DEGREE}|\\degree\b|degrees?\b)(?!\s*\d)", "", text)
    text = re.sub(r"(?<![\\A-Za-z])sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}", text)
    return re.sub(r"(?<![\\A-Za-z])pi(?![A-Za-z])|\u03c0", r"\\pi ", text)


def _joined(found: re.Match[str]) -> str:
    """Return a number in groups as one; between brackets a comma separates coordinates or elements."""
    before = re.sub(r"\{,\}", "", found.string[: found.start()])
    is_inside = sum(before.count(mark) for mark in "([") + before.count("\\{") > (
        sum(before.count(mark) for mark in ")]") + before.count("\\}")
    )
    has_comma = "," in re.sub(rf"{_BLANK}|\{{,\}}|,\\!", "", found[0])
    return found[0] if is_inside and has_comma else re.sub(r"\D", "", found[0])


def _unwrapped(text: str) -> str:
    r"""Return a text without the marks of mathematics, white space and full stop around it."""
    text = (
        unicodedata.normalize("NFC", text).replace("\u2212", "-").replace("\\left", "").replace("\\right", "").strip()
    )
    text = re.sub(
        r"[\u00bc-\u00be\u2150-\u215e]", lambda sign: " " + unicodedata.normalize("NFKC", sign[0]), text
    ).strip()
    text = text.replace("\u2044", "/")
    while (found := _WRAPPED.fullmatch(text)) and not re.search(
        r"(?<!\\)\$", inner := next(filter(None, found.groups()))
    ):
        text = inner.strip()
    inner_text = _TEXT.fullmatch(text)
    text = inner_text[1].strip() if inner_text and re.match(r"[+-]?\d", inner_text[1].strip()) else text
    return re.sub(r"(?<=[^.])\.$", "", text)


def _word(text: str, bare: str) -> str | None:
    """Return a word, or a text that is as little mathematics as one, in the form in which it is compared."""
    is_text = _TEXT.fullmatch(text) is not None
    if _NO_NUMBER.fullmatch(bare) or re.search(r"\d\s*(?:\u00b0|\^\s*\{?\s*\\circ\s*\}?)\s*\d", bare):
        return re.sub(r"\s", "", bare).casefold()
    if not _WORDS.fullmatch(bare) or re.search(rf"\b(?:{_FUNCTIONS})\b", bare):
        return None
    letters = max((part for part in re.findall(r"[^\W\d_]+", bare)), key=len)
    is_product = not is_text and (not re.search(r"[aeiouy]|[^ -~]", letters, re.I) or set(letters) <= set("xyz"))
    if len(letters) < 2 or is_product:
        return None
    return re.sub(r"[\s-]+", " ", bare.rstrip(".!")).casefold()


def _number(text: str) -> MathAnswer | None:
    """Return the number that a text is, with its sign and unit; None where it is something else."""
    found = re.match(rf"([+-]?)\s*({_CURRENCY})?\s*([+-]?)\s*", text)
    assert found is not None, "all of it may be missing"
    sign, money, second = found.groups()
    body = text[found.end() :]
    value, length = _value(body)
    if value is None or (sign and second):
        return None
    scale = _SCALE.match(body, length)
    if scale is not None:
        value, length = value * 10 ** _SCALES[scale[1].lower()], scale.end()
    unit = _unit(body[length:])
    if unit is None or (money and unit not in {"", _money(money)}):
        return None
    number = -value if "-" in sign + second else value
    return MathAnswer(latex=_latex(number), number=number, unit=_money(money) if money else unit)


def _value(body: str) -> tuple[Fraction | None, int]:
    """Return the number without a sign at the beginning of a text, and its length."""
    mixed = _MIXED.match(body)
    if mixed is not None:
        return _mixed(mixed), mixed.end()
    for pattern in (_FRACTION, _POWER):
        found = pattern.match(body)
        if found is not None and pattern is _FRACTION:
            above, below = (int(part) for part in found.groups() if part)
            return (Fraction(above, below) if below else None), found.end()
        if found is not None:
            return _power(found["braced"] or found["bare"]), found.end()
    found = _NUMBER.match(body)
    if found is None:
        return None, 0
    exponent = found["e"] or found["braced"] or found["bare"]
    scale = _power(exponent) if exponent else Fraction(1)
    if scale is None or len(found["digits"]) > MAX_EXPONENT:
        return None, 0
    return Fraction(re.sub(r"[^\d.]", "", found["digits"])) * scale, found.end()


def _power(exponent: str) -> Fraction | None:
    return Fraction(10) ** int(exponent) if len(exponent) < 6 and abs(int(exponent)) <= MAX_EXPONENT else None


def _mixed(found: re.Match[str]) -> Fraction | None:
    """Return the value of a mixed number; None where the fraction is none below one."""
    whole, above, below = (int(part) for part in found.groups() if part)
    return whole + Fraction(above, below) if 0 < above < below else None


def _long(found: re.Match[str]) -> Fraction | None:
    return _value(found[0])[0] if found["e"] or found["braced"] or found["bare"] else None


def _unit(rest: str) -> str | None:
    """Return the unit behind a number, empty for words that are none that is known; None for more mathematics."""
    if not rest.strip():
        return ""
    is_apart = bool(re.match(r"\s|\\[,;: ]|~", rest))
    is_text = _TEXT.search(rest) is not None
    name = re.sub(r"\\[,;:! ]|~", " ", _TEXT.sub(r"\1", rest))
    name = re.sub(_DEGREE, "\u00b0", name).replace("\\%", "%").replace("\\$", "$").replace("per cent", "%")
    name = re.sub("([\u00b2\u00b3])", lambda sign: "^" + unicodedata.normalize("NFKC", sign[0]), name)
    name = " ".join(re.sub(r"[{}]", "", name).split())
    power = re.fullmatch(r"(.+?)\s*\^\s*([23])", name)
    base, squared = (power[1], power[2]) if power else (name, "")
    square = _SQUARE.match(base.lower())
    if square and not squared:
        base, squared = square[2], "2" if square[1].startswith("sq") else "3"
    base = re.sub(r"(?i)(met|lit)re(s?)$", r"\1er\2", base)
    known = _UNITS.get(base) or _UNITS.get(base.lower())
    is_letter = re.fullmatch(r"[A-Za-z]", base) is not None
    if known is not None and (is_text or is_apart or not is_letter):
        return f"{known}^{squared}" if squared else known
    if re.fullmatch(r"\u00b0\s*[CF]|[a-zA-Z]{1,4}/[a-zA-Z]{1,4}", base) and (is_text or "\u00b0" in base):
        return base.replace(" ", "")
    is_words = re.fullmatch(r"[^\W\d_]+(?:[\s./-]+[^\W\d_]+)*\.?", base) is not None
    has_word = re.search(r"(?=[a-z]*[aeiou])[a-z]{3,}", base, re.I) is not None
    return "" if is_words and (is_text or (is_apart and has_word)) else None


def _money(sign: str) -> str:
    signs = {"USD": "$", "euro": "\u20ac", "EUR": "\u20ac", "pounds": "\u00a3", "GBP": "\u00a3"}
    return signs.get(sign.lstrip("\\"), sign.lstrip("\\"))


def _latex(value: Fraction) -> str:
    if value.denominator == 1:
        return str(value.numerator)
    sign = "-" if value < 0 else ""
    return rf"{sign}\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"
