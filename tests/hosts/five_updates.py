"""One process of two: five updates of recorded batches by the leader's and the follower's own code.

python tests/hosts/five_updates.py PORT PROCESS FOLDER MASTER_DTYPE
"""

import asyncio
import dataclasses
import sys
from pathlib import Path
from typing import Any

import numpy as np
from jax._src import xla_bridge  # has no public name (jax 0.10.2)

from telescope_jax.config import MeshConfig, OptimizerConfig
from telescope_jax.hosts.follower import Follower
from telescope_jax.hosts.leader import SharedCheckpoints, SharedStore, SharedTrainer, Turn
from telescope_jax.hosts.runtime import Place, join
from telescope_jax.learner.checkpoint import Checkpoints
from telescope_jax.learner.learner import Learner
from telescope_jax.learner.loss import LossSettings
from telescope_jax.sharding import make_mesh
from telescope_jax.weights.store import OrbaxStore
from tests.learner.rows import POLICY, VOCAB, batches
from tests.learner.test_step import host_params

ROWS = 8
UPDATES = 5
OPTIMIZER = OptimizerConfig(learning_rate=0.05, eps=0.1)
"""An epsilon beside which gradients are small: Adam's direction is then as smooth as the gradient,
and a difference in its last bits stays one."""


def make_learner(mesh: MeshConfig, master_dtype: Any = "float32") -> Learner:
    return Learner(
        POLICY,
        VOCAB,
        make_mesh(mesh),
        loss=LossSettings(),
        optimizer=dataclasses.replace(OPTIMIZER, master_dtype=master_dtype),
        number_of_steps=UPDATES,
        rows_per_microbatch=ROWS,
        params=host_params(),
    )


def recorded():
    """Batches of different numbers of rows, as packing makes them."""
    return [batches(13 + 9 * number, ROWS, seed=number) for number in range(UPDATES)]


def main(port: str, process: str, folder: Path, master_dtype: str) -> None:
    peers = join(Place(f"127.0.0.1:{port}", 2, int(process)), start_timeout_s=60)
    assert peers is not None
    # run.py says which devices are the trainer's, and that is after this.
    assert not xla_bridge.backends_are_initialized()
    # Of each row, half of the tokens lie in one process and half in the other.
    learner = make_learner(MeshConfig(context=4, tensor=2), master_dtype)
    store = OrbaxStore(folder / "weights", "bfloat16")
    checkpoints = Checkpoints(folder / "checkpoints", keep_last=2)
    if peers.leads:
        turn = Turn(peers)
        trainer = SharedTrainer(learner, turn, ROWS)
        shared_store = SharedStore(store, turn)

        async def run() -> None:
            publishing = []
            for number, batch in enumerate(recorded()):
                stats = await trainer.update(batch)
                np.save(folder / f"stats_{number}.npy", np.array(stats[:-1], np.float64))
                # While the next update runs, as in a real run.
                publishing.append(
                    asyncio.create_task(shared_store.publish(number + 1, trainer.params))
                )
            for one in publishing:
                await one
            held = {"0": {"tokens": np.arange(5, dtype=np.int32)}}
            saver = SharedCheckpoints(checkpoints, learner, turn)
            await asyncio.to_thread(saver.save, trainer.save(), host={"cursor": 7}, held=held)

        asyncio.run(run())
        trainer.close()
        shared_store.close()
        peers.command("end", code=0)
    else:
        Follower(peers, learner, store, checkpoints).run()
    checkpoints.close()
    learner.close()
    peers.end()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), sys.argv[4])
