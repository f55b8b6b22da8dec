"""`python -m telescope_jax.main --config=experiments/math.py`: flags, then the run."""

import sys
import time

from telescope_jax import flags
from telescope_jax.signals import exit_with

OWN_FLAGS = {
    "role": flags.Flag("trainer", "trainer, or inference: a vLLM server for runs elsewhere."),
    "coordinator": flags.Flag("", "host:port of process 0 of several, or auto (TPU, Slurm, MPI)."),
    "processes": flags.Flag("", "How many processes the trainer has."),
    "process": flags.Flag("", "Which of them this is, from 0."),
    "host": flags.Flag("127.0.0.1", "inference: the address that the servers listen on."),
    "port": flags.Flag(8000, "inference: port of the first server."),
}
"""A launcher may set TELESCOPE_COORDINATOR, _PROCESSES and _PROCESS instead."""


def main(argv: list[str] | None = None) -> int:
    """Runs, or resumes, what the command line says; returns the exit code."""
    began = time.monotonic()
    argv = sys.argv if argv is None else argv
    arguments = flags.parse(argv, OWN_FLAGS)
    role, extra = arguments.extra["role"], arguments.extra
    if role == "inference":
        from telescope_jax.serve import serve

        return serve(arguments.config, arguments.workdir, host=extra["host"], port=extra["port"])
    if role != "trainer":
        flags.refuse(f"--role={role} is neither trainer nor inference")
    # After the flags: a wrong one must not cost the import of jax, nor touch a device.
    try:
        from telescope_jax.hosts.runtime import HostsError, join, place
        from telescope_jax.run import run
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("telescope_jax"):
            raise
        flags.refuse(f"{error.name} is not installed; ./run.sh installs it, or: pip install -e .")

    try:
        peers = join(place(extra))
    except HostsError as error:
        flags.refuse(str(error))
    config, file, workdir = arguments.config, arguments.config_file, arguments.workdir
    return run(config, file, workdir, peers, typed=argv[1:], began=began)


if __name__ == "__main__":
    exit_with(main())
