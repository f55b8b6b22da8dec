"""What an answer that is evaluated cannot reach: files, the network, other processes."""

import asyncio
import os
import socket
import tempfile
from pathlib import Path

import pytest

from telescope_jax.interfaces import RewardError
from telescope_jax.scoring import reward_pool
from telescope_jax.scoring.confinement import confine
from telescope_jax.scoring.reward_pool import RewardPool

F = "tests.scoring.confined_functions"


def kernel_can() -> bool:
    child = os.fork()
    if child == 0:
        os._exit(0 if confine(tempfile.gettempdir()) else 1)
    return os.waitpid(child, 0)[1] == 0


landlock = pytest.mark.skipif(not kernel_can(), reason="the kernel has no Landlock")


def attempt(name: str, *args: object, confined: bool = True) -> object:
    async def main() -> object:
        async with asyncio.timeout(200), RewardPool(workers=1, confined=confined) as pool:
            return await pool.call(f"{F}:{name}", *args)

    return asyncio.run(main())


@pytest.mark.parametrize("version", [0, 1])
def test_a_kernel_that_cannot_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, version: int
) -> None:
    monkeypatch.setattr(reward_pool, "landlock_version", lambda: version)

    async def main() -> None:
        async with RewardPool(workers=2) as pool:
            await pool.prewarm()

    asyncio.run(main())
    said = [r for r in caplog.records if "no Landlock" in r.message]
    assert len(said) == (version == 0)


@landlock
@pytest.mark.parametrize("name", ["create", "overwrite", "append", "delete", "rename", "link"])
def test_a_call_changes_no_file_outside_its_folder(tmp_path: Path, name: str) -> None:
    """The same function does its deed when it is not confined, or it would prove nothing."""
    there = tmp_path / "there"
    there.write_text("kept")
    with pytest.raises(RewardError, match="Permission"):
        attempt(name, str(there))
    assert [file.name for file in tmp_path.iterdir()] == ["there"] and there.read_text() == "kept"
    attempt(name, str(there), confined=False)
    changed = sorted(file.name for file in tmp_path.iterdir()) != ["there"]
    assert changed or there.read_text() != "kept"


@landlock
def test_a_call_has_its_own_folder_to_write_in() -> None:
    assert attempt("use_own_folder") == "written"


@landlock
def test_a_call_signals_nobody_and_connects_to_nobody() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert attempt("connect", port, confined=False) == "connected"
        version = attempt("landlock_version")
        assert isinstance(version, int)
        if version >= 4:
            with pytest.raises(RewardError, match="Permission"):
                attempt("connect", port)
    if version >= 6:
        with pytest.raises(RewardError, match="not permitted"):
            attempt("signal_process", os.getpid())
    assert attempt("signal_process", os.getpid(), confined=False) == "sent"
