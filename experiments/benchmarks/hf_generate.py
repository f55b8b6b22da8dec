"""Sampling with transformers' own `generate`, for engines.py; a program of its own.

    python -I hf_generate.py FOLDER PROMPTS.npy DTYPE TOKENS REPEATS

Prints JSON: the seconds of each repeat after one that warms up. Isolated (-I), so that this
project's `kernels` does not shadow the package of that name which transformers looks for.
"""

import json
import sys
import time

import numpy as np


def main(folder: str, prompts_path: str, dtype: str, tokens: int, repeats: int) -> None:
    # Built for another torch, these fail on import; a language model needs none of them.
    for name in ("torchvision", "torchaudio", "torchcodec"):
        sys.modules[name] = None  # type: ignore[assignment]
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    prompts = torch.from_numpy(np.load(prompts_path)).long()
    took = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        with torch.inference_mode():
            made = model.generate(  # pyright: ignore[reportAttributeAccessIssue]: its own protocol
                prompts,
                attention_mask=torch.ones_like(prompts),
                do_sample=True,
                top_k=0,
                min_new_tokens=tokens,
                max_new_tokens=tokens,
                pad_token_id=0,
            )
        took.append(time.perf_counter() - started)
        assert made.shape[1] == prompts.shape[1] + tokens
    print(json.dumps(took[1:]))


if __name__ == "__main__":
    folder, dtype, prompts_path, tokens, repeats = sys.argv[1:]
    main(folder, dtype, prompts_path, int(tokens), int(repeats))
