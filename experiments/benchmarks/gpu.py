"""One call that says whether the GPU kernels are right and fast: under 5 minutes, prints tables.

    python -m experiments.benchmarks.gpu
    … --names chunked,dense --sizes tiny --side 256 --tokens 128    # a rehearsal on a CPU

First the two ceilings of this card, measured: a large bfloat16 matrix product and a large copy.
Then for each size: errors against float64, seconds of the forward pass and of value and gradients,
each as a share of the roof (2TDV operations forward, 6TDV backward, at the measured rate), and
temporary memory beyond the gradient of the unembedding. To reach: forward ≥ 50 %, backward ≥ 45 %,
temporary ≤ that gradient + 64 MiB. Then attention by implementation.

Exits with 1 if a result is wrong or a target is missed, so that a job can hold it.
"""

import argparse
import math
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.benchmarks import attention as attention_benchmark
from experiments.benchmarks.logprob import Operands, dense, ours
from kernels.attention.api import attention
from kernels.logprob.api import token_logprobs

SIZES = {
    "A": (2048, 576, 49152),
    "B": (1024, 896, 151936),
    "C": (2048, 4096, 128256),
    "ragged": (777, 576, 49157),
    "tiny": (77, 64, 1001),
}
CHECKS = (
    ("tiny", "float32"),
    ("ragged", "float32"),
    ("ragged", "bfloat16"),
    ("A", "bfloat16"),
)
FORWARD_TARGET, BACKWARD_TARGET, SPARE_MIB = 0.50, 0.45, 64
MIB = 2**20


def seconds(run: Callable[[], Any], repeats: int = 7, calls: int = 10) -> float:
    """Of one call of a compiled program: the median of `repeats` means over `calls` in a row.

    In a row, because waiting for each call adds the host's latency, which is as long as the
    shortest of these programs.
    """
    jax.block_until_ready([run() for _ in range(2)])
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        result = None
        for _ in range(calls):
            result = run()
        jax.block_until_ready(result)
        times.append((time.perf_counter() - start) / calls)
    return float(np.median(times))


def random_operands(size: str, dtype: str, seed: int) -> Operands:
    """Random numbers, since zeros would be faster and hide mistakes; the fourth is ignored."""
    tokens, width, vocabulary = SIZES[size]
    keys = jax.random.split(jax.random.key(seed), 3)
    return Operands(
        jax.random.normal(keys[0], (tokens, width)).astype(dtype),
        (jax.random.normal(keys[1], (vocabulary, width)) * width**-0.5).astype(dtype),
        jax.random.randint(keys[2], (tokens,), 0, vocabulary).at[3].set(-100),
    )


def ceilings(side: int) -> tuple[float, float]:
    """(bfloat16 FLOP/s of a product of two squares, bytes/s of a copy) of this card."""
    a, b = (jax.random.normal(jax.random.key(i), (side, side), jnp.bfloat16) for i in (0, 1))
    product = jax.jit(jnp.matmul)
    big = jax.random.normal(jax.random.key(2), (8 * side**2,), jnp.bfloat16)
    copy = jax.jit(lambda x: x + jnp.bfloat16(1))
    return 2 * side**3 / seconds(lambda: product(a, b)), 2 * big.nbytes / seconds(lambda: copy(big))


def norm_error(got: jax.Array, want: np.ndarray) -> float:
    """‖got - want‖ / ‖want‖; NaN stays NaN, which passes no comparison."""
    difference = np.asarray(got, np.float64) - want
    return float(np.linalg.norm(difference) / np.linalg.norm(want))


def exact(given: Operands, weights: np.ndarray) -> list[np.ndarray]:
    """Three values and two gradients in float64 on the host, a block of tokens at a time."""
    hidden, unembed = (np.asarray(x, np.float64) for x in given[:2])
    targets = np.asarray(given.targets)
    values, d_hidden, d_unembed = [], [], np.zeros_like(unembed)
    for start in range(0, len(targets), 256):
        rows = slice(start, start + 256)
        g = weights[:, rows] * (targets[rows] != -100)
        z = hidden[rows] @ unembed.T
        lse = np.log(np.exp(z - z.max(1, keepdims=True)).sum(1)) + z.max(1)
        logp = z - lse[:, None]
        p = np.exp(logp)
        entropy = -(p * logp).sum(1)
        index = np.arange(len(z)), np.maximum(targets[rows], 0)
        kept = targets[rows] != -100
        values.append(np.stack([logp[index], entropy, lse]) * kept)
        constant = g[2] - g[0] - g[1] * entropy
        dz = p * (constant[:, None] - g[1][:, None] * logp)
        dz[index] += g[0]
        d_hidden.append(dz @ unembed)
        d_unembed += dz.T @ hidden[rows]
    return [*np.concatenate(values, axis=1), np.concatenate(d_hidden), d_unembed]


def check(size: str, dtype: str, implementation: str) -> tuple[float, float]:
    """(largest error of a value in nats, largest relative error of a gradient)."""
    given = random_operands(size, dtype, seed=3)
    weights = np.random.default_rng(0).normal(size=(3, len(given.targets))).astype(np.float32)

    def weighted(hidden: jax.Array, unembed: jax.Array) -> tuple[jax.Array, Any]:
        scored = token_logprobs(hidden, unembed, given.targets, implementation=implementation)
        return jnp.sum(weights * jnp.stack(scored)), scored

    run = jax.jit(jax.value_and_grad(weighted, argnums=(0, 1), has_aux=True))
    (_, scored), gradients = run(given.hidden, given.unembed)
    again = run(given.hidden, given.unembed)[1]
    if not all(bool(jnp.all(a == b)) for a, b in zip(gradients, again, strict=True)):
        return math.nan, math.nan  # two runs differ: a race
    want = exact(given, weights)
    values = [np.abs(np.asarray(x) - y).max() for x, y in zip(scored, want[:3], strict=True)]
    errors = [norm_error(x, y) for x, y in zip(gradients, want[3:], strict=True)]
    return float(np.max(values)), float(np.max(errors))


def logprob_row(size: str, dtype: str, name: str, rate: float) -> tuple[str, bool]:
    """One line of the table, and whether its targets are met."""
    given = random_operands(size, dtype, seed=7)
    loss = dense if name == "dense" else ours(name)
    forward = jax.jit(loss).lower(*given).compile()
    both = jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(*given).compile()
    analysis = both.memory_analysis()
    spare = (analysis.temp_size_in_bytes if analysis else 0) / MIB
    forward_s = seconds(lambda: forward(*given))
    both_s = seconds(lambda: both(*given))
    operations = math.prod(SIZES[size])
    forward_share = 2 * operations / rate / forward_s
    backward_share = 6 * operations / rate / max(both_s - forward_s, 1e-9)
    line = (
        f"| {size} | {dtype} | {name} | {forward_s * 1e3:.3f} | {forward_share:.0%} "
        f"| {both_s * 1e3:.3f} | {backward_share:.0%} | {spare:.0f} |"
    )
    judged = name == "pallas_gpu" and dtype == "bfloat16" and size in ("A", "B")
    met = forward_share >= FORWARD_TARGET and backward_share >= BACKWARD_TARGET
    return line, not judged or (met and spare <= given.unembed.nbytes / MIB + SPARE_MIB)


def attention_outcome(name: str, arrays: list[jax.Array], segments: jax.Array) -> list[jax.Array]:
    """The output and the gradients of its sum."""
    out, vjp = jax.vjp(
        lambda q, k, v: attention(q, k, v, segments=segments, implementation=name), *arrays
    )
    return [out, *vjp(jnp.ones_like(out))]


def attention_rows(lengths: list[int]) -> list[str]:
    """Errors against the dense path in float32, and times, of each implementation."""
    rows = []
    for tokens in lengths:
        q, k, v, segments = attention_benchmark.operands(tokens, True, "bfloat16")
        wide = [x.astype(jnp.float32) for x in (q, k, v)]
        want = [np.asarray(x, np.float64) for x in attention_outcome("reference", wide, segments)]
        for name in ("cudnn", "chunked", "reference"):
            try:
                got = attention_outcome(name, [q, k, v], segments)
                runner = attention_benchmark.contender(name, (q, k, v, segments))
            except (NotImplementedError, RuntimeError) as error:
                rows.append(f"| {tokens} | {name} | {str(error).splitlines()[0]} | |")
                continue
            error = max(norm_error(x, y) for x, y in zip(got, want, strict=True))
            rows.append(f"| {tokens} | {name} | {error:.1e} | {seconds(runner.run) * 1e3:.3f} |")
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", default="A,B,C,ragged")
    parser.add_argument("--names", default="pallas_gpu,chunked,dense", help="the first is checked")
    parser.add_argument("--side", type=int, default=8192, help="of the matrices for the ceilings")
    parser.add_argument("--tokens", default="1024,4096", help="of the rows for attention")
    arguments = parser.parse_args()
    names = arguments.names.split(",")
    sizes = arguments.sizes.split(",")
    failed = False

    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}")
    rate, bandwidth = ceilings(arguments.side)
    print(f"measured ceilings: {rate / 1e12:.0f} TFLOP/s bfloat16, {bandwidth / 1e12:.2f} TB/s")

    print("\n| size | type | values off by (nats) | gradients off by | right |")
    print("|---|---|---|---|---|")
    for size, dtype in CHECKS:
        if size in sizes:
            value, gradient = check(size, dtype, names[0])
            right = value < 1e-4 and gradient < (2e-5 if dtype == "float32" else 1e-2)
            failed |= not right
            print(f"| {size} | {dtype} | {value:.1e} | {gradient:.1e} | {right} |", flush=True)

    print("\n| size | type | path | forward ms | of 2TDV | both ms | of 6TDV | temp MiB |")
    print("|---|---|---|---|---|---|---|---|")
    for size in sizes:
        for dtype in ("bfloat16", "float32") if size in ("A", "ragged") else ("bfloat16",):
            for name in names:
                line, met = logprob_row(size, dtype, name, rate)
                failed |= not met
                print(line, flush=True)

    print("\n| tokens | attention | off by | both ms |\n|---|---|---|---|")
    for row in attention_rows([int(x) for x in arguments.tokens.split(",")]):
        print(row, flush=True)
    print(f"\n{'MISSED: see the tables' if failed else 'all right, all targets met'}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
