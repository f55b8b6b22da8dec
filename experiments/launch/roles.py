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
import re
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parents[2]
KEY_VARIABLE = "TELESCOPE_ENGINE_KEY"
FINAL = (0, 2, 3, 130)
"""Exit codes after which starting again cannot help: finished, refused, no signal, Ctrl-C."""

PEER_DIED = 5
"""What the other trainer processes end with when one dies: the reason is that one's code."""


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
                    *self.main(vllm=bool(servers)),
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
            Role(f"server-{index}", (*self.main(vllm=True), *own, f"--port={port + index}"))
            for index in range(self.servers)
        ]

    def main(self, *, vllm: bool) -> list[str]:
        """The command of every role, with servers or without."""
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


def refuse(words: str) -> NoReturn:
    """Ends a launch that cannot be, before anything is started."""
    print(f"launch: {words}", file=sys.stderr)
    raise SystemExit(2)


def launch_of(given: argparse.Namespace, flags: Sequence[str], workdir: str = "") -> Launch:
    """What `parser` and the rest of the command line say; refuses what makes no sense."""
    folder = Path(workdir or given.workdir).resolve()
    if not (workdir or given.workdir):
        refuse("--workdir is missing: a folder that all roles see")
    if folder.exists() and not folder.is_dir():
        refuse(f"--workdir={folder} is no folder")
    for name, least in (("trainers", 1), ("servers", 0), ("max_restarts", 0)):
        if (number := getattr(given, name)) < least:
            refuse(f"--{name}={number} must be at least {least}")
    return Launch(
        folder,
        given.trainers,
        given.servers,
        tuple(flags),
        given.max_restarts,
        given.python,
    )


def check(launch: Launch) -> None:
    """Has main read the flags, as every trainer process will; refuses with its words."""
    command = [*launch.main(vllm=launch.servers > 0), "--print_config"]
    try:
        read = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    except OSError as error:
        refuse(f"--python={launch.python} cannot be run: {error.strerror}")
    if read.returncode:
        print(read.stderr, end="", file=sys.stderr)
        refuse("nothing was started")


def points_of(
    given: argparse.Namespace, flags: Sequence[str], *, here: bool = True
) -> list[Launch]:
    """One launch, or one for each point of a sweep that has not finished; their flags are read.

    Args:
      here: whether `--python` is on this machine, to read them; not that of an image.
    """
    if not given.sweep:
        launches = [launch_of(given, flags)]
        if here:
            check(launches[0])
        return launches
    from telescope_jax.sweep_points import SweepError, load, remember

    file, _, variant = given.sweep.partition(":")
    name = Path(file).stem + (f"-{variant}" if variant else "")
    folder = Path(given.out or Path("runs") / name).resolve()
    if odd := [flag for flag in flags if not re.match(r"--config(\.[\w.]+)?=", flag)]:
        refuse(f"{' '.join(odd)}: a sweep takes --config=FILE and --config.NAME=VALUE")
    study = next((f.partition("=")[2] for f in flags if f.startswith("--config=")), "")
    common = [flag for flag in flags if flag.startswith("--config.")]
    try:
        points = load(given.sweep, folder, config_file=study, common=common)
    except SweepError as error:
        refuse(str(error))
    launches, left = [], [point for point in points if point.state() != "finished"]
    for point in left:
        arguments = [flag for flag in point.arguments() if not flag.startswith("--workdir=")]
        launches.append(launch_of(given, arguments, str(point.workdir)))
    if here and launches:
        check(launches[0])  # the others differ in what `load` has checked
    try:
        for point in [] if getattr(given, "dry_run", False) else left:
            remember(point)
    except OSError as error:
        refuse(f"--out={folder} cannot be written: {error}; choose another")
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
    """Runs one role where this is called; passes SIGTERM on; returns its exit code.

    In a session of its own, and a signal once a second: who ends the launcher with all that it
    started reaches this process several times, and the role's second signal ends it before its
    checkpoint is written.
    """
    print(shlex.join(command), flush=True)
    process = subprocess.Popen(list(command), cwd=ROOT, start_new_session=True)
    passed = 0.0

    def pass_on(number: int, frame: object) -> None:
        nonlocal passed
        if (now := time.monotonic()) - passed > 1:
            passed = now
            process.send_signal(number)

    signal.signal(signal.SIGTERM, pass_on)
    return process.wait()


def until_done(
    launch: Launch,
    run_trainers: Callable[[int], list[int]],
    stopping: Callable[[], bool] = lambda: False,
) -> int:
    """Starts the trainer processes, and again while their codes say so; returns the last code.

    Args:
      run_trainers: number of the attempt -> exit code of every process.
      stopping: whether the launcher itself was asked to end.
    """
    attempt = 0
    while True:
        codes = run_trainers(attempt)
        reasons = [code for code in codes if code != PEER_DIED] or codes
        final = [code for code in reasons if code in FINAL and code]
        worst = next((code for code in (*final, *reasons) if code), 0)
        if final or not any(codes) or stopping() or attempt == launch.max_restarts:
            return worst
        print(f"launch: trainer processes ended with {codes}; starting again", flush=True)
        attempt += 1
