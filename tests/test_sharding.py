"""Placement by rules: complete, divisible, and with errors that name everything."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from telescope_jax.config import MeshConfig, PolicyConfig
from telescope_jax.model.decoder import Decoder
from telescope_jax.sharding import (
    bytes_per_device,
    make_mesh,
    path_name,
    place_rows,
    row_parts,
    shardings,
    table,
)

POLICY = PolicyConfig(width=16, layers=1, heads=4, kv_heads=2, head_dim=4, mlp_width=24)


def specs(tree, mesh) -> dict[str, P]:
    placed = jax.tree_util.tree_leaves_with_path(shardings(tree, mesh))
    return {path_name(path): sharding.spec for path, sharding in placed}


def shapes(config: PolicyConfig = POLICY, vocab_size: int = 32):
    return jax.eval_shape(Decoder(config, vocab_size).init, jax.random.key(0))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_rule_covers_every_parameter_of_every_family(family):
    config = PolicyConfig(family=family, tied_embeddings=family == "qwen2")
    found = specs(shapes(config), make_mesh(MeshConfig(1, 2, 2)))
    assert found["layers/0/attention/q/kernel"] == P("fsdp", "tensor")
    assert found["layers/1/mlp/down/kernel"] == P("tensor", "fsdp")
    assert found["layers/0/mlp_norm/scale"] == P()
    matrices = [name for name in found if "kernel" in name or "embedding" in name]
    assert all("fsdp" in found[name] and "tensor" in found[name] for name in matrices)


def test_parameters_without_a_rule_are_all_listed():
    tree = {"novelty": {"a": jnp.zeros((2, 2)), "b": jnp.zeros(3)}, "final_norm": {"scale": 1.0}}
    tree["final_norm"]["scale"] = jnp.zeros(4)
    with pytest.raises(ValueError, match=r"novelty/a \[2, 2\].*novelty/b \[3\]") as error:
        shardings(tree, make_mesh(MeshConfig()))
    assert "final_norm" not in str(error.value)


def test_a_rule_with_more_dimensions_than_the_array_is_refused():
    with pytest.raises(ValueError, match="more dimensions than mlp/up/kernel"):
        shardings({"mlp": {"up": {"kernel": jnp.zeros(4)}}}, make_mesh(MeshConfig()))


def test_adams_moments_lie_where_their_parameters_do_and_counters_everywhere():
    mesh = make_mesh(MeshConfig(1, 2, 2))
    state = jax.eval_shape(optax.adam(1e-3).init, shapes())
    found = specs(state, mesh)
    assert found["0/mu/layers/0/mlp/up/kernel"] == P("fsdp", "tensor")
    assert found["0/nu/embed/embedding"] == P("tensor", "fsdp")
    assert found["0/count"] == P()


def test_an_axis_that_does_not_divide_is_left_out_and_the_table_shows_it():
    mesh, tree = make_mesh(MeshConfig(1, 2, 2)), shapes(vocab_size=31)
    assert specs(tree, mesh)["embed/embedding"] == P(None, "fsdp")
    line = next(line for line in table(tree, mesh).splitlines() if "embed/embedding" in line)
    assert "[31, 16]" in line and line.endswith("-, fsdp")
    assert table(tree, mesh).splitlines()[-1].startswith("2,496 parameters")


def test_too_few_devices_are_an_error_with_both_numbers():
    with pytest.raises(ValueError, match="needs 8 devices and there are 3"):
        make_mesh(MeshConfig(2, 2, 2), jax.devices()[:3])


def test_a_smaller_mesh_takes_the_first_devices():
    mesh = make_mesh(MeshConfig(1, 2, 1))
    assert list(mesh.devices.flat) == jax.devices()[:2]
    assert row_parts(mesh) == 2


def test_rows_are_split_over_data_and_fsdp_and_must_divide():
    mesh = make_mesh(MeshConfig(2, 2, 2))
    placed = place_rows(np.arange(16).reshape(8, 2), mesh)
    assert {shard.data.shape for shard in placed.addressable_shards} == {(2, 2)}
    with pytest.raises(ValueError, match="6 rows does not divide over data × fsdp = 4"):
        place_rows(np.zeros((6, 2)), mesh)
    mesh = make_mesh(MeshConfig(data=2, context=4))
    placed = place_rows(np.arange(32).reshape(4, 8), mesh)
    assert {shard.data.shape for shard in placed.addressable_shards} == {(2, 2)}
    with pytest.raises(ValueError, match="rows of 6 tokens do not divide over mesh.context=4"):
        place_rows(np.zeros((2, 6)), mesh)


def test_parameters_are_split_over_fsdp_and_context_as_far_as_they_divide():
    mesh = make_mesh(MeshConfig(fsdp=2, context=4))
    found = specs(shapes(), mesh)
    assert found["layers/0/mlp/up/kernel"] == P(("fsdp", "context"), "tensor")
    narrow = PolicyConfig(width=12, layers=1, heads=4, kv_heads=2, head_dim=4, mlp_width=24)
    assert specs(shapes(narrow), mesh)["layers/0/mlp/up/kernel"] == P("fsdp", "tensor")


def test_what_a_device_holds_is_its_shards():
    mesh = make_mesh(MeshConfig(fsdp=4, tensor=2))
    whole = jax.ShapeDtypeStruct((8, 16), np.float32, sharding=NamedSharding(mesh, P()))
    split = jax.ShapeDtypeStruct(
        (8, 16), np.float32, sharding=NamedSharding(mesh, P("fsdp", "tensor"))
    )
    assert bytes_per_device({"a": whole, "b": split}) == 512 + 64


class Chip:
    """A TPU as mesh_utils sees one: four in a slice."""

    platform, device_kind, core_on_chip = "tpu", "TPU v5 lite", 0

    def __init__(self, number: int):
        self.id, self.slice_index, self.process_index = number, number // 4, number // 4
        self.coords = (number % 2, number % 4 // 2, 0)


def test_only_copies_of_the_parameters_are_spread_over_slices():
    chips = [Chip(number) for number in range(8)]
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2), chips)
    slices = np.vectorize(lambda chip: chip.slice_index)(mesh.devices)
    first, second = slices[0].ravel(), slices[1].ravel()
    assert (first == first[0]).all() and (second == second[0]).all() and first[0] != second[0]
    with pytest.raises(ValueError, match="mesh.data=1 does not divide over 2 slices"):
        make_mesh(MeshConfig(fsdp=4, tensor=2), chips)
