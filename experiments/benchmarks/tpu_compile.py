"""What TPUs need for the kernels and for a whole training step, from their compiler, without a TPU.

    pip install --no-deps --target /some/folder libtpu==0.0.42.1
    PYTHONPATH=/some/folder python -m experiments.benchmarks.tpu_compile                # minutes
    … --chips v5e --models qwen2.5-0.5b --steps_only

Compiled ahead of time for the real devices of a topology; nothing runs. `VMEM` is what the compiler
gave each kernel of a program, HBM is of one device. `state` of a training step is parameters, both
moments and the gradient, all float32; `temp` is the microbatch's: activations, kernels, copies.
tests/kernels/test_tpu_compile.py holds the limits.
"""

import argparse
import math
import os
import re
import time
from typing import Any, NamedTuple

# Else libtpu asks a metadata server, which is not there, what machine this is.
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from kernels.attention.api import sharded_attention
from kernels.logprob.sharded import sharded_token_logprobs
from telescope_jax.config import OptimizerConfig, PolicyConfig
from telescope_jax.learner.loss import Denominators, LossSettings
from telescope_jax.learner.step import Step
from telescope_jax.model.decoder import Decoder
from telescope_jax.sharding import ACTIVATIONS, AXES
from telescope_jax.types import PackedBatch

MIB = 2**20
ROWS = ("data", "fsdp")
TOPOLOGIES = {"v5e": "v5e:2x2", "v6e": "v6e:2x2", "v5p": "v5p:2x2x1", "v4": "v4:2x2x1"}
"""The smallest slice of each chip that is four devices."""

HBM_GIB = {"v5e": 16, "v6e": 32, "v5p": 95, "v4": 32}
"""Of one chip, from data sheets."""

QWEN_05B = PolicyConfig(
    family="qwen2",
    vocab_size=151_936,
    width=896,
    layers=24,
    heads=14,
    kv_heads=2,
    head_dim=64,
    mlp_width=4_864,
    rope_theta=1e6,
    compute_dtype="bfloat16",
    remat="block",
    scan_layers=True,
)
QWEN_3B = PolicyConfig(
    family="qwen2",
    vocab_size=151_936,
    width=2_048,
    layers=36,
    heads=16,
    kv_heads=2,
    head_dim=128,
    mlp_width=11_008,
    rope_theta=1e6,
    compute_dtype="bfloat16",
    remat="block",
    scan_layers=True,
)
MODELS = {"qwen2.5-0.5b": QWEN_05B, "qwen2.5-3b": QWEN_3B}
"""Sizes as in the models' config.json."""


class Compiled(NamedTuple):
    """What the compiler says of one program; bytes of one device."""

    seconds: float
    kernels: dict[str, int]
    """VMEM of each Pallas kernel, by name."""
    arguments: int
    outputs: int
    """Without those that take an argument's memory."""
    temporary: int


def mesh_of(chip: str) -> Mesh:
    """Four chips of a kind that need not be here, as fsdp 2 and tensor 2."""
    topology = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[chip])
    return Mesh(np.array(topology.devices[:4]).reshape(1, 2, 1, 2), AXES)


def shaped(mesh: Mesh, shape: tuple[int, ...], dtype: Any, *spec: Any) -> jax.ShapeDtypeStruct:
    """An array to be, and where it will lie."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))


def compile_for(function: Any, *arguments: Any) -> Compiled:
    """Compiles a jitted function for the devices that its arguments lie on."""
    start = time.perf_counter()
    compiled = function.trace(*arguments).lower().compile()
    seconds = time.perf_counter() - start
    analysis = compiled.memory_analysis()
    assert analysis is not None
    return Compiled(
        seconds,
        _kernels(compiled.as_text()),
        analysis.argument_size_in_bytes,
        analysis.output_size_in_bytes - analysis.alias_size_in_bytes,
        analysis.temp_size_in_bytes,
    )


def _kernels(hlo: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for line in hlo.splitlines():
        if 'custom_call_target="tpu_custom_call"' not in line:
            continue
        name = re.match(r"\s*(?:ROOT )?%?([A-Za-z_]\w*)", line)
        used = re.search(r'"used_scoped_memory_configs":\[\{[^}]*?"size":"(\d+)"', line)
        key = name.group(1) if name else "kernel"
        found[key] = max(found.get(key, 0), int(used.group(1)) if used else 0)
    return found


def logprobs(mesh: Mesh, tokens: int, width: int, vocabulary: int, dtype: Any) -> Compiled:
    """Log-probs and both gradients over the mesh."""

    def both(hidden, unembed, targets, cotangent):
        def logprob(hidden, unembed):
            return sharded_token_logprobs(
                hidden, unembed, targets, mesh=mesh, implementation="pallas_tpu"
            ).logprob

        out, vjp = jax.vjp(logprob, hidden, unembed)
        return out, vjp(cotangent)

    return compile_for(
        jax.jit(both),
        shaped(mesh, (tokens, width), dtype, ROWS, None),
        shaped(mesh, (vocabulary, width), dtype, "tensor", "fsdp"),
        shaped(mesh, (tokens,), jnp.int32, ROWS),
        shaped(mesh, (tokens,), jnp.float32, ROWS),
    )


def splash(mesh: Mesh, tokens: int, heads: int, kv_heads: int, width: int) -> Compiled:
    """Attention of four rows and its gradients over the mesh."""

    def both(q, k, v, segments, cotangent):
        def attend(q, k, v):
            return sharded_attention(q, k, v, segments=segments, mesh=mesh, implementation="splash")

        out, vjp = jax.vjp(attend, q, k, v)
        return out, vjp(cotangent)

    q = shaped(mesh, (4, tokens, heads, width), jnp.bfloat16, ROWS, None, "tensor", None)
    k = shaped(mesh, (4, tokens, kv_heads, width), jnp.bfloat16, ROWS, None, "tensor", None)
    segments = shaped(mesh, (4, tokens), jnp.int32, ROWS, None)
    return compile_for(jax.jit(both), q, k, k, segments, q)


class TrainingStep(NamedTuple):
    """The learner's two large programs, and what is alive on a device while they run."""

    accumulate: Compiled
    apply: Compiled
    state: int

    @property
    def peak(self) -> int:
        """HBM of one device at the worst moment of an update."""
        # The state holds all that accumulate is given but the batch, and the sums it returns.
        return self.state + max(x.temporary + x.outputs for x in (self.accumulate, self.apply))


def training_step(mesh: Mesh, policy: PolicyConfig, rows: int, tokens: int) -> TrainingStep:
    """The learner's own jitted functions for one microbatch of `rows` rows, and for the update."""
    decoder = Decoder(policy, policy.vocab_size, mesh=mesh)
    step = Step(decoder, mesh, LossSettings(), OptimizerConfig(), temperature=1.0)

    def placed(shapes: Any, shardings: Any) -> Any:
        return jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings
        )

    everywhere = NamedSharding(mesh, P())
    params = placed(jax.eval_shape(decoder.init, jax.random.key(0)), step.params_shardings)
    opt_state = placed(jax.eval_shape(step.init_opt_state, params), step.opt_shardings)
    zeros = jax.eval_shape(step.zeros)
    sums = zeros._replace(
        gradient=placed(zeros.gradient, step.params_shardings),
        loss=placed(zeros.loss, jax.tree.map(lambda _: everywhere, zeros.loss)),
    )
    row = NamedSharding(mesh, ACTIVATIONS["rows"])
    integers, floats, mask = (
        jax.ShapeDtypeStruct((rows, tokens), dtype, sharding=row)
        for dtype in (jnp.int32, jnp.float32, jnp.bool_)
    )
    batch: Any = PackedBatch(
        tokens=integers,  # pyright: ignore[reportArgumentType]: shapes stand for arrays here
        segments=integers,  # pyright: ignore[reportArgumentType]
        positions=integers,  # pyright: ignore[reportArgumentType]
        loss_mask=mask,  # pyright: ignore[reportArgumentType]
        logprobs=floats,  # pyright: ignore[reportArgumentType]
        advantages=floats,  # pyright: ignore[reportArgumentType]
    )
    scalar = jax.ShapeDtypeStruct((), jnp.float32, sharding=everywhere)
    counts: list[Any] = [scalar] * len(Denominators._fields)
    totals = Denominators(*counts)
    return TrainingStep(
        compile_for(step.accumulate, params, sums, batch, totals),
        compile_for(step.apply, params, opt_state, sums, scalar),
        sum(map(_device_bytes, jax.tree.leaves((params, opt_state, sums)))),
    )


def _device_bytes(leaf: jax.ShapeDtypeStruct) -> int:
    assert leaf.sharding is not None
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


def vmem_of(got: Compiled) -> str:
    """MiB of each kernel, by name."""
    return ", ".join(f"{name} {size / MIB:.1f}" for name, size in got.kernels.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--chips", default=",".join(TOPOLOGIES))
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--steps_only", action="store_true", help="no kernels on their own")
    parser.add_argument("--rows", type=int, default=4, help="of a microbatch")
    parser.add_argument("--tokens", type=int, default=2_048, help="of a row")
    arguments = parser.parse_args()
    chips, models = (
        [x for x in text.split(",") if x] for text in (arguments.chips, arguments.models)
    )

    programs = (
        ("log-probs 4096 × 896 × 151936 bf16", logprobs, (4096, 896, 151936, jnp.bfloat16)),
        ("log-probs 4096 × 4096 × 128256 bf16", logprobs, (4096, 4096, 128256, jnp.bfloat16)),
        ("log-probs 4096 × 896 × 151936 f32", logprobs, (4096, 896, 151936, jnp.float32)),
        ("splash 4 rows of 4096, 14 / 2 heads of 64", splash, (4096, 14, 2, 64)),
    )
    if not arguments.steps_only:
        print("| chip | program | VMEM MiB by kernel | HBM temp MiB | compile s |")
        print("|---|---|---|---|---|")
    for chip in () if arguments.steps_only else chips:
        for title, program, sizes in programs:
            got = program(mesh_of(chip), *sizes)
            vmem = vmem_of(got)
            line = f"{vmem} | {got.temporary / MIB:.0f} | {got.seconds:.0f}"
            print(f"| {chip} | {title} | {line} |", flush=True)

    print(
        "\n| chip, 4 of them | model | state GiB | temp GiB | peak of HBM GiB | VMEM | compile s |"
    )
    print("|---|---|---|---|---|---|---|")
    for chip in chips:
        for name in models:
            got = training_step(mesh_of(chip), MODELS[name], arguments.rows, arguments.tokens)
            gib = [x / 2**30 for x in (got.state, got.accumulate.temporary, got.peak)]
            line = f"{gib[0]:.2f} | {gib[1]:.2f} | {gib[2]:.2f} of {HBM_GIB[chip]}"
            seconds = got.accumulate.seconds + got.apply.seconds
            vmem = vmem_of(got.accumulate)
            print(f"| {chip} | {name} | {line} | {vmem} | {seconds:.0f} |", flush=True)


if __name__ == "__main__":
    main()
