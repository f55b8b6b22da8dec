"""Keeps tensorstore's JSON from staying in memory for ever.

When tensorstore (0.1.71 to 0.1.86) makes Python objects of its JSON, it takes a reference too many
to every key and value, so that they are never freed. Orbax asks for such JSON once an array and
several times a save: a process grew with every checkpoint that it wrote, and more with one that it
read. What tensorstore prints is the same JSON and leaks nothing, so that is read instead.
"""

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import tensorstore

_SPEC_TO_JSON = tensorstore.Spec.to_json
_STORE_TO_JSON = tensorstore.KvStore.Spec.to_json
_NOT_JSON = re.compile(r"'[^']*'|\b(?:None|True|False)\b|,(?=\s*[}\]])")
_AS_JSON = {"None": "null", "True": "true", "False": "false", ",": ""}


def free_what_tensorstore_keeps() -> None:
    """Replaces the functions of tensorstore that orbax calls and that leak; once or more often."""
    spec, store = tensorstore.Spec, tensorstore.KvStore.Spec
    spec.to_json = _through_text(_SPEC_TO_JSON)  # type: ignore[method-assign]
    store.to_json = _through_text(_STORE_TO_JSON)  # type: ignore[method-assign]
    # Only for orbax's log of bytes on disk, which it leaves out when there are none.
    tensorstore.experimental_collect_matching_metrics = _no_metrics  # type: ignore[assignment]


def _through_text(to_json: Callable[..., Any]) -> Callable[..., Any]:
    def without_leak(spec: Any, include_defaults: bool = False) -> Any:
        text = repr(spec)
        if include_defaults or '"' in text or "\\" in text:
            return to_json(spec, include_defaults)  # not in the text, or quoted as JSON is not
        # Not ast.literal_eval: it fails when two threads parse at once (CPython 3.11.7).
        return json.loads(_NOT_JSON.sub(_json, text[text.index("(") + 1 : -1]))

    return without_leak


def _json(found: re.Match[str]) -> str:
    text = found.group()
    return json.dumps(text[1:-1]) if text[0] == "'" else _AS_JSON[text]


def _no_metrics(metric_prefix: str = "", include_zero_metrics: bool = False) -> Sequence[Any]:
    del metric_prefix, include_zero_metrics
    return ()
