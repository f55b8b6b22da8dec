"""Several lives of one run in one process, as a notebook may do, and what each leaves behind.

python -m tests.faults.lives WORKDIR LIVES     one JSON line a life
"""

import gc
import json
import os
import sys
import threading
from contextlib import suppress

import jax

from telescope_jax.main import main as command
from tests.faults.starter import FAST


def left_behind() -> dict[str, int]:
    """What an ended life still holds; cycles go first, since they are no leak."""
    gc.unfreeze()  # a run freezes what it starts with
    gc.collect()
    return {
        "device_arrays": len(jax.live_arrays()),
        "threads": threading.active_count(),
        "files": sum(not path.endswith(".ttf") for path in open_files()),
        "tensorstore": sum(
            isinstance(o, dict) and "input_inclusive_min" in o for o in gc.get_objects()
        ),
    }


def open_files() -> list[str]:
    """What this process has open. Fonts are matplotlib's, which keeps the last 64 of any thread."""
    found = []
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of the listing itself
            found.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return found


def main(workdir: str, lives: int) -> None:
    for life in range(1, lives + 1):
        asked = [f"--workdir={workdir}", f"--config.number_of_steps={2 * life}"]
        code = command(["telescope_jax", *FAST, *asked, "--config.checkpoint.every=1"])
        print("left", json.dumps({"code": code, **left_behind()}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
