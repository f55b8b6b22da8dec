"""What staleness costs, and what the four corrections give back.

    python -m telescope_jax.sweep --sweep=experiments/sweeps/staleness.py --parallel=2
    python -m telescope_jax.sweep --sweep=experiments/sweeps/staleness.py:tiny
    python -m experiments.sweeps.corrections runs/staleness docs/staleness.png

Six leads × four corrections × three seeds of `experiments/small_sums.py`, without an age bound, so
that the mean age of the trained tokens is about the lead. Two updates a batch: with one, π_old is π
and decoupled PPO is the policy gradient with TIS. `:leads` are the leads 0, 2, 8 and 16 alone.
"""

from typing import Any

from experiments.sweeps.corrections import corrections
from telescope_jax.grid import product, values

CONFIG = "experiments/small_sums.py"

LEADS = {"": [0, 1, 2, 4, 8, 16], "leads": [0, 2, 8, 16], "tiny": [0, 8]}


def get_sweep(arg: str = "") -> list[dict[str, Any]]:
    """`arg`: "" is the study, "leads" four of its leads, "tiny" two points."""
    if arg not in LEADS:
        raise ValueError(f"experiments/sweeps/staleness.py knows {sorted(LEADS)}, not {arg!r}")
    if arg == "tiny":
        return product(values("max_async_rollout", LEADS[arg]), corrections("TIS"))
    seeds = values("seed", [0, 1, 2])
    return product(values("max_async_rollout", LEADS[arg]), corrections(), seeds)
