"""The integers of the async contract: admission, the age bound, and what follows from them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from telescope_jax.staleness import AsyncBound, ages
from telescope_jax.types import VersionSpan


def test_synchronous_admits_one_batch_a_version() -> None:
    bound = AsyncBound(0, 8, groups_per_batch=4, number_of_steps=10)
    assert [bound.admission_limit(version) for version in range(3)] == [4, 8, 12]


def test_the_last_batch_is_the_last() -> None:
    bound = AsyncBound(5, -1, groups_per_batch=4, number_of_steps=10)
    assert bound.admission_limit(8) == bound.admission_limit(100) == 40


def test_a_resumed_run_admits_what_its_books_leave() -> None:
    """OR-05: bound 2, batch 8, version 100, 100 batches trained: capacity 24, not 824."""
    bound = AsyncBound(2, -1, groups_per_batch=8, number_of_steps=1000)
    assert bound.admission_limit(100) - 100 * 8 == 24


@pytest.mark.parametrize(("off_policy", "lead"), [(-1, 3), (0, 0), (2, 2), (3, 3), (9, 3)])
def test_the_pace_is_the_smaller_of_both_bounds(off_policy: int, lead: int) -> None:
    assert AsyncBound(3, off_policy, 1, 10).lead == lead


def test_age_counts_weight_updates() -> None:
    bound = AsyncBound(2, 2, 1, 100)
    assert not bound.is_stale(oldest_version=5, batch=7)
    assert bound.is_stale(oldest_version=5, batch=8)
    assert not AsyncBound(2, -1, 1, 100).is_stale(oldest_version=0, batch=99)
    assert AsyncBound(0, 0, 1, 100).is_stale(oldest_version=6, batch=7)


@given(st.integers(0, 6), st.integers(-1, 6), st.integers(1, 5), st.integers(0, 20))
def test_what_is_admitted_can_join_a_batch_that_is_young_enough(
    lead: int, off_policy: int, groups: int, served: int
) -> None:
    """The last group that version `served` admits belongs to batch served + lead at the latest."""
    bound = AsyncBound(lead, off_policy, groups, 1_000)
    last_batch = (bound.admission_limit(served) - 1) // groups
    assert last_batch == served + bound.lead
    assert not bound.is_stale(oldest_version=served, batch=last_batch)


def test_ages_weigh_spans_by_their_tokens() -> None:
    assert ages([VersionSpan(3, 2, 5), VersionSpan(4, 5, 6)], batch=5) == [(2, 3), (1, 1)]
