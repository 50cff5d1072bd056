"""Ranking rewards and rubric advantages."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sera_jax.credit.ranking import (
    rank_disc_reward,
    ranking_diagnostics,
    ranking_reward,
    rubric_advantage,
)

SCORE = jnp.array([0.9, 0.6, 0.5, 0.0])
LABEL = jnp.array([True, False, True, False])
ALL = jnp.ones(4, bool)


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["plain", "jit"])
def test_the_worked_example(transform):
    # Gaps .3, .9, -.1, .5; hinges at margin .2: 0, 0, .3, 0: R = -.3/4 = -.075.
    reward, valid = transform(ranking_reward)(SCORE, LABEL, ALL)
    assert valid and float(reward) == pytest.approx(-0.075, abs=1e-7)
    found = transform(ranking_diagnostics)(SCORE, LABEL, ALL)
    assert int(found.pairs) == 4
    assert float(found.accuracy) == 0.75 and float(found.margin_rate) == 0.75
    assert float(found.gap) == pytest.approx(0.4, abs=1e-6)
    assert float(found.hinge) == pytest.approx(0.075, abs=1e-7)
    # Order (1 + 1 + 0 + 1)/4 = .75; mean .5, variance (.16 + .01 + 0 + .25)/4 = .105, deviation .3240;
    # .5 * .75 + .5 * min(1, 2 * .3240) = .699.
    reward, valid = transform(rank_disc_reward)(SCORE, LABEL, ALL)
    assert valid and float(reward) == pytest.approx(0.699, abs=5e-4)


def test_homogeneous_groups_and_missing_scores_are_not_ranked():
    for label in (jnp.ones(4, bool), jnp.zeros(4, bool)):
        assert not ranking_reward(SCORE, label, ALL)[1] and not rank_disc_reward(SCORE, label, ALL)[1]
        assert float(ranking_reward(SCORE, label, ALL)[0]) == 0.0
    # Without branches 0 and 2 there is no success left.
    assert not ranking_reward(SCORE, LABEL, jnp.array([False, True, False, True]))[1]
    # Without branch 1: pairs (.9, 0) and (.5, 0): no loss at all.
    reward, valid = ranking_reward(SCORE, LABEL, jnp.array([True, False, True, True]))
    assert valid and float(reward) == 0.0


JITTED = jax.jit(ranking_reward)


@given(st.lists(st.tuples(st.floats(0, 1, width=32), st.booleans()), min_size=2, max_size=8))
@settings(max_examples=30, deadline=None)
def test_bounds_and_order(branches):
    def rank(branches):
        rest = [(0.0, False)] * (8 - len(branches))  # one shape, one compilation
        score, label = zip(*branches, *rest, strict=True)
        valid = jnp.arange(8) < len(branches)
        return JITTED(jnp.asarray(score, jnp.float32), jnp.asarray(label, bool), valid)

    reward, ranked = rank(branches)
    labels = [label for _, label in branches]
    assert bool(ranked) == (any(labels) and not all(labels))
    assert -1.2 - 1e-6 <= float(reward) <= 0
    # Order of the branches does not matter.
    assert float(rank(branches[::-1])[0]) == pytest.approx(float(reward), abs=1e-6)


def test_rubric_advantages_by_batch_and_by_task():
    reward, valid = jnp.array([-0.1, -0.3, 0.0]), jnp.ones(3, bool)
    task = jnp.array([0, 0, 1])
    # Batch: -.1 - (-.3 + 0)/2 = .05; -.3 - (-.1)/2 = -.25; 0 - (-.4)/2 = .2.
    np.testing.assert_allclose(rubric_advantage(reward, valid, task), [0.05, -0.25, 0.2], atol=1e-7)
    # Task: -.1 - (-.3) = .2 and back; the third is alone in its task.
    got = rubric_advantage(reward, valid, task, "task")
    np.testing.assert_allclose(got, [0.2, -0.2, 0.0], atol=1e-7)
    one = rubric_advantage(reward[:1], valid[:1], task[:1])
    np.testing.assert_array_equal(one, [0.0])
    equal = rubric_advantage(jnp.full(7, -0.3), jnp.ones(7, bool), jnp.zeros(7, jnp.int32), "task")
    assert not np.any(equal)


def test_under_vmap():
    reward, valid = jax.vmap(ranking_reward)(
        jnp.stack([SCORE] * 2), jnp.stack([LABEL, ~LABEL]), jnp.stack([ALL] * 2)
    )
    # Labels swapped: gaps -.3, .1, -.9, -.5; hinges .5, .1, 1.1, .7: mean .6.
    np.testing.assert_allclose(reward, [-0.075, -0.6], atol=1e-6)
    assert valid.all()


def test_an_unknown_scope_is_refused():
    with pytest.raises(ValueError, match="scope='tree': 'batch' or 'task' is expected"):
        rubric_advantage(jnp.zeros(2), jnp.ones(2, bool), jnp.zeros(2, jnp.int32), "tree")
