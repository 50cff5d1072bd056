"""Depth weights and trained tokens."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sera_jax.credit.depth import depth_weights
from sera_jax.credit.roles import trained_mask
from sera_jax.types import Role, Stage


def test_the_worked_example():
    # n_0 = 6, t_0 = 4, n_1 = 12, t_1 = 12: 18 / (6/4 + 12/12) = 7.2; 7.2/4 = 1.8; 7.2/12 = .6.
    depth = jnp.array([0] * 6 + [1] * 12)
    starts = jnp.array([True] * 4 + [False] * 2 + [True] * 12)
    want = [1.8] * 6 + [0.6] * 12
    np.testing.assert_allclose(depth_weights(depth, starts, 2), want, rtol=1e-6)
    np.testing.assert_allclose(jax.jit(depth_weights, static_argnums=2)(depth, starts, 2), want, rtol=1e-6)
    stacked = jax.vmap(lambda d, s: depth_weights(d, s, 2))(jnp.stack([depth] * 2), jnp.stack([starts] * 2))
    np.testing.assert_allclose(stacked, [want] * 2, rtol=1e-6)


def test_padding_does_not_count():
    depth = jnp.array([0] * 6 + [1] * 12 + [0] * 14)
    starts = jnp.array([True] * 4 + [False] * 2 + [True] * 12 + [True] * 14)
    got = depth_weights(depth, starts, 5, valid_S=jnp.arange(32) < 18)
    np.testing.assert_allclose(got, [1.8] * 6 + [0.6] * 12 + [0.0] * 14, rtol=1e-6)


def test_a_depth_without_a_start_has_no_weight():
    got = depth_weights(jnp.array([0, 1]), jnp.array([True, False]), 2)
    # Only depth 0 can be weighted: 2 / (1/1) / 1 = 2.
    np.testing.assert_allclose(got, [2.0, 0.0])


JITTED = jax.jit(depth_weights, static_argnums=2)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=40))
@settings(max_examples=30, deadline=None)
def test_the_mean_weight_is_one(depths):
    n = len(depths)
    depth = np.array(depths + [0] * (40 - n), np.int32)  # one shape, one compilation
    weights = JITTED(jnp.asarray(depth), jnp.ones(40, bool), 5, jnp.arange(40) < n)
    weights, depth = np.asarray(weights)[:n], depth[:n]
    assert abs(weights.mean() - 1) < 1e-5
    # Every depth has the same share of the weight.
    shares = [weights[depth == d].sum() for d in set(depths)]
    np.testing.assert_allclose(shares, shares[0], rtol=1e-5)


def test_stages_train_disjoint_roles_up_to_the_launch():
    roles = np.array([int(role) for role in Role], np.uint8)
    masks = {stage: set(roles[trained_mask(roles, stage)]) for stage in Stage}
    assert masks[Stage.EXECUTION] == {Role.EXECUTE, Role.LAUNCH}
    assert masks[Stage.DELEGATION] == {Role.LAUNCH}
    assert masks[Stage.RUBRIC] == {Role.RUBRIC}
    for never in (Role.PAD, Role.CONTEXT, Role.SCORE):
        assert all(never not in mask for mask in masks.values())
