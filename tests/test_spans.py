"""The trainer's spans fill the time from the beginning of a run to its end."""

import pytest

from telescope_jax.spans import Spans


def test_start_up_steps_and_end_are_all_of_the_time():
    now = 100.0
    spans = Spans(lambda: now, began=90.0)
    lines = [spans.rest("start_up")]
    for waited in (1.0, 2.0):
        with spans("wait_for_batch"):
            now += waited
        with spans("update"), spans("publish"):
            now += 3.0
        now += 0.5
        lines.append(spans.step())
        with spans("checkpoint"):
            now += 4.0
    with pytest.raises(KeyError), spans("wait_for_batch"):
        now += 0.25
        raise KeyError
    now += 1.0
    lines.append(spans.rest("end"))

    assert [line["time/elapsed"] for line in lines] == [10.0, 14.5, 24.0, 29.25]
    assert lines[0]["time/start_up"] == 10.0
    assert [line["time/step"] for line in lines[1:3]] == [4.5, 9.5]
    assert lines[2]["time/checkpoint"] == 4.0, "it came after the line of the step before"
    assert lines[3]["time/wait_for_batch"] == 0.25 and lines[3]["time/end"] == 1.0
    assert "time/checkpoint" not in lines[1] and lines[3]["time/publish"] == 0.0
