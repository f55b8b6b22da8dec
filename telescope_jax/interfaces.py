"""Where the parts meet. Parts know these protocols and never each other; `main.py` joins them.

Everything that may take long is a coroutine, so that the orchestrator needs no threads and runs
unchanged on a virtual clock; an implementation that blocks moves its own work to a thread or
process. Cancelling a coroutine gives back whatever it holds: slots, requests, workers.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from telescope_jax.types import (
    Completion,
    Group,
    LossStats,
    Params,
    Prompt,
    Reward,
    Rollout,
    SamplingParams,
    Uid,
    WeightsRef,
)


class EngineError(RuntimeError):
    """The engine could not answer; the rollouts concerned are infrastructure failures."""


class EngineLost(RuntimeError):
    """The engine is gone and will not come back; ends the run with its last words."""


class EnvError(RuntimeError):
    """The environment failed; the rollout has no reward (which is not reward 0)."""


class RewardError(RuntimeError):
    """A grader or reward service failed on this answer."""


class RewardTimeout(RewardError):
    """A grader or reward service did not answer in time."""


class PromptTooLong(ValueError):
    """The prompt leaves no room for a completion; trying again cannot help."""


class Engine(Protocol):
    """Samples from one version of the weights. A pool is an Engine; so is a test script."""

    @property
    def version(self) -> int:
        """The lowest version that a new request may meet: `served_version` in staleness.py."""
        ...

    async def sample(self, tokens: Sequence[int], sampling: SamplingParams) -> Completion:
        """One completion of `tokens`. Cancelling frees the slot at the next call.

        Raises:
          EngineError: the answer was lost; asking again may help.
          EngineLost: no engine is left to ask.
          PromptTooLong: `tokens` leave no room for a completion.
        """
        ...

    async def load(self, ref: WeightsRef) -> None:
        """Swap to `ref` between two decode steps; running requests go on with the new weights."""
        ...

    def metrics(self) -> Mapping[str, float]:
        """Counters since the last call, for `engine/*`."""
        ...

    async def close(self) -> None: ...


Sample = Callable[..., Awaitable["Turn"]]
"""`await sample(observation="", max_tokens=None) -> Turn`, what an environment calls: appends the
observation (text, or token ids) to the episode and samples on; see rollouts/episode.py."""


class Turn(Protocol):
    """A completion as an environment reads it."""

    @property
    def text(self) -> str: ...
    @property
    def completion(self) -> Completion: ...


class Environment(Protocol):
    """A source of prompts and the judge of what is done with them.

    The control flow of an episode is the environment's: one turn or forty. The `sample` it is given
    keeps the token history, so an environment cannot re-tokenise or mis-mask a turn.

    A method `solution(prompt) -> str` is optional: the answer to a training prompt, which only
    `config.warm_start` asks for.
    """

    name: str

    def __len__(self) -> int:
        """Training prompts in one epoch."""
        ...

    def prompt(self, uid: Uid, split: str = "train") -> Prompt:
        """The prompt of `uid`: the same one at every call. `split` is train or eval."""
        ...

    async def play(self, prompt: Prompt, sample: Sample) -> Reward:
        """Plays one episode.

        Raises:
          EnvError, RewardError, RewardTimeout: no reward could be given.
        """
        ...


class Trainer(Protocol):
    """Owns the parameters and the optimizer."""

    @property
    def step(self) -> int:
        """Completed steps, which is also the version of `params`."""
        ...

    @property
    def params(self) -> Params:
        """The current parameters; never donated while a reader may hold them."""
        ...

    async def update(self, batch: Sequence[Any]) -> LossStats:
        """Trains one step on a batch, given as one PackedBatch a minibatch."""
        ...

    def save(self) -> Mapping[str, Any]:
        """The pytree that `restore` takes: parameters, optimizer state, step."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None: ...


class WeightStore(Protocol):
    """Where versions are published for engines to load."""

    async def publish(self, version: int, params: Params) -> WeightsRef:
        """Writes `params` as `version`; returns once it is committed."""
        ...

    def latest(self) -> WeightsRef | None:
        """The newest committed version."""
        ...

    async def prune(self, keep: Sequence[int]) -> None:
        """Deletes the versions not in `keep`; a failed deletion is a warning, retried later."""
        ...


class Evaluator(Protocol):
    """Plays the held-out prompts on one version; see evals.py.

    `shares_engine` says that it plays on the training engine, which then has to stay at the
    version of an eval until that is done (training runs on up to the lead).
    """

    @property
    def shares_engine(self) -> bool: ...

    async def evaluate(self, version: int, params: Params) -> Mapping[str, float]: ...


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """All that a run needs to go on as if nothing had happened.

    Attributes:
      step: completed steps.
      trainer: what `Trainer.save` gave.
      run: JSON values, for `Attempts.restore`.
      held: finished groups that are not trained yet, in the order of `run["held"]`.
      evals: (version, parameters) of the evals that are due and not done, oldest first.
    """

    step: int
    trainer: Mapping[str, Any]
    run: Mapping[str, Any]
    held: Sequence[Group]
    evals: Sequence[tuple[int, Params]]


class Checkpointer(Protocol):
    """Keeps checkpoints; see learner/checkpoint.py."""

    async def save(self, checkpoint: Checkpoint) -> None: ...


class MetricSink(Protocol):
    """Takes one dict a step; names are `area/name`, listed in metrics.py."""

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


ScoreGroup = Callable[[Sequence[Rollout]], Sequence[float]]
"""Optional `Environment.score_group(rollouts_G) -> rewards_G`: rewards that compare rollouts."""

Groups = Sequence[Group]

OnBatch = Callable[[int, Sequence[Group]], None]
"""Called with (step, groups) before a batch is trained; see rollouts/table.py."""

Gauge = Callable[[], Mapping[str, float]]
"""Metrics of a part that the orchestrator does not know, asked for once a step."""
