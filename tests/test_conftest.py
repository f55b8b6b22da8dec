"""The suite's own rules: a hang ends, what cannot run is skipped, jax sees eight devices."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def suite(tmp_path: Path):
    """Runs a test file under a copy of conftest.py, with lines of it replaced."""

    def run(source: str, *args: str, replace: tuple[str, str] = ("", ""), **env: str):
        conftest = (ROOT / "tests/conftest.py").read_text().replace(*replace)
        # None in sys.modules: as if vllm were not installed.
        blocked = "import sys\n\nsys.modules['vllm'] = None\n"
        (tmp_path / "conftest.py").write_text(blocked + conftest)
        (tmp_path / "test_it.py").write_text("import pytest, time, signal\n" + source)
        (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
        return subprocess.run(
            [sys.executable, "-m", "pytest", str(tmp_path), "-p", "no:cacheprovider", *args],
            cwd=tmp_path,
            env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **env},
            capture_output=True,
            text=True,
            timeout=120,
        )

    return run


def test_this_process_has_eight_cpu_devices_and_strict_ranks():
    import jax
    import jax.numpy as jnp

    assert [d.platform for d in jax.devices("cpu")] == ["cpu"] * 8
    with pytest.raises(ValueError, match="rank"):
        jnp.add(jnp.ones((2, 3)), jnp.ones(3))


def test_skips_deadlines_and_the_ci_profile(suite):
    """In one process, because starting one is what takes the time."""
    result = suite(
        "from hypothesis import settings\n"
        "@pytest.mark.vllm\n"
        "def test_vllm_1(): assert 0\n"
        "@pytest.mark.vllm\n"
        "def test_vllm_2(): assert 0\n"
        "@pytest.mark.tpu_compile\n"
        "def test_tpu(): assert 0\n"
        "@pytest.mark.deadline(0.2)\n"
        "def test_slow(): time.sleep(60)\n"
        "def test_next():\n"
        "    assert settings().derandomize and settings().deadline is None\n",
        CI="true",
    )
    assert "1 failed, 1 passed, 3 skipped" in result.stdout
    assert "DeadlineExceeded: test_it.py::test_slow ran longer than 0.2 s" in result.stdout
    lines = [line for line in result.stdout.splitlines() if "vllm" in line]
    assert lines == ["vllm is not installed: 2 tests marked vllm were skipped"]


def test_a_hang_that_no_exception_ends_stops_the_process_with_its_traceback(suite):
    result = suite(
        "@pytest.mark.tpu_compile\n"
        "@pytest.mark.deadline(0.2)\n"
        "def test_hangs(pytestconfig):\n"
        "    assert pytestconfig.getoption('--tpu-compile')\n"
        "    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])\n"
        "    time.sleep(60)\n",
        "--tpu-compile",
        replace=("GRACE_S = 60.0", "GRACE_S = 0.2"),
    )
    assert result.returncode == 1
    assert "Timeout" in result.stderr and "test_hangs" in result.stderr
