"""Many runs from one file, a few at a time, and a table at the end.

    python -m telescope_jax.sweep --sweep=experiments/sweeps/lead.py --parallel=2

Every point is checked before the first one starts. A point that finished is not run again, one that
was cut is resumed, one that fails is named while the others go on; so the same command may be given
until all is done. Ctrl-C and SIGTERM let the running points write their checkpoints.

Exit codes: 0 every point finished; 1 a point failed; 2 refused before any work; 130 and 143 after
a signal.
"""

import argparse
import asyncio
import fcntl
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path

from telescope_jax import sweep_table
from telescope_jax.flags import refuse
from telescope_jax.sweep_points import Point, SweepError, load, remember

MAIN = (sys.executable, "-m", "telescope_jax.main")
LAUNCHERS = {"slurm": "experiments.launch.slurm_launch", "xm": "experiments.launch.xm_launch"}


class Runner:
    """Runs points in processes of their own, at most `parallel` at once."""

    def __init__(
        self, points: Sequence[Point], parallel: int, command: Sequence[str] = MAIN
    ) -> None:
        self._points, self._command = points, command
        self._places = asyncio.Semaphore(parallel)
        self._running: set[asyncio.subprocess.Process] = set()
        self.stopped_by: signal.Signals | None = None
        self.failed: dict[str, int] = {}

    async def run(self) -> None:
        """Returns when every point has finished or failed, or was stopped."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop, number)
        try:
            await asyncio.gather(*map(self._one, self._points))
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    async def _one(self, point: Point) -> None:
        async with self._places:
            if self.stopped_by:
                return
            if point.state() == "finished":
                say(f"{point.name}: finished before")
                return
            started = time.monotonic()
            try:
                process = await self._start(point)
            except OSError as error:  # a full disk must not leave the others without a parent
                self.failed[point.name] = 1
                say(f"{point.name}: FAILED to start: {error}")
                return
            self._running.add(process)
            if self.stopped_by:  # it arrived while the process was starting
                process.send_signal(self.stopped_by)
            say(f"{point.name}: started, its output is in {point.log_file}")
            code = await process.wait()
            self._running.discard(process)
            took = f"after {time.monotonic() - started:.0f} s"
            if code == 0:
                say(f"{point.name}: finished {took}")
            elif not self.stopped_by:
                self.failed[point.name] = code
                say(f"{point.name}: FAILED with code {code} {took}: {last_line(point.log_file)}")

    async def _start(self, point: Point) -> asyncio.subprocess.Process:
        remember(point)
        point.log_file.parent.mkdir(parents=True, exist_ok=True)
        with point.log_file.open("ab") as log:
            # A session of its own: the terminal's Ctrl-C reaches only us, and we pass on one.
            return await asyncio.create_subprocess_exec(
                *self._command,
                *point.arguments(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _stop(self, number: signal.Signals) -> None:
        # The first one asks each run for a checkpoint, the second one ends it at once.
        if self.stopped_by is None:
            say(f"{number.name}: waiting for {len(self._running)} points to write a checkpoint")
        self.stopped_by = number
        for process in self._running:
            process.send_signal(number)


def say(text: str) -> None:
    """One line of progress; a reader that has left is no reason to stop."""
    try:
        print(f"sweep: {text}", file=sys.stderr, flush=True)
    except BrokenPipeError:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (for the rest of the process)


def last_line(log_file: Path) -> str:
    """The last line that is not empty: a failed run says there what it failed of."""
    lines = [line.strip() for line in log_file.read_text(errors="replace").splitlines()]
    return next((line for line in reversed(lines) if line), "it printed nothing")


@contextmanager
def only_sweep_in(folder: Path):
    """Keeps a second sweep out of the folder.

    Raises:
      SweepError: there is one, or nothing can be written there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "lock").open("w")
    except OSError as error:
        raise SweepError(f"--out={folder} cannot be written: {error}; choose another") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SweepError(f"a sweep is running in {folder}; wait, or choose --out") from None
        yield


def report(points: Sequence[Point], folder: Path, wanted: Sequence[str]) -> None:
    """Writes table.csv, table.md and curves.png; prints the table."""
    files = sweep_table.write(points, folder, wanted)
    if absent := sweep_table.absent(points, wanted):
        say(f"--metrics={','.join(absent)}: no point has such a metric")
    print((folder / "table.md").read_text(), end="")
    say(f"{', '.join(str(file) for file in files)}")


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The command's own flags, and the `--config.…` flags that every point gets."""
    parser = argparse.ArgumentParser(
        prog="python -m telescope_jax.sweep",
        description=(__doc__ or "").partition("\n\n")[0],
        epilog="--config.FIELD=VALUE sets a field of every point.",
        allow_abbrev=False,
    )
    parser.add_argument("--sweep", required=True, help="file with get_sweep(), and its :variant")
    parser.add_argument("--config", default="", help="study to override; default: the file's")
    parser.add_argument("--out", default="", help="folder of the sweep; default: runs/NAME")
    parser.add_argument("--parallel", type=int, default=1, help="points that run at once")
    parser.add_argument("--metrics", default="", help="columns of the table, comma-separated")
    parser.add_argument("--launcher", choices=["local", *LAUNCHERS], default="local")
    parser.add_argument("--launcher_flags", default="", help="as '--partition=gpu --dry_run'")
    parser.add_argument("--table", action="store_true", help="only write the table again")
    known, rest = parser.parse_known_args(argv)
    if wrong := [flag for flag in rest if not flag.startswith("--config.") or "=" not in flag]:
        parser.error(f"unknown flags: {' '.join(wrong)} (fields are --config.NAME=VALUE)")
    if known.parallel < 1:
        parser.error(f"--parallel={known.parallel} must be at least 1")
    try:
        known.launcher_flags = shlex.split(known.launcher_flags)
    except ValueError as error:
        parser.error(f"--launcher_flags={known.launcher_flags}: {error}")
    if known.launcher_flags and known.launcher == "local":
        parser.error(f"--launcher_flags are for --launcher={' or '.join(LAUNCHERS)}")
    return known, rest


def main(argv: Sequence[str] | None = None) -> int:
    """Runs what is left of a sweep and writes its table; returns the exit code."""
    argv = sys.argv[1:] if argv is None else list(argv)
    given, common = parse(argv)
    file, _, variant = given.sweep.partition(":")
    name = Path(file).stem + (f"-{variant}" if variant else "")
    folder = Path(given.out or Path("runs") / name).resolve()
    wanted = [name for name in given.metrics.split(",") if name]
    if given.launcher != "local" and not given.table:
        command = [sys.executable, "-m", LAUNCHERS[given.launcher], f"--sweep={given.sweep}"]
        command += [f"--config={given.config}"] if given.config else []
        command += [f"--out={folder}", *common, *given.launcher_flags]
        return subprocess.run(command).returncode
    try:
        points = load(given.sweep, folder, config_file=given.config, common=common)
        if given.table:
            if not folder.is_dir():
                raise SweepError(f"--out={folder} is no folder of a sweep: nothing ran there yet")
            report(points, folder, wanted)
            return 0
        with only_sweep_in(folder):
            say(f"{len(points)} points in {folder}, {given.parallel} at once")
            runner = Runner(points, given.parallel)
            asyncio.run(runner.run())
            report(points, folder, wanted)
    except SweepError as error:
        refuse(str(error))
    for name, code in runner.failed.items():
        say(f"failed: {name} (code {code}); its output is in {folder / 'logs' / name}.log")
    if runner.stopped_by:
        return 128 + runner.stopped_by
    return 1 if runner.failed else 0


if __name__ == "__main__":
    sys.exit(main())
