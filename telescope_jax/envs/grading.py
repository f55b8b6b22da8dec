r"""Is the answer of a completion the right one?

`extract_answer` finds the answer, `quick_grade` decides everything that is a number or the same
text in linear time, and only what is left (`quick_grade` gave None) needs computer algebra, which
runs in a reward worker: `envs/judge.py` joins the two. `grade` is the whole of it, for the worker.

Rules that the module keeps:
- Text of a model is data. Nothing here, or behind it, evaluates it as Python.
- The gold answer comes first, everywhere; comparison is not symmetric (gold `x=5` accepts `5`).
- Numbers are compared exactly: 0.33 is not 1/3, and 12.50 is 12.5.
- A number may lack or add a unit (`45^\circ` and `45`, `28\%` and `28`), but two units must be the
  same: units are not converted (50 cm is not 0.5 m). A percentage also equals its value (0.28).
- An empty gold is a fault of the data and accepts nothing.
"""

import re
from decimal import Decimal
from fractions import Fraction
from typing import NamedTuple

Gold = str | int | float

MAX_ANSWER = 2000
"""Characters; a longer answer is right only as the very text of the gold."""

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)


def extract_answer(text: str) -> str | None:
    r"""The content of the last `\boxed{}` or `\fbox{}`, or of the last `<answer>` tag.

    Whichever ends last wins, and a box inside the tag is unwrapped. Braces are balanced to any
    depth; escaped ones (`\{`) do not count. Thinking is no answer: everything up to the last
    `</think>` is ignored, and a text that never closed its `<think>` has no answer. So has one
    whose last box never closes.
    """
    thought = text.rfind("</think>")
    if text.rfind("<think>") > thought:
        return None
    if thought >= 0:
        text = text[thought + len("</think>") :]
    closing = text.rfind("</answer>")
    opening = text.rfind("<answer>", 0, closing) if closing >= 0 else -1
    if opening >= 0:
        if (after := _last_box(text[closing:])) is not None:
            return after.content
        inside = text[opening + len("<answer>") : closing]
        box = _last_box(inside)
        return inside.strip() if box is None else box.content
    box = _last_box(text)
    return None if box is None else box.content


class _Box(NamedTuple):
    content: str | None  # None: it never closes


def _last_box(text: str) -> _Box | None:
    start = -1
    for match in _BOX.finditer(text):
        start = match.end()
    if start < 0:
        return None
    depth = 1
    for match in _BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(match.group(), 0)
        if depth == 0:
            return _Box(text[start : match.start()].strip())
    return _Box(None)


_CHARACTERS = str.maketrans(
    {
        **dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2212\ufe63\uff0d", "-"),
        **dict.fromkeys("\u00a0\u2002\u2003\u2007\u2008\u2009\u200a\u202f\t\n\r", " "),
        **{chr(0xFF10 + digit): str(digit) for digit in range(10)},
        "\uff0b": "+",
        "\uff0e": ".",
        "\u221a": "\\sqrt ",
        "\u00d7": "\\times ",
        "\u00b7": "\\cdot ",
        "\u03c0": "\\pi ",
        "\u221e": "\\infty ",
        "\u222a": "\\cup ",
        "\u00b1": "\\pm ",
        "\u00b0": "^\\circ",
        "\u2264": "\\le ",
        "\u2265": "\\ge ",
        "\u00b2": "^2",
        "\u00b3": "^3",
    }
)
# `\\` starts a row of a matrix; the character after it is no spacing command.
_ROW = r"(?<!\\)"
_GROUPING = re.compile(r"(?<=[0-9])(?:,\\!|,\{\\!\}|\{,\}|\\[,;: ])\s*(?=[0-9]{3}(?![0-9]))")
_SIZING = re.compile(
    rf"{_ROW}\\(?:(?:left|right|[bB]igg?[lr]?|displaystyle|textstyle|limits)(?![a-zA-Z])\.?|!)"
)
_SPACING = re.compile(rf"{_ROW}\\(?:[,;: ]|q?quad(?![a-zA-Z]))|~")
_UPRIGHT = re.compile(r"\\(?:mathrm|text)\{([ie])\}")  # numbers, which math-verify takes for units
_FRACTIONS = re.compile(rf"{_ROW}\\[dtc]frac(?![a-zA-Z])")
# After a comma, three digits keep their space: `11, 250` is a list, `11,250` a number.
_FREE_SPACE = re.compile(
    r"(?<![0-9A-Za-z, ]) +|(?<=,) +(?!(?<= )[0-9]{3}(?![0-9]))| +(?![0-9A-Za-z ])|(?<= ) +"
)
_WORDS = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox)\{([^{}\\]*)\}")


def normalize(answer: str) -> str:
    r"""One spelling for what reads the same: dashes, spacing, sizing commands, `\dfrac`, wrappers.

    Equal results mean equal answers; different results mean nothing. Linear in the length. A space
    between two letters or digits stays, because `3 4` is not 34.
    """
    text = answer.translate(_CHARACTERS).strip(" *_`")
    for left, right in (("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")):
        if len(text) > 2 and text.startswith(left) and text.endswith(right):
            text = text[len(left) : -len(right)]
    if "\\" in text or "~" in text or "{" in text:
        text = _GROUPING.sub("", text)
        text = _SPACING.sub(" ", _SIZING.sub("", text))
        text = _UPRIGHT.sub(r"\1", text)
        text = _FRACTIONS.sub(r"\\frac", text)
    if " " in text:
        text = _FREE_SPACE.sub("", text)
    text = text.strip(" ").rstrip(".")
    if word := _WORDS.fullmatch(text):
        text = word.group(1).strip()
    return text


_NUMBER = r"[+-]?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)?(?:\.[0-9]*)?"
_PLAIN = re.compile(_NUMBER)
_QUANTITY = re.compile(
    r"(?:\\?\$)?(?P<number>[+-]?\\frac(?:\{[+-]?[0-9]+\}|[0-9])(?:\{[0-9]+\}|[0-9])"
    rf"|[+-]?[0-9]+/[0-9]+|{_NUMBER}) ?(?P<unit>.*)",
    re.DOTALL,
)
_RATIO = re.compile(r"([+-]?)\\frac(?:\{([+-]?[0-9]+)\}|([0-9]))(?:\{([0-9]+)\}|([0-9]))")
_BARE_UNITS = frozenset(
    ("%", "percent", "pct", "deg", "degree", "degrees", "dollars", "cents", "mm", "cm", "km", "kg")
)
_SHORT_UNITS = frozenset("mgshL")  # 3\\mathrm{i} and 3\\mathrm{e} are other numbers
_NOT_A_UNIT = frozenset(
    ("hundred", "thousand", "million", "billion", "trillion", "dozen", "pi")
    + ("or", "and", "to", "more", "less", "over", "not", "no")
)
_SAME_UNIT = {"percent": "%", "pct": "%", "degree": "deg", "degrees": "deg"}


def plain_number(text: str) -> str | None:
    """The canonical decimal digits of a plain integer or decimal, or None if it is none.

    `016` gives `16`, `1,234.50` gives `1234.5`, `-0` gives `0`. Linear: no conversion to int, which
    is quadratic in the digits.
    """
    if not _PLAIN.fullmatch(text):
        return None
    whole, _, part = text.lstrip("+-").replace(",", "").partition(".")
    if not whole and not part:
        return None
    whole, part = whole.lstrip("0") or "0", part.rstrip("0")
    digits = f"{whole}.{part}" if part else whole
    return f"-{digits}" if text[0] == "-" and digits != "0" else digits


class _Quantity(NamedTuple):
    value: Fraction
    unit: str


def _quantity(text: str) -> _Quantity | None:
    """A short exact number with an optional unit, or None."""
    match = _QUANTITY.fullmatch(text) if len(text) <= 120 else None
    if match is None or (unit := _unit(match["unit"])) is None:
        return None
    number = match["number"]
    if ratio := _RATIO.fullmatch(number):
        sign, *parts = ratio.groups()
        above, below = int(parts[0] or parts[1]), int(parts[2] or parts[3])
    elif "/" in number:
        sign, (above, below) = "+", map(int, number.split("/"))
    else:
        digits = plain_number(number)
        return None if digits is None else _Quantity(Fraction(Decimal(digits)), unit)
    return _Quantity(Fraction(-above if sign == "-" else above, below), unit) if below else None


def _unit(text: str) -> str | None:
    """The unit that follows a number: `` if none, None if the text is something else."""
    text = text.strip()
    if text in ("", "^\\circ", "^{\\circ}"):
        return "deg" if text else ""
    if text in ("%", "\\%"):
        return "%"
    words = _WORDS.match(text)
    if words is None:
        return _SAME_UNIT.get(text, text) if text in _BARE_UNITS else None
    name = words.group(1).strip()
    is_unit = name in _SHORT_UNITS or (len(name) > 1 and _NOT_A_UNIT.isdisjoint(name.split()))
    if not is_unit or not re.fullmatch(r"(?:\^(?:[0-9]|\{[0-9]\}))?", text[words.end() :]):
        return None
    return _SAME_UNIT.get(name, name) + text[words.end() :].replace("{", "").replace("}", "")


def gold_text(gold: Gold) -> str:
    """The gold as text; datasets hold ints and floats too (`3` and `3.0` are both 3)."""
    if isinstance(gold, float):
        return format(Decimal(repr(gold)), "f")
    return str(gold)


def quick_compare(gold: Gold, answer: str) -> bool | None:
    """True or False where text or exact arithmetic decides, else None. Never slow, never sympy."""
    want, have = normalize(gold_text(gold)), normalize(answer)
    if not want or not have:
        return False
    if want == have or (want.isalpha() and len(want) > 2 and want.casefold() == have.casefold()):
        return True
    number = plain_number(want)
    if number is not None:
        if (other := plain_number(have)) is not None:
            return number == other
        if "\\" not in have and not any(map(str.isdigit, have)):
            return False
    if len(have) > MAX_ANSWER:
        return False
    left, right = _quantity(want), _quantity(have)
    if left is None or right is None:
        return None
    if left.unit == right.unit or not left.unit or not right.unit:
        if left.value == right.value:
            return True
        scale = {left.unit: 1, right.unit: 1, "%": 100}
        return left.value * scale[right.unit] == right.value * scale[left.unit]
    return False


def quick_grade(gold: Gold, completion: str) -> float | None:
    """1.0 or 0.0 if it can be told without computer algebra, else None."""
    answer = extract_answer(completion)
    verdict = False if answer is None else quick_compare(gold, answer)
    return None if verdict is None else float(verdict)


def grade_number(gold: int, completion: str) -> float:
    r"""1.0 if the answer is the number itself, written as one; never slow.

    For tasks whose point is to compute: `\boxed{8 + 6}` is equal to 8 + 6, and no answer to it.
    """
    answer = extract_answer(completion)
    digits = None if answer is None else plain_number(normalize(answer))
    return float(digits is not None and digits == plain_number(str(gold)))


def grade(gold: Gold, completion: str) -> float:
    """1.0 if the completion's answer equals the gold, else 0.0.

    Outside a reward worker call `judge.grade_in_pool`: what `quick_grade` leaves open goes to
    computer algebra, and only the death of its process is sure to end that.
    """
    verdict = quick_grade(gold, completion)
    if verdict is not None:
        return verdict
    from telescope_jax.envs import symbolic  # half a second of imports that most callers never need

    answer = extract_answer(completion)
    assert answer is not None
    return float(symbolic.equal(normalize(gold_text(gold)), normalize(answer)))
