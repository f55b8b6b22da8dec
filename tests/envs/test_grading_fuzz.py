"""20,000 hostile texts against the grader: no hang, no crash, no file."""

import asyncio
import tempfile
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from telescope_jax.envs.grading import extract_answer, gold_text, normalize, quick_grade
from telescope_jax.envs.judge import LIMIT_TAG, grade_in_pool
from telescope_jax.scoring.reward_pool import AnswerLimit, RewardPool

EXAMPLES, TEXTS = 800, 25
GOLDS = ["7", 3, 0.5, r"\frac{1}{2}", r"28\%", r"(0,9)\cup(9,36)", r"\{1,2\}", "x^2+1", "", "B"]
FRAGMENTS = [
    *(r"\boxed{", r"\fbox{", "}", "{", r"\frac{", r"\frac12", r"\sqrt{", r"\sqrt[3]{", "^", "_"),
    *(
        "1",
        "0",
        "23",
        "-",
        "+",
        "/",
        "*",
        "**",
        "!",
        "%",
        ",",
        ".",
        "e",
        "E",
        "i",
        "9" * 60,
        "1e999",
    ),
    *("(", ")", "[", "]", r"\{", r"\}", "|", "=", "<", r"\le ", r"\cup ", r"\infty", r"\pi", "x"),
    *(r"\begin{pmatrix}", "&", r"\\", r"\end{pmatrix}", r"\int_0^1 ", r"\sum_{n=1}^{9} ", r"\log "),
    *(r"\text{", "$", "$$", r"\(", r"\)", r"\left", r"\right", r"\operatorname{", r"\mathrm{", "~"),
    *("<answer>", "</answer>", "\n", " ", "\x00", "\ud800", "\u202e", "٣", "½", "¹", "ﬁ", "𝟜"),
    *("__import__('os').system('touch FILE')", "open('FILE','w')", "exec('1')", "lambda: 0", "%s"),
    *("[x for x in ().__class__.__bases__]", "'''", '"', "#", ";", "`touch FILE`", "$(touch FILE)"),
    *(r"\input{FILE}", r"\write18{touch FILE}", r"\newcommand{\a}{\a\a}\a", "../../FILE"),
]
fragments = st.lists(st.sampled_from(FRAGMENTS), max_size=10).map("".join)
text = st.one_of(
    fragments,
    fragments,
    fragments.map(lambda inside: f"so \\boxed{{{inside}}}"),
    st.text(max_size=20),
    st.text(max_size=8).map(lambda inside: f"\\boxed{{{inside}}}"),
)


@pytest.mark.deadline(1_200)
def test_twenty_thousand_texts_neither_hang_nor_crash_nor_leave_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text that is too much for computer algebra is ended by its deadline, and is wrong."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    monkeypatch.chdir(tmp_path)
    loop = asyncio.new_event_loop()
    count: Counter[str] = Counter()

    async def start() -> RewardPool:
        pool = RewardPool(workers=1, timeout_s=20.0, preload=("tests.envs.fuzz_target",))
        await pool.prewarm()
        return pool

    pool = loop.run_until_complete(start())

    async def by_algebra(pairs: list[tuple[str | int | float, str]]) -> list[float]:
        normal = []
        for gold, completion in pairs:
            answer = extract_answer(completion)
            assert answer is not None
            normal.append([normalize(gold_text(gold)), normalize(answer)])
        try:
            return await pool.call("tests.envs.fuzz_target:equal_each", normal)
        except AnswerLimit:
            rewards = [await grade_in_pool(pool, *pair) for pair in pairs]
            count["limits"] += sum(LIMIT_TAG in reward.tags for reward in rewards)
            return [reward.total for reward in rewards]

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.large_base_example],
    )
    @given(st.lists(st.tuples(st.sampled_from(GOLDS), text), min_size=TEXTS, max_size=TEXTS))
    def grade(pairs: list[tuple[str | int | float, str]]) -> None:
        verdicts = [quick_grade(gold, completion) for gold, completion in pairs]
        assert all(verdict in (0.0, 1.0, None) for verdict in verdicts)
        left = [pair for pair, verdict in zip(pairs, verdicts, strict=True) if verdict is None]
        count["texts"] += len(pairs)
        count["by algebra"] += len(left)
        if left:
            verdicts = loop.run_until_complete(by_algebra(left))
            assert all(verdict in (0, 1) for verdict in verdicts)

    try:
        grade()
    finally:
        loop.run_until_complete(pool.close())
        loop.close()
    assert count["texts"] >= 20_000 and count["by algebra"] > 500, count
    assert list(scratch.iterdir()) == [], "a scratch folder was left"
    assert [path.name for path in tmp_path.iterdir()] == ["scratch"], "a text left a file"
    assert not Path("FILE").exists()
