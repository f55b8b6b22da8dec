"""Every wrong input has one exact line, and costs no work: golden files hold the lines.

Golden messages were written by running the cases and read by a person; a message that changes has
to be read again.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from telescope_jax import flags
from tests import bad_answers  # noqa: F401 (it adds its cases)
from tests.bad_inputs import CASES

ROOT = Path(__file__).resolve().parents[1]
GOLDEN = ROOT / "tests" / "golden"
COMMAND_LINES = [
    line.split("\t")
    for line in (GOLDEN / "bad_command_lines.tsv").read_text("utf-8").splitlines()[1:]
]
MESSAGES = json.loads((GOLDEN / "bad_inputs.json").read_text("utf-8"))


@pytest.mark.parametrize(("arguments", "line"), COMMAND_LINES, ids=[c[0] for c in COMMAND_LINES])
def test_a_wrong_command_line_is_refused_with_its_line(
    arguments: str,
    line: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    argv = arguments.split(" ")
    if not any(argument.startswith("--config=") for argument in argv):
        argv.insert(0, "--config=experiments/math.py")
    with pytest.raises(SystemExit) as ended:
        flags.parse(["main", *argv])
    assert ended.value.code == 2
    said = capsys.readouterr().err.splitlines()
    assert said == ["telescope_jax: 1 problem before any work:", f"  {line}"]


@pytest.mark.parametrize("name", CASES)
def test_a_wrong_input_is_refused_with_its_line(name: str, tmp_path: Path) -> None:
    with pytest.raises(Exception) as refused:
        CASES[name](tmp_path)
    said = f"{type(refused.value).__name__}: {refused.value}".replace(str(tmp_path), "TMP")
    assert said == MESSAGES[name]
    assert "\n" not in said


def test_there_are_at_least_sixty_and_none_without_its_case() -> None:
    assert MESSAGES.keys() == CASES.keys()
    assert len(COMMAND_LINES) + len(CASES) >= 60


def test_a_wrong_command_line_imports_no_jax() -> None:
    """The run ends before any device is touched, and before anything could compile."""
    script = """
import sys
from telescope_jax import flags
try:
    flags.parse(["main", "--config=experiments/math.py", "--config.algorithm=grop"])
except SystemExit as end:
    sys.exit(0 if end.code == 2 and "jax" not in sys.modules else 1)
sys.exit(1)
"""
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT, stderr=-3).returncode == 0
