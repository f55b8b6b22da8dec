"""Tokens a second of one update: ours against torch with transformers, and of the matmul rate.

    python -m experiments.benchmarks.trainer                        # both sizes
    python -m experiments.benchmarks.trainer --sizes 0.5M --repeats 7
    python -m experiments.benchmarks.trainer --check                # agreement alone

The same random weights, packed batch and loss for both: policy gradient × TIS (cap 2) over the
tokens of the update, AdamW, global norm clipped at 1. Before anything is timed, the two losses and
all gradients, sums over the update's microbatches, must agree. Both use all cores that this process
may use. Torch runs in a process of its own that waits while ours works, and the repeats take turns,
so that what else runs on the machine meets both alike. Ours is the learner as a run has it, with
its statistics and the entropy; torch computes the loss alone, by SDPA and a block-diagonal mask,
all in float32.

Share of the matmul rate = 6 · parameters · tokens ÷ seconds, ÷ the better of XLA's and torch's rate
of a large float32 matmul, measured in the same run. A tied embedding counts once: it multiplies as
the unembedding. Attention's products are left out, as is usual.

To reach: ≥ 1.2 × torch, and ≥ 0.6 of the matmul rate at 135M.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from experiments.benchmarks.peer import Peer
from experiments.benchmarks.policies import (
    SIZES,
    count,
    learner_of,
    random_params,
    write_checkpoint,
)
from telescope_jax.config import OptimizerConfig, PolicyConfig
from telescope_jax.learner.learner import Learner
from telescope_jax.learner.loss import Denominators, LossSettings
from telescope_jax.setup import use_compilation_cache
from telescope_jax.sharding import place_rows
from telescope_jax.types import PackedBatch, Params
from telescope_jax.weights.hf_layout import to_hf

LOSS = LossSettings(tis_cap=2.0)
OPTIMIZER = OptimizerConfig(learning_rate=1e-4)


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a batch: rows of packed rollouts, in microbatches."""

    rows: int
    rows_per_microbatch: int
    seq_len: int
    rollout: int


SHAPES = {"0.5M": Shape(64, 16, 112, 28), "135M": Shape(8, 4, 512, 128)}
POLICIES = {"0.5M": replace(PolicyConfig(), vocab_size=128), "135M": SIZES["135M"]}


def packed_batch(shape: Shape, vocab_size: int, seed: int = 0) -> PackedBatch:
    """Rows full of rollouts of one length; μ is drawn near a random policy's −log V."""
    draw = np.random.default_rng(seed)
    size = (shape.rows, shape.seq_len)
    at = np.arange(shape.seq_len)
    segments = np.broadcast_to(1 + at // shape.rollout, size).astype(np.int32)
    positions = np.broadcast_to(at % shape.rollout, size).astype(np.int32)
    return PackedBatch(
        tokens=draw.integers(0, vocab_size, size).astype(np.int32),
        segments=segments.copy(),
        positions=positions.copy(),
        loss_mask=positions > 0,
        logprobs=(-np.log(vocab_size) + draw.normal(0, 1, size)).astype(np.float32),
        advantages=draw.normal(size=size).astype(np.float32),
    )


def our_gradient(
    learner: Learner, params: Params, batch: PackedBatch, shape: Shape
) -> tuple[float, dict[str, np.ndarray]]:
    """Loss and gradient of the update, under Hugging Face's names."""
    run = learner._step
    step = shape.rows_per_microbatch
    parts = [
        place_rows(jax.tree.map(lambda x, at=at: x[at : at + step], batch), learner.mesh)
        for at in range(0, shape.rows, step)
    ]
    totals = Denominators(*(jnp.float32(0) for _ in Denominators._fields))
    for part in parts:
        totals = run.count(part, totals)
    sums = run.zeros()
    for part in parts:
        sums = run.accumulate(params, sums, part, totals)
    gradient = {name: np.asarray(x) for name, x in to_hf(sums.gradient).items()}
    return float(sums.loss.loss), gradient


def torch_process(folder: Path, threads: int, shape: Shape) -> Peer:
    """It answers `gradient`, `update` and `matmul`."""
    script = Path(__file__).with_name("hf_update.py")
    command = [sys.executable, "-I", script, folder, str(threads)]
    command += [str(shape.rows_per_microbatch), str(OPTIMIZER.learning_rate), str(LOSS.tis_cap)]
    return Peer("torch", command, folder)


def matmul_rate(size: int = 2_048, repeats: int = 5) -> float:
    """FLOP/s of XLA's float32 matmul, the best of the repeats."""
    left = jax.random.normal(jax.random.key(0), (size, size))
    multiply = jax.jit(lambda a, b: a @ b)
    multiply(left, left).block_until_ready()
    took = []
    for _ in range(repeats):
        started = time.perf_counter()
        multiply(left, left).block_until_ready()
        took.append(time.perf_counter() - started)
    return 2 * size**3 / min(took)


def disagreement(mine: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> float:
    """The largest difference of any gradient entry, relative to its tensor's largest entry.

    Raises:
      ValueError: they do not name the same tensors.
    """
    if mine.keys() != theirs.keys():
        raise ValueError(f"only one side has {sorted(mine.keys() ^ theirs.keys())}")
    return max(
        float(np.abs(mine[name] - theirs[name]).max() / np.abs(theirs[name]).max()) for name in mine
    )


def measure(size: str, *, repeats: int, threads: int, check_only: bool, tolerance: float) -> None:
    """Prints what one size gives.

    Raises:
      ValueError: loss or gradients do not agree.
    """
    policy, shape = POLICIES[size], SHAPES[size]
    params = random_params(policy)
    batch = packed_batch(shape, policy.vocab_size)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_checkpoint(folder, policy, params, shape.seq_len)
        arrays = {k: v for k, v in batch._asdict().items() if v is not None}
        np.savez(folder / "batch.npz", **arrays)
        torch = torch_process(folder, threads, shape)
        try:
            learner = learner_of(
                policy,
                params,
                loss=LOSS,
                optimizer=OPTIMIZER,
                rows_per_microbatch=shape.rows_per_microbatch,
            )
            loss, gradient = our_gradient(learner, learner.params, batch, shape)
            their_loss = torch.ask("gradient")["loss"]
            with np.load(folder / "gradient.npz") as file:
                apart = disagreement(gradient, dict(file))
            print(f"{size}: loss {loss:.6f} and {their_loss:.6f}, gradients {apart:.1e} apart")
            if not np.isclose(loss, their_loss, rtol=1e-4, atol=1e-6) or apart > tolerance:
                raise ValueError(f"{size}: the two sides do not compute the same; nothing is timed")
            if not check_only:
                report(size, learner, batch, shape, torch, repeats)
        finally:
            torch.close()


def report(
    size: str, learner: Learner, batch: PackedBatch, shape: Shape, torch: Peer, repeats: int
) -> None:
    """Times both sides in turn, and the matmul on both."""
    learner.update_now([batch])
    torch.ask("update")
    ours, theirs, rates = [], [], []
    for _ in range(repeats):
        started = time.perf_counter()
        learner.update_now([batch])
        ours.append(time.perf_counter() - started)
        theirs.append(torch.ask("update")["seconds"])
        rates += [matmul_rate(repeats=1), torch.ask("matmul")["flop_per_s"]]
    tokens, rate = shape.rows * shape.seq_len, max(rates)
    # A tied embedding is looked up once and multiplies once.
    flop = 6 * count(learner.params) * tokens
    for name, took in (("ours", ours), ("torch", theirs)):
        best, middle = min(took), float(np.median(took))
        cells = [size, name, f"{tokens / best:,.0f}", f"{tokens / middle:,.0f}"]
        cells += [f"{min(theirs) / best:.2f}", f"{np.median(theirs) / middle:.2f}"]
        cells += [f"{flop / best / rate:.2f}", f"{rate / 1e9:.0f}"]
        print("| " + " | ".join(cells) + " |", flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", choices=list(POLICIES), default=list(POLICIES))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--check", action="store_true", help="compare loss and gradients only")
    asked = parser.parse_args(argv)
    threads = len(os.sched_getaffinity(0))
    use_compilation_cache()
    if not asked.check:
        print("| size | side | tokens/s, best | median | ÷ torch | median | of matmul | GFLOP/s |")
        print("|---|---|---|---|---|---|---|---|")
    for size in asked.sizes:
        measure(
            size, repeats=asked.repeats, threads=threads, check_only=asked.check, tolerance=1e-3
        )


if __name__ == "__main__":
    main()
