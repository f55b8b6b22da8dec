"""A server in a process group of its own: started, watched, and ended with all its descendants.

Invariants:
- the group never outlives this process: each server holds the reading end of a pipe, whose end of
  file it takes as its own (`TELESCOPE_LIFELINE`), and `stop` ends the whole group, also when the
  process that was started is long dead and only its children hold the memory;
- whoever waits for a server that died gets its exit code and its last log lines.
"""

import asyncio
import contextlib
import os
import re
import secrets
import signal
import socket
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

_LOG_LINES = 15
_ERROR = re.compile(r"ERROR.*Error\b.*: ")
_POLL_S = 0.05
_TERM_TIMEOUT_S = 10.0
_KILL_TIMEOUT_S = 5.0


class ServerProcess:
    """One start of a server; a restart is another ServerProcess."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], log_path: Path, cwd: Path
    ) -> None:
        """
        Args:
          command: program and arguments.
          environment: the whole environment of the process.
          log_path: its output, appended to.
          cwd: its working directory; a package beside it would hide an installed one.
        """
        self._command, self._environment = list(command), dict(environment)
        self._log_path, self._cwd = log_path, cwd
        self._process: asyncio.subprocess.Process | None = None
        self._log_start = 0
        self._lifeline: int | None = None

    @property
    def pid(self) -> int:
        """Of the process that was started, which is also the number of its group."""
        assert self._process is not None, "the server was never started"
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the process that was started still runs."""
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        """Starts it; does not wait for it to answer."""
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        theirs, self._lifeline = os.pipe()
        try:
            with self._log_path.open("ab") as log_file:
                self._log_start = log_file.tell()
                self._process = await asyncio.create_subprocess_exec(
                    *self._command,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log_file,
                    stderr=log_file,
                    env={**self._environment, "TELESCOPE_LIFELINE": str(theirs)},
                    cwd=self._cwd,
                    pass_fds=[theirs],
                    start_new_session=True,
                )
        finally:
            os.close(theirs)

    async def wait(self) -> int:
        """The exit code, once the process that was started has ended."""
        assert self._process is not None, "the server was never started"
        return await self._process.wait()

    def death(self) -> str:
        """How it ended, with the last lines of its log."""
        code = self._process.returncode if self._process else None
        if code is None:
            how = "does not answer"
        else:
            how = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
        return f"the server {how}; {self.log_tail()}"

    def log_tail(self) -> str:
        """The last lines that this start wrote, in words of an error."""
        first, tail = "", deque[str](maxlen=_LOG_LINES)
        with self._log_path.open(errors="replace") as lines:
            lines.seek(self._log_start)
            for line in lines:
                tail.append(line.rstrip())
                if not first and _ERROR.search(line):
                    first = line.rstrip()
        text = "".join(f"\n    {line}" for line in tail)
        # A server that shuts down says much after what it died of.
        cause = f"\n  the first error in it:\n    {first}" if first and first not in tail else ""
        return f"the last lines of {self._log_path}:{text or ' (empty)'}{cause}"

    async def stop(self, *, kill: bool = False) -> None:
        """Ends the whole group: politely unless `kill`, in any case within seconds."""
        if self._process is None or self._lifeline is None:
            return
        if not kill:
            self._signal(signal.SIGTERM)
            await self._gone(_TERM_TIMEOUT_S)
        self._signal(signal.SIGKILL)
        await self._gone(_KILL_TIMEOUT_S)
        if self._lifeline is not None:  # somebody else may have stopped it meanwhile
            os.close(self._lifeline)
            self._lifeline = None

    def members(self) -> list[int]:
        """Processes of the group that still run."""
        found = []
        for pid in psutil.pids():
            with contextlib.suppress(ProcessLookupError, psutil.Error):
                ours = os.getpgid(pid) == self.pid
                if ours and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                    found.append(pid)
        return found

    def _signal(self, number: signal.Signals) -> None:
        # A group's number is not given to another one while a member lives or waits for its parent.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    async def _gone(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while self.alive or self.members():
            if time.monotonic() > deadline:
                return
            await asyncio.sleep(_POLL_S)


def free_port() -> int:
    """A port that nobody listens on; somebody else may take it before it is used."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def new_key() -> str:
    """256 random bits in text."""
    return secrets.token_urlsafe(32)
