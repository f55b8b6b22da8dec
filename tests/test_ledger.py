"""The books: every attempt is in exactly one place, and a wrong move is an error."""

import json

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from telescope_jax.ledger import Attempt, DropReason, Ledger, LedgerError, Place
from telescope_jax.types import Uid


def attempt(index: int, number: int = 0) -> Attempt:
    return Attempt(Uid(0, index), number)


class Books(RuleBasedStateMachine):
    """Random legal moves, against plain sets."""

    @initialize()
    def start(self) -> None:
        self.ledger = Ledger()
        self.places: dict[Place, list[Attempt]] = {place: [] for place in Place}
        self.ended = 0
        self.trained = 0
        self.next = 0

    @rule()
    def dispatch(self) -> None:
        self.ledger.dispatch(attempt(self.next))
        self.places[Place.IN_FLIGHT].append(attempt(self.next))
        self.next += 1

    @precondition(lambda self: self.places[Place.IN_FLIGHT])
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        moved = data.draw(st.sampled_from(self.places[Place.IN_FLIGHT]))
        self.ledger.hold(moved)
        self.places[Place.IN_FLIGHT].remove(moved)
        self.places[Place.HELD].append(moved)

    @precondition(lambda self: self.places[Place.HELD])
    @rule()
    def batch(self) -> None:
        self.ledger.batch(self.places[Place.HELD])
        self.places[Place.BATCHED] += self.places[Place.HELD]
        self.places[Place.HELD] = []

    @precondition(lambda self: self.places[Place.BATCHED])
    @rule()
    def train(self) -> None:
        self.ledger.train(self.places[Place.BATCHED])
        self.trained += len(self.places[Place.BATCHED])
        self.places[Place.BATCHED] = []

    @rule(data=st.data(), reason=st.sampled_from(list(DropReason)))
    def drop(self, data: st.DataObject, reason: DropReason) -> None:
        live = self.places[Place.IN_FLIGHT] + self.places[Place.HELD]
        if live:
            dropped = data.draw(st.sampled_from(live))
            self.ledger.drop(dropped, reason)
            self.places[Place.IN_FLIGHT] = [a for a in self.places[Place.IN_FLIGHT] if a != dropped]
            self.places[Place.HELD] = [a for a in self.places[Place.HELD] if a != dropped]
            self.ended += 1

    @rule()
    def restart(self) -> None:
        """A checkpoint holds it all: batched is held again, in flight is dispatched again."""
        state = json.loads(json.dumps(self.ledger.state()))
        self.ledger, in_flight = Ledger.restored(state)
        assert in_flight == self.places[Place.IN_FLIGHT]
        self.places[Place.HELD] += self.places[Place.BATCHED]
        self.places[Place.BATCHED] = []
        for again in in_flight:
            self.ledger.dispatch(again)

    @invariant()
    def balanced(self) -> None:
        self.ledger.check()
        for place, attempts in self.places.items():
            assert self.ledger.count(place) == len(attempts)
        live = sum(map(len, self.places.values()))
        assert self.ledger.admitted == self.trained + live
        assert self.ledger.dispatched == self.next == self.trained + live + self.ended
        metrics = self.ledger.metrics()
        assert metrics["ledger/dropped"] == self.ended
        dropped = sum(v for name, v in metrics.items() if name.startswith("ledger/dropped/"))
        assert dropped == self.ended


TestBooks = Books.TestCase


@pytest.mark.parametrize(
    ("move", "message"),
    [
        (lambda books: books.dispatch(attempt(0)), "dispatched while it is in_flight"),
        (lambda books: books.hold(attempt(1)), "should be in_flight but is not live"),
        (lambda books: books.train([attempt(0)]), "should be batched but is in_flight"),
        (lambda books: books.drop(attempt(1), DropReason.ENV_ERROR), "it is not live"),
    ],
)
def test_an_impossible_move_is_an_error(move, message: str) -> None:
    books = Ledger()
    books.dispatch(attempt(0))
    with pytest.raises(LedgerError, match=message):
        move(books)


def test_a_batched_attempt_is_never_dropped() -> None:
    books = Ledger()
    books.dispatch(attempt(0))
    books.hold(attempt(0))
    books.batch([attempt(0)])
    with pytest.raises(LedgerError, match="already batched"):
        books.drop(attempt(0), DropReason.STALE_IN_QUEUE)


def test_a_lost_attempt_is_found_at_once() -> None:
    books = Ledger()
    books.dispatch(attempt(0))
    books._places.clear()  # a bug that loses an attempt
    with pytest.raises(LedgerError, match="dispatched 1 attempts but found 0"):
        books.check()
