"""The store of published versions: where the trainer leaves weights and engines fetch them.

Invariants:
- a version exists for others only once its commit is done: whatever dies before leaves none;
- what `read` returns is what was published, bit for bit, or an error that says so: every tensor
  carries a fingerprint, and a `WeightsRef` the fingerprint over all of them;
- housekeeping never fails a run: a deletion that fails is a warning, tried again at the next prune.

A version is one orbax checkpoint, `<root>/<version>/`, with two items: `weights`, a flat mapping
name -> array without OCDBT (one folder a tensor: twice as fast to write as OCDBT here) and without
compression (it took half of a save, for a fifth of the bytes), and `metadata`, JSON. Names are the
parameter's own path joined by dots, "layers.0.attention.q.kernel". The seam for other names and
layouts (Hugging Face's, `hf_layout.py`) is the pair `to_served` and `from_served`: the first runs
inside the jitted cast.
"""

import asyncio
import hashlib
import logging
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from telescope_jax import orbax_saves
from telescope_jax.tensorstore_json import free_what_tensorstore_keeps
from telescope_jax.types import Params, WeightsRef

log = logging.getLogger(__name__)

_VERSION = re.compile(r"\d{8}")
_LEFTOVER = re.compile(r"\d{8}\.(deleted|orbax-checkpoint-tmp).*")


class WeightsError(RuntimeError):
    """A version cannot be read: it is gone, or it is not what was published."""


def flatten(params: Params, prefix: str = "") -> dict[str, Any]:
    """Nested dicts of arrays as one flat dict; a leaf's name is its keys joined by dots.

    Raises:
      ValueError: a key holds a dot, so that the name could not be taken apart again.
    """
    flat: dict[str, Any] = {}
    for key, value in params.items():
        if "." in key:
            raise ValueError(f"parameter key {key!r} holds a dot; rename it")
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def unflatten(flat: Mapping[str, Any]) -> Params:
    """The inverse of `flatten`."""
    tree: dict[str, Any] = {}
    for name, value in flat.items():
        *path, leaf = name.split(".")
        node = tree
        for key in path:
            node = node.setdefault(key, {})
        node[leaf] = value
    return tree


def tensor_fingerprint(array: np.ndarray) -> str:
    """SHA-256 of dtype, shape and bytes, so that a reshape or a cast is another tensor."""
    digest = hashlib.sha256(f"{array.dtype}{array.shape}".encode())
    # uint8 view: bfloat16 has no buffer protocol of its own.
    digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def overall_fingerprint(tensors: Mapping[str, str]) -> str:
    """SHA-256 over names and tensor fingerprints, whatever their order."""
    lines = "".join(f"{name} {tensors[name]}\n" for name in sorted(tensors))
    return hashlib.sha256(lines.encode()).hexdigest()


class OrbaxStore:
    """Versions on a file system or an object store. One writer; any number of readers."""

    def __init__(
        self,
        root: epath.PathLike,
        serving_dtype: Literal["float32", "bfloat16"] = "float32",
        *,
        to_served: Callable[[Params], Mapping[str, jax.Array]] = flatten,
        from_served: Callable[[Mapping[str, np.ndarray]], Params] = unflatten,
    ):
        """
        Args:
          root: folder of the versions; made at the first publish.
          serving_dtype: what floating-point parameters are cast to.
          to_served: parameters -> served names and layouts; traced.
          from_served: the inverse, on numpy arrays.
        """
        free_what_tensorstore_keeps()
        self.root = epath.Path(root)
        self.serving_dtype: Literal["float32", "bfloat16"] = serving_dtype
        self._from_served = from_served
        self.cast = jax.jit(lambda params: _cast(to_served(params), jnp.dtype(serving_dtype)))
        logging.getLogger("absl").addFilter(_not_about_ocdbt)
        # One thread: publishing and pruning never overlap, and the event loop lives meanwhile.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weights")

    async def publish(self, version: int, params: Params) -> WeightsRef:
        """Writes `params` as `version` and returns once it is committed.

        Publishing the same bits again writes nothing; other bits replace what a run that was
        resumed from an earlier step left behind.
        """
        run = asyncio.get_running_loop().run_in_executor
        return await run(self._thread, self._publish, version, params)

    def latest(self) -> WeightsRef | None:
        """The newest committed version; one with unreadable metadata is passed over, and named."""
        for version in reversed(self.versions()):
            try:
                fingerprint = self._metadata(version)["fingerprint"]
            except Exception as error:
                log.warning("weights of version %d are passed over: %s", version, error)
                continue
            return WeightsRef(version, str(self._path(version)), fingerprint)
        return None

    def versions(self) -> list[int]:
        """Committed versions, lowest first."""
        if not self.root.exists():
            return []
        found = [path for path in self.root.iterdir() if _VERSION.fullmatch(path.name)]
        return sorted(int(path.name) for path in found if ocp.utils.is_checkpoint_finalized(path))

    def elsewhere(self) -> Mapping[str, Any]:
        """How another process opens this store: module, class, keyword arguments."""
        arguments = {"root": str(self.root), "serving_dtype": self.serving_dtype}
        return {"module": __name__, "class": type(self).__name__, "arguments": arguments}

    def read(self, ref: WeightsRef) -> Params:
        """The parameters of `ref` as numpy arrays in the serving dtype. Blocks.

        Raises:
          WeightsError: the version is gone, cannot be read, or differs from what was published.
        """
        path = epath.Path(ref.path)
        try:
            checkpointer = _checkpointer()
            metadata = checkpointer.restore(
                path, ocp.args.Composite(metadata=ocp.args.JsonRestore())
            ).metadata
            tensors = metadata["tensors"]
            as_numpy = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in tensors}
            flat = checkpointer.restore(
                path, ocp.args.Composite(weights=ocp.args.PyTreeRestore(restore_args=as_numpy))
            ).weights
        except Exception as error:
            gone = "is gone" if not path.exists() else f"cannot be read ({error})"
            raise WeightsError(
                f"version {ref.version} at {path} {gone}; load latest() instead"
            ) from error
        self._verify(ref, tensors, flat)
        return self._from_served(flat)

    async def prune(self, keep: Sequence[int]) -> None:
        """Deletes the versions not in `keep` and what dead writers left; never raises."""
        run = asyncio.get_running_loop().run_in_executor
        await run(self._thread, self.prune_now, frozenset(keep))

    def close(self) -> None:
        """Waits for the writes under way."""
        self._thread.shutdown(wait=True)

    def _publish(self, version: int, params: Params) -> WeightsRef:
        flat = {name: np.asarray(array) for name, array in self.cast(params).items()}
        tensors = {name: tensor_fingerprint(array) for name, array in flat.items()}
        ref = self.ref(version, tensors)
        if not self.holds(ref):
            with orbax_saves.BEGINNING:
                items = self.items(version, flat, tensors)
                _checkpointer().save(epath.Path(ref.path), items, force=True)
        return ref

    def ref(self, version: int, tensors: Mapping[str, str]) -> WeightsRef:
        """What `version` is called once it is written, from the fingerprints of its tensors."""
        return WeightsRef(version, str(self._path(version)), overall_fingerprint(tensors))

    def holds(self, ref: WeightsRef) -> bool:
        """Whether these very bits are committed under this version."""
        if not self._path(ref.version).exists():
            return False
        try:
            return self._metadata(ref.version)["fingerprint"] == ref.fingerprint
        except Exception as error:
            log.warning("version %d is written anew: %s", ref.version, error)
            return False

    def items(
        self, version: int, served: Mapping[str, Any], tensors: Mapping[str, str]
    ) -> ocp.args.Composite:
        """What orbax is given to write."""
        self.root.mkdir(parents=True, exist_ok=True)
        metadata = {
            "version": version,
            "fingerprint": overall_fingerprint(tensors),
            "tensors": dict(tensors),
            "dtype": self.serving_dtype,
        }
        return ocp.args.Composite(
            weights=ocp.args.PyTreeSave(dict(served)), metadata=ocp.args.JsonSave(metadata)
        )

    def _verify(
        self, ref: WeightsRef, tensors: Mapping[str, str], flat: Mapping[str, np.ndarray]
    ) -> None:
        found = {name: tensor_fingerprint(array) for name, array in flat.items()}
        damaged = sorted(n for n in tensors if found.get(n) != tensors[n])
        if damaged:
            raise WeightsError(
                f"version {ref.version} at {ref.path} is damaged: {len(damaged)} of "
                f"{len(tensors)} tensors differ from what was published, first {damaged[0]}"
            )
        if overall_fingerprint(found) != ref.fingerprint:
            raise WeightsError(
                f"version {ref.version} at {ref.path} was replaced: its fingerprint is "
                f"{overall_fingerprint(found)[:12]}, the one asked for is {ref.fingerprint[:12]}"
            )

    def _metadata(self, version: int) -> Mapping[str, Any]:
        only_metadata = ocp.args.Composite(metadata=ocp.args.JsonRestore())
        return _checkpointer().restore(self._path(version), only_metadata).metadata

    def _path(self, version: int) -> epath.Path:
        return self.root / f"{version:08d}"

    def prune_now(self, keep: frozenset[int]) -> None:
        """`prune`, in the calling thread; nothing may be published meanwhile."""
        try:
            paths = list(self.root.iterdir()) if self.root.exists() else []
        except OSError as error:
            log.warning("cannot list %s, pruned later: %s", self.root, error)
            return
        for path in paths:
            if _VERSION.fullmatch(path.name) and int(path.name) not in keep:
                _delete(path, rename_first=True)
            elif _LEFTOVER.fullmatch(path.name):
                _delete(path, rename_first=False)


class MemoryStore:
    """Versions as the very arrays that were published: for engines in the trainer's process."""

    def __init__(self):
        self._versions: dict[int, Params] = {}

    async def publish(self, version: int, params: Params) -> WeightsRef:
        """Keeps a reference; the trainer must not donate `params`."""
        self._versions[version] = params
        return self._ref(version)

    def latest(self) -> WeightsRef | None:
        return self._ref(max(self._versions)) if self._versions else None

    def elsewhere(self) -> None:
        """No other process can read this memory."""
        return None

    def read(self, ref: WeightsRef) -> Params:
        """The arrays of `ref`.

        Raises:
          WeightsError: the version was pruned.
        """
        if ref.version not in self._versions:
            raise WeightsError(f"version {ref.version} is gone from memory; load latest() instead")
        return self._versions[ref.version]

    async def prune(self, keep: Sequence[int]) -> None:
        self._versions = {v: params for v, params in self._versions.items() if v in keep}

    def _ref(self, version: int) -> WeightsRef:
        return WeightsRef(version, f"memory:{version}", f"memory:{version}")


def handlers(who: orbax_saves.Processes) -> ocp.CompositeCheckpointHandler:
    """How orbax reads and writes a version, and in which processes."""
    return ocp.CompositeCheckpointHandler(
        composite_options=ocp.CompositeOptions(multiprocessing_options=who),
        weights=ocp.PyTreeCheckpointHandler(
            use_ocdbt=False, use_compression=False, multiprocessing_options=who
        ),
        metadata=ocp.JsonCheckpointHandler(multiprocessing_options=who),
    )


def _checkpointer() -> ocp.Checkpointer:
    who = orbax_saves.by_this_one()
    return ocp.Checkpointer(handlers(who), multiprocessing_options=who)


def _not_about_ocdbt(record: logging.LogRecord) -> bool:
    """Drops orbax's warning, at every save without OCDBT, that there is no OCDBT to merge."""
    return "Skipping merge of OCDBT" not in str(record.msg)


def _cast(served: Mapping[str, jax.Array], dtype: jnp.dtype) -> dict[str, jax.Array]:
    return {
        name: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x
        for name, x in served.items()
    }


def _delete(path: epath.Path, *, rename_first: bool) -> None:
    """Deletes a folder; gone already is done, any other failure is a warning."""
    try:
        if rename_first:
            # A deletion that stops half-way must not leave half a version under its name.
            doomed = path.parent / f"{path.name}.deleted-{uuid.uuid4().hex[:8]}"
            path.rename(doomed)
            path = doomed
        path.rmtree()
    except FileNotFoundError:
        return
    except Exception as error:
        log.warning("cannot delete %s, tried again at the next prune: %s", path, error)
