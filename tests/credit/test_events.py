"""Leaf coverage and delegation advantages."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sera_jax.credit.events import delegation_advantage, event_mean, leaf_coverage

# The root (0) launches A (1) and B (2) in event 0; A launches C (3) and D (4) in event 1.
PARENT = jnp.array([-1, 0, 0, 1, 1, 0, 0, 0])
EVENT = jnp.array([-1, 0, 0, 1, 1, 0, 0, 0])
VALID = jnp.arange(8) < 5


@pytest.mark.parametrize("jitted", [False, True])
def test_coverage_of_the_worked_example(jitted):
    function = jax.jit(leaf_coverage, static_argnames="num_events") if jitted else leaf_coverage
    # Leaves B, C, D: the root's event has all three below it, A's event two of them.
    np.testing.assert_allclose(function(PARENT, EVENT, VALID, num_events=2), [1.0, 2 / 3], rtol=1e-6)


def test_an_event_without_children_covers_nothing_and_a_lone_root_is_a_leaf():
    np.testing.assert_array_equal(leaf_coverage(PARENT, EVENT, VALID, 3)[2], 0.0)
    alone = jnp.arange(8) < 1
    np.testing.assert_array_equal(leaf_coverage(PARENT, EVENT, alone, 1), [0.0])


def test_coverage_under_vmap():
    stack = lambda x: jnp.stack([x, x])
    got = jax.vmap(lambda p, e, v: leaf_coverage(p, e, v, 2))(stack(PARENT), stack(EVENT), stack(VALID))
    np.testing.assert_allclose(got, [[1.0, 2 / 3]] * 2, rtol=1e-6)


JITTED = jax.jit(leaf_coverage, static_argnums=3)


@given(st.lists(st.integers(0, 6), min_size=1, max_size=7))
@settings(max_examples=30, deadline=None)
def test_coverage_equals_a_plain_count(choices):
    # Node n + 1 hangs below a node among the first n + 1; each parent launches all its children at once.
    parent = [-1] + [c % (n + 1) for n, c in enumerate(choices)]
    parents = sorted(set(parent[1:]))
    event = [-1] + [parents.index(p) for p in parent[1:]]
    children = {n: [m for m in range(len(parent)) if parent[m] == n] for n in range(len(parent))}

    def leaves(n):
        return {n} if not children[n] else set().union(*(leaves(c) for c in children[n]))

    total = len(leaves(0))
    want = [len(set().union(*(leaves(c) for c in children[p]))) / total for p in parents]
    pad = 8 - len(parent)
    got = JITTED(
        jnp.array(parent + [0] * pad), jnp.array(event + [0] * pad), jnp.arange(8) < len(parent), 8
    )
    np.testing.assert_allclose(got[: len(parents)], want, rtol=1e-6)
    assert np.all((got >= 0) & (got <= 1))


REWARD = jnp.array([[1.0, 2 / 3], [0.0, 0.0], [0.5, 0.5]])
HAS = jnp.array([[True, True], [False, False], [True, True]])


def test_root_balanced_advantages():
    # Tree means 5/6, 0, 1/2. Tree 0: baseline (0 + 1/2)/2 = 1/4: .75 and .4167.
    got = delegation_advantage(REWARD, HAS, jnp.ones(3, bool))
    np.testing.assert_allclose(got[0], [0.75, 5 / 12], rtol=1e-6)
    np.testing.assert_array_equal(got[1], [0.0, 0.0])
    # Tree 2: baseline (5/6 + 0)/2 = 5/12: 1/2 - 5/12 = 1/12.
    np.testing.assert_allclose(got[2], [1 / 12, 1 / 12], rtol=1e-5)
    np.testing.assert_allclose(
        jax.jit(delegation_advantage)(REWARD, HAS, jnp.ones(3, bool)), got, rtol=1e-6
    )
    stack = lambda x: jnp.stack([x, x])
    np.testing.assert_allclose(
        jax.vmap(delegation_advantage)(stack(REWARD), stack(HAS), jnp.ones((2, 3), bool))[1], got, rtol=1e-6
    )


def test_equal_event_rewards_are_exactly_zero():
    reward = jnp.full((8, 3), 0.2, jnp.float32)
    valid = jnp.array([[True, True, k % 2 == 0] for k in range(8)])
    np.testing.assert_array_equal(event_mean(reward, valid), np.full(8, np.float32(0.2)))
    assert not np.any(delegation_advantage(reward, valid, jnp.ones(8, bool)))


def test_one_valid_tree_has_no_advantage():
    assert not np.any(delegation_advantage(REWARD, HAS, jnp.array([True, False, False])))
