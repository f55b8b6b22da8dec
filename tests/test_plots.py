"""The picture shows the numbers of the metrics files, from those files alone."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from telescope_jax import plots

ROOT = Path(__file__).resolve().parents[1]
PNG = b"\x89PNG\r\n\x1a\n"


def run_lines(steps: int = 30) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = [
        {
            "step": step,
            "rollout/reward": step / steps,
            "staleness/mean": 0.5 * min(step, 2),
            "staleness/max": min(step, 2),
        }
        for step in range(steps)
    ]
    for step in (0, steps // 2, steps):
        lines.append({"step": step, "eval/sums/accuracy": 0.5, "eval/sums/sampled_accuracy": 0.4})
    return lines


def curves(figure: Any, panel: int) -> list[list[tuple[float, float]]]:
    return [list(zip(*line.get_data(), strict=True)) for line in figure.axes[panel].get_lines()]


def texts(figure: Any, panel: int) -> list[str]:
    return [text.get_text() for text in figure.axes[panel].texts]


def test_the_panels_hold_the_values_of_the_lines():
    lines = run_lines()
    lines[3]["rollout/reward"] = None  # not finite when it was logged
    figure = plots.draw(lines)
    raw, _ = curves(figure, 0)
    assert raw == [(step, step / 30) for step in range(30) if step != 3]
    greedy, sampled = curves(figure, 1)
    assert greedy == [(0, 0.5), (15, 0.5), (30, 0.5)]
    assert sampled == [(0, 0.4), (15, 0.4), (30, 0.4)]
    assert texts(figure, 1) == ["greedy 0.50", "sampled 0.40"]
    (mean,) = curves(figure, 2)
    assert mean == [(step, 0.5 * min(step, 2)) for step in range(30)]
    assert texts(figure, 2) == ["mean 1.0", "max 2"]


def test_several_environments_are_told_apart():
    lines = run_lines() + [{"step": 5, "eval/chain/accuracy": 0.1}]
    assert texts(plots.draw(lines), 1) == [
        "chain greedy 0.10",
        "sums greedy 0.50",
        "sums sampled 0.40",
    ]


def test_a_restart_is_marked():
    before = len(curves(plots.draw(run_lines()), 0))
    lines = run_lines() + [{"step": 7, "metrics/restarts": 1}]
    after = curves(plots.draw(lines), 0)
    assert len(after) == before + 1 and after[-1][0][0] == 7


def test_a_panel_without_data_says_so_and_no_line_at_all_is_an_error():
    figure = plots.draw([{"step": 0, "train/loss": 1.0}])
    assert [texts(figure, panel) for panel in range(3)] == [["nothing yet"]] * 3
    with pytest.raises(ValueError, match="no metrics yet"):
        plots.draw([])


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=30), st.integers(1, 40))
def test_smoothing_is_the_mean_of_the_last_values(values: list[float], window: int):
    expected = [np.mean(values[max(0, i + 1 - window) : i + 1]) for i in range(len(values))]
    np.testing.assert_allclose(plots.smooth(values, window), expected, atol=1e-8)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=6))
def test_end_labels_keep_their_order_and_do_not_overlap(heights: list[float]):
    placed = plots._spread(heights, gap=0.1)
    order = sorted(range(len(heights)), key=lambda i: heights[i])
    for below, above in zip(order, order[1:], strict=False):
        assert placed[above] - placed[below] >= 0.1 - 1e-9
    assert all(new >= old for new, old in zip(placed, heights, strict=True))


def test_the_command_draws_a_workdir_without_jax(tmp_path: Path):
    folder = tmp_path / "metrics"
    folder.mkdir()
    text = "".join(json.dumps(line) + "\n" for line in run_lines())
    (folder / "train.jsonl").write_text(text + '{"step": 30, "rol')  # still being written
    code = (
        "import sys; from telescope_jax import plots; code = plots.main(sys.argv)\n"
        "assert 'jax' not in sys.modules; sys.exit(code)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"{tmp_path / 'curves.png'}\n"
    assert (tmp_path / "curves.png").read_bytes().startswith(PNG)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["curves.png", "metrics"]


def test_a_workdir_without_metrics_is_one_line_and_exit_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert plots.main(["plots", str(tmp_path)]) == 2
    assert "no metrics yet" in capsys.readouterr().err
    assert plots.main(["plots"]) == 2
    assert capsys.readouterr().err.startswith("usage:")
