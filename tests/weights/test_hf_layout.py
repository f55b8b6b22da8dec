"""The table of names and layouts: a bijection, and one error that lists all that is amiss."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from telescope_jax.config import PolicyConfig
from telescope_jax.model.decoder import Decoder
from telescope_jax.weights.hf_layout import (
    TABLE,
    LayoutError,
    check_shapes,
    from_hf,
    hf_shapes,
    to_hf,
)

TINY = PolicyConfig(width=40, layers=3, heads=8, kv_heads=2, head_dim=16, mlp_width=48)
VOCAB = 96


def structure(**changes):
    """The decoder's parameter tree, leaf shapes only; written out here, for tracing is slow."""
    config = dataclasses.replace(TINY, **changes)
    width, vocab = config.width, config.vocab_size or VOCAB
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim

    def leaf(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    def projection(fan_in, fan_out, bias=False):
        kernel = {"kernel": leaf(fan_in, fan_out)}
        return kernel | {"bias": leaf(fan_out)} if bias else kernel

    biased = config.family == "qwen2"
    attention = {
        "q": projection(width, queries, biased),
        "k": projection(width, keys, biased),
        "v": projection(width, keys, biased),
        "o": projection(queries, width),
    }
    if config.family == "qwen3":
        attention |= {f"{part}_norm": {"scale": leaf(config.head_dim)} for part in "qk"}
    layer = {
        "attention": attention,
        "attention_norm": {"scale": leaf(width)},
        "mlp": {
            "gate": projection(width, config.mlp_width),
            "up": projection(width, config.mlp_width),
            "down": projection(config.mlp_width, width),
        },
        "mlp_norm": {"scale": leaf(width)},
    }
    tree = {
        "embed": {"embedding": leaf(vocab, width)},
        "final_norm": {"scale": leaf(width)},
        "layers": {str(n): layer for n in range(config.layers)},
    }
    return tree if config.tied_embeddings else tree | {"unembed": projection(width, vocab)}


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_the_trees_of_this_test_are_those_of_the_decoder(family):
    changes = {"family": family, "layers": 1, "tied_embeddings": family == "qwen2"}
    decoder = Decoder(dataclasses.replace(TINY, **changes), VOCAB)
    real = jax.eval_shape(decoder.init, jax.random.key(0))
    assert hf_shapes(real) == hf_shapes(structure(**changes))


def unique_constants(tree):
    """Every tensor its own number: a layer or a projection in the wrong place shows (MX-24)."""
    leaves, treedef = jax.tree.flatten(tree)
    filled = [np.full(leaf.shape, i, np.float32) for i, leaf in enumerate(leaves)]
    return jax.tree.unflatten(treedef, filled)


policies = st.builds(
    dict,
    family=st.sampled_from(["llama", "qwen2", "qwen3"]),
    layers=st.integers(1, 12),
    tied_embeddings=st.booleans(),
    kv_heads=st.sampled_from([1, 2, 4, 8]),
    vocab_size=st.sampled_from([0, VOCAB, 128]),
)


@given(policies)
def test_the_layout_is_a_bijection(changes):
    params = unique_constants(structure(**changes))
    served = to_hf(params)
    assert len(served) == len(jax.tree.leaves(params))
    back = from_hf(served)
    assert jax.tree.structure(back) == jax.tree.structure(params)
    jax.tree.map(np.testing.assert_array_equal, back, params)
    assert {name: array.shape for name, array in to_hf(back).items()} == hf_shapes(params)


def test_layer_12_is_not_layer_1_and_2_and_every_tensor_keeps_its_constant():
    """MX-24, with more than ten layers: names sort as text, layers count as numbers."""
    params = unique_constants(structure(layers=13))
    served = to_hf(params)
    for n in range(13):
        layer = params["layers"][str(n)]
        at = f"model.layers.{n}"
        assert (served[f"{at}.self_attn.k_proj.bias"] == layer["attention"]["k"]["bias"]).all()
        assert served[f"{at}.mlp.up_proj.weight"][0, 0] == layer["mlp"]["up"]["kernel"][0, 0]
        norm = served[f"{at}.post_attention_layernorm.weight"]
        assert (norm == layer["mlp_norm"]["scale"]).all()


def test_head_dim_is_not_width_over_heads():
    """MX-08: width 40, 8 heads of 16."""
    shapes = hf_shapes(structure(family="qwen3"))
    assert shapes["model.layers.0.self_attn.q_proj.weight"] == (128, 40)
    assert shapes["model.layers.0.self_attn.k_proj.weight"] == (32, 40)
    assert shapes["model.layers.0.self_attn.o_proj.weight"] == (40, 128)
    assert shapes["model.layers.0.self_attn.k_norm.weight"] == (16,)


def test_the_layout_runs_inside_jit():
    params = jax.tree.map(jnp.asarray, unique_constants(structure()))
    served = jax.jit(to_hf)(params)
    jax.tree.map(np.testing.assert_array_equal, served, to_hf(params))


def test_a_tied_model_writes_one_copy_and_an_untied_one_two():
    """MX-01, MX-05."""
    assert "lm_head.weight" not in hf_shapes(structure())
    assert hf_shapes(structure(tied_embeddings=False))["lm_head.weight"] == (VOCAB, 40)


def test_every_row_is_used_by_some_family_and_no_two_rows_share_a_name():
    names = [
        to_hf(unique_constants(structure(family=family, tied_embeddings=False)))
        for family in ("llama", "qwen2", "qwen3")
    ]
    kinds = {name.replace(".0.", ".{n}.") for found in names for name in found if ".1." not in name}
    for row in TABLE:
        samples = [row.theirs.replace("{qkvo}", "o").replace("{qkv}", "v").replace("{qk}", "k")]
        assert samples[0].replace("{gated}", "up") in kinds, row
    assert len({row.theirs for row in TABLE}) == len(TABLE) == len({row.ours for row in TABLE})


def test_all_that_is_amiss_is_one_error():
    expected = hf_shapes(structure())
    found = dict(expected)
    del found["model.norm.weight"], found["model.layers.1.mlp.up_proj.weight"]
    found["model.layers.3.mlp.up_proj.weight"] = (48, 40)
    found["model.layers.0.self_attn.q_proj.weight"] = (40, 40)
    with pytest.raises(LayoutError) as error:
        check_shapes(found, expected, "folder x")
    for words in (
        "folder x does not fit",
        "missing model.norm.weight [40]",
        "missing model.layers.1.mlp.up_proj.weight [48, 40]",
        "unexpected model.layers.3.mlp.up_proj.weight [48, 40]",
        "model.layers.0.self_attn.q_proj.weight is [40, 40], the model's is [128, 40]",
    ):
        assert words in str(error.value)
    check_shapes(expected, expected, "the model itself")


def test_old_rotary_buffers_and_a_tied_models_second_copy_are_no_strangers():
    """MX-02; a second copy of another shape is one."""
    expected = hf_shapes(structure())
    rotary = {"model.layers.0.self_attn.rotary_emb.inv_freq": (8,)}
    check_shapes(expected | rotary | {"lm_head.weight": (VOCAB, 40)}, expected, "x")
    with pytest.raises(
        LayoutError, match=r"lm_head.weight is \[7, 40\], the model's is \[96, 40\]"
    ):
        check_shapes(expected | {"lm_head.weight": (7, 40)}, expected, "x")


def test_an_untied_model_without_its_head_is_told_how_to_become_tied():
    expected = hf_shapes(structure(tied_embeddings=False))
    found = {name: shape for name, shape in expected.items() if name != "lm_head.weight"}
    with pytest.raises(LayoutError, match="tie_word_embeddings"):
        check_shapes(found, expected, "x")


def test_a_tensor_without_a_row_is_refused_by_name():
    with pytest.raises(
        LayoutError, match=r"no row for tensor model.layers.0.mlp.router.weight \[2"
    ):
        from_hf({"model.layers.0.mlp.router.weight": np.zeros((2, 2))})
    with pytest.raises(LayoutError, match="no row for parameter layers/0/attention/o/bias"):
        to_hf({"layers": {"0": {"attention": {"o": {"bias": np.zeros(3)}}}}})
