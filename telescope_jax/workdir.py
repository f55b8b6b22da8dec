"""The folder of a run: files first, so that a crash loses at most one flush.

    run.json config.json lock metrics/ events/ rollouts/ checkpoints/ weights/ logs/

A folder that holds a run is resumed, by one process at a time, with a configuration that still
describes the same run.
"""

import fcntl
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from telescope_jax import config_tree
from telescope_jax.config import Config
from telescope_jax.log_lines import logging_to

log = logging.getLogger(__name__)

SAME_RUN = (
    "seed",
    "groups_per_batch",
    "group_size",
    "env.name",
    "env.seed",
    "env.terms",
    "env.digits",
    "env.options",
    "policy.checkpoint",
    "policy.chat_template",
    "policy.family",
    "policy.vocab_size",
    "policy.width",
    "policy.layers",
    "policy.heads",
    "policy.kv_heads",
    "policy.head_dim",
    "policy.mlp_width",
    "policy.tied_embeddings",
    "policy.rope_theta",
    "policy.norm_eps",
    "optimizer.master_dtype",
    "loss.reference_kl_coef",
)
"""Fields that a resumed run cannot change: prompts, books or parameters would no longer fit."""


HOUSE = {"lock", "metrics", "events", "config.json", ".config.json.new", ".run.json.new"}
"""What a run writes before its run.json."""
SERVERS_HOUSE = {"engines", "logs"}
"""What servers that are started before the run (`--role=inference`) write."""


class WorkdirError(RuntimeError):
    """The folder cannot hold this run; the message says what to do."""


class Workdir:
    """An open run folder, locked until `close`."""

    def __init__(self, path: Path, *, resumed: bool) -> None:
        self.path = path
        self.resumed = resumed
        self.finished_steps: int | None = None
        """Steps of the run that the folder held when it was opened; None if it had not finished."""
        self.log_file = path / "logs" / "main.log"
        self.metrics_file = path / "metrics" / "metrics.jsonl"
        self.checkpoints = path / "checkpoints"
        self.weights = path / "weights"
        self._lock = (path / "lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise WorkdirError(
                f"{path} is in use by another run; wait for it or choose another --workdir"
            ) from None
        for folder in ("metrics", "events", "logs"):
            (path / folder).mkdir(exist_ok=True)
        self._events = (path / "events" / "events.jsonl").open("a", buffering=1)

    @classmethod
    def open(cls, path: str | Path, config: Config, config_file: str) -> "Workdir":
        """Makes the folder, or takes up the run that it holds.

        Raises:
          WorkdirError: it holds something else, another configuration, or a run that is going on.
        """
        path = Path(path).resolve()
        try:
            path.mkdir(parents=True, exist_ok=True)
            resumed = (path / "run.json").exists()
            # A start that was killed early leaves an empty house, which is no other run's.
            foreign = {entry.name for entry in path.iterdir()} - HOUSE - SERVERS_HOUSE
            if not resumed and foreign:
                raise WorkdirError(
                    f"{path} holds no run (no run.json) and other things ({min(foreign)}); choose "
                    "another --workdir"
                )
            workdir = cls(path, resumed=resumed)
        except OSError as error:
            raise WorkdirError(f"{path} cannot be used: {error}") from error
        try:
            if resumed:
                workdir._check_same_run(config)
                notes = workdir._notes()
                if notes.get("state") == "finished":
                    workdir.finished_steps = notes.get("step")
            workdir._write("config.json", config_tree.to_json(config))
            # An end is not on record until this life has one: a launcher reads the code.
            workdir.note(
                config_file=config_file,
                pid=os.getpid(),
                state="running",
                exit_code=None,
                died=None,
            )
        except OSError as error:
            workdir.close()
            raise WorkdirError(f"{path} cannot be written to: {error}") from error
        except BaseException:
            workdir.close()
            raise
        return workdir

    def note(self, **values: Any) -> None:
        """Adds to run.json, atomically; None takes away."""
        notes = {name: v for name, v in (self._notes() | values).items() if v is not None}
        self._write("run.json", json.dumps(notes, indent=2) + "\n")

    def note_end(self, exit_code: int) -> None:
        """How the run ended; a disk without room for that is a warning."""
        try:
            self.note(state="finished" if exit_code == 0 else "stopped", exit_code=exit_code)
        except (OSError, WorkdirError) as error:
            print(f"telescope_jax: run.json was not written: {error}", file=sys.stderr)

    def event(self, name: str, details: Mapping[str, Any]) -> None:
        """Appends one line to events/events.jsonl; a full disk is a warning."""
        try:
            line = {"time": round(time.time(), 3), "event": name, **details}
            self._events.write(json.dumps(line) + "\n")
        except OSError as error:
            log.warning("event %s was not written: %s", name, error)

    @contextmanager
    def logging(self, say: Callable[[str], None]) -> Iterator[None]:
        """Sends every log line to logs/main.log, and what a person needs to `say`; then closes."""
        try:
            with logging_to(self.log_file, say):
                yield
        finally:
            self.close()

    def close(self) -> None:
        """Gives the lock back."""
        with suppress(OSError):  # what a full disk did not take is still in its buffer
            self._events.close()
        self._lock.close()

    def _notes(self) -> dict[str, Any]:
        path = self.path / "run.json"
        try:
            notes = json.loads(path.read_text()) if path.exists() else {"started": time.time()}
        except ValueError as error:
            raise WorkdirError(f"{path} is not JSON ({error}); repair it, or remove it") from error
        if not isinstance(notes, dict):
            raise WorkdirError(f"{path} holds no JSON object; repair it, or remove it")
        return notes

    def _check_same_run(self, config: Config) -> None:
        try:
            before = config_tree.from_json((self.path / "config.json").read_text(), Config)
        except (OSError, ValueError) as error:
            raise WorkdirError(f"{self.path}/config.json cannot be read: {error}") from error
        changed = []
        for field in SAME_RUN:
            old, new = config_tree.get_value(before, field), config_tree.get_value(config, field)
            if old != new:
                changed.append(f"{field}={new}, the run has {old}")
        if changed:
            raise WorkdirError(
                f"{self.path} holds a run of another configuration: {'; '.join(changed)}; "
                "choose another --workdir, or give the flags that the run was started with"
            )

    def _write(self, name: str, text: str) -> None:
        new = self.path / f".{name}.new"
        new.write_text(text)
        new.replace(self.path / name)
