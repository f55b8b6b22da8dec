"""The coordination of processes, on a store in memory."""

import json
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from telescope_jax.hosts import batches, runtime
from telescope_jax.hosts.runtime import HostsError, Peers, Place, place
from tests.learner.rows import batches as packed

ROOT = Path(__file__).resolve().parents[2]


class Store:
    """What Peers uses of the coordination service's client."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.arrived = threading.Event()

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        assert allow_overwrite or key not in self.values
        self.values[key] = value

    def key_value_delete(self, key: str) -> None:
        del self.values[key]

    def key_value_dir_get(self, prefix: str) -> list[tuple[str, str]]:
        return [(key, value) for key, value in self.values.items() if key.startswith(prefix)]

    def blocking_key_value_get(self, key: str, timeout_ms: int) -> str:
        if key not in self.values:
            raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED")
        return self.values[key]

    def wait_at_barrier(self, name: str, timeout_ms: int) -> None: ...


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setattr(runtime.distributed.global_state, "num_processes", 3)
    monkeypatch.setattr(runtime, "_LEAVE_S", 0.0)
    return Store()


class Codes(list[int]):
    """Exit codes of the watch; `over` is set with the first."""

    def __init__(self) -> None:
        self.over = threading.Event()


def peers(store: Store, index: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Peers, Codes]:
    """The peers seen from `index`, and the exit code once its watch ends the process."""
    codes = Codes()

    def leave(code: int) -> None:
        codes.append(code)
        codes.over.set()
        threading.Event().wait()  # the watching thread is a daemon, and goes no further

    monkeypatch.setattr(runtime, "leave", leave)
    monkeypatch.setattr(runtime.distributed.global_state, "process_id", index)
    return Peers(patience_s=0.1, beat_s=0.01, store=store), codes


def test_flags_win_over_the_launchers_environment():
    environment = {
        "TELESCOPE_COORDINATOR": "a:1",
        "TELESCOPE_PROCESSES": "4",
        "TELESCOPE_PROCESS": "3",
    }
    assert place({}, environment) == Place("a:1", 4, 3)
    assert place({"process": "0"}, environment) == Place("a:1", 4, 0)
    assert place({"coordinator": "auto"}, {}) == Place("auto", None, None)
    assert place({}, {}) is None


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"coordinator": "a:1"}, "--processes \\(or TELESCOPE_PROCESSES\\) and --process"),
        ({"coordinator": "a:1", "processes": "2", "process": "2"}, "one of 0 to processes − 1"),
        ({"coordinator": "a", "processes": "2", "process": "0"}, "the coordinator is host:port"),
        ({"coordinator": "a:1", "processes": "two", "process": "0"}, "--processes=two"),
        ({"coordinator": "auto", "processes": "2"}, "leave --processes and --process out"),
        ({"coordinator": "a:65536", "processes": "2", "process": "0"}, "a port of 1 to 65535"),
    ],
)
def test_a_place_that_is_not_whole_is_refused(flags: dict[str, Any], words: str):
    with pytest.raises(HostsError, match=words):
        place(flags, {})


def join_alone(place: str) -> subprocess.CompletedProcess[str]:
    """One process of two, alone for a second."""
    code = "from telescope_jax.hosts.runtime import HostsError, Place, join\n"
    code += f"try: join({place}, start_timeout_s=1)\nexcept HostsError as error: print(error)"
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)


@pytest.mark.parametrize("process", [0, 1])
def test_a_process_whose_peers_do_not_come_says_so(process: int):
    """JAX aborts it with a dump of its stack."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    done = join_alone(f"Place('{address}', 2, {process})")
    assert done.returncode == runtime.PEER_EXIT_CODE
    waiting, words = done.stderr.splitlines()
    assert waiting.endswith(f"1 s at most for the other trainer processes at {address}")
    assert f"not all of the 2 trainer processes came to {address} within 1 s" in words


def test_a_port_that_is_taken_is_refused():
    """JAX dies of it by a segmentation fault."""
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        done = join_alone(f"Place('127.0.0.1:{other.getsockname()[1]}', 2, 0)")
    assert "process 0 cannot listen on port" in done.stdout and done.returncode == 0


def test_auto_without_a_cluster_is_refused():
    assert (
        "finds no TPU slice, Slurm or MPI job here"
        in join_alone("Place('auto', None, None)").stdout
    )


def test_a_silent_process_is_named_and_all_end(store, monkeypatch, capsys):
    store.values["telescope/who/1"] = "process 1 (there, pid 7)"
    store.values["telescope/beat/1"] = "5"  # once, and never again
    mine, codes = peers(store, 0, monkeypatch)
    assert codes.over.wait(10) and codes == [runtime.PEER_EXIT_CODE]
    assert "process 1 (there, pid 7) died: no sign of life" in capsys.readouterr().err
    told = json.loads(store.values["telescope/last_words/0"])
    assert "process 1 (there, pid 7) died" in told["words"]


def test_a_process_that_has_not_begun_yet_is_not_dead(store, monkeypatch):
    mine, codes = peers(store, 0, monkeypatch)
    assert not codes.over.wait(0.5) and codes == []
    mine._ended.set()


def test_last_words_of_process_0_end_the_others_with_its_code(store, monkeypatch, capsys):
    words = {"code": 3, "words": "NoSignalError: nothing to learn from"}
    store.values["telescope/last_words/0"] = json.dumps(words)
    mine, codes = peers(store, 2, monkeypatch)
    assert codes.over.wait(10) and codes == [3]
    assert "process 0 failed: NoSignalError" in capsys.readouterr().err


def test_a_stop_asked_of_a_follower_reaches_the_leader_once(store, monkeypatch):
    mine, _ = peers(store, 0, monkeypatch)
    asked = threading.Event()
    numbers: list[int] = []
    mine.on_stop = lambda number: (numbers.append(number), asked.set())
    store.values["telescope/stop/2"] = "15"
    assert asked.wait(10)
    mine._ended.set()
    mine._thread.join()
    assert numbers == [15]


def test_what_differs_is_named_with_every_process_that_says_it(store, monkeypatch):
    mine, _ = peers(store, 0, monkeypatch)
    mine._ended.set()
    for index, jax_version in ((1, "0.10.2"), (2, "0.9")):
        said = {"jax": jax_version, "config.seed": "0"}
        store.values[f"telescope/agree/setup/{index}"] = json.dumps(said)
    words = "jax is 0.10.2 on process 0, 1 but 0.9 on process 2; start the same code"
    with pytest.raises(HostsError, match=words):
        mine.agree("setup", {"jax": "0.10.2", "config.seed": "0"})


def test_commands_arrive_in_order_and_old_ones_are_forgotten(store, monkeypatch):
    leader, _ = peers(store, 0, monkeypatch)
    leader._ended.set()
    follower, _ = peers(store, 1, monkeypatch)
    follower._ended.set()
    for number in range(200):
        leader.command("update", number=number)
        assert follower.next_command() == {"kind": "update", "number": number}
    assert sum(key.startswith("telescope/command/") for key in store.values) <= 64


def test_a_batch_arrives_bit_for_bit_in_parts_of_one_shape(monkeypatch):
    """LM-24: whatever its rows, no process ever compiles or sends another shape."""
    sent = packed(40, 4, minibatches=2)
    sent[0].logprobs[0, :3] = [np.nan, -0.0, np.inf]
    shapes = set()

    def broadcast_one_to_all(x: np.ndarray) -> np.ndarray:
        shapes.add(x.shape)
        return x

    monkeypatch.setattr(batches.multihost_utils, "broadcast_one_to_all", broadcast_one_to_all)
    about = json.loads(json.dumps(batches.header(sent, 4)))
    received = batches.broadcast(sent, about)
    for one, other in zip(sent, received, strict=True):
        for name in batches.FIELDS:
            a, b = getattr(one, name), getattr(other, name)
            assert a.dtype == b.dtype and a.tobytes() == b.tobytes()
    assert shapes == {(6, 4, 16)}


def test_a_batch_that_arrives_changed_is_an_error(monkeypatch):
    sent = packed(9, 4)
    about = batches.header(sent, 4)
    with pytest.raises(HostsError, match="checksum"):
        batches.broadcast(None, about)
