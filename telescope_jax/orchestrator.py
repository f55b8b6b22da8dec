"""The story: produce, learn, deploy and evaluate run at once, and the async contract joins them.

    produce    starts a group whenever `staleness.AsyncBound` admits one more
    learn      trains batch k as soon as it is assembled, which makes version k + 1
    deploy     publishes the newest version and loads it into the engine, in flight
    evaluate   plays held-out prompts on one version while all of the above goes on

All state lives in one event loop and changes only between two awaits, so no lock guards it. Whoever
changes it calls `_changed.notify()`; whoever waits looks again. The orchestrator knows no jax, no
vLLM and no thread: with scripted parts it runs on a virtual clock (tests/virtual_clock.py).

Every group attempt is in the ledger, and the ledger is checked at every step. A finished group is
held until its batch: nothing is thrown away for want of room. What went stale is cancelled before
the engines change weights, and its prompt goes to the front of the queue.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from telescope_jax.assembly import AssemblySettings, TrainingBatch, assemble
from telescope_jax.attempts import Attempts, Events, Held, InFlight
from telescope_jax.changed import Changed
from telescope_jax.due_evals import DueEvals, EvalSchedule, Version
from telescope_jax.interfaces import (
    Checkpoint,
    Checkpointer,
    Engine,
    Environment,
    Evaluator,
    Gauge,
    MetricSink,
    OnBatch,
    Trainer,
    WeightStore,
)
from telescope_jax.ledger import Attempt, DropReason
from telescope_jax.prompts import PromptQueue
from telescope_jax.rollouts.episode import EpisodeFactory
from telescope_jax.rollouts.group import GroupFailed, play_group
from telescope_jax.spans import Spans
from telescope_jax.types import LossStats, Params, Prompt
from telescope_jax.watchdog import Doing, Watched, watch

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Schedule:
    """When things happen.

    Attributes:
      number_of_steps: batches to train.
      group_size: rollouts of one prompt.
      eval_every, checkpoint_every: steps; 0 is never on the way.
      eval_at_start: evaluate the version that the run starts from.
      eval_timeout_s: longest wait for one eval.
      watchdog_s: longest time without a trainable group, three times in a row.
      first_watchdog_s: the same while engine and trainer do their first work, and compile.
    """

    number_of_steps: int
    group_size: int
    eval_every: int = 0
    checkpoint_every: int = 0
    eval_at_start: bool = True
    eval_timeout_s: float = 600.0
    watchdog_s: float = 300.0
    first_watchdog_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Assembled:
    """A batch waiting for the trainer."""

    members: tuple[Held, ...]
    batch: TrainingBatch


class Orchestrator:
    """One run. Build it with its parts, then `await run()`."""

    def __init__(
        self,
        *,
        schedule: Schedule,
        attempts: Attempts,
        assembly: AssemblySettings,
        env: Environment,
        prompts: PromptQueue,
        episode: EpisodeFactory,
        engine: Engine,
        trainer: Trainer,
        store: WeightStore,
        evaluator: Evaluator | None,
        sink: MetricSink,
        events: Events,
        checkpointer: Checkpointer | None = None,
        on_batch: OnBatch | None = None,
        evaluated: frozenset[int] = frozenset(),
        pending_evals: Sequence[Version] = (),
        gauges: Sequence[Gauge] = (),
        began: float | None = None,
    ) -> None:
        """
        Args:
          evaluated: versions whose evals an earlier start of this run has done.
          pending_evals: versions whose evals were due when it was cut, with their parameters.
          began: when the run did, by the loop's clock; None is the call of `run`.
        """
        self._schedule = schedule
        self._attempts = attempts
        self._assembly = assembly
        self._env = env
        self._prompts = prompts
        self._episode = episode
        self._engine = engine
        self._trainer = trainer
        self._store = store
        self._evaluator = evaluator
        self._sink = sink
        self._events = events
        self._checkpointer = checkpointer
        self._on_batch = on_batch
        self._gauges = gauges

        self.trainer_step = trainer.step
        self._newest: Version = (trainer.step, trainer.params)
        self._batches: deque[Assembled] = deque()
        when = EvalSchedule(schedule.number_of_steps, schedule.eval_every, schedule.eval_at_start)
        self._evals = DueEvals(when if evaluator else None, self._newest, evaluated, pending_evals)
        self._evaluated = trainer.step  # what an eval engine holds, and may have to load again
        self._steps_here = 0  # since this process started
        self._doing = Doing()
        self._spans: Spans
        self._began = began
        self._changed = Changed()
        self._stopping: str | None = None

    @property
    def served_version(self) -> int:
        """The lowest version that a new request may meet; at most `trainer_step`."""
        return self._engine.version

    # The run

    async def run(self) -> None:
        """Trains until `number_of_steps`, then finishes the evals; or until `stop()`.

        Raises:
          The error of whichever part failed, as that part raised it.
        """
        self._spans = Spans(self._now, self._now() if self._began is None else self._began)
        await self._load(*self._first_deploy())
        self._assemble()
        self._sink.log(self.trainer_step, self._spans.rest("start_up"))
        try:
            async with asyncio.TaskGroup() as tasks:
                background = [
                    tasks.create_task(self._prompts.fill(self._changed.notify), name="prompts"),
                    tasks.create_task(self._produce(tasks), name="produce"),
                    tasks.create_task(self._deploy(), name="deploy"),
                    tasks.create_task(self._evaluate(), name="evaluate"),
                    tasks.create_task(self._watch(), name="watchdog"),  # the engines are ready
                ]
                await tasks.create_task(self._learn(), name="learn")
                await self._changed.until(lambda: not self._evals or self._stopping is not None)
                # What is in flight stays in the ledger as such, for the checkpoint below.
                for task in background:
                    task.cancel()
                for flight in self._attempts.in_flight.values():
                    flight.cancel()
        except BaseExceptionGroup as errors:
            raise first_error(errors) from None
        await self._checkpoint()
        for attempt in list(self._attempts.in_flight):
            self._attempts.cancel(attempt, DropReason.SHUTDOWN)
        self._attempts.ledger.check()
        self._sink.log(self.trainer_step, self._spans.rest("end"))

    def stop(self, reason: str) -> None:
        """Ends the run after the update that is running, with a checkpoint."""
        self._stopping = reason
        self._events("stop", {"reason": reason, **self.progress()})
        self._changed.notify()

    def progress(self) -> dict[str, int]:
        """The integers of the async contract, for events and messages."""
        return {
            "trainer_step": self.trainer_step,
            "inference_step": self._attempts.inference_step,
            "served_version": self.served_version,
            "admitted": self._attempts.ledger.admitted,
        }

    # Produce

    def _admits(self) -> bool:
        return self._attempts.admits(self.served_version)

    async def _produce(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            if not self._admits():
                self._events("pause", self.progress())
                await self._changed.until(self._admits)
                self._events("resume", self.progress())
            await self._changed.until(self._prompts.ready)
            if self._admits():
                prompt, attempt = self._prompts.pop()
                task = tasks.create_task(self._play(prompt, attempt), name=f"group {attempt}")
                flight = InFlight(prompt, self.served_version, self._now(), task.cancel)
                self._attempts.start(attempt, flight)
            # Lets finished groups in between two starts, also when every prompt is dropped at once.
            await asyncio.sleep(0)

    async def _play(self, prompt: Prompt, attempt: Attempt) -> None:
        size = self._schedule.group_size
        try:
            group = await play_group(self._env, self._episode, prompt, attempt, size)
        except GroupFailed as failure:
            self._attempts.fail(attempt, failure.reason, failure.detail)
        else:
            self._attempts.finish(attempt, group)
        self._assemble()

    def _assemble(self) -> None:
        """Forms every batch that can be formed, so that packing is done before the trainer asks."""
        while members := self._attempts.take_batch():
            step = self._attempts.inference_step - 1
            groups = [member.group for member in members]
            self._batches.append(Assembled(members, assemble(step, groups, self._assembly)))
        self._changed.notify()

    # Learn

    async def _learn(self) -> None:
        while self.trainer_step < self._schedule.number_of_steps:
            with self._spans("wait_for_batch"):
                await self._changed.until(self._can_learn)
            if self._stopping:
                return
            assembled = self._batches[0]
            if self._on_batch:
                self._on_batch(self.trainer_step, [m.group for m in assembled.members])
            doing = self._doing("trainer", f"update of step {self.trainer_step}")
            with doing, self._spans("update"):
                stats = await self._trainer.update(assembled.batch.minibatches)
            self._batches.popleft()
            self._attempts.train(assembled.members)
            self._steps_here += 1
            step, self.trainer_step = self.trainer_step, self.trainer_step + 1
            self._newest = (self.trainer_step, self._trainer.params)
            self._evals.offer(*self._newest)
            self._log_step(step, assembled.batch, stats)
            self._attempts.ledger.check()
            self._changed.notify()
            every = self._schedule.checkpoint_every
            if every and self.trainer_step % every == 0:
                await self._checkpoint()

    def _can_learn(self) -> bool:
        # Each waiting eval keeps a version in memory: training waits rather than pile them up.
        return self._stopping is not None or (bool(self._batches) and len(self._evals) <= 2)

    def _log_step(self, step: int, batch: TrainingBatch, stats: LossStats) -> None:
        values = {f"train/{name}": float(value) for name, value in stats._asdict().items()}
        values |= batch.metrics | self._attempts.report() | self._attempts.ledger.metrics()
        values |= self._spans.step()
        values |= {f"engine/{name}": value for name, value in self._engine.metrics().items()}
        values["engine/version"] = float(self.served_version)
        for gauge in self._gauges:
            values |= gauge()
        self._sink.log(step, values)

    # Deploy

    async def _deploy(self) -> None:
        while True:
            await self._changed.until(lambda: self._next_deploy() is not None)
            target = self._next_deploy()
            if target is not None:
                await self._load(*target)

    def _first_deploy(self) -> Version:
        """The newest version, unless an eval on this engine still needs an older one."""
        shares_engine = self._evaluator is not None and self._evaluator.shares_engine
        return self._evals.first if self._evals and shares_engine else self._newest

    def _next_deploy(self) -> Version | None:
        target = self._first_deploy()
        return target if target[0] > self.served_version else None

    async def _load(self, version: int, params: Params) -> None:
        with self._spans("deploy"):
            with self._spans("publish"), self._doing("deploy", f"publish of version {version}"):
                ref = await self._store.publish(version, params)
            # Before the engines pause for new weights: what is stale shall not be carried over.
            self._attempts.drop_stale()
            self._changed.notify()
            with self._doing("deploy", f"load of version {version}"):
                await self._engine.load(ref)
        self._events("deploy", self.progress())
        self._changed.notify()
        waiting = [version for version, _ in self._evals]
        await self._store.prune(keep=[version, self._evaluated, *waiting])

    # Evaluate

    async def _evaluate(self) -> None:
        if self._evaluator is None:
            return
        while True:
            await self._changed.until(self._can_evaluate)
            version, params = self._evals.first
            started = self._now()
            try:
                with self._doing("eval", f"version {version}"):
                    async with asyncio.timeout(self._schedule.eval_timeout_s):
                        values = await self._evaluator.evaluate(version, params)
            except TimeoutError:
                log.warning("eval of version %d cut after %.0f s", version, self._now() - started)
                self._events("eval_timeout", {"version": version})
            else:
                self._sink.log(version, {**values, "time/eval": self._now() - started})
            self._evaluated = self._evals.done()
            self._changed.notify()

    def _can_evaluate(self) -> bool:
        if not self._evals or self._evaluator is None:
            return False
        return not self._evaluator.shares_engine or self.served_version == self._evals.first[0]

    # Watch

    async def _watch(self) -> None:
        await watch(
            self._watched,
            self.blocker,
            lambda message: self._events("watchdog", {"message": message, **self.progress()}),
            period_s=self._schedule.watchdog_s,
            first_period_s=self._schedule.first_watchdog_s,
        )

    def _watched(self) -> Watched:
        return Watched(
            self._attempts.trainable,
            self._steps_here,
            self._evals.done_here,
            all_in=self._attempts.all_in(),
            evaluating="eval" in self._doing,
        )

    def blocker(self) -> str:
        """What waits on what, in one line."""
        now = self._now()
        doing = self._doing.lines(now)
        if in_flight := self._attempts.in_flight:
            oldest = min(in_flight.values(), key=lambda flight: flight.since)
            doing.append(
                f"engine and environment: {len(in_flight)} groups in flight, the oldest "
                f"{tuple(oldest.prompt.uid)} for {now - oldest.since:.0f} s"
            )
        elif not self._admits():
            doing.append(f"admission is closed at served version {self.served_version}")
        elif not self._prompts.ready():
            doing.append("the environment has not made the next prompt")
        doing.append(
            f"{len(self._attempts.held)} groups held, {len(self._batches)} batches assembled"
        )
        return "; ".join(doing)

    # Checkpoint

    async def _checkpoint(self) -> None:
        """Saves the state as it is now; returns once the trainer's arrays are copied."""
        if self._checkpointer is None:
            return
        batched = [member for waiting in self._batches for member in waiting.members]
        values, groups = self._attempts.state(batched)
        doing = self._doing("checkpoint", f"save of step {self.trainer_step}")
        with doing, self._spans("checkpoint"):
            await self._checkpointer.save(
                Checkpoint(
                    self.trainer_step, self._trainer.save(), values, groups, tuple(self._evals)
                )
            )

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


def first_error(errors: BaseExceptionGroup) -> BaseException:
    """The error that brought the others down, out of whatever groups it is wrapped in."""
    error = errors.exceptions[0]
    return first_error(error) if isinstance(error, BaseExceptionGroup) else error
