"""Held groups survive a checkpoint bit for bit."""

import json
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from telescope_jax.rollouts.archive import pack_groups, unpack_groups
from telescope_jax.types import Group, Reward, Rollout, StopReason, Uid, VersionSpan
from tests.scripted import ScriptedEnv

ENV = ScriptedEnv(random.Random(0))


@st.composite
def rollouts(draw: st.DrawFn) -> Rollout:
    length = draw(st.integers(2, 9))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    return Rollout(
        tokens=rng.integers(0, 99, length).astype(np.int32),
        loss_mask=np.arange(length) >= 1,
        logprobs=rng.normal(size=length).astype(np.float32),
        versions=(VersionSpan(3, 1, length),),
        reward=Reward(draw(st.floats(-2, 2)), {"format": 0.25}, ("grader_limit",)),
        metrics={"format": 0.25},
        stop=draw(st.sampled_from(StopReason)),
        turns=draw(st.integers(1, 3)),
    )


@given(st.lists(st.lists(rollouts(), min_size=1, max_size=3), max_size=4))
def test_packed_groups_come_back_as_they_were(content: list[list[Rollout]]) -> None:
    groups = [
        Group(ENV.prompt(Uid(0, index)), index % 3, tuple(members))
        for index, members in enumerate(content)
    ]
    records, arrays = pack_groups(groups)
    again = unpack_groups(json.loads(json.dumps(records)), arrays, ENV)
    assert len(again) == len(groups)
    for before, after in zip(groups, again, strict=True):
        assert after.prompt.uid == before.prompt.uid and after.attempt == before.attempt
        for one, other in zip(before.rollouts, after.rollouts, strict=True):
            for name in ("tokens", "loss_mask", "logprobs"):
                assert np.array_equal(getattr(one, name), getattr(other, name))
                assert getattr(one, name).dtype == getattr(other, name).dtype
            assert (one.versions, one.reward, one.stop, one.turns) == (
                other.versions,
                other.reward,
                other.stop,
                other.turns,
            )


def test_arrays_that_do_not_fit_their_records_are_refused() -> None:
    rollout = Rollout(
        np.zeros(3, np.int32), np.ones(3, bool), np.zeros(3, np.float32),
        (VersionSpan(0, 0, 3),), Reward(0.0), {}, StopReason.EOS, 1,
    )  # fmt: skip
    records, arrays = pack_groups([Group(ENV.prompt(Uid(0, 0)), 0, (rollout,))])
    arrays["logprobs"] = arrays["logprobs"][:2]
    with pytest.raises(ValueError, match="3 tokens"):
        unpack_groups(records, arrays, ENV)
