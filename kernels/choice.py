"""Which implementation of a kernel runs: the one rule behind every `implementation=` argument.

None takes the first in the platform's order that can take the case, and the choice is logged once,
with the reasons of those passed over. A name is taken at its word: if that implementation cannot
take the case, the call fails and says why. Nothing falls back silently.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cache

_log = logging.getLogger(__name__)

Refusals = Callable[[], Sequence[str]]
"""All reasons why an implementation cannot take the case at hand; empty if it can."""


def choose(
    operation: str,
    implementation: str | None,
    order: Sequence[str],
    refusals: Mapping[str, Refusals],
) -> str:
    """The name of the implementation to run.

    Args:
      operation: what is being implemented, for messages.
      implementation: a name, or None to take the first of `order` that can.
      order: names in order of preference on this platform.
      refusals: for every known name, a function that lists why it cannot take the case.

    Raises:
      ValueError: there is no implementation of that name.
      NotImplementedError: the one asked for, or every one in `order`, cannot take the case; all
        reasons are in the message.
    """
    if implementation is not None:
        if implementation not in refusals:
            raise ValueError(
                f"{operation} has no implementation {implementation!r}; "
                f"there are {', '.join(sorted(refusals))}"
            )
        if reasons := refusals[implementation]():
            raise NotImplementedError(
                f"{operation}: {implementation} cannot take this case: {'; '.join(reasons)}"
            )
        return implementation

    passed_over = []
    for name in order:
        reasons = refusals[name]()
        if not reasons:
            _log_once(operation, name, "; ".join(passed_over))
            return name
        passed_over.append(f"{name} cannot: {', '.join(reasons)}")
    raise NotImplementedError(
        f"{operation}: no implementation can take this case: {'; '.join(passed_over)}"
    )


@cache
def _log_once(operation: str, name: str, passed_over: str) -> None:
    _log.info("%s runs as %s%s", operation, name, f" ({passed_over})" if passed_over else "")
