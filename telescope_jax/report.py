"""What a run says of itself: what it is, how it ended, and how to go on with it."""

import logging
import os
import re
import shlex
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from jax.sharding import Mesh

from telescope_jax import config_tree, plots
from telescope_jax.config import Config
from telescope_jax.console import summary
from telescope_jax.log_lines import row
from telescope_jax.metrics import read as read_metrics
from telescope_jax.workdir import Workdir

log = logging.getLogger(__name__)

WIDTH = 88
"""Of the list of fields that differ from the defaults."""


def introduce(config: Config, mesh: Mesh, folder: Workdir, config_file: str) -> None:
    """What this run is, at the head of its log; the whole configuration is in its files."""
    changes = " ".join(config_tree.changes(config))
    differing = textwrap.fill(changes, WIDTH, break_long_words=False, break_on_hyphens=False)
    log.info("run: %s", folder.path)
    log.info(
        "config: %s; all of it is in config.json, and other than the defaults are\n%s",
        *(config_file, differing or "none"),
    )
    sizes = ", ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
    log.info("mesh: %s, on %s", sizes, mesh.devices.flat[0].device_kind)
    log.debug("config:\n%s", "\n".join(config_tree.overrides(config)))


def command_again(flags: Sequence[str], folder: Workdir) -> str:
    """The command that takes the run of this folder up again."""
    # Set by run.sh to its own name.
    start = os.environ.get("TELESCOPE_COMMAND") or f"{sys.orig_argv[0]} -m telescope_jax.main"
    given = any(re.match("--?workdir(=|$)", flag) for flag in flags)
    return f"{start} {shlex.join([*flags, *([] if given else [f'--workdir={folder.path}'])])}"


def how_to_go_on(folder: Path, steps: int) -> str:
    """What to do with the folder of a run that has finished all its steps."""
    return row(
        "finished",
        f"{folder} holds this run with all of its {steps} steps\n"
        f"more of them: the same command with --config.number_of_steps={2 * steps}\n"
        "once more from the start: another --workdir",
    )


def end_of(folder: Workdir) -> str:
    """The summary; a picture that cannot be drawn, or a full disk, does not fail a finished run."""
    lines = read_metrics(folder.metrics_file)
    files = {"metrics": str(folder.metrics_file)}
    try:
        picture = plots.save(lines, folder.path / "curves.png", title=folder.path.name)
        files["curves"] = str(picture)
    except (OSError, ValueError) as error:
        log.warning("no picture of the curves: %s", error)
    return summary(lines, files)
