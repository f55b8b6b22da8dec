"""How long new weights take from the trainer's arrays to a vLLM server that decodes.

    python -m experiments.benchmarks.weight_sync                       # both sizes, minutes
    python -m experiments.benchmarks.weight_sync --sizes 1M --dtype float32

Per size, medians over `--repeats` versions of different bits:
- cp: `cp` of one file of the same bytes, followed by `sync` of the copy;
- publish: cast, Hugging Face names and layout, fingerprints and an orbax save, all committed;
- stage: every worker reads and checks the version, while requests decode;
- pause: decoding stands still, from /pause to /resume, with `--running` requests in flight.

To reach on 135M in bfloat16: publish ≤ 3 × cp, pause ≤ 1 s. `--publish_only` starts no server.
"""

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import jax

from experiments.benchmarks.policies import SIZES, count, random_params
from telescope_jax.config import EngineConfig, PlacementConfig, PolicyConfig
from telescope_jax.inference.embedded import EngineShape
from telescope_jax.inference.pool import Pool
from telescope_jax.inference.vllm_pools import start_pools
from telescope_jax.setup import use_compilation_cache
from telescope_jax.types import Params, SamplingParams
from telescope_jax.weights.hf_config import hf_config_of
from telescope_jax.weights.hf_layout import from_hf, to_hf
from telescope_jax.weights.store import OrbaxStore

CONTEXT = 2_048


def cp_and_sync(folder: Path, size: int, repeats: int) -> float:
    """Median seconds of `cp` of a file of `size` bytes and `sync` of the copy."""
    source = folder / "source"
    source.write_bytes(os.urandom(size))
    took = []
    for i in range(repeats):
        copy = folder / f"copy{i}"
        started = time.perf_counter()
        subprocess.run(["cp", source, copy], check=True)
        subprocess.run(["sync", copy], check=True)
        took.append(time.perf_counter() - started)
        copy.unlink()
    source.unlink()
    return statistics.median(took)


def versions(params: Params, repeats: int) -> list[Params]:
    """`params` with other bits each time, ready on the device."""
    scaled = [jax.tree.map(lambda x, i=i: x * (1 + i / 64), params) for i in range(repeats + 1)]
    return jax.block_until_ready(scaled)


async def measure(name: str, policy: PolicyConfig, folder: Path, arguments) -> str:
    """One row of the table."""
    params = random_params(policy)
    store = OrbaxStore(folder / "weights", arguments.dtype, to_served=to_hf, from_served=from_hf)
    size = count(params) * (2 if arguments.dtype == "bfloat16" else 4)
    refs, publish = [], []
    for version, tree in enumerate(versions(params, arguments.repeats)):
        started = time.perf_counter()
        refs.append(await store.publish(version, tree))
        publish.append(time.perf_counter() - started)
    published = statistics.median(publish[1:])  # the first one compiles
    del params, tree
    copied = cp_and_sync(folder, size, arguments.repeats)
    say(f"{name}: publish {times(publish)}, cp and sync {copied:.3f} s")
    row = [name, arguments.dtype, f"{size / 1e6:.1f}", f"{copied:.3f}", f"{published:.3f}"]
    row.append(f"{published / copied:.1f}")
    if arguments.publish_only:
        return "| " + " | ".join([*row, "", "", ""]) + " |"

    engines = await start_pools(
        EngineConfig(
            kind="vllm",
            slots=max(1, arguments.running),
            start_timeout_s=900,
            server_arguments=("--enforce-eager",),
        ),
        PlacementConfig(),
        replace(policy, compute_dtype=arguments.dtype),
        EngineShape(policy.vocab_size, (), context=CONTEXT, prefill_width=16),
        store,
        workdir=folder,
        eval_servers=0,
        hf_config=hf_config_of(policy, policy.vocab_size, CONTEXT),
    )
    pool = engines["train"]
    assert isinstance(pool, Pool)
    try:
        say(f"{name}: the server is up")
        await pool.load(refs[0])  # imports, and the first reading
        running = [
            asyncio.create_task(endless(pool, seed=seed)) for seed in range(arguments.running)
        ]
        stage, pause = [], []
        for ref in refs[1:]:
            await pool.load(ref)
            pause.append(pool.members[0].swap_s)
            stage.append(pool.members[0].load_s - pool.members[0].swap_s)
            say(f"{name}: stage {stage[-1]:.3f} s, pause {pause[-1]:.3f} s")
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    finally:
        await pool.close()
    staged, paused = statistics.median(stage), statistics.median(pause)
    row += [f"{staged:.3f}", f"{paused:.3f}", f"{(published + staged + paused) / copied:.1f}"]
    return "| " + " | ".join(row) + " |"


def times(values: list[float]) -> str:
    return ", ".join(f"{value:.3f}" for value in values) + " s"


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


async def endless(pool: Pool, *, seed: int) -> None:
    """Decodes until it is cancelled."""
    while True:
        seed += 1_000
        await pool.sample([3] * 16, SamplingParams(max_tokens=CONTEXT - 16, seed=seed))


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--sizes", nargs="+", choices=sorted(SIZES), default=list(SIZES))
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--running", type=int, default=8, help="requests in flight")
    parser.add_argument("--publish_only", action="store_true")
    arguments = parser.parse_args(argv)
    use_compilation_cache()
    print(
        "| size | type | MB | cp + sync, s | publish, s | ÷ cp | stage, s | pause, s | all ÷ cp |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for name in arguments.sizes:
        with tempfile.TemporaryDirectory() as folder:
            print(asyncio.run(measure(name, SIZES[name], Path(folder), arguments)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
