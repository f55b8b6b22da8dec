"""The other side of a comparison: a program in its own process, that works only while asked."""

import contextlib
import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class Peer:
    """Reads a word a line, and answers each with a line of JSON; what else it says is in a log."""

    def __init__(
        self, name: str, command: Sequence[str | os.PathLike[str]], folder: Path, packages: str = ""
    ) -> None:
        """`packages`: PYTHONPATH of the process; "" takes ours."""
        self._name, self._log = name, folder / "log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                command,
                cwd=folder,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=os.environ | ({"PYTHONPATH": packages} if packages else {}),
            )

    def ask(self, what: str) -> Any:
        """The answer to one word.

        Raises:
          RuntimeError: the process has ended; with its last words.
        """
        to, back = self._process.stdin, self._process.stdout
        assert to is not None and back is not None
        try:
            print(what, file=to, flush=True)
            answer = back.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            code, words = self._process.wait(), self._log.read_text()[-2_000:]
            raise RuntimeError(f"the {self._name} process ended with code {code}: {words}")
        return json.loads(answer)

    def close(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it ended before it read the last word
            self._process.stdin.close()
        self._process.wait()
