"""The books of group attempts: every attempt that was dispatched is in exactly one place.

    dispatched = trained + batched + held + in flight + dropped by each reason

An attempt is (uid, attempt number). It moves dispatched → in flight → held → batched → trained, or
is dropped on the way for one reason of a closed list. `check()` compares the counter of dispatches
with all the places, so a lost or doubled attempt is an error at the step where it happened. One
that stands in the wrong place is found when the places are counted anew, once for as many moves as
attempts are live: so a check costs the same for each of them, however many are in flight.
"""

import enum
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from telescope_jax.types import Uid


class DropReason(enum.Enum):
    """Why an attempt ended untrained. Infrastructure failures are never a reward of 0."""

    STALE_IN_FLIGHT = "stale_in_flight"
    STALE_IN_QUEUE = "stale_in_queue"
    ZERO_ADVANTAGE = "zero_advantage"
    PROMPT_TOO_LONG = "prompt_too_long"
    ENGINE_ERROR = "engine_error"
    ENV_ERROR = "env_error"
    REWARD_ERROR = "reward_error"
    REWARD_TIMEOUT = "reward_timeout"
    GAVE_UP = "gave_up"  # the last allowed attempt failed, for whatever reason
    SHUTDOWN = "shutdown"


FINAL = frozenset(
    {
        DropReason.ZERO_ADVANTAGE,
        DropReason.PROMPT_TOO_LONG,
        DropReason.GAVE_UP,
        DropReason.SHUTDOWN,
    }
)
"""Reasons for which the same prompt is not tried again."""


class Attempt(NamedTuple):
    """One try at one uid; tries count from 0."""

    uid: Uid
    number: int


class Place(enum.Enum):
    """Where a live attempt is."""

    IN_FLIGHT = "in_flight"
    HELD = "held"
    BATCHED = "batched"


class LedgerError(RuntimeError):
    """The books do not balance, or an attempt made a move that it cannot make."""


class Ledger:
    """Counts attempts and knows where each live one is."""

    def __init__(self) -> None:
        self.dispatched = 0
        self.trained = 0
        self.dropped: Counter[DropReason] = Counter()
        self._places: dict[Attempt, Place] = {}
        self._count: Counter[Place] = Counter()
        self._moves = 0  # since the places were counted

    @property
    def admitted(self) -> int:
        """Attempts trained, batched, held and in flight: what admission limits."""
        return self.trained + len(self._places)

    def place(self, attempt: Attempt) -> Place | None:
        """Where `attempt` is; None once it was trained or dropped: a late result is discarded."""
        return self._places.get(attempt)

    def count(self, place: Place) -> int:
        """Live attempts at `place`."""
        return self._count[place]

    def dispatch(self, attempt: Attempt) -> None:
        """`attempt` has started."""
        if attempt in self._places:
            raise LedgerError(f"{attempt} was dispatched while it is {self._places[attempt].value}")
        self.dispatched += 1
        self._moves += 1
        self._places[attempt] = Place.IN_FLIGHT
        self._count[Place.IN_FLIGHT] += 1

    def hold(self, attempt: Attempt) -> None:
        """All rollouts of `attempt` are finished and scored."""
        self._move(attempt, Place.IN_FLIGHT, Place.HELD)

    def batch(self, attempts: Iterable[Attempt]) -> None:
        """`attempts` form a batch."""
        for attempt in attempts:
            self._move(attempt, Place.HELD, Place.BATCHED)

    def train(self, attempts: Iterable[Attempt]) -> None:
        """The batch of `attempts` was trained."""
        for attempt in attempts:
            self._remove(attempt, Place.BATCHED)
            self.trained += 1

    def drop(self, attempt: Attempt, reason: DropReason) -> None:
        """`attempt` ends here, wherever it was, and gives its place back."""
        place = self._places.get(attempt)
        if place is None or place is Place.BATCHED:
            where = "not live" if place is None else "already batched"
            raise LedgerError(f"{attempt} cannot be dropped as {reason.value}: it is {where}")
        self._remove(attempt, place)
        self.dropped[reason] += 1

    def check(self) -> None:
        """Raises LedgerError unless every dispatched attempt is in exactly one place."""
        counts = self._count
        if self._moves >= len(self._places):
            self._moves, counts = 0, Counter(self._places.values())
        found = self.trained + len(self._places) + self.dropped.total()
        live = self._count.total()
        if (
            self.dispatched != found
            or live != len(self._places)
            or any(counts[p] != self._count[p] for p in Place)
        ):
            raise LedgerError(
                f"dispatched {self.dispatched} attempts but found {found}: {self.metrics()}"
            )

    def metrics(self) -> dict[str, float]:
        """Every count, as `ledger/*`."""
        counts = {"dispatched": self.dispatched, "trained": self.trained}
        counts |= {place.value: self._count[place] for place in Place}
        counts["dropped"] = self.dropped.total()
        counts |= {f"dropped/{reason.value}": self.dropped[reason] for reason in DropReason}
        return {f"ledger/{name}": float(value) for name, value in counts.items()}

    def state(self) -> dict[str, Any]:
        """For a checkpoint, as JSON values. Live attempts are listed with their place."""
        return {
            "dispatched": self.dispatched,
            "trained": self.trained,
            "dropped": {reason.value: n for reason, n in self.dropped.items()},
            "live": [[*a.uid, a.number, place.value] for a, place in self._places.items()],
        }

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> tuple["Ledger", list[Attempt]]:
        """The books as of a checkpoint, and the attempts that were in flight.

        A batched attempt is held again. One in flight leaves the books, since it will be dispatched
        again under the same number; the caller puts it at the front of the queue.
        """
        ledger = cls()
        ledger.trained = state["trained"]
        ledger.dropped = Counter({DropReason(k): n for k, n in state["dropped"].items()})
        in_flight = []
        for epoch, index, number, place in state["live"]:
            attempt = Attempt(Uid(epoch, index), number)
            if Place(place) is Place.IN_FLIGHT:
                in_flight.append(attempt)
            else:
                ledger._places[attempt] = Place.HELD
                ledger._count[Place.HELD] += 1
        ledger.dispatched = state["dispatched"] - len(in_flight)
        ledger.check()
        return ledger, in_flight

    def _move(self, attempt: Attempt, source: Place, target: Place) -> None:
        self._remove(attempt, source)
        self._places[attempt] = target
        self._count[target] += 1

    def _remove(self, attempt: Attempt, source: Place) -> None:
        place = self._places.get(attempt)
        if place is not source:
            found = "not live" if place is None else place.value
            raise LedgerError(f"{attempt} should be {source.value} but is {found}")
        del self._places[attempt]
        self._moves += 1
        self._count[source] -= 1
