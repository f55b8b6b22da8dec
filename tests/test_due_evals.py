"""Which versions are evaluated: each once, whatever was cut and resumed."""

from telescope_jax.due_evals import DueEvals, EvalSchedule


def waiting(due: DueEvals) -> list[int]:
    return [version for version, _ in due]


def test_the_start_every_so_many_and_the_end_are_evaluated():
    due = DueEvals(EvalSchedule(last=10, every=4), (0, "params 0"))
    for version in range(1, 11):
        due.offer(version, f"params {version}")
    assert waiting(due) == [0, 4, 8, 10] and due.first == (0, "params 0")
    assert due.done() == 0 and waiting(due) == [4, 8, 10] and due.done_here == 1
    assert [v for v in range(11) if EvalSchedule(10, at_start=False).includes(v)] == [10]


def test_a_resumed_run_evaluates_what_waited_and_nothing_twice():
    due = DueEvals(EvalSchedule(10, 4), (8, None), frozenset({0, 4}), [(4, None), (8, None)])
    assert waiting(due) == [8]
    due = DueEvals(EvalSchedule(10, 4), (8, None), frozenset({0, 4, 8}))
    assert waiting(due) == []
    due = DueEvals(EvalSchedule(10, 4), (8, None), frozenset({0}), [(4, None)])
    assert waiting(due) == [4, 8]


def test_a_version_that_is_trained_again_is_evaluated_again():
    """Its first eval was of a step that the newest checkpoint does not know."""
    due = DueEvals(EvalSchedule(10, 4), (3, None), frozenset({0, 4}))
    due.offer(4, None)
    assert waiting(due) == [4]


def test_without_an_evaluator_nothing_waits():
    due = DueEvals(None, (0, None), waiting=[(4, None)])
    due.offer(10, None)
    assert not due
