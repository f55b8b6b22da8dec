"""The async contract: when a group may start, and when it has become too old.

Pure functions of a few integers; the orchestrator holds the integers, this file holds the rules.

  trainer_step    completed steps, also the newest version.
  inference_step  batches assembled for training; batch k is trained by step k on version k.
  served_version  the lowest version a new request may meet, ≤ trainer_step.
  admitted        group attempts trained, batched, held and in flight; a dropped one gives its
                  place back.

Invariants that follow (and are tested on a virtual clock):
  - no group starts while inference_step − trainer_step > max_async_rollout;
  - with max_async_rollout = 0 every token of batch k was written by version k;
  - no token older than max_off_policy_steps is trained.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from telescope_jax.types import VersionSpan


@dataclass(frozen=True, slots=True)
class AsyncBound:
    """How far inference may run ahead, and how old a trained token may be.

    Attributes:
      max_async_rollout: N ≥ 0, steps that inference may run ahead; 0 is synchronous.
      max_off_policy_steps: M ≥ −1, weight updates that a trained token may be behind; −1 is off.
      groups_per_batch: groups of one batch.
      number_of_steps: batches of the whole run.
    """

    max_async_rollout: int
    max_off_policy_steps: int
    groups_per_batch: int
    number_of_steps: int

    @property
    def lead(self) -> int:
        """Steps ahead that are worth starting: what would surely be dropped is not begun."""
        if self.max_off_policy_steps < 0:
            return self.max_async_rollout
        return min(self.max_async_rollout, self.max_off_policy_steps)

    def admission_limit(self, served_version: int) -> int:
        """Group attempts that may be admitted while `served_version` is served.

        min(served_version + lead + 1, number_of_steps) · groups_per_batch. The served version, not
        the trainer's step: a group that starts on a lagging server is as old as that server.
        """
        batches = min(served_version + self.lead + 1, self.number_of_steps)
        return batches * self.groups_per_batch

    def admits(self, *, admitted: int, served_version: int) -> bool:
        """Whether one more group may start."""
        return admitted < self.admission_limit(served_version)

    def is_stale(self, *, oldest_version: float, batch: int) -> bool:
        """Whether a token of `oldest_version` would be too old in `batch`.

        For held and in-flight groups `batch` is inference_step, the next one they can join.
        """
        return 0 <= self.max_off_policy_steps < batch - oldest_version


def ages(spans: Iterable[VersionSpan], batch: int) -> list[tuple[int, int]]:
    """(age, tokens) of each span in `batch`: age = batch − the version that wrote the token."""
    return [(batch - span.version, span.end - span.start) for span in spans]
