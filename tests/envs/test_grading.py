"""The grader against its golden table and the real failures of other graders (GR-* in bugs)."""

import asyncio
import os
import random
import re
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from telescope_jax.envs.grading import (
    extract_answer,
    gold_text,
    grade,
    grade_number,
    normalize,
    plain_number,
    quick_grade,
)
from telescope_jax.envs.judge import LIMIT_TAG, grade_in_pool
from telescope_jax.envs.symbolic import too_large
from telescope_jax.scoring.reward_pool import RewardPool

SYMBOLIC = "telescope_jax.envs.symbolic"
GOLDEN = Path(__file__).parents[1] / "golden" / "grading.tsv"


def golden_rows():
    lines = GOLDEN.read_text(encoding="utf-8").splitlines()
    return [line.split("\t")[:4] for line in lines[1:] if line]


def grade_all(pairs, **pool_settings):
    """The rewards of (gold, completion) pairs, as an environment gets them."""

    async def main():
        settings_ = {"workers": 2, "timeout_s": 20.0, "preload": (SYMBOLIC,), **pool_settings}
        async with asyncio.timeout(100), RewardPool(**settings_) as pool:
            return await asyncio.gather(*(grade_in_pool(pool, *pair) for pair in pairs))

    return asyncio.run(main())


CASES = [  # id, gold, completion, expected
    ("GR-01", r"\frac{1}{2}", r"\boxed{\frac{1}{2}}", 1),
    ("GR-01", r"\frac{1}{2}", r"\boxed{\frac{1}{3}}", 0),
    ("GR-01", r"\frac{1}{23}", r"\boxed{\frac{12}{3}}", 0),
    ("GR-02", "7", r"first \boxed{5}. That is wrong, so \boxed{7}", 1),
    ("GR-02", "5", r"first \boxed{5}. That is wrong, so \boxed{7}", 0),
    ("GR-04", "42", r"\fbox{42}", 1),
    ("GR-04", "4", r"\fbox{4", 0),
    ("GR-05", r"11,\! 250,\! 000", r"\boxed{11250000}", 1),
    ("GR-05", "(1,2)", r"\boxed{12}", 0),
    ("GR-05", "100, 200", r"\boxed{100200}", 0),
    ("GR-07", r"28\%", r"\boxed{28\%}", 1),
    ("GR-07", r"28\%", r"\boxed{28}", 1),
    ("GR-07", r"28\%", r"\boxed{28 \text{ percent}}", 1),
    ("GR-07", r"28\%", r"\boxed{28 pct}", 1),
    ("GR-07", r"28\%", r"\boxed{82\%}", 0),
    ("GR-09", r"\pm 5", r"\boxed{5}", 0),
    ("GR-09", "k=2,4", r"\boxed{k=1,2}", 0),
    ("GR-09", "S=(0,1)", r"\boxed{S=(0,2)}", 0),
    ("GR-11", "x<3", r"\boxed{(-\infty,3)}", 1),
    ("GR-11", r"(-\infty,3)", r"\boxed{x<3}", 0),
    ("GR-12", "73", "We check 437 + 468 = 905.\n**Final Answer: \\boxed{73}**", 1),
    ("GR-14", "4", r"\boxed{\frac{5^{(5^{(5^{5})})}-5}{16}}", 0),
    ("GR-19", "12", r"<think>maybe \boxed{12}", 0),
    ("GR-19", "12", r"<think>..\boxed{10}</think>\boxed{12}", 1),
    ("GR-19", "12", r"..\boxed{10}</think>\boxed{12}", 1),
    ("GR-19", "12", r"\boxed{12}", 1),
    ("GR-21", 3, r"\boxed{3}", 1),
    ("GR-21", 3.0, r"\boxed{3}", 1),
    ("GR-21", 1e-7, r"\boxed{0.0000001}", 1),
    ("GR-22", "42", r"<answer>\boxed{42}</answer>", 1),
    ("GR-22", "42", "<answer>42</answer>", 1),
    ("GR-22", "42", r"<answer>\boxed{1}</answer> <answer>\boxed{42}</answer>", 1),
    ("GR-23", r"\frac{1}{2}", r"\boxed{\frac12}", 1),
    ("GR-23", r"\frac{1}{2}", r"\boxed{\frac1{2}}", 1),
    ("GR-23", r"\frac{3}{4}", r"\boxed{\frac34}", 1),
    ("GR-29", r"45^\circ", r"\boxed{45}", 1),
    ("GR-29", "45", r"\boxed{45^{\circ}}", 1),
    ("GR-29", r"5\text{ cm}", r"\boxed{5}", 1),
    ("GR-29", r"5\text{ cm}", r"\boxed{5\text{ cm}}", 1),
    ("GR-29", r"5\text{ cm}", r"\boxed{6\text{ cm}}", 0),
    ("GR-29", r"5\text{ cm}", r"\boxed{5\text{ m}}", 0),
    ("GR-29", "12.50", r"\boxed{\$12.50}", 1),
    ("GR-30", "-7", "\\boxed{\u22127}", 1),
    ("GR-30", "-7", "\\boxed{\u20137}", 1),
    ("GR-30", "-7", r"\boxed{-7}", 1),
    ("GR-30", "7", "\\boxed{\u22127}", 0),
    ("GR-30", "17", "\\boxed{\uff11\uff17}", 1),
    ("exact", r"\frac{1}{3}", r"\boxed{0.333333}", 0),
    ("exact", r"\sqrt{2}", r"\boxed{1.414214}", 0),
    ("set", r"\{1,2\}", r"\boxed{(1,2)}", 0),
    ("unit", r"3\mathrm{i}", r"\boxed{3}", 0),
    ("space", "34", r"\boxed{3 4}", 0),
    ("nan", "2", r"\boxed{\frac{0}{0}}", 0),
]
SELF_EQUAL = [  # GR-25
    *(r"(-5,\sqrt{26}]", r"(-\infty,-2]\cup[-1,\infty)", r"(\tfrac{27}{8},\tfrac{15}{8})"),
    *(r"7.2\%", "(-a,0)", "52_8", r"\text{Tuesday}", "x", "1,2", "no \\LaTeX{} at all"),
]


@pytest.fixture(scope="module")
def rewards():
    """Every case through one pool: starting it is the expensive part."""
    pairs = [(gold, completion) for _, gold, completion, _ in CASES]
    pairs += [(gold, completion) for _, gold, completion, _ in golden_rows()]
    results = grade_all(pairs)
    return {pair: reward for pair, reward in zip(pairs, results, strict=True)}


@pytest.mark.parametrize("row", golden_rows(), ids=lambda row: row[0])
def test_every_golden_row(row, rewards):
    _, gold, completion, expected = row
    assert rewards[gold, completion].total == float(expected == "True")
    assert LIMIT_TAG not in rewards[gold, completion].tags


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}: {case[1]} {case[2]!r}")
def test_failures_of_other_graders(case, rewards):
    _, gold, completion, expected = case
    assert rewards[gold, completion].total == expected


def test_swapping_gold_and_answer_would_be_noticed(rewards):
    """GR-11: comparison is not symmetric, so a caller that swaps must fail a case."""
    pairs = [(g, a[7:-1]) for _, g, a, _ in CASES if str(a).startswith("\\boxed{") and g]
    interval = [("x<3", r"(-\infty,3)"), (r"(-\infty,3)", "x<3")]
    assert set(interval) <= set(pairs)
    assert (
        rewards["x<3", r"\boxed{(-\infty,3)}"].total
        != rewards[r"(-\infty,3)", r"\boxed{x<3}"].total
    )


@pytest.mark.parametrize("gold", SELF_EQUAL + [row[1] for row in golden_rows() if row[1]])
def test_every_gold_equals_itself_without_algebra(gold):
    assert quick_grade(gold, f"\\boxed{{{gold}}}") == 1
    assert quick_grade(gold, f"<answer>{gold}</answer>") == 1


def test_code_in_an_answer_is_never_run(tmp_path):
    """GR-17: next to \\pi, in a matrix, and as text; then an ordinary wrong answer stays wrong."""
    target = tmp_path / "created"
    code = f"__import__('os').system('touch {target}')"
    attacks = [
        code + r"+\pi",
        rf"\begin{{pmatrix}}{code}&0\\0&1\end{{pmatrix}}",
        rf"\text{{{code}}}",
        f"open('{target}','w').close() or 3",
        rf"\operatorname{{{code}}}(2)",
    ]
    results = grade_all(
        [("3", f"\\boxed{{{attack}}}") for attack in attacks] + [(r"\pi", r"\boxed{4\pi}")]
    )
    assert [reward.total for reward in results] == [0] * 6
    assert not target.exists()


def test_a_tower_that_no_check_foresees_ends_on_its_deadline():
    """GR-14: math-verify's own limit would not end it; the pool's does, twice, and then it is 0."""
    tower = r"\boxed{(((9!)!)!)!}"
    assert not too_large("(((9!)!)!)!")
    start = time.monotonic()
    (reward,) = grade_all([("4", tower)], timeout_s=1.0, workers=1)
    assert (reward.total, reward.tags) == (0.0, (LIMIT_TAG,))
    assert time.monotonic() - start < 30


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("5^{5^{5^{5}}}", True),
        ("9**9**9**9", True),
        ("(999999)!", True),
        ("1^{1^{1^{1}}}", False),
        ("2^{2^{10}}", False),
        (r"\frac{2^{3}}{12345678}", False),
        (r"\frac{1}{1801!}", False),
    ],
)
def test_only_what_is_plainly_too_large_is_refused(text, expected):
    assert too_large(text) is expected


def test_a_sum_in_the_box_is_no_number():
    assert grade_number(21, r"\boxed{8 + 6 + 5 + 2}") == 0
    assert grade_number(21, r"\boxed{21}") == grade_number(-21, "\\boxed{\u221221}") == 1


def test_the_fast_path_costs_less_than_50_microseconds():
    cases = [(21, r"\boxed{21}"), ("10000000", r"so \boxed{10,000,000} ways."), (21, "no box 2")]
    for gold, completion in cases:
        times = []
        for _ in range(200):
            start = time.perf_counter()
            assert quick_grade(gold, completion) is not None
            times.append(time.perf_counter() - start)
        assert min(times) < 50e-6


def test_the_fast_path_is_linear_on_hostile_texts():
    size = 50_000
    for text in (
        "\\boxed{" * size,
        "\\boxed{" + "{" * size,
        "<answer>" * size,
        "</answer>" * size,
        "<think>" * size + "</think>" * size,
        "\\boxed{" + "9" * size + "}",
        "\\boxed{" + "1," * size + "}",
        "\\boxed{" + " " * size + "x}",
        "\\boxed{" + "\\left" * size + "}",
        "\\boxed" + " " * size,
        "\\boxed{" + "\\text{" * size + "}" * size + "}",
        "\\boxed{" + "1 " * size + "}",
        "\\boxed{" + "1,\\! " * size + "}",
    ):
        start = time.monotonic()
        assert quick_grade("3", text) == 0
        assert time.monotonic() - start < 3


BALANCED = st.recursive(
    st.text(alphabet="ab19+-\\,^_ ", max_size=5).map(lambda text: text.rstrip("\\")),
    lambda inner: st.tuples(inner, inner).map(lambda pair: f"{pair[0]}{{{pair[1]}}}"),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(BALANCED, st.sampled_from(["\\boxed", "\\fbox", "\\boxed "]), st.text(max_size=10))
def test_what_is_wrapped_in_a_box_is_extracted_again(content, box, before):
    """GR-01: balanced to any depth."""
    before = re.sub(r"<|\\", "", before)
    # A backslash before a brace would escape it.
    content = re.sub(r"\\+(?=[{}])", "", content)
    assert extract_answer(f"{before}{box}{{{content}}} qed") == content.strip()


@given(st.integers(), st.integers(0, 3), st.sampled_from(["", "+"]))
def test_a_number_equals_its_other_spellings(number, zeros, plus):
    sign = "-" if number < 0 else plus
    digits = str(abs(number))
    for text in (f"{sign}{'0' * zeros}{digits}", f"{sign}{digits}." + "0" * zeros, f"{number:,}"):
        assert quick_grade(number, f"\\boxed{{{text}}}") == 1
        assert quick_grade(number + 1, f"\\boxed{{{text}}}") == 0


@given(st.decimals(-(10**12), 10**12, places=4), st.integers(-9, 9))
def test_decimals_are_compared_exactly(number, units):
    text = format(number, "f")
    other = format(number + units * number.__class__("0.0001"), "f")
    assert quick_grade(text, f"\\boxed{{{other}}}") == float(units == 0)
    assert quick_grade(float(text), f"\\boxed{{{gold_text(float(text))}}}") == 1


FRAGMENTS = [
    *(
        "\\boxed{",
        "\\fbox{",
        "{",
        "}",
        "\\{",
        "\\}",
        "<think>",
        "</think>",
        "<answer>",
        "</answer>",
    ),
    *(
        "\\frac",
        "\\text{",
        "\\left(",
        "\\right)",
        "\\\\",
        "&",
        "^",
        "_",
        "!",
        "%",
        "\\%",
        "$",
        ",",
        ".",
    ),
    *(
        "-",
        "+",
        "1",
        "12",
        "0.5",
        "x",
        "\\pi",
        "\\infty",
        "\\cup",
        "=",
        "<",
        "[",
        "]",
        "(",
        ")",
        "\\pm",
    ),
    *(
        "\\sqrt",
        "**",
        "__import__('os').mkdir('made')",
        ";",
        "'",
        '"',
        " ",
        "\u2212",
        "\u00d7",
        "\x00",
    ),
    *("\ud83d", "\U0001f600", "\u0661", "\u00b2", "\n"),
]


def hostile_text(draw):
    text = "".join(draw.choices(FRAGMENTS, k=draw.randrange(14)))
    return f"\\boxed{{{text}}}" if draw.random() < 0.7 else text


def check_fast_path(gold, completion):
    answer = extract_answer(completion)
    verdict = quick_grade(gold, completion)
    assert verdict in (0.0, 1.0, None)
    assert grade_number(7, completion) in (0.0, 1.0)
    if not answer:
        assert verdict == 0
    else:
        number = plain_number(normalize(answer))
        assert number is None or re.fullmatch("-?[0-9]+([.][0-9]+)?", number)


def test_twenty_thousand_hostile_texts_pass_the_fast_path():
    draw = random.Random(0)
    for _ in range(20_000):
        check_fast_path(hostile_text(draw), hostile_text(draw))


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=30), st.text(max_size=30))
def test_any_text_passes_the_fast_path(gold, text):
    check_fast_path(gold, text)
    check_fast_path(gold, f"\\boxed{{{text}}}")


def test_hostile_answers_get_a_verdict_in_the_pool_and_leave_no_file(tmp_path, monkeypatch):
    """Few texts here, many on the fast path: a call is 5-50 ms of algebra."""
    monkeypatch.chdir(tmp_path)
    draw = random.Random(1)
    pairs = [(gold, hostile_text(draw)) for _ in range(200) for gold in ("x^2", "3")]
    pairs = [pair for pair in pairs if quick_grade(*pair) is None][:50]
    assert len(pairs) > 40
    results = grade_all(pairs, timeout_s=10.0)
    assert all(reward.total in (0.0, 1.0) for reward in results)
    assert os.listdir(tmp_path) == []


def test_grade_in_the_callers_process_agrees_where_no_algebra_is_needed():
    for _, gold, completion, _ in CASES:
        verdict = quick_grade(gold, completion)
        assert verdict is None or grade(gold, completion) == verdict
