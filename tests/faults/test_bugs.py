"""Cases of the list of real failures that no other test holds, and the table of all of them."""

import ast
import random
from pathlib import Path
from typing import Any

from tests.bug_table import TESTS
from tests.faults.test_liveness import GROUPS, STEPS, finished
from tests.scripted import ScriptedStore, build
from tests.virtual_clock import run_virtual

HERE = Path(__file__).resolve().parents[1]
IDS = {
    "OR": "01 02 04 05 07 09 10 12 13 15 16 17 19 20 22 24 25 27 29 31",
    "CK": "01 03 04 06 08 09 13 15 16",
    "CF": "01 03 04 06 08 09",
    "MT": "01 03 04 06 08 10",
    "VL": "01 02 03 08 10 12 13",
}


def test_every_known_failure_has_a_test_that_exists() -> None:
    ids = {f"{area}-{number}" for area, numbers in IDS.items() for number in numbers.split()}
    assert TESTS.keys() == ids
    missing = []
    for names in TESTS.values():
        assert names
        for name in names:
            file, _, test = name.partition("::")
            tree = ast.parse((HERE / f"{file}.py").read_text("utf-8"))
            defined = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}
            if test not in defined:
                missing.append(name)
    assert missing == []


def test_an_eval_gets_its_slots_beside_groups_in_flight() -> None:
    """OR-01: evals of every version on the training engine, with groups in flight all the time."""
    run = build(steps=STEPS, eval_every=1, eval_s=3.0, shares_engine=True, lead=1)
    finished(run)
    assert run.evaluator is not None
    assert [version for version, _, _ in run.evaluator.seen] == list(range(STEPS + 1))


def test_a_group_that_goes_stale_half_way_is_dropped_whole_and_tried_again() -> None:
    """OR-09: G = 4, and the weights move on while some members are still being sampled."""
    latency = {"latency_s": lambda rng: rng.choice([0.1, 7.0]), "update_s": lambda step: 0.5}
    run = build(size=4, lead=2, off_policy=1, max_attempts=100, steps=STEPS, **latency)
    dropped = finished(run)
    stale = [name for name in dropped if name.value.startswith("stale")]
    assert stale, "no group went stale, so nothing was tested"
    assert all(len(member.group.rollouts) == 4 for _, member in run.attempts.trained)
    assert run.engine.running == 0 and not run.attempts.in_flight


def test_a_straggler_is_waited_for_and_its_length_is_trained() -> None:
    """OR-29: a group is cut for its age alone, so long completions are not lost for being long."""
    slow: list[float] = []

    def latency(rng: random.Random) -> float:
        long = rng.random() < 0.25
        slow.append(long)
        return 10.0 if long else 1.0

    run = build(size=4, latency_s=latency, steps=STEPS)
    assert not finished(run)
    trained = sum(len(member.group.rollouts) for _, member in run.attempts.trained)
    assert trained == len(slow) == STEPS * GROUPS * 4, "every completion was trained, long or not"
    assert sum(slow) > 5


def test_no_version_is_deleted_before_every_server_has_a_newer_one() -> None:
    """CK-08: two servers, one of which takes ten times as long to load; one version is kept."""

    class Watching(ScriptedStore):
        async def prune(self, keep: Any) -> None:
            serving = {loads[-1][1] for loads in run.engine.served}
            assert serving <= set(keep), "a server may still load what is deleted here"
            pruned.append(set(keep))

    pruned: list[set[int]] = []
    run = build(servers=2, store=Watching(), steps=STEPS, update_s=lambda step: 0.2)
    run.engine.load_s = 5.0
    run_virtual(run.orchestrator.run())
    assert len(pruned) > 2
