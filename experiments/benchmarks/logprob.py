"""Per-token log-probs: time and temporary memory against the dense path and against peers.

    python -m experiments.benchmarks.logprob                    # both sizes, both types: 10 minutes
    python -m experiments.benchmarks.logprob --sizes A --dtypes float32 --repeats 9

Sizes are (tokens, width, vocabulary): A (2048, 576, 49152), B (1024, 896, 151936). Everything runs
side by side in one process, interleaved, so that a busy machine slows all alike; compare ratios.
`best` and `median` are of `--repeats` runs, in seconds and as a multiple of `dense`. `temp` is the
compiler's count of temporary memory; torch's is not known. Peers that are not installed are left
out: optax, tokamax, tunix, torch. Of these tokamax and optax give no entropy, which is less work.
"""

import argparse
import importlib
import importlib.util
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kernels.logprob.api import token_logprobs

SIZES = {"A": (2048, 576, 49152), "B": (1024, 896, 151936), "tiny": (64, 32, 1000)}
ENTROPY_WEIGHT = 0.01


class Contender(NamedTuple):
    """Something to time: `run()` blocks until it is done."""

    name: str
    run: Callable[[], Any]
    temporary_bytes: int | None


class Operands(NamedTuple):
    """One problem; the loss is the mean log-prob plus a little entropy."""

    hidden: jax.Array
    unembed: jax.Array
    targets: jax.Array


def operands(size: str, dtype: str) -> Operands:
    """Random states, weights and targets with logits of about unit variance."""
    tokens, width, vocabulary = SIZES[size]
    keys = jax.random.split(jax.random.key(0), 3)
    unembed = jax.random.normal(keys[1], (vocabulary, width)) * width**-0.5
    return Operands(
        jax.random.normal(keys[0], (tokens, width)).astype(dtype),
        unembed.astype(dtype),
        jax.random.randint(keys[2], (tokens,), 0, vocabulary),
    )


def ours(implementation: str) -> Callable[..., jax.Array]:
    """The loss through `token_logprobs`."""

    def loss(hidden: jax.Array, unembed: jax.Array, targets: jax.Array) -> jax.Array:
        scored = token_logprobs(hidden, unembed, targets, implementation=implementation)
        return jnp.mean(scored.logprob + ENTROPY_WEIGHT * scored.entropy)

    return loss


def logits_of(hidden: jax.Array, unembed: jax.Array) -> jax.Array:
    """[T, V] in float32."""
    dimensions = (((1,), (1,)), ((), ()))
    return lax.dot_general(hidden, unembed, dimensions, preferred_element_type=jnp.float32)


def dense(hidden: jax.Array, unembed: jax.Array, targets: jax.Array) -> jax.Array:
    """What one writes first, log-prob and entropy: the yardstick."""
    logprobs = jax.nn.log_softmax(logits_of(hidden, unembed))
    logprob = jnp.take_along_axis(logprobs, targets[:, None], axis=1)[:, 0]
    entropy = -jnp.sum(jnp.exp(logprobs) * logprobs, axis=1)
    return jnp.mean(logprob + ENTROPY_WEIGHT * entropy)


def with_optax(hidden: jax.Array, unembed: jax.Array, targets: jax.Array) -> jax.Array:
    """Dense, log-prob only."""
    optax = importlib.import_module("optax")
    losses = optax.softmax_cross_entropy_with_integer_labels(logits_of(hidden, unembed), targets)
    return -jnp.mean(losses)


def with_tokamax(hidden: jax.Array, unembed: jax.Array, targets: jax.Array) -> jax.Array:
    """Its fused linear cross entropy: a sum over tokens, nothing per token."""
    tokamax = importlib.import_module("tokamax")
    total = tokamax.linear_softmax_cross_entropy_loss(hidden, targets, unembed.T, reduction="sum")
    return -total / len(targets)


def with_tunix(hidden: jax.Array, unembed: jax.Array, targets: jax.Array) -> jax.Array:
    """Its helpers over full logits: selective log-softmax and entropy."""
    common = importlib.import_module("tunix.rl.common")
    logits = logits_of(hidden, unembed)[None]
    logprob = common.selective_log_softmax(logits, targets[None])
    probabilities = jax.nn.softmax(logits)
    entropy = jax.nn.logsumexp(logits, axis=-1) - jnp.sum(probabilities * logits, axis=-1)
    return jnp.mean(logprob + ENTROPY_WEIGHT * entropy)


LOSSES: dict[str, tuple[str | None, Callable[..., jax.Array]]] = {
    "dense": (None, dense),
    "reference": (None, ours("reference")),
    "chunked": (None, ours("chunked")),
    "optax": ("optax", with_optax),
    "tokamax": ("tokamax", with_tokamax),
    "tunix": ("tunix", with_tunix),
}
"""Name: (package it needs, loss)."""


def compiled(name: str, loss: Callable[..., jax.Array], given: Operands, gradient: bool):
    """`loss`, or its value and gradients, compiled for these operands."""
    function = jax.value_and_grad(loss, argnums=(0, 1)) if gradient else loss
    program = jax.jit(function).lower(*given).compile()
    analysis = program.memory_analysis()
    return Contender(
        name,
        lambda: jax.block_until_ready(program(*given)),
        None if analysis is None else analysis.temp_size_in_bytes,
    )


def torch_contender(given: Operands, gradient: bool) -> Contender:
    """torch's dense log-prob and entropy, eager, on the same numbers."""
    torch = importlib.import_module("torch")
    dtype = getattr(torch, given.hidden.dtype.name)
    hidden, unembed = (
        torch.tensor(np.asarray(x, np.float32)).to(dtype).requires_grad_(gradient)
        for x in given[:2]
    )
    targets = torch.tensor(np.asarray(given.targets)).long()

    def run() -> None:
        with torch.set_grad_enabled(gradient):
            logprobs = (hidden @ unembed.T).float().log_softmax(-1)
            logprob = logprobs.gather(1, targets[:, None])[:, 0]
            entropy = -(logprobs.exp() * logprobs).sum(-1)
            loss = (logprob + ENTROPY_WEIGHT * entropy).mean()
            if gradient:
                torch.autograd.grad(loss, (hidden, unembed))

    return Contender("torch", run, None)


def contenders(given: Operands, gradient: bool, names: list[str]) -> list[Contender]:
    """Everything asked for that is installed and runs; what does not is named."""
    found = []
    for name in names:
        package, loss = LOSSES.get(name, (name, dense))
        if package is not None and importlib.util.find_spec(package) is None:
            print(f"{name}: not installed")
            continue
        try:
            contender = (
                torch_contender(given, gradient)
                if name == "torch"
                else compiled(name, loss, given, gradient)
            )
            contender.run()
        except (ImportError, TypeError, ValueError, NotImplementedError, AttributeError) as error:
            print(f"{name}: cannot: {type(error).__name__}: {str(error).splitlines()[0]}")
            continue
        found.append(contender)
    return found


def measure(runners: list[Contender], repeats: int) -> dict[str, list[float]]:
    """Seconds of each, interleaved."""
    times: dict[str, list[float]] = {runner.name: [] for runner in runners}
    for _ in range(repeats):
        for runner in runners:
            start = time.perf_counter()
            runner.run()
            times[runner.name].append(time.perf_counter() - start)
    return times


def report(title: str, runners: list[Contender], times: dict[str, list[float]]) -> None:
    """A Markdown table; ratios to the first contender."""
    print(f"\n{title}\n\n| | best s | median s | best ÷ | median ÷ | temp MiB | temp ÷ |")
    print("|---|---|---|---|---|---|---|")
    first = runners[0]
    for runner in runners:
        best, median = min(times[runner.name]), float(np.median(times[runner.name]))
        row = [
            f"{best:.3f}",
            f"{median:.3f}",
            f"{best / min(times[first.name]):.2f}",
            f"{median / float(np.median(times[first.name])):.2f}",
        ]
        if runner.temporary_bytes is None or not first.temporary_bytes:
            row += ["-", "-"]
        else:
            row.append(f"{runner.temporary_bytes / 2**20:.1f}")
            row.append(f"1/{first.temporary_bytes / max(1, runner.temporary_bytes):.0f}")
        print(f"| {runner.name} | " + " | ".join(row) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", default="A,B")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--passes", default="value_and_grad,value")
    parser.add_argument("--names", default=",".join([*LOSSES, "torch"]))
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    del sys.argv[1:]  # tokamax parses it as absl flags of its own
    for size in arguments.sizes.split(","):
        for dtype in arguments.dtypes.split(","):
            given = operands(size, dtype)
            for which in arguments.passes.split(","):
                gradient = which == "value_and_grad"
                runners = contenders(given, gradient, arguments.names.split(","))
                times = measure(runners, arguments.repeats)
                report(f"{size} {SIZES[size]} {dtype}, {which}", runners, times)
                del runners
                jax.clear_caches()


if __name__ == "__main__":
    main()
