"""The live group attempts: in flight, held, batched, and the rules that move them.

Synchronous and free of asyncio, so each rule of the async contract is a method that a test calls:
admission, the age bound, retries in front of the queue, oldest first into a batch, and the books.
Every move is entered in the ledger, and every drop is an event with its reason.

A batch is assembled as soon as enough groups are held; batch k is trained by step k, so the age of
a token in it is exactly k − version. A finished group is never thrown away for want of room.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from telescope_jax.ledger import FINAL, Attempt, DropReason, Ledger, Place
from telescope_jax.prompts import PromptQueue
from telescope_jax.scoring.filters import zero_advantage
from telescope_jax.staleness import AsyncBound
from telescope_jax.types import Group, Prompt, Uid

log = logging.getLogger(__name__)

Events = Callable[[str, Mapping[str, Any]], None]
"""Takes a name and details; `events/*.jsonl` in a run, a list in a test."""

UNTRAINABLE = frozenset(DropReason) - {
    DropReason.STALE_IN_FLIGHT,
    DropReason.STALE_IN_QUEUE,
    DropReason.SHUTDOWN,
}
"""Reasons that say something about the prompts or the parts, not about the pace."""


class NoSignalError(RuntimeError):
    """Too many groups in a row ended untrainable: there is nothing to learn from."""


@dataclass(frozen=True, slots=True)
class AttemptRules:
    """Attributes:
    max_attempts: tries at one uid before it is given up.
    max_prompt_tokens: a longer prompt is dropped.
    drop_zero_advantage: replace groups whose rewards are all equal.
    max_untrainable_groups: groups in a row that end untrainable before the run ends.
    """

    max_prompt_tokens: int
    max_attempts: int = 3
    drop_zero_advantage: bool = True
    max_untrainable_groups: int = 1_000


@dataclass(frozen=True, slots=True)
class InFlight:
    """A group being played.

    `version` is the oldest that can have written a token of it; `since` is a time of the loop's
    clock; `cancel` reaches the engine, whose slots are freed.
    """

    prompt: Prompt
    version: int
    since: float
    cancel: Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Held:
    """A finished group; `order` is its uid's place in the order of admission."""

    attempt: Attempt
    group: Group
    order: int


class Attempts:
    """All attempts of a run; see the module's docstring."""

    def __init__(
        self, bound: AsyncBound, rules: AttemptRules, prompts: PromptQueue, events: Events
    ) -> None:
        self.ledger = Ledger()
        self.inference_step = 0  # batches assembled, so also the number of the next batch
        self.in_flight: dict[Attempt, InFlight] = {}
        self.held: dict[Attempt, Held] = {}  # never more than a batch: it is taken at once
        self.trainable = 0  # groups that ever became trainable, for the watchdog
        self._bound = bound
        self._rules = rules
        self._prompts = prompts
        self._events = events
        # Of uids: one that is tried again keeps its place, so that the order of the groups in a
        # batch does not depend on when the failure came.
        self._orders: dict[Uid, int] = {}
        self._admissions = 0
        self._oldest = math.inf  # no live version is older; spares a look at the live attempts
        # Those in flight, by version and in order: there may be far more of them than of a batch,
        # and none but the stale ones is looked at when something is.
        self._flying: dict[int, dict[Attempt, None]] = {}
        self._untrainable_in_a_row = 0
        self._finished: list[float] = []  # mean reward of each group since the last report
        self._without_signal = 0

    def admits(self, served_version: int) -> bool:
        """Whether one more group may start."""
        return self._bound.admits(admitted=self.ledger.admitted, served_version=served_version)

    def all_in(self) -> bool:
        """Whether no further group has to become trainable for the run to end."""
        finished = self.ledger.admitted - self.ledger.count(Place.IN_FLIGHT)
        return finished >= self._bound.number_of_steps * self._bound.groups_per_batch

    def start(self, attempt: Attempt, flight: InFlight) -> None:
        """Enters a group that is about to be played; cancels it if its prompt is too long."""
        self.ledger.dispatch(attempt)
        if attempt.uid not in self._orders:
            self._orders[attempt.uid] = self._admissions
            self._admissions += 1
        self.in_flight[attempt] = flight
        self._flying.setdefault(flight.version, {})[attempt] = None
        self._oldest = min(self._oldest, flight.version)
        length, limit = len(flight.prompt.tokens), self._rules.max_prompt_tokens
        if length > limit:
            self.cancel(attempt, DropReason.PROMPT_TOO_LONG, f"{length} tokens, limit {limit}")

    def finish(self, attempt: Attempt, group: Group) -> None:
        """Holds a played group, unless it is stale, without signal or cancelled meanwhile."""
        if attempt not in self.in_flight:
            return  # a late result of a cancelled attempt is discarded
        if self._bound.is_stale(oldest_version=group.oldest_version, batch=self.inference_step):
            self._end(attempt, DropReason.STALE_IN_FLIGHT, f"version {group.oldest_version}")
            return
        rewards_G = [rollout.reward.total for rollout in group.rollouts]
        self._finished.append(sum(rewards_G) / len(rewards_G))
        self._without_signal += zero_advantage(rewards_G)
        if self._rules.drop_zero_advantage and zero_advantage(rewards_G):
            self._end(attempt, DropReason.ZERO_ADVANTAGE, f"every reward is {rewards_G[0]:g}")
            return
        self._land(attempt)
        self._oldest = min(self._oldest, group.oldest_version)
        self.ledger.hold(attempt)
        self.held[attempt] = Held(attempt, group, self._orders[attempt.uid])
        self.trainable += 1
        self._untrainable_in_a_row = 0

    def fail(self, attempt: Attempt, reason: DropReason, detail: str) -> None:
        """A group could not be played; ignored if it was cancelled meanwhile."""
        if attempt in self.in_flight:
            self._end(attempt, reason, detail)

    def cancel(self, attempt: Attempt, reason: DropReason, detail: str = "") -> None:
        """Drops a held group, or one in flight, which is stopped."""
        if flight := self.in_flight.get(attempt):
            flight.cancel()
        self._end(attempt, reason, detail)

    def drop_stale(self) -> None:
        """Drops all that could only join a batch in which it is too old.

        Its age is known already: the next batch that it can join is `inference_step`.
        """
        batch = self.inference_step
        if not self._bound.is_stale(oldest_version=self._oldest, batch=batch):
            return  # asked for every group that finishes, and nearly always so
        held = [
            (attempt, held.group.oldest_version, DropReason.STALE_IN_QUEUE)
            for attempt, held in self.held.items()
            if self._bound.is_stale(oldest_version=held.group.oldest_version, batch=batch)
        ]
        playing = [
            (attempt, version, DropReason.STALE_IN_FLIGHT)
            for version in sorted(self._flying)
            if self._bound.is_stale(oldest_version=version, batch=batch)
            for attempt in self._flying[version]
        ]
        # Each goes to the front of the queue, so the last one dropped is the first one tried again.
        for attempt, version, reason in reversed(held + playing):
            self.cancel(attempt, reason, f"version {version} cannot join batch {batch}")
        live = [held.group.oldest_version for held in self.held.values()]
        self._oldest = min([*live, *self._flying], default=math.inf)

    def take_batch(self) -> tuple[Held, ...] | None:
        """The groups of the next batch, oldest version first; None while too few are held."""
        if self.inference_step >= self._bound.number_of_steps:
            return None
        self.drop_stale()
        size = self._bound.groups_per_batch
        if len(self.held) < size:
            return None
        ordered = sorted(self.held.values(), key=lambda h: (h.group.oldest_version, h.order))
        members = tuple(ordered[:size])
        self.held = {held.attempt: held for held in ordered[size:]}
        self.ledger.batch(member.attempt for member in members)
        self.inference_step += 1
        return members

    def train(self, members: Sequence[Held]) -> None:
        """A batch was trained."""
        self.ledger.train(member.attempt for member in members)
        for member in members:
            del self._orders[member.attempt.uid]

    def report(self) -> dict[str, float]:
        """Rewards of all groups that finished since the last report, dropped ones too.

        Batches hold only groups with signal, so their mean reward is drawn to the middle; the
        reward that tells how good the policy is counts every group.
        """
        finished, without = self._finished, self._without_signal
        self._finished, self._without_signal = [], 0
        if not finished:
            return {}
        return {
            # Exact, so that the order in which groups finished leaves no trace.
            "rollout/reward": math.fsum(finished) / len(finished),
            "rollout/no_signal_fraction": without / len(finished),
        }

    def state(self, batched: Sequence[Held]) -> tuple[dict[str, Any], list[Group]]:
        """For a checkpoint: JSON values, and the groups that are held or in `batched`."""
        held = [*batched, *self.held.values()]
        values = {
            "ledger": self.ledger.state(),
            "prompts": self._prompts.state(),
            "held": [[*h.attempt.uid, h.attempt.number] for h in held],
            "orders": [[*uid, order] for uid, order in self._orders.items()],
            "admissions": self._admissions,
            "finished": list(self._finished),
            "without_signal": self._without_signal,
            "untrainable_in_a_row": self._untrainable_in_a_row,
        }
        return values, [h.group for h in held]

    def restore(self, step: int, values: Mapping[str, Any], groups: Sequence[Group]) -> None:
        """Goes on from a checkpoint of `step`: batched groups are held again, and what was in
        flight is first in the queue, as the same attempt."""
        self.inference_step = step
        self.ledger, in_flight = Ledger.restored(values["ledger"])
        self._prompts.restore(values["prompts"], in_flight)
        self._orders = {Uid(e, i): order for e, i, order in values["orders"]}
        self._admissions = values["admissions"]
        self._finished = list(values["finished"])
        self._without_signal = values["without_signal"]
        self._untrainable_in_a_row = values["untrainable_in_a_row"]
        attempts = [Attempt(Uid(e, i), n) for e, i, n in values["held"]]
        self.held = {
            attempt: Held(attempt, group, self._orders[attempt.uid])
            for attempt, group in zip(attempts, groups, strict=True)
        }
        self._oldest = min((group.oldest_version for group in groups), default=math.inf)

    def _end(self, attempt: Attempt, reason: DropReason, detail: str = "") -> None:
        """Drops a live attempt; its prompt goes to the front of the queue if it may try again.

        Raises:
          NoSignalError: that was one untrainable group too many.
        """
        prompt = self._remove(attempt)
        retry = reason not in FINAL and attempt.number + 1 < self._rules.max_attempts
        booked = reason if retry or reason in FINAL else DropReason.GAVE_UP
        self.ledger.drop(attempt, booked)
        if retry:
            self._prompts.requeue(prompt, attempt.number + 1)
        identity = {"uid": list(attempt.uid), "attempt": attempt.number}
        why = {"reason": booked.value, "cause": reason.value, "detail": detail}
        if not retry:
            del self._orders[attempt.uid]
        self._events("drop", identity | why)
        if reason in UNTRAINABLE:
            self._count_untrainable(reason, detail)

    def _remove(self, attempt: Attempt) -> Prompt:
        if attempt in self.in_flight:
            return self._land(attempt).prompt
        return self.held.pop(attempt).group.prompt

    def _land(self, attempt: Attempt) -> InFlight:
        flight = self.in_flight.pop(attempt)
        alike = self._flying[flight.version]
        del alike[attempt]
        if not alike:
            del self._flying[flight.version]
        return flight

    def _count_untrainable(self, reason: DropReason, detail: str) -> None:
        self._untrainable_in_a_row += 1
        row, limit = self._untrainable_in_a_row, self._rules.max_untrainable_groups
        if row % max(1, limit // 10) == 0:
            log.warning("%d groups in a row were untrainable, last: %s", row, reason.value)
        if row >= limit:
            raise NoSignalError(
                f"{row} groups in a row ended untrainable (limit max_untrainable_groups={limit}); "
                f"the last one: {reason.value}, {detail}. Check the environment, its rewards and "
                "the prompt length, or start from a better policy"
            )
