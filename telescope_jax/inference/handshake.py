"""Do engine and trainer mean the same by a log-prob? A probe asks the engine, and compares.

The engine completes a few fixed prompts at a temperature that is not 1, and the trainer's model
scores the same tokens. Where they differ by more than the tolerance allows, the difference is
explained: raw log-probs, a shift by one, the weights of another version, other numerics, or another
model. Every one of them would train silently on a wrong importance ratio.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from telescope_jax.interfaces import EngineLost
from telescope_jax.types import Completion, SamplingParams, WeightsRef

PROBE_TEMPERATURE = 0.6
TOLERANCES = {"float32": 0.01, "bfloat16": 0.3}
"""What 19 of 20 log-probs must agree within, nats, by compute dtype. Measured with vLLM 0.32 on CPU
and a 0.5M-parameter model: 1e-4 in float32, 0.011 in bfloat16 at the start."""

_RARE = 10.0
"""The twentieth may be so many times further off: bfloat16 rounds a logit to one part in 256, so an
unlikely token of a sharp policy is off by much (seen: 0.345 nats after 15 updates)."""

_PROMPTS, _PROMPT_TOKENS, _SAMPLED_TOKENS = 4, 6, 16
_OTHER_NUMERICS = 0.5

Sample = Callable[[Sequence[int], SamplingParams], Awaitable[Completion]]
Row = tuple[Sequence[int], Sequence[int]]
"""A prompt, and the completion that the engine gave it."""


class HandshakeError(EngineLost):
    """Engine and trainer disagree; training on would be wrong, and a restart would not help."""


class Reference(Protocol):
    """The trainer's view of a published version; see reference.py."""

    def logprobs(
        self, ref: WeightsRef, rows: Sequence[Row], temperature: float
    ) -> list[np.ndarray]:
        """Log-probs of each row's completion. Blocks."""
        ...


@dataclass(frozen=True, slots=True)
class Agreement:
    """How far apart the two were, over all probed tokens, in nats; `usual` holds for 19 of 20."""

    greatest: float
    usual: float
    mean: float

    def within(self, tolerance: float) -> bool:
        return self.usual <= tolerance and self.greatest <= _RARE * tolerance


class Handshake:
    """The probe and its judgement."""

    def __init__(
        self, reference: Reference, *, vocab_size: int, context: int, tolerance: float
    ) -> None:
        """
        Args:
          vocab_size: prompts are drawn from all of it.
          context: most tokens of a sequence.
          tolerance: of 19 in 20 log-probs, nats; the others may differ ten times as much.
        """
        self._reference, self._tolerance = reference, tolerance
        width = max(1, min(_PROMPT_TOKENS, context // 2))
        draw = np.random.default_rng(0).integers(0, vocab_size, (_PROMPTS, width))
        self._prompts: list[list[int]] = draw.tolist()
        self._max_tokens = max(1, min(_SAMPLED_TOKENS, context - width))

    async def check(
        self, sample: Sample, ref: WeightsRef, *, older: Sequence[WeightsRef] = ()
    ) -> Agreement:
        """Probes an engine that should serve `ref`.

        Args:
          older: versions that it served before and may be stuck at.

        Raises:
          HandshakeError: it does not, or it means something else; the message says what.
        """
        completions = await asyncio.gather(
            *(
                sample(
                    prompt,
                    SamplingParams(self._max_tokens, temperature=PROBE_TEMPERATURE, seed=seed),
                )
                for seed, prompt in enumerate(self._prompts)
            )
        )
        for completion in completions:
            named = {span.version for span in completion.versions}
            if named != {ref.version}:
                raise HandshakeError(
                    f"the engine should serve version {ref.version} and answers with {named}: "
                    "stale weights"
                )
        return await asyncio.to_thread(self._judge, completions, ref, older)

    def _judge(
        self, completions: Sequence[Completion], ref: WeightsRef, older: Sequence[WeightsRef]
    ) -> Agreement:
        rows = [(p, c.tokens.tolist()) for p, c in zip(self._prompts, completions, strict=True)]
        engine = [completion.logprobs for completion in completions]
        expected = self._reference.logprobs(ref, rows, PROBE_TEMPERATURE)
        agreement = compare(engine, expected)
        if agreement.within(self._tolerance):
            return agreement
        others = {"raw": self._reference.logprobs(ref, rows, 1.0)}
        for old in older:
            try:
                others[f"version {old.version}"] = self._reference.logprobs(
                    old, rows, PROBE_TEMPERATURE
                )
            except Exception:
                continue  # it was pruned meanwhile; one explanation fewer
        raise HandshakeError(
            f"version {ref.version}: engine and trainer differ by up to {agreement.greatest:.3g} "
            f"nats ({agreement.usual:.3g} on 19 of 20 tokens, mean {agreement.mean:.3g}), "
            f"engine.handshake_tol={self._tolerance:g}: "
            + diagnose(engine, expected, others, tolerance=self._tolerance)
        )


def compare(ours: Sequence[np.ndarray], theirs: Sequence[np.ndarray]) -> Agreement:
    """Absolute differences over all tokens; a difference that is no number is infinite."""
    differences = np.abs(np.concatenate(ours) - np.concatenate(theirs))
    differences = np.where(np.isfinite(differences), differences, np.inf)
    usual = np.quantile(differences, 0.95, method="higher")
    return Agreement(float(differences.max()), float(usual), float(differences.mean()))


def diagnose(
    engine: Sequence[np.ndarray],
    expected: Sequence[np.ndarray],
    others: Mapping[str, Sequence[np.ndarray]],
    *,
    tolerance: float,
) -> str:
    """The first explanation that fits the engine's log-probs, and its remedy.

    Args:
      engine, expected: log-probs by row; they differ by more than `tolerance`.
      others: what the trainer expects otherwise: "raw" at temperature 1, "version N" with those
        weights.
    """

    def fits(ours: Sequence[np.ndarray], theirs: Sequence[np.ndarray]) -> bool:
        pairs = [(a, b) for a, b in zip(ours, theirs, strict=True) if len(a)]
        if not pairs:
            return False
        return compare([a for a, _ in pairs], [b for _, b in pairs]).within(tolerance)

    if "raw" in others and fits(engine, others["raw"]):
        return (
            "the engine returns raw log-probs, which ignore the temperature; start it with "
            "--logprobs-mode processed_logprobs"
        )
    for name, theirs in others.items():
        if name != "raw" and fits(engine, theirs):
            return f"the engine serves the weights of {name}: stale weights"
    early = fits([row[:-1] for row in engine], [row[1:] for row in expected])
    late = fits([row[1:] for row in engine], [row[:-1] for row in expected])
    if early or late:
        way = "the token after" if early else "the token before"
        return f"log-probs are shifted by one: entry t describes {way} t"
    if compare(engine, expected).mean <= _OTHER_NUMERICS:
        return (
            "close, but not equal: another dtype or precision; make policy.compute_dtype and the "
            "server's --dtype the same, or raise engine.handshake_tol"
        )
    return "nothing known explains it: another model, or weights in a wrong layout"
