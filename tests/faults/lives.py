"""Several lives of one run in one process, as a notebook may do, and what each leaves behind.

    python -m tests.faults.lives WORKDIR LIVES     one JSON line a life
"""

import gc
import json
import sys
import threading

import jax
import psutil

from telescope_jax.main import main as command
from tests.faults.starter import FAST


def left_behind() -> dict[str, int]:
    """What an ended life still holds; cycles go first, since they are no leak."""
    gc.collect()
    return {
        "device_arrays": len(jax.live_arrays()),
        "threads": threading.active_count(),
        "files": psutil.Process().num_fds(),
        "tensorstore": sum(isinstance(o, dict) and "input_inclusive_min" in o for o in _all()),
    }


def _all() -> list[object]:
    gc.unfreeze()  # a run freezes what it starts with
    return gc.get_objects()


def main(workdir: str, lives: int) -> None:
    for life in range(1, lives + 1):
        asked = [f"--workdir={workdir}", f"--config.number_of_steps={2 * life}"]
        code = command(["telescope_jax", *FAST, *asked, "--config.checkpoint.every=1"])
        print("left", json.dumps({"code": code, **left_behind()}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
