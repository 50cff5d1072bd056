"""What a per-token loss takes and gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from jaxtyping import Array, Bool, Float


class LossInputs(NamedTuple):
    """One stream of tokens.

    Attributes:
      logprob_T: Log-prob under the weights being trained; the only differentiable input.
      old_logprob_T: The sampler's log-prob of the same token: the anchor of every ratio.
      advantage_T: Advantage, depth weight included.
      mask_T: Trained tokens.
    """

    logprob_T: Float[Array, "T"]
    old_logprob_T: Float[Array, "T"]
    advantage_T: Float[Array, "T"]
    mask_T: Bool[Array, "T"]


class LossOutputs(NamedTuple):
    """Losses and values to report, per token; the learner masks, sums and averages both."""

    loss_T: Float[Array, "T"]
    metrics_T: Mapping[str, Float[Array, "T"]]


Objective = Callable[[LossInputs], LossOutputs]
