"""An import path on which vLLM finds our plugin, for a checkout that was never installed.

`run.sh` installs the project, which is how vLLM finds its entry point; a bare checkout gets a
folder with the same entry point. The folder also hides torchvision and its kin: built for another
torch they break vLLM's imports, and nothing here reads pictures or sound.
"""

import importlib.metadata
import os
import sys
from pathlib import Path

import pytest

_METADATA = "Metadata-Version: 2.1\nName: telescope-jax-checkout\nVersion: 0\n"
_BLOCK = """import sys
for name in ("torchvision", "torchaudio", "torchcodec"):
    sys.modules[name] = None
"""


def make_visible(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts `folder` on this process's import path and on that of its children."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sitecustomize.py").write_text(_BLOCK)
    value = "telescope_jax.inference.vllm_plugin:register"
    points = importlib.metadata.entry_points(group="vllm.general_plugins")
    if value not in {point.value for point in points}:
        info = folder / "telescope_jax_checkout-0.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text(_METADATA)
        (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\ntelescope_jax = {value}\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(folder)])
    inherited = [path for path in [os.environ.get("PYTHONPATH")] if path]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), *inherited]))
