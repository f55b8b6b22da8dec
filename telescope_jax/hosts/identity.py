"""What must be the same in every process of a trainer, and the check that it is.

Different code, flags, libraries or compiled programs do not fail by themselves: the processes wait
for each other in different collectives, or train different models. So each is compared by name.
"""

import hashlib
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import jax

import kernels
import telescope_jax
from telescope_jax import config_tree
from telescope_jax.config import Config
from telescope_jax.hosts.runtime import Peers
from telescope_jax.learner.learner import Learner

LIBRARIES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "telescope_jax")


def agree_on_setup(peers: Peers, config: Config) -> None:
    """Returns once all processes have the same code, configuration, libraries and devices.

    Raises:
      HostsError: names what differs, and how.
    """
    fields = config_tree.leaves(Config)
    facts = {
        f"config.{path}": config_tree.format_value(config_tree.get_value(config, path), field.hint)
        for path, field in fields.items()
    }
    facts |= {name: _version(name) for name in LIBRARIES}
    facts |= {
        "Python": sys.version.split()[0],
        "the source code": _source(),
        "the kind of device": jax.devices()[0].device_kind,
        "the number of local devices": str(jax.local_device_count()),
    }
    peers.agree("setup", facts)


def agree_on_programs(peers: Peers, learner: Learner, seq_len: int) -> None:
    """Returns once all processes would compile the very same update, from the same state.

    Raises:
      HostsError: names the functions that differ.
    """
    facts = {
        f"the compiled function {name}": hashlib.sha256(lowered.as_text().encode()).hexdigest()[:16]
        for name, lowered in learner.lowered(seq_len).items()
    }
    peers.agree("programs", {**facts, "the trainer's step": str(learner.step)})


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _source() -> str:
    digest = hashlib.sha256()
    folders: Sequence[str] = (telescope_jax.__path__[0], kernels.__path__[0])
    for folder in folders:
        for path in sorted(Path(folder).rglob("*.py")):
            digest.update(path.relative_to(folder).as_posix().encode() + b"\0")
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
