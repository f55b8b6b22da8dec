"""Hostile texts against reasoning-gym's scorers, nine of which evaluate them as Python.

Whatever a text does to its own process, the pool gives a verdict and goes on: no hang, no crash, no
file, no signal to us. Texts that run on to their deadline are in `STUCK`, tried once each.
"""

import asyncio
import os
import signal
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from telescope_jax.envs.judge import LIMIT_TAG, score_in_pool
from telescope_jax.interfaces import RewardError
from telescope_jax.scoring.reward_pool import AnswerLimit, RewardPool

EVALUATE = (
    *("string_insertion", "spiral_matrix", "binary_matrix", "n_queens"),  # Python's eval
    *("simple_integration", "intermediate_integration", "polynomial_multiplication"),  # sympy's
    *("puzzle24", "countdown"),
)
OTHERS = ("number_sorting", "jugs", "game_of_life", "boxnet")  # JSON, or none of these
NAMES = EVALUATE + OTHERS
EXAMPLES, TEXTS = 6, 25

ATTACKS = [
    "open('FILE', 'w').write('x') or []",
    "__import__('os').system('touch FILE') or ['x']",
    "__import__('subprocess').run(['touch', 'FILE'])",
    "__import__('os').kill(__import__('os').getppid(), 9)",
    "__import__('os').kill(PID, 10)",
    "__import__('os')._exit(0)",
    "__import__('os').fork() or ['x']",
    "__import__('sys').exit(1)",
    "exit()",
    "__import__('ctypes').string_at(0)",
    "__import__('shutil').rmtree('FOLDER')",
    "[setattr(__import__('builtins'), 'float', lambda x: 1.0)]",
    "[x.__init__.__globals__ for x in ().__class__.__base__.__subclasses__()]",
    "(" * 3000,
    "-" * 5000 + "1",
    "[" * 200 + "]" * 200,
    "'x' * 10**11",
    "lambda: 0",
    "\x00",
    "\ud800",
    "9" * 10_000,
    '{"a": ' * 500,
]
STUCK = ["[0 for _ in iter(int, 1)]", "9**9**9**9", "__import__('time').sleep(3600)"]
FRAGMENTS = [*"0123456789+-*/()[]{},.:'\"= \n", "x", "C", "sin(", "sqrt(", "None", "[[", "]]"]
FRAGMENTS += [
    "__import__('os')",
    ".__class__",
    "lambda x:",
    "for x in ",
    "range(9)",
    "Q",
    "_",
    "1e9",
]
texts = st.one_of(
    st.lists(st.sampled_from(FRAGMENTS), max_size=8).map("".join), st.text(max_size=20)
)


class World:
    """A pool, and what must not be touched."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.signals = folder, Counter[int]()
        self.loop = asyncio.new_event_loop()
        self.pool = RewardPool(
            workers=1,
            timeout_s=2.0,
            memory_bytes=256 << 20,
            preload=("tests.envs.gym_fuzz_target",),
            grace_s=300.0,  # a shared machine may stop its programs for minutes
        )
        self.given = ("tests.envs.gym_fuzz_target:sources", list(NAMES))

    def armed(self, text: str) -> str:
        text = text.replace("FILE", str(self.folder / "FILE")).replace("PID", str(os.getpid()))
        return text.replace("FOLDER", str(self.folder / "kept"))

    def scores(self, name: str, answers: list[str]) -> list[dict]:
        """Of all in one child; a child that one of them ends is replaced by one for each."""
        return self.loop.run_until_complete(self._scores(name, answers))

    async def _scores(self, name: str, answers: list[str]) -> list[dict]:
        function = "tests.envs.gym_fuzz_target:score_each"
        try:
            return await self.pool.call(function, name, answers, given=self.given, timeout_s=10.0)
        except (AnswerLimit, RewardError):
            return [await self._score(name, answer) for answer in answers]

    async def _score(self, name: str, answer: str) -> dict:
        function = "tests.envs.gym_fuzz_target:score_one"
        try:
            reward = await score_in_pool(self.pool, function, name, answer, given=self.given)
        except RewardError as error:  # infrastructure: said, and never a reward
            assert "ended its process" in str(error) or "SystemExit" in str(error), error
            return {"total": 0.0, "tags": ["failed"]}
        return {"total": reward.total, "tags": list(reward.tags)}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("gym")
    (folder / "kept").mkdir()
    scratch = tmp_path_factory.mktemp("scratch")
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    made = World(folder)
    old = signal.signal(signal.SIGUSR1, lambda number, _: made.signals.update([number]))
    try:
        yield made
    finally:
        made.loop.run_until_complete(made.pool.close())
        made.loop.close()
        signal.signal(signal.SIGUSR1, old)
        monkeypatch.undo()
    assert list(scratch.iterdir()) == [], "a scratch folder was left"


def untouched(world: World) -> bool:
    return [path.name for path in world.folder.iterdir()] == ["kept"] and not world.signals


@pytest.mark.deadline(600)
def test_attacks_on_every_scorer_end_in_a_verdict_and_touch_nothing(world: World) -> None:
    for name in NAMES:
        for answer in ATTACKS:
            (verdict,) = world.scores(name, [world.armed(answer)])
            assert 0 <= verdict["total"] < 1, (name, answer, verdict)
        assert untouched(world), name


@pytest.mark.deadline(300)
@pytest.mark.parametrize("name", ["string_insertion", "puzzle24"])
def test_a_text_that_never_ends_is_a_wrong_answer(world: World, name: str) -> None:
    for answer in STUCK:
        verdict = world.loop.run_until_complete(world._score(name, answer))
        assert verdict["total"] < 1
        if name == "string_insertion":
            # A list that fills the memory before its time is up is an error that the scorer eats.
            tags = [[LIMIT_TAG], []] if answer is STUCK[0] else [[LIMIT_TAG]]
            assert verdict["total"] == 0 and verdict["tags"] in tags, answer


@pytest.mark.deadline(600)
@pytest.mark.parametrize("name", NAMES)
def test_drawn_texts_neither_hang_nor_crash_nor_touch_anything(world: World, name: str) -> None:
    count = Counter[str]()

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.large_base_example],
    )
    @given(st.lists(texts, min_size=TEXTS, max_size=TEXTS))
    def score(answers: list[str]) -> None:
        verdicts = world.scores(name, [world.armed(answer) for answer in answers])
        assert len(verdicts) == TEXTS and all(0 <= v["total"] <= 1 for v in verdicts)
        count["texts"] += TEXTS

    score()
    assert untouched(world) and count["texts"] >= EXAMPLES * TEXTS
