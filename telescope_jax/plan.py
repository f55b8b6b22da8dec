"""What a run needs on hardware that is not here: its update, compiled ahead of time for a topology.

    pip install -e '.[plan]'
    python -m telescope_jax.plan --config=experiments/qwen2p5.py:7b --topology=v5e:16x16

The real functions of the update are compiled by the accelerator's own compiler, for the mesh and
the batch of the study. Memory is the compiler's account; operations and collectives are counted in
its program (hlo.py), loops in full; the time is a prediction from data sheets, with its
assumptions. Nothing runs, and no weights are read.

Exit codes: 0 it fits; 1 it does not; 2 refused before any work.
"""

import dataclasses
import math
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from telescope_jax import extras, flags, hlo
from telescope_jax.config import Config

OWN_FLAGS = {
    "topology": flags.Flag("", "KIND:SHAPE of the slice, as v5e:16x16 or v5p:4x4x8."),
    "mfu": flags.Flag(0.5, "Share of the peak rate that matrix products are taken to reach."),
}
GIB = 1 << 30


@dataclasses.dataclass(frozen=True, slots=True)
class Chip:
    """Data sheet of one device: bf16 peak, usable memory, and bandwidths, in SI units."""

    flops: float
    memory: float
    memory_bytes_per_s: float
    link_bytes_per_s: float


CHIPS = {
    "v4": Chip(275e12, 32 * GIB, 1_228e9, 300e9),
    "v5e": Chip(197e12, 15.75 * GIB, 819e9, 200e9),
    "v5p": Chip(459e12, 95 * GIB, 2_765e9, 600e9),
    "v6e": Chip(918e12, 31.25 * GIB, 1_640e9, 448e9),
}
"""Peak rates as Google publishes them; links are all of a chip's together, in one direction."""


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """One compiled function, for one device.

    Attributes:
      arguments, temporary, outputs: bytes of memory; what is donated counts as an argument only.
      flops: of matrix products; a kernel's own are not in it.
      accessed: bytes read and written.
      collectives: kind -> (how many, bytes that arrive).
      compile_s: seconds it took.
      beside: bytes that lie in memory while it runs and are no argument of it.
      open_loops: loops of unknown length, counted as one turn.
    """

    arguments: float
    temporary: float
    outputs: float
    flops: float
    accessed: float
    collectives: Mapping[str, tuple[int, float]]
    compile_s: float
    beside: float = 0.0
    open_loops: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class OutOfMemory:
    """The compiler refused; its own words say how much was asked of how much."""

    words: str


def compile_update(
    config: Config, vocab_size: int, mesh: Any
) -> tuple[int, dict[str, Program | OutOfMemory]]:
    """Parameters of the policy, and the functions of its update, compiled for the mesh's devices.

    Args:
      mesh: of a topology (jax.experimental.topologies), or of devices that are here.
    """
    from telescope_jax.learner.learner import needs_old_logprobs
    from telescope_jax.learner.lowering import (
        abstract_batch,
        bytes_beside,
        count_params,
        lower_update,
    )
    from telescope_jax.learner.settings import loss_settings
    from telescope_jax.learner.step import Step
    from telescope_jax.model.decoder import Decoder

    settings, old = loss_settings(config), config.loss.old_logprobs
    minibatches = config.batch.minibatches
    step = Step(
        Decoder(config.policy, vocab_size, mesh=mesh),
        mesh,
        settings,
        config.optimizer,
        temperature=config.sampling.temperature,
        stable_old=old and minibatches == 1,
    )
    batch = abstract_batch(
        mesh,
        config.batch.rows_per_microbatch,
        config.batch.seq_len,
        old=needs_old_logprobs(old, minibatches),
        reference=settings.needs_reference_logprobs,
    )
    lowered = lower_update(step, mesh, batch)
    beside = bytes_beside(step, reference=settings.needs_reference_logprobs, updates=minibatches)
    programs = {name: _compile(one, beside[name]) for name, one in lowered.items()}
    return count_params(step), programs


def _compile(lowered: Any, beside: float) -> Program | OutOfMemory:
    import jax

    started = time.monotonic()
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        used = re.search(r"Used ([\d.]+\w) of ([\d.]+\w) hbm", str(error))
        words = f"{used[1]} of {used[2]}" if used else str(error).splitlines()[0]
        return OutOfMemory(words)
    seconds = time.monotonic() - started
    memory, counts = compiled.memory_analysis(), hlo.count(compiled.as_text())
    return Program(
        arguments=float(memory.argument_size_in_bytes),
        temporary=float(memory.temp_size_in_bytes),
        outputs=float(memory.output_size_in_bytes - memory.alias_size_in_bytes),
        flops=counts.flops,
        accessed=counts.accessed,
        collectives=counts.collectives,
        compile_s=seconds,
        beside=beside,
        open_loops=counts.open_loops,
    )


def microbatches(config: Config) -> int:
    """Microbatches of a step in which every episode is as long as it may be: an upper bound."""
    rollouts = config.groups_per_batch * config.group_size
    rows = math.ceil(rollouts / max(1, config.batch.seq_len // config.context()))
    return math.ceil(rows / config.batch.rows_per_microbatch)


def passes(config: Config) -> int:
    """Forward passes over a batch before its first update: π_old's and the reference policy's."""
    from telescope_jax.learner.learner import needs_old_logprobs

    old = needs_old_logprobs(config.loss.old_logprobs, config.batch.minibatches)
    return old + bool(config.loss.reference_kl_coef)


def state_bytes(config: Config, params: int) -> float:
    """Parameters, gradient and both moments, and the reference policy, of the whole mesh."""
    master, first_moment = (
        2 if dtype == "bfloat16" else 4
        for dtype in (config.optimizer.master_dtype, config.optimizer.first_moment_dtype)
    )
    reference = master if config.loss.reference_kl_coef else 0
    return float(params) * (master + 8 + first_moment + reference)


def predicted_s(program: Program, chip: Chip, flops: float, mfu: float) -> dict[str, float]:
    """Seconds by cause: arithmetic, memory, links.

    Args:
      flops: of one device: those counted, or 8·params·tokens where kernels hide theirs.
    """
    moved = sum(size for _, size in program.collectives.values())
    return {
        "arithmetic": flops / (chip.flops * mfu),
        "memory": program.accessed / chip.memory_bytes_per_s,
        "links": moved / chip.link_bytes_per_s,
    }


def report(
    config: Config,
    topology: str,
    devices: int,
    params: int,
    programs: Mapping[str, Program | OutOfMemory],
    chip: Chip,
    mfu: float,
) -> tuple[str, bool]:
    """The text of the plan, and whether it fits."""
    rows, seq_len = config.batch.rows_per_microbatch, config.batch.seq_len
    axes = ("data", "fsdp", "tensor") + (("context",) if config.mesh.context > 1 else ())
    mesh = " × ".join(f"{axis} {getattr(config.mesh, axis)}" for axis in axes)
    lines = [
        f"{params / 1e9:.2f}B parameters on {topology} ({devices} devices): {mesh}",
        f"microbatch {rows} × {seq_len} tokens, {config.policy.compute_dtype}, "
        f"remat {config.policy.remat}; state {state_bytes(config, params) / devices / GIB:.2f} GiB "
        "a device if it split evenly",
    ]
    fits, seconds = True, {}
    tokens = rows * seq_len / devices
    again = 2 if config.policy.remat == "block" else 0
    model_flops = {"score": 2 * params * tokens, "accumulate": (6 + again) * params * tokens}
    for name, program in programs.items():
        if isinstance(program, OutOfMemory):
            lines.append(f"{name}: does NOT fit: the compiler says {program.words} of HBM")
            fits = False
            continue
        used = program.arguments + program.temporary + program.outputs + program.beside
        fits = fits and used <= chip.memory
        flops = max(program.flops, model_flops.get(name, 0.0))
        seconds[name] = predicted_s(program, chip, flops, mfu)
        parts = ", ".join(f"{cause} {value:.3g} s" for cause, value in seconds[name].items())
        moved = "; ".join(
            f"{count} {kind} {size / GIB:.2f} GiB"
            for kind, (count, size) in sorted(program.collectives.items())
        )
        lines += [
            f"{name} (compiled in {program.compile_s:.0f} s)",
            f"  HBM     {used / GIB:.2f} of {chip.memory / GIB:.2f} GiB a device: "
            f"{program.arguments / GIB:.2f} arguments, {program.temporary / GIB:.2f} temporary, "
            f"{program.outputs / GIB:.2f} new, {program.beside / GIB:.2f} beside it (optimizer "
            "state, copies of the parameters that stay)",
            f"  FLOPs   {program.flops:.3g} in products outside of kernels"
            + (f", {model_flops[name]:.3g} by the model" if name in model_flops else "")
            + (
                f"; {program.open_loops} loops of unknown length counted once"
                if program.open_loops
                else ""
            ),
            f"  links   {moved or 'none'}",
            f"  time    {parts}",
        ]
    if len(seconds) == len(programs):
        lines += _times(config, seconds, mfu)
    lines.append("it fits" if fits else "it does not fit; " + advice(config, programs, chip))
    return "\n".join(lines), fits


def _times(config: Config, seconds: Mapping[str, Mapping[str, float]], mfu: float) -> list[str]:
    count, updates = microbatches(config), config.batch.minibatches
    runs = {"score": count * passes(config), "accumulate": count, "apply": updates}
    low = sum(runs[name] * max(times.values()) for name, times in seconds.items())
    high = sum(runs[name] * sum(times.values()) for name, times in seconds.items())
    tokens = count * config.batch.rows_per_microbatch * config.batch.seq_len
    return [
        f"step: {count} microbatches"
        + (f", scored {passes(config)} times before," if passes(config) else "")
        + f" and {updates} updates: {low:.3g} s if "
        f"arithmetic, memory and links overlap entirely, {high:.3g} s if not at all "
        f"({tokens / high:,.0f} to {tokens / low:,.0f} tokens/s)",
        f"assumed: {mfu:.0%} of the peak in matrix products, full bandwidth of memory and links, "
        "every episode at its longest; rollouts are another matter",
    ]


def advice(config: Config, programs: Mapping[str, Program | OutOfMemory], chip: Chip) -> str:
    """What to change, the cheapest first."""
    parts = config.mesh.data * config.mesh.fsdp
    ideas = []
    if config.policy.compute_dtype != "bfloat16":
        ideas.append("policy.compute_dtype=bfloat16")
    if config.policy.remat != "block":
        ideas.append("policy.remat=block")
    rows = config.batch.rows_per_microbatch
    if rows > parts:
        ideas.append(f"batch.rows_per_microbatch={max(parts, rows // 2 // parts * parts)}")
    if rows <= parts and config.mesh.fsdp > 1:
        ideas.append(
            f"mesh.context={config.mesh.context * 2} with mesh.fsdp={config.mesh.fsdp // 2} (rows "
            "split over devices too, half of them at once)"
        )
    if config.mesh.data > 1:
        ideas.append(f"mesh.data=1 with mesh.fsdp={parts} (one copy of the parameters)")
    if config.mesh.tensor < config.policy.kv_heads:
        ideas.append(
            f"mesh.tensor={config.mesh.tensor * 2} with mesh.fsdp={max(1, config.mesh.fsdp // 2)} "
            "(activations split over tensor, half the rows at once)"
        )
    if config.optimizer.first_moment_dtype != "bfloat16":
        ideas.append("optimizer.first_moment_dtype=bfloat16")
    if config.optimizer.master_dtype != "bfloat16":
        ideas.append("optimizer.master_dtype=bfloat16")
    accumulate = programs.get("accumulate")
    if isinstance(accumulate, Program) and accumulate.arguments > chip.memory / 2:
        ideas.insert(0, "more devices: the state alone takes more than half")
    ideas.append("a shorter batch.seq_len, or a larger slice")
    return "try, one after the other: " + "; ".join(ideas)


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    arguments = flags.parse(sys.argv if argv is None else argv, OWN_FLAGS)
    config, topology = arguments.config, arguments.extra["topology"]
    kind = topology.partition(":")[0]
    if kind not in CHIPS:
        flags.refuse(
            f"--topology={topology} is none of {', '.join(CHIPS)} with a shape, as v5e:4x4"
        )
    mfu = arguments.extra["mfu"]
    if not 0 < mfu <= 1:
        flags.refuse(f"--mfu={mfu} is a share of the peak rate: above 0, and 1 at most")
    if absent := extras.missing(f"a program for {topology}", "libtpu"):
        flags.refuse(absent)
    # Else libtpu asks a metadata server which machine this is; and a lock file, who else uses it.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    import jax
    from jax.experimental import topologies

    from telescope_jax.pretrained import StartError, open_start
    from telescope_jax.sharding import make_mesh

    vocab_size = config.policy.vocab_size
    try:
        config, tokenizer, _ = open_start(config)
        vocab_size = config.policy.vocab_size or tokenizer.vocab_size
    except StartError as error:
        if not vocab_size:
            flags.refuse(f"{error}; or write the policy's sizes, vocab_size too, into the study")
        print(f"plan: sizes as the study writes them ({str(error)[:120]})", file=sys.stderr)
    try:
        devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
        mesh = make_mesh(config.mesh, devices)
    except ValueError as error:
        flags.refuse(str(error))
    except Exception as error:  # libtpu knows no such slice
        flags.refuse(f"--topology={topology}: {str(error).splitlines()[0]}")
    # A program for devices that are not here cannot be read back from the compilation cache.
    jax.config.update("jax_enable_compilation_cache", False)
    params, programs = compile_update(config, vocab_size, mesh)
    text, fits = report(config, topology, mesh.size, params, programs, CHIPS[kind], mfu)
    print(text)
    return 0 if fits else 1


if __name__ == "__main__":
    sys.exit(main())
