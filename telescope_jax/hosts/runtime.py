"""The processes of one trainer: how they find each other, talk, agree and notice a death.

JAX's own multi-controller runtime does the work. Its coordination service (process 0 runs it) is
the channel for everything small: commands, agreement, signs of life. Arrays never go through it.

Invariants:
- nothing waits for ever on a process that is gone: every process shows a sign of life each second,
  and whoever misses one for `patience_s` says whose and ends; what ends with an error leaves its
  last words for the others. The service ends them all if process 0 itself dies;
- commands have one order, that of process 0, and every process carries out all of them.
"""

import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import jax
from jax._src import distributed  # the key-value store has no public name (jax 0.10.2)

log = logging.getLogger(__name__)

COORDINATOR, PROCESSES, PROCESS = (
    "TELESCOPE_COORDINATOR",
    "TELESCOPE_PROCESSES",
    "TELESCOPE_PROCESS",
)
"""What a launcher sets: host:port of process 0 (or `auto`), how many there are, which this is."""

PEER_EXIT_CODE = 5
"""Another process of the trainer died, or never came: start all of them again."""

AUTO = "auto"
_BEAT_S = 1.0
_POLL_MS = 1_000
_COMMANDS_KEPT = 64
_LEAVE_S = 3.0


class HostsError(RuntimeError):
    """The processes cannot work together; the message says which and why."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where this process stands; `coordinator` is host:port of process 0, or `auto`."""

    coordinator: str
    processes: int | None
    process: int | None


def place(flags: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> Place | None:
    """What flags, or else the launcher's environment, say; None is a trainer of one process.

    Raises:
      HostsError: it is not whole, or makes no sense.
    """
    named = {"coordinator": COORDINATOR, "processes": PROCESSES, "process": PROCESS}
    given = {flag: str(flags.get(flag, "")) or environment.get(named[flag], "") for flag in named}
    if not any(given.values()):
        return None
    if given["coordinator"] == AUTO:
        if given["processes"] or given["process"]:
            raise HostsError(
                f"--coordinator={AUTO} finds the number of processes and this one's by itself; "
                "leave --processes and --process out"
            )
        return Place(AUTO, None, None)
    if missing := [f"--{flag} (or {named[flag]})" for flag, text in given.items() if not text]:
        raise HostsError(f"several processes need {' and '.join(missing)} too")
    try:
        processes, process = int(given["processes"]), int(given["process"])
    except ValueError:
        processes, process = 0, 0
    host, _, port = given["coordinator"].rpartition(":")
    is_port = port.isdecimal() and 0 < int(port) < 1 << 16
    if not (0 <= process < processes and host and is_port):
        raise HostsError(
            f"--coordinator={given['coordinator']} --processes={given['processes']} --process="
            f"{given['process']}: the coordinator is host:port, with a port of 1 to 65535, and "
            "process one of 0 to processes − 1"
        )
    return Place(given["coordinator"], processes, process)


def join(where: Place | None, *, start_timeout_s: float = 300.0) -> "Peers | None":
    """Connects this process with the others, before anything touches a device.

    Returns:
      None when the trainer has one process.

    Raises:
      HostsError: the coordinator's port is taken, or `auto` finds no cluster. When not all
        processes come in time the process ends, with PEER_EXIT_CODE.
    """
    if where is None or where.processes == 1:
        return None
    # It would take SIGTERM away from run.py; a follower that is asked to stop tells the leader.
    jax.config.update("jax_enable_preemption_service", False)
    # On CPUs an executable that waits for another process holds a thread that the compilation of
    # the next one needs: with asynchronous dispatch both processes then wait for ever.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    auto = where.coordinator == AUTO
    if where.process == 0:
        _check_port(where.coordinator)
    print(
        f"telescope_jax: waiting {start_timeout_s:g} s at most for the other trainer processes"
        + ("" if auto else f" at {where.coordinator}"),
        file=sys.stderr,
        flush=True,
    )
    # In time before JAX's own limit, at which it aborts the process with a dump of its stack.
    limit = threading.Timer(start_timeout_s, _nobody_came, [where, start_timeout_s])
    limit.start()
    try:
        jax.distributed.initialize(
            None if auto else where.coordinator,
            where.processes,
            where.process,
            cluster_detection_method=None if auto else "deactivate",
            initialization_timeout=round(start_timeout_s) + 60,
            # The last resort: unlike `Peers` it counts seconds in which the machine stood still.
            heartbeat_timeout_seconds=300,
        )
    except ValueError as error:
        raise HostsError(
            f"--coordinator={where.coordinator}: JAX finds no TPU slice, Slurm or MPI job here "
            f"({error}); give --coordinator=HOST:PORT, --processes and --process"
        ) from error
    finally:
        limit.cancel()
    # Not jax.process_count(): it looks for devices, before run.py says which are the trainer's.
    return Peers() if distributed.global_state.num_processes > 1 else None


def _nobody_came(where: Place, waited_s: float) -> None:
    count = "" if where.processes is None else f" of the {where.processes}"
    print(
        f"telescope_jax: not all{count} trainer processes came to {where.coordinator} within "
        f"{waited_s:g} s; start each of them, with the same --coordinator, which all can reach",
        file=sys.stderr,
    )
    leave(PEER_EXIT_CODE)


def _check_port(coordinator: str) -> None:
    port = int(coordinator.rpartition(":")[2])
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:  # jax 0.10.2 dies of it, without a word
            raise HostsError(
                f"--coordinator={coordinator}: process 0 cannot listen on port {port} here: "
                f"{error.strerror}; choose another port, for all processes"
            ) from error


class Peers:
    """The processes of this trainer, seen from one of them."""

    def __init__(
        self, *, patience_s: float = 12.0, beat_s: float = _BEAT_S, store: Any = None
    ) -> None:
        """
        Args:
          patience_s: without a sign of life for so long, a process counts as dead.
          beat_s: seconds between two of them.
          store: the coordination service's client; None is the one that `join` made.
        """
        runtime = distributed.global_state
        self.count, self.index = runtime.num_processes, runtime.process_id
        self.on_stop: Callable[[int], object] | None = None
        self.on_death: Callable[[str, int], object] | None = None
        self._store: Any = store or distributed.global_state.client
        self._beat_s, self._patience = beat_s, max(2, round(patience_s / beat_s))
        self._commands = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="peers", daemon=True)
        self.tell(
            f"who/{self.index}", f"process {self.index} ({socket.gethostname()}, pid {os.getpid()})"
        )
        self._thread.start()

    @property
    def leads(self) -> bool:
        """Whether this process orchestrates."""
        return self.index == 0

    # Small words

    def tell(self, key: str, value: str) -> None:
        """Leaves a value for the others; a later one replaces it."""
        self._store.key_value_set(f"telescope/{key}", value, allow_overwrite=True)

    def hear(self, key: str) -> str:
        """Waits for a value; the watch ends the process if nobody is left to give it."""
        while True:
            try:
                return self._store.blocking_key_value_get(f"telescope/{key}", _POLL_MS)
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise HostsError(f"process 0 does not answer: {error}") from error

    def command(self, kind: str, **values: Any) -> None:
        """Process 0 only: the next thing that every process does."""
        self.tell(f"command/{self._commands}", json.dumps({"kind": kind, **values}))
        self._commands += 1
        if (old := self._commands - _COMMANDS_KEPT) >= 0:
            self._store.key_value_delete(f"telescope/command/{old}")

    def next_command(self) -> dict[str, Any]:
        """The others: waits for it."""
        found = json.loads(self.hear(f"command/{self._commands}"))
        self._commands += 1
        return found

    def agree(self, name: str, facts: Mapping[str, str], *, timeout_s: float = 600.0) -> None:
        """Returns once every process has said the same.

        Raises:
          HostsError: they differ; names each fact, and what each process says of it.
        """
        self.tell(f"agree/{name}/{self.index}", json.dumps(dict(facts)))
        self._store.wait_at_barrier(f"telescope/agree/{name}", int(timeout_s * 1_000))
        said = {
            index: json.loads(self.hear(f"agree/{name}/{index}")) for index in range(self.count)
        }
        differences = []
        for fact in sorted({fact for one in said.values() for fact in one}):
            by_value: dict[str, list[int]] = {}
            for index, one in said.items():
                by_value.setdefault(one.get(fact, "nothing"), []).append(index)
            if len(by_value) > 1:
                words = " but ".join(f"{v} on process {_few(who)}" for v, who in by_value.items())
                differences.append(f"{fact} is {words}")
        if differences:
            raise HostsError(
                f"the processes of this trainer differ: {'; '.join(differences)}; start the same "
                "code with the same flags everywhere"
            )

    # The end

    def ask_to_stop(self, number: int) -> None:
        """A follower was asked to end: process 0 decides, for all."""
        self.tell(f"stop/{self.index}", str(number))

    def end(self) -> None:
        """An end that all processes reach together."""
        self._store.wait_at_barrier("telescope/end", 600_000)
        self._ended.set()  # not before: the others take a silent process for a dead one
        self._thread.join()
        jax.distributed.shutdown()

    def give_up(self, code: int, words: str) -> NoReturn:
        """An end that the others do not expect: leaves them `words`, and ends the process."""
        try:
            self.tell(f"last_words/{self.index}", json.dumps({"code": code, "words": words}))
            if self.leads:
                time.sleep(_LEAVE_S)  # the service dies with this process; let them read it first
        except jax.errors.JaxRuntimeError as error:
            log.warning("the other processes could not be told: %s", error)
        leave(code)

    def _watch(self) -> None:
        beats: dict[int, tuple[str, int]] = {}  # process -> (its last beat, rounds since)
        number, asked = 0, False
        while not self._ended.wait(self._beat_s):
            number += 1
            try:
                self.tell(f"beat/{self.index}", str(number))
                words = self._all("last_words")
                now = self._all("beat")
                stop = self._all("stop") if self.leads else {}
            except jax.errors.JaxRuntimeError as error:
                self._die(f"process 0 does not answer any more: {error}", PEER_EXIT_CODE)
            for index, text in words.items():
                if index != self.index:
                    last = json.loads(text)
                    code = last["code"] if index == 0 else PEER_EXIT_CODE
                    self._die(f"{self.who(index)} failed: {last['words']}", code)
            for index in range(self.count):
                beat, rounds = beats.get(index, ("", 0))
                # In rounds of our own: a machine that stood still has missed nobody's beats.
                same = now.get(index, "") == beat
                beats[index] = (now.get(index, ""), rounds + 1 if same else 0)
                # One that has not begun yet is waited for by whoever needs it, not here.
                if beat and index != self.index and beats[index][1] >= self._patience:
                    silence = f"no sign of life for {self._patience * self._beat_s:.0f} s"
                    self._die(f"{self.who(index)} died: {silence}", PEER_EXIT_CODE)
            if stop and not asked and self.on_stop:
                asked = True
                index, text = min(stop.items())
                log.warning("%s was asked to stop", self.who(index))
                self.on_stop(int(text))

    def who(self, index: int) -> str:
        """`process 1 (host, pid 123)`."""
        return self._all("who").get(index, f"process {index}")

    def _all(self, key: str) -> dict[int, str]:
        prefix = f"telescope/{key}/"
        found = self._store.key_value_dir_get(prefix)
        return {int(name.rpartition("/")[2]): value for name, value in found}

    def _die(self, words: str, code: int) -> NoReturn:
        log.error("%s; this process (%d) ends, with code %d", words, self.index, code)
        print(f"telescope_jax: process {self.index}: {words}", file=sys.stderr, flush=True)
        if self.on_death:
            self.on_death(words, code)
        if self.leads:
            # So that the others learn the name, before the service goes down with this process.
            self.tell(f"last_words/{self.index}", json.dumps({"code": code, "words": words}))
            time.sleep(_LEAVE_S)
        leave(code)


def leave(code: int) -> NoReturn:
    """Ends the process at once: a collective that waits for a dead one cannot be interrupted."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _few(indices: list[int]) -> str:
    shown = ", ".join(map(str, indices[:8]))
    return shown + (f" and {len(indices) - 8} more" if len(indices) > 8 else "")
