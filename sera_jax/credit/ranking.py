"""Rubric credit: a rubric must rank verified successes above verified failures.

Source: SERA (arXiv 2610.04902), rubric training with margin ranking, and its rank + discrimination
ablation.
"""

from __future__ import annotations

from typing import NamedTuple

import chex
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from sera_jax.credit.baselines import leave_one_out_advantage


def _pairs(
    score_B: Float[Array, "B"], label_B: Bool[Array, "B"], valid_B: Bool[Array, "B"]
) -> tuple[Array, Array]:
    """Gaps s_i - s_j [B, B] and which pairs are (success i, failure j)."""
    chex.assert_rank([score_B, label_B, valid_B], 1)
    chex.assert_equal_shape([score_B, label_B, valid_B])
    gap_BxB = score_B[:, None] - score_B[None, :]
    pair_BxB = (label_B & valid_B)[:, None] & (~label_B & valid_B)[None, :]
    return gap_BxB, pair_BxB


def _mean(value: Array, where: Array) -> Array:
    return jnp.where(where, value, 0.0).sum() / jnp.maximum(where.sum(), 1)


def ranking_reward(
    score_B: Float[Array, "B"],
    label_B: Bool[Array, "B"],
    valid_B: Bool[Array, "B"],
    margin: float | Float[Array, ""] = 0.2,
) -> tuple[Float[Array, ""], Bool[Array, ""]]:
    """R = -mean over successes i and failures j of max(0, margin - (s_i - s_j)), in [-1 - margin, 0].

    Example: s = (.9, .6, .5, 0), y = (1, 0, 1, 0), margin .2: the pairs' losses are
    (.9-.6): 0, (.9-0): 0, (.5-.6): .3, (.5-0): 0, so R = -.3/4 = -.075.

    Returns:
      The reward and whether it is defined: there must be a valid success and a valid failure.
    """
    gap_BxB, pair_BxB = _pairs(score_B, label_B, valid_B)
    return -_mean(jnp.maximum(0.0, margin - gap_BxB), pair_BxB), pair_BxB.any()


def rank_disc_reward(
    score_B: Float[Array, "B"],
    label_B: Bool[Array, "B"],
    valid_B: Bool[Array, "B"],
    margin: float | Float[Array, ""] = 0.2,
    order_weight: float | Float[Array, ""] = 0.5,
    spread_scale: float | Float[Array, ""] = 2.0,
) -> tuple[Float[Array, ""], Bool[Array, ""]]:
    """The rank + discrimination ablation: R = w R_order + (1 - w) R_disc, in [0, 1].

    R_order = mean over pairs of clip((s_i - s_j) / margin, 0, 1)
    R_disc = clip(spread_scale * population standard deviation of all valid scores, 0, 1)

    Example: the scores of :func:`ranking_reward`: order = (1 + 1 + 0 + 1)/4 = .75, the standard
    deviation is .3240, R = .5 * .75 + .5 * .6481 = .699.
    """
    gap_BxB, pair_BxB = _pairs(score_B, label_B, valid_B)
    order = _mean(jnp.clip(gap_BxB / margin, 0.0, 1.0), pair_BxB)
    mean = _mean(score_B, valid_B)
    deviation = jnp.sqrt(_mean(jnp.square(score_B - mean), valid_B))
    spread = jnp.clip(spread_scale * deviation, 0.0, 1.0)
    return order_weight * order + (1 - order_weight) * spread, pair_BxB.any()


class RankingDiagnostics(NamedTuple):
    """What a group says about its rubric; all 0 without a pair.

    Attributes:
      pairs: Number of (success, failure) pairs.
      accuracy: Share of pairs with a positive gap.
      margin_rate: Share of pairs whose gap reaches the margin.
      gap: Mean gap.
      hinge: Mean hinge loss.
    """

    pairs: Array
    accuracy: Array
    margin_rate: Array
    gap: Array
    hinge: Array


def ranking_diagnostics(
    score_B: Float[Array, "B"],
    label_B: Bool[Array, "B"],
    valid_B: Bool[Array, "B"],
    margin: float | Float[Array, ""] = 0.2,
) -> RankingDiagnostics:
    """See :class:`RankingDiagnostics`. In the example: 4 pairs, accuracy .75, mean gap .4."""
    gap_BxB, pair_BxB = _pairs(score_B, label_B, valid_B)
    return RankingDiagnostics(
        pairs=pair_BxB.sum(),
        accuracy=_mean((gap_BxB > 0).astype(jnp.float32), pair_BxB),
        margin_rate=_mean((gap_BxB >= margin).astype(jnp.float32), pair_BxB),
        gap=_mean(gap_BxB, pair_BxB),
        hinge=_mean(jnp.maximum(0.0, margin - gap_BxB), pair_BxB),
    )


def rubric_advantage(
    reward_G: Float[Array, "G"],
    valid_G: Bool[Array, "G"],
    task_G: Int[Array, "G"],
    scope: str = "batch",
) -> Float[Array, "G"]:
    """Leave-one-out over ranked groups: of the whole batch, or with ``task`` of the same root task.

    The released code takes those of the same task, often a single group, whose advantage is then 0.

    Raises:
      ValueError: Another scope.
    """
    chex.assert_rank([reward_G, valid_G, task_G], 1)
    chex.assert_equal_shape([reward_G, valid_G, task_G])
    if scope == "batch":
        return leave_one_out_advantage(reward_G, valid_G)
    if scope != "task":
        raise ValueError(f"scope={scope!r}: 'batch' or 'task' is expected")
    same_GxG = (task_G[:, None] == task_G[None, :]) & valid_G[:, None] & valid_G[None, :]
    other_GxG = same_GxG & ~jnp.eye(len(reward_G), dtype=bool)
    difference_GxG = jnp.where(other_GxG, reward_G[:, None] - reward_G[None, :], 0.0)
    return difference_GxG.sum(axis=1) / jnp.maximum(other_GxG.sum(axis=1), 1)
