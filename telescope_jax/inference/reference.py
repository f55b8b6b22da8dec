"""What the trainer's model says of tokens under a published version: the handshake's other half."""

import threading
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from telescope_jax.inference.handshake import Row
from telescope_jax.inference.jax_engine import Reader
from telescope_jax.model.decoder import Decoder
from telescope_jax.model.logprobs import logprobs
from telescope_jax.types import Params, WeightsRef


class PublishedReference:
    """Scores tokens with the weights that a store holds, by the code that trains.

    Reading the version back checks what was written too; it costs one read a version. The version
    that was asked for last stays in host memory.
    """

    def __init__(self, decoder: Decoder, store: Reader) -> None:
        self._store = store
        self._score = jax.jit(
            lambda params, tokens, segments, temperature: logprobs(
                decoder,
                params,
                tokens,
                segments,
                jnp.broadcast_to(jnp.arange(tokens.shape[1])[None, :], tokens.shape),
                temperature=temperature,
            )[0]
        )
        self._read: tuple[WeightsRef, Params] | None = None
        self._lock = threading.Lock()  # servers that are loaded at once are probed at once

    def logprobs(
        self, ref: WeightsRef, rows: Sequence[Row], temperature: float
    ) -> list[np.ndarray]:
        """Log-probs of each row's completion, in nats at `temperature`. Blocks.

        Raises:
          WeightsError: the version is gone or damaged.
        """
        with self._lock:
            params = self._params(ref)
        whole = [[*prompt, *completion] for prompt, completion in rows]
        # A power of two: few shapes to compile, whatever the lengths.
        width = 1 << (max(map(len, whole)) - 1).bit_length()
        tokens = np.zeros((len(whole), width), np.int32)
        segments = np.zeros((len(whole), width), np.int32)
        for row, sequence in enumerate(whole):
            tokens[row, : len(sequence)] = sequence
            segments[row, : len(sequence)] = 1
        scored = np.asarray(self._score(params, tokens, segments, np.float32(temperature)))
        return [
            scored[row, len(prompt) : len(prompt) + len(completion)]
            for row, (prompt, completion) in enumerate(rows)
        ]

    def _params(self, ref: WeightsRef) -> Params:
        if self._read is None or self._read[0] != ref:
            self._read = None  # no two versions in memory at a time
            params = self._store.read(ref)
            # Parameters are float32 in the trainer; what was cast for serving is cast back.
            self._read = ref, jax.tree.map(lambda x: np.asarray(x, np.float32), params)
        return self._read[1]
