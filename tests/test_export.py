"""From a checkpoint through a run to an export: what a server gets is what was trained."""

import contextlib
import dataclasses
import importlib.util
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from telescope_jax import config_tree
from telescope_jax import export as export_command
from telescope_jax.chat import CharTokenizer
from telescope_jax.config import Config, PolicyConfig
from telescope_jax.export import ExportError, export
from telescope_jax.hf_tokenizer import HfTokenizer
from telescope_jax.learner.checkpoint import Checkpoints
from telescope_jax.model.decoder import Decoder
from telescope_jax.pretrained import StartError, open_start
from telescope_jax.run import run
from telescope_jax.weights.hf_config import hf_config_of
from telescope_jax.weights.hf_files import load, open_checkpoint, write
from telescope_jax.weights.hf_layout import hf_shapes, to_hf
from tests.tokenizer_folder import make_folder
from tests.weights.hf_cases import logits, run_oracle

if importlib.util.find_spec("transformers") is None:
    pytest.skip("transformers is not installed", allow_module_level=True)

SIZES = PolicyConfig(width=32, layers=2, heads=4, kv_heads=2, head_dim=8, mlp_width=48)
ROWS = 320  # of the model; the tokenizer has 260 (MX-21)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied Qwen2 of random weights, with a tokenizer and two ends."""
    folder = make_folder(tmp_path_factory.mktemp("start") / "tiny", generation=[258, 259])
    params = jax.jit(Decoder(SIZES, ROWS).init)(jax.random.key(0))
    write(folder, {name: np.asarray(x) for name, x in to_hf(params).items()})
    described = hf_config_of(SIZES, ROWS, 256) | {"dtype": "float32", "eos_token_id": 258}
    (folder / "config.json").write_text(json.dumps(described))
    return folder


def config_for(checkpoint: Path) -> Config:
    config = Config(number_of_steps=2, groups_per_batch=2, group_size=2, eval_every=0)
    config.policy.checkpoint = str(checkpoint)
    config.sampling.max_prompt_tokens = 64
    config.sampling.max_tokens = 4
    config.loss.drop_zero_advantage = False  # random weights earn nothing
    config.loss.entropy_coef = 1e-3  # and must move nevertheless
    config.optimizer.learning_rate = 1e-2
    config.batch.seq_len = 128
    config.batch.rows_per_microbatch = 2
    config.mesh.fsdp = 2  # MX-05: a tied model on two devices
    config.engine.own_process = False
    config.engine.slots = 4
    config.engine.prefill_rows = 4
    config.eval.items = 2
    config.eval.at_start = False
    return config


@pytest.fixture(scope="module")
def workdir(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of two steps."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    assert run(config_for(checkpoint), "test.py", str(folder)) == 0
    return folder


def test_an_export_holds_the_trained_weights_and_the_files_of_its_start(
    checkpoint: Path, workdir: Path, tmp_path: Path
):
    """MX-05, 21, 24, 26, 27."""
    said = export(workdir, to := tmp_path / "out", dtype="bfloat16")
    assert "step 2" in said and "bfloat16" in said
    assert sorted(path.name for path in to.iterdir()) == sorted(
        path.name for path in checkpoint.iterdir()
    )
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (to / name).read_bytes() == (checkpoint / name).read_bytes()
    before, after = (json.loads((f / "config.json").read_text()) for f in (checkpoint, to))
    assert after == before | {"dtype": "bfloat16"}

    policy, _ = open_checkpoint(PolicyConfig(checkpoint=str(to)))
    tensors = to_hf(load(to, policy, dtype=None))
    start = to_hf(load(checkpoint, policy))
    assert {str(x.dtype) for x in tensors.values()} == {"bfloat16"}
    assert {name: x.shape for name, x in tensors.items()} == hf_shapes(load(checkpoint, policy))
    assert tensors["model.embed_tokens.weight"].shape[0] == ROWS
    assert "lm_head.weight" not in tensors
    moved = [name for name in start if not np.allclose(tensors[name].astype("f4"), start[name])]
    assert len(moved) > len(start) / 2, "the export holds the start, not what was trained"

    ours, theirs = HfTokenizer(checkpoint), HfTokenizer(to)
    for text in ("What is 1 + 2?", "hi <|im_end|>", ""):
        assert ours.prompt(text) == theirs.prompt(text)
    assert ours.eos_ids == theirs.eos_ids == (258, 259)


def test_transformers_loads_an_export_with_our_logits(workdir: Path, tmp_path: Path):
    """MX-05."""
    export(workdir, to := tmp_path / "out", dtype="float32")
    run_oracle("read", {"out": str(to)}, tmp_path, tmp_path / "read.npz")
    policy, _ = open_checkpoint(PolicyConfig(checkpoint=str(to)))
    tokens = np.random.default_rng(7).integers(0, ROWS, (1, 64))  # the oracle's
    with np.load(tmp_path / "read.npz") as found:
        assert json.loads(str(found["out/amiss"])) == {}
        assert str(found["out/dtype"]) == "torch.float32"
        ours = logits(policy, load(to, policy), tokens)
        np.testing.assert_allclose(ours, found["out/logits"], atol=1e-4)


def test_a_run_kept_in_bfloat16_exports_the_very_bits_of_its_checkpoint(
    checkpoint: Path, tmp_path: Path
):
    """Import, training beside an engine, checkpoint, resume, export and import again."""
    config = config_for(checkpoint)
    config.optimizer.master_dtype = "bfloat16"
    config.loss.reference_kl_coef = 0.01
    for config.number_of_steps in (1, 2):
        assert run(config, "test.py", str(tmp_path / "run")) == 0
    export(tmp_path / "run", to := tmp_path / "out", dtype="bfloat16")
    policy, _ = open_checkpoint(PolicyConfig(checkpoint=str(to)))
    found = load(to, policy, "bfloat16")
    structure = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), found)
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints", keep_last=9)
    step, kept = checkpoints.restore_params(structure) or (0, None)
    checkpoints.close()
    assert step == 2
    jax.tree.map(np.testing.assert_array_equal, found, jax.device_get(kept))
    start = load(checkpoint, policy, "bfloat16")
    moved = jax.tree.map(lambda a, b: bool((a != b).any()), found, start)
    assert sum(jax.tree.leaves(moved)) > len(jax.tree.leaves(moved)) / 2

    config.optimizer.master_dtype = "float32"
    assert run(config, "test.py", str(tmp_path / "run")) == 2, "another dtype is another run"


def test_a_run_of_random_weights_exports_too(tmp_path: Path):
    config = Config(policy=dataclasses.replace(SIZES, family="llama", tied_embeddings=False))
    vocab_size = CharTokenizer().vocab_size
    params = jax.jit(Decoder(config.policy, vocab_size).init)(jax.random.key(0))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text(config_tree.to_json(config))
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints", keep_last=1)
    checkpoints.save({"params": params, "step": 3})
    checkpoints.close()
    said = export(tmp_path / "run", to := tmp_path / "out", dtype="float32")
    assert "step 3" in said and "no tokenizer" in said
    policy, _ = open_checkpoint(PolicyConfig(checkpoint=str(to)))
    assert (policy.family, policy.width, policy.vocab_size) == ("llama", 32, vocab_size)
    jax.tree.map(np.testing.assert_array_equal, load(to, policy), jax.device_get(params))
    huge = jax.tree.map(lambda x: x * 1e6, params)
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints", keep_last=1)
    checkpoints.save({"params": huge, "step": 4})
    checkpoints.close()
    with pytest.raises(ExportError, match="which float16 cannot hold; export as float32"):
        export(tmp_path / "run", tmp_path / "f16", dtype="float16")
    assert not (tmp_path / "f16").exists()


def test_what_cannot_be_exported_is_one_line_and_leaves_nothing(
    workdir: Path, tmp_path: Path, capsys
):
    with pytest.raises(ExportError, match="no checkpoint of step 7; there are"):
        export(workdir, tmp_path / "out", dtype="float32", step=7)
    with pytest.raises(ExportError, match="holds no run"):
        export(tmp_path, tmp_path / "out", dtype="float32")
    with pytest.raises(ExportError, match="exists already"):
        export(workdir, workdir, dtype="float32")
    below_a_file = workdir / "config.json" / "out"
    with pytest.raises(ExportError, match=r"out was not made: .*Not a directory"):
        export(workdir, below_a_file, dtype="float32")
    assert list(tmp_path.iterdir()) == []
    assert export_command.main([f"--workdir={tmp_path}", f"--to={tmp_path / 'x'}"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    with contextlib.suppress(SystemExit):
        export_command.main(["--workdir=x", "--to=y", "--dtype=bf61"])
    assert "bfloat16" in capsys.readouterr().err


# What a run refuses before it has a folder ------------------------------------------------------


def test_sizes_come_from_the_checkpoint_and_rules_are_checked_on_them(checkpoint: Path):
    config = config_for(checkpoint)
    found, tokenizer, folder = open_start(config)
    assert folder == checkpoint and tokenizer.vocab_size == 260
    assert (found.policy.width, found.policy.vocab_size) == (32, ROWS)
    assert config.policy.width == 128, "the caller's config is another object"
    config.mesh.tensor = 4
    config.check()  # the sizes are not known yet
    with pytest.raises(StartError, match="policy.kv_heads=2 does not divide over mesh.tensor=4"):
        open_start(config)


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (lambda c, f: setattr(c.policy, "layers", 5), "policy.layers=5, the checkpoint has 2"),
        (lambda c, f: (f / "model.safetensors").unlink(), "holds neither model.safetensors"),
        (lambda c, f: (f / "tokenizer.json").unlink(), "tokenizer"),
        (lambda c, f: setattr(c.policy, "chat_template", "absent"), "policy.chat_template=absent"),
    ],
)
def test_a_start_that_cannot_work_is_refused_before_there_is_a_folder(
    break_it, words: str, checkpoint: Path, tmp_path: Path, capsys
):
    """MX-18, TK-09: exit code 2, one message, no run folder."""
    copy = Path(shutil.copytree(checkpoint, tmp_path / "copy"))
    config = config_for(copy)
    break_it(config, copy)
    assert run(config, "test.py", str(tmp_path / "run")) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
