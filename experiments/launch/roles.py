"""What a launch starts, whoever starts it: trainer processes and vLLM servers, and what joins them.

    python -m experiments.launch.slurm_launch --workdir=SHARED [--trainers=2] [--servers=1] \\
        --config=experiments/math.py --config.mesh.fsdp=8 …

Trainer processes find each other at the coordinator's address, servers are found by theirs, and one
key, made here, opens them. All roles see one workdir. A trainer process that was preempted, or
whose peer died, ends with a code that says "again": then all trainer processes are started again
and resume; servers stay.
"""

import argparse
import os
import secrets
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
KEY_VARIABLE = "TELESCOPE_ENGINE_KEY"
FINAL = (0, 2, 3, 130)
"""Exit codes after which starting again cannot help: finished, refused, no signal, Ctrl-C."""


@dataclass(frozen=True, slots=True)
class Role:
    """One process to start."""

    name: str
    command: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Launch:
    """What the launcher was asked for.

    Attributes:
      workdir: seen by all roles.
      trainers, servers: how many processes of each.
      flags: of telescope_jax.main, the same for all.
      max_restarts: of the trainer processes together.
      python: the interpreter that has telescope_jax.
    """

    workdir: Path
    trainers: int
    servers: int
    flags: tuple[str, ...]
    max_restarts: int
    python: str

    def trainer_roles(self, port: int, hosts: Sequence[str], servers: Sequence[str]) -> list[Role]:
        """Trainer processes on `hosts`, meeting at the first one's `port`; URLs of the servers."""
        return [
            Role(
                f"trainer-{index}",
                (
                    *self._main(bool(servers)),
                    *([f"--config.engine.urls={tuple(servers)!r}"] if servers else []),
                    *(_place(hosts[0], port, self.trainers, index) if self.trainers > 1 else []),
                ),
            )
            for index in range(self.trainers)
        ]

    def server_roles(self, port: int, host: str = "127.0.0.1") -> list[Role]:
        """Servers on one machine, each on a port of its own."""
        own = ["--role=inference", f"--host={host}", "--config.engine.servers=1"]
        return [
            Role(f"server-{index}", (*self._main(True), *own, f"--port={port + index}"))
            for index in range(self.servers)
        ]

    def _main(self, vllm: bool) -> list[str]:
        command = [self.python, "-m", "telescope_jax.main", *self.flags]
        command += ["--config.engine.kind=vllm"] if vllm else []
        return [*command, f"--workdir={self.workdir}"]


def _place(host: str, port: int, processes: int, process: int) -> list[str]:
    return [f"--coordinator={host}:{port}", f"--processes={processes}", f"--process={process}"]


def parser(description: str) -> argparse.ArgumentParser:
    """The flags that every launcher has."""
    made = argparse.ArgumentParser(description=description, allow_abbrev=False)
    made.add_argument("--workdir", default="", help="folder that all roles see")
    made.add_argument("--trainers", type=int, default=1, help="trainer processes (nodes)")
    made.add_argument("--servers", type=int, default=0, help="vLLM servers (nodes)")
    made.add_argument("--max_restarts", type=int, default=10, help="of the trainer, in all")
    made.add_argument("--python", default=sys.executable, help="interpreter with telescope_jax")
    made.add_argument("--sweep", default="", help="a sweep's file: one launch for each point")
    made.add_argument("--out", default="", help="folder of the sweep")
    return made


def launch_of(given: argparse.Namespace, flags: Sequence[str], workdir: str = "") -> Launch:
    """What `parser` and the rest of the command line say."""
    folder = workdir or given.workdir
    if not folder:
        raise SystemExit("--workdir is missing: a folder that all roles see")
    return Launch(
        Path(folder).resolve(),
        given.trainers,
        given.servers,
        tuple(flags),
        given.max_restarts,
        given.python,
    )


def points_of(given: argparse.Namespace, flags: Sequence[str]) -> list[Launch]:
    """One launch, or one for each point of a sweep that has not finished."""
    if not given.sweep:
        return [launch_of(given, flags)]
    from telescope_jax.sweep_points import load, remember

    file, _, variant = given.sweep.partition(":")
    name = Path(file).stem + (f"-{variant}" if variant else "")
    folder = Path(given.out or Path("runs") / name).resolve()
    study = next((f.partition("=")[2] for f in flags if f.startswith("--config=")), "")
    common = [flag for flag in flags if flag.startswith("--config.")]
    launches = []
    for point in load(given.sweep, folder, config_file=study, common=common):
        if point.state() != "finished":
            remember(point)
            arguments = [flag for flag in point.arguments() if not flag.startswith("--workdir=")]
            launches.append(launch_of(given, arguments, str(point.workdir)))
    return launches


def share_key() -> None:
    """Makes the key, unless there is one, and leaves it where children inherit it."""
    os.environ.setdefault(KEY_VARIABLE, secrets.token_urlsafe(32))
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)


def free_ports(count: int) -> list[int]:
    """Consecutive ports of this machine that nobody listens on."""
    for first in range(20_000 + secrets.randbelow(20_000), 60_000, count):
        try:
            for port in range(first, first + count):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
            return list(range(first, first + count))
        except OSError:
            continue
    raise RuntimeError(f"no {count} consecutive free ports on this machine")


def run_role(command: Sequence[str]) -> int:
    """Runs one role where this is called; passes SIGTERM and SIGINT on; returns its exit code."""
    print(shlex.join(command), flush=True)
    process = subprocess.Popen(list(command), cwd=ROOT)

    def pass_on(number: int, frame: object) -> None:
        del frame
        process.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, pass_on)
    return process.wait()


def until_done(launch: Launch, run_trainers: Callable[[int], list[int]]) -> int:
    """Starts the trainer processes, and again while their codes say so; returns the last code.

    Args:
      run_trainers: number of the attempt -> exit code of every process.
    """
    for attempt in range(launch.max_restarts + 1):
        codes = run_trainers(attempt)
        worst = next((code for code in codes if code), 0)
        # Who was told of a peer's death says only that: the reason is another one's code.
        if all(code in FINAL for code in codes):
            return worst
        print(f"launch: trainer processes ended with {codes}; starting again", flush=True)
    return worst
