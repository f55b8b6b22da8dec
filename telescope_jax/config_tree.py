"""A configuration as a tree of typed fields: text to value and back, by the annotations alone.

One grammar serves the command line, `--print_config` and a run's config.json:
`parse_value(format_value(v, t), t) == v` and `from_json(to_json(c), type(c)) == c`.
Imports no jax, so that a wrong flag is refused before a device is touched.
"""

import ast
import dataclasses
import difflib
import functools
import inspect
import json
import math
import shlex
import sys
import types
import typing
from collections.abc import Iterable, Iterator
from decimal import Decimal, InvalidOperation
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from telescope_jax.config import ConfigError

T = TypeVar("T")

BOOL_WORDS = {
    **dict.fromkeys(("true", "t", "yes", "y", "on", "1"), True),
    **dict.fromkeys(("false", "f", "no", "n", "off", "0"), False),
}
LARGEST_INT_DIGITS = 30


@dataclasses.dataclass(frozen=True, slots=True)
class Field:
    """A leaf of the tree. `path` is dotted; `hint` is the resolved annotation."""

    path: str
    hint: Any
    default: Any
    owner: type


def leaves(cls: type) -> dict[str, Field]:
    """Every leaf below the dataclass `cls`, in the order of the source, by dotted path."""
    return {field.path: field for field in _walk(cls, "")}


def _walk(cls: type, prefix: str) -> Iterator[Field]:
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        path, hint = prefix + field.name, hints[field.name]
        if dataclasses.is_dataclass(hint):
            yield from _walk(typing.cast(type, hint), path + ".")
        elif field.default_factory is not dataclasses.MISSING:
            yield Field(path, hint, field.default_factory(), cls)
        else:
            yield Field(path, hint, field.default, cls)


def get_value(config: Any, path: str) -> Any:
    """The value at a dotted path."""
    for name in path.split("."):
        config = getattr(config, name)
    return config


def set_value(config: Any, path: str, value: Any) -> None:
    """Assigns the leaf at a dotted path."""
    holder, _, name = path.rpartition(".")
    setattr(get_value(config, holder) if holder else config, name, value)


def nearest(name: str, names: Iterable[str], count: int = 3) -> list[str]:
    """The likeliest meanings of a wrong name, best first.

    Compares whole paths and last components, so that `learing_rate` finds
    `optimizer.learning_rate`.
    """
    leaf = name.rpartition(".")[2]

    def likeness(other: str) -> tuple[float, float]:
        whole = difflib.SequenceMatcher(None, name, other).ratio()
        last = difflib.SequenceMatcher(None, leaf, other.rpartition(".")[2]).ratio()
        return max(whole, last), whole

    scored = sorted(((*likeness(other), other) for other in names), reverse=True)
    # Runners-up only where they are about as good: a long list of guesses helps nobody.
    least = max(0.6, scored[0][0] - 0.1) if scored else 1.0
    return [other for score, _, other in scored[:count] if score >= least]


def suggestion(name: str, names: Iterable[str], prefix: str = "") -> str:
    """`; did you mean a or b?`, or nothing."""
    close = [prefix + other for other in nearest(name, names)]
    return f"; did you mean {' or '.join(close)}?" if close else ""


def type_name(hint: Any) -> str:
    """How a message or the help text calls a type."""
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(map(str, get_args(hint)))
    if _optional(hint) is not None:
        return f"{type_name(_optional(hint))}, or None"
    plain = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    return plain.get(hint) or str(hint)


def _optional(hint: Any) -> Any:
    """X of `X | None`, else None."""
    if get_origin(hint) in (Union, types.UnionType):
        inner = [arg for arg in get_args(hint) if arg is not types.NoneType]
        return inner[0] if len(inner) == 1 else None
    return None


def parse_value(text: str, hint: Any) -> Any:
    """The value that `text` stands for.

    A whole number may be written in any notation (`1000`, `1_000`, `1e3`, `1000.0`); `1.5` is
    none. A number may be `inf`, never nan. true/false, yes/no, on/off and 1/0 are one bool each.
    Tuples, lists and dicts are Python literals. `None` is for optional fields only.

    Raises:
      ValueError: says what is expected.
    """
    inner, origin = _optional(hint), get_origin(hint)
    if inner is not None:
        return None if text.lower() == "none" else parse_value(text, inner)
    if origin is Literal:
        for choice in get_args(hint):
            if str(choice) == text:
                return choice
        choices = list(map(str, get_args(hint)))
        raise ValueError(f"is not {type_name(hint)}{suggestion(text, choices)}")
    if hint is str:
        return text
    try:
        if hint is bool:
            return BOOL_WORDS[text.lower()]
        if hint is int:
            return _whole(text)
        return check_value(float(text) if hint is float else ast.literal_eval(text), hint)
    except (ValueError, KeyError, SyntaxError, InvalidOperation):
        raise ValueError(f"is not {type_name(hint)}") from None


def _whole(text: str) -> int:
    number = Decimal(text.strip())
    # Digits are counted before int(), which would build 1e999999999 in full.
    if not number.is_finite() or number.adjusted() >= LARGEST_INT_DIGITS:
        raise ValueError(text)
    if number != number.to_integral_value():
        raise ValueError(text)
    return int(number)


def format_value(value: Any, hint: Any) -> str:
    """The text that `parse_value` turns back into `value`."""
    inner = _optional(hint)
    if value is None:
        return "None"
    if (inner or hint) is str or get_origin(inner or hint) is Literal:
        return str(value)
    return repr(value)


def check_value(value: Any, hint: Any) -> Any:
    """`value` if its type is right; an int where a number is asked becomes a float.

    Raises:
      ValueError: says what is expected.
    """
    wrong = ValueError(f"is {value!r} ({type(value).__name__}), not {type_name(hint)}")
    inner, origin, args = _optional(hint), get_origin(hint), get_args(hint)
    if inner is not None:
        return None if value is None else check_value(value, inner)
    if origin is Literal:
        if any(value == arg and type(value) is type(arg) for arg in args):
            return value
        raise wrong
    if hint is float:
        if type(value) not in (int, float) or math.isnan(value):
            raise wrong
        return float(value)
    if origin is None:
        if hint is not Any and type(value) is not hint:
            raise wrong
        return value
    if type(value) is not origin:
        raise wrong
    return _rebuild(value, hint, check_value)


def _rebuild(value: Any, hint: Any, convert: Any) -> Any:
    """A tuple, list or dict whose elements went through `convert(element, its hint)`."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is dict:
        return {convert(k, args[0]): convert(v, args[1]) for k, v in value.items()}
    if origin is tuple and not (len(args) == 2 and args[1] is Ellipsis):
        if len(value) != len(args):
            raise ValueError(f"has {len(value)} elements, not {len(args)}")
        return tuple(convert(v, arg) for v, arg in zip(value, args, strict=True))
    if origin in (tuple, list):
        return origin(convert(v, args[0]) for v in value)
    raise ValueError(f"has a type the command line does not know: {hint}")


def check_tree(config: Any, cls: type, prefix: str = "") -> list[str]:
    """Puts every leaf of `config` to its annotated type; what cannot be is listed, one line each.

    A config file is Python and may assign anything.
    """
    problems: list[str] = []
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        path, hint, value = prefix + field.name, hints[field.name], getattr(config, field.name)
        if dataclasses.is_dataclass(hint):
            branch = typing.cast(type, hint)
            if isinstance(value, branch):
                problems += check_tree(value, branch, path + ".")
            else:
                problems.append(f"{path} is {value!r}, not a {branch.__name__}")
            continue
        try:
            setattr(config, field.name, check_value(value, hint))
        except ValueError as error:
            problems.append(f"{path} {error}")
    return problems


def overrides(config: Any) -> list[str]:
    """The whole tree as `--config.a.b=value`, one field an element, quoted for a shell."""
    return [
        shlex.quote(f"--config.{path}={format_value(get_value(config, path), field.hint)}")
        for path, field in leaves(type(config)).items()
    ]


def changes(config: Any) -> list[str]:
    """What differs from the defaults, as `a.b=value`."""
    return [
        f"{path}={format_value(value, field.hint)}"
        for path, field in leaves(type(config)).items()
        if (value := get_value(config, path)) != field.default
    ]


def to_json(config: Any) -> str:
    """The tree as strict JSON; an infinite number is the string "inf" or "-inf"."""
    return json.dumps(_plain(config), indent=2, allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, float) and math.isinf(value):
        return str(value)
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}  # JSON has no other keys
    if isinstance(value, tuple | list):
        return [_plain(v) for v in value]
    return value


def from_json(text: str, cls: type[T]) -> T:
    """The tree that `to_json` wrote. A field that the text lacks keeps its default.

    Raises:
      ConfigError: lists unknown names and wrong types, or says that it is no JSON object.
    """
    try:
        plain = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"not JSON: {error}") from None
    config, problems = cls(), []
    known = leaves(cls)
    for path, value in _leaf_items(plain, known):
        if path not in known:
            problems.append(f"{path}: no such field{suggestion(path, known)}")
            continue
        try:
            set_value(config, path, _from_plain(value, known[path].hint))
        except ValueError as error:
            problems.append(f"{path} {error}")
    if problems:
        raise ConfigError("\n".join(problems))
    return config


def _leaf_items(plain: Any, known: Iterable[str], prefix: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(plain, dict):
        raise ConfigError(f"{prefix.rstrip('.') or 'a configuration'} must be a JSON object")
    for name, value in plain.items():
        path = f"{prefix}{name}"
        if any(other.startswith(path + ".") for other in known):
            yield from _leaf_items(value, known, path + ".")
        else:
            yield path, value


def _from_plain(value: Any, hint: Any) -> Any:
    inner = _optional(hint)
    if inner is not None:
        return None if value is None else _from_plain(value, inner)
    if hint is float and value in ("inf", "-inf"):
        return float(value)
    if get_origin(hint) in (tuple, list) and isinstance(value, list):
        return _rebuild(value, hint, _from_plain)
    if get_origin(hint) is dict and isinstance(value, dict):
        key, item = get_args(hint)
        return {parse_value(k, key): _from_plain(v, item) for k, v in value.items()}
    return check_value(value, hint)


@functools.cache
def docstrings(cls: type) -> dict[str, str]:
    """Field name -> the string literal below it in the source of the dataclass `cls`.

    Python drops such strings when it compiles, so they are read from the file.
    """
    module = ast.parse(inspect.getsource(sys.modules[cls.__module__]))
    (body,) = [
        node.body
        for node in ast.walk(module)
        if isinstance(node, ast.ClassDef) and node.name == cls.__name__
    ]
    docs = {}
    for statement, after in zip(body, body[1:], strict=False):
        if (
            isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and isinstance(after, ast.Expr)
            and isinstance(after.value, ast.Constant)
            and isinstance(after.value.value, str)
        ):
            docs[statement.target.id] = inspect.cleandoc(after.value.value)
    return docs
