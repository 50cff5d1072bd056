"""GRPO's loss: PPO's pessimistic clip of the ratio, without a value function."""

from __future__ import annotations

import chex
import jax.numpy as jnp

from sera_jax.objectives.base import LossInputs, LossOutputs, Objective


def grpo(clip_low: float = 0.2, clip_high: float = 0.26) -> Objective:
    """The objective with offsets from 1.

    L_t = -min(ratio_t A_t, clip(ratio_t, 1 - clip_low, 1 + clip_high) A_t)

    Source: DeepSeekMath (arXiv 2402.03300); the asymmetric defaults are those of the SERA recipes'
    unused PPO fields. A clipped token has no gradient, unlike in CISPO.

    Raises:
      ValueError: clip_low outside [0, 1) or a negative clip_high.
    """
    if not 0 <= clip_low < 1:
        raise ValueError(f"clip_low={clip_low}: a value in [0, 1) is expected, an offset below 1")
    if clip_high < 0:
        raise ValueError(f"clip_high={clip_high}: at least 0 is expected, an offset above 1")

    def objective(inputs: LossInputs) -> LossOutputs:
        chex.assert_equal_shape(inputs)
        log_ratio_T = jnp.where(inputs.mask_T, inputs.logprob_T - inputs.old_logprob_T, 0.0)
        ratio_T = jnp.exp(log_ratio_T)
        clipped_T = jnp.clip(ratio_T, 1 - clip_low, 1 + clip_high)
        loss_T = -jnp.minimum(ratio_T * inputs.advantage_T, clipped_T * inputs.advantage_T)
        outside_T = (clipped_T != ratio_T).astype(jnp.float32)
        return LossOutputs(loss_T, {"ratio": ratio_T, "clipped": outside_T})

    return objective
