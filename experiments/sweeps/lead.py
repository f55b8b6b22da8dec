"""How far inference may run ahead: the main job at four leads, three seeds each.

    python -m telescope_jax.sweep --sweep=experiments/sweeps/lead.py --parallel=2
    python -m telescope_jax.sweep --sweep=experiments/sweeps/lead.py:tiny \\
        --config=experiments/math.py:tiny

Twelve runs of about two minutes. One should see the mean age of the tokens follow the lead, and
accuracy fall only slowly with it (`math.py` says why its own lead is 1).
"""

from typing import Any

from telescope_jax.grid import product, values

CONFIG = "experiments/math.py"


def get_sweep(arg: str = "") -> list[dict[str, Any]]:
    """`arg`: "" is the study, "tiny" two leads and two seeds."""
    if arg == "tiny":
        return product(values("max_async_rollout", [0, 2]), values("seed", [0, 1]))
    if arg:
        raise ValueError(f"experiments/sweeps/lead.py knows no variant {arg!r}; use none, or tiny")
    return product(values("max_async_rollout", [0, 1, 2, 4]), values("seed", [0, 1, 2]))
