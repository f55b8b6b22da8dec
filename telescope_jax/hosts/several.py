"""How a run of several processes differs from one of one: the seams of run.py, in its order."""

import asyncio
import logging
import signal
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from telescope_jax.config import Config
from telescope_jax.console import Console
from telescope_jax.hosts import follower
from telescope_jax.hosts.identity import agree_on_programs, agree_on_setup
from telescope_jax.hosts.leader import SharedCheckpoints, SharedStore, SharedTrainer, Turn
from telescope_jax.hosts.runtime import HostsError, Peers
from telescope_jax.learner.checkpoint import Checkpoints
from telescope_jax.learner.learner import Learner
from telescope_jax.log_lines import logging_to
from telescope_jax.setup import SetupError, Task, build_or_restore, build_store
from telescope_jax.types import Params
from telescope_jax.weights.store import MemoryStore, OrbaxStore
from telescope_jax.workdir import Workdir

log = logging.getLogger(__name__)


def check(config: Config, mesh: Mesh) -> None:
    """What a trainer of several processes cannot do, before any work.

    Raises:
      SetupError: says what to change.
    """
    if config.engine.kind == "jax" and not config.engine.own_process:
        raise SetupError(
            "engine.own_process=False keeps the engine in the trainer's process, which holds only "
            f"its part of the weights when there are {jax.process_count()}; leave it at True"
        )
    if mesh.size != jax.device_count():
        sizes = " × ".join(f"mesh.{axis}={size}" for axis, size in mesh.shape.items())
        raise SetupError(
            f"{sizes} takes {mesh.size} of the {jax.device_count()} devices of "
            f"{jax.process_count()} processes; let the mesh take all of them"
        )


def tell_followers(peers: Peers, folder: Workdir, config: Config) -> None:
    """Process 0: where the run's files are; then all of them compare what they are."""
    peers.on_death = lambda words, code: folder.note(state="stopped", exit_code=code, died=words)
    peers.tell("workdir", str(folder.path))
    agree_on_setup(peers, config)


def lead(
    peers: Peers,
    learner: Learner,
    store: OrbaxStore | MemoryStore,
    checkpoints: Checkpoints,
    config: Config,
    evals: Mapping[int, Params],
) -> tuple[SharedTrainer, SharedStore, SharedCheckpoints]:
    """Process 0: what the orchestrator is given in place of the three."""
    assert isinstance(store, OrbaxStore), "refused by check()"
    agree_on_programs(peers, learner, config.batch.seq_len)
    turn = Turn(peers)
    return (
        SharedTrainer(learner, turn, config.batch.rows_per_microbatch, evals=evals),
        SharedStore(store, turn),
        SharedCheckpoints(checkpoints, learner, turn),
    )


def take_signals(
    peers: Peers,
    loop: asyncio.AbstractEventLoop,
    arrived: Callable[[signal.Signals], None],
    stopping: Callable[[], bool],
) -> None:
    """Process 0: a signal that another process got counts as its own, unless it had one too.

    A launcher signals all of them: the second one here would mean "at once".
    """

    def arrive(number: int) -> None:
        if not stopping():
            arrived(signal.Signals(number))

    peers.on_stop = lambda number: loop.call_soon_threadsafe(arrive, number)


def release(peers: Peers, trainer: Any, store: Any, code: int) -> None:
    """Process 0, at the end: lets the others go, once nothing needs them any more."""
    trainer.close()
    store.close()
    peers.command("end", code=code)


def follow(peers: Peers, task: Task) -> int:
    """The other processes: the whole of their run. Returns the exit code."""
    follower.pass_signals_on(peers)
    config, tokenizer = task.config, task.tokenizer
    with ExitStack() as logs:
        try:
            workdir = Path(peers.hear("workdir"))
            log_file = workdir / "logs" / f"process_{peers.index:05d}.log"
            logs.enter_context(logging_to(log_file, Console(config.number_of_steps).say))
            log.info(
                "run: process %d of %d follows process 0 in %s", peers.index, peers.count, workdir
            )
            agree_on_setup(peers, config)
            vocab_size = config.policy.vocab_size or tokenizer.vocab_size
            checkpoints = Checkpoints(
                workdir / "checkpoints", keep_last=config.checkpoint.keep_last
            )
            learner, saved = build_or_restore(
                config, task.env, tokenizer, vocab_size, task.mesh, checkpoints, task.pretrained
            )
            agree_on_programs(peers, learner, config.batch.seq_len)
            store = build_store(config, workdir / "weights")
            assert isinstance(store, OrbaxStore), "refused by check()"
            evals = saved.evals if saved is not None else {}
            code = follower.Follower(peers, learner, store, checkpoints, evals=evals).run()
            checkpoints.close()
            learner.close()
            peers.end()
            return code
        except (HostsError, SetupError) as error:
            log.error("%s", error)
            peers.give_up(2, str(error))
        except Exception as error:
            log.exception("process %d failed", peers.index)
            peers.give_up(1, f"{type(error).__name__}: {error}")
