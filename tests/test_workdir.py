"""What a run's folder says of its lives."""

import json
from pathlib import Path

import pytest

from telescope_jax.config import Config
from telescope_jax.workdir import Workdir, WorkdirError


def notes(path: Path) -> dict:
    return json.loads((path / "run.json").read_text())


def test_a_life_that_was_killed_has_not_the_end_of_the_one_before(tmp_path: Path):
    """A launcher read 130 of it, and did not start it again."""
    for _ in range(2):
        life = Workdir.open(tmp_path, Config(), "x.py")
        assert notes(tmp_path)["state"] == "running" and "exit_code" not in notes(tmp_path)
        life.note(step=4, died="process 1")
        life.note_end(130)
        life.close()
    killed = Workdir.open(tmp_path, Config(), "x.py")
    killed.close()
    assert notes(tmp_path).keys() == {"started", "config_file", "pid", "state", "step"}


@pytest.mark.parametrize("text", ["", "{", "[]", "\udc80"])
def test_notes_that_cannot_be_read_are_refused(tmp_path: Path, text: str):
    Workdir.open(tmp_path, Config(), "x.py").close()
    (tmp_path / "run.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(WorkdirError, match=r"run.json .*; repair it, or remove it"):
        Workdir.open(tmp_path, Config(), "x.py")
