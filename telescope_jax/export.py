"""`python -m telescope_jax.export --workdir=RUN --to=DIR`: a run as a Hugging Face checkpoint.

    --dtype=bfloat16    float32, float16 or bfloat16; of every tensor, and of config.json
    --step=N            the checkpoint of this step (default: the newest that is whole)

The folder loads in transformers and vLLM. Where the run started from a checkpoint, its tokenizer,
chat template and generation config are copied byte for byte, and its config.json but for the dtype:
a server must render the prompts that were trained. It appears under its name when it is complete.
Works on the CPU, beside a run that holds the accelerator, and needs no mesh.
"""

import argparse
import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from telescope_jax import config_tree, extras
from telescope_jax.chat import CharTokenizer
from telescope_jax.config import Config
from telescope_jax.learner.checkpoint import Checkpoints
from telescope_jax.model.decoder import Decoder
from telescope_jax.types import Params
from telescope_jax.weights import hf_files
from telescope_jax.weights.hf_config import CheckpointError, hf_config_of
from telescope_jax.weights.hf_layout import to_hf


class ExportError(RuntimeError):
    """Nothing was written; the message says why."""


def main(argv: Sequence[str] | None = None) -> int:
    """Exports what the command line says; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m telescope_jax.export", allow_abbrev=False)
    parser.add_argument("--workdir", required=True, help="folder of the run")
    parser.add_argument("--to", required=True, help="folder to make")
    parser.add_argument("--dtype", default="bfloat16", choices=sorted(hf_files.DTYPES))
    parser.add_argument("--step", type=int, help="default: the newest checkpoint")
    asked = parser.parse_args(argv)
    jax.config.update("jax_platforms", "cpu")
    try:
        print(export(Path(asked.workdir), Path(asked.to), dtype=asked.dtype, step=asked.step))
    except (ExportError, CheckpointError) as error:
        print(f"telescope_jax: {error}", file=sys.stderr)
        return 2
    return 0


def export(workdir: Path, to: Path, *, dtype: str, step: int | None = None) -> str:
    """Writes the folder; returns a line that says what it holds.

    Raises:
      ExportError: there is no run, no checkpoint, something at `to` or no way to write there, a
        value beyond `dtype`, or no safetensors.
      CheckpointError: what the run started from is not to be found.
    """
    if absent := extras.missing("an export", "safetensors"):
        raise ExportError(absent)
    if to.exists():
        raise ExportError(f"{to} exists already; choose another --to")
    try:
        config = config_tree.from_json((workdir / "config.json").read_text("utf-8"), Config)
    except (OSError, ValueError) as error:
        raise ExportError(f"{workdir} holds no run that can be read: {error}") from error
    policy = config.policy
    source = hf_files.find(policy.checkpoint) if policy.checkpoint else None
    decoder = Decoder(policy, policy.vocab_size or CharTokenizer().vocab_size)
    kept_in = config.optimizer.master_dtype
    unfinished = to.with_name(f".{to.name}.{os.getpid()}.part")
    try:
        unfinished.mkdir(parents=True)
        step, params = _newest_params(workdir / "checkpoints", decoder, kept_in, step)
        tensors = {name: _cast(name, np.asarray(x), dtype) for name, x in to_hf(params).items()}
        if source is None:
            described = hf_config_of(policy, decoder.vocab_size, config.engine_context())
        else:
            described = hf_files.read_config(source)
        names = hf_files.write(unfinished, tensors)
        _write_config(unfinished / hf_files.CONFIG, described, dtype)
        text_files = hf_files.copy_text_files(source, unfinished) if source else []
        if policy.chat_template not in ("", "none"):
            shutil.copyfile(policy.chat_template, unfinished / "chat_template.jinja")
        unfinished.rename(to)
    except BaseException as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        if isinstance(error, OSError):
            raise ExportError(f"{to} was not made: {error}") from error
        raise
    size = sum(x.nbytes for x in tensors.values()) / 1e6
    with_tokenizer = f"{len(text_files)} text files" if text_files else "no tokenizer"
    return (
        f"{to}: step {step}, {len(tensors)} tensors in {dtype}, {size:,.1f} MB in "
        f"{len(names)} file{'s' if len(names) > 1 else ''}, {with_tokenizer}"
    )


def _newest_params(
    folder: Path, decoder: Decoder, kept_in: str, step: int | None
) -> tuple[int, Params]:
    dtype = hf_files.DTYPES[kept_in]
    here = SingleDeviceSharding(jax.devices("cpu")[0])
    shapes = jax.eval_shape(decoder.init, jax.random.key(0))
    structure = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=here), shapes
    )
    checkpoints = Checkpoints(folder, keep_last=sys.maxsize)
    try:
        found = checkpoints.restore_params(structure, step=step)
    except ValueError as error:
        raise ExportError(str(error)) from error
    finally:
        checkpoints.close()
    if found is None:
        raise ExportError(f"{folder} holds no checkpoint that can be read")
    return found


def _cast(name: str, tensor: np.ndarray, dtype: str) -> np.ndarray:
    with np.errstate(over="ignore"):
        narrow = tensor.astype(hf_files.DTYPES[dtype])
    if not np.isfinite(narrow).all():
        raise ExportError(
            f"{name} reaches {np.abs(tensor).max():g}, which {dtype} cannot hold; export as float32"
        )
    return narrow


def _write_config(path: Path, described: dict[str, Any], dtype: str) -> None:
    # transformers 4 and vLLM read torch_dtype, transformers 5 writes dtype.
    name = "torch_dtype" if "torch_dtype" in described else "dtype"
    described = described | {name: dtype}
    path.write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
