"""Compiles one microbatch on a 2 × 2 × 2 mesh, with activation constraints and then without.

Run by test_step.py in a process of its own: XLA writes its warnings to the real stderr, and only
when it compiles, so the compilation cache must be off.
"""

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
    mesh = make_mesh(MeshConfig(2, 2, 2))
    (batch,) = batches(12, 8)
    rows = place_rows(jax.tree.map(lambda x: x[:8], batch), mesh)
    totals = Denominators(*(np.float32(1) for _ in range(2)))  # type: ignore[arg-type]
    for name, pinned in (("constrained", mesh), ("free", None)):
        decoder = Decoder(POLICY, VOCAB, mesh=pinned)
        step = Step(decoder, mesh, LossSettings(), OptimizerConfig(), temperature=1.0)
        shapes = jax.eval_shape(decoder.init, jax.random.key(0))
        params = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
        params = jax.device_put(params, step.params_shardings)
        step.accumulate.lower(params, step.zeros(), rows, totals).compile()
        print(f"=== compiled {name}", file=sys.stderr, flush=True)


main()
