"""Hugging Face's names and layouts of the policy's tensors: one table, read in both directions.

Import, export and publishing (vLLM takes these names) all use it, so what goes out comes back bit
for bit. The functions are pure, on numpy or jax arrays; `to_hf` may be traced.

The table covers Llama, Qwen2 (bias on q, k, v) and Qwen3 (norm of q and k); which rows apply shows
in the names alone. Our kernels are [in, out] and Hugging Face's [out, in], hence the transposes.
Heads lie fused in both, and rotary features are paired alike (i with i + K/2), so nothing is
reshaped or permuted. A tied model has no `lm_head.weight`, on either side.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from telescope_jax.types import Params


class Row(NamedTuple):
    """One kind of tensor. A placeholder {name} stands for the same text on both sides."""

    ours: str  # path in the parameter tree, joined by slashes
    theirs: str
    transposed: bool = False


TABLE: Sequence[Row] = (
    Row("embed/embedding", "model.embed_tokens.weight"),
    Row("final_norm/scale", "model.norm.weight"),
    Row("unembed/kernel", "lm_head.weight", transposed=True),
    Row("layers/{n}/attention_norm/scale", "model.layers.{n}.input_layernorm.weight"),
    Row("layers/{n}/mlp_norm/scale", "model.layers.{n}.post_attention_layernorm.weight"),
    Row(
        "layers/{n}/attention/{qkvo}/kernel", "model.layers.{n}.self_attn.{qkvo}_proj.weight", True
    ),
    Row("layers/{n}/attention/{qkv}/bias", "model.layers.{n}.self_attn.{qkv}_proj.bias"),
    Row("layers/{n}/attention/{qk}_norm/scale", "model.layers.{n}.self_attn.{qk}_norm.weight"),
    Row("layers/{n}/mlp/{gated}/kernel", "model.layers.{n}.mlp.{gated}_proj.weight", True),
)

LM_HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"

_PLACEHOLDERS = {
    "n": r"0|[1-9]\d*",
    "qkvo": "[qkvo]",
    "qkv": "[qkv]",
    "qk": "[qk]",
    "gated": "gate|up|down",
}
# Buffers that old Llama files hold; the frequencies follow from the config.
_NOT_WEIGHTS = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")


class LayoutError(ValueError):
    """The tensors are not those of the model; lists every one that is amiss."""


def to_hf(params: Params) -> dict[str, Any]:
    """The parameter tree as a flat dict of Hugging Face's tensors.

    Raises:
      LayoutError: lists the parameters that the table has no row for.
    """
    return _renamed(_flat(params), _FROM_OURS, "parameter")


def from_hf(tensors: Mapping[str, Any]) -> Params:
    """The inverse of `to_hf`.

    Raises:
      LayoutError: lists the tensors that the table has no row for.
    """
    params: dict[str, Any] = {}
    for path, array in _renamed(tensors, _FROM_THEIRS, "tensor").items():
        *parents, leaf = path.split("/")
        node = params
        for key in parents:
            node = node.setdefault(key, {})
        node[leaf] = array
    return params


def hf_shapes(params: Params) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of `to_hf(params)`; leaves may be ShapeDtypeStructs."""
    flat = {path: _Shape(tuple(leaf.shape)) for path, leaf in _flat(params).items()}
    return {name: leaf.shape for name, leaf in _renamed(flat, _FROM_OURS, "parameter").items()}


def check_shapes(
    found: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]], what: str
) -> None:
    """Compares the tensors of a file, or of a server, with those of the model.

    A tied model's file may repeat the embedding as `lm_head.weight`; whoever reads the values has
    to see that the two are equal.

    Args:
      found, expected: name → shape; `expected` as `hf_shapes` gives it.
      what: names `found` in the error.

    Raises:
      LayoutError: lists all that are missing, unexpected or misshapen.
    """
    weights = {name: shape for name, shape in found.items() if not _NOT_WEIGHTS.fullmatch(name)}
    allowed = {LM_HEAD: expected.get(EMBEDDING)} | dict(expected)
    problems = [f"missing {n} {list(expected[n])}" for n in sorted(expected.keys() - weights)]
    problems += [f"unexpected {n} {list(weights[n])}" for n in sorted(weights.keys() - allowed)]
    for name in sorted(weights.keys() & allowed.keys()):
        has, wants = tuple(weights[name]), allowed[name]
        if wants is not None and has != tuple(wants):
            problems.append(f"{name} is {list(has)}, the model's is {list(wants)}")
    if LM_HEAD in expected and LM_HEAD not in weights:
        problems.append(
            "a file without lm_head.weight is a tied model's: set tie_word_embeddings to true in "
            "its config.json if it is one"
        )
    if problems:
        raise LayoutError(f"{what} does not fit the model:\n  " + "\n  ".join(problems))


class _Rename(NamedTuple):
    pattern: re.Pattern[str]
    template: str
    transposed: bool


class _Shape(NamedTuple):
    shape: tuple[int, ...]

    @property
    def T(self) -> "_Shape":
        return _Shape(self.shape[::-1])


def _rename(source: str, target: str, transposed: bool) -> _Rename:
    pattern = re.escape(source)
    for name, choices in _PLACEHOLDERS.items():
        pattern = pattern.replace(re.escape(f"{{{name}}}"), f"(?P<{name}>{choices})")
    return _Rename(re.compile(pattern), target, transposed)


_FROM_OURS = tuple(_rename(row.ours, row.theirs, row.transposed) for row in TABLE)
_FROM_THEIRS = tuple(_rename(row.theirs, row.ours, row.transposed) for row in TABLE)


def _renamed(flat: Mapping[str, Any], renames: Sequence[_Rename], kind: str) -> dict[str, Any]:
    renamed, unknown = {}, []
    for name, array in flat.items():
        for rename in renames:
            if match := rename.pattern.fullmatch(name):
                new = rename.template.format(**match.groupdict())
                renamed[new] = array.T if rename.transposed else array
                break
        else:
            unknown.append(f"{name} {list(array.shape)}")
    if unknown:
        raise LayoutError(f"the table has no row for {kind} {', '.join(sorted(unknown))}")
    return renamed


def _flat(params: Params, prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in params.items():
        path = f"{prefix}{key}"
        flat |= _flat(value, f"{path}/") if isinstance(value, Mapping) else {path: value}
    return flat
