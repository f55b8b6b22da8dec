"""`python -m telescope_jax.main --config=experiments/math.py`: flags, then the run."""

import sys

from telescope_jax import flags
from telescope_jax.signals import exit_with


def main(argv: list[str] | None = None) -> int:
    """Runs, or resumes, what the command line says; returns the exit code."""
    arguments = flags.parse(sys.argv if argv is None else argv)
    # After the flags: a wrong one must not cost the import of jax, nor touch a device.
    from telescope_jax.run import run

    return run(arguments.config, arguments.config_file, arguments.workdir)


if __name__ == "__main__":
    exit_with(main())
