"""The tables of trained rollouts."""

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from telescope_jax.chat import CharTokenizer
from telescope_jax.rollouts.table import RolloutTables
from telescope_jax.types import Group, Prompt, Reward, Rollout, StopReason, Uid, VersionSpan

TOKENIZER = CharTokenizer()


def group() -> Group:
    prompt = np.array(TOKENIZER.encode("What is 1 + 2?"), np.int32)
    answer = [*TOKENIZER.encode("\\boxed{3}"), 1]
    tokens = np.concatenate([prompt, np.array(answer, np.int32)])
    mask = np.arange(len(tokens)) >= len(prompt)
    rollout = Rollout(
        tokens=tokens,
        loss_mask=mask,
        logprobs=np.where(mask, -0.25, 0.0).astype(np.float32),
        versions=(VersionSpan(4, len(prompt), len(tokens)),),
        reward=Reward(1.0, tags=("grader_limit",)),
        metrics={},
        stop=StopReason.EOS,
        turns=1,
    )
    return Group(Prompt(Uid(2, 7), "sums", prompt, None), 1, (rollout, rollout))


def test_a_table_holds_the_trained_tokens_and_their_text(tmp_path: Path) -> None:
    tables = RolloutTables(tmp_path / "rollouts", TOKENIZER, every=5)
    for step in range(11):
        tables.write(step, [group()])
    names = sorted(path.name for path in (tmp_path / "rollouts").iterdir())
    assert names == ["step_000000.parquet", "step_000005.parquet", "step_000010.parquet"]
    one, other = pq.read_table(tmp_path / "rollouts" / names[1]).to_pylist()
    assert one["prompt"] == "What is 1 + 2?" and one["completion"] == "\\boxed{3}"
    assert (one["epoch"], one["index"], one["attempt"], one["oldest_version"]) == (2, 7, 1, 4)
    assert one["tokens"] == group().rollouts[0].tokens.tolist()
    assert one["logprobs"] == group().rollouts[0].logprobs.tolist()
    assert (one["rollout"], other["rollout"]) == (0, 1)


def test_a_table_that_cannot_be_written_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "rollouts").write_text("a file in the way")
    RolloutTables(tmp_path / "rollouts", TOKENIZER, every=1).write(0, [group()])
    assert "was not written" in caplog.text


def test_zero_writes_nothing(tmp_path: Path) -> None:
    RolloutTables(tmp_path / "rollouts", TOKENIZER, every=0).write(0, [group()])
    assert not list(tmp_path.iterdir())
