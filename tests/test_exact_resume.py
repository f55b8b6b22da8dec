"""A run that is killed anywhere and started again loses nothing, on a virtual clock.

With max_async_rollout = 0 the killed run ends with the very parameters and metrics of one that was
never killed, also when prompts fail, have no signal and are given up, and whatever the number of
servers. With more, what is trained depends on the pace; then two resumes of one checkpoint are the
same, and no prompt, step or eval is skipped or done twice.
"""

import asyncio
import itertools
import random
from pathlib import Path
from typing import Any

import pytest

from telescope_jax.ledger import Place
from telescope_jax.metrics import read as read_metrics
from tests.keyed import Disk, Process, start
from tests.virtual_clock import VirtualClockLoop

STEPS, GROUPS = 6, 3
KILLS = 80
"""Kill points for each max_async_rollout."""


class Killed(BaseException):
    """SIGKILL: nothing runs after it, no handler and no `finally` that the disk could notice."""


class KillableLoop(VirtualClockLoop):
    """Stops for good before turn `kill_at`; None never."""

    def __init__(self, kill_at: int | None) -> None:
        super().__init__()
        self.turns, self._kill_at = 0, kill_at
        self.set_exception_handler(lambda loop, context: None)

    def _run_once(self) -> None:
        self.turns += 1
        if self.turns == self._kill_at:
            raise Killed
        super()._run_once()


def live(disk: Disk, kill_at: int | None = None, **settings: Any) -> tuple[Process, int]:
    """One process, to its end or its kill; and the turns of the loop that it lived."""
    loop = KillableLoop(kill_at)
    asyncio.set_event_loop(loop)
    process = start(disk, **settings)
    try:
        loop.run_until_complete(process.main())
    except Killed:
        # What is left is cleared away, where no disk can see it.
        process.saver.disk = Disk(disk.folder / "of a dead process")
        process.sink.close()
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
    finally:
        asyncio.set_event_loop(None)
        loop.close()
    return process, loop.turns


def lines(disk: Disk) -> dict[tuple[str, int], dict[str, Any]]:
    """Every metric line by kind and step, without times; a line that is there twice is an error."""
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for line in read_metrics(disk.metrics_file):
        values = {n: v for n, v in line.items() if not n.startswith("time")}
        values.pop("metrics/restarts", None)
        if values.keys() == {"step", "metrics/non_finite"}:
            continue  # the mark of a restart
        kind = "eval" if any(name.startswith("eval/") for name in line) else "train"
        key = kind, line["step"]
        assert key not in found, f"{key} is in the metrics twice"
        found[key] = values
    return found


def check_invariants(process: Process, disk: Disk) -> None:
    attempts = process.run.attempts
    attempts.ledger.check()
    assert process.run.trainer.step == STEPS
    assert attempts.ledger.trained == STEPS * GROUPS
    assert attempts.ledger.count(Place.HELD) == attempts.ledger.count(Place.IN_FLIGHT) == 0
    trained = [attempt.uid for _, attempt in process.trained()]
    assert [step for step, _ in process.trained()] == [k for k in range(STEPS) for _ in range(3)]
    assert len(set(trained)) == len(trained) == STEPS * GROUPS, "a prompt was trained twice"
    # Whatever was drawn ended somewhere: trained, or given up for a reason that is final.
    prompts = process.run.orchestrator._prompts
    cursor = prompts.state()["cursor"]
    drawn = [prompts.uid(position) for position in range(cursor)]
    dropped = attempts.ledger.dropped
    final = sum(n for reason, n in dropped.items() if reason.value in ("zero_advantage", "gave_up"))
    assert set(trained) <= set(drawn)
    assert cursor == len(trained) + final, "a prompt was skipped, or retired twice"
    assert prompts.state()["front"] == []
    kinds = lines(disk)
    assert [step for kind, step in kinds if kind == "train"] == list(range(STEPS))
    evals = sorted(step for kind, step in kinds if kind == "eval")
    assert evals in (list(range(STEPS + 1)), [0, 3, 6]), "an eval was lost, or done twice"


def stories(lead: int) -> Any:
    for seed in itertools.count():
        rng = random.Random(f"{lead}/{seed}")
        settings = {"lead": lead, "steps": STEPS, "groups": GROUPS, "seed": seed}
        yield (
            rng,
            lambda settings=settings, seed=seed: {
                **settings,
                "story": random.Random(seed),
            },
        )


def another(rng: random.Random) -> dict[str, int]:
    """What a process may have that the one before it had not."""
    return {"servers": rng.randrange(1, 4), "pace": rng.randrange(100)}


def test_a_killed_synchronous_run_ends_with_the_bits_of_one_that_was_not(tmp_path: Path) -> None:
    """Also with another number of servers, and at another pace, after each kill."""
    kills = resumed = evals_before = 0
    for number, (rng, settings) in enumerate(stories(0)):
        if kills >= KILLS:
            break
        calm = Disk(tmp_path / f"{number}-calm")
        calm.folder.mkdir()
        expected, turns = live(calm, servers=1, pace=0, **settings())
        check_invariants(expected, calm)

        disk = Disk(tmp_path / f"{number}")
        disk.folder.mkdir()
        for _ in range(rng.randrange(1, 4)):
            _, lived = live(disk, rng.randrange(1, turns), **another(rng), **settings())
            kills += 1
            resumed += bool(disk.committed)
            evals_before += bool(disk.committed and disk.committed[-1].evals)
        process, _ = live(disk, **another(rng), **settings())
        check_invariants(process, disk)
        assert process.run.trainer.params == expected.run.trainer.params
        assert process.trained() == expected.trained(), "prompts in another order"
        assert lines(disk) == lines(calm)
    assert resumed > KILLS / 3 and evals_before > 5, "the kills should meet checkpoints, and evals"


@pytest.mark.parametrize("lead", [1, 2])
def test_kills_of_an_asynchronous_run_lose_and_double_nothing(tmp_path: Path, lead: int) -> None:
    """And two resumes of one checkpoint are the same, bit for bit."""
    kills = compared = held = 0
    for number, (rng, settings) in enumerate(stories(lead)):
        if kills >= KILLS:
            break
        calm = Disk(tmp_path / f"{number}-calm")
        calm.folder.mkdir()
        _, turns = live(calm, servers=2, pace=0, **settings())

        disk = Disk(tmp_path / f"{number}")
        disk.folder.mkdir()
        for _ in range(rng.randrange(1, 4)):
            live(disk, rng.randrange(1, turns), **another(rng), **settings())
            kills += 1
            held += bool(disk.committed and disk.committed[-1].held)
        twin = disk.copy(tmp_path / f"{number}-twin")
        process, _ = live(disk, servers=2, pace=0, **settings())
        other, _ = live(twin, servers=2, pace=0, **settings())
        check_invariants(process, disk)
        assert process.run.trainer.params == other.run.trainer.params
        assert process.trained() == other.trained()
        assert lines(disk) == lines(twin)
        compared += bool(disk.committed)
        for step, member in process.run.attempts.trained:
            assert 0 <= step - member.group.oldest_version <= 8
        assert max(process.run.attempts.leads, default=0) <= lead
    assert compared > 10 and held > 3, "the kills should meet checkpoints with held groups"
