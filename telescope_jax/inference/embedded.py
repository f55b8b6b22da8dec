"""Building embedded engines from configuration, in whichever process they run."""

from collections.abc import Sequence
from dataclasses import dataclass

from telescope_jax.config import EngineConfig, PolicyConfig
from telescope_jax.inference.decoding import Decoding
from telescope_jax.inference.distortion import EightBitReader
from telescope_jax.inference.jax_engine import EngineThread, JaxEngine, Reader
from telescope_jax.model.decoder import Decoder


@dataclass(frozen=True, slots=True)
class EngineShape:
    """What an engine must know of the task.

    Attributes:
      vocab_size: the tokenizer's V.
      eos_ids: tokens that end every completion.
      context: most tokens of one sequence, prompt and completions. The cache is this long, and
        every decode step reads all of it: the longest rollout and no more.
      prefill_width: tokens of an ordinary prompt; longer ones up to `context` are legal, and cost
        a wider prefill.
    """

    vocab_size: int
    eos_ids: tuple[int, ...]
    context: int
    prefill_width: int


def build_engines(
    config: EngineConfig,
    policy: PolicyConfig,
    shape: EngineShape,
    store: Reader,
    *,
    names: Sequence[str],
) -> dict[str, JaxEngine]:
    """Engines of this process that share their compiled functions and their thread.

    Only the one called "train" is distorted, where `config` asks for it.
    """
    decoding = Decoding(
        Decoder(policy, shape.vocab_size),
        slots=config.slots,
        context=shape.context,
        prefill_width=shape.prefill_width,
        prefill_rows=config.prefill_rows,
        tokens_per_call=config.tokens_per_call,
        eos_ids=shape.eos_ids,
    )
    thread = EngineThread()

    def build(name: str) -> JaxEngine:
        distorted = name == "train"
        return JaxEngine(
            decoding,
            EightBitReader(store) if distorted and config.distort_int8 else store,
            thread,
            request_timeout_s=config.request_timeout_s,
            temperature_factor=config.distort_temperature if distorted else 1.0,
        )

    return {name: build(name) for name in names}
