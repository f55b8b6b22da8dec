"""The points of a sweep: read from its file, checked before any work, and found again on disk.

    OUT/points/NAME.json   overrides and whole configuration of a point
    OUT/runs/NAME/         its run, resumed if it is there
    OUT/logs/NAME.log      what it printed

A point *is* its whole configuration: one that is listed twice, or under another name than before,
or that leaves a field at the value another one sets, is the same point and runs once.
"""

import dataclasses
import importlib.util
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from telescope_jax import config_tree, flags
from telescope_jax.config import Config, ConfigError

LONGEST_NAME = 120


class SweepError(ValueError):
    """The sweep cannot run as it is written; the message lists everything that is wrong."""


@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    """One run of a sweep.

    Attributes:
      name: its overrides, short; a file name.
      overrides: field -> value, as the sweep's file gives them.
      config_file: the study that they override, with its variant.
      config: the result.
      folder: of the sweep.
    """

    name: str
    overrides: Mapping[str, Any]
    config_file: str
    config: Config
    folder: Path

    @property
    def workdir(self) -> Path:
        return self.folder / "runs" / self.name

    @property
    def log_file(self) -> Path:
        return self.folder / "logs" / f"{self.name}.log"

    @property
    def metrics_file(self) -> Path:
        return self.workdir / "metrics" / "metrics.jsonl"

    def arguments(self) -> list[str]:
        """What follows `python -m telescope_jax.main`."""
        return [
            f"--config={self.config_file}",
            *_flags(self.overrides),
            f"--workdir={self.workdir}",
        ]

    def state(self) -> str:
        """`new`, `running`, `finished` or `stopped`, by the run's own notes."""
        try:
            return json.loads((self.workdir / "run.json").read_text())["state"]
        except (OSError, ValueError, KeyError, TypeError):
            return "new"


def load(
    sweep: str, folder: Path, *, config_file: str = "", common: Sequence[str] = ()
) -> list[Point]:
    """The points of a sweep's file, each once, in its order.

    Args:
      sweep: path of a file with `get_sweep()` and `CONFIG`, the study that it overrides; what
        follows a colon goes to `get_sweep`.
      folder: where the sweep's files are.
      config_file: instead of the file's `CONFIG`.
      common: further flags of every point, as `--config.a=b`.

    Raises:
      SweepError: everything that is wrong with the file or any point.
    """
    path, _, variant = sweep.partition(":")
    module = _module(Path(path))
    config_file = config_file or getattr(module, "CONFIG", "")
    if not config_file:
        raise SweepError(f"{path} sets no CONFIG; set it to a study, or give --config=STUDY.py")
    if not callable(getattr(module, "get_sweep", None)):
        raise SweepError(f"{path} has no get_sweep(); return a list of overrides from it")
    try:
        listed = module.get_sweep(variant) if variant else module.get_sweep()
    except Exception as error:  # a sweep's file is user code
        raise SweepError(f"{path}: get_sweep: {type(error).__name__}: {error}") from error
    shape_is_right = isinstance(listed, list) and all(
        isinstance(one, Mapping) and all(isinstance(field, str) for field in one) for one in listed
    )
    if not shape_is_right or not listed:
        raise SweepError(f"{path}: get_sweep must return a list of dicts, and at least one")
    return _points(listed, folder, config_file, common)


def _points(
    listed: list[Mapping[str, Any]], folder: Path, config_file: str, common: Sequence[str]
) -> list[Point]:
    known = _known(folder)
    points: list[Point] = []
    problems: dict[str, None] = {}  # in order, each once
    for overrides in listed:
        try:
            argv = ["", f"--config={config_file}", *common, *_flags(overrides)]
            config = flags.read(argv)[0].config
        except ConfigError as error:
            problems |= dict.fromkeys(f"{_label(overrides)}: {e}" for e in str(error).splitlines())
            continue
        if any(point.config == config for point in points):
            continue
        taken = {*known, *(point.name for point in points)}
        name = next((name for name, before in known.items() if before == config), None)
        everything = _with_common(overrides, common)
        points.append(
            Point(name or _free(_label(overrides), taken), everything, config_file, config, folder)
        )
    if problems:
        raise SweepError("\n".join(problems))
    return points


def remember(point: Point) -> None:
    """Writes what the point is, so that a later sweep knows it again."""
    path = point.folder / "points" / f"{point.name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    text = config_tree.to_json(point.config)
    shown = {field: str(value) for field, value in point.overrides.items()}
    document = {"overrides": shown, "config_file": point.config_file, "config": json.loads(text)}
    new = path.with_name(f".{path.name}.new")
    new.write_text(json.dumps(document, indent=2) + "\n")
    new.replace(path)


def _known(folder: Path) -> dict[str, Config]:
    """Names and configurations of the points that were run before."""
    known = {}
    for path in sorted((folder / "points").glob("*.json")):
        try:
            document = json.loads(path.read_text())
            # A field that is newer than the file has its default, as it had then.
            known[path.stem] = config_tree.from_json(json.dumps(document["config"]), Config)
        except (OSError, ValueError, KeyError) as error:
            raise SweepError(f"{path} cannot be read: {error}; repair it, or remove it") from error
    return known


def _module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"sweep_{path.stem}", path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise SweepError(f"--sweep={path}: there is no such Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # a sweep's file is user code
        raise SweepError(f"{path}: {type(error).__name__}: {error}") from error
    return module


def _flags(overrides: Mapping[str, Any]) -> list[str]:
    fields = config_tree.leaves(Config)

    def text(field: str, value: Any) -> str:
        known = fields.get(field)
        return config_tree.format_value(value, known.hint) if known else str(value)

    return [f"--config.{field}={text(field, value)}" for field, value in overrides.items()]


def _with_common(overrides: Mapping[str, Any], common: Sequence[str]) -> dict[str, Any]:
    fields = config_tree.leaves(Config)
    shared = {}
    for flag in common:
        field, _, text = flag.removeprefix("--config.").partition("=")
        shared[field] = config_tree.parse_value(text, fields[field].hint)
    return {**shared, **overrides}


def _label(overrides: Mapping[str, Any]) -> str:
    """`max_async_rollout=2,seed=1`: last components where they tell fields apart."""
    last = [field.rpartition(".")[2] for field in overrides]
    names = last if len(set(last)) == len(last) else list(overrides)
    label = ",".join(
        f"{name}={value}" for name, value in zip(names, overrides.values(), strict=True)
    )
    return re.sub(r"[^A-Za-z0-9=.,_+-]+", "-", label).strip("-.") or "base"


def _free(label: str, taken: set[str]) -> str:
    label = label[:LONGEST_NAME]
    numbered = (f"{label}~{number}" for number in range(2, len(taken) + 3))
    return next(name for name in (label, *numbered) if name not in taken)
