"""The decoder against Hugging Face's models, and its three ways of running against one another."""

import dataclasses
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from telescope_jax.config import PolicyConfig
from telescope_jax.model.decoder import Decoder
from telescope_jax.types import Params

TINY = PolicyConfig(
    width=32, layers=2, heads=4, kv_heads=2, head_dim=8, mlp_width=48, rope_theta=1e4
)
FAMILIES = ("llama", "qwen2", "qwen3")
SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def random_params(decoder: Decoder, seed: int = 0) -> Params:
    """Nothing at its initial value: a mistake with a bias of 0 or a scale of 1 does not show."""
    rng = np.random.default_rng(seed)

    def draw(path: tuple, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        name = path[-1].key
        std = leaf.shape[0] ** -0.5 if name == "kernel" else 0.3
        mean = 1.0 if name == "scale" else 0.0
        return jnp.asarray(rng.normal(mean, std, leaf.shape), jnp.float32)

    shapes = jax.eval_shape(decoder.init, jax.random.key(0))
    return jax.tree_util.tree_map_with_path(draw, shapes)


def packed_logits(decoder: Decoder, params: Params, tokens, segments=None, positions=None):
    tokens = jnp.asarray(tokens, jnp.int32)
    if segments is None:
        segments = jnp.ones_like(tokens)
    if positions is None:
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None, :], tokens.shape)

    @jax.jit
    def run(params, tokens, segments, positions):
        return decoder.logits(params, decoder.hidden(params, tokens, segments, positions))

    return run(params, tokens, jnp.asarray(segments), jnp.asarray(positions))


# Oracle: transformers ---------------------------------------------------------------------------

HF_CASES: dict[str, PolicyConfig] = {
    "llama, untied, theta 5e5 (MX-10, MX-12)": dataclasses.replace(
        TINY, family="llama", rope_theta=5e5, tied_embeddings=False
    ),
    "llama with Llama 3.1 frequencies (MX-11)": dataclasses.replace(
        TINY, family="llama", rope_theta=5e5, rope_scaling=SCALING
    ),
    "qwen2, tied, theta 1e6 (MX-01, MX-06)": dataclasses.replace(
        TINY, family="qwen2", rope_theta=1e6
    ),
    "qwen2, theta 1e4 (MX-12)": dataclasses.replace(TINY, family="qwen2"),
    "qwen3 whose heads are not width / heads (MX-08)": dataclasses.replace(
        TINY, family="qwen3", width=40, heads=8, head_dim=16, tied_embeddings=False
    ),
}
VOCAB, LENGTH = 96, 64


def hf_case(config: PolicyConfig) -> dict:
    rope = {"rope_type": "default", "rope_theta": config.rope_theta} | config.rope_scaling
    return {
        "model_type": config.family,
        "config": {
            "vocab_size": VOCAB,
            "hidden_size": config.width,
            "num_hidden_layers": config.layers,
            "num_attention_heads": config.heads,
            "num_key_value_heads": config.kv_heads,
            "head_dim": config.head_dim,
            "intermediate_size": config.mlp_width,
            "rms_norm_eps": config.norm_eps,
            "rope_parameters": rope,
            "tie_word_embeddings": config.tied_embeddings,
            "max_position_embeddings": 65_536,
        },
    }


def hf_weights(params: Params) -> dict[str, np.ndarray]:
    """Hugging Face's names; their linear weights are [out, in]."""
    found = {
        "model.embed_tokens.weight": params["embed"]["embedding"],
        "model.norm.weight": params["final_norm"]["scale"],
    }
    if "unembed" in params:
        found["lm_head.weight"] = params["unembed"]["kernel"].T
    for index, layer in params["layers"].items():
        start = f"model.layers.{index}"
        found[f"{start}.input_layernorm.weight"] = layer["attention_norm"]["scale"]
        found[f"{start}.post_attention_layernorm.weight"] = layer["mlp_norm"]["scale"]
        for name in "qkvo":
            part = layer["attention"][name]
            found[f"{start}.self_attn.{name}_proj.weight"] = part["kernel"].T
            if "bias" in part:
                found[f"{start}.self_attn.{name}_proj.bias"] = part["bias"]
        for name in "qk":
            if f"{name}_norm" in layer["attention"]:
                scale = layer["attention"][f"{name}_norm"]["scale"]
                found[f"{start}.self_attn.{name}_norm.weight"] = scale
        for name in ("gate", "up", "down"):
            found[f"{start}.mlp.{name}_proj.weight"] = layer["mlp"][name]["kernel"].T
    return {name: np.asarray(value) for name, value in found.items()}


def hf_inputs() -> tuple[np.ndarray, np.ndarray]:
    tokens = np.random.default_rng(1).integers(0, VOCAB, (2, LENGTH)).astype(np.int32)
    near = np.arange(LENGTH)
    # Distances up to 8,000: where Llama 3.1's low frequencies show (MX-11).
    return tokens, np.stack([near, near * 127]).astype(np.int32)


@pytest.fixture(scope="module")
def hf_logits(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    for package in ("torch", "transformers"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    folder = tmp_path_factory.mktemp("hf")
    tokens, positions = hf_inputs()
    arrays: dict[str, np.ndarray] = {}
    for i, config in enumerate(HF_CASES.values()):
        params = random_params(Decoder(config, VOCAB), i)
        arrays |= {f"{i}/weights/{name}": value for name, value in hf_weights(params).items()}
        arrays |= {f"{i}/tokens": tokens, f"{i}/positions": positions}
    cases = json.dumps([hf_case(config) for config in HF_CASES.values()])
    np.savez(folder / "cases.npz", allow_pickle=False, cases=np.asarray(cases), **arrays)
    script = Path(__file__).parents[1] / "oracles" / "hf_logits.py"
    subprocess.run(
        [sys.executable, "-I", script, folder / "cases.npz", folder / "logits.npz"],
        check=True,
        cwd=folder,
        timeout=240,
    )
    with np.load(folder / "logits.npz") as stored:
        return {name: stored[str(i)] for i, name in enumerate(HF_CASES)}


@pytest.mark.parametrize("name", HF_CASES)
def test_logits_equal_those_of_transformers_at_every_position(name: str, hf_logits):
    decoder = Decoder(HF_CASES[name], VOCAB)
    seed = list(HF_CASES).index(name)
    params = random_params(decoder, seed)
    tokens, positions = hf_inputs()
    ours = packed_logits(decoder, params, tokens, positions=positions)
    np.testing.assert_allclose(ours[0], hf_logits[name][0], atol=1e-4)
    # At position 8,000 one float32 ulp of a frequency is an angle of 5e-4.
    np.testing.assert_allclose(ours[1], hf_logits[name][1], atol=5e-4)


def test_theta_and_biases_and_scaling_change_the_logits():
    """The oracle would not notice a setting that neither side used (MX-06, MX-11, MX-12)."""
    tokens, positions = hf_inputs()
    config = dataclasses.replace(TINY, family="qwen2")
    params = random_params(Decoder(config, VOCAB))

    def run(config=config, params=params):
        return packed_logits(Decoder(config, VOCAB), params, tokens, positions=positions)

    unbiased = jax.tree_util.tree_map_with_path(
        lambda path, x: x * 0 if path[-1].key == "bias" else x, params
    )
    logits = run()
    for other in (
        run(config=dataclasses.replace(config, rope_theta=1e6)),
        run(params=unbiased),
        run(config=dataclasses.replace(config, rope_scaling=SCALING)),
    ):
        assert np.abs(np.asarray(other - logits)).max() > 1e-2


# One model, three ways --------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_prefill_and_decode_give_the_logits_of_the_packed_forward(family: str):
    decoder = Decoder(dataclasses.replace(TINY, family=family), 50)
    params = random_params(decoder)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 50, (3, 12)), jnp.int32)
    packed = packed_logits(decoder, params, tokens)
    lengths = jnp.array([1, 7, 12])
    logits, prompts = jax.jit(decoder.prefill)(params, tokens, lengths)
    for row, length in enumerate(lengths):
        np.testing.assert_allclose(logits[row], packed[row, length - 1], atol=1e-5)

    cache = decoder.empty_cache(3, 16)
    # What an earlier request left behind in the slots must not be read.
    cache = jax.tree.map(lambda kept, new: (kept + 50.0).at[:, :, :12].set(new), cache, prompts)
    decode, position = jax.jit(decoder.decode), lengths
    for _ in range(11):
        token = tokens[jnp.arange(3), jnp.minimum(position, 11)]
        logits, cache = decode(params, token, position, cache)
        for row in range(3):
            if position[row] < 12:
                np.testing.assert_allclose(logits[row], packed[row, position[row]], atol=1e-5)
        position = position + 1


def test_a_position_outside_the_cache_writes_nothing():
    decoder = Decoder(TINY, 50)
    cache = decoder.empty_cache(2, 4)
    _, written = jax.jit(decoder.decode)(
        random_params(decoder), jnp.array([1, 2]), jnp.array([4, 9]), cache
    )
    assert not any(array.any() for array in jax.tree.leaves(written))


@pytest.mark.parametrize("remat", ["block", "dots"])
def test_remat_changes_no_gradient(remat):
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 50, (2, 10)), jnp.int32)

    def gradient(config: PolicyConfig) -> Params:
        decoder = Decoder(config, 50)
        params = random_params(decoder)
        return jax.jit(jax.grad(lambda p: (packed_logits(decoder, p, tokens) ** 2).mean()))(params)

    kept, redone = gradient(TINY), gradient(dataclasses.replace(TINY, remat=remat))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), kept, redone)


def test_bfloat16_computes_in_bfloat16_and_keeps_parameters_and_logits_in_float32():
    config = dataclasses.replace(TINY, compute_dtype="bfloat16")
    decoder, exact = Decoder(config, 50), Decoder(TINY, 50)
    params = random_params(decoder)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 50, (2, 10)), jnp.int32)
    segments = jnp.ones_like(tokens)
    positions = jnp.broadcast_to(jnp.arange(10)[None, :], tokens.shape)
    hidden = jax.jit(decoder.hidden)(params, tokens, segments, positions)
    logits = jax.jit(decoder.logits)(params, hidden)
    assert {str(x.dtype) for x in jax.tree.leaves(params)} == {"float32"}
    assert (str(hidden.dtype), str(logits.dtype)) == ("bfloat16", "float32")
    np.testing.assert_allclose(logits, packed_logits(exact, params, tokens), atol=0.2)


# Vocabulary and names ---------------------------------------------------------------------------


def test_vocabulary_may_be_padded_and_never_cut():
    """MX-21: padded rows are ordinary parameters; the log-probs are over all of them."""
    decoder = Decoder(dataclasses.replace(TINY, vocab_size=64), 50)
    assert decoder.vocab_size == 64
    assert random_params(decoder)["embed"]["embedding"].shape == (64, 32)
    with pytest.raises(ValueError, match="policy.vocab_size=40 has no room for the .* 50"):
        Decoder(dataclasses.replace(TINY, vocab_size=40), 50)


def test_parameters_are_a_plain_dict_with_the_documented_names():
    qwen2 = random_params(Decoder(dataclasses.replace(TINY, family="qwen2"), 50))
    assert qwen2["layers"]["0"]["attention"]["q"]["kernel"].shape == (32, 32)
    assert qwen2["layers"]["1"]["attention"]["k"]["bias"].shape == (16,)
    assert "unembed" not in qwen2
    qwen3 = random_params(
        Decoder(dataclasses.replace(TINY, family="qwen3", tied_embeddings=False), 50)
    )
    assert qwen3["layers"]["0"]["attention"]["q_norm"]["scale"].shape == (8,)
    assert set(qwen3["layers"]["0"]["attention"]["q"]) == {"kernel"}
    assert qwen3["unembed"]["kernel"].shape == (32, 50)
    assert type(qwen3) is dict and type(qwen3["layers"]) is dict


def test_a_seed_decides_the_parameters_and_every_matrix_is_drawn_anew():
    decoder = Decoder(dataclasses.replace(TINY, layers=1), 50)
    init = jax.jit(decoder.init)
    same, again, other = (init(jax.random.key(seed)) for seed in (3, 3, 4))
    jax.tree.map(np.testing.assert_array_equal, same, again)
    mlp = same["layers"]["0"]["mlp"]
    assert not np.array_equal(mlp["up"]["kernel"], mlp["gate"]["kernel"])
    assert not np.array_equal(mlp["up"]["kernel"], other["layers"]["0"]["mlp"]["up"]["kernel"])
    np.testing.assert_allclose(np.std(mlp["up"]["kernel"]), 0.02, rtol=0.1)
