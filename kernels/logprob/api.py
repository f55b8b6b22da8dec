"""Per-token log-prob, entropy and log-sum-exp from hidden states and the unembedding.

No implementation but `reference` holds the logits [T, V] in memory, forward or backward (`chunked`
does when they are small enough to be one chunk).
"""

from functools import partial

import jax
from jaxtyping import Array, Float, Int

from kernels.logprob import reference
from kernels.logprob.arguments import TokenLogprobs, finish, prepare
from kernels.logprob.differentiable import Passes, differentiable
from kernels.logprob.implementations import Case, name_of, passes_of
from kernels.logprob.operands import Layout


def token_logprobs(
    hidden: Float[Array, "T D"],
    unembed: Float[Array, "V D"] | Float[Array, "D V"],
    targets: Int[Array, " T"],
    *,
    unembed_layout: Layout = "vd",
    temperature: float | Float[Array, " T"] = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    implementation: str | None = None,
    interpret: bool = False,
) -> TokenLogprobs:
    """Scores `targets` under the softmax of `hidden` times the unembedding.

    z = softcap · tanh(h Wᵀ / softcap) / temperature,  log p = z_target - log Σ e^z,
    H = -Σ p log p,  where without a softcap z = h Wᵀ / temperature.

    Softmax statistics after Milakov and Gimelshein, "Online normalizer calculation for softmax"
    (2018); the fused backward after Wijmans et al., "Cut your losses in large-vocabulary language
    models" (2024).

    Args:
      hidden: the last hidden states, one a token to be scored.
      unembed: the same type as `hidden`; [V, D] as an embedding table is, or [D, V].
      targets: the token scored at each place, in [0, V), or `ignore_index`.
      unembed_layout: "vd" or "dv".
      temperature: > 0, one for all or one a token. Logits are divided by it, after the softcap.
        It is a constant: no gradient flows to it.
      softcap: > 0, in logits (Gemma 2 has 30); None is off.
      ignore_index: a token with this target has value 0 in all three outputs and no gradient,
        whatever its hidden state and temperature are.
      implementation: `reference` (dense), `chunked` (plain JAX), `pallas_tpu`, `pallas_gpu`, or
        None to pick by platform.
      interpret: run a Pallas kernel in Python, on any platform; for tests.

    Returns:
      Three outputs, each differentiable with respect to `hidden` and `unembed`. A target that is
      neither in [0, V) nor ignored has the log-prob NaN: there is no right finite answer.

    Raises:
      ValueError: shapes or types do not fit, or there is no such implementation.
      NotImplementedError: the implementation asked for cannot take the case.
    """
    arguments = prepare(
        hidden,
        unembed,
        targets,
        layout=unembed_layout,
        temperature=temperature,
        softcap=softcap,
        ignore_index=ignore_index,
    )
    case = Case.of(jax.devices()[0], hidden, unembed, unembed_layout)
    name = name_of(implementation, case)
    operands = (arguments.hidden, unembed, arguments.column, arguments.inverse_temperature)
    if name == "reference":
        outputs = reference.token_logprobs(*operands, layout=unembed_layout, softcap=softcap)
    else:
        passes = passes_of(name, case, layout=unembed_layout, softcap=softcap, interpret=interpret)
        outputs = _compiled(passes, *operands)
    return finish(arguments, *outputs)


@partial(jax.jit, static_argnums=0)
def _compiled(passes: Passes, *operands: Array) -> tuple[Array, Array, Array]:
    # Outside of jit each loop would be compiled anew at every call.
    return differentiable(passes, *operands)
