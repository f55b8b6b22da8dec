"""The command line: argv in, a checked Config out, or every problem in one message.

    --config=experiments/math.py[:variant] --config.a.b=value --config.a.b value --workdir=…

argv is held against the tree before ml_collections sees it, because that library stops at the first
unknown key. What passes then goes through its `config_flags`, so the syntax is the one that
launchers expect. Imports no jax: a wrong flag costs a tenth of a second and touches no device.
"""

import ast
import dataclasses
import re
import shlex
import sys
import textwrap
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn

from absl import flags as absl_flags
from ml_collections import config_flags

from telescope_jax import config_tree
from telescope_jax.config import Config, ConfigError

EXAMPLE = "--config=experiments/math.py"


@dataclasses.dataclass(frozen=True, slots=True)
class Flag:
    """A flag beside the tree; its type is that of its default: text, number or bool."""

    default: str | int | float | bool
    help: str


COMMON = {
    "workdir": Flag("", "Folder of the run; one that holds a run is resumed."),
    "print_config": Flag(False, "Print the resolved tree, as flags, and exit."),
}
"""Flags that every command has."""


@dataclasses.dataclass(frozen=True, slots=True)
class Arguments:
    """A command line that was found right.

    Attributes:
      config: the tree, overrides applied, `check()` passed.
      config_file: as given, with its `:variant`.
      workdir: "" when not given.
      extra: the values of the caller's own flags.
    """

    config: Config
    config_file: str
    workdir: str
    extra: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class _Given:
    """One flag as typed: `--name=text`, or `--name text`, or `--name` alone (None)."""

    name: str
    text: str | None

    def __str__(self) -> str:
        return f"--{self.name}" + ("" if self.text is None else f"={self.text}")


def parse(argv: Sequence[str], extra: Mapping[str, Flag] | None = None) -> Arguments:
    """The arguments of a command, `argv[0]` being its name.

    Ends the process for `--help` and `--print_config` (exit code 0, on stdout) and for a command
    line that is wrong (exit code 2, all problems on stderr, no traceback).

    Args:
      extra: the command's own flags, beside `--config` and `--workdir`.
    """
    if any(arg in ("--help", "-h", "-help", "--helpfull", "--helpshort") for arg in argv[1:]):
        print(help_text(extra))
        raise SystemExit(0)
    try:
        arguments, print_config = read(argv, extra)
    except ConfigError as error:
        refuse(str(error))
    if print_config:
        print(shlex.quote(f"--config={arguments.config_file}"))
        print("\n".join(config_tree.overrides(arguments.config)))
        raise SystemExit(0)
    return arguments


def refuse(problems: str) -> NoReturn:
    """Prints problems, one a line, and ends the process with exit code 2."""
    count = len(problems.splitlines())
    head = f"telescope_jax: {count} problem{'s' if count > 1 else ''} before any work:"
    print(f"{head}\n{textwrap.indent(problems, '  ')}", file=sys.stderr)
    raise SystemExit(2)


def read(
    argv: Sequence[str], extra: Mapping[str, Flag] | None = None, root: type = Config
) -> tuple[Arguments, bool]:
    """`parse` without its exits: the arguments, and whether to print the tree.

    Raises:
      ConfigError: every problem of the command line, the config file and `Config.check()`.
    """
    own = {**COMMON, **(extra or {})}
    fields = config_tree.leaves(root)
    types = {"config": str}
    types |= {name: type(flag.default) for name, flag in own.items()}
    types |= {f"config.{path}": field.hint for path, field in fields.items()}

    given, problems = _split(argv[1:], types)
    values: dict[str, Any] = {}
    first: dict[str, _Given] = {}
    for flag in given:
        if flag.name in first:
            problems.append(f"{flag} was already given as {first[flag.name]}; keep one of them")
            continue
        first[flag.name] = flag
        try:
            values[flag.name] = _value(flag, types)
        except ValueError as error:
            problems.append(f"{flag} {error}")

    overrides = {
        name.removeprefix("config."): value
        for name, value in values.items()
        if name.startswith("config.")
    }
    config = None
    if "config" in values:
        try:
            config = _load(values["config"], overrides, fields, root)
        except ConfigError as error:
            problems += str(error).splitlines()
    elif "config" not in first:
        problems.append(f"--config is missing; for example {EXAMPLE}")
    if config is not None:
        wrong_types = config_tree.check_tree(config, root)
        problems += [f"{values['config']}: {line}" for line in wrong_types]
        # Rules compare numbers; on a tree that holds something else they could only crash.
        if not wrong_types:
            try:
                config.check()
            except ConfigError as error:
                problems += str(error).splitlines()
    if problems or config is None:
        raise ConfigError("\n".join(problems))
    rest = {name: values.get(name, flag.default) for name, flag in own.items()}
    print_config, workdir = rest.pop("print_config"), rest.pop("workdir")
    return Arguments(config, values["config"], workdir, rest), print_config


def _split(argv: Sequence[str], types: Mapping[str, Any]) -> tuple[list[_Given], list[str]]:
    """argv as flags; `types` tells which flag is a bool, which need not be given a value."""
    given: list[_Given] = []
    problems: list[str] = []
    rest = list(argv)
    while rest:
        arg = rest.pop(0)
        if not re.match(r"--?[A-Za-z_]", arg):
            meant = f"--{arg}" if "=" in arg else f"--config={arg}" if ".py" in arg else ""
            problems.append(
                f"{arg!r} is not a flag" + (f"; did you mean {meant}?" if meant else "")
            )
            continue
        name, equals, text = arg.lstrip("-").partition("=")
        positive = name.removeprefix("no")
        if equals:
            given.append(_Given(name, text))
        elif name not in types and types.get(positive) is bool:
            given.append(_Given(positive, "false"))
        elif types.get(name) is bool:
            takes_next = rest and rest[0].lower() in config_tree.BOOL_WORDS
            given.append(_Given(name, rest.pop(0) if takes_next else "true"))
        else:
            # `-1` is a value; `--config.seed` and `-v` are the next flag.
            takes_next = rest and not re.match(r"--?[A-Za-z_]", rest[0])
            given.append(_Given(name, rest.pop(0) if takes_next else None))
    return given, problems


def _value(flag: _Given, types: Mapping[str, Any]) -> Any:
    """The typed value of one flag; ValueError says what is wrong with it."""
    if flag.name in types:
        if flag.text is None:
            raise ValueError(f"needs a value: {config_tree.type_name(types[flag.name])}")
        return config_tree.parse_value(flag.text, types[flag.name])
    below = [f"--{name}" for name in types if name.startswith(flag.name + ".")]
    if below:
        raise ValueError(f"is a group of fields, set one of them: {', '.join(below)}")
    parent = flag.name.rpartition(".")[0]
    if parent != "config" and parent in types:
        raise ValueError(f"is no field: --{parent} is {config_tree.type_name(types[parent])}")
    raise ValueError(f"is unknown{config_tree.suggestion(flag.name, types, prefix='--')}")


def _load(
    file: str, overrides: Mapping[str, Any], fields: Mapping[str, config_tree.Field], root: type
) -> Any:
    """The tree that the config file returns, with the overrides, by ml_collections."""
    path = Path(file.partition(":")[0])
    try:
        path.read_bytes()
    except OSError as error:
        raise ConfigError(f"--config={file}: {error.strerror}: {path}{_siblings(path)}") from None
    argv = ["", f"--config={file}"]
    # ml_collections knows no None on a command line, so these are assigned after it.
    nones = [path for path, value in overrides.items() if value is None]
    for name, value in overrides.items():
        if value is not None:
            argv.append(f"--config.{name}={config_tree.format_value(value, fields[name].hint)}")
    for origin, parser in _PARSERS.items():
        config_flags.register_flag_parser_for_type(origin, parser)
    # ml_collections executes a file in the module of the file before it, names and all.
    sys.modules.pop("config_config", None)
    flag_values = absl_flags.FlagValues()
    config_flags.DEFINE_config_file("config", flag_values=flag_values, sys_argv=argv)
    try:
        flag_values(argv)
        config = flag_values.config
    except Exception as error:
        raise ConfigError(f"--config={file}: {_explain(error, path, root)}") from None
    if type(config).__name__ == "_ErrorConfig":  # an OSError inside the file, kept for later
        raise ConfigError(f"--config={file}: {_explain(config._error, path, root)}")
    if not isinstance(config, root):
        kind = f"{type(config).__module__}.{type(config).__qualname__}"
        raise ConfigError(
            f"--config={file}: get_config returned a {kind}, not a {root.__name__}"
            + ("; does it end in `return config`?" if config is None else "")
        )
    for name in nones:
        config_tree.set_value(config, name, None)
    return config


class _Literals(absl_flags.ArgumentParser):
    """Python literals; the value was checked before."""

    def parse(self, argument: Any) -> Any:
        return ast.literal_eval(argument) if isinstance(argument, str) else argument


_PARSERS: dict[Any, absl_flags.ArgumentParser] = {
    Literal: absl_flags.ArgumentParser(),  # ml_collections 1.1 raises TypeError on such a field
    list: _Literals(),
    dict: _Literals(),
}


def _siblings(path: Path) -> str:
    """The studies whose name is like this one's, here or in experiments/."""
    found = [p for folder in (path.parent, Path("experiments")) for p in folder.glob("*.py")]
    near = config_tree.nearest(path.stem, {p.stem for p in found})
    names = dict.fromkeys(p.as_posix() for stem in near for p in found if p.stem == stem)
    return f"; did you mean {' or '.join(names)}?" if names else ""


def _explain(error: BaseException, path: Path, root: type) -> str:
    """One line on what a config file raised, with its line number and the nearest field."""
    # ml_collections and absl wrap what the file raised, and quote its whole traceback.
    chain = [error]
    while chain[-1].__context__ is not None:
        chain.append(chain[-1].__context__)
    error = next((link for link in chain if _frames(link, path)), chain[-1])
    if isinstance(error, SyntaxError):
        return f"line {error.lineno}: SyntaxError: {error.msg}"
    frames = _frames(error, path)
    where = f"line {frames[-1].lineno}: " if frames else ""
    text = f"{where}{type(error).__name__}: {error}".replace("\n", " ")
    missing = re.search(r"object has no attribute '(\w+)'", str(error))
    if isinstance(error, AttributeError) and missing:
        text += config_tree.suggestion(missing[1], config_tree.leaves(root))
    return text


def _frames(error: BaseException, path: Path) -> list[traceback.FrameSummary]:
    frames = traceback.extract_tb(error.__traceback__)
    return [f for f in frames if Path(f.filename).resolve() == path.resolve()]


def help_text(extra: Mapping[str, Flag] | None = None, root: type = Config) -> str:
    """Every flag: type, default and docstring."""
    lines = ["Flags:", f"  --config=FILE[:VARIANT]  A study; for example {EXAMPLE}."]
    own = {**COMMON, **(extra or {})}
    lines += [f"  --{name}  {flag.help} [{flag.default}]" for name, flag in own.items()]
    lines += ["", "Fields, set by --config.NAME=VALUE (defaults; a study may set others):"]
    docs: dict[type, dict[str, str]] = {}
    section = ""
    for path, field in config_tree.leaves(root).items():
        group, _, name = path.rpartition(".")
        if group != section:
            lines, section = [*lines, ""], group
        if field.owner not in docs:
            docs[field.owner] = config_tree.docstrings(field.owner)
        doc = docs[field.owner].get(name, "")
        shown = config_tree.format_value(field.default, field.hint) or '""'
        lines.append(f"  --config.{path}={shown}")
        about = f"{doc} ({config_tree.type_name(field.hint)})"
        lines += textwrap.wrap(about, 92, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines)
