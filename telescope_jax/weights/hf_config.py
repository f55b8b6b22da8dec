"""Hugging Face's config.json and the policy's sizes, both ways.

What the decoder cannot compute (a sliding window, another activation, quantised weights, an unknown
rope type) is refused, all of it in one error: ignored, it would change the logits and nothing else.
"""

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

from telescope_jax.config import PolicyConfig
from telescope_jax.model.rope import scaling_of

_log = logging.getLogger(__name__)

_FAMILIES = ("llama", "qwen2", "qwen3")
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_NEEDED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)
_STRETCHED = ("llama3", "yarn")

DECIDED = (
    "family",
    "vocab_size",
    "width",
    "layers",
    "heads",
    "kv_heads",
    "head_dim",
    "mlp_width",
    "rope_theta",
    "rope_scaling",
    "norm_eps",
    "tied_embeddings",
)
"""Fields of PolicyConfig that a checkpoint decides."""


class CheckpointError(ValueError):
    """A checkpoint cannot be used; the message says what is wrong and with which file."""


def policy_of(hf_config: Mapping[str, Any], asked: PolicyConfig) -> PolicyConfig:
    """`asked` with everything that the checkpoint decides.

    Args:
      hf_config: config.json, of transformers 4 (rope_theta, rope_scaling) or 5 (rope_parameters).
      asked: a size that is neither its default nor the checkpoint's is a conflict.

    Raises:
      CheckpointError: lists what is missing, unsupported or in conflict.
    """
    problems = [f"it has no {key}" for key in _NEEDED if not hf_config.get(key)]
    problems += _unsupported(hf_config)
    if problems:
        raise CheckpointError("config.json: " + "; ".join(problems))
    family, heads = hf_config["model_type"], hf_config["num_attention_heads"]
    # Absent, Qwen3's is 128 in transformers, whatever the width (MX-08).
    usual_head_dim = 128 if family == "qwen3" else hf_config["hidden_size"] // heads
    theta, scaling = _rope(hf_config)
    found = dataclasses.replace(
        asked,
        family=family,
        vocab_size=hf_config["vocab_size"],
        width=hf_config["hidden_size"],
        layers=hf_config["num_hidden_layers"],
        heads=heads,
        kv_heads=hf_config.get("num_key_value_heads") or heads,
        head_dim=hf_config.get("head_dim") or usual_head_dim,
        mlp_width=hf_config["intermediate_size"],
        rope_theta=float(theta),
        rope_scaling=scaling,
        norm_eps=float(hf_config.get("rms_norm_eps", 1e-6)),
        tied_embeddings=bool(hf_config.get("tie_word_embeddings", False)),
    )
    default = PolicyConfig()
    conflicts = [
        f"policy.{name}={getattr(asked, name)}, the checkpoint has {getattr(found, name)}"
        for name in DECIDED
        if getattr(asked, name) not in (getattr(default, name), getattr(found, name))
    ]
    if conflicts:
        raise CheckpointError(f"{'; '.join(conflicts)}; a checkpoint decides these: leave them out")
    return found


def hf_config_of(policy: PolicyConfig, vocab_size: int, context: int) -> dict[str, Any]:
    """A config.json for weights that came from none, readable by transformers 4 and 5."""
    family = policy.family
    config: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[family]],
        "model_type": family,
        "vocab_size": vocab_size,
        "hidden_size": policy.width,
        "intermediate_size": policy.mlp_width,
        "num_hidden_layers": policy.layers,
        "num_attention_heads": policy.heads,
        "num_key_value_heads": policy.kv_heads,
        "head_dim": policy.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": context,
        "rms_norm_eps": policy.norm_eps,
        "tie_word_embeddings": policy.tied_embeddings,
        "attention_bias": family == "qwen2",
        "use_cache": True,
        "rope_theta": policy.rope_theta,
        "rope_parameters": {
            "rope_type": "default",
            **policy.rope_scaling,
            "rope_theta": policy.rope_theta,
        },
        # Ids of our own tokenizer, or none; without them transformers would take Llama's 1 and 2.
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if family == "llama":
        config["mlp_bias"] = False
    return config


def _unsupported(hf_config: Mapping[str, Any]) -> list[str]:
    family = hf_config.get("model_type")
    if family not in _FAMILIES:
        return [f"model_type {family!r} is none of {', '.join(_FAMILIES)}"]
    problems = []

    def refuse(key: str, wanted: Any, usual: Any) -> None:
        if hf_config.get(key, usual) != wanted:
            problems.append(f"{key}={hf_config[key]}, the decoder has {wanted}")

    refuse("hidden_act", "silu", "silu")
    # Absent, it is true for Qwen2, whose q, k and v always carry biases (MX-06).
    refuse("attention_bias", family == "qwen2", family == "qwen2")
    refuse("mlp_bias", False, False)
    refuse("use_sliding_window", False, False)
    if hf_config.get("partial_rotary_factor") not in (None, 1.0):
        problems.append(
            f"partial_rotary_factor={hf_config['partial_rotary_factor']}, the decoder has 1"
        )
    if hf_config.get("quantization_config"):
        problems.append("quantization_config: quantised weights; take the unquantised checkpoint")
    layer_types = set(hf_config.get("layer_types") or ())
    if layer_types - {"full_attention"}:
        problems.append(f"layer_types {sorted(layer_types)}: every layer here sees all tokens")
    try:
        scaling_of(_rope(hf_config)[1])
    except (ValueError, TypeError, KeyError) as error:
        problems.append(str(error))
    return problems


def _rope(hf_config: Mapping[str, Any]) -> tuple[float, dict[str, Any]]:
    """Base and stretch. Both styles mean the same; where both are given, transformers reads
    rope_scaling."""
    settings = dict(hf_config.get("rope_scaling") or hf_config.get("rope_parameters") or {})
    kind = settings.pop("type", "default")  # the name of old files, often beside the new one
    settings["rope_type"] = settings.get("rope_type", kind)
    theta = settings.pop("rope_theta", None) or hf_config.get("rope_theta") or 10_000.0
    if settings.pop("partial_rotary_factor", 1.0) not in (None, 1.0):
        raise ValueError("partial_rotary_factor is not 1")
    if settings["rope_type"] == "default":
        return theta, {key: value for key, value in settings.items() if key != "rope_type"}
    longest = hf_config.get("max_position_embeddings")
    if settings["rope_type"] in _STRETCHED and longest:
        original = hf_config.get("original_max_position_embeddings")
        if original:
            settings["original_max_position_embeddings"] = original
        original = settings.setdefault("original_max_position_embeddings", longest)
        implied = longest / original
        if settings.get("factor") is None and settings["rope_type"] == "yarn":
            settings["factor"] = implied
        elif settings["rope_type"] == "yarn" and implied not in (1, settings["factor"]):
            _log.warning(
                "config.json: the rope factor is %s, but max_position_embeddings=%d over the "
                "original %d is %g; the factor given is taken, as transformers does",
                settings["factor"],
                longest,
                original,
                implied,
            )
    return theta, settings
