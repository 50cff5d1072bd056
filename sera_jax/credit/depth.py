"""Inverse-frequency depth weights: deep nodes are many, and must not drown the root."""

from __future__ import annotations

import chex
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def depth_weights(
    depth_S: Int[Array, "S"],
    starts_S: Bool[Array, "S"],
    num_depths: int,
    valid_S: Bool[Array, "S"] | None = None,
) -> Float[Array, "S"]:
    """Weight of each sample of a batch (SERA, arXiv 2610.04902):

        w_d = (n / sum over d' of n_d' / t_d') / t_d

    with n samples in all, n_d of depth d, and t_d trajectories of depth d (samples that start one).
    The mean weight over samples is 1. A depth without a trajectory start has weight 0.

    Example: n_0 = 6, t_0 = 4, n_1 = 12, t_1 = 12: n = 18, the sum is 1.5 + 1 = 2.5, w_0 = 18/2.5/4 =
    1.8 and w_1 = 18/2.5/12 = 0.6.

    Args:
      depth_S: Depth of each sample, in [0, num_depths).
      starts_S: Whether the sample is the first of its trajectory.
      num_depths: Number of depth levels.
      valid_S: Samples that exist; None: all. Others get weight 0.
    """
    chex.assert_rank([depth_S, starts_S], 1)
    chex.assert_equal_shape([depth_S, starts_S])
    valid_S = jnp.ones(depth_S.shape, bool) if valid_S is None else valid_S
    chex.assert_equal_shape([valid_S, depth_S])
    count = lambda which_S: jnp.zeros(num_depths, jnp.float32).at[depth_S].add(which_S * 1.0)
    samples_D, starts_D = count(valid_S), count(valid_S & starts_S)
    share_D = jnp.where(starts_D > 0, samples_D / jnp.maximum(starts_D, 1), 0.0)
    # The sum runs over depths that can be weighted; all of them, when every trajectory has its start.
    scale = samples_D.sum() / jnp.maximum(share_D.sum(), 1e-9)
    weight_D = jnp.where(starts_D > 0, scale / jnp.maximum(starts_D, 1), 0.0)
    return jnp.where(valid_S, weight_D[depth_S], 0.0)
