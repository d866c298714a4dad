r"""Writings of mathematical answers: numbers, units and words as texts have them, one rule for gold and answer.

`read_answer` is called by the mathematical reward for the gold answer and for what a response states, before
math-verify reads either. The rules are in docs/environments.md, "Answers of the math reward".
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

__all__ = ["Stated", "plain_numbers", "read_answer"]

MAX_EXPONENT = 400
"""The largest power of ten that is written out."""
_BLANK = r"(?:\\[,;:! ]|\\thinspace|\\quad|~|\s)"
_SPACED = rf"(?:{_BLANK}+|,\\!|\{{,\}}|['\u2019_])"
"""What stands between groups of three digits, besides the comma."""
_GROUPS = rf"[1-9]\d{{0,2}}(?:(?:,\d{{3}})+|(?:{_SPACED}\d{{3}})+)(?!\d)"
_DIGITS = rf"(?:{_GROUPS}|\d+)(?:\.\d+)?|\.\d+"
_TIMES = rf"{_BLANK}*(?:\\times|\\cdot|\\ast|[\u00d7·*x]){_BLANK}*"
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

_CURRENCY = r"\\?\$|[€£¥₹]|\\(?:euro|pounds)(?![A-Za-z])|(?:USD|EUR|GBP)(?![A-Za-z])"
_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_SCALE = re.compile(rf"(?:{_BLANK}|\\text\{{)*({'|'.join(_SCALES)})(?![A-Za-z])\}}?", re.IGNORECASE)
_NAMES: Mapping[str, tuple[str, ...]] = {
    "%": ("percent", "pct", "per cent", "percentage"),
    "°": ("degree", "degrees", "deg", r"\degree"),
    "$": ("dollar", "dollars", "usd"),
    "€": ("euro", "euros", "eur"),
    "£": ("pound sterling", "gbp"),
    "cent": ("cents",),
    "mm": ("millimeter", "millimeters", "millimetre", "millimetres"),
    "cm": ("centimeter", "centimeters", "centimetre", "centimetres"),
    "m": ("meter", "meters", "metre", "metres"),
    "km": ("kilometer", "kilometers", "kilometre", "kilometres"),
    "in": ("inch", "inches"),
    "ft": ("foot", "feet"),
    "mi": ("mile", "miles"),
    "yd": ("yard", "yards"),
    "mg": ("milligram", "milligrams"),
    "g": ("gram", "grams"),
    "kg": ("kilogram", "kilograms"),
    "lb": ("lbs", "pound", "pounds"),
    "oz": ("ounce", "ounces"),
    "ml": ("milliliter", "milliliters", "millilitre", "millilitres"),
    "l": ("liter", "liters", "litre", "litres"),
    "s": ("sec", "second", "seconds"),
    "min": ("minute", "minutes"),
    "h": ("hr", "hrs", "hour", "hours"),
    "day": ("days",),
    "week": ("weeks",),
    "month": ("months",),
    "year": ("years",),
    "mph": ("miles per hour",),
    "km/h": ("kph", "kilometers per hour"),
    "m/s": ("meters per second",),
}
_UNITS = {name: unit for unit, names in _NAMES.items() for name in (unit, *names)}
_SQUARE = re.compile(r"^(square|sq\.?|cubic|cu\.?)\s+(.+)$")

_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|textsf|mathrm|mathbf|mathsf|mbox|operatorname)\s*\{([^{}]*)\}")
_WRAPPED = re.compile(r"\$\$(.+)\$\$|\$(.+)\$|\\\((.+)\\\)|\\\[(.+)\\\]", re.DOTALL)
_FUNCTIONS = "sin|cos|tan|cot|sec|csc|arcsin|arccos|arctan|sinh|cosh|tanh|log|ln|exp|sqrt|lim|max|min|gcd|lcm|det|mod"
_CONSTANTS = {"pi": r"\pi", "π": r"\pi", "infinity": r"\infty", "∞": r"\infty", "oo": r"\infty"}
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
class Stated:
    """An answer as it is written.

    Example:
        >>> read_answer("3 1/2 cm").number, read_answer("3 1/2 cm").unit, read_answer(r"\\text{no}").word
        (Fraction(7, 2), 'cm', 'no')
    """

    latex: str
    """What math-verify reads: numbers in digits, without what a sign or a unit adds."""
    number: Fraction | None = None
    unit: str = ""
    """A unit that is known, percent, degree and currency among them; empty for none and for other words."""
    word: str | None = None
    """A text that equals itself alone."""
    problem: str | None = None
    """The reason why the answer cannot be read for certain."""

    def equals(self, other: Stated) -> bool | None:
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


def read_answer(text: str) -> Stated:
    r"""Return what an answer states: a gold one, or the content of a box.

    Example:
        >>> read_answer("10 000").latex, read_answer("2.5e3").latex, read_answer("x = 1{,}000").latex
        ('10000', '2500', 'x = 1000')
    """
    text = _unwrapped(text)
    bare = " ".join(_TEXT.sub(r"\1", text).split())
    if bare.lower() in _CONSTANTS:
        return Stated(latex=_CONSTANTS[bare.lower()])
    word = _word(text, bare)
    if word is not None:
        return Stated(latex=text, word=word)
    number = _number(text)
    if isinstance(number, Stated):
        return number
    if _TWO_WAYS.fullmatch(text) or _MIXED.fullmatch(text.lstrip("+-")):
        hint = "write digits, a point and no blanks; a list with a comma and a blank"
        return Stated(latex=text, problem=f"{text[:80]!r} can be read in more ways than one; {hint}")
    # Two letters behind digits are no unit here, but may be one of math-verify's.
    letters = re.fullmatch(r"([+-]?\d+)([A-Za-z]{2,4})", text)
    return Stated(latex=r" \cdot ".join((letters[1], *letters[2])) if letters else plain_numbers(text))


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
        text = re.sub(r"(?<=[\d}])\s*(?:°|\^\s*\{?\s*(?:\\circ|∘)\s*\}?|\\degree\b|degrees?\b)(?!\s*\d)", "", text)
    text = re.sub(r"(?<![\\A-Za-z])sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}", text)
    return re.sub(r"(?<![\\A-Za-z])pi(?![A-Za-z])|π", r"\\pi ", text)


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
    text = re.sub(r"([½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞])", lambda found: " " + unicodedata.normalize("NFKC", found[0]), text).strip()
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
    if _NO_NUMBER.fullmatch(bare) or re.search(r"\d\s*(?:°|\^\s*\{?\s*\\circ\s*\}?)\s*\d", bare):
        return re.sub(r"\s", "", bare).casefold()
    if not _WORDS.fullmatch(bare) or re.search(rf"\b(?:{_FUNCTIONS})\b", bare):
        return None
    letters = max((part for part in re.findall(r"[^\W\d_]+", bare)), key=len)
    is_product = not is_text and (not re.search(r"[aeiouy]|[^ -~]", letters, re.I) or set(letters) <= set("xyz"))
    if len(letters) < 2 or is_product:
        return None
    return re.sub(r"[\s-]+", " ", bare.rstrip(".!")).casefold()


def _number(text: str) -> Stated | None:
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
    return Stated(latex=_latex(number), number=number, unit=_money(money) if money else unit)


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
    """Return the value of a number with an exponent."""
    return _value(found[0])[0] if found["e"] or found["braced"] or found["bare"] else None


def _unit(rest: str) -> str | None:
    """Return the unit behind a number, empty for words that are none that is known; None for more mathematics."""
    if not rest.strip():
        return ""
    is_apart = bool(re.match(r"\s|\\[,;: ]|~", rest))
    is_text = _TEXT.search(rest) is not None
    name = re.sub(r"\\[,;:! ]|~", " ", _TEXT.sub(r"\1", rest))
    name = re.sub(r"\^\s*\{?\s*(?:\\circ|∘)\s*\}?", "°", name).replace("\\%", "%").replace("\\$", "$")
    name = " ".join(name.replace("²", "^2").replace("³", "^3").replace("{", "").replace("}", "").split())
    power = re.fullmatch(r"(.+?)\s*\^\s*([23])", name)
    base, squared = (power[1], power[2]) if power else (name, "")
    square = _SQUARE.match(base.lower())
    if square and not squared:
        base, squared = square[2], "2" if square[1].startswith("sq") else "3"
    known = _UNITS.get(base) or _UNITS.get(base.lower())
    is_letter = re.fullmatch(r"[A-Za-z]", base) is not None
    if known is not None and (is_text or is_apart or not is_letter):
        return f"{known}^{squared}" if squared else known
    if re.fullmatch(r"°\s*[CF]|[a-zA-Z]{1,4}/[a-zA-Z]{1,4}", base) and (is_text or "°" in base):
        return base.replace(" ", "")
    is_words = re.fullmatch(r"[^\W\d_]+(?:[\s./-]+[^\W\d_]+)*\.?", base) is not None
    has_word = re.search(r"(?=[a-z]*[aeiou])[a-z]{3,}", base, re.I) is not None
    return "" if is_words and (is_text or (is_apart and has_word)) else None


def _money(sign: str) -> str:
    return {"\\$": "$", "USD": "$", "\\euro": "€", "EUR": "€", "\\pounds": "£", "GBP": "£"}.get(sign, sign)


def _latex(value: Fraction) -> str:
    if value.denominator == 1:
        return str(value.numerator)
    sign = "-" if value < 0 else ""
    return rf"{sign}\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"
