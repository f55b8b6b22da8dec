"""What the sources never do with what others wrote: read from them with `ast`."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from telescope_jax.run import default_workdir

ROOT = Path(__file__).resolve().parents[1]
BANNED_MODULES = {"pickle", "cloudpickle", "dill", "shelve", "marshal", "joblib"}
BANNED_CALLS = {"eval", "exec", "compile", "__import__"}
BANNED_METHODS = {("torch", "load"), ("os", "system"), ("os", "popen")}


def complaints(source: str) -> Iterator[str]:
    """Everything that would let data run, or a stranger connect."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module]
            found = {str(name).split(".")[0] for name in names} & BANNED_MODULES
            yield from (f"{node.lineno} imports {name}" for name in found)
        if isinstance(node, ast.Constant) and node.value == "0.0.0.0":
            yield f"{node.lineno} names every interface of the machine"
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Name) and node.func.id in BANNED_CALLS:
            yield f"{node.lineno} calls {node.func.id}"
        if isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
            method = node.func.value.id, node.func.attr
            if method in BANNED_METHODS:
                yield f"{node.lineno} calls {'.'.join(method)}"
        for keyword in node.keywords:
            is_false = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
            if keyword.arg in ("trust_remote_code", "allow_pickle", "shell") and not is_false:
                yield f"{node.lineno} passes {keyword.arg}"


def test_no_source_runs_data_or_listens_to_strangers() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{complaint}"
        for package in ("telescope_jax", "kernels", "experiments")
        for path in sorted((ROOT / package).rglob("*.py"))
        for complaint in complaints(path.read_text("utf-8"))
    ]
    assert found == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from dill import loads",
        "torch.load('x')",
        "eval(text)",
        "np.load(path, allow_pickle=True)",
        "AutoModel.from_pretrained(x, trust_remote_code=flag)",
        "run(command, shell=True)",
        "serve('0.0.0.0')",
    ],
)
def test_a_source_that_does_is_reported(source: str) -> None:
    assert list(complaints(source))


@pytest.mark.parametrize("file", ["../../etc/passwd.py", "/etc/x.py:../../y", "..", "a/../../b.py"])
def test_a_folder_that_is_named_after_a_study_stays_below_runs(file: str) -> None:
    path = Path(default_workdir(file))
    assert path.parts[0] == "runs" and len(path.parts) == 2
