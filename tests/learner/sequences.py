"""Ragged sequences, the ways to lay them out in rows, and an update over them: for loss tests."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from telescope_jax.learner.loss import LossSettings, denominators, finish, policy_loss
from telescope_jax.types import PackedBatch

PLAIN = LossSettings(use_tis=False)
SETTINGS = {
    "pg": PLAIN,
    "tis": LossSettings(tis_cap=1.3),
    "icepop": LossSettings(tis_mode="icepop", tis_floor=0.7, tis_cap=1.4),
    "ppo": LossSettings("ppo", use_tis=False, clip_high=0.28),
    "dual clip": LossSettings("ppo", use_tis=False, dual_clip=1.3),
    "decoupled ppo": LossSettings("ppo", tis_cap=1.3),
    "decoupled icepop": LossSettings("ppo", tis_mode="icepop", tis_floor=0.7, tis_cap=1.4),
    "cispo": LossSettings("cispo", clip_low=1.0, clip_high=0.3),
    "gspo": LossSettings("gspo", use_tis=False, clip_low=0.1, clip_high=0.1),
    "decoupled gspo": LossSettings("gspo", tis_cap=1.2, clip_low=0.1, clip_high=0.1),
    "sapo": LossSettings("sapo"),
    "sequence mask": LossSettings(sequence_mask=(0.9, 1.1), kl_coef=0.1, entropy_coef=0.01),
    "k2": LossSettings(kl_coef=0.3, kl_estimator="k2"),
    "k3": LossSettings(kl_coef=0.3, kl_estimator="k3", tis_mode="icepop", tis_floor=0.9),
    "reference and entropy": LossSettings(reference_kl_coef=0.2, entropy_coef=0.05),
    "sequences": LossSettings(normalizer="sequences", kl_coef=0.1),
    "constant": LossSettings(normalizer="constant", constant_length=12.0, kl_coef=0.1),
}


@dataclasses.dataclass
class Sequences:
    """Ragged sequences in which every token trains; missing old and reference are None."""

    logprobs: list
    sampler: list
    advantages: list
    old: Any = None
    reference: Any = None
    entropy: Any = None

    def __post_init__(self):
        self.lengths = [len(sequence) for sequence in self.logprobs]
        self.flat = np.concatenate(self.logprobs).astype(float)


def random_sequences(seed=0, lengths=(5, 1, 7, 3, 8, 2, 6, 4)):
    random = np.random.default_rng(seed)
    logprobs = [-random.exponential(1.0, n) for n in lengths]

    def near(scale):
        return [sequence + random.normal(0, scale, len(sequence)) for sequence in logprobs]

    return Sequences(
        logprobs=logprobs,
        sampler=near(0.4),
        advantages=list(random.normal(size=len(lengths))),
        old=near(0.2),
        reference=near(0.5),
        entropy=[random.exponential(1.0, n) for n in lengths],
    )


def layout(data, rows, *, prompt=0, dtype: Any = np.float64):
    """Places sequences into 8 rows as told, their numbers a row; junk stands where nothing trains.

    One shape for all tests, and no jit: each primitive then compiles once for the whole file.

    Returns the batch, entropy and an index array: tokens of π are `flat[index]`, so that gradients
    with respect to `flat` can be compared between layouts.
    """
    shape = (8, 112)
    junk = np.resize(np.array([np.nan, np.inf, -np.inf, 1e30, -99.0]), shape).astype(dtype)
    fields = {
        name: junk.copy() for name in ("logprobs", "old", "reference", "entropy", "advantages")
    }
    segments, positions = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    mask, index = np.zeros(shape, bool), np.zeros(shape, np.int32)
    starts = np.cumsum([0, *data.lengths])
    for row, members in enumerate(rows):
        at = 0
        for segment, i in enumerate(members, start=1):
            n = data.lengths[i]
            segments[row, at : at + prompt + n] = segment
            positions[row, at : at + prompt + n] = np.arange(prompt + n)
            here = slice(at + prompt, at + prompt + n)
            mask[row, here] = True
            index[row, here] = np.arange(starts[i], starts[i] + n)
            fields["logprobs"][row, here] = data.sampler[i]
            fields["advantages"][row, here] = data.advantages[i]
            for name in ("old", "reference", "entropy"):
                if (values := getattr(data, name)) is not None:
                    fields[name][row, here] = values[i]
            at += prompt + n
    batch = PackedBatch(
        tokens=index,
        segments=segments,
        positions=positions,
        loss_mask=mask,
        logprobs=fields["logprobs"],
        advantages=fields["advantages"],
        old_logprobs=None if data.old is None else fields["old"],
        reference_logprobs=None if data.reference is None else fields["reference"],
    )
    return jax.tree.map(jnp.asarray, (batch, fields["entropy"], index))


def one_row_each(data, **kwargs):
    return layout(data, [[i] for i in range(len(data.lengths))], **kwargs)


def share(flat, batch, entropy, index, totals, settings):
    """One microbatch: value, sums, and the gradient with respect to every token of the update."""

    def value(flat):
        # Junk where nothing trains, as from a model that went wrong. It is added, not selected: the
        # derivative of a select would hide a nan that comes back from the loss.
        logprobs = flat[index] + jnp.where(batch.loss_mask, 0, jnp.nan).astype(flat.dtype)
        return policy_loss(logprobs, entropy, batch, totals, settings)

    (loss, sums), gradient = jax.value_and_grad(value, has_aux=True)(flat)
    return loss, sums, gradient


def update(flat, placed, settings):
    """A whole update as the trainer runs it: count everything first, then add the microbatches.

    Args:
      placed: what `layout` returns, or a list of it, one a microbatch.
    """
    microbatches = placed if isinstance(placed, list) else [placed]
    counts = [denominators(batch.segments, batch.loss_mask) for batch, _, _ in microbatches]
    add = functools.partial(jax.tree.map, jnp.add)
    totals = functools.reduce(add, counts)
    shares = [share(flat, *part, totals=totals, settings=settings) for part in microbatches]
    loss, sums, gradient = functools.reduce(add, shares)
    return float(loss), np.asarray(gradient), finish(sums)
