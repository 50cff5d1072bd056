"""Which tokens a stage trains: one function for all of them."""

from __future__ import annotations

import numpy as np

from sera_jax.types import Role, Stage

_TRAINED: dict[Stage, tuple[Role, ...]] = {
    # The launch is part of what a node does, so execution trains it too.
    Stage.EXECUTION: (Role.EXECUTE, Role.LAUNCH),
    Stage.DELEGATION: (Role.LAUNCH,),
    Stage.RUBRIC: (Role.RUBRIC,),
}


def trained_mask(roles_T: np.ndarray, stage: Stage) -> np.ndarray:
    """bool [T]: tokens that ``stage`` trains; CONTEXT, SCORE and PAD never are.

    Args:
      roles_T: uint8 [T], see :class:`~sera_jax.types.Role`.
      stage: The stage.
    """
    return np.isin(roles_T, np.array([int(role) for role in _TRAINED[Stage(stage)]], np.uint8))
