"""What a run starts from: sizes, tokenizer and folder of `policy.checkpoint`, or none of these."""

from dataclasses import replace
from pathlib import Path

from telescope_jax.chat import CharTokenizer, Tokenizer
from telescope_jax.config import Config, ConfigError
from telescope_jax.hf_tokenizer import HfTokenizer, TokenizerError
from telescope_jax.weights.hf_config import CheckpointError
from telescope_jax.weights.hf_files import open_checkpoint


class StartError(RuntimeError):
    """The run cannot start from what `policy` names; the message says what to change."""


def open_start(config: Config) -> tuple[Config, Tokenizer, Path | None]:
    """The config with the sizes of its checkpoint, the tokenizer, and the checkpoint's folder.

    Reads no weights: every header and all of the text files, so that what cannot work is refused
    before there is a run folder.

    Raises:
      StartError: the checkpoint or its tokenizer cannot be used, or its sizes break a rule.
    """
    if not config.policy.checkpoint:
        return config, CharTokenizer(), None
    try:
        policy, folder = open_checkpoint(config.policy)
        config = replace(config, policy=policy)
        config.check()
        tokenizer = HfTokenizer(folder, chat_template=policy.chat_template)
    except (CheckpointError, ConfigError, TokenizerError) as error:
        raise StartError(str(error)) from error
    if tokenizer.vocab_size > policy.vocab_size:
        raise StartError(
            f"{folder}: the tokenizer has {tokenizer.vocab_size} tokens and the model "
            f"{policy.vocab_size} rows; take the tokenizer of this model"
        )
    return config, tokenizer, folder
