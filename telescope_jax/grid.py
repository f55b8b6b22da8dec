"""Sweeps as lists: each element holds the overrides of one run, field -> value.

    product(values("max_async_rollout", [0, 1, 2]), values("seed", range(3)))      9 runs
    zipped(values("optimizer.learning_rate", [1e-4, 3e-4]), values("tis_cap", [2, 4]))   2 runs
    chain([{"use_tis": False}], product(...))                          one after the other

Every function takes and gives plain lists of dicts, so a study may also build them by hand.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Overrides = dict[str, Any]
"""Dotted field of the Config -> value."""


def values(field: str, choices: Iterable[Any]) -> list[Overrides]:
    """One run for each value of one field."""
    return [{field: choice} for choice in choices]


def product(*sweeps: Iterable[Mapping[str, Any]]) -> list[Overrides]:
    """Every combination; the last sweep changes fastest. Of nothing: one run without overrides.

    Raises:
      ValueError: two of the sweeps set the same field.
    """
    return [_merged(parts) for parts in itertools.product(*map(list, sweeps))]


def zipped(*sweeps: Iterable[Mapping[str, Any]]) -> list[Overrides]:
    """The first of each together, then the second of each, and so on.

    Raises:
      ValueError: they are not equally long, or two of them set the same field.
    """
    lists = [list(sweep) for sweep in sweeps]
    if len(lengths := {len(sweep) for sweep in lists}) > 1:
        raise ValueError(
            f"zipped sweeps have {' and '.join(map(str, sorted(lengths)))} runs; give each as many"
        )
    return [_merged(parts) for parts in zip(*lists, strict=True)]


def chain(*sweeps: Iterable[Mapping[str, Any]]) -> list[Overrides]:
    """One sweep after the other."""
    return [dict(overrides) for overrides in itertools.chain(*sweeps)]


def _merged(parts: Sequence[Mapping[str, Any]]) -> Overrides:
    merged: Overrides = {}
    for part in parts:
        if twice := sorted(merged.keys() & part.keys()):
            raise ValueError(f"two sweeps set {', '.join(twice)}; set it in one of them")
        merged |= part
    return merged
