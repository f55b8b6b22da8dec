r"""Equality of two answers by computer algebra: math-verify behind a stricter rule for numbers.

Only for reward workers: sympy can be driven into unbounded work by a short text, and no check of
that text is complete (`too_large` spares the pool the usual towers, the deadline gets the rest).
math-verify's own time limits are off: they are alarm signals, which need the main thread.

Only its LaTeX grammar is used. Its parser of plain expressions is sympy's, which is Python's eval.

Where math-verify differs, this module decides:
- Two numbers are equal if they agree to 14 digits; math-verify rounds to 6 decimals, so that
  1/1800! equals 1/1801!, and 0.333333 equals 1/3.
- A set is not a tuple: `\{1,2\}` is not `(1,2)`. A bare list may be either.
- Gold `x<3` accepts `(-\infty,3)`, gold `(-\infty,3)` does not accept `x<3`: this one is its own.
"""

import math
import re
from typing import Any

import sympy
from math_verify import LatexExtractionConfig, parse, verify

_LATEX = [LatexExtractionConfig(boxed_match_priority=0)]
_CHAIN = re.compile(r"[0-9]+(?:(?:\^|\*\*)[0-9]+)+")
_FACTORIAL = re.compile(r"[0-9]{6,} *!")
_MAX_DIGITS = 1e6
_DIGITS = 40
_TOLERANCE = sympy.Float("1e-14")


def warm_up() -> None:
    """Fills the caches of grammar and algebra, which forked children inherit."""
    for gold, answer in (
        (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt{2}}"),
        (r"(0,9)\cup(9,36)", r"\left(9,36\right)\cup[0,9)"),
        (r"x^2+2x+1", r"(x+1)^2"),
        (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&2\\3&\pi\end{pmatrix}"),
        (r"y=2x+1", r"y=2x-1"),
        (r"\{1,2\}", r"2,1.5\times 10^{3}"),
    ):
        equal(gold, answer)


def equal(gold: str, answer: str) -> bool:
    """Whether two normalised answers are equal; what does not parse is not."""
    if too_large(gold) or too_large(answer):
        return False
    if gold.startswith("\\{") and answer.startswith(("(", "[")):
        return False
    left, right = _parse(gold), _parse(answer)
    if left is None or right is None:
        return False
    if _is_number(left) and _is_number(right):
        try:
            return _equal_numbers(left, right)
        except MemoryError:
            raise  # a limit of the worker, not a verdict
        except Exception:
            return False  # sympy raises anything on odd input; so does `verify`, and says False
    return verify(left, right, float_rounding=12, timeout_seconds=None)


def too_large(text: str) -> bool:
    """Whether a power or a factorial in it is plain to have over a million digits."""
    flat = re.sub(r"[{(\s]|\\left", "", text)
    flat = re.sub(r"[})]|\\right", " ", flat)
    chains = (re.split(r"\^|\*\*", chain) for chain in _CHAIN.findall(flat))
    return bool(_FACTORIAL.search(flat)) or any(map(_is_long_power, chains))


def _is_long_power(numbers: list[str]) -> bool:
    base, *exponents = (float(n) if len(n) < 300 else math.inf for n in numbers)
    height = 1.0
    for exponent in reversed(exponents):
        try:
            height = exponent**height
        except OverflowError:
            height = math.inf
    return base > 1 and height * math.log10(base) > _MAX_DIGITS


def _parse(text: str) -> Any:
    parsed = parse(f"\\boxed{{{text}}}", _LATEX, fallback_mode="no_fallback", parsing_timeout=0)
    return parsed[0] if parsed else None


def _is_number(value: Any) -> bool:
    return isinstance(value, sympy.Expr) and value.is_number is True


def _equal_numbers(left: sympy.Expr, right: sympy.Expr) -> bool:
    if left == right:
        return True
    a, b = (sympy.N(value.doit(), _DIGITS) for value in (left, right))
    if not (a.is_finite and b.is_finite):
        return False
    if a == 0 or b == 0:
        # Against zero no relative size decides; sin(pi) evaluates to rounding noise.
        return bool(sympy.simplify(left - right) == 0)
    return bool(abs(a - b) <= _TOLERANCE * sympy.Max(abs(a), abs(b)))
