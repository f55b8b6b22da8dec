"""Environments by the name that a configuration gives.

    sums                          envs/arithmetic.py
    gsm8k                         envs/gsm8k.py
    reasoning_gym:<dataset>       envs/reasoning_gym.py
    <package.module>:<Class>      any importable class, called as the ones here are

Every environment is built as `Class(tokenizer, seed, rewards, **options)`.
"""

import difflib
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Mapping
from typing import Any

from telescope_jax.chat import Tokenizer
from telescope_jax.config_tree import suggestion
from telescope_jax.interfaces import Environment
from telescope_jax.scoring.reward_pool import RewardPool

# Places rather than classes: reasoning-gym takes a second to import.
ENVIRONMENTS = {
    "sums": "telescope_jax.envs.arithmetic:Sums",
    "gsm8k": "telescope_jax.envs.gsm8k:Gsm8k",
}

_GYM = "reasoning_gym"


def make_env(
    name: str,
    *,
    tokenizer: Tokenizer,
    seed: int,
    rewards: RewardPool,
    options: Mapping[str, Any] | None = None,
) -> Environment:
    """The environment `name`.

    Args:
      name: see the module.
      seed: of its training prompts.
      rewards: where its graders run.
      options: further arguments of its class.

    Raises:
      ValueError: the name or an option is unknown, with the nearest ones; or the class refuses.
    """
    options = dict(options or {})
    head, colon, tail = name.partition(":")
    if head == _GYM and colon:
        place = "telescope_jax.envs.reasoning_gym:ReasoningGym"
        options["dataset"] = tail
    else:
        place = name if tail else ENVIRONMENTS.get(name, "")
    if not place:
        known = [*ENVIRONMENTS, f"{_GYM}:<dataset>", "<package.module>:<Class>"]
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"no environment {name!r}; {hint}known: {', '.join(known)}")
    make = _load(name, place)
    _check_options(name, make, options)
    return make(tokenizer, seed, rewards, **options)


def _load(name: str, place: str) -> Callable[..., Environment]:
    place, _, attribute = place.partition(":")
    try:
        module = importlib.import_module(place)
    except ModuleNotFoundError as error:
        # A module that is there but misses one of its own imports is another fault.
        if error.name and (place == error.name or place.startswith(f"{error.name}.")):
            raise ValueError(
                f"environment {name!r}: there is no module {error.name!r}{_nearest(error.name)}"
            ) from None
        raise ValueError(
            f"environment {name!r}: {place} needs {error.name}, which is not installed here"
        ) from error
    try:
        return getattr(module, attribute)
    except AttributeError:
        classes = [key for key, value in vars(module).items() if inspect.isclass(value)]
        raise ValueError(
            f"environment {name!r}: {place} has no {attribute!r}{suggestion(attribute, classes)}"
        ) from None


def _nearest(module: str) -> str:
    """The likeliest of the modules beside it; at the top, of those in this folder alone."""
    parent, dot, leaf = module.rpartition(".")
    if not parent:
        return suggestion(leaf, [_GYM, *(found.name for found in pkgutil.iter_modules(["."]))])
    # Imported already, by the search for the module; a module that is no package has no place.
    places = getattr(importlib.import_module(parent), "__path__", [])
    names = [found.name for found in pkgutil.iter_modules(places)]
    return suggestion(leaf, names, prefix=parent + dot)


def _check_options(name: str, make: Callable[..., Any], options: Mapping[str, Any]) -> None:
    parameters = inspect.signature(make).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return  # the class checks what only it can know
    known = [option for option in parameters if option not in ("tokenizer", "seed", "rewards")]
    for option in options:
        if option not in known:
            near = difflib.get_close_matches(option, known, n=1, cutoff=0.4)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ValueError(f"{name} has no option {option!r}; {hint}it has {', '.join(known)}")
