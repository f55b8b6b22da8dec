"""What process 0 hands to the orchestrator in place of trainer, store and checkpoints.

Each of the three does as its single-process namesake does, and has the other processes do the same:
it sends the command, then takes its own part. `Turn` keeps collectives in one order; what needs no
other process (hashing, waiting for a disk) happens outside of it, so an update never waits for a
version that is being written.
"""

import asyncio
import logging
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from telescope_jax import orbax_saves
from telescope_jax.hosts import batches
from telescope_jax.hosts.runtime import Peers
from telescope_jax.learner.checkpoint import Checkpoints, Restored
from telescope_jax.learner.learner import Learner
from telescope_jax.types import LossStats, PackedBatch, Params, WeightsRef
from telescope_jax.weights.store import OrbaxStore, handlers, tensor_fingerprint

log = logging.getLogger(__name__)


class Turn:
    """One command and its collectives at a time."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._lock = threading.Lock()

    @contextmanager
    def take(self, kind: str, **values: Any) -> Iterator[None]:
        """Sends the command once it is its turn; the turn ends with the block."""
        with self._lock:
            self._peers.command(kind, **values)
            yield


class SharedTrainer:
    """interfaces.Trainer: the learner of this process and those of the others, in step."""

    def __init__(
        self,
        learner: Learner,
        turn: Turn,
        rows_per_microbatch: int,
        *,
        evals: Mapping[int, Params] | None = None,
    ) -> None:
        self.learner = learner
        self._turn, self._rows = turn, rows_per_microbatch
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="trainer")
        # The others keep a version for as long as anybody here holds it, and no longer.
        versions = {**(evals or {}), learner.step: learner.params}
        self._alive: dict[int, weakref.ref] = {v: _first(p) for v, p in versions.items()}

    @property
    def step(self) -> int:
        """Completed steps."""
        return self.learner.step

    @property
    def params(self) -> Params:
        """The current version: global arrays, of which this process holds a part."""
        return self.learner.params

    async def update(self, batch: Sequence[PackedBatch]) -> LossStats:
        """Trains one step in all processes."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._update, batch)

    def save(self) -> Mapping[str, Any]:
        """Names only: SharedCheckpoints takes the arrays, in its turn."""
        return {"step": self.step, "params": None, "opt_state": None}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Not here: a run restores before it leads."""
        raise NotImplementedError("a trainer of several processes is restored before it starts")

    def close(self) -> None:
        """Waits for a running update."""
        self._thread.shutdown(wait=True)

    def _update(self, batch: Sequence[PackedBatch]) -> LossStats:
        about = batches.header(batch, self._rows)
        gone = [version for version, reference in self._alive.items() if reference() is None]
        with self._turn.take("update", about=about, forget=gone):
            for version in gone:
                del self._alive[version]
            stats = self.learner.update_now(batches.broadcast(batch, about))
            self._alive[self.learner.step] = _first(self.learner.params)
        return stats


class SharedStore:
    """interfaces.WeightStore: every process writes its own shards, process 0 commits."""

    def __init__(self, inner: OrbaxStore, turn: Turn) -> None:
        self.inner, self._turn = inner, turn
        self._writer = new_writer()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="publish")
        self._published: dict[int, WeightsRef] = {}

    async def publish(self, version: int, params: Params) -> WeightsRef:
        """Writes `params` as `version`; returns once it is committed."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._publish, version, params)

    def latest(self) -> WeightsRef | None:
        """The newest committed version."""
        return self.inner.latest()

    def read(self, ref: WeightsRef) -> Params:
        """As OrbaxStore.read: on the host, whole."""
        return self.inner.read(ref)

    def elsewhere(self) -> Mapping[str, Any]:
        """How another process opens this store."""
        return self.inner.elsewhere()

    async def prune(self, keep: Sequence[int]) -> None:
        """Deletes the versions not in `keep`; a matter of process 0 alone."""
        self._published = {v: ref for v, ref in self._published.items() if v in keep}
        # In the thread that publishes: what is half written would be taken for a dead one's.
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._thread, self.inner.prune_now, frozenset(keep))

    def close(self) -> None:
        """Waits for what is being written."""
        self._thread.shutdown(wait=True)
        self._writer.close()
        self.inner.close()

    def _publish(self, version: int, params: Params) -> WeightsRef:
        known = self._published.get(version)
        if known and epath.Path(known.path).exists():
            return known
        with self._turn.take("gather", version=version):
            served = self.inner.cast(params)
            whole = {name: np.asarray(array) for name, array in gathered(served)}
        tensors = {name: tensor_fingerprint(array) for name, array in whole.items()}
        del whole
        ref = self.inner.ref(version, tensors)
        write = not self.inner.holds(ref)
        with self._turn.take("write", version=version, tensors=tensors if write else None):
            if write:
                begin_write(self._writer, self.inner, version, served, tensors)
        self._writer.wait_until_finished()
        self._published[version] = ref
        return ref


class SharedCheckpoints:
    """Checkpoints to which every process adds its own shards."""

    def __init__(self, inner: Checkpoints, learner: Learner, turn: Turn) -> None:
        self._inner, self._learner, self._turn = inner, learner, turn

    def save(
        self,
        state: Mapping[str, Any],
        *,
        host: Mapping[str, Any] | None = None,
        held: Any = None,
        evals: Mapping[int, Params] | None = None,
    ) -> None:
        """As Checkpoints.save; the arrays come from the learner, in all processes at once."""
        self._inner.wait()
        about = {
            "whole": "opt_state" in state,
            "name": self._inner.next_name(self._learner.step),
            "held": shapes(held or {}),
            "evals": sorted(evals or {}),
        }
        with self._turn.take("checkpoint", **about):
            self._inner.save(
                part(self._learner.save(), whole=about["whole"]),
                host=host,
                held=held,
                evals=evals,
                name=about["name"],
            )

    def restore(self, structure: Mapping[str, Any], *, step: int | None = None) -> Restored | None:
        """As Checkpoints.restore."""
        return self._inner.restore(structure, step=step)

    def steps(self) -> list[int]:
        """As Checkpoints.steps."""
        return self._inner.steps()

    def wait(self) -> None:
        """As Checkpoints.wait."""
        self._inner.wait()


def gathered(served: Mapping[str, jax.Array]) -> Iterator[tuple[str, jax.Array]]:
    """Each tensor whole, one after the other: collective, and never two of them in memory."""
    for name in sorted(served):
        yield name, _replicated(served[name])


def _replicated(array: jax.Array) -> jax.Array:
    if array.is_fully_replicated:
        return array
    sharding = array.sharding
    assert isinstance(sharding, jax.sharding.NamedSharding)
    everywhere = jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec())
    return jax.jit(_same, out_shardings=everywhere)(array)


def _same(array: jax.Array) -> jax.Array:
    return array


def new_writer() -> ocp.AsyncCheckpointer:
    """Writes versions in the background, every process its own shards."""
    who = orbax_saves.by_all()
    return ocp.AsyncCheckpointer(handlers(who), multiprocessing_options=who)


def begin_write(
    writer: ocp.AsyncCheckpointer,
    store: OrbaxStore,
    version: int,
    served: Mapping[str, jax.Array],
    tensors: Mapping[str, str],
) -> None:
    """Collective; returns when the arrays are copied off the devices."""
    writer.wait_until_finished()
    ref = store.ref(version, tensors)
    with orbax_saves.BEGINNING:
        writer.save(epath.Path(ref.path), store.items(version, served, tensors), force=True)


def part(state: Mapping[str, Any], *, whole: bool) -> Mapping[str, Any]:
    """The state, or of it only what `checkpoint.save_training_state=False` keeps."""
    return state if whole else {name: state[name] for name in ("params", "step")}


def shapes(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The dtype and shape of every array of nested dicts, as JSON."""
    return {
        name: shapes(x) if isinstance(x, Mapping) else [x.dtype.str, *x.shape]
        for name, x in tree.items()
    }


def zeros(described: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays that `shapes` describes, without their values."""
    return {
        name: zeros(x) if isinstance(x, Mapping) else np.zeros(x[1:], np.dtype(x[0]))
        for name, x in described.items()
    }


def _first(params: Params) -> weakref.ref:
    return weakref.ref(jax.tree.leaves(params)[0])
