"""Weighted negative log-likelihood: imitation with advantage 1."""

from __future__ import annotations

import chex

from sera_jax.objectives.base import LossInputs, LossOutputs


def supervised(inputs: LossInputs) -> LossOutputs:
    """L_t = -A_t * logprob_t; the sampler's log-prob plays no part."""
    chex.assert_equal_shape(inputs)
    return LossOutputs(-inputs.advantage_T * inputs.logprob_T, {})
