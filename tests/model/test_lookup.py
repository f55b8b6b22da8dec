"""The embedding's lookup in bfloat16: half the bytes, and the gradient of float32 all the same."""

from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from telescope_jax import hlo
from telescope_jax.config import MeshConfig
from telescope_jax.model.lookup import look_up
from telescope_jax.sharding import constrain, make_mesh

V, D, NARROW = 256, 48, jnp.dtype("bfloat16")
MESHES = [MeshConfig(fsdp=4, tensor=2), MeshConfig(data=2, fsdp=2, context=2)]


def cast_after(table, tokens, dtype, pin):
    """What it replaces: the gradient that adds up in float32 by itself."""
    return jnp.take(pin(table, "table"), tokens, axis=0).astype(dtype)


def placed(mesh):
    rng = np.random.default_rng(0)
    split = ("fsdp", "context") if mesh.shape["context"] > 1 else "fsdp"
    rows = P(("data", "fsdp"), "context")
    tokens = rng.integers(0, V // 8, (8, 32)).astype(np.int32)  # each of them is used again
    return (
        jax.device_put(rng.normal(size=(V, D)).astype(np.float32), on(mesh, P("tensor", split))),
        jax.device_put(tokens, on(mesh, rows)),
        jax.device_put(rng.normal(size=(8, 32, D)).astype(NARROW), on(mesh, P(*rows, None))),
    )


def on(mesh, spec: P) -> NamedSharding:
    return NamedSharding(mesh, spec)


@pytest.mark.parametrize("mesh_config", MESHES, ids=str)
def test_values_and_gradient_are_bit_for_bit_those_of_a_cast_after_the_lookup(mesh_config):
    mesh = make_mesh(mesh_config)
    table, tokens, cotangent = placed(mesh)

    def both(way):
        pin = constrain(mesh)

        @jax.jit
        def run(table, tokens, cotangent):
            values, pull = jax.vjp(lambda t: pin(way(t, tokens, NARROW, pin), "residual"), table)
            return values, *pull(cotangent)

        values, gradient = run(table, tokens, cotangent)
        return np.asarray(values).view(np.uint16), np.asarray(gradient)

    (values, gradient), (expected_values, expected) = both(look_up), both(cast_after)
    np.testing.assert_array_equal(values, expected_values)
    np.testing.assert_array_equal(gradient, expected)
    assert gradient.dtype == np.float32
    # A sum in bfloat16 would be another one, so the comparison can fail.
    narrow = jnp.zeros((V, D), NARROW).at[np.asarray(tokens)].add(np.asarray(cotangent))
    assert (np.asarray(narrow, np.float32) != expected).any()


@pytest.fixture
def never_cached() -> Iterator[None]:
    """A program that is read from the compilation cache passes through no pass."""
    name = "jax_persistent_cache_min_compile_time_secs"
    before = jax.config.values[name]
    jax.config.update(name, 1e9)
    yield
    jax.config.update(name, before)


@pytest.mark.usefixtures("never_cached")
def test_what_is_gathered_over_fsdp_is_bfloat16(tmp_path: Path):
    """Of the partitioned program: a CPU's own passes then widen every bfloat16 collective."""
    mesh = make_mesh(MESHES[0])
    table, tokens, _ = placed(mesh)
    gathered = []
    for number, way in enumerate((cast_after, look_up)):
        folder = tmp_path / str(number)

        def forward(table, way=way):
            return constrain(mesh)(way(table, tokens, NARROW, constrain(mesh)), "residual")

        jax.jit(forward).lower(table).compile(
            compiler_options={"xla_dump_to": str(folder), "xla_dump_hlo_pass_re": "spmd.*"}
        )
        (text,) = [path.read_text() for path in folder.glob("*after_spmd-partitioning*")]
        gathered.append(hlo.count(text).collectives["all-gather"])
    assert gathered == [(1, 4.0 * V // 2 * D), (1, 2.0 * V // 2 * D)]
