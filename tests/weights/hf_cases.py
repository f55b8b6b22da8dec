"""Tiny random checkpoints of each family, made by transformers in a process of its own."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from telescope_jax.config import PolicyConfig
from telescope_jax.model.decoder import Decoder
from telescope_jax.types import Params

_ORACLE = Path(__file__).parents[1] / "oracles" / "hf_checkpoints.py"

_SIZES = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


def _case(model_type: str, rope: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    outside = {key: changes.pop(key) for key in ("dtype", "shard") if key in changes}
    rope = {"rope_type": "default", "rope_theta": 1e6} | (rope or {})
    config = _SIZES | changes | {"rope_parameters": rope}
    return {"model_type": model_type, "config": config, "dtype": "float32"} | outside


CASES: dict[str, dict[str, Any]] = {
    "llama_untied": _case("llama", {"rope_theta": 5e5}, tie_word_embeddings=False),
    "llama3": _case(
        "llama",
        {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
        tie_word_embeddings=True,
        head_dim=16,
    ),
    "llama_yarn_mscale": _case(
        "llama",
        {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 16.0,
            "original_max_position_embeddings": 32,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        head_dim=16,
    ),
    "qwen2_sharded": _case("qwen2", tie_word_embeddings=True, shard="40KB"),
    "qwen2_yarn": _case(
        "qwen2",
        {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
        },
        tie_word_embeddings=True,
        hidden_size=64,
    ),
    "qwen3_bfloat16": _case(
        "qwen3",
        hidden_size=40,
        num_attention_heads=8,
        head_dim=16,
        tie_word_embeddings=False,
        dtype="bfloat16",
    ),
    "llama_float16": _case("llama", dtype="float16", num_hidden_layers=1),
}
"""MX-01, 06, 08, 10, 11, 12, 14, 18, 20: which case is which shows in its settings."""


def run_oracle(command: str, spec: Any, folder: Path, out: Path) -> None:
    """Runs tests/oracles/hf_checkpoints.py; skips the test without torch and transformers."""
    for package in ("torch", "transformers"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    path = folder / f"{command}.json"
    path.write_text(json.dumps(spec))
    arguments = [sys.executable, "-I", _ORACLE, command, path, out]
    subprocess.run(arguments, check=True, cwd=folder, timeout=280)


def logits(policy: PolicyConfig, params: Params, tokens: np.ndarray) -> jax.Array:
    """The decoder's logits at every position."""
    decoder = Decoder(policy, policy.vocab_size)
    tokens = np.asarray(tokens, np.int32)
    positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)

    @jax.jit
    def run(params, tokens, positions):
        hidden = decoder.hidden(params, tokens, jnp.ones_like(tokens), positions)
        return decoder.logits(params, hidden)

    return run(jax.tree.map(jnp.asarray, params), tokens, positions)
