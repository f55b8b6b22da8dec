"""Counts of compiled programs: against what is known of them, and of texts made by hand."""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import pytest

from telescope_jax import hlo
from telescope_jax.config import MeshConfig, OptimizerConfig, PolicyConfig
from telescope_jax.learner.loss import LossSettings
from telescope_jax.learner.lowering import abstract_batch, lower_update
from telescope_jax.learner.step import Step
from telescope_jax.model.decoder import Decoder
from telescope_jax.sharding import make_mesh

POLICY = PolicyConfig(width=32, layers=4, heads=4, kv_heads=2, head_dim=8, mlp_width=48)


def program(compiled: jax.stages.Compiled) -> tuple[hlo.Counts, Mapping[str, float]]:
    """Our counts, and the compiler's."""
    text, costs = compiled.as_text(), compiled.cost_analysis()
    assert text is not None and costs is not None
    return hlo.count(text), costs


def update_of(policy: PolicyConfig) -> tuple[hlo.Counts, Mapping[str, float]]:
    """One microbatch, for 8 devices."""
    mesh = make_mesh(MeshConfig(fsdp=4, tensor=2))
    step = Step(
        Decoder(policy, 64, mesh=mesh), mesh, LossSettings(), OptimizerConfig(), temperature=1.0
    )
    return program(lower_update(step, mesh, abstract_batch(mesh, 8, 16))["accumulate"].compile())


def test_a_product_is_two_operations_for_each_of_its_terms():
    a, b = jnp.zeros((3, 8, 16)), jnp.zeros((3, 16, 32))
    compiled = jax.jit(lambda a, b: jnp.einsum("bij,bjk->bik", a, b)).lower(a, b).compile()
    assert program(compiled)[0].flops == 2 * 3 * 8 * 16 * 32


def test_a_loop_counts_as_often_as_it_runs():
    def loop(x, matrices):
        return jax.lax.scan(lambda x, m: (jnp.tanh(x @ m), None), x, matrices)[0]

    compiled = jax.jit(loop).lower(jnp.zeros((8, 16)), jnp.zeros((7, 16, 16))).compile()
    counts, costs = program(compiled)
    assert counts.flops == 7 * 2 * 8 * 16 * 16
    # The reason for all this: should it fail, jax counts loops itself.
    assert costs["flops"] < counts.flops / 2
    # Of the stack, one matrix a turn.
    assert counts.accessed < 7 * 4 * (16 * 16 * 3 + 8 * 16 * 8)


def test_a_loop_of_unknown_length_counts_once_and_is_named():
    def loop(x, turns):
        return jax.lax.fori_loop(0, turns, lambda _, x: jnp.tanh(x @ x), x)

    counts, _ = program(jax.jit(loop).lower(jnp.zeros((16, 16)), 5).compile())
    assert counts.open_loops == 1 and counts.flops == 2 * 16**3


def test_an_update_in_a_loop_does_what_it_does_layer_by_layer():
    """With remat=none a loop gathers a layer a second time, where the unrolled one keeps it."""
    policy = dataclasses.replace(POLICY, remat="block")
    scanned, _ = update_of(dataclasses.replace(policy, scan_layers=True))
    counts, costs = update_of(policy)
    assert scanned.flops == counts.flops
    for kind, (_, size) in counts.collectives.items():
        assert scanned.collectives[kind][1] == pytest.approx(size, rel=0.02), kind
    # The compiler counts what is no product, too.
    assert counts.flops == pytest.approx(costs["flops"], rel=0.25)
    assert counts.accessed == pytest.approx(costs["bytes accessed"], rel=0.02)
    assert scanned.accessed == pytest.approx(counts.accessed, rel=0.25)


def test_collectives_are_counted_with_what_arrives():
    text = """ENTRY %main (x: f32[1,16]) -> f32[2] {
  %a = f32[8,16]{1,0} all-gather(f32[1,16]{1,0} %x), dimensions={0}
  %b = (bf16[4]{0}, bf16[32]{0}) all-gather-start(bf16[4]{0} %y), dimensions={0}
  %b2 = bf16[32]{0} all-gather-done((bf16[4]{0}, bf16[32]{0}) %b)
  %c = (f32[10]{0}, f32[20]{0}) all-reduce(f32[10]{0} %p, f32[20]{0} %q), to_apply=%add
  %d = f32[2]{0} reduce-scatter(f32[16]{0} %r), dimensions={0}
  ROOT %e = f32[2]{0} add(f32[2]{0} %d, f32[2]{0} %d)
}
"""
    assert hlo.count(text).collectives == {
        "all-gather": (2, 8 * 16 * 4 + 64),
        "all-reduce": (1, 120),
        "reduce-scatter": (1, 8),
    }


@pytest.mark.parametrize(
    ("started", "arrive"),
    [
        ("(bf16[4]{0}, bf16[32]{0}) all-gather-start(%x)", 64),
        ("((f32[4]{0}, f32[2,2]{1,0}), (f32[8]{0}, f32[4,2]{1,0})) all-gather-start(%x, %y)", 64),
        ("(f32[10]{0:T(128)S(1)}, f32[20]{0}) all-reduce-start(%x, %y), to_apply=%add", 120),
        ("f32[10]{0} all-reduce-start(%x), to_apply=%add", 40),
        ("((f32[16]{0}), f32[2]{0}, s32[]{:S(2)}) reduce-scatter-start(%x), to_apply=%add", 8),
        ("(f32[6]{0}, f32[6]{0}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%x)", 24),
    ],
)
def test_what_is_started_arrives_without_its_operands(started: str, arrive: int):
    """Of several in one the largest alone was counted, and of a reduce-scatter what it reads."""
    text = f"ENTRY %main (x: f32[4]) -> f32[] {{\n  %a = {started}, channel_id=1\n}}\n"
    [(number, size)] = hlo.count(text).collectives.values()
    assert (number, size) == (1, arrive)


def test_the_computation_of_another_thread_ends_where_it_ends():
    """Else all that follows it, ENTRY too, was read as its own lines."""
    text = """%host (p: f32[4,8]) -> f32[4,8] {
  ROOT %p = f32[4,8]{1,0} parameter(0)
}, execution_thread="host"

ENTRY %main (x: f32[4,8]) -> f32[4,4] {
  %x = f32[4,8]{1,0} parameter(0)
  ROOT %d = f32[4,4]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={1}
}
"""
    assert hlo.count(text).flops == 2 * 4 * 4 * 8
    with pytest.raises(ValueError, match="ENTRY"):
        hlo.count(text.partition("ENTRY")[0])


TPU_LOOP = """%cond (c: (s32[], f32[4])) -> pred[] {
  %c = (s32[]{:T(128)}, f32[4]{0:T(128)S(1)}) parameter(0)
  %n = s32[]{:T(128)} constant(24), backend_config={"flag_configs":[]}
  %i = s32[]{:T(128)} get-tuple-element(%c), index=0
  ROOT %lt = pred[]{:T(512)} compare(%i, %n), direction=LT
}

%async_collective_fusion (p: bf16[8,4], q: bf16[8,16]) -> (bf16[8,16], bf16[8,16]) {
  %p = bf16[8,4]{1,0} parameter(0)
  %q = bf16[8,16]{1,0:T(8,128)S(1)} parameter(1)
  %all-gather.2 = bf16[8,16]{1,0} all-gather(%p), channel_id=1, dimensions={1}
  %c = f32[2048,128,3]{0,1,2} convolution(%x, %y), window={size=2 pad=1_1}, dim_labels=bf0_i0o->bf0
  ROOT %t = (bf16[8,16]{1,0}, bf16[8,16]{1,0}) tuple(%all-gather.2, %q)
  %x = bf16[2048,64,2]{0,1,2} parameter(2)
  %y = bf16[64,2,128]{0,1,2} parameter(3)
}

%body (b: (s32[], f32[4])) -> (s32[], f32[4]) {
  %b = (s32[]{:T(128)}, f32[4]{0:T(128)S(1)}) parameter(0)
  %kernel = f32[4]{0} custom-call(%b), custom_call_target="tpu_custom_call", backend_config={
}}, metadata={}
  %step = (bf16[8,16]{1,0}, bf16[8,16]{1,0}) fusion(%g, %g), calls=%async_collective_fusion
  %g = bf16[8,4]{1,0} constant({...})
  ROOT %r = (s32[]{:T(128)}, f32[4]{0:T(128)S(1)}) tuple(%b, %b)
}

%start (p.1: bf16[8,4]) -> bf16[8,16] {
  %p.1 = bf16[8,4]{1,0} parameter(0)
  %all-gather.1 = bf16[8,16]{1,0} all-gather(%p.1), channel_id=1, dimensions={1}
  ROOT %s = bf16[8,16]{1,0} custom-call(%all-gather.1), custom_call_target="AsyncCollectiveStart"
}

ENTRY %main (a: bf16[8,4]) -> f32[4] {
  %a = bf16[8,4]{1,0} parameter(0)
  %f = bf16[8,16]{1,0} fusion(%a), kind=kCustom, calls=%start
  %w = (s32[]{:T(128)}, f32[4]{0:T(128)S(1)}) while(%t), condition=%cond, body=%body
  ROOT %o = f32[4]{0} get-tuple-element(%w), index=1
}
"""


def test_a_gather_in_the_background_of_a_tpus_loop_counts_once():
    """It is written in each operation that it runs beside, here 24 times one."""
    counts = hlo.count(TPU_LOOP)
    assert counts.collectives == {"all-gather": (1, 256)} and counts.open_loops == 0
    # As a TPU writes products: of 3 outputs and 2 window places, 4 pairs meet a number.
    assert counts.flops == 24 * 2 * 2048 * 128 * 64 * 4
