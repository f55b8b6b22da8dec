"""What a compiled program does, counted in its text: products, bytes, collectives; loops in full.

The compiler's own `cost_analysis` counts the body of a loop once, whatever its length, and a
collective that runs in the background is written once for every operation that it runs beside.
Here each is counted as often as it runs. A loop whose length the text does not say counts as one
turn; `Counts.open_loops` says how many there are.

Written for XLA's text of optimized programs, of CPUs and TPUs. A custom kernel's operations are in
its body, which is no HLO, and are not counted; the arrays that it reads and writes are.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence

_ITEMSIZE = {
    "f64": 8, "s64": 8, "u64": 8, "f32": 4, "s32": 4, "u32": 4, "bf16": 2, "f16": 2, "s16": 2,
    "u16": 2, "pred": 1, "s8": 1, "u8": 1,
}  # fmt: skip
_HEADER = re.compile(r"(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(
    r"\s+(?P<root>ROOT )?%?(?P<name>[\w.\-]+) = (?P<type>.*?) (?P<code>[a-z][\w\-]*)\("
)
_SHAPE = re.compile(r"(\w+)\[([\d,]*)\](\{[^}]*\})?")
_CALLED = re.compile(r"\b(?:calls|body|to_apply)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
_KNOWN_TRIPS = re.compile(r'"?known_trip_count"?:?=?\{"?n"?:"?(\d+)')
_COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
)
_FREE = {
    "parameter", "get-tuple-element", "tuple", "bitcast", "constant", "while", "conditional",
    "call", "after-all", "partition-id", "replica-id", "optimization-barrier",
}  # fmt: skip
_BACKGROUND = ("AsyncCollectiveDone", "async_collective_fusion")
"""What tells the later steps of a collective that runs beside other operations."""


@dataclasses.dataclass(frozen=True, slots=True)
class Counts:
    """Of one run of a program on one device.

    Attributes:
      flops: 2 for each multiplication and addition of a matrix product.
      accessed: bytes read from and written to memory by operations, as they are fused.
      collectives: kind -> (how many, bytes of their results).
      open_loops: loops that were counted as one turn, since their length is not in the text.
    """

    flops: float
    accessed: float
    collectives: Mapping[str, tuple[int, float]]
    open_loops: int


def count(text: str) -> Counts:
    """Counts what the program of `text` does; see the module."""
    program = _Program(text)
    flops = accessed = 0.0
    collectives: dict[str, tuple[int, float]] = {}
    for name, lines in program.computations.items():
        runs = program.runs.get(name, 0)
        if not runs:
            continue
        in_background = program.is_background(name)
        for line in lines.values():
            flops += runs * program.flops(line, lines)
            if name not in program.fused:
                accessed += runs * program.accessed(line, lines)
            kind = line.code.removesuffix("-start")
            if kind in _COLLECTIVES and not in_background:
                number, size = collectives.get(kind, (0, 0.0))
                collectives[kind] = (number + runs, size + runs * _arrived(line))
    return Counts(flops, accessed, collectives, program.open_loops)


@dataclasses.dataclass(frozen=True, slots=True)
class _Line:
    """One instruction: `%name = type code(operands), rest`."""

    name: str
    type: str
    code: str
    operands: tuple[str, ...]
    argument: str
    rest: str
    root: bool


class _Program:
    def __init__(self, text: str):
        self.computations: dict[str, dict[str, _Line]] = {}
        self.fused: set[str] = set()
        self.open_loops = 0
        entry = self._read(text)
        self.runs: dict[str, int] = {entry: 1}
        # Whoever is called stands before whoever calls: in reverse, callers are complete first.
        for name in reversed(self.computations):
            for line in self.computations[name].values():
                self._call(line, self.runs.get(name, 0))

    def _read(self, text: str) -> str:
        entry, lines = "", None
        for row in text.splitlines():
            if lines is None:
                if header := _HEADER.match(row):
                    lines = self.computations.setdefault(header["name"], {})
                    entry = header["name"] if header["entry"] else entry
            elif row == "}" or row.startswith("}, execution_thread="):  # a kernel's body has "}}"
                lines = None
            elif found := _INSTRUCTION.match(row):
                argument, rest = _split(row[found.end() :])
                operands = tuple(re.findall(r"%([\w.\-]+)", argument))
                lines[found["name"]] = _Line(
                    found["name"], found["type"], found["code"], operands, argument, rest,
                    bool(found["root"]),
                )  # fmt: skip
        if not entry:
            raise ValueError("no line of the text begins with ENTRY: it is no program of XLA's")
        return entry

    def _call(self, line: _Line, runs: int) -> None:
        called = _CALLED.findall(line.rest)
        if branches := _BRANCHES.search(line.rest):
            called += re.findall(r"[\w.\-]+", branches[1])  # every branch: an upper bound
        if line.code == "fusion":
            self.fused.update(called)
        elif line.code not in ("while", "call", "conditional", "async-start"):
            return  # a reduction's scalar function
        if line.code == "while" and runs:
            runs *= self._trips(line)
        for name in called:
            self.runs[name] = self.runs.get(name, 0) + runs

    def _trips(self, line: _Line) -> int:
        """Turns of a loop; the ones that jax makes of a scan count up from 0."""
        if known := _KNOWN_TRIPS.search(line.rest):
            return int(known[1])
        condition = re.search(r"\bcondition=%?([\w.\-]+)", line.rest)
        lines = self.computations.get(condition[1], {}) if condition else {}
        for test in lines.values():
            if test.root and test.code == "compare" and "direction=LT" in test.rest:
                limit = lines.get(test.operands[-1])
                if limit is not None and limit.code == "constant" and limit.argument.isdigit():
                    return int(limit.argument)
        self.open_loops += 1
        return 1

    @functools.cache  # noqa: B019  (a program lives as long as one count)
    def is_background(self, name: str) -> bool:
        lines = self.computations[name].values()
        return name in self.fused and (
            name.startswith(_BACKGROUND[1]) or any(_BACKGROUND[0] in line.rest for line in lines)
        )

    def flops(self, line: _Line, lines: Mapping[str, _Line]) -> float:
        if line.code not in ("dot", "convolution"):
            return 0.0
        out, right = _dims(line.type), _dims(lines[line.operands[1]].type)
        if line.code == "dot":
            contracted = re.search(r"rhs_contracting_dims=\{([\d,]*)\}", line.rest)
            axes = [int(axis) for axis in contracted[1].split(",") if axis] if contracted else []
            return 2.0 * math.prod(out) * math.prod(right[axis] for axis in axes)
        return _convolution_flops(line.rest, _dims(lines[line.operands[0]].type), right, out)

    def accessed(self, line: _Line, lines: Mapping[str, _Line]) -> float:
        if line.code in _FREE or line.code.endswith("-done"):
            return 0.0
        if line.code == "fusion":
            return self._accessed_by_fusion(line, lines)
        sizes = [_bytes(lines[name].type) for name in line.operands if name in lines]
        if line.code in ("dynamic-slice", "gather"):
            return 2.0 * _bytes(line.type)
        if line.code == "dynamic-update-slice":
            return 2.0 * sizes[1]
        return sum(sizes) + _bytes(_results(line))

    def _accessed_by_fusion(self, line: _Line, lines: Mapping[str, _Line]) -> float:
        called = _CALLED.search(line.rest)
        if called is None:
            return 0.0
        name = called[1]
        total = 0.0
        for index, operand in enumerate(line.operands):
            total += min(self._read_of(name, index), _bytes(lines[operand].type))
        return total + self._written_by(name)

    @functools.cache  # noqa: B019
    def _read_of(self, name: str, index: int) -> float:
        """Bytes that a fused computation reads of its parameter: of a stack, a slice."""
        lines, background = self.computations[name], self.is_background(name)
        total = 0.0
        for parameter in lines.values():
            if parameter.code != "parameter" or parameter.argument != str(index):
                continue
            for use in lines.values():
                if parameter.name not in use.operands or (use.root and use.code == "tuple"):
                    continue
                place = use.operands.index(parameter.name)
                called = _CALLED.search(use.rest)
                if use.code in ("dynamic-slice", "gather"):
                    total += _bytes(use.type) if place == 0 else 0.0
                elif use.code == "dynamic-update-slice" and place == 0:
                    continue  # in place
                elif use.code == "fusion" and called:
                    total += self._read_of(called[1], place)
                elif background and (use.code in _COLLECTIVES or use.code == "custom-call"):
                    continue  # counted where the collective starts
                else:
                    total += _bytes(parameter.type)
        return total

    def _written_by(self, name: str) -> float:
        lines = self.computations[name]
        root = next(line for line in lines.values() if line.root)
        parts = [lines[part] for part in root.operands] if root.code == "tuple" else [root]
        background, total = self.is_background(name), 0.0
        for part in parts:
            while part.code == "bitcast" and part.operands[0] in lines:
                part = lines[part.operands[0]]
            if part.code == "dynamic-update-slice":
                total += _bytes(lines[part.operands[1]].type)
            elif part.code != "parameter" and not (background and part.code == "all-gather"):
                total += _bytes(part.type)
        return total


def _split(text: str) -> tuple[str, str]:
    """The arguments of an instruction, up to the parenthesis that closes them, and the rest."""
    depth = 1
    for place, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return text[:place], text[place + 1 :]
    return text, ""


def _size(kind: str, dims: str, layout: str = "") -> float:
    """Bytes of one array in memory; none of one in a TPU's own VMEM or scalar memory."""
    if re.search(r"S\([1-9]", layout):
        return 0.0
    return float(_ITEMSIZE.get(kind, 4) * math.prod(int(n) for n in dims.split(",") if n))


def _bytes(type_: str) -> float:
    return sum(_size(*shape) for shape in _SHAPE.findall(type_))


def _dims(type_: str) -> list[int]:
    found = _SHAPE.search(type_)
    return [int(n) for n in found[2].split(",") if n] if found else []


def _arrived(line: _Line) -> float:
    """Bytes of a collective's results, wherever they lie."""
    return sum(_size(kind, dims) for kind, dims, _ in _SHAPE.findall(_results(line)))


def _results(line: _Line) -> str:
    """The type without what a started operation names beside its results: `(operands, results,
    …)`, where each of the two may be a tuple. An all-reduce's start has the results alone."""
    if not line.code.endswith("-start") or line.code == "all-reduce-start":
        return line.type
    depth, part, results = 0, 0, ""
    for letter in line.type[1:]:
        depth += (letter in "({[") - (letter in ")}]")
        part += letter == "," and depth == 0
        results += letter if part == 1 else ""
    return results or line.type


def _convolution_flops(
    rest: str, left: Sequence[int], right: Sequence[int], out: Sequence[int]
) -> float:
    """XLA writes a TPU's matrix products as convolutions, batch axes as windows."""
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", rest)
    if labels is None:
        return 0.0
    lhs, rhs, result = labels.groups()
    window = re.search(r"window=\{([^}]*)\}", rest)
    settings = dict(part.split("=") for part in window[1].split()) if window else {}
    total = 2.0 * out[result.index("b")] * out[result.index("f")] * right[rhs.index("i")]
    for axis in range(sum(letter.isdigit() for letter in rhs)):
        positions = _Axis.of(settings, axis)
        total *= positions.inside(left[lhs.index(str(axis))], out[result.index(str(axis))])
    return total


@dataclasses.dataclass(frozen=True, slots=True)
class _Axis:
    """One axis of a convolution's window."""

    size: int
    stride: int
    padding: int
    left_dilation: int
    right_dilation: int

    @classmethod
    def of(cls, settings: Mapping[str, str], axis: int) -> "_Axis":
        def value(name: str, default: str) -> int:
            text = settings.get(name)
            return int((text.split("x")[axis] if text else default).partition("_")[0])

        return cls(
            value("size", "1"), value("stride", "1"), value("pad", "0_0"),
            value("lhs_dilate", "1"), value("rhs_dilate", "1"),
        )  # fmt: skip

    def inside(self, length: int, outputs: int) -> int:
        """Pairs of an output and a place in the window that meet a number, and not padding."""
        return sum(
            0 <= at < (length - 1) * self.left_dilation + 1 and at % self.left_dilation == 0
            for at in self._places(outputs)
        )

    def _places(self, outputs: int) -> Iterator[int]:
        for output in range(outputs):
            for place in range(self.size):
                yield output * self.stride - self.padding + place * self.right_dilation
