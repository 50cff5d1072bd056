"""Vocabulary in chunks, for any XLA backend: memory grows with T x chunk instead of T x V.

Forward keeps a running maximum and a running sum of exponentials (online log-sum-exp); backward makes
each chunk's probabilities again from the saved log-normalizer:

    d logprob / d logits[v] = (1[v = target] - softmax[v]) / temperature

The head is read through slices, never padded or copied: the last chunk starts at V - chunk and the
columns that it shares with the one before it are masked. With a trained-token capacity below T the
trained rows are gathered first, so that time follows the trained share.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

_LOWEST = -1e30  # finite, so that a masked chunk cannot make inf - inf


def _chunk_logits(
    hidden: Array, head: Array, number: Array, chunk: int, temperature: Array
) -> tuple[Array, Array, Array]:
    """Logits of one chunk with repeated columns masked, where it starts, and its head rows."""
    vocabulary = head.shape[0]
    nominal = number * chunk
    start = jnp.minimum(nominal, vocabulary - chunk)
    rows = jax.lax.dynamic_slice_in_dim(head, start, chunk, axis=0).astype(hidden.dtype)
    logits = jax.lax.dot_general(hidden, rows, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    fresh = start + jnp.arange(chunk) >= nominal
    return jnp.where(fresh[None], logits / temperature[:, None], _LOWEST), start, rows


def _target_logits(hidden: Array, head: Array, targets: Array, temperature: Array) -> Array:
    rows = head[targets].astype(hidden.dtype)
    return jnp.sum(hidden.astype(jnp.float32) * rows.astype(jnp.float32), axis=-1) / temperature


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _logprob(hidden: Array, head: Array, targets: Array, temperature: Array, chunk: int) -> Array:
    return _forward(hidden, head, targets, temperature, chunk)[0]


def _forward(hidden: Array, head: Array, targets: Array, temperature: Array, chunk: int):
    tokens, chunks = hidden.shape[0], -(-head.shape[0] // chunk)

    def body(number, carry):
        top, total = carry
        logits, _, _ = _chunk_logits(hidden, head, number, chunk, temperature)
        higher = jnp.maximum(top, logits.max(axis=-1))
        total = total * jnp.exp(top - higher) + jnp.exp(logits - higher[:, None]).sum(axis=-1)
        return higher, total

    start = (jnp.full((tokens,), _LOWEST, jnp.float32), jnp.zeros((tokens,), jnp.float32))
    top, total = jax.lax.fori_loop(0, chunks, body, start)
    normalizer = top + jnp.log(total)
    logprob = _target_logits(hidden, head, targets, temperature) - normalizer
    return logprob, (hidden, head, targets, temperature, normalizer)


def _backward(chunk: int, saved, cotangent: Array):
    hidden, head, targets, temperature, normalizer = saved
    chunks = -(-head.shape[0] // chunk)
    scale = (cotangent / temperature)[:, None]

    def body(number, carry):
        d_hidden, d_head = carry
        logits, start, rows = _chunk_logits(hidden, head, number, chunk, temperature)
        # Repeated columns have logit -1e30, hence probability 0: they are counted once.
        d_logits = (-scale * jnp.exp(logits - normalizer[:, None])).astype(hidden.dtype)
        d_hidden = d_hidden + jax.lax.dot_general(
            d_logits, rows, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32
        )
        d_rows = jax.lax.dot_general(
            d_logits, hidden, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32
        )
        here = jax.lax.dynamic_slice_in_dim(d_head, start, chunk, axis=0)
        return d_hidden, jax.lax.dynamic_update_slice_in_dim(d_head, here + d_rows, start, axis=0)

    start = (jnp.zeros(hidden.shape, jnp.float32), jnp.zeros(head.shape, jnp.float32))
    d_hidden, d_head = jax.lax.fori_loop(0, chunks, body, start)
    d_hidden = d_hidden + scale * head[targets].astype(jnp.float32)
    d_head = d_head.at[targets].add(scale * hidden.astype(jnp.float32))
    return d_hidden.astype(hidden.dtype), d_head.astype(head.dtype), None, None


_logprob.defvjp(_forward, _backward)


def linear_logprob(
    hidden_TxH: Float[Array, "T H"],
    head_VxH: Float[Array, "V H"],
    targets_T: Int[Array, "T"],
    mask_T: Bool[Array, "T"],
    temperature_T: Float[Array, "T"],
    *,
    chunk_size: int,
    capacity: int | None = None,
) -> Float[Array, "T"]:
    """See :func:`kernels.linear_cispo.reference.linear_logprob`.

    Args:
      hidden_TxH: Hidden states; their dtype is that of the products, sums are float32.
      head_VxH: Output head.
      targets_T: Token ids in [0, V).
      mask_T: Trained tokens.
      temperature_T: Divides the logits of each token.
      chunk_size: Vocabulary columns at a time; cut to V.
      capacity: At most this many tokens are trained (the caller's promise; tokens beyond it get a
        log-prob of NaN, so that a broken promise is seen). None: no gathering.
    """
    chunk = min(chunk_size, head_VxH.shape[0])
    if capacity is None or capacity >= hidden_TxH.shape[0]:
        logprob_T = _logprob(hidden_TxH, head_VxH, targets_T, temperature_T, chunk)
        return jnp.where(mask_T, logprob_T, 0.0)
    (rows_C,) = jnp.nonzero(mask_T, size=capacity, fill_value=0)
    logprob_C = _logprob(hidden_TxH[rows_C], head_VxH, targets_T[rows_C], temperature_T[rows_C], chunk)
    live_C = jnp.arange(capacity) < mask_T.sum()
    # Where there are fewer trained tokens than capacity, the filler rows scatter out of bounds.
    place_C = jnp.where(live_C, rows_C, hidden_TxH.shape[0])
    result_T = jnp.zeros_like(mask_T, jnp.float32).at[place_C].set(logprob_C, mode="drop")
    return jnp.where(mask_T & (jnp.cumsum(mask_T) > capacity), jnp.nan, result_T)
