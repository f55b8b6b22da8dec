"""Checkpoints that the tests of this folder share; making them takes a process with torch."""

from pathlib import Path

import pytest

from tests.weights.hf_cases import CASES, run_oracle


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one checkpoint a case, and NAME.npz beside each."""
    folder = tmp_path_factory.mktemp("checkpoints")
    run_oracle("make", CASES, folder, folder)
    return folder
