"""Delegation credit: how much of a successful tree grew from one launch.

Source: SERA (arXiv 2610.04902), leaf coverage with the root-balanced baseline.
"""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def leaf_coverage(
    parent_N: Int[Array, "N"],
    event_N: Int[Array, "N"],
    valid_N: Bool[Array, "N"],
    num_events: int,
) -> Float[Array, "E"]:
    """Share of a tree's leaves that lie below each event's children.

    coverage(e) = |union over children c of e of leaves(c)| / |leaves(root)|

    An event is all launches of one turn of one node; a leaf is a node without children. A tree without
    a launch has one leaf, its root. An event without children covers 0.

    Example: the root launches A and B in one turn, A launches C and D in one: leaves are B, C, D; the
    root's event covers 3/3 = 1, A's event 2/3.

    Args:
      parent_N: Parent of each node, -1 at the root; a parent comes before its children.
      event_N: Event that created each node, -1 for the root or for none of the events asked about.
      valid_N: Nodes that exist.
      num_events: E.
    """
    chex.assert_rank([parent_N, event_N, valid_N], 1)
    chex.assert_equal_shape([parent_N, event_N, valid_N])
    parent_N, event_N = jnp.asarray(parent_N), jnp.asarray(event_N)
    N = parent_N.shape[0]
    # -1 would wrap around to the last node; only valid non-root nodes mark their parent.
    non_root_N = valid_N & (parent_N >= 0)
    has_child_N = jnp.zeros(N, bool).at[jnp.where(non_root_N, parent_N, N)].set(True, mode="drop")
    leaf_N = valid_N & ~has_child_N

    def climb(node: Array, under_E: Array) -> tuple[Array, Array]:
        event = event_N[node]
        slot = jnp.where(event >= 0, event, num_events)
        return parent_N[node], under_E.at[slot].set(True, mode="drop")

    def ancestors(node: Array) -> Array:
        """Events that created the node or one of its ancestors, bool [E]."""

        def body(_, carry):
            node, under_E = carry
            up, marked_E = climb(jnp.maximum(node, 0), under_E)
            going = node >= 0
            return jnp.where(going, up, node), jnp.where(going, marked_E, under_E)

        start = (node, jnp.zeros(num_events, bool))
        # No path is longer than the number of nodes.
        return jax.lax.fori_loop(0, N, body, start)[1]

    under_NxE = jax.vmap(ancestors)(jnp.arange(N)) & leaf_N[:, None]
    return under_NxE.sum(axis=0) / jnp.maximum(leaf_N.sum(), 1)


def event_mean(reward_KxE: Float[Array, "K E"], valid_KxE: Bool[Array, "K E"]) -> Float[Array, "K"]:
    """Mean reward of each tree's events; 0 for a tree without one, even if its root succeeded.

    Computed around the tree's first event, so that equal rewards have exactly their own mean.
    """
    chex.assert_rank([reward_KxE, valid_KxE], 2)
    chex.assert_equal_shape([reward_KxE, valid_KxE])
    first_K = jnp.argmax(valid_KxE, axis=1)
    anchor_K = jnp.take_along_axis(reward_KxE, first_K[:, None], axis=1)[:, 0]
    off_KxE = jnp.where(valid_KxE, reward_KxE - anchor_K[:, None], 0.0)
    mean_K = anchor_K + off_KxE.sum(axis=1) / jnp.maximum(valid_KxE.sum(axis=1), 1)
    return jnp.where(valid_KxE.any(axis=1), mean_K, 0.0)


def delegation_advantage(
    reward_KxE: Float[Array, "K E"],
    valid_KxE: Bool[Array, "K E"],
    tree_valid_K: Bool[Array, "K"],
) -> Float[Array, "K E"]:
    """A(e in tree k) = r(e) - mean over j != k of m_j, with m_j the mean reward of tree j's events.

    Example: tree means (5/6, 0, 1/2), the events of tree 0 have rewards 1 and 2/3: its baseline is
    1/4, the advantages are 0.75 and 0.4167.

    Undefined with fewer than two valid trees: 0.
    """
    chex.assert_rank([reward_KxE, valid_KxE, tree_valid_K], [2, 2, 1])
    chex.assert_equal_shape([reward_KxE, valid_KxE])
    mean_K = event_mean(reward_KxE, valid_KxE)
    other_KxK = tree_valid_K[None, :] & ~jnp.eye(len(mean_K), dtype=bool)
    difference_KxExK = reward_KxE[..., None] - mean_K[None, None, :]
    total_KxE = jnp.where(other_KxK[:, None, :], difference_KxExK, 0.0).sum(axis=-1)
    advantage_KxE = total_KxE / jnp.maximum(other_KxK.sum(axis=1), 1)[:, None]
    return jnp.where(valid_KxE & tree_valid_K[:, None], advantage_KxE, 0.0)
