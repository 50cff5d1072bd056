"""Plain jnp: the truth that other implementations are tested against."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def linear_logprob(
    hidden_TxH: Float[Array, "T H"],
    head_VxH: Float[Array, "V H"],
    targets_T: Int[Array, "T"],
    mask_T: Bool[Array, "T"],
    temperature_T: Float[Array, "T"],
) -> Float[Array, "T"]:
    """log softmax(hidden @ head.T / temperature) at the targets, float32; 0 where not masked in.

    Makes the whole [T, V] matrix.
    """
    logits_TxV = jax.lax.dot_general(
        hidden_TxH, head_VxH, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
    )
    logits_TxV = logits_TxV / temperature_T[:, None]
    normalizer_T = jax.nn.logsumexp(logits_TxV, axis=-1)
    target_T = jnp.take_along_axis(logits_TxV, targets_T[:, None], axis=-1)[:, 0]
    return jnp.where(mask_T, target_T - normalizer_T, 0.0)
