"""Leave-one-out baselines.

Every advantage here is a mean of differences, not a difference of means: equal rewards then give
exactly 0 in float32, with no residue that an optimizer's normalisation could blow up.
"""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def leave_one_out_advantage(value_K: Float[Array, "K"], valid_K: Bool[Array, "K"]) -> Float[Array, "K"]:
    """A_k = v_k - mean over valid j != k of v_j = mean over valid j != k of (v_k - v_j).

    Source: SERA (arXiv 2610.04902), baselines of the delegation and rubric stages.
    Undefined with fewer than two valid entries: 0. Entries that are not valid get 0.

    Example: v = (1, 0, 0.5) -> (1 - 0.25, 0 - 0.75, 0.5 - 0.5) = (0.75, -0.75, 0).
    """
    chex.assert_rank([value_K, valid_K], 1)
    chex.assert_equal_shape([value_K, valid_K])
    other_KxK = valid_K[:, None] & valid_K[None, :] & ~jnp.eye(len(value_K), dtype=bool)
    difference_KxK = jnp.where(other_KxK, value_K[:, None] - value_K[None, :], 0.0)
    return difference_KxK.sum(axis=1) / jnp.maximum(other_KxK.sum(axis=1), 1)


def execution_advantage(
    node_reward_KxN: Float[Array, "K N"],
    root_reward_K: Float[Array, "K"],
    node_valid_KxN: Bool[Array, "K N"],
    tree_valid_K: Bool[Array, "K"],
    depth_KxN: Int[Array, "K N"],
    baseline: str = "root",
) -> Float[Array, "K N"]:
    """Advantages of all nodes of one task's K trees.

    ``root`` (SERA, arXiv 2610.04902): A_kn = r_kn - mean over j != k of R_j, where R is root success:
    all nodes of a tree share the baseline, whatever their own reward's scale. With one valid tree:
    r_kn - R_k, which is 0 at the root.

    ``per_depth``: A_kn = r_kn - mean over j != k of m_j(d), where m_j(d) is the mean reward of tree j's
    valid nodes at the node's own depth d; only trees with such a node count, and A = 0 where there is
    none.

    Example (``root``): root successes (1, 0, 0), tree 0 has a child with score 0.8: the root of tree 0
    gets 1 - 0 = 1, its child 0.8 - 0 = 0.8; the root of tree 1 gets 0 - 0.5 = -0.5.

    Args:
      node_reward_KxN: Root success, child score or child success.
      root_reward_K: Root success of each tree.
      node_valid_KxN: Nodes that exist and have a reward.
      tree_valid_K: Trees that count.
      depth_KxN: Depth of each node, 0 at the root.
      baseline: ``root`` or ``per_depth``.

    Raises:
      ValueError: Another baseline.
    """
    chex.assert_rank([node_reward_KxN, node_valid_KxN, depth_KxN], 2)
    chex.assert_equal_shape([node_reward_KxN, node_valid_KxN, depth_KxN])
    chex.assert_shape([root_reward_K, tree_valid_K], (node_reward_KxN.shape[0],))
    valid_KxN = node_valid_KxN & tree_valid_K[:, None]
    K, N = node_reward_KxN.shape
    if baseline == "root":
        reference_KxD = root_reward_K[:, None]
        known_KxD = tree_valid_K[:, None]
        level_KxN = jnp.zeros_like(depth_KxN)
    elif baseline == "per_depth":
        # N nodes have at most N depths.
        at_KxNxD = valid_KxN[..., None] & (depth_KxN[..., None] == jnp.arange(N)[None, None])
        known_KxD = at_KxNxD.any(axis=1)
        reference_KxD = _exact_mean(node_reward_KxN, at_KxNxD)
        level_KxN = depth_KxN
    else:
        raise ValueError(f"baseline={baseline!r}: 'root' or 'per_depth' is expected")
    other_KxK = tree_valid_K[None, :] & ~jnp.eye(K, dtype=bool)

    def node(reward: Array, level: Array, other_K: Array) -> Array:
        counted_K = other_K & known_KxD[:, level]
        difference_K = jnp.where(counted_K, reward - reference_KxD[:, level], 0.0)
        return difference_K.sum() / jnp.maximum(counted_K.sum(), 1)

    over_nodes = jax.vmap(node, in_axes=(0, 0, None))
    advantage_KxN = jax.vmap(over_nodes)(node_reward_KxN, level_KxN, other_KxK)
    if baseline == "root":
        alone = tree_valid_K.sum() == 1
        own_KxN = node_reward_KxN - root_reward_K[:, None]
        advantage_KxN = jnp.where(alone, own_KxN, advantage_KxN)
    return jnp.where(valid_KxN, advantage_KxN, 0.0)


def _exact_mean(value_KxN: Array, member_KxNxD: Array) -> Array:
    """Means that equal their members exactly when all members are equal: first + mean of differences."""
    first_KxD = jnp.argmax(member_KxNxD, axis=1)
    anchor_KxD = jnp.take_along_axis(value_KxN, first_KxD, axis=1)
    off_KxNxD = jnp.where(member_KxNxD, value_KxN[..., None] - anchor_KxD[:, None], 0.0)
    return anchor_KxD + off_KxNxD.sum(axis=1) / jnp.maximum(member_KxNxD.sum(axis=1), 1)
