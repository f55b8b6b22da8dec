"""The folder that a vLLM server is started from: config.json and nothing else.

Weights come through the store and tokens are made by us, so neither is in the folder.
"""

import json
import os
from pathlib import Path
from typing import Any

from telescope_jax.config import PolicyConfig

_FAMILIES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
}


def hf_config(policy: PolicyConfig, vocab_size: int, context: int) -> dict[str, Any]:
    """What Hugging Face's config.json says of a policy."""
    model_type, architecture = _FAMILIES[policy.family]
    return {
        "model_type": model_type,
        "architectures": [architecture],
        "vocab_size": vocab_size,
        "hidden_size": policy.width,
        "num_hidden_layers": policy.layers,
        "num_attention_heads": policy.heads,
        "num_key_value_heads": policy.kv_heads,
        "head_dim": policy.head_dim,
        "intermediate_size": policy.mlp_width,
        "hidden_act": "silu",
        "rms_norm_eps": policy.norm_eps,
        "rope_theta": policy.rope_theta,
        "tie_word_embeddings": policy.tied_embeddings,
        "attention_bias": False,
        "max_position_embeddings": context,
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": policy.compute_dtype,
    }


def write_model_folder(folder: str | os.PathLike[str], config: dict[str, Any]) -> str:
    """Writes config.json into `folder`; returns the folder."""
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return str(path)
