"""Packages that only some commands need: whether they are here, and what to do if they are not."""

import importlib.util

_EXTRAS = {
    "safetensors": "hf",
    "transformers": "hf",
    "huggingface_hub": "hf",
    "submitit": "slurm",
    "xmanager": "xm",
    "libtpu": "plan",
    "torch": "smollm2",
    "gguf": "smollm2",
    "accelerate": "smollm2",
}
"""Package -> the extra of pyproject.toml that brings it."""


def missing(what: str, *packages: str) -> str:
    """Why `what` cannot be done, with the command that mends it; "" if all packages are here."""
    absent = [package for package in packages if importlib.util.find_spec(package) is None]
    if not absent:
        return ""
    extras = ",".join(dict.fromkeys(_EXTRAS[package] for package in absent))
    verb = "is" if len(absent) == 1 else "are"
    return (
        f"{what} needs {' and '.join(absent)}, which {verb} not installed: "
        f"pip install -e '.[{extras}]'"
    )
