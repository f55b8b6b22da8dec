"""A terminal shows stages and trouble; the file has every line with its time and its logger."""

import io
import logging
import re
from pathlib import Path

import pytest

from telescope_jax.log_lines import logging_to


def test_a_terminal_shows_stages_plainly_and_the_file_has_everything(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    ours, others = logging.getLogger("telescope_jax.learner"), logging.getLogger("orbax")
    shown: list[str] = []
    foreign = logging.StreamHandler(stream := io.StringIO())
    logging.getLogger().addHandler(foreign)
    try:
        with logging_to(tmp_path / "logs" / "main.log", shown.append):
            ours.debug("warm start: step 50, loss 1.2")
            ours.info("warm start: 115 steps\nin 23 s")
            ours.info("no stage at all")
            others.info("chatter")
            others.warning("quota: low")
            ours.error("out of memory")
        assert foreign in logging.getLogger().handlers, "put back where it was"
    finally:
        logging.getLogger().removeHandler(foreign)
    assert shown == ["warm start  115 steps\n            in 23 s", "no stage at all"]
    assert capsys.readouterr().err == "warning     quota: low\nerror       out of memory\n"
    assert stream.getvalue() == "", "an import's handler would show each line twice"
    text = (tmp_path / "logs" / "main.log").read_text()
    stamp = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}"
    assert re.match(
        rf"{stamp} DEBUG telescope_jax\.learner: warm start: step 50, loss 1\.2\n", text
    )
    assert re.search(rf"(?m)^{stamp} WARNING orbax: quota: low$", text)


def test_a_terminal_that_is_gone_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError("the reader has gone")

    monkeypatch.setattr("sys.stderr", Gone())
    with logging_to(tmp_path / "main.log", lambda text: None):
        logging.getLogger("telescope_jax").warning("low on disk")
    assert "low on disk" in (tmp_path / "main.log").read_text()
