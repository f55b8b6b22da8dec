"""The plan's numbers: of a program that is compiled here, and of texts made by hand."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from telescope_jax import flags, plan
from telescope_jax.config import Config
from telescope_jax.plan import CHIPS, GIB, OutOfMemory, Program
from telescope_jax.sharding import make_mesh

ROOT = Path(__file__).resolve().parents[1]


def tiny(**mesh: int) -> Config:
    config = flags.read(["", f"--config={ROOT / 'experiments' / 'math.py'}:tiny"])[0].config
    for axis, size in mesh.items():
        setattr(config.mesh, axis, size)
    config.batch.rows_per_microbatch = 8
    return config


def test_a_plan_of_devices_that_are_here_counts_their_very_bytes():
    config = tiny(fsdp=4, tensor=2)
    params, programs = plan.compile_update(config, 32, make_mesh(config.mesh))
    accumulate, apply = programs["accumulate"], programs["apply"]
    assert isinstance(accumulate, Program) and isinstance(apply, Program)
    from telescope_jax.model.decoder import Decoder

    shapes = jax.eval_shape(Decoder(config.policy, 32).init, jax.random.key(0))
    assert params == sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(shapes))
    # Split over fsdp and tensor but for norms and biases: between an eighth and a third.
    whole = 4 * params
    assert whole / 8 < apply.arguments / 4 < whole / 3
    # New parameters take the place of the gradient, which is donated; the old ones stay.
    assert apply.outputs < whole / 16
    assert accumulate.flops > 6 * params * 8 * config.batch.seq_len / 8 / 2
    kinds = accumulate.collectives
    assert sum(count for count, _ in kinds.values()) > 0 and "all-reduce" in kinds
    text, fits = plan.report(config, "v5e:2x4", 8, params, programs, CHIPS["v5e"], 0.5)
    assert fits and text.endswith("it fits")
    assert "data 1 × fsdp 4 × tensor 2" in text


def test_narrow_parameters_halve_their_bytes_in_a_plan_and_no_others():
    sizes, stated = {}, {}
    for dtype in ("float32", "bfloat16"):
        config = tiny(fsdp=4)
        config.optimizer.master_dtype = dtype
        params, programs = plan.compile_update(config, 32, make_mesh(config.mesh))
        sizes[dtype] = {n: p.arguments for n, p in programs.items() if isinstance(p, Program)}
        stated[dtype] = plan.state_bytes(config, params)
        whole = params / 4
    for name in ("accumulate", "apply"):
        saved = sizes["float32"][name] - sizes["bfloat16"][name]
        assert 2 * whole < saved < 2.2 * whole, "norms and biases are whole on each device"
    assert stated["float32"] - stated["bfloat16"] == 2 * params


def test_times_follow_the_data_sheet():
    chip = plan.Chip(flops=100.0, memory=1.0, memory_bytes_per_s=10.0, link_bytes_per_s=5.0)
    program = Program(0, 0, 0, 0.0, 20.0, {"all-gather": (3, 15.0)}, 0)
    assert plan.predicted_s(program, chip, 200.0, 0.5) == {
        "arithmetic": 4.0,
        "memory": 2.0,
        "links": 3.0,
    }


def test_microbatches_hold_every_episode_at_its_longest():
    config = tiny()
    config.groups_per_batch, config.group_size = 10, 8
    config.batch.seq_len, config.batch.rows_per_microbatch = 60, 4
    assert config.context() == 24
    assert plan.microbatches(config) == 10  # two episodes a row, four rows a microbatch


def test_what_lies_beside_a_program_counts_too():
    """Adam's moments are no argument of the backward pass, and in memory all the same."""
    config = tiny()
    accumulate = Program(6 * GIB, 3 * GIB, 0, 1.0, 1.0, {}, 0, beside=7 * GIB)
    one = {"accumulate": accumulate}
    text, fits = plan.report(config, "v5e:1x1", 1, 10, one, CHIPS["v5e"], 0.5)
    assert not fits and "16.00 of 15.75 GiB" in text and "7.00 beside it" in text


def test_the_reference_policy_and_the_passes_that_score_count_too():
    """A run that keeps one was told that it fits where its memory ran out."""
    config = tiny(fsdp=4)
    mesh = make_mesh(config.mesh)
    alone = {
        n: p for n, p in plan.compile_update(config, 32, mesh)[1].items() if isinstance(p, Program)
    }
    config.loss.reference_kl_coef = 0.1
    config.loss.old_logprobs, config.batch.minibatches = True, 2
    params, apart = plan.compile_update(config, 32, mesh)
    assert list(alone) == ["accumulate", "apply"] and list(apart) == ["score", *alone]
    beside = {name: one.beside for name, one in apart.items() if isinstance(one, Program)}
    state = alone["accumulate"].beside  # Adam's two moments
    copies = beside["accumulate"] - state
    assert copies == pytest.approx(state, rel=0.01), "the reference, and what the batch met"
    assert beside == {"score": state + copies / 2, "accumulate": state + copies, "apply": copies}
    assert alone["apply"].beside == 0
    score, accumulate = apart["score"], apart["accumulate"]
    assert isinstance(score, Program) and isinstance(accumulate, Program)
    assert 2 * score.flops < accumulate.flops < 5 * score.flops
    text, _ = plan.report(config, "v5e:2x2", 4, params, apart, CHIPS["v5e"], 0.5)
    assert "scored 2 times before, and 2 updates" in text


@pytest.mark.parametrize("mfu", ["0", "-0.5", "1.5", "inf"])
def test_a_share_that_is_none_is_refused(mfu: str, capsys):
    study = f"--config={ROOT / 'experiments' / 'qwen2p5.py'}"
    with pytest.raises(SystemExit) as ended:
        plan.main(["", study, "--topology=v5e:4x4", f"--mfu={mfu}"])
    assert ended.value.code == 2 and "above 0, and 1 at most" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: setattr(c.policy, "compute_dtype", "float32"), "policy.compute_dtype=bfloat16"),
        (lambda c: setattr(c.policy, "remat", "none"), "policy.remat=block"),
        (lambda c: setattr(c.batch, "rows_per_microbatch", 64), "rows_per_microbatch=32"),
        (lambda c: None, "optimizer.master_dtype=bfloat16"),
        (lambda c: setattr(c.mesh, "data", 2), "mesh.data=1 with mesh.fsdp=2"),
        (lambda c: None, "a larger slice"),
    ],
)
def test_what_does_not_fit_is_told_what_to_change(change, words):
    config = tiny()
    config.policy.compute_dtype, config.policy.remat = "bfloat16", "block"
    config.batch.rows_per_microbatch = 1
    change(config)
    refused = {"accumulate": OutOfMemory("20.1G of 15.75G")}
    text, fits = plan.report(config, "v5e:1x1", 1, 10, refused, CHIPS["v5e"], 0.5)
    assert not fits and "20.1G of 15.75G" in text and words in text


@pytest.mark.parametrize(("variant", "parameters"), [("7b", 7.6), ("32b", 32.8)])
def test_the_sizes_in_a_study_are_those_of_its_name(variant: str, parameters: float):
    config = flags.read(["", f"--config={ROOT / 'experiments' / 'qwen2p5.py'}:{variant}"])[0].config
    policy = config.policy
    head = 2 * policy.vocab_size * policy.width
    attention = 2 * policy.width * policy.head_dim * (policy.heads + policy.kv_heads)
    billions = (head + policy.layers * (attention + 3 * policy.width * policy.mlp_width)) / 1e9
    assert round(billions, 1) == parameters


def test_a_topology_that_nobody_makes_is_refused(capsys):
    study = f"--config={ROOT / 'experiments' / 'qwen2p5.py'}"
    with pytest.raises(SystemExit) as ended:
        plan.main(["", study, "--topology=v99:4x4"])
    assert ended.value.code == 2 and "none of v4, v5e, v5p, v6e" in capsys.readouterr().err


@pytest.mark.tpu_compile
@pytest.mark.deadline(600)
def test_the_command_compiles_for_a_slice_of_tpus():
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed")
    command = [sys.executable, "-m", "telescope_jax.plan", "--topology=v5e:2x2"]
    command += [f"--config={ROOT / 'experiments' / 'math.py'}:tiny", "--config.mesh.fsdp=4"]
    command += ["--config.batch.rows_per_microbatch=4"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "on v5e:2x2 (4 devices): data 1 × fsdp 4 × tensor 1" in done.stdout
    assert "reduce-scatter" in done.stdout or "all-reduce" in done.stdout
