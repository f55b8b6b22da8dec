"""Checkpoints of a run: one orbax Composite a step, written in the background, whole or not there.

    checkpoints/step_000050/   params  opt_state  [reference]  [held]    arrays
                               host        JSON: step, names of the items, state of the host

Orbax writes into a temporary folder and renames it once everything is on disk, so a save that was
cut never looks finished. A folder that was damaged later is passed over, by name, for the newest
one before it; a checkpoint of another model is an error instead, since an older one is no better.

A failed background save is raised by the next call (CK-03). Deleting old checkpoints is
housekeeping: what cannot be deleted is a warning and is tried again (CK-09).
"""

import logging
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from telescope_jax import orbax_saves
from telescope_jax.learner.learner import check_structure
from telescope_jax.types import Params

T = TypeVar("T")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Restored:
    """What a checkpoint holds.

    Attributes:
      step: completed steps.
      state: for `Trainer.restore`.
      host: the JSON that was saved with it.
      held: the tree of host arrays that was saved with it; None if there was none.
    """

    step: int
    state: Mapping[str, Any]
    host: Mapping[str, Any]
    held: Any


class Damaged(Exception):
    """A checkpoint that cannot be read; the message says what is wrong with it."""


class Checkpoints:
    """The checkpoints of one run.

    Every method may block on the disk; call them from a thread beside the event loop, one at a
    time. `save` returns as soon as the arrays are copied off the devices.
    """

    def __init__(self, folder: str | Path, *, keep_last: int):
        """
        Args:
          folder: is made when needed.
          keep_last: newest checkpoints that stay, ≥ 1.
        """
        self._folder, self._keep_last = Path(folder).absolute(), keep_last
        self._writer = _new_writer()

    def steps(self) -> list[int]:
        """Steps of the finished checkpoints, oldest first; one damaged later is among them."""
        if not self._folder.is_dir():
            return []
        entries = {
            int(match[1]): entry
            for entry in self._folder.iterdir()
            if (match := re.fullmatch(r"step_(\d+)", entry.name))
        }
        finished = ocp.utils.is_checkpoint_finalized
        return sorted(step for step, entry in entries.items() if finished(entry))

    def save(
        self, state: Mapping[str, Any], *, host: Mapping[str, Any] | None = None, held: Any = None
    ) -> None:
        """Starts writing a checkpoint; at most one is written at a time.

        Args:
          state: what `Trainer.save` gave.
          host: JSON values of the host: prompt cursor, ledger, uids.
          held: nested dicts of numpy arrays, such as the tokens of held groups.

        Raises:
          Exception: an earlier save failed in the background, with its own error.
        """
        self.wait()
        step = int(state["step"])
        items: dict[str, Any] = {
            name: ocp.args.StandardSave(tree) for name, tree in state.items() if name != "step"
        }
        if held:
            items["held"] = ocp.args.StandardSave(held)
        written = {"step": step, "items": sorted(items), "host": dict(host or {})}
        items["host"] = ocp.args.JsonSave(written)
        self._folder.mkdir(parents=True, exist_ok=True)
        # force: this step's folder may be there, damaged, from the run that is being resumed.
        with orbax_saves.BEGINNING:
            self._writer.save(self._path(step), ocp.args.Composite(**items), force=True)

    def wait(self) -> None:
        """Returns once the save in progress is committed, and deletes what is too old.

        Raises:
          Exception: the save failed.
        """
        try:
            self._writer.wait_until_finished()
        except Exception:
            # Orbax raises one failure for ever; a save after it needs a writer of its own.
            self._writer = _new_writer()
            raise
        # Of several processes one deletes: two would race for the same folders (CK-09).
        for step in self.steps()[: -self._keep_last] if jax.process_index() == 0 else []:
            try:
                shutil.rmtree(self._path(step))
            except OSError as error:
                _log.warning("checkpoint of step %d could not be deleted: %s", step, error)

    def restore(self, structure: Mapping[str, Any], *, step: int | None = None) -> Restored | None:
        """The newest whole checkpoint, or None if there is none.

        Args:
          structure: shapes, dtypes and shardings to read the arrays into: `save_structure()` of
            the learner. The mesh may differ from the one that saved.
          step: this one and no other.

        Raises:
          ValueError: the checkpoint is of another model or optimizer; lists every difference. Or
            the step asked for is not there or damaged.
        """
        return self._newest(lambda step: self._read(step, structure), step)

    def restore_params(
        self, structure: Params, *, step: int | None = None
    ) -> tuple[int, Params] | None:
        """Step and parameters of the newest whole checkpoint, whatever optimizer it was saved with.

        Args:
          structure: shapes, dtypes and shardings of the parameters.
          step: this one and no other.

        Raises:
          ValueError: as `restore`.
        """

        def read(step: int) -> tuple[int, Params]:
            path = self._path(step)
            check_structure(_metadata(path / "params"), structure, str(path))
            return step, _load(path, {"params": ocp.args.StandardRestore(structure)})["params"]

        return self._newest(read, step)

    def close(self) -> None:
        """Waits for the save in progress.

        Raises:
          Exception: the save failed.
        """
        try:
            self.wait()
        finally:
            self._writer.close()

    def _newest(self, read: Callable[[int], T], step: int | None) -> T | None:
        if step is not None:
            if step not in self.steps():
                raise ValueError(f"no checkpoint of step {step}; there are {self.steps()}")
            try:
                return read(step)
            except Damaged as error:
                raise ValueError(f"the checkpoint of step {step} is damaged: {error}") from error
        for candidate in reversed(self.steps()):
            try:
                return read(candidate)
            except Damaged as error:
                _log.warning("passed over %s: %s", self._path(candidate), error)
        return None

    def _path(self, step: int) -> Path:
        return self._folder / f"step_{step:06d}"

    def _read(self, step: int, structure: Mapping[str, Any]) -> Restored:
        path = self._path(step)
        written = _load(path, {"host": ocp.args.JsonRestore()})["host"]
        if absent := [name for name in written["items"] if not (path / name).is_dir()]:
            raise Damaged(f"it lacks {', '.join(absent)}")
        arrays = {name: tree for name, tree in structure.items() if name != "step"}
        # An item that is not expected has no structure to compare with; reading `held` needs none.
        found = {name: _metadata(path / name) for name in written["items"] if name != "held"}
        check_structure(found, arrays, str(path))

        wanted: dict[str, Any] = {n: ocp.args.StandardRestore(t) for n, t in arrays.items()}
        if "held" in written["items"]:
            wanted["held"] = ocp.args.StandardRestore()
        loaded = _load(path, wanted)
        state = {name: loaded[name] for name in arrays}
        return Restored(
            step=written["step"],
            state={**state, "step": np.asarray(written["step"], np.int32)},
            host=written["host"],
            held=loaded.get("held"),
        )


def _new_writer() -> ocp.AsyncCheckpointer:
    who = orbax_saves.by_all()
    options = ocp.CompositeOptions(multiprocessing_options=who)
    return ocp.AsyncCheckpointer(
        ocp.CompositeCheckpointHandler(composite_options=options), multiprocessing_options=who
    )


def _load(path: Path, items: Mapping[str, Any]) -> Mapping[str, Any]:
    try:
        who = orbax_saves.by_all()
        options = ocp.CompositeOptions(multiprocessing_options=who)
        handler = ocp.CompositeCheckpointHandler(composite_options=options)
        with ocp.Checkpointer(handler, multiprocessing_options=who) as reader:
            return dict(reader.restore(path, ocp.args.Composite(**items)).items())
    # Orbax and tensorstore document no errors of their own: a cut file has come out as ValueError,
    # KeyError, FileNotFoundError and JSONDecodeError. All mean that it cannot be read.
    except Exception as error:
        raise Damaged(f"{type(error).__name__}: {error}") from error


def _metadata(path: Path) -> Any:
    try:
        return ocp.StandardCheckpointHandler().metadata(epath.Path(path)).tree
    except Exception as error:  # as in _load
        raise Damaged(f"{path.name}: {type(error).__name__}: {error}") from error
