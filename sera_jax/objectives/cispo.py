"""CISPO: the importance ratio is clipped and detached, so every token keeps its gradient."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp

from sera_jax.objectives.base import LossInputs, LossOutputs, Objective


def cispo(ratio_min: float = 0.0, ratio_max: float = 5.0) -> Objective:
    """The objective with absolute ratio bounds.

    L_t = -sg[clip(ratio_t, ratio_min, ratio_max)] * A_t * logprob_t
    ratio_t = exp(logprob_t - old_logprob_t), old_logprob = the sampler's.

    Source: SERA (arXiv 2610.04902), with [0, 5]; CISPO is from MiniMax-M1 (arXiv 2506.13585). Several
    libraries name an offset from 1 with the same words; here 5 means a ratio of 5.

    Raises:
      ValueError: A negative bound, or ratio_max not above ratio_min.
    """
    if ratio_min < 0:
        raise ValueError(f"ratio_min={ratio_min}: at least 0 is expected, bounds of a ratio are absolute")
    if ratio_max <= ratio_min:
        raise ValueError(f"ratio_max={ratio_max}: more than ratio_min={ratio_min} is expected")

    def objective(inputs: LossInputs) -> LossOutputs:
        chex.assert_equal_shape(inputs)
        log_ratio_T = jax.lax.stop_gradient(inputs.logprob_T) - inputs.old_logprob_T
        ratio_T = jnp.exp(jnp.where(inputs.mask_T, log_ratio_T, 0.0))
        clipped_T = jnp.clip(ratio_T, ratio_min, ratio_max)
        loss_T = -clipped_T * inputs.advantage_T * inputs.logprob_T
        outside_T = (ratio_T < ratio_min) | (ratio_T > ratio_max)
        return LossOutputs(loss_T, {"ratio": ratio_T, "clipped": outside_T.astype(jnp.float32)})

    return objective
