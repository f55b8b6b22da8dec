"""Checkpoints from disk: the logits of transformers both ways, and every way to be broken."""

import json
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from telescope_jax.config import PolicyConfig
from telescope_jax.model.rope import YarnScaling, inverse_frequencies, scaling_of
from telescope_jax.weights.hf_config import CheckpointError
from telescope_jax.weights.hf_files import INDEX, find, load, open_checkpoint, read_config, write
from telescope_jax.weights.hf_layout import LayoutError, to_hf
from tests.weights.hf_cases import CASES, logits, run_oracle


def opened(folder: Path, **asked) -> PolicyConfig:
    policy, _ = open_checkpoint(PolicyConfig(checkpoint=str(folder), **asked))
    return policy


@pytest.fixture
def copy(checkpoints: Path, tmp_path: Path):
    """`copy(name)`: a checkpoint that a test may break."""
    return lambda name: Path(shutil.copytree(checkpoints / name, tmp_path / name))


def rewrite(path: Path, change) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


# Values -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_those_of_transformers_at_every_position(name: str, checkpoints: Path):
    """MX-01, 06, 08, 10, 11, 12, 14, 18, 20."""
    policy = opened(checkpoints / name)
    params = load(checkpoints / name, policy)
    with np.load(checkpoints / f"{name}.npz") as theirs:
        ours = logits(policy, params, theirs["tokens"])
        np.testing.assert_allclose(ours, theirs["logits"], atol=1e-4)
        assert np.abs(theirs["logits"]).max() > 1  # nothing agrees by being zero
        scaling = scaling_of(policy.rope_scaling)
        frequencies = inverse_frequencies(policy.head_dim, policy.rope_theta, scaling)
        np.testing.assert_allclose(frequencies, theirs["inv_freq"], rtol=1e-5)
        magnitude = scaling.magnitude if isinstance(scaling, YarnScaling) else 1.0
        np.testing.assert_allclose(magnitude, theirs["magnitude"], rtol=1e-6)


def test_what_we_write_is_what_transformers_reads(checkpoints: Path, tmp_path: Path):
    """Export of every case, sharded where the original is: the same logits, nothing amiss."""
    folders = {}
    for name, case in CASES.items():
        policy = opened(checkpoints / name)
        folders[name] = str(folder := tmp_path / name)
        folder.mkdir()
        tensors = to_hf(load(checkpoints / name, policy, dtype=None))
        names = write(folder, tensors, shard_bytes=40_000 if "shard" in case else 1 << 30)
        assert len(names) > 1 if "shard" in case else names == ["model.safetensors"]
        shutil.copy(checkpoints / name / "config.json", folder)
        again = load(folder, policy, dtype=None)
        for key, tensor in to_hf(again).items():
            np.testing.assert_array_equal(tensor, tensors[key])
    run_oracle("read", folders, tmp_path, tmp_path / "read.npz")
    with np.load(tmp_path / "read.npz") as found:
        for name, case in CASES.items():
            assert json.loads(str(found[f"{name}/amiss"])) == {}
            assert str(found[f"{name}/dtype"]) == f"torch.{case['dtype']}"
            with np.load(checkpoints / f"{name}.npz") as theirs:
                np.testing.assert_array_equal(found[f"{name}/logits"], theirs["logits"])


def test_bfloat16_is_read_bit_for_bit_and_widened_exactly(checkpoints: Path):
    """MX-20."""
    folder = checkpoints / "qwen3_bfloat16"
    policy = opened(folder)
    kept, wide = load(folder, policy, dtype=None), load(folder, policy)
    narrow = kept["embed"]["embedding"]
    assert narrow.dtype == ml_dtypes.bfloat16 and wide["embed"]["embedding"].dtype == np.float32
    raw = np.frombuffer((folder / "model.safetensors").read_bytes(), np.uint8)
    header = int.from_bytes(raw[:8].tobytes(), "little")
    start, end = json.loads(raw[8 : 8 + header].tobytes())["model.embed_tokens.weight"][
        "data_offsets"
    ]
    bits = raw[8 + header + start : 8 + header + end].view(np.uint16)
    np.testing.assert_array_equal(narrow.view(np.uint16).ravel(), bits)
    widened = (wide["embed"]["embedding"].ravel().view(np.uint32) >> 16).astype(np.uint16)
    np.testing.assert_array_equal(widened, bits)


def test_biases_that_are_zeroed_change_the_logits(checkpoints: Path):
    """MX-06: or the oracle would not notice that neither side used them."""
    folder = checkpoints / "qwen2_sharded"
    policy = opened(folder)
    params = load(folder, policy)
    tokens = np.arange(12)[None]
    before = logits(policy, params, tokens)
    for layer in params["layers"].values():
        for part in "qkv":
            layer["attention"][part]["bias"] = np.zeros_like(layer["attention"][part]["bias"])
    assert np.abs(np.asarray(before - logits(policy, params, tokens))).max() > 1e-2


# Tied embeddings --------------------------------------------------------------------------------


def repeat_embedding(folder: Path, policy: PolicyConfig, change: float = 0.0) -> None:
    tensors = to_hf(load(folder, policy))
    head = tensors["model.embed_tokens.weight"].copy()
    head[0, 0] += change
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    write(folder, tensors | {"lm_head.weight": head})


def test_a_tied_file_that_repeats_its_embedding_loads_as_tied(copy):
    """MX-02."""
    folder = copy("qwen2_sharded")
    policy = opened(folder)
    repeat_embedding(folder, policy)
    assert opened(folder).tied_embeddings
    params = load(folder, policy)
    assert "unembed" not in params and "lm_head.weight" not in to_hf(params)


def test_a_tied_file_with_another_lm_head_is_refused(copy):
    folder = copy("qwen2_sharded")
    policy = opened(folder)
    repeat_embedding(folder, policy, change=1.0)
    with pytest.raises(CheckpointError, match="lm_head.weight differs .* tie_word_embeddings"):
        load(folder, policy)


# Broken files -----------------------------------------------------------------------------------


def test_a_missing_shard_is_named_before_anything_is_computed(copy):
    """MX-18."""
    folder = copy("qwen2_sharded")
    victim = sorted(folder.glob("model-*.safetensors"))[1]
    victim.unlink()
    with pytest.raises(CheckpointError, match=f"lacks {victim.name}, of .* shards"):
        opened(folder)


@pytest.mark.parametrize("kept", [0.5, 0.0])
def test_a_shard_that_is_cut_short_is_named(copy, kept: float):
    """MX-18."""
    folder = copy("qwen2_sharded")
    victim = sorted(folder.glob("model-*.safetensors"))[1]
    whole = victim.read_bytes()
    victim.write_bytes(whole[: int(len(whole) * kept)])
    with pytest.raises(CheckpointError, match=f"{victim.name} .* is cut short"):
        opened(folder)


def test_an_index_cannot_lead_out_of_its_folder(copy):
    folder = copy("qwen2_sharded")

    def lead_out(index: dict) -> None:
        index["weight_map"]["model.norm.weight"] = "../llama3/model.safetensors"

    rewrite(folder / INDEX, lead_out)
    with pytest.raises(CheckpointError, match="names files elsewhere"):
        opened(folder)


def test_all_tensors_amiss_are_one_error_before_loading(copy):
    folder = copy("llama_untied")
    rewrite(folder / "config.json", lambda c: c.update(num_hidden_layers=4, intermediate_size=50))
    with pytest.raises(CheckpointError) as error:
        opened(folder)
    assert "missing model.layers.3.self_attn.q_proj.weight [32, 32]" in str(error.value)
    wide = "model.layers.0.mlp.up_proj.weight is [48, 32], the model's is [50, 32]"
    assert wide in str(error.value) and str(folder) in str(error.value)


def test_an_untied_config_without_lm_head_is_refused_at_once(copy):
    """MX-01, the other way round."""
    folder = copy("qwen2_sharded")
    rewrite(folder / "config.json", lambda c: c.update(tie_word_embeddings=False))
    with pytest.raises(CheckpointError, match=r"missing lm_head.weight \[320, 32\]"):
        opened(folder)
    with pytest.raises(LayoutError):
        load(folder, PolicyConfig(vocab_size=320, tied_embeddings=False))


def test_integer_tensors_are_refused_by_name(copy):
    folder = copy("llama_untied")
    tensors = to_hf(load(folder, opened(folder)))
    norm = tensors["model.norm.weight"].astype(np.int8)
    write(folder, tensors | {"model.norm.weight": norm})
    with pytest.raises(CheckpointError, match="model.norm.weight is I8"):
        opened(folder)


def test_a_checkpoint_that_is_nowhere_is_one_clear_error(tmp_path: Path):
    with pytest.raises(CheckpointError, match="there is no such folder"):
        find(str(tmp_path / "absent"))
    with pytest.raises(CheckpointError, match="neither a folder nor on the hub nor in its cache"):
        find("nobody/no-such-model")
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(CheckpointError, match="is no JSON object"):
        read_config(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config.json cannot be read"):
        opened(tmp_path)
