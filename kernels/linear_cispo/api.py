"""Log-probs and the CISPO loss from hidden states and head weights, one call for every platform.

``implementation=None`` picks for the shape; naming one that does not exist or cannot run here raises.
"""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kernels.linear_cispo import reference, xla

IMPLEMENTATIONS = ("reference", "xla", "tpu", "gpu")

# Up to this many logits the plain form is as fast as the chunked one, and its memory does not matter.
_PLAIN_LOGITS = 1 << 24
_CHUNK = 4096


class ImplementationError(ValueError):
    """The named implementation does not exist or cannot run; the message says why."""


def choose(tokens: int, vocabulary: int, implementation: str | None = None) -> str:
    """The implementation to run for [tokens, vocabulary] logits.

    Raises:
      ImplementationError: An explicit choice that cannot run.
    """
    if implementation is None:
        return "reference" if tokens * vocabulary <= _PLAIN_LOGITS else "xla"
    if implementation not in IMPLEMENTATIONS:
        raise ImplementationError(
            f"implementation={implementation!r}: one of {', '.join(IMPLEMENTATIONS)} or None is expected"
        )
    if implementation in ("tpu", "gpu"):
        raise ImplementationError(
            f"implementation={implementation!r} is not available in this version: no accelerator kernel "
            "has been built yet; None or 'xla' runs on every platform"
        )
    return implementation


def linear_logprob(
    hidden_TxH: Float[Array, "T H"],
    head_VxH: Float[Array, "V H"],
    targets_T: Int[Array, "T"],
    *,
    mask_T: Bool[Array, "T"] | None = None,
    temperature: float | Float[Array, ""] | Float[Array, "T"] = 1.0,
    implementation: str | None = None,
    chunk_size: int | None = None,
    capacity: int | None = None,
) -> Float[Array, "T"]:
    """log softmax(hidden @ head.T / temperature)[target], float32, differentiable in hidden and head.

    Args:
      hidden_TxH: Hidden states.
      head_VxH: Output head.
      targets_T: Token ids in [0, V).
      mask_T: Tokens that are wanted; others get 0 and no gradient. None: all.
      temperature: Divides the logits; one number, or one for each token.
      implementation: See :func:`choose`.
      chunk_size: Vocabulary columns at a time (``xla``); a memory knob only. None: :func:`chunk_for`.
      capacity: Most wanted tokens, if fewer than T (``xla``).

    Raises:
      ImplementationError: See :func:`choose`.
      ValueError: ``chunk_size`` or ``capacity`` below 1.
    """
    chex.assert_rank([hidden_TxH, head_VxH, targets_T], [2, 2, 1])
    chex.assert_equal(hidden_TxH.shape[1], head_VxH.shape[1])
    for name, value in (("chunk_size", chunk_size), ("capacity", capacity)):
        if value is not None and value < 1:
            raise ValueError(f"{name}={value}: at least 1 is expected")
    if mask_T is None:
        mask_T = jnp.ones(targets_T.shape, bool)
    chex.assert_equal_shape([mask_T, targets_T])
    temperature_T = jnp.broadcast_to(jnp.asarray(temperature, jnp.float32), targets_T.shape)
    chosen = choose(hidden_TxH.shape[0], head_VxH.shape[0], implementation)
    if chosen == "reference":
        return reference.linear_logprob(hidden_TxH, head_VxH, targets_T, mask_T, temperature_T)
    return xla.linear_logprob(
        hidden_TxH,
        head_VxH,
        targets_T,
        mask_T,
        temperature_T,
        chunk_size=chunk_size or chunk_for(head_VxH.shape[0]),
        capacity=capacity,
    )


def chunk_for(vocabulary: int) -> int:
    """A chunk of about 4,096 columns, one that divides the vocabulary if there is one nearby.

    With V = 151,936 = 2^7 x 1187 that is 4,748: no column is computed twice.
    """
    for chunk in range(2 * _CHUNK, _CHUNK // 4, -1):
        if vocabulary % chunk == 0 and abs(chunk - _CHUNK) <= _CHUNK // 2:
            return chunk
    return min(_CHUNK, vocabulary)


def linear_cispo(
    hidden_TxH: Float[Array, "T H"],
    head_VxH: Float[Array, "V H"],
    targets_T: Int[Array, "T"],
    old_logprobs_T: Float[Array, "T"],
    advantage_T: Float[Array, "T"],
    mask_T: Bool[Array, "T"],
    *,
    ratio_min: float = 0.0,
    ratio_max: float = 5.0,
    temperature: float | Float[Array, ""] | Float[Array, "T"] = 1.0,
    denominator: float | Float[Array, ""] | None = None,
    implementation: str | None = None,
    chunk_size: int | None = None,
    capacity: int | None = None,
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """The CISPO loss over trained tokens (SERA, arXiv 2610.04902; CISPO: MiniMax-M1, arXiv 2506.13585).

    L = -(1/M) sum_t sg[clip(ratio_t, ratio_min, ratio_max)] A_t logprob_t,
    ratio_t = exp(logprob_t - old_logprob_t), M = ``denominator`` or the number of trained tokens
    (at least 1). The bounds are absolute.

    Returns:
      The loss and per-token arrays ``logprob`` [T] and ``ratio`` [T], 0 where not trained.
    """
    logprob_T = linear_logprob(
        hidden_TxH,
        head_VxH,
        targets_T,
        mask_T=mask_T,
        temperature=temperature,
        implementation=implementation,
        chunk_size=chunk_size,
        capacity=capacity,
    )
    ratio_T = jnp.where(mask_T, jnp.exp(jax.lax.stop_gradient(logprob_T) - old_logprobs_T), 0.0)
    weight_T = jnp.clip(ratio_T, ratio_min, ratio_max) * advantage_T
    if denominator is None:
        denominator = jnp.maximum(mask_T.sum(), 1)
    loss = -jnp.sum(jnp.where(mask_T, weight_T * logprob_T, 0.0)) / denominator
    return loss, {"logprob": logprob_T, "ratio": ratio_T}
