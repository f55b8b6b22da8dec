"""One update with torch and transformers, for trainer.py; a program of its own.

    python -I hf_update.py FOLDER THREADS ROWS_PER_MICROBATCH LEARNING_RATE TIS_CAP

Reads FOLDER (a checkpoint, and batch.npz), then a word a line and answers each in JSON:
`gradient` writes gradient.npz and says the loss; `update` does one whole update and says how long
that took; `matmul` times a large one. Isolated (-I), so that this project's `kernels` does not
shadow the package of that name which transformers looks for.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

# Built for another torch, these fail on import; a language model needs none of them.
for name in ("torchvision", "torchaudio", "torchcodec"):
    sys.modules[name] = None  # type: ignore[assignment]
import torch  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402


class Update:
    """A model, its optimizer and one packed batch."""

    def __init__(self, folder: str, rows: int, rate: float, cap: float) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="sdpa"
        )
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=rate, betas=(0.9, 0.98), eps=1e-8, weight_decay=0.0
        )
        with np.load(Path(folder) / "batch.npz") as file:
            batch = {name: torch.from_numpy(file[name]) for name in file}
        self.tokens = int(batch["loss_mask"].sum())
        self.parts = [
            {name: x[at : at + rows] for name, x in batch.items()}
            for at in range(0, len(batch["tokens"]), rows)
        ]
        self.masks = [block_diagonal(part["segments"]) for part in self.parts]
        self.cap = cap

    def backward(self) -> float:
        """Gradients of all microbatches, and the loss."""
        self.optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for part, mask in zip(self.parts, self.masks, strict=True):
            tokens = part["tokens"].long()
            logits = self.model(
                input_ids=tokens,
                attention_mask=mask,
                position_ids=part["positions"].long(),
                use_cache=False,
            ).logits
            wanted = part["loss_mask"][:, 1:]
            # Only what is trained becomes log-probs; cross entropy fuses softmax and choice.
            logprobs = -torch.nn.functional.cross_entropy(
                logits[:, :-1][wanted], tokens[:, 1:][wanted], reduction="none"
            )
            ratio = (logprobs.detach() - part["logprobs"][:, 1:][wanted]).clamp(-20, 20).exp()
            weight = ratio.clamp(max=self.cap)
            loss = -(weight * part["advantages"][:, 1:][wanted] * logprobs).sum() / self.tokens
            loss.backward()
            total += float(loss.detach())
        return total

    def update(self) -> float:
        """Seconds of one update."""
        started = time.perf_counter()
        self.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return time.perf_counter() - started


def block_diagonal(segments: torch.Tensor) -> torch.Tensor:
    """B 1 T T: a token sees the earlier ones of its own rollout."""
    same = segments[:, :, None] == segments[:, None, :]
    return torch.tril(same)[:, None]


def matmul_rate(size: int = 2_048) -> float:
    left = torch.randn(size, size)
    started = time.perf_counter()
    torch.mm(left, left)
    return 2 * size**3 / (time.perf_counter() - started)


def main(folder: str, threads: int, rows: int, rate: float, cap: float) -> None:
    torch.set_num_threads(threads)
    update = Update(folder, rows, rate, cap)
    for line in sys.stdin:
        answer: dict[str, float] = {}
        match line.strip():
            case "gradient":
                answer["loss"] = update.backward()
                named = update.model.named_parameters()
                np.savez(
                    Path(folder) / "gradient.npz", **{name: p.grad.numpy() for name, p in named}
                )
            case "update":
                answer["seconds"] = update.update()
            case "matmul":
                answer["flop_per_s"] = matmul_rate()
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    folder, threads, rows, rate, cap = sys.argv[1:]
    main(folder, int(threads), int(rows), float(rate), float(cap))
