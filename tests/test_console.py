"""What a person sees is what the metrics say, on a terminal and in a log file."""

import io
import math
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from telescope_jax import console

STEP = {
    "rollout/reward_trained": 0.412,
    "staleness/mean": 1.21,
    "staleness/max": 4,
    "train/kl": 3.1e-4,
    "train/truncated_fraction": 0.0071,
    "engine/tokens_per_s": 8123.0,
    "time/wait_for_batch": 0.41,
    "train/token_count": 900.0,
}


def shown(terminal: bool, *calls: tuple[int, dict[str, Any]]) -> str:
    stream = io.StringIO()
    screen = console.Console(120, stream=stream, terminal=terminal)
    for step, values in calls:
        screen.log(step, values)
    screen.close()
    return stream.getvalue()


def test_a_step_is_one_line_of_the_house_format():
    expected = (
        "step 12 | reward 0.41 | stale 1.2/4 | kl 3e-4 | trunc 0.7% | 8.1k tok/s | wait 0.4 s"
    )
    assert console.step_line(12, STEP) == expected
    assert shown(False, (12, STEP)) == expected + "\n"


def test_a_missing_metric_is_left_out_and_a_null_one_is_a_question_mark():
    values = {name: value for name, value in STEP.items() if name != "train/kl"}
    assert "kl" not in console.step_line(0, values)
    assert "| kl ? |" in console.step_line(0, STEP | {"train/kl": math.nan})
    assert "| kl ? |" in console.step_line(0, STEP | {"train/kl": None})
    assert "reward inf" in console.step_line(0, {"rollout/reward_trained": math.inf})


def test_a_step_that_trained_nothing_says_so():
    """MT-06: a loss of 0 over no token looks like success."""
    assert console.step_line(0, STEP | {"train/token_count": 0}).endswith("| no token trained")
    assert "2 skipped updates" in console.step_line(0, STEP | {"train/skipped_updates": 2})


def test_a_log_file_gets_no_control_characters():
    text = shown(False, (0, {"eval/sums/accuracy": 0.5}), (0, STEP), (1, STEP))
    assert re.findall(r"[^\x20-\x7e\n]", text) == []
    assert text.count("\n") == 3


def test_a_terminal_shows_a_bar_the_numbers_and_the_time_left():
    text = shown(True, (58, STEP), (59, STEP), (59, {"eval/sums/accuracy": 0.625}))
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    assert "step 60/120" in plain and "━" in plain
    assert re.search(r"reward 0\.41 \| stale 1\.2/4 \| 8\.1k tok/s \| \S+ left", plain)
    assert "step 59 |" not in plain, "the live line replaces the step's line"
    assert "eval of version 59 | sums 0.62 greedy" in plain
    last_frame = plain.rstrip("\n").rpartition("\n")[2].rpartition("\r")[2]
    assert len(last_frame) <= 80


def test_values_of_other_parts_draw_nothing():
    assert shown(False, (3, {"time/eval": 2.0, "metrics/restarts": 1})) == ""


def test_an_eval_names_the_version_that_was_evaluated():
    values = {
        "eval/sums/accuracy": 0.6224,
        "eval/sums/sampled_accuracy": 0.451,
        "eval/chain/accuracy": 0.1,
    }
    expected = "eval of version 30 | sums 0.62 greedy, 0.45 sampled | chain 0.10 greedy"
    assert console.eval_line(30, values) == expected
    assert console.eval_line(33, STEP) == ""


def test_what_is_said_is_shown_literally_and_unbroken():
    stream = io.StringIO()
    screen = console.Console(3, stream=stream, terminal=False)
    screen.say("a = [bold]\n  w " + "x" * 300)
    assert stream.getvalue() == "a = [bold]\n  w " + "x" * 300 + "\n"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (812, "812"),
        (999.4, "999"),
        (999.6, "1.0k"),
        (8123, "8.1k"),
        (9960, "10k"),
        (45_600, "46k"),
        (999_600, "1.0M"),
        (3.42e6, "3.4M"),
        (2.1e9, "2.1G"),
    ],
)
def test_large_numbers_are_short(value: float, text: str):
    assert console.si(value) == text


@given(st.floats(0, 9e11))
def test_a_short_number_is_within_rounding_of_the_number(value: float):
    match = re.fullmatch(r"([\d.]+)([kMG]?)", console.si(value))
    assert match
    back = float(match[1]) * {"": 1, "k": 1e3, "M": 1e6, "G": 1e9}[match[2]]
    assert abs(back - value) <= max(0.5, 0.051 * value)
    assert len(match[1]) <= 3


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (8.04, "8.0 s"),
        (59.4, "59 s"),
        (59.6, "1 min 0 s"),
        (103, "1 min 43 s"),
        (7500, "2 h 5 min"),
    ],
)
def test_durations_read_like_speech(seconds: float, text: str):
    assert console.clock(seconds) == text


def run_lines() -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = [
        {"step": 0, "time/start_up": 7.0, "time/elapsed": 7.0},
        {"step": 0, "eval/sums/accuracy": 0.5, "eval/sums/sampled_accuracy": 0.25, "time/eval": 4},
        {"step": 20, "eval/sums/accuracy": 0.9, "eval/sums/sampled_accuracy": 0.75},
    ]
    for step in range(20):
        lines.append(
            {
                "step": step,
                "train/loss": 0.0,
                "rollout/reward": 0.2 if step < 10 else 0.8,
                "staleness/mean": 1.0,
                "staleness/max": min(step, 3),
                "engine/tokens_per_s": 5000,
                "time/step": 2.0,
                "time/update": 1.5,
                "time/wait_for_batch": 0.25,
                "time/checkpoint": 2.0 if step == 10 else 0.0,
                "time/deploy": 1.0,
                "time/elapsed": 7.0 + 2.25 * (step + 1),
                "ledger/dispatched": 10 * step + 20,
                "ledger/trained": 10 * step + 10,
                "ledger/batched": 0,
                "ledger/held": 3,
                "ledger/in_flight": 5,
                "ledger/dropped/zero_advantage": 2,
                "ledger/dropped/gave_up": 0,
                "metrics/non_finite": 0,
            }
        )
    lines.append({"step": 20, "time/end": 3.0, "time/elapsed": 55.0})
    return lines


def test_the_summary_is_one_screen_of_the_runs_own_numbers():
    text = console.summary(run_lines(), {"picture": "runs/a/curves.png"})
    rows = [re.sub(r" {2,}", "  ", line.strip()) for line in text.splitlines()]
    assert rows == [
        "20 steps in 55 s",
        "held-out, greedy  0.500 → 0.900  sums, steps 0 to 20",
        "held-out, sampled  0.250 → 0.750  sums, steps 0 to 20",
        "reward  0.200 → 0.800  all finished groups, first and last 10 steps",
        "staleness  mean 1.00, max 3 steps",
        "sampling  5.0k tokens/s",
        "time  start up 7.0 s + wait for batch 5.0 s + update 30 s + checkpoint 2.0 s + end 3.0 s "
        "+ other 8.0 s",
        "meanwhile  eval 4.0 s, deploy 20 s",
        "groups  210 dispatched = 200 trained + 0 batched + 3 held + 5 in flight + 2 dropped "
        "(zero_advantage 2)",
        "picture  runs/a/curves.png",
    ]
    assert len(rows) <= 24


def test_the_time_of_a_resumed_run_is_that_of_all_its_starts():
    again = [{"step": 20, "metrics/restarts": 1}, {"step": 20, "time/elapsed": 8.0}]
    assert console.wall_clock(run_lines() + again) == 63.0
    assert console.wall_clock([]) == 0.0


def test_the_summary_names_what_went_wrong():
    lines = run_lines()
    lines[5] |= {"train/token_count": 0, "train/skipped_updates": 1, "metrics/non_finite": 2}
    lines[6] |= {"metrics/write_errors": 3, "engine/restarts": 1}
    (row,) = [row for row in console.summary(lines, {}).splitlines() if "trouble" in row]
    for words in (
        "1 skipped updates",
        "2 values that were not finite",
        "3 metric lines lost",
        "1 steps without a trained token",
        "1 engine restarts",
    ):
        assert words in row


def test_a_run_without_a_step_has_a_summary():
    assert console.summary([], {"metrics": "m"}) == "0 steps\n  metrics  m"
