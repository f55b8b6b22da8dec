"""Compiles one microbatch on meshes of eight, with activation constraints and at last without.

Run by test_step.py in a process of its own: XLA writes its warnings to the real stderr, and only
when it compiles, so the compilation cache must be off.
"""

import dataclasses
import sys

import jax
import numpy as np

from telescope_jax.config import MeshConfig, OptimizerConfig
from telescope_jax.learner.loss import Denominators, LossSettings
from telescope_jax.learner.step import Step
from telescope_jax.model.decoder import Decoder
from telescope_jax.sharding import make_mesh, place_rows
from tests.learner.rows import POLICY, VOCAB, batches


def main() -> None:
    (batch,) = batches(12, 8)
    totals = Denominators(*(np.float32(1) for _ in range(2)))  # type: ignore[arg-type]
    whole, parts = MeshConfig(2, 2, 2), MeshConfig(fsdp=2, context=2, tensor=2)
    loop = dataclasses.replace(POLICY, layers=2, scan_layers=True, remat="block")
    cases = [
        ("constrained", whole, POLICY, True),
        ("as a loop", whole, loop, True),
        ("rows in parts", parts, POLICY, True),
        ("parts in a loop", parts, loop, True),
        ("free", whole, POLICY, False),
    ]
    for name, sizes, policy, pinned in cases:
        mesh = make_mesh(sizes)
        rows = place_rows(jax.tree.map(lambda x: x[:8], batch), mesh)
        decoder = Decoder(policy, VOCAB, mesh=mesh if pinned else None)
        step = Step(decoder, mesh, LossSettings(), OptimizerConfig(), temperature=1.0)
        shapes = jax.eval_shape(decoder.init, jax.random.key(0))
        params = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
        params = jax.device_put(params, step.params_shardings)
        step.accumulate.lower(params, step.zeros(), rows, totals).compile()
        print(f"=== compiled {name}", file=sys.stderr, flush=True)


main()
