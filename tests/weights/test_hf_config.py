"""config.json to sizes: both rope styles, what is refused, what conflicts."""

import dataclasses
import logging

import pytest

from telescope_jax.config import PolicyConfig
from telescope_jax.weights.hf_config import CheckpointError, hf_config_of, policy_of

QWEN2 = {
    "model_type": "qwen2",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 40_960,
    "rope_theta": 1e6,
}
NOTHING_ASKED = PolicyConfig()
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def test_both_styles_of_rope_settings_give_the_same_policy():
    """MX-23."""
    rest = {key: value for key, value in QWEN2.items() if key != "rope_theta"}
    old = policy_of(
        rest | {"rope_theta": 1e6, "rope_scaling": {"type": "llama3", **LLAMA3}}, NOTHING_ASKED
    )
    new = policy_of(
        rest | {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e6, **LLAMA3}},
        NOTHING_ASKED,
    )
    assert old == new
    assert old.rope_theta == 1e6 and old.rope_scaling == {"rope_type": "llama3", **LLAMA3}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"rope_type": "longrope", "factor": 4.0}, "rope_type 'longrope' is none of"),
        ({"type": "linear", "factor": 4.0}, "rope_type 'linear' is none of"),
        ({"rope_type": "llama3", "factor": 8.0}, "high_freq_factor, low_freq_factor missing"),
        ({"rope_type": "yarn", "factor": 4.0, "wavelength": 3}, "wavelength missing or unknown"),
        ({"full_attention": {"rope_type": "default"}}, "full_attention missing or unknown"),
    ],
)
def test_rope_settings_that_are_not_understood_are_an_error(settings, words):
    """MX-23: never a default."""
    with pytest.raises(CheckpointError, match=words):
        policy_of(QWEN2 | {"rope_scaling": settings}, NOTHING_ASKED)


def test_the_factor_that_is_given_wins_and_a_contradiction_is_said(caplog):
    """MX-15: factor 4, original 32768, longest 40960, which would be 1.25."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}
    with caplog.at_level(logging.WARNING):
        policy = policy_of(QWEN2 | {"rope_scaling": yarn}, NOTHING_ASKED)
    assert policy.rope_scaling["factor"] == 4.0
    assert "the rope factor is 4.0" in caplog.text and "1.25" in caplog.text
    caplog.clear()
    policy = policy_of(QWEN2 | {"rope_scaling": yarn | {"factor": None}}, NOTHING_ASKED)
    assert policy.rope_scaling["factor"] == 1.25 and not caplog.text


def test_everything_the_decoder_cannot_do_is_one_error():
    broken = {
        "use_sliding_window": True,
        "hidden_act": "gelu",
        "quantization_config": {"quant_method": "fp8"},
        "layer_types": ["full_attention", "sliding_attention"],
        "partial_rotary_factor": 0.5,
        "attention_bias": False,  # MX-06: Qwen2 always has it
    }
    with pytest.raises(CheckpointError) as error:
        policy_of(QWEN2 | broken, NOTHING_ASKED)
    assert all(key in str(error.value) for key in broken)


def test_other_architectures_and_missing_sizes_are_refused():
    with pytest.raises(CheckpointError, match="model_type 'gemma3' is none of llama, qwen2, qwen3"):
        policy_of(QWEN2 | {"model_type": "gemma3"}, NOTHING_ASKED)
    with pytest.raises(CheckpointError, match="no vocab_size; it has no hidden_size"):
        policy_of({"model_type": "llama"}, NOTHING_ASKED)
    with pytest.raises(CheckpointError, match="attention_bias=True, the decoder has False"):
        policy_of(QWEN2 | {"model_type": "llama", "attention_bias": True}, NOTHING_ASKED)


def test_head_dim_is_read_and_has_the_defaults_of_each_family():
    """MX-08."""
    assert policy_of(QWEN2, NOTHING_ASKED).head_dim == 16
    assert policy_of(QWEN2 | {"model_type": "qwen3"}, NOTHING_ASKED).head_dim == 128
    assert policy_of(QWEN2 | {"head_dim": 24}, NOTHING_ASKED).head_dim == 24


def test_a_size_that_was_asked_for_and_is_another_is_a_conflict():
    asked = PolicyConfig(width=256, layers=3, compute_dtype="bfloat16")
    with pytest.raises(CheckpointError, match="policy.width=256, the checkpoint has 64;") as error:
        policy_of(QWEN2, asked)
    assert "layers" not in str(error.value)
    found = policy_of(QWEN2, dataclasses.replace(asked, width=64))
    assert (found.width, found.layers, found.compute_dtype) == (64, 3, "bfloat16")
    assert policy_of(QWEN2, found) == found  # a resumed run asks for all of it


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_config_that_we_write_is_read_back_as_the_same_policy(family):
    policy = policy_of(
        QWEN2
        | {"model_type": family, "head_dim": 24, "rope_scaling": {"type": "llama3", **LLAMA3}},
        NOTHING_ASKED,
    )
    assert policy_of(hf_config_of(policy, 320, 40_960), NOTHING_ASKED) == policy
