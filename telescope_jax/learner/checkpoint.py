"""Checkpoints of a run: one orbax Composite a step, written in the background, whole or not there.

    checkpoints/step_000050/   params  opt_state  [reference]  [held]  [evals]     arrays
                               host        JSON: format, step, items, state of the host, and the
                                           fingerprint of every array and of itself

Orbax writes into a temporary folder and renames it once everything is on disk, so a save that was
cut never looks finished. What is read is compared with its fingerprints: a folder that was damaged
later is passed over, by name, for the newest one before it; a checkpoint of another model is an
error instead, since an older one is no better.

A step that is saved again goes beside its folder, as step_000050.1, and the older one is deleted
once the newer is there. Nothing is deleted before a newer one is committed, so what a run was
resumed from stays until then; one that another process reads stays until it has been read.

A failed background save is raised by the next call (CK-03). Deleting old checkpoints is
housekeeping: what cannot be deleted is a warning and is tried again (CK-09).
"""

import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from telescope_jax import orbax_saves
from telescope_jax.learner.fingerprint import differences, fingerprints
from telescope_jax.learner.learner import check_structure
from telescope_jax.tensorstore_json import free_what_tensorstore_keeps
from telescope_jax.types import Params

T = TypeVar("T")

_log = logging.getLogger(__name__)

FORMAT = 1
"""Of the folders that this version writes, and the only one that it reads."""

_NAME = re.compile(r"step_(\d+)(?:\.(\d+))?")
_LEFTOVER = re.compile(r"step_\d+(\.\d+)?\.(deleted|orbax-checkpoint-tmp).*")


@dataclass(frozen=True, slots=True)
class Restored:
    """What a checkpoint holds.

    Attributes:
      step: completed steps.
      state: for `Trainer.restore`.
      host: the JSON that was saved with it.
      held: the tree of host arrays that was saved with it; None if there was none.
      evals: parameters of the versions whose evals were due and not done.
    """

    step: int
    state: Mapping[str, Any]
    host: Mapping[str, Any]
    held: Any
    evals: Mapping[int, Params] = field(default_factory=dict)


class _Folder(NamedTuple):
    """A finished checkpoint; `take` counts the saves of one step."""

    step: int
    take: int
    path: Path


class SaveFailed(RuntimeError):
    """A checkpoint was not written, and the run shall not go on without."""


class Damaged(Exception):
    """A checkpoint that cannot be read; the message says what is wrong with it."""


class Checkpoints:
    """The checkpoints of one run.

    Every method may block on the disk; call them from a thread beside the event loop, one at a
    time. `save` returns as soon as the arrays are copied off the devices.
    """

    def __init__(self, folder: str | Path, *, keep_last: int, keep_every: int = 0):
        """
        Args:
          folder: is made when needed.
          keep_last: newest checkpoints that stay, ≥ 1.
          keep_every: those of its multiples stay too; 0 = none.
        """
        free_what_tensorstore_keeps()
        self._folder = Path(folder).absolute()
        self._keep_last, self._keep_every = keep_last, keep_every
        self._writer = _new_writer()
        self._saving: Path | None = None
        self._passed_over: set[Path] = set()

    def steps(self) -> list[int]:
        """Steps of the finished checkpoints, oldest first; one damaged later is among them."""
        return sorted({folder.step for folder in self._finished()})

    def save(
        self,
        state: Mapping[str, Any],
        *,
        host: Mapping[str, Any] | None = None,
        held: Any = None,
        evals: Mapping[int, Params] | None = None,
        name: str = "",
    ) -> None:
        """Starts writing a checkpoint; at most one is written at a time.

        Args:
          state: what `Trainer.save` gave; with `step` and `params` alone it keeps weights only.
          host: JSON values of the host: prompt cursor, ledger, uids.
          held: nested dicts of numpy arrays, such as the tokens of held groups.
          evals: parameters by version.
          name: what `next_name` said to process 0 of several.

        Raises:
          Exception: an earlier save failed in the background, with its own error.
        """
        self.wait()
        step = int(state["step"])
        trees = {name: tree for name, tree in state.items() if name != "step"}
        if held:
            trees["held"] = held
        if evals:
            trees["evals"] = {str(version): params for version, params in evals.items()}
        written = {
            "format": FORMAT,
            "step": step,
            "items": sorted(trees),
            "arrays": {name: fingerprints(tree) for name, tree in trees.items()},
            "host": dict(host or {}),
        }
        items: dict[str, Any] = {n: ocp.args.StandardSave(tree) for n, tree in trees.items()}
        items["host"] = ocp.args.JsonSave(written | {"digest": _digest(written)})
        self._folder.mkdir(parents=True, exist_ok=True)
        for entry in self._folder.iterdir() if jax.process_index() == 0 else ():
            if _LEFTOVER.fullmatch(entry.name):
                _delete(entry)
        path = self._folder / (name or self.next_name(step))
        with orbax_saves.BEGINNING:
            self._writer.save(path, ocp.args.Composite(**items))
        self._saving = path

    def next_name(self, step: int) -> str:
        """Of the folder that the next save of `step` goes to; nothing is being saved now."""
        takes = [folder.take for folder in self._finished() if folder.step == step]
        return f"step_{step:06d}" + (f".{max(takes) + 1}" if takes else "")

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
            self._saving = None
            raise
        if self._saving is not None:
            self._saving = None
            if jax.process_index() == 0:  # several processes would race for the same folders
                self._retire()

    def restore(self, structure: Mapping[str, Any], *, step: int | None = None) -> Restored | None:
        """The newest whole checkpoint, or None if there is none.

        Args:
          structure: shapes, dtypes and shardings to read the arrays into: `save_structure()` of
            the learner. The mesh may differ from the one that saved.
          step: this one and no other.

        Raises:
          ValueError: the checkpoint is of another model or optimizer; lists every difference. Or
            it holds weights only, or the step asked for is not there or damaged.
        """
        return self._newest(lambda folder: _read(folder.path, structure), step)

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

        def read(folder: _Folder) -> tuple[int, Params]:
            written = _read_host(folder.path)
            check_structure(_metadata(folder.path / "params"), structure, str(folder.path))
            wanted = {"params": ocp.args.StandardRestore(structure)}
            return folder.step, _load_verified(folder.path, wanted, written)["params"]

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

    def _finished(self) -> list[_Folder]:
        if not self._folder.is_dir():
            return []
        found = [
            _Folder(int(match[1]), int(match[2] or 0), entry)
            for entry in self._folder.iterdir()
            if (match := _NAME.fullmatch(entry.name))
        ]
        return sorted(folder for folder in found if ocp.utils.is_checkpoint_finalized(folder.path))

    def _newest(self, read: Callable[[_Folder], T], step: int | None) -> T | None:
        candidates = [f for f in reversed(self._finished()) if step is None or f.step == step]
        if step is not None and not candidates:
            raise ValueError(f"no checkpoint of step {step}; there are {self.steps()}")
        reasons = []
        for folder in candidates:
            try:
                with _in_use(folder.path):
                    return read(folder)
            except Damaged as error:
                self._passed_over.add(folder.path)
                reasons.append(str(error))
                _log.warning("passed over %s: %s", folder.path, error)
        if step is not None:
            raise ValueError(f"the checkpoint of step {step} is damaged: {'; '.join(reasons)}")
        return None

    def _retire(self) -> None:
        """Deletes what the retention does not keep; the newest was just written by this process."""
        folders = self._finished()
        whole = {f.step: f.path for f in folders if f.path not in self._passed_over}
        kept = {whole[step] for step in sorted(whole)[-self._keep_last :]}
        if self._keep_every:
            kept |= {path for step, path in whole.items() if step % self._keep_every == 0}
        # One that was passed over stays while it is newer than all that is known to be whole: it
        # may hold something for a person, and nothing here reads it as the newest again.
        kept |= {f.path for f in folders if f.path in self._passed_over and f.step > max(whole)}
        for folder in folders:
            if folder.path not in kept:
                _delete(folder.path)


def _read(path: Path, structure: Mapping[str, Any]) -> Restored:
    written = _read_host(path)
    if absent := [name for name in written["items"] if not (path / name).is_dir()]:
        raise Damaged(f"it lacks {', '.join(absent)}")
    if written["items"] == ["params"] and "opt_state" in structure:
        raise ValueError(
            f"{path} holds weights only (checkpoint.save_training_state=False) and cannot be gone "
            "on from; export it, and start from there in another --workdir: policy.checkpoint=…"
        )
    arrays = {name: tree for name, tree in structure.items() if name != "step"}
    # An item that is not expected has no structure to compare with; reading `held` needs none.
    known = [name for name in written["items"] if name not in ("held", "evals")]
    check_structure({name: _metadata(path / name) for name in known}, arrays, str(path))

    wanted: dict[str, Any] = {n: ocp.args.StandardRestore(t) for n, t in arrays.items()}
    if "held" in written["items"]:
        wanted["held"] = ocp.args.StandardRestore()
    if "evals" in written["items"]:
        versions = written["arrays"]["evals"]
        evals = {name.partition("/")[0]: arrays["params"] for name in versions}
        wanted["evals"] = ocp.args.StandardRestore(evals)
    loaded = _load_verified(path, wanted, written)
    state = {name: loaded[name] for name in arrays}
    return Restored(
        step=written["step"],
        state={**state, "step": np.asarray(written["step"], np.int32)},
        host=written["host"],
        held=loaded.get("held"),
        evals={int(version): params for version, params in loaded.get("evals", {}).items()},
    )


def _read_host(path: Path) -> Mapping[str, Any]:
    written = dict(_load(path, {"host": ocp.args.JsonRestore()})["host"])
    if written.get("format") != FORMAT:
        raise Damaged(
            f"its format is {written.get('format')} and this version reads {FORMAT}; the version "
            "of telescope_jax that wrote it reads it too"
        )
    digest = written.pop("digest", None)
    if digest != _digest(written):
        raise Damaged("its host part is not what was written")
    return written


def _load_verified(
    path: Path, items: Mapping[str, Any], written: Mapping[str, Any]
) -> Mapping[str, Any]:
    loaded = dict(_load(path, items))
    if "held" in loaded:
        loaded["held"] = jax.tree.map(np.asarray, loaded["held"])
    for name, tree in loaded.items():
        expected = written["arrays"][name]
        if changed := differences(fingerprints(tree), expected):
            raise Damaged(
                f"{len(changed)} of {len(expected)} arrays of {name} are not what was written, "
                f"first {changed[0]}"
            )
    return loaded


def _digest(written: Mapping[str, Any]) -> str:
    # Through JSON once, since a tuple is written as a list.
    plain = json.loads(json.dumps(written))
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


@contextmanager
def _in_use(path: Path) -> Iterator[None]:
    """Keeps other processes from deleting a folder that is being read."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield
    finally:
        os.close(descriptor)


def _delete(path: Path) -> None:
    """Deletes a folder, unless somebody reads it; a failure is a warning, and tried again."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            doomed = path
            if _NAME.fullmatch(path.name):
                # A deletion that stops half-way leaves no half of a checkpoint under its name.
                doomed = path.with_name(f"{path.name}.deleted-{uuid.uuid4().hex[:8]}")
                path.rename(doomed)
            shutil.rmtree(doomed)
        finally:
            os.close(descriptor)
    except BlockingIOError:
        _log.info("%s is being read, and deleted later", path)
    except OSError as error:
        _log.warning("%s could not be deleted: %s", path, error)


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
