"""The grammar of values: text, Python and JSON give back what they were given."""

import json
import typing
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from telescope_jax import config_tree
from telescope_jax.config import Config, ConfigError
from tests.toy_config import Toy


def values(hint: Any) -> st.SearchStrategy[Any]:
    """Anything of an annotated type."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return st.sampled_from(args)
    if origin is dict:
        return st.dictionaries(values(args[0]), values(args[1]), max_size=3)
    if origin is list:
        return st.lists(values(args[0]), max_size=3)
    if origin is tuple and args[-1] is Ellipsis:
        return st.lists(values(args[0]), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*map(values, args))
    if type(None) in args:
        inner = [arg for arg in args if arg is not type(None)][0]
        # "None" as text is None: the one text that an optional text field cannot hold.
        return st.none() | values(inner).filter(lambda v: str(v).lower() != "none")
    if hint is float:
        return st.floats(allow_nan=False, allow_infinity=False)
    if hint is Any:  # an environment's option
        return st.integers(-9, 9) | st.booleans() | st.text(st.characters(codec="ascii"))
    return {
        int: st.integers(-(10**29), 10**29),
        bool: st.booleans(),
        str: st.text(st.characters(exclude_categories=("Cs",))),
    }[hint]


@st.composite
def trees(draw: st.DrawFn, cls: type) -> Any:
    tree = cls()
    for path, leaf in config_tree.leaves(cls).items():
        config_tree.set_value(tree, path, draw(values(leaf.hint)))
    return tree


LEAVES = [*config_tree.leaves(Toy).values(), *config_tree.leaves(Config).values()]


@given(st.sampled_from(LEAVES).flatmap(lambda leaf: st.tuples(st.just(leaf), values(leaf.hint))))
def test_text_gives_back_every_value_with_its_type(drawn: tuple[config_tree.Field, Any]):
    leaf, value = drawn
    back = config_tree.parse_value(config_tree.format_value(value, leaf.hint), leaf.hint)
    assert back == value and type(back) is type(value)


@given(trees(Toy))
def test_json_gives_back_an_equal_tree(tree: Toy):
    """CF-03, CF-04: containers keep their types and integer keys stay integers."""
    assert config_tree.from_json(config_tree.to_json(tree), Toy) == tree
    assert config_tree.check_tree(tree, Toy) == []


@pytest.mark.parametrize("cls", [Config, Toy])
def test_the_defaults_survive_text_and_json(cls: type):
    tree = cls()
    assert config_tree.check_tree(tree, cls) == []
    assert config_tree.from_json(config_tree.to_json(tree), cls) == cls()


def test_infinity_survives_strict_json():
    config = Config(tis_cap=float("inf"))
    text = config_tree.to_json(config)

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    json.loads(text, parse_constant=refuse)
    assert config_tree.from_json(text, Config) == config


def test_a_field_that_an_older_run_lacks_keeps_its_default():
    assert config_tree.from_json('{"seed": 3, "loss": {"kl_coef": 1}}', Config).seed == 3
    assert config_tree.from_json('{"loss": {"kl_coef": 1}}', Config).loss.kl_coef == 1.0


def test_wrong_json_is_refused_in_one_message():
    with pytest.raises(ConfigError) as caught:
        config_tree.from_json('{"sede": 1, "group_size": 1.5, "loss": {"kl": 0}}', Config)
    message = str(caught.value)
    assert "sede: no such field; did you mean seed" in message
    assert "group_size is 1.5" in message and "loss.kl" in message
    for text in ("{", "[]", '{"loss": 3}'):
        with pytest.raises(ConfigError):
            config_tree.from_json(text, Config)


@pytest.mark.parametrize(
    ("text", "hint", "value"),
    [
        ("1000", int, 1000),
        ("1e3", int, 1000),
        ("1_000", int, 1000),
        ("-1", int, -1),
        ("1000.0", int, 1000),
        ("1", float, 1.0),
        ("1e-6", float, 1e-6),
        ("inf", float, float("inf")),
        ("yes", bool, True),
        ("FALSE", bool, False),
        ("0", bool, False),
        ("None", int | None, None),
        ("3", int | None, 3),
        ("(1, 2)", tuple[int, ...], (1, 2)),
        ("{0: 'a'}", dict[int, str], {0: "a"}),
        ("", str, ""),
        ("0.7", str, "0.7"),
    ],
)
def test_text_becomes_the_annotated_type(text: str, hint: Any, value: Any):
    """CF-06: a whole number in any notation is an int; `learning_rate=1` is 1.0."""
    parsed = config_tree.parse_value(text, hint)
    assert parsed == value and type(parsed) is type(value)


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("1.5", int),
        ("1e-3", int),
        ("1e999999999", int),
        ("nan", int),
        ("inf", int),
        ("True", int),
        ("", int),
        ("nan", float),
        ('"0.7"', float),
        ("maybe", bool),
        ("2", bool),
        ("grop", Literal["grpo", "rloo"]),
        ("[1]", tuple[int, ...]),
        ("(1, 'a')", tuple[int, ...]),
        ("(1,)", tuple[int, str]),
        ("{'a': 'b'}", dict[int, str]),
        ("__import__('os')", list[int]),
    ],
)
def test_text_of_another_type_is_refused(text: str, hint: Any):
    """CF-06, CF-08."""
    with pytest.raises(ValueError, match="is "):
        config_tree.parse_value(text, hint)


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("learing_rate", "optimizer.learning_rate"),
        ("max_asinc", "max_async_rollout"),
        ("max_async_rollouts", "max_async_rollout"),
        ("loss.kl_coeff", "loss.kl_coef"),
        ("temprature", "sampling.temperature"),
        ("optimiser.learning_rate", "optimizer.learning_rate"),
    ],
)
def test_the_nearest_name_comes_first(wrong: str, right: str):
    assert config_tree.nearest(wrong, config_tree.leaves(Config))[0] == right


def test_a_name_like_nothing_gets_no_guess():
    assert config_tree.nearest("zzzzqqq", config_tree.leaves(Config)) == []
