"""Where log lines go: all of them to a file, with time and logger; what a person needs to the
terminal, plainly.

A line of INFO tells of a stage of the run, as `stage: what`, and is shown in two columns. A warning
or an error says that it is one, and goes to standard error. Other people's code is heard from
WARNING on, there; the file has the rest.
"""

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

LABEL = 10
"""Width of the first column: `warm start`."""

OURS = "telescope_jax"


def row(label: str, text: str) -> str:
    """One line of two columns; further lines of the text stay in the second one."""
    return f"{label:{LABEL}}  {text}".replace("\n", "\n" + " " * (LABEL + 2))


class Plain(logging.Formatter):
    """A record as a row, without its logger and its time."""

    def format(self, record: logging.LogRecord) -> str:
        text = record.getMessage()
        if record.levelno >= logging.WARNING:
            return row(record.levelname.lower(), text)
        stage, colon, what = text.partition(": ")
        return row(stage, what) if colon and len(stage) <= LABEL else text


class Terminal(logging.Handler):
    """Shows records: stages by `say`, which knows whether a live line is being redrawn."""

    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__(logging.INFO)
        self.setFormatter(Plain())
        self._say = say

    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno >= logging.WARNING or record.name.startswith(OURS)

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno < logging.WARNING:
            self._say(self.format(record))
            return
        try:
            # Looked up every time: a live line takes its place, so as to be redrawn below.
            print(self.format(record), file=sys.stderr, flush=True)
        except (OSError, ValueError):
            return  # nobody reads any more, which is no reason to stop a run


class LogFile(logging.FileHandler):
    """A log that a full disk stops, with one line on the terminal instead of a traceback each."""

    _warned = False

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        super().__init__(path)
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))

    def handleError(self, record: logging.LogRecord) -> None:
        if not self._warned:
            self._warned = True
            error = sys.exc_info()[1]
            print(f"telescope_jax: {self.baseFilename} is not written: {error}", file=sys.stderr)


@contextmanager
def logging_to(path: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Sends log lines to the terminal and to the file at `path`, while the block runs."""
    root = logging.getLogger()
    # What some import has put there writes to the terminal as well, with its own prefixes.
    others = [h for h in root.handlers if type(h) is logging.StreamHandler]
    ours = Terminal(say), LogFile(path)
    for handler in others:
        root.removeHandler(handler)
    for handler in ours:
        root.addHandler(handler)
    for name in (OURS, "kernels"):
        logging.getLogger(name).setLevel(logging.DEBUG)
    try:
        yield
    finally:
        for handler in ours:
            root.removeHandler(handler)
            handler.close()
        for handler in others:
            root.addHandler(handler)
