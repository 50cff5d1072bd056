"""From criterion scores to a score: computed here, never taken from a model."""

from __future__ import annotations

import math

from sera_jax.rubric.schema import ParsedScore
from sera_jax.types import Rubric


def score_value(rubric: Rubric, parsed: ParsedScore) -> float:
    """gate x sum over criteria of weight x score, in [0, 1] (SERA, arXiv 2610.04902).

    Example: weights (.6, .2, .2), scores (1, 0, 1), gate passed: .8; gate failed: 0.

    Raises:
      ValueError: As many scores as criteria are expected.
    """
    if len(parsed.criteria) != len(rubric.criteria):
        raise ValueError(
            f"{len(parsed.criteria)} criterion scores for {len(rubric.criteria)} criteria of the rubric"
        )
    if not parsed.gate:
        return 0.0
    weighted = math.fsum(c.weight * s for c, s in zip(rubric.criteria, parsed.criteria, strict=True))
    return min(1.0, max(0.0, weighted))  # weights sum to 1 up to rounding
