"""The recording sampler: what an environment plays with, and the one record of what was sampled.

An environment calls `sample`; the episode keeps the token history, so nothing is ever decoded and
encoded again on its way to training: the trained ids are the sampled ids. Sampled tokens are marked
in `loss_mask`; prompts and observations are not. No end token is invented for a cut completion.
"""

import asyncio
import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from telescope_jax.chat import Tokenizer
from telescope_jax.interfaces import Engine, EngineError, EnvError, PromptTooLong
from telescope_jax.ledger import Attempt
from telescope_jax.types import (
    Completion,
    Prompt,
    Reward,
    Rollout,
    SamplingParams,
    StopReason,
    VersionSpan,
)


def sample_seed(*identity: int | str) -> int:
    """64 bits that an identity (run seed, uid, attempt, rollout, turn …) decides."""
    digest = hashlib.blake2b(repr(identity).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


@dataclass(frozen=True, slots=True)
class SampledTurn:
    """A completion as an environment reads it; `text` has no end-of-text token."""

    text: str
    completion: Completion


@dataclass(frozen=True, slots=True)
class EpisodeSettings:
    """What all episodes of a run share.

    Attributes:
      sampling: settings of every request; its identity fields are filled in here.
      context: most tokens of a whole episode.
      timeout_s: longest wait for one completion.
      run_seed: first word of every sample's seed.
    """

    sampling: SamplingParams
    context: int
    timeout_s: float
    run_seed: int


class Episode:
    """One rollout in the making; `sample` is handed to `Environment.play`."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        prompt: Prompt,
        attempt: Attempt,
        index: int,
        settings: EpisodeSettings,
        *,
        purpose: str = "train",
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._settings = settings
        self._identity = (settings.run_seed, purpose, *attempt.uid, attempt.number, index)
        self._group = f"{purpose}-{attempt.uid.epoch}-{attempt.uid.index}-{attempt.number}"
        self._tokens: list[int] = [int(token) for token in prompt.tokens]
        self._mask = [False] * len(self._tokens)
        self._logprobs = [0.0] * len(self._tokens)
        self._spans: list[VersionSpan] = []
        self._turns = 0
        self._stop = StopReason.EOS

    async def sample(
        self, observation: str | Sequence[int] = "", *, max_tokens: int | None = None
    ) -> SampledTurn:
        """Appends `observation` and samples on from there.

        When the context is full nothing is sampled: the turn's text is empty and its stop reason
        is TOO_LONG, which an environment takes as the end of its episode.

        Raises:
          EngineError: no answer in time, or one that is not whole.
          PromptTooLong: there is no room for a first token.
        """
        extra = (
            self._tokenizer.encode(observation)
            if isinstance(observation, str)
            else list(observation)
        )
        room = self._settings.context - len(self._tokens) - len(extra)
        if room < 1 and not self._turns:
            raise PromptTooLong(
                f"a prompt of {len(self._tokens)} tokens leaves no room in a context of "
                f"{self._settings.context}; raise sampling.max_prompt_tokens"
            )
        if room < 1:
            self._stop = StopReason.TOO_LONG
            nothing = Completion(np.zeros(0, np.int32), np.zeros(0, np.float32), (), self._stop)
            return SampledTurn("", nothing)
        self._append(extra, mask=False, logprobs=[0.0] * len(extra))
        base = self._settings.sampling
        request = replace(
            base,
            max_tokens=min(room, max_tokens or base.max_tokens),
            seed=sample_seed(*self._identity, self._turns),
            group=self._group,
            priority=-self._turns,
        )
        completion = await self._ask(request)
        self._record(completion)
        return SampledTurn(self._text(completion), completion)

    def finish(self, reward: Reward) -> Rollout:
        """The finished rollout.

        Raises:
          EnvError: the environment never sampled, or its reward is not a finite number.
        """
        if not self._spans:
            raise EnvError("the episode ended without a sampled token")
        if not isinstance(reward, Reward) or not isinstance(reward.total, int | float):
            raise EnvError(f"play returned {reward!r}, not a Reward with a number as its total")
        if not math.isfinite(reward.total):
            raise EnvError(f"the reward is {reward.total}, which is not a finite number")
        return Rollout(
            tokens=np.asarray(self._tokens, np.int32),
            loss_mask=np.asarray(self._mask, bool),
            logprobs=np.asarray(self._logprobs, np.float32),
            versions=tuple(self._spans),
            reward=reward,
            metrics=dict(reward.parts),
            stop=self._stop,
            turns=self._turns,
        )

    async def _ask(self, request: SamplingParams) -> Completion:
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                completion = await self._engine.sample(self._tokens, request)
        except TimeoutError as error:
            raise EngineError(f"no completion in {self._settings.timeout_s} s") from error
        if completion.stop is StopReason.ABORTED:
            raise EngineError("the engine aborted the request")
        tokens, logprobs = len(completion.tokens), len(completion.logprobs)
        if tokens == 0 or logprobs != tokens or not _covers(completion.versions, tokens):
            raise EngineError(
                f"the engine returned {tokens} tokens, {logprobs} log-probs and the version spans "
                f"{completion.versions}; all must describe the same tokens, at least one"
            )
        return completion

    def _record(self, completion: Completion) -> None:
        start = len(self._tokens)
        self._append(completion.tokens.tolist(), mask=True, logprobs=completion.logprobs.tolist())
        for version, first, last in completion.versions:
            self._spans.append(VersionSpan(version, start + first, start + last))
        self._stop = completion.stop
        self._turns += 1

    def _append(self, tokens: Sequence[int], *, mask: bool, logprobs: Sequence[float]) -> None:
        self._tokens.extend(tokens)
        self._mask.extend([mask] * len(tokens))
        self._logprobs.extend(logprobs)

    def _text(self, completion: Completion) -> str:
        tokens = completion.tokens.tolist()
        if tokens and tokens[-1] in self._tokenizer.eos_ids:
            tokens.pop()
        return self._tokenizer.decode(tokens)


def _covers(spans: Sequence[VersionSpan], length: int) -> bool:
    """Whether `spans` cover [0, length) in order and without gaps."""
    end = 0
    for _, start, stop in spans:
        if start != end or stop <= start:
            return False
        end = stop
    return end == length


EpisodeFactory = Callable[[Prompt, Attempt, int], Episode]
"""(prompt, attempt, index of the rollout) → a fresh episode."""
