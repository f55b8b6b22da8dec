"""What was trained, to read: one parquet file a step, one row a rollout.

    rollouts/step_000012.parquet      any reader of parquet opens it: pandas, duckdb, polars

Text is decoded for people; `tokens`, `logprobs` and `loss_mask` are what the trainer got.
"""

import logging
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from telescope_jax.chat import Tokenizer
from telescope_jax.types import Group

log = logging.getLogger(__name__)


class RolloutTables:
    """Writes the groups of every `every`-th step into `folder`; 0 writes none.

    A full disk is a warning: a table that is missing costs the run nothing.
    """

    def __init__(self, folder: Path, tokenizer: Tokenizer, *, every: int) -> None:
        self._folder, self._tokenizer, self._every = folder, tokenizer, every

    def write(self, step: int, groups: Sequence[Group]) -> None:
        """Writes batch `step`, whole or not at all."""
        if not self._every or step % self._every:
            return
        path = self._folder / f"step_{step:06d}.parquet"
        new = path.with_suffix(".new")
        try:
            self._folder.mkdir(exist_ok=True)
            pq.write_table(pa.Table.from_pylist(rows(groups, self._tokenizer)), new)
            new.replace(path)
        except OSError as error:
            log.warning("%s was not written: %s", path, error)


def rows(groups: Sequence[Group], tokenizer: Tokenizer) -> list[dict[str, object]]:
    """One dict a rollout, in the order of the batch."""
    table = []
    for group in groups:
        prompt = tokenizer.decode(group.prompt.tokens.tolist())
        for index, rollout in enumerate(group.rollouts):
            after_prompt = rollout.tokens[len(group.prompt.tokens) :].tolist()
            table.append(
                {
                    "epoch": group.prompt.uid.epoch,
                    "index": group.prompt.uid.index,
                    "attempt": group.attempt,
                    "rollout": index,
                    "prompt": prompt,
                    "completion": tokenizer.decode(after_prompt),
                    "reward": rollout.reward.total,
                    "tags": list(rollout.reward.tags),
                    "stop": rollout.stop.value,
                    "turns": rollout.turns,
                    "oldest_version": rollout.oldest_version,
                    "tokens": rollout.tokens.tolist(),
                    "loss_mask": rollout.loss_mask.tolist(),
                    "logprobs": rollout.logprobs.tolist(),
                }
            )
    return table
