"""The embedded engine's device side: prefill, admission and decoding as three jitted functions.

Every shape is fixed: decoding always runs over all slots, and a prompt is prefilled at a width that
its own length decides, in a batch of a size that the width decides. XLA's results for a row depend
on the batch size but not on its neighbours, so what a request gets never depends on load.

A sampled token is decided by (seed, position): argmax of logits / temperature + Gumbel noise, by
blocks of a large vocabulary, whose threefry key is the request's seed folded with the token's
position in the sequence.

A slot holds the cache of its sequence up to but without `token`, the newest one, which the next
decode step writes at `position`. So the last token of a sequence costs no decode step, and the
version of the weights of a call is the version of the tokens that it returns.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32

from telescope_jax.model.decoder import Decoder, KvCache
from telescope_jax.types import Params

MAX_STOP_IDS = 8
"""Stop token ids that one request may name, beside the eos ids."""

BLOCK = 256
"""Tokens of the vocabulary that are sampled among at once."""


class Prefilled(NamedTuple):
    """Prompts read by one prefill call; V logits after the last token of each."""

    logits: Float[Array, "B V"]
    cache: KvCache


class Slots(NamedTuple):
    """The state of all S slots; `remaining` counts the tokens still allowed, 0 is idle."""

    cache: KvCache
    token: Int[Array, " S"]
    position: Int[Array, " S"]
    remaining: Int[Array, " S"]
    seed: UInt32[Array, "S 2"]
    temperature: Float[Array, " S"]
    stops: Int[Array, "S K"]


class Admission(NamedTuple):
    """New requests, for slots whose `source` is a row of a Prefilled; −1 leaves a slot alone."""

    source: Int[np.ndarray, " S"]
    length: Int[np.ndarray, " S"]
    limit: Int[np.ndarray, " S"]
    seed: UInt32[np.ndarray, "S 2"]
    temperature: Float[np.ndarray, " S"]
    stops: Int[np.ndarray, "S K"]


class Emitted(NamedTuple):
    """What a call sampled: the first `count` of the n tokens of each slot."""

    tokens: Int[Array, "n S"]
    logprobs: Float[Array, "n S"]
    count: Int[Array, " S"]
    running: Int[Array, " S"]


class Decoding:
    """The compiled functions of one configuration; engines of a process share one object."""

    def __init__(
        self,
        decoder: Decoder,
        *,
        slots: int,
        context: int,
        prefill_width: int,
        prefill_rows: int,
        tokens_per_call: int,
        eos_ids: tuple[int, ...],
    ):
        """
        Args:
          slots: S, sequences decoded at once.
          context: most tokens of one sequence, prompt and completion.
          prefill_width: width of the narrowest prefill, in tokens; longer prompts take the next of
            2, 4, 8 … times it, and at most `context`.
          prefill_rows: prompts in the narrowest prefill; wider ones take fewer, for the same work.
          tokens_per_call: decode steps in one call.
          eos_ids: tokens that end every sequence.
        """
        self.decoder = decoder
        self.slots, self.context, self.eos_ids = slots, context, eos_ids
        self.prefill_width = min(prefill_width, context)
        self.prefill_rows = prefill_rows
        self.prefill = jax.jit(lambda *args: Prefilled(*decoder.prefill(*args)))
        eos = jnp.array(eos_ids, jnp.int32)
        # The slots are donated: the cache is large, and nobody else holds it.
        self.admit = jax.jit(functools.partial(_admit, eos), donate_argnums=0)
        self.decode = jax.jit(
            functools.partial(_decode, decoder, eos, tokens_per_call, context), donate_argnums=1
        )

    def width(self, length: int) -> int:
        """The prefill width of a prompt of `length` tokens: its own doing alone."""
        width = self.prefill_width
        while width < length:
            width *= 2
        return min(width, self.context)

    def rows(self, width: int) -> int:
        """Prompts in one prefill call of `width`."""
        return max(1, self.prefill_rows * self.prefill_width // width)

    def empty_slots(self) -> Slots:
        """All slots idle."""
        size = self.slots
        return Slots(
            cache=self.decoder.empty_cache(size, self.context),
            token=jnp.zeros(size, jnp.int32),
            position=jnp.zeros(size, jnp.int32),
            remaining=jnp.zeros(size, jnp.int32),
            seed=jnp.zeros((size, 2), jnp.uint32),
            temperature=jnp.ones(size, jnp.float32),
            stops=jnp.full((size, MAX_STOP_IDS), -1, jnp.int32),
        )

    def empty_admission(self) -> Admission:
        """Admits nobody; the caller fills in the slots it means."""
        size = self.slots
        return Admission(
            source=np.full(size, -1, np.int32),
            length=np.zeros(size, np.int32),
            limit=np.zeros(size, np.int32),
            seed=np.zeros((size, 2), np.uint32),
            temperature=np.ones(size, np.float32),
            stops=np.full((size, MAX_STOP_IDS), -1, np.int32),
        )


def sample(
    logits: Float[Array, "S V"],
    seed: UInt32[Array, "S 2"],
    position: Int[Array, " S"],
    temperature: Float[Array, " S"],
) -> tuple[Int[Array, " S"], Float[Array, " S"]]:
    """Samples a token a row and returns its log-prob, log softmax(logits / temperature).

    A block of the vocabulary first, with its share of the probability, then a token of the block:
    the same distribution with V / BLOCK + BLOCK numbers of noise instead of V, which at 50,000
    tokens would cost a third of a decode step on CPU.

    Temperature 0 takes the likeliest token, with its log-prob at temperature 1. Rows are
    independent: a row's result is decided by its own logits, seed and position.
    """
    greedy = temperature == 0
    scaled = logits / jnp.where(greedy, 1.0, temperature)[:, None]
    size = min(BLOCK, scaled.shape[1])
    whole = jnp.pad(scaled, ((0, 0), (0, -scaled.shape[1] % size)), constant_values=-jnp.inf)
    blocks = whole.reshape(whole.shape[0], -1, size)  # S V -> S V/size size
    masses = jax.nn.logsumexp(blocks, axis=-1)
    keys = jax.vmap(jax.random.fold_in)(jax.random.wrap_key_data(seed), position)
    noise = jax.vmap(lambda key: jax.random.gumbel(key, (size + masses.shape[1],)))(keys)
    noise = jnp.where(greedy[:, None], 0.0, noise)
    weights = jnp.where(greedy[:, None], jnp.max(blocks, axis=-1), masses)
    block = jnp.argmax(weights + noise[:, size:], axis=-1)
    inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    place = jnp.argmax(inside + noise[:, :size], axis=-1)
    chosen = jnp.take_along_axis(inside, place[:, None], axis=-1)[:, 0]
    token = (block * size + place).astype(jnp.int32)
    return token, chosen - jax.nn.logsumexp(masses, axis=-1)


def _admit(
    eos: Int[Array, " E"], slots: Slots, prefilled: Prefilled, new: Admission
) -> tuple[Slots, Emitted]:
    """Copies prompts into slots and samples the first token of each."""
    source, length, limit, seed, temperature, stops = (jnp.asarray(x) for x in new)
    fresh, row = source >= 0, jnp.maximum(source, 0)

    def insert(cache: jax.Array, rows: jax.Array) -> jax.Array:
        width = rows.shape[2]
        mixed = jnp.where(fresh[:, None, None, None], rows[row], cache[:, :, :width])
        return cache.at[:, :, :width].set(mixed)

    token, logprob = sample(prefilled.logits[row], seed, length, temperature)
    left = jnp.where(_ends(token, eos, stops), 0, limit - 1)
    slots = Slots(
        cache=jax.tree.map(insert, slots.cache, prefilled.cache),
        token=jnp.where(fresh, token, slots.token),
        position=jnp.where(fresh, length, slots.position),
        remaining=jnp.where(fresh, left, slots.remaining),
        seed=jnp.where(fresh[:, None], seed, slots.seed),
        temperature=jnp.where(fresh, temperature, slots.temperature),
        stops=jnp.where(fresh[:, None], stops, slots.stops),
    )
    emitted = Emitted(token[None], logprob[None], fresh.astype(jnp.int32), slots.remaining)
    return slots, emitted


def _decode(
    decoder: Decoder,
    eos: Int[Array, " E"],
    steps: int,
    context: int,
    params: Params,
    slots: Slots,
    wanted: Int[Array, " S"],
    waiting: Int[Array, ""],
) -> tuple[Slots, Emitted]:
    """Up to `steps` tokens for every running slot; a slot that is not `wanted` any more idles.

    With requests `waiting` the call ends early, once the slots that they could have used have
    idled for as many steps as half of all slots take in one: about what a call costs besides.
    """
    size = slots.token.shape[0]
    slots = slots._replace(remaining=jnp.where(wanted, slots.remaining, 0))
    blank = Emitted(
        tokens=jnp.zeros((steps, size), jnp.int32),
        logprobs=jnp.zeros((steps, size), jnp.float32),
        count=jnp.zeros(size, jnp.int32),
        running=slots.remaining,
    )

    def goes_on(carry: tuple[jax.Array, jax.Array, Slots, Emitted]) -> jax.Array:
        step, idled, slots, _ = carry
        return (step < steps) & (idled < (size + 1) // 2) & jnp.any(slots.remaining > 0)

    def body(
        carry: tuple[jax.Array, jax.Array, Slots, Emitted],
    ) -> tuple[jax.Array, jax.Array, Slots, Emitted]:
        step, idled, slots, emitted = carry
        running = slots.remaining > 0
        # An idle slot writes nothing: its position is outside the cache.
        position = jnp.where(running, slots.position, context)
        logits, cache = decoder.decode(params, slots.token, position, slots.cache)
        token, logprob = sample(logits, slots.seed, slots.position + 1, slots.temperature)
        left = jnp.where(_ends(token, eos, slots.stops), 0, slots.remaining - 1)
        slots = slots._replace(
            cache=cache,
            token=jnp.where(running, token, slots.token),
            position=slots.position + running,
            remaining=jnp.where(running, left, 0),
        )
        emitted = Emitted(
            tokens=emitted.tokens.at[step].set(token),
            logprobs=emitted.logprobs.at[step].set(logprob),
            count=emitted.count + running,
            running=slots.remaining,
        )
        idle = jnp.sum(slots.remaining == 0, dtype=jnp.int32)
        return step + 1, idled + jnp.minimum(idle, waiting), slots, emitted

    start = (jnp.int32(0), jnp.int32(0), slots, blank)
    _, _, slots, emitted = jax.lax.while_loop(goes_on, body, start)
    return slots, emitted


def _ends(
    token: Int[Array, " S"], eos: Int[Array, " E"], stops: Int[Array, "S K"]
) -> Int[Array, " S"]:
    """Whether a token ends its sequence."""
    return jnp.any(token[:, None] == eos[None], axis=-1) | jnp.any(token[:, None] == stops, axis=-1)
