"""The other processes of a trainer: they set up as process 0 does, then do what it commands.

They hold no prompts, no engines and no books. A signal they get is passed on to process 0, which
ends the run for all after a checkpoint; a second one ends this process at once.
"""

import logging
import os
import signal
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any

from telescope_jax.hosts import batches
from telescope_jax.hosts.leader import begin_write, gathered, new_writer, part, zeros
from telescope_jax.hosts.runtime import HostsError, Peers
from telescope_jax.learner.checkpoint import Checkpoints
from telescope_jax.learner.learner import Learner
from telescope_jax.types import Params
from telescope_jax.weights.store import OrbaxStore

log = logging.getLogger(__name__)


class Follower:
    """Carries out commands until the one that ends."""

    def __init__(
        self,
        peers: Peers,
        learner: Learner,
        store: OrbaxStore,
        checkpoints: Checkpoints,
        *,
        evals: Mapping[int, Params] | None = None,
    ) -> None:
        """
        Args:
          evals: older versions, by number, whose evals were due when the run was cut.
        """
        self._peers, self._learner = peers, learner
        self._store, self._checkpoints = store, checkpoints
        self._writer = new_writer()
        self._versions: dict[int, Params] = {
            **(evals or {}),
            learner.step: learner.params,
        }
        self._served: Mapping[str, Any] = {}

    def run(self) -> int:
        """Returns the exit code that process 0 ends with."""
        carry_out = {
            "update": self._update,
            "gather": self._gather,
            "write": self._write,
            "checkpoint": self._checkpoint,
        }
        while True:
            command = self._peers.next_command()
            kind = command.pop("kind")
            log.debug("command: %s", kind)
            if kind == "end":
                self._writer.close()
                return command["code"]
            carry_out[kind](**command)

    def _update(self, about: dict[str, Any], forget: list[int]) -> None:
        for version in forget:
            self._versions.pop(version, None)
        self._learner.update_now(batches.broadcast(None, about))
        self._versions[self._learner.step] = self._learner.params

    def _gather(self, version: int) -> None:
        self._served = self._store.cast(self._version(version))
        for _ in gathered(self._served):
            pass

    def _write(self, version: int, tensors: Mapping[str, str] | None) -> None:
        if tensors is not None:
            begin_write(self._writer, self._store, version, self._served, tensors)
        self._served = {}

    def _version(self, version: int) -> Params:
        if version not in self._versions:
            raise HostsError(
                f"process 0 wants version {version} and this process holds {sorted(self._versions)}"
            )
        return self._versions[version]

    def _checkpoint(
        self, whole: bool, name: str, held: Mapping[str, Any], evals: Sequence[int]
    ) -> None:
        # What is held is process 0's to write; orbax wants the same tree of everybody.
        self._checkpoints.save(
            part(self._learner.save(), whole=whole),
            held=zeros(held),
            evals={version: self._version(version) for version in evals},
            name=name,
        )


def pass_signals_on(peers: Peers) -> None:
    """Ctrl-C and SIGTERM: the first one goes to process 0, the second one ends this process."""
    arrived: list[int] = []

    def arrive(number: int, frame: FrameType | None) -> None:
        del frame
        if arrived:
            os._exit(128 + number)
        arrived.append(number)
        peers.ask_to_stop(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, arrive)
