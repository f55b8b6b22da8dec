"""Logits of Hugging Face's own models, in a process of its own.

    python -I hf_logits.py CASES.npz LOGITS.npz

Isolated (-I), so that this project's `kernels` does not shadow the package of that name which
transformers looks for. CASES holds one JSON list `cases` of {model_type, config} and arrays
`{i}/tokens`, `{i}/positions` and `{i}/weights/NAME`; LOGITS gets one array `{i}` a case.
"""

import json
import sys

import numpy as np


def main(cases_path: str, logits_path: str) -> None:
    # Built for another torch, these fail on import; a language model needs none of them.
    for name in ("torchvision", "torchaudio", "torchcodec"):
        sys.modules[name] = None  # type: ignore[assignment]
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.set_num_threads(1)
    logits = {}
    with np.load(cases_path) as stored:
        for i, case in enumerate(json.loads(str(stored["cases"]))):
            config = AutoConfig.for_model(case["model_type"], **case["config"])
            model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
            model = model.to(torch.float32).eval()
            start = f"{i}/weights/"
            weights = {
                name.removeprefix(start): torch.from_numpy(stored[name])
                for name in stored.files
                if name.startswith(start)
            }
            missing, unexpected = model.load_state_dict(weights, strict=False)
            tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
            assert set(missing) <= tied and not unexpected, (missing, unexpected)
            tokens = torch.from_numpy(stored[f"{i}/tokens"]).long()
            with torch.no_grad():
                # With a mask given, jumps in the positions do not count as packed sequences.
                output = model(
                    input_ids=tokens,
                    position_ids=torch.from_numpy(stored[f"{i}/positions"]).long(),
                    attention_mask=torch.ones_like(tokens),
                    use_cache=False,
                )
            logits[str(i)] = output.logits.numpy()
    np.savez(logits_path, **logits)


if __name__ == "__main__":
    main(*sys.argv[1:])
