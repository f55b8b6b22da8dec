"""Attention of packed rows: time and temporary memory of each implementation by row length.

    python -m experiments.benchmarks.attention            # this platform's implementations, minutes
    python -m experiments.benchmarks.attention --tokens 4096,8192 --names chunked

Rows of 14 query and 2 key heads, 64 wide, value and gradients; rows hold four segments of equal
length (`packed`) or one (`whole`). `jax_nn` is the dense path of jax.nn with the same mask.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np

from experiments.benchmarks.logprob import Contender, measure, report
from kernels.attention.api import attention

HEADS, KV_HEADS, WIDTH = 14, 2, 64
TOTAL_TOKENS = 2048
"""Rows of fewer tokens are batched up to this many."""

Arrays = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


def operands(tokens: int, packed: bool, dtype: str) -> Arrays:
    """q, k, v and segments, the last sixteenth of each row padding."""
    rows = max(1, TOTAL_TOKENS // tokens)
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (
        jax.random.normal(key, (rows, tokens, heads, WIDTH)).astype(dtype)
        for key, heads in zip(keys, (HEADS, KV_HEADS, KV_HEADS), strict=True)
    )
    place = np.arange(tokens)
    segments = place * 4 // tokens + 1 if packed else np.ones(tokens)
    segments = np.where(place < tokens - tokens // 16, segments, 0)
    return q, k, v, jnp.asarray(np.tile(segments, (rows, 1)), jnp.int32)


def jax_nn(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array) -> jax.Array:
    """jax.nn's dense attention with the mask of the segments."""
    same = segments[:, None, :, None] == segments[:, None, None, :]
    return jax.nn.dot_product_attention(q, k, v, mask=same, is_causal=True, implementation="xla")


def contender(name: str, given: Arrays) -> Contender:
    """Value and gradients of the sum of squares of the output, compiled."""

    def run(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array) -> jax.Array:
        if name == "jax_nn":
            out = jax_nn(q, k, v, segments)
        else:
            out = attention(q, k, v, segments=segments, implementation=name)
        out = jnp.where((segments != 0)[:, :, None, None], out, 0)
        return jnp.sum(out.astype(jnp.float32) ** 2)

    program = jax.jit(jax.value_and_grad(run, argnums=(0, 1, 2))).lower(*given).compile()
    analysis = program.memory_analysis()
    temporary = None if analysis is None else analysis.temp_size_in_bytes
    result = Contender(name, lambda: jax.block_until_ready(program(*given)), temporary)
    result.run()
    return result


def main() -> None:
    platform = jax.devices()[0].platform
    own = {"gpu": ["cudnn"], "tpu": ["splash"]}.get(platform, [])
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", default="128,512,2048")
    parser.add_argument("--dtype", default="float32" if platform == "cpu" else "bfloat16")
    parser.add_argument("--names", default=",".join(["jax_nn", "reference", "chunked", *own]))
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    for packed in (True, False):
        for tokens in map(int, arguments.tokens.split(",")):
            given = operands(tokens, packed, arguments.dtype)
            runners = [contender(name, given) for name in arguments.names.split(",")]
            rows = "packed" if packed else "whole"
            title = f"{given[0].shape[0]} {rows} rows of {tokens}, {arguments.dtype}"
            report(title, runners, measure(runners, arguments.repeats))


if __name__ == "__main__":
    main()
