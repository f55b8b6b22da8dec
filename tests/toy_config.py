"""A tree with every kind of field that the grammar knows; the real one has only some."""

import dataclasses
from typing import Literal


@dataclasses.dataclass(slots=True)
class Branch:
    table: dict[int, str] = dataclasses.field(default_factory=lambda: {0: "a", 10: "b"})
    nested: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    limit: float | None = None


@dataclasses.dataclass(slots=True)
class Toy:
    """Every kind of field, an empty tuple before an empty list and after it (CF-03)."""

    a: tuple[int, ...] = ()
    b: list[int] = dataclasses.field(default_factory=list)
    c: list[str] = dataclasses.field(default_factory=list)
    d: tuple[str, ...] = ()
    pair: tuple[int, str] = (1, "x")
    name: str | None = None
    mode: Literal["on", "off"] = "on"
    flag: bool = False
    branch: Branch = dataclasses.field(default_factory=Branch)

    def check(self) -> None: ...
