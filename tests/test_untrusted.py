"""What the sources never do with what others wrote: read from them with `ast`."""

import ast
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from telescope_jax.chat import CharTokenizer
from telescope_jax.rollouts.table import RolloutTables
from telescope_jax.run import default_workdir
from telescope_jax.sweep_points import _label
from telescope_jax.types import Group, Prompt, Reward, Rollout, StopReason, Uid, VersionSpan

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


@pytest.mark.parametrize("value", ["../../stolen", "/etc", "..", "a/../../b", "x\x00y", "~/.ssh"])
def test_a_point_of_a_sweep_is_a_folder_of_the_sweep(value: str) -> None:
    name = _label({"env.name": value, "seed": 1})
    assert Path(name).name == name and ".." not in Path(name).parts and "\x00" not in name
    assert Path(_label({value: value})).name == _label({value: value})


@pytest.mark.parametrize("stranger", ["../../stolen", "/tmp/stolen", "..", "a/b", "\x00"])
def test_what_an_environment_calls_itself_and_its_prompts_names_no_file(
    tmp_path: Path, stranger: str
) -> None:
    """Folders and files of a run are named by steps; a uid that is a path is a value in a table."""
    uid = Uid(stranger, stranger)  # type: ignore[arg-type]
    prompt = Prompt(uid, stranger, np.array([3, 4], np.int32), {})
    rollout = Rollout(
        tokens=np.array([3, 4, 5], np.int32),
        loss_mask=np.array([False, False, True]),
        logprobs=np.array([np.nan, np.nan, -1.0], np.float32),
        versions=(VersionSpan(0, 2, 3),),
        reward=Reward(1.0, tags=(stranger,)),
        metrics={},
        stop=StopReason.EOS,
        turns=1,
    )
    folder = tmp_path / "run" / "rollouts"
    folder.parent.mkdir()
    RolloutTables(folder, CharTokenizer(), every=1).write(7, [Group(prompt, 0, (rollout,))])
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert files == [folder / "step_000007.parquet"]
