"""The words of the system as types; everything that crosses a part's boundary is one of these.

Letters of the shape annotations, the only ones in the project: B rows, T tokens a row, G rollouts a
prompt, V vocabulary, D width. Ragged host lists carry them as suffixes (`rewards_G`).

Index t of every per-token array describes token t: `logprobs[t] = log p(tokens[t] | tokens[<t])`,
in nats, at the sampling temperature. `model/logprobs.py` is the one place that shifts by one.

A *step* trains one batch; *version n* is the weights after n steps. Both count from 0, so step k
trains version k into version k + 1.

Host types are frozen dataclasses. What enters a jitted function is a NamedTuple of arrays.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Float, Int

Params = Any
"""A pytree of `jax.Array`; its structure belongs to `model/`."""


class Uid(NamedTuple):
    """One draw of a prompt: the same prompt drawn in two epochs is two uids."""

    epoch: int
    index: int


class StopReason(enum.Enum):
    """Why a completion ended. Running out of room is a value, not an exception."""

    EOS = "eos"
    LENGTH = "length"  # max_tokens reached
    STOP = "stop"  # one of SamplingParams.stop_token_ids
    ABORTED = "aborted"  # cancelled or lost; never trained
    TOO_LONG = "too_long"  # the context had no room for another token


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """One request's sampling settings and its identity.

    Attributes:
      max_tokens: most tokens to sample, ≥ 1.
      temperature: ≥ 0; logits are divided by it; 0 is greedy, and its log-probs are those at 1.
      top_p, top_k: 1 and 0 (off) when training: a truncated distribution is not the one that the
        trainer scores.
      stop_token_ids: token ids that end the completion, beside the tokenizer's eos ids; the id
        that ended it is part of the completion.
      seed: 64 bits that, with the position of the token, decide the sample, whatever else is in
        the batch; rollouts/episode.py hashes them from (run seed, uid, attempt, rollout, turn).
      group: requests of one group share their prompt, which is prefilled once; "" shares nothing.
      priority: lower runs first; later turns of an episode are lower.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()
    seed: int = 0
    group: str = ""
    priority: int = 0


class VersionSpan(NamedTuple):
    """Tokens [start, end) were written by weights `version`."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Completion:
    """What an engine returns for one request; spans index `tokens` and cover it without gaps."""

    tokens: Int[np.ndarray, " C"]
    logprobs: Float[np.ndarray, " C"]
    versions: tuple[VersionSpan, ...]
    stop: StopReason


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as the engine sees it; `task` is for the environment's grader alone."""

    uid: Uid
    env: str
    tokens: Int[np.ndarray, " P"]
    task: Any


@dataclass(frozen=True, slots=True)
class Reward:
    """`total` is what training sees; `parts` and `tags` are for metrics."""

    total: float
    parts: Mapping[str, float] = field(default_factory=dict)
    tags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Rollout:
    """One whole episode as one token sequence: prompt, completions and what came between them.

    `loss_mask` is True on exactly the tokens that a sampler wrote; `logprobs` is μ's there and 0
    elsewhere, where nothing may read it. Spans index `tokens` and cover the sampled tokens only.
    """

    tokens: Int[np.ndarray, " T"]
    loss_mask: Bool[np.ndarray, " T"]
    logprobs: Float[np.ndarray, " T"]
    versions: tuple[VersionSpan, ...]
    reward: Reward
    metrics: Mapping[str, float]
    stop: StopReason
    turns: int

    @property
    def oldest_version(self) -> int:
        """The lowest version that wrote a token of this rollout."""
        return min(span.version for span in self.versions)


@dataclass(frozen=True, slots=True)
class Group:
    """All rollouts of one prompt; advantages are computed when its batch is assembled."""

    prompt: Prompt
    attempt: int
    rollouts: tuple[Rollout, ...]

    @property
    def oldest_version(self) -> int:
        """The version that decides the group's age."""
        return min(rollout.oldest_version for rollout in self.rollouts)


class PackedBatch(NamedTuple):
    """Rows of packed rollouts; the trainer splits the rows into microbatches of one fixed shape.

    `segments` numbers the rollouts of a row from 1; 0 is padding. `positions` restart in each
    segment. `logprobs` is μ's. The last two are filled by the trainer, when its loss needs them.
    """

    tokens: Int[np.ndarray | jax.Array, "B T"]
    segments: Int[np.ndarray | jax.Array, "B T"]
    positions: Int[np.ndarray | jax.Array, "B T"]
    loss_mask: Bool[np.ndarray | jax.Array, "B T"]
    logprobs: Float[np.ndarray | jax.Array, "B T"]
    advantages: Float[np.ndarray | jax.Array, "B T"]
    old_logprobs: Float[np.ndarray | jax.Array, "B T"] | None = None
    reference_logprobs: Float[np.ndarray | jax.Array, "B T"] | None = None


class TrainState(NamedTuple):
    """What an update changes; `step` is the version that `params` are."""

    params: Params
    opt_state: Any
    step: Int[jax.Array, ""]


class LossStats(NamedTuple):
    """What one update says of itself, as plain floats of the whole batch.

    `ratio_mean`, `ess`, `truncated_fraction` and `kl` compare π with μ over the loss tokens, before
    anything is rejected: means of ρ, (Σρ)²/(n Σρ²), share of ρ > tis_cap, mean of exp(d) − 1 − d.
    """

    loss: float
    ratio_mean: float
    ess: float
    truncated_fraction: float
    kl: float
    entropy: float
    grad_norm: float
    learning_rate: float
    token_count: float
    rejected_fraction: float  # tokens that an importance-sampling mask removed
    unscored_tokens: float  # tokens without a sampler log-prob, left out of the loss
    clipped_fraction: float  # tokens outside the ratio clip of ppo and its kin
    skipped_updates: int  # updates of this step whose gradient was not finite
    compilations: int  # XLA compilations that this step caused


@dataclass(frozen=True, slots=True)
class WeightsRef:
    """A published version. It exists for others only once its commit is done."""

    version: int
    path: str
    fingerprint: str
