"""Whole runs as processes that start fast: everything is imported once, and forked for each run.

    python -m tests.faults.starter        one JSON list of arguments a line -> {"pid"}, {"status"}

The fork comes before any backend, thread or event loop, so a run finds what it finds after its own
imports. A run ends with its starter, whatever way that ends.
"""

import contextlib
import ctypes
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_PR_SET_PDEATHSIG = 1
FAST = (
    "--config=experiments/math.py:tiny",
    "--config.env.name=tests.faults.worlds:Digits",
    "--config.warm_start.steps=0",
    "--config.loss.drop_zero_advantage=True",
    "--config.optimizer.learning_rate=1e-2",
    "--config.eval.items=8",
    "--config.log.rollouts_every=0",
)
"""A run of about a second beside its compilation, in which the parameters move."""


def serve() -> None:
    """Runs one command line after the other, until its input ends."""
    from telescope_jax import plots, run  # noqa: F401 (imported for the runs)
    from telescope_jax.main import main

    answers = os.dup(1)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    while line := sys.stdin.readline():
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            os.close(answers)
            output = os.open(request["output"], os.O_CREAT | os.O_WRONLY | os.O_APPEND)
            for descriptor, target in ((os.open(os.devnull, os.O_RDONLY), 0), (output, 1)):
                os.dup2(descriptor, target)
            os.dup2(output, 2)
            sys.argv = ["telescope_jax", *request["arguments"]]
            if request["before"]:
                module, _, function = request["before"].partition(":")
                getattr(importlib.import_module(module), function)()
            # Out of this function, so that the interpreter ends as after any run.
            sys.exit(main(sys.argv))
        _say(answers, pid=pid)
        _say(answers, status=os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def _say(answers: int, **message: int) -> None:
    os.write(answers, json.dumps(message).encode() + b"\n")


@dataclass
class LiveRun:
    """A run that goes on; `workdir` is its folder."""

    pid: int
    workdir: Path
    output: Path
    _starter: "Starter"
    status: int | None = None

    def send(self, number: signal.Signals) -> None:
        """One signal; a run that has ended gets none."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def alive(self) -> bool:
        return self.status is None and not self._starter.has_answer()

    def wait(self) -> int:
        """Its exit code; a signal that killed it is negative."""
        if self.status is None:
            self.status = int(self._starter.answer()["status"])
        return self.status or 0

    def until(self, holds: Callable[[], bool]) -> bool:
        """Waits for the moment; False: the run ended before."""
        while not holds():
            if not self.alive():
                return False
            time.sleep(0.01)
        return True

    def text(self) -> str:
        return self.output.read_text(errors="replace")


class Starter:
    """The process that runs are forked from; one run at a time."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def run(
        self, workdir: Path, *flags: str, before: str = "", output: Path | None = None
    ) -> LiveRun:
        """Starts `main` with `flags`, after calling `before` (module:function) in its process."""
        output = output or workdir.with_name(f"{workdir.name}.out")
        by_name = {flag.partition("=")[0]: flag for flag in (*FAST, *flags)}  # the last one holds
        request = {
            "arguments": [*by_name.values(), f"--workdir={workdir}"],
            "output": str(output),
            "before": before,
        }
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return LiveRun(self.answer()["pid"], workdir, output, self)

    def has_answer(self) -> bool:
        assert self._process.stdout is not None
        return bool(select.select([self._process.stdout.fileno()], [], [], 0)[0])

    def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the starter ended with {self._process.wait()}"
        return json.loads(line)


@contextlib.contextmanager
def starter(devices: int = 1) -> Iterator[Starter]:
    """A starter on one device, as on a laptop, or more; it ends with the block, and its run too."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.faults.starter"],
        cwd=ROOT,
        env={
            **os.environ,
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}" * (devices > 1),
        },
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield Starter(process)
    finally:
        process.kill()
        process.communicate()


if __name__ == "__main__":
    serve()
