"""The table and the picture of a sweep over corrections, from the files of its runs."""

import json
from pathlib import Path

import numpy as np
import pytest

from experiments.sweeps import corrections


def leave(sweep: Path, name: str, overrides: dict[str, str], rewards: list[float], state: str):
    """What a point's run leaves behind."""
    folder = sweep / "runs" / name / "metrics"
    folder.mkdir(parents=True)
    (sweep / "points").mkdir(exist_ok=True)
    (sweep / "points" / f"{name}.json").write_text(json.dumps({"overrides": overrides}))
    (folder.parent / "run.json").write_text(json.dumps({"state": state}))
    lines = [{"step": step, "rollout/reward": reward} for step, reward in enumerate(rewards)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_ends_are_of_finished_runs_by_setting_and_correction(tmp_path: Path, capsys):
    tis = {"use_tis": "True"}
    for seed, end in enumerate((0.5, 0.7)):  # the mean over the last tenth: two of 20 steps
        rewards = [0.0] * 18 + [end - 0.1, end + 0.1]
        overrides = tis | {"max_async_rollout": "16", "seed": str(seed)}
        leave(tmp_path, f"late{seed}", overrides, rewards, "finished")
    decoupled = tis | {"max_async_rollout": "2", "loss.objective": "ppo"}
    leave(tmp_path, "early", decoupled, [0.25], "finished")
    leave(tmp_path, "cut", {"max_async_rollout": "2", "use_tis": "False"}, [0.9], "running")

    corrections.main([str(tmp_path), str(tmp_path / "picture.png")])
    said = capsys.readouterr().out
    assert "| 2 | — | — | — | 0.250 (1) |\n| 16 | — | 0.600 ± 0.141 (2) | — | — |" in said
    assert "0.9" not in said

    panels = corrections.draw(corrections.finished(tmp_path)).axes
    assert [panel.get_title(loc="left") for panel in panels[:2]] == [
        "2 steps ahead",
        "16 steps ahead",
    ]
    (curve,) = panels[1].lines
    assert curve.get_label() == "TIS"
    assert np.asarray(curve.get_ydata())[-1] == pytest.approx(0.7)


def test_a_folder_without_runs_is_refused(tmp_path: Path, capsys):
    with pytest.raises(SystemExit):
        corrections.main([str(tmp_path), "x.png"])
    assert "no finished run" in capsys.readouterr().err


def test_a_sweep_of_other_fields_is_refused(tmp_path: Path):
    (tmp_path / "points").mkdir()
    (tmp_path / "points" / "a.json").write_text(
        '{"overrides": {"tis_cap": "2", "use_tis": "True"}}'
    )
    with pytest.raises(SystemExit, match=r"a\.json is no point of a study of corrections"):
        corrections.finished(tmp_path)
