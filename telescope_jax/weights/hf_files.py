"""Hugging Face checkpoints as files: find, check, read and write them.

A checkpoint is a folder with config.json and safetensors, one file or many with an index. All that
can be wrong with it is found in its small files and in the headers, before anything is computed or
converted: a missing or cut shard, names and shapes that are not the model's. No code that comes
with a checkpoint is run.
"""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

from telescope_jax import extras
from telescope_jax.config import PolicyConfig
from telescope_jax.model.decoder import Decoder
from telescope_jax.types import Params
from telescope_jax.weights.hf_config import CheckpointError, policy_of
from telescope_jax.weights.hf_layout import (
    EMBEDDING,
    LM_HEAD,
    LayoutError,
    check_shapes,
    from_hf,
    hf_shapes,
)

CONFIG, INDEX, SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"
TEXT_FILES = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
)
"""What travels with the weights from a checkpoint to an export of its descendants."""

DTYPES: Mapping[str, np.dtype] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
_HEADER_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_SHARD_BYTES = 5_000_000_000


def find(checkpoint: str) -> Path:
    """The folder of a checkpoint: a local one, or the snapshot of a name on the hub.

    Without a network, or with HF_HUB_OFFLINE=1, a name is looked up in the hub's cache.

    Raises:
      CheckpointError: it is neither.
    """
    folder = Path(checkpoint).expanduser()
    if folder.is_dir():
        return folder.resolve()
    if folder.is_absolute() or checkpoint.startswith((".", "~")) or checkpoint.count("/") > 1:
        raise CheckpointError(f"policy.checkpoint={checkpoint}: there is no such folder")
    named = f"policy.checkpoint={checkpoint} is no folder here, and a name on the hub"
    if absent := extras.missing(named, "huggingface_hub"):
        raise CheckpointError(absent)
    from huggingface_hub import snapshot_download

    wanted = [CONFIG, INDEX, "*.safetensors", *TEXT_FILES]
    try:
        return Path(snapshot_download(checkpoint, allow_patterns=wanted))
    except Exception as error:  # the hub's client raises its own, httpx's and OSError
        raise CheckpointError(
            f"policy.checkpoint={checkpoint} is neither a folder nor on the hub nor in its cache "
            f"({type(error).__name__}: {str(error).splitlines()[0]})"
        ) from error


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a checkpoint.

    Raises:
      CheckpointError: it is missing or no JSON object.
    """
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder / CONFIG} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{folder / CONFIG} is no JSON object")
    return config


def open_checkpoint(asked: PolicyConfig) -> tuple[PolicyConfig, Path]:
    """The sizes of `asked.checkpoint` and its folder, all of its headers checked.

    Raises:
      CheckpointError: it cannot be found, is not whole, is unsupported, or contradicts `asked`.
    """
    folder = find(asked.checkpoint)
    try:
        policy = policy_of(read_config(folder), asked)
        check_files(folder, policy)
    except (CheckpointError, LayoutError) as error:
        raise CheckpointError(f"policy.checkpoint={asked.checkpoint}: {error}") from error
    return policy, folder


def check_files(folder: Path, policy: PolicyConfig) -> None:
    """Reads every header, and no tensor.

    Raises:
      CheckpointError: a shard is missing, cut or unreadable, or holds what is not a float.
      LayoutError: the tensors are not the model's.
    """
    found: dict[str, tuple[int, ...]] = {}
    wrong_dtype = []
    for path in _shards(folder):
        with _open(path) as file:
            for name in file.keys():  # noqa: SIM118
                tensor = file.get_slice(name)
                found[name] = tuple(tensor.get_shape())
                if tensor.get_dtype() not in _HEADER_DTYPES:
                    wrong_dtype.append(f"{name} is {tensor.get_dtype()}")
    if wrong_dtype:
        raise CheckpointError(
            f"{folder}: {', '.join(wrong_dtype[:3])} ({len(wrong_dtype)} in all); only "
            f"{', '.join(_HEADER_DTYPES)} are read"
        )
    check_shapes(found, _expected(policy), str(folder))


def load(folder: Path, policy: PolicyConfig, dtype: str | None = "float32") -> Params:
    """The parameters as numpy arrays.

    Args:
      dtype: what all of them become; None keeps each as it is in the file, bit for bit.

    Raises:
      CheckpointError, LayoutError: as `check_files`, or a tied model with another lm_head.
    """
    check_files(folder, policy)
    expected = _expected(policy)
    tensors: dict[str, np.ndarray] = {}
    for path in _shards(folder):
        with _open(path) as file:
            for name in file.keys():  # noqa: SIM118
                if name in expected or name == LM_HEAD:
                    tensor = file.get_tensor(name)
                    tensors[name] = tensor if dtype is None else tensor.astype(DTYPES[dtype])
    if LM_HEAD not in expected and LM_HEAD in tensors:
        head = tensors.pop(LM_HEAD)
        if not np.array_equal(head, tensors[EMBEDDING]):
            raise CheckpointError(
                f"{folder}: config.json ties the embeddings, and lm_head.weight differs from "
                "model.embed_tokens.weight; set tie_word_embeddings to false, or drop lm_head"
            )
    return from_hf(tensors)


def write(
    folder: Path, tensors: Mapping[str, np.ndarray], *, shard_bytes: int = _SHARD_BYTES
) -> list[str]:
    """Writes tensors under Hugging Face's names, in one file or in shards with an index.

    Returns:
      The names of the files.
    """
    from safetensors.numpy import save_file

    shards: list[dict[str, np.ndarray]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = np.ascontiguousarray(tensor)
        size += tensor.nbytes
    count = len(shards)
    names = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    if count == 1:
        names = [SINGLE]
    for name, shard in zip(names, shards, strict=True):
        save_file(shard, folder / name, metadata={"format": "pt"})
    if count > 1:
        total = sum(tensor.nbytes for tensor in tensors.values())
        where = {t: name for name, shard in zip(names, shards, strict=True) for t in shard}
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return names


def copy_text_files(source: Path, target: Path) -> list[str]:
    """Copies tokenizer, chat template and generation config byte for byte; returns their names."""
    copied = [name for name in TEXT_FILES if (source / name).is_file()]
    for name in copied:
        shutil.copyfile(source / name, target / name)
    return copied


def _expected(policy: PolicyConfig) -> dict[str, tuple[int, ...]]:
    return hf_shapes(jax.eval_shape(Decoder(policy, policy.vocab_size).init, jax.random.key(0)))


def _shards(folder: Path) -> list[Path]:
    """The files that the index names, or the one file; all of them are there."""
    if not (folder / INDEX).is_file():
        if not (folder / SINGLE).is_file():
            raise CheckpointError(f"{folder} holds neither {SINGLE} nor {INDEX}")
        return [folder / SINGLE]
    try:
        where = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
        shards = sorted(set(where.values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{folder / INDEX} cannot be read: {error!r}") from error
    # An index is data: a name in it must not lead out of the folder.
    if foreign := [name for name in shards if os.path.basename(name) != name]:
        raise CheckpointError(f"{folder / INDEX} names files elsewhere: {', '.join(foreign)}")
    if absent := [name for name in shards if not (folder / name).is_file()]:
        raise CheckpointError(
            f"{folder} lacks {', '.join(absent)}, of {len(shards)} shards that {INDEX} names; "
            "download it again"
        )
    return [folder / name for name in shards]


def _open(path: Path) -> Any:
    if absent := extras.missing(str(path), "safetensors"):
        raise CheckpointError(absent)
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="numpy")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} ({path.stat().st_size:,} bytes) is cut short or no safetensors file: {error}; "
            "download it again"
        ) from error
