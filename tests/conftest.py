"""What every test stands on: the process's environment, markers, hypothesis, and a deadline a test.

The environment is set while this file is imported, before anything imports jax: both the platform
and the number of virtual devices are read once. Values that are already set win, except for what
the suite cannot do without.
"""

import faulthandler
import importlib.util
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import hypothesis
import pytest

DEVICES = 8
DEADLINE_S = 300.0
GRACE_S = 60.0

assert "jax" not in sys.modules, "a plugin imported jax before tests/conftest.py chose its platform"

_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "telescope_jax"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(_CACHE / "test_compilations"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"
os.environ["HF_HUB_OFFLINE"] = "1"
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    _forced = f"--xla_force_host_platform_device_count={DEVICES}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_forced}".strip()

# A shared machine stalls for seconds, so hypothesis' own deadline would only make tests flaky.
# CI draws the same examples every time; a person's runs go on exploring.
hypothesis.settings.register_profile("local", deadline=None)
hypothesis.settings.register_profile(
    "ci", deadline=None, derandomize=True, database=None, print_blob=True
)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


class DeadlineExceeded(Exception):
    """A test ran past its deadline; raised in the test, so that its traceback shows where."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--tpu-compile",
        action="store_true",
        help="also run tests marked tpu_compile: ahead-of-time compilation for TPUs (libtpu)",
    )


_stderr_fd = pytest.StashKey[int]()
_skipped = pytest.StashKey[dict[tuple[str, str], int]]()


def pytest_configure(config: pytest.Config) -> None:
    # Capture is off while plugins are configured, so this is the real stderr, which a watchdog
    # needs when a test hangs inside C code and the process has to end.
    config.stash[_stderr_fd] = os.dup(2)


def pytest_unconfigure(config: pytest.Config) -> None:
    faulthandler.cancel_dump_traceback_later()
    os.close(config.stash[_stderr_fd])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    absent = {}
    if importlib.util.find_spec("vllm") is None:
        absent["vllm"] = "vllm is not installed"
    if not config.getoption("--tpu-compile"):
        absent["tpu_compile"] = "needs --tpu-compile"
    counts = config.stash[_skipped] = dict.fromkeys(absent.items(), 0)
    for item in items:
        for marker, reason in absent.items():
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))
                counts[marker, reason] += 1


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = terminalreporter.config.stash.get(_skipped, {})
    for (marker, reason), count in skipped.items():
        if marker == "vllm" and count:
            terminalreporter.write_line(f"{reason}: {count} tests marked vllm were skipped")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Ends a test at its deadline: `@pytest.mark.deadline(seconds)`, else DEADLINE_S.

    First by an exception in the main thread; GRACE_S later, for a test that hangs where Python
    cannot raise, by ending the process with every thread's traceback.
    """
    marker = item.get_closest_marker("deadline")
    seconds = float(marker.args[0]) if marker else DEADLINE_S

    def expire(signum: int, frame: FrameType | None) -> None:
        del signum, frame
        raise DeadlineExceeded(f"{item.nodeid} ran longer than {seconds:g} s")

    on_main_thread = threading.current_thread() is threading.main_thread()
    faulthandler.dump_traceback_later(
        seconds + GRACE_S, exit=True, file=item.config.stash[_stderr_fd]
    )
    previous = signal.signal(signal.SIGALRM, expire) if on_main_thread else None
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        return (yield)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        if on_main_thread:
            signal.signal(signal.SIGALRM, previous)
        faulthandler.cancel_dump_traceback_later()
