"""The process behind `reward_pool`: loads graders once, then forks a child for every call.

Untrusted text meets code only in that child, so whatever it does to the interpreter (patching a
grader so that later answers pass, filling a cache, leaking memory) ends with the call. The child
has an address-space and a CPU limit, a scratch folder that is deleted afterwards, an empty
environment and no descriptor but the pipe of its result; where the kernel can (`confinement`), it
changes no file elsewhere, reaches no network and signals nobody.

Protocol: one JSON object a line. The pool sends a set-up, gets `{"ready": true}`, then sends calls
`{"id", "function", "args", "given", "timeout_s"}`; each gets exactly one reply, with its id and one
of `value`, `limit`, `error` (with `traceback`) or `cancelled`. Anything that arrives while a call
runs cancels it. The end of the input ends the worker, so it cannot outlive the pool's process.

Nothing here may import jax, numpy or another part of the package: forking is safe because this
process has one thread, and starting is fast because it has few modules.
"""

import contextlib
import ctypes
import functools
import importlib
import json
import os
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from telescope_jax.scoring.confinement import confine

MAX_REPLY = 4 << 20
"""Bytes of a call's result; more is an error."""

_FILE_BYTES = 16 << 20
_OPEN_FILES = 64
_PR_SET_PDEATHSIG = 1
_LIMIT_SIGNALS = {signal.SIGXCPU: "cpu time", signal.SIGKILL: "killed", signal.SIGSEGV: "crashed"}


def main() -> None:
    """Serves calls from standard input until it ends."""
    requests, replies = os.dup(0), os.dup(1)
    # A grader that prints must not write into the protocol.
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(nowhere, 1)
    # One thread a worker: the pool is what is parallel, and a fork copies only one thread.
    os.environ.update(OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
    scratch = os.getcwd()
    lines = _Lines(requests)
    try:
        setup = json.loads(lines.wait() or "{}")
        for module in setup.get("preload", ()):
            _load(module)
        _write_line(replies, {"ready": True})
        while line := lines.wait():
            request = json.loads(line)
            if "cancel" not in request:  # else the call had ended when its cancellation was sent
                reply = _answer(request, setup, lines, replies)
                _write_line(replies, {"id": request["id"], **reply})
    except BrokenPipeError:
        pass  # the pool is gone
    # Not after another exception: the folder holds the log, which the pool reads.
    os.chdir("/")
    shutil.rmtree(scratch, ignore_errors=True)


class _Lines:
    """Lines of a descriptor, which stays pollable: no line hides in a buffer unseen."""

    def __init__(self, descriptor: int):
        self.descriptor = descriptor
        self._data = b""

    def wait(self) -> bytes:
        """The next line, or b"" at the end of the input."""
        while b"\n" not in self._data:
            data = os.read(self.descriptor, 1 << 16)
            if not data:
                return b""
            self._data += data
        line, _, self._data = self._data.partition(b"\n")
        return line

    @property
    def pending(self) -> bool:
        return b"\n" in self._data


def _load(name: str) -> Any:
    """Imports a module and lets its `warm_up()`, if any, fill caches that every child inherits."""
    first = name not in sys.modules
    module = importlib.import_module(name)
    if first and hasattr(module, "warm_up"):
        module.warm_up()
    return module


def _resolve(place: str) -> Callable[..., Any]:
    module, _, attribute = place.partition(":")
    return getattr(_load(module), attribute)


@functools.lru_cache(maxsize=16)
def _given(description: str) -> Any:
    """What calls share, made in this process, which no text of a model ever reaches."""
    place, *arguments = json.loads(description)
    return _resolve(place)(*arguments)


def _answer(request: dict, setup: dict, lines: _Lines, replies: int) -> dict:
    try:
        function = _resolve(request["function"])
        if request.get("given"):
            function = functools.partial(function, _given(json.dumps(request["given"])))
    except Exception as error:
        return _error(error)
    scratch = tempfile.mkdtemp(dir=os.getcwd())
    receiving, sending = os.pipe()
    deadline = time.monotonic() + request["timeout_s"]
    child = os.fork()
    if child == 0:
        os.close(receiving)
        for descriptor in (lines.descriptor, replies):
            os.close(descriptor)
        os.dup2(1, 2)  # the worker's log is not the call's to fill
        _run_child(function, request, setup, scratch, sending)
    os.close(sending)
    try:
        return _await_child(child, receiving, deadline, lines)
    finally:
        os.close(receiving)
        shutil.rmtree(scratch, ignore_errors=True)


def _run_child(
    function: Callable[..., Any], request: dict, setup: dict, scratch: str, sending: int
) -> NoReturn:
    """Runs the call and leaves by `_exit`: nothing of the worker's own code may run again here."""
    own = os.getpid()
    try:
        os.setsid()  # a group of its own, so that what it starts dies with it
        _die_with_parent()
        os.chdir(scratch)
        os.environ.clear()
        if setup["confined"]:
            confine(scratch)
        _limit_resources(setup["memory_bytes"], request["timeout_s"])
        try:
            reply = {"value": function(*request["args"])}
            data = json.dumps(reply, allow_nan=False).encode()
        except MemoryError:
            data = json.dumps({"limit": "memory"}).encode()
        except BaseException as error:
            # Also SystemExit: an answer that exits is a fault of the call, not the end of it.
            data = json.dumps(_error(error)).encode()
        # What the call forked returns here too, and a call has one reply.
        view = memoryview(data + b"\n" if os.getpid() == own else b"")
        while view:
            view = view[os.write(sending, view) :]
    finally:
        os._exit(0)


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _limit_resources(memory_bytes: int, timeout_s: float) -> None:
    cpu_s = int(timeout_s) + 2
    limits = {
        resource.RLIMIT_CPU: cpu_s,  # the last resort, if this worker is stopped or killed
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: _FILE_BYTES,
        resource.RLIMIT_NOFILE: _OPEN_FILES,
    }
    if used := _address_space():
        limits[resource.RLIMIT_AS] = used + memory_bytes
    for limit, value in limits.items():
        hard = resource.getrlimit(limit)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        with contextlib.suppress(ValueError, OSError):  # not every system has every limit
            resource.setrlimit(limit, (value, value))


def _address_space() -> int:
    """Bytes of address space in use; 0 where the system does not say."""
    try:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[0]) * resource.getpagesize()
    except OSError:
        return 0


def _await_child(child: int, receiving: int, deadline: float, lines: _Lines) -> dict:
    """The child's reply, or why there is none; the child is gone when this returns."""
    data, reason = b"", ""
    poll = select.poll()
    poll.register(receiving, select.POLLIN)
    poll.register(lines.descriptor, select.POLLIN)
    while not data.endswith(b"\n"):
        if lines.pending:
            reason = "cancelled"
            break
        remaining = deadline - time.monotonic()
        ready = dict(poll.poll(max(0, remaining) * 1000))
        if not ready:
            reason = "deadline"
            break
        if lines.descriptor in ready:
            reason = "cancelled"  # by a message, or by the end of the pool
            break
        received = os.read(receiving, 1 << 16)
        if not received or len(data) > MAX_REPLY:
            reason = "too long" if received else "died"
            break
        data += received
    with contextlib.suppress(ProcessLookupError, PermissionError):
        # Its group may not exist yet, or no longer; the child itself is killed in any case.
        os.killpg(child, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    return _reply(data, reason, status)


def _reply(data: bytes, reason: str, status: int) -> dict:
    if reason == "cancelled":
        return {"cancelled": True}
    if reason == "deadline":
        return {"limit": "deadline"}
    if reason == "too long":
        return {"error": f"the result is longer than {MAX_REPLY} bytes", "traceback": ""}
    if reason == "died":
        killer = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        if killer in _LIMIT_SIGNALS:
            return {"limit": _LIMIT_SIGNALS[signal.Signals(killer)]}
        return {"error": f"the call ended its process (status {status})", "traceback": ""}
    try:
        reply = json.loads(data)
        assert isinstance(reply, dict) and reply.keys() & {"value", "limit", "error"}
        return reply
    except Exception as error:  # only a call that writes to descriptors gets here
        return _error(error)


def _error(error: BaseException) -> dict:
    text = "".join(traceback.format_exception(error))[-20_000:]
    return {"error": f"{type(error).__name__}: {str(error)[:2000]}", "traceback": text}


def _write_line(descriptor: int, message: dict) -> None:
    view = memoryview(json.dumps(message).encode() + b"\n")
    while view:
        view = view[os.write(descriptor, view) :]


if __name__ == "__main__":
    main()
