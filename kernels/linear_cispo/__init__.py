"""Log-probs and the CISPO loss straight from hidden states and head weights."""

from kernels.linear_cispo.api import (
    IMPLEMENTATIONS,
    ImplementationError,
    choose,
    linear_cispo,
    linear_logprob,
)

__all__ = ["IMPLEMENTATIONS", "ImplementationError", "choose", "linear_cispo", "linear_logprob"]
