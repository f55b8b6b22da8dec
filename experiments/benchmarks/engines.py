"""Tokens a second of the embedded engine, of vLLM and of transformers' `generate`.

    python -m experiments.benchmarks.engines                      # both sizes, all engines
    python -m experiments.benchmarks.engines --sizes 1M --engines jax vllm

The same random weights, prompts (`--prompts` of 16 tokens) and lengths (`--tokens` each, no end
token) for all, sampled at temperature 1 with all prompts at once; the best of `--repeats` after a
warm-up. The embedded engine runs in a process of its own, as in a run; vLLM is asked through its
HTTP interface, as in a run. To reach: the embedded engine ≥ 3 × vLLM on a CPU at 1M.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from experiments.benchmarks.policies import SIZES, random_params, write_checkpoint
from telescope_jax.config import EngineConfig, PlacementConfig, PolicyConfig
from telescope_jax.inference.embedded import EngineShape
from telescope_jax.inference.engine_client import start_engines
from telescope_jax.inference.vllm_pools import start_pools
from telescope_jax.interfaces import Engine
from telescope_jax.setup import use_compilation_cache
from telescope_jax.types import SamplingParams
from telescope_jax.weights.hf_config import hf_config_of
from telescope_jax.weights.hf_layout import from_hf, to_hf
from telescope_jax.weights.store import OrbaxStore

PROMPT = 16


async def seconds(engine: Engine, prompts: np.ndarray, arguments) -> list[float]:
    """Of every repeat after one that warms up."""
    took = []
    for repeat in range(arguments.repeats + 1):
        started = time.perf_counter()
        answers = await asyncio.gather(
            *(
                engine.sample(prompt, SamplingParams(arguments.tokens, seed=repeat * 1_000 + row))
                for row, prompt in enumerate(prompts.tolist())
            )
        )
        took.append(time.perf_counter() - started)
        assert all(len(answer.tokens) == arguments.tokens for answer in answers)
    return took[1:]


async def embedded(
    policy: PolicyConfig, prompts: np.ndarray, folder: Path, arguments
) -> list[float]:
    config = EngineConfig(slots=len(prompts), start_timeout_s=900)
    shape = EngineShape(policy.vocab_size, (), PROMPT + arguments.tokens, PROMPT)
    store = OrbaxStore(folder / "jax")
    engines = await start_engines(config, policy, shape, store, workdir=folder, names=("train",))
    try:
        engine = engines["train"]
        await engine.load(await store.publish(0, random_params(policy)))
        return await seconds(engine, prompts, arguments)
    finally:
        await engines["train"].close()


async def vllm(policy: PolicyConfig, prompts: np.ndarray, folder: Path, arguments) -> list[float]:
    context = PROMPT + arguments.tokens
    store = OrbaxStore(
        folder / "vllm-weights", policy.compute_dtype, to_served=to_hf, from_served=from_hf
    )
    engines = await start_pools(
        EngineConfig(
            kind="vllm",
            slots=len(prompts),
            start_timeout_s=900,
            server_arguments=("--enforce-eager",) if arguments.eager else (),
        ),
        PlacementConfig(),
        policy,
        EngineShape(policy.vocab_size, (), context, PROMPT),
        store,
        workdir=folder,
        eval_servers=0,
        hf_config=hf_config_of(policy, policy.vocab_size, context),
    )
    try:
        await engines["train"].load(await store.publish(0, random_params(policy)))
        return await seconds(engines["train"], prompts, arguments)
    finally:
        await engines["train"].close()


async def transformers(
    policy: PolicyConfig, prompts: np.ndarray, folder: Path, arguments
) -> list[float]:
    model = folder / "model"
    model.mkdir()
    write_checkpoint(model, policy, random_params(policy), PROMPT + arguments.tokens)
    np.save(folder / "prompts.npy", prompts)
    script = Path(__file__).with_name("hf_generate.py")
    command = [sys.executable, "-I", script, model, folder / "prompts.npy", policy.compute_dtype]
    command += [str(arguments.tokens), str(arguments.repeats)]
    found = subprocess.run(command, check=True, cwd=folder, stdout=subprocess.PIPE, text=True)
    return json.loads(found.stdout.splitlines()[-1])


ENGINES = {"jax": embedded, "vllm": vllm, "transformers": transformers}


def measure(size: str, names: Sequence[str], arguments) -> None:
    """Prints the rows of one size."""
    policy = replace(SIZES[size], compute_dtype=arguments.dtype)
    draw = np.random.default_rng(0)
    prompts = draw.integers(0, policy.vocab_size, (arguments.prompts, PROMPT))
    rates: dict[str, float] = {}
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            took = asyncio.run(ENGINES[name](policy, prompts, Path(folder), arguments))
        rates[name] = arguments.prompts * arguments.tokens / min(took)
        ratio = f"{rates['jax'] / rates[name]:.1f}" if "jax" in rates else ""
        row = [size, policy.compute_dtype, name, f"{rates[name]:,.0f}", ratio]
        print("| " + " | ".join(row) + " |", flush=True)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--sizes", nargs="+", choices=sorted(SIZES), default=list(SIZES))
    parser.add_argument("--engines", nargs="+", choices=list(ENGINES), default=list(ENGINES))
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--eager", action="store_true", help="vLLM without compilation")
    arguments = parser.parse_args(argv)
    use_compilation_cache()
    print("| size | type | engine | tokens/s | jax is faster by |")
    print("|---|---|---|---|---|")
    for size in arguments.sizes:
        measure(size, arguments.engines, arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
