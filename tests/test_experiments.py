"""The studies that need a real model: their trees are right, and their path runs on a tiny one."""

import dataclasses
import importlib.util
import json
from pathlib import Path

import jax
import numpy as np
import pytest

from telescope_jax import flags
from telescope_jax.config import PolicyConfig
from telescope_jax.metrics import read as read_metrics
from telescope_jax.model.decoder import Decoder
from telescope_jax.run import run
from telescope_jax.weights.hf_config import hf_config_of
from telescope_jax.weights.hf_files import write
from telescope_jax.weights.hf_layout import to_hf
from tests.tokenizer_folder import make_folder

ROOT = Path(__file__).resolve().parents[1]
GSM8K = ROOT / "experiments" / "qwen2p5_0p5b_gsm8k.py"


STUDIES = ["smollm2.py", "smollm2.py:short", GSM8K.name, f"{GSM8K.name}:vllm", f"{GSM8K.name}:sizes"]


@pytest.mark.parametrize("study", STUDIES)
def test_the_tree_of_a_study_is_right_before_its_checkpoint_is_known(study: str, capsys):
    with pytest.raises(SystemExit) as ended:
        flags.parse(["", f"--config={ROOT / 'experiments' / study}", "--print_config"])
    assert ended.value.code == 0
    assert "--config.policy.checkpoint=" in capsys.readouterr().out


def test_the_gsm8k_study_needs_the_memory_that_it_says():
    """Its docstring's plan, from the sizes of Qwen2.5-0.5B and the shapes of the config."""
    policy = PolicyConfig(
        vocab_size=151_936,
        width=896,
        layers=24,
        heads=14,
        kv_heads=2,
        head_dim=64,
        mlp_width=4_864,
    )
    shapes = jax.eval_shape(Decoder(policy, policy.vocab_size).init, jax.random.key(0))
    parameters = sum(x.size for x in jax.tree.leaves(shapes))
    config = flags.read(["", f"--config={GSM8K}"])[0].config
    per_token = policy.layers * policy.kv_heads * policy.head_dim * 2 * 2  # keys, values; bfloat16
    cache = config.engine.slots * config.context() * per_token
    said = GSM8K.read_text()
    assert f"{parameters / 1e9:.2f} G parameters" in said
    assert f"{4 * 4 * parameters / 1e9:.1f} GB" in said
    assert f"{cache / 1e9:.1f} GB" in " ".join(said.split())
    shared = flags.read(["", f"--config={GSM8K}:vllm"])[0].config.placement
    assert 4 * 4 * parameters < shared.trainer_memory_fraction * 80e9


def test_the_gsm8k_study_runs_on_a_tiny_qwen2_and_ten_problems(tmp_path: Path):
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    folder = make_folder(tmp_path / "model", generation=[258, 259])
    sizes = PolicyConfig(width=16, layers=1, heads=2, kv_heads=1, head_dim=8, mlp_width=16)
    params = jax.jit(Decoder(sizes, 260).init)(jax.random.key(0))
    write(folder, {name: np.asarray(x) for name, x in to_hf(params).items()})
    (folder / "config.json").write_text(json.dumps(hf_config_of(sizes, 260, 256)))
    problems = [{"question": f"{n} + {n}?", "answer": f"#### {2 * n}"} for n in range(10)]
    (tmp_path / "ten.jsonl").write_text("\n".join(map(json.dumps, problems)))

    config = flags.read(["", f"--config={GSM8K}"])[0].config
    config.policy = dataclasses.replace(config.policy, checkpoint=str(folder))
    config.env.options = {"train_file": str(tmp_path / "ten.jsonl"), "held_out": 0.4}
    config.number_of_steps = 1
    config.optimizer.warmup_steps = 0
    config.groups_per_batch, config.group_size = 2, 2
    config.eval_every = 0
    config.eval.items = 1
    config.eval.at_start = False
    config.sampling.max_prompt_tokens, config.sampling.max_tokens = 128, 8
    config.batch.seq_len, config.batch.rows_per_microbatch = 160, 2
    config.engine.slots, config.engine.prefill_rows = 4, 2
    config.loss.drop_zero_advantage = False  # random weights solve nothing
    config.check()
    assert run(config, str(GSM8K), str(tmp_path / "run")) == 0
    lines = read_metrics(tmp_path / "run" / "metrics" / "metrics.jsonl")
    assert any("eval/gsm8k/accuracy" in line for line in lines)
