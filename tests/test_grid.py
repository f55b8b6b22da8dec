"""The three ways of joining sweeps."""

import pytest

from telescope_jax.grid import chain, product, values, zipped


def test_a_product_has_every_combination_and_the_last_field_changes_fastest():
    assert product(values("a", [1, 2]), values("b", "xy")) == [
        {"a": 1, "b": "x"},
        {"a": 1, "b": "y"},
        {"a": 2, "b": "x"},
        {"a": 2, "b": "y"},
    ]


def test_zipped_sweeps_advance_together():
    assert zipped(values("a", [1, 2]), values("b", [3, 4])) == [{"a": 1, "b": 3}, {"a": 2, "b": 4}]


def test_a_chain_keeps_its_order_and_what_is_listed_twice():
    assert chain([{"a": 1}], values("b", [1, 2]), [{"a": 1}]) == [
        {"a": 1},
        {"b": 1},
        {"b": 2},
        {"a": 1},
    ]


def test_the_neutral_elements_of_product_and_chain():
    some = values("a", [1, 2])
    assert product() == [{}] and product(some) == some and product(some, [{}]) == some
    assert chain() == [] and chain(some, []) == some


def test_unequal_lengths_are_refused_with_both_numbers():
    with pytest.raises(ValueError, match="2 and 3 runs"):
        zipped(values("a", range(2)), values("b", range(3)))


def test_a_field_that_two_sweeps_set_is_refused():
    with pytest.raises(ValueError, match="two sweeps set a"):
        product(values("a", [1]), values("a", [2]))
