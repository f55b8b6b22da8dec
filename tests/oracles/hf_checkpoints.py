"""Checkpoints by Hugging Face's own code, in a process of its own.

    python -I hf_checkpoints.py make CASES.json FOLDER    writes FOLDER/NAME/ and FOLDER/NAME.npz
    python -I hf_checkpoints.py read FOLDERS.json OUT.npz

`make` saves a random model a case ({model_type, config, dtype, shard}) beside what it computes from
the saved weights in float32: `logits` of `tokens`, `inv_freq` and `magnitude` of its rotation.
`read` loads folders and gives the logits of the same tokens (`NAME/logits`), the dtype that the
model says it has, and the names that loading found missing or unexpected (`NAME/amiss`).

Isolated (-I), so that this project's `kernels` does not shadow the package of that name which
transformers looks for.
"""

import json
import sys
from pathlib import Path

import numpy as np

LENGTH = 64


def tokens_for(vocab_size: int) -> np.ndarray:
    return np.random.default_rng(7).integers(0, vocab_size, (1, LENGTH))


def make(cases_path: str, folder: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    for name, case in json.loads(Path(cases_path).read_text()).items():
        config = AutoConfig.for_model(case["model_type"], **case["config"])
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        generator = torch.Generator().manual_seed(len(name))
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                # Nothing at its initial value: a mistake with a bias of 0 does not show.
                std = 0.3 if parameter.ndim == 1 else parameter.shape[-1] ** -0.5
                mean = 1.0 if "norm" in parameter_name else 0.0
                draw = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(draw * std + mean)
        model = model.to(getattr(torch, case["dtype"])).eval()
        model.save_pretrained(Path(folder) / name, max_shard_size=case.get("shard", "1GB"))
        rotary = model.model.rotary_emb
        np.savez(
            Path(folder) / f"{name}.npz",
            logits=logits(model.to(torch.float32), config.vocab_size),
            tokens=tokens_for(config.vocab_size),
            inv_freq=rotary.inv_freq.numpy(),
            magnitude=rotary.attention_scaling,
        )


def read(folders_path: str, out: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    found = {}
    for name, folder in json.loads(Path(folders_path).read_text()).items():
        model, info = AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation="eager", dtype="auto", output_loading_info=True
        )
        found[f"{name}/dtype"] = np.asarray(str(model.dtype))
        amiss = {kind: sorted(map(str, value)) for kind, value in info.items() if value}
        found[f"{name}/amiss"] = np.asarray(json.dumps(amiss))
        found[f"{name}/logits"] = logits(model.to(torch.float32).eval(), model.config.vocab_size)
    np.savez(out, **found)


def logits(model, vocab_size: int) -> np.ndarray:
    import torch

    tokens = torch.from_numpy(tokens_for(vocab_size))
    with torch.no_grad():
        return model(input_ids=tokens, use_cache=False).logits.float().numpy()


if __name__ == "__main__":
    # Built for another torch, these fail on import; a language model needs none of them.
    for blocked in ("torchvision", "torchaudio", "torchcodec"):
        sys.modules[blocked] = None  # type: ignore[assignment]
    import torch

    torch.set_num_threads(1)
    {"make": make, "read": read}[sys.argv[1]](*sys.argv[2:])
