"""A sampler that is not the trainer's policy, and what the four corrections give back.

    python -m telescope_jax.sweep --sweep=experiments/sweeps/mismatch.py --parallel=2
    python -m telescope_jax.sweep --sweep=experiments/sweeps/mismatch.py:tiny
    python -m experiments.sweeps.corrections runs/mismatch docs/mismatch.png

Three samplers × four corrections × three seeds of `experiments/small_sums.py`, two steps ahead:
as the trainer has it; at temperature 0.6 where the trainer scores at 1; and with weight matrices
rounded to 8 bits. Each reports the log-probs of what it sampled from, so the weights can correct.
"""

from typing import Any

from experiments.sweeps.corrections import corrections
from telescope_jax.grid import product, values

CONFIG = "experiments/small_sums.py"

SAMPLERS: list[dict[str, Any]] = [
    {"engine.distort_temperature": 1.0, "engine.distort_int8": False},
    {"engine.distort_temperature": 0.6, "engine.distort_int8": False},
    {"engine.distort_temperature": 1.0, "engine.distort_int8": True},
]


def get_sweep(arg: str = "") -> list[dict[str, Any]]:
    """`arg`: "" is the study, "tiny" two points."""
    if arg == "tiny":
        return product(SAMPLERS[1:2], corrections("none", "TIS"))
    if arg:
        raise ValueError(f"experiments/sweeps/mismatch.py knows no variant {arg!r}; use tiny")
    return product(SAMPLERS, corrections(), values("seed", [0, 1, 2]))
