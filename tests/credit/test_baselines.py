"""Leave-one-out baselines: literal numbers, exact zeros, properties."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sera_jax.credit.baselines import execution_advantage, leave_one_out_advantage

ALL = lambda n: jnp.ones(n, bool)


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["plain", "jit"])
def test_leave_one_out_literal(transform):
    # 1 - (0 + .5)/2 = .75; 0 - (1 + .5)/2 = -.75; .5 - (1 + 0)/2 = 0
    got = transform(leave_one_out_advantage)(jnp.array([1.0, 0.0, 0.5]), ALL(3))
    np.testing.assert_array_equal(got, [0.75, -0.75, 0.0])


def test_leave_one_out_ignores_invalid_entries_and_is_zero_alone():
    valid = jnp.array([True, False, True])
    # 1 - .5 = .5 and back; the invalid one gets 0 and counts for nobody.
    np.testing.assert_array_equal(
        leave_one_out_advantage(jnp.array([1.0, 9.0, 0.5]), valid), [0.5, 0.0, -0.5]
    )
    np.testing.assert_array_equal(
        leave_one_out_advantage(jnp.array([1.0, 9.0]), jnp.array([True, False])), [0.0, 0.0]
    )


@pytest.mark.parametrize(("reward", "size"), [(0.2, 8), (0.3, 7), (0.7, 5), (1 / 3, 6)])
def test_equal_rewards_are_exactly_zero(reward, size):
    value = jnp.full(size, reward, jnp.float32)
    assert not np.any(leave_one_out_advantage(value, ALL(size)))
    node = jnp.full((size, 3), reward, jnp.float32)
    depth = jnp.tile(jnp.array([[0, 1, 1]]), (size, 1))
    for baseline in ("root", "per_depth"):
        got = execution_advantage(node, value, jnp.ones((size, 3), bool), ALL(size), depth, baseline)
        assert not np.any(got), baseline


JITTED = jax.jit(leave_one_out_advantage)


def padded(values, dtype, size=9):
    """One shape for every drawn example: one compilation."""
    return jnp.asarray(list(values) + [0] * (size - len(values)), dtype)


@given(st.lists(st.floats(0, 1, width=32), min_size=2, max_size=9), st.randoms())
@settings(max_examples=30, deadline=None)
def test_permuting_trees_permutes_advantages(values, rng):
    n, order = len(values), list(range(len(values)))
    rng.shuffle(order)
    valid = padded([1] * n, bool)
    whole = np.asarray(JITTED(padded(values, jnp.float32), valid))[:n]
    shuffled = np.asarray(JITTED(padded([values[i] for i in order], jnp.float32), valid))[:n]
    np.testing.assert_allclose(shuffled, whole[order], atol=1e-6)
    # v_k - mean of the others = (n v_k - sum) / (n - 1)
    value = np.array(values, np.float32)
    np.testing.assert_allclose(whole, (n * value - value.sum()) / (n - 1), atol=1e-5)


REWARD = jnp.array([[1.0, 0.8], [0.0, 0.0], [0.0, 0.4]])
ROOT = jnp.array([1.0, 0.0, 0.0])
VALID = jnp.array([[True, True], [True, False], [True, True]])
DEPTH = jnp.array([[0, 1], [0, 0], [0, 1]])


@pytest.mark.parametrize("jitted", [False, True])
def test_execution_advantage_against_root_success(jitted):
    function = jax.jit(execution_advantage, static_argnames="baseline") if jitted else execution_advantage
    got = function(REWARD, ROOT, VALID, ALL(3), DEPTH, baseline="root")
    # Tree 0: baseline (0 + 0)/2 = 0: 1 and .8. Trees 1, 2: baseline (1 + 0)/2 = .5: -.5; .4 - .5 = -.1.
    np.testing.assert_allclose(got, [[1.0, 0.8], [-0.5, 0.0], [-0.5, -0.1]], atol=1e-7)


def test_execution_advantage_per_depth():
    got = execution_advantage(REWARD, ROOT, VALID, ALL(3), DEPTH, "per_depth")
    # Depth 1: only trees 0 and 2 have such nodes: .8 - .4 = .4 and .4 - .8 = -.4.
    np.testing.assert_allclose(got, [[1.0, 0.4], [-0.5, 0.0], [-0.5, -0.4]], atol=1e-7)


def test_a_depth_that_no_other_tree_has_gives_no_signal():
    valid = VALID.at[2, 1].set(False)
    got = execution_advantage(REWARD, ROOT, valid, ALL(3), DEPTH, "per_depth")
    assert got[0, 1] == 0.0 and got[0, 0] == 1.0


def test_one_valid_tree():
    trees = jnp.array([True, False, False])
    # Published rule for n = 1: node reward minus the tree's own root: root 1 - 1 = 0, child .8 - 1.
    got = execution_advantage(REWARD, ROOT, VALID, trees, DEPTH, "root")
    np.testing.assert_allclose(got, [[0.0, -0.2], [0.0, 0.0], [0.0, 0.0]], atol=1e-7)
    assert not np.any(execution_advantage(REWARD, ROOT, VALID, trees, DEPTH, "per_depth"))


def test_vmap_over_tasks():
    stack = lambda x: jnp.stack([x, x])
    got = jax.vmap(execution_advantage)(
        stack(REWARD), stack(ROOT), stack(VALID), stack(ALL(3)), stack(DEPTH)
    )
    np.testing.assert_allclose(got[0], execution_advantage(REWARD, ROOT, VALID, ALL(3), DEPTH), atol=1e-7)
    np.testing.assert_array_equal(got[0], got[1])


def test_an_unknown_baseline_is_refused():
    with pytest.raises(ValueError, match="baseline='mean': 'root' or 'per_depth' is expected"):
        execution_advantage(REWARD, ROOT, VALID, ALL(3), DEPTH, "mean")
