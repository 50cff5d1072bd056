"""Per-token losses: literal values and gradients, jit, vmap, refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sera_jax.objectives import LossInputs, cispo, grpo, supervised


def inputs(logprob, old, advantage=1.0, mask=True):
    one = lambda x, dtype=jnp.float32: jnp.atleast_1d(jnp.asarray(x, dtype))
    return LossInputs(one(logprob), one(old), one(advantage), one(mask, bool))


def slope(objective, ratio, advantage=1.0):
    logprob, old = jnp.array([-1.0]), jnp.array([-1.0]) - jnp.log(ratio)
    loss = lambda lp: objective(inputs(lp, old, advantage)).loss_T.sum()
    return float(jax.grad(loss)(logprob)[0])


def test_cispo_bounds_are_absolute_ratios():
    objective = cispo(0.0, 5.0)
    # Ratio 8 is cut to 5 (an offset of 5 would give 6); ratio 1/8 passes, there is no lower bound.
    assert slope(objective, 8.0) == pytest.approx(-5.0)
    assert slope(objective, 0.125) == pytest.approx(-0.125)
    assert slope(objective, 1.0, advantage=-2.0) == pytest.approx(2.0)
    assert slope(cispo(0.5, 5.0), 0.125) == pytest.approx(-0.5)


def test_cispo_reports_ratio_and_clipping():
    out = cispo()(inputs([-1.0, -1.0], [-1.0 - np.log(8.0), -1.0], [1.0, 1.0], [True, True]))
    np.testing.assert_allclose(out.metrics_T["ratio"], [8.0, 1.0], rtol=1e-5)
    np.testing.assert_array_equal(out.metrics_T["clipped"], [1.0, 0.0])
    np.testing.assert_allclose(out.loss_T, [5.0, 1.0], rtol=1e-5)  # -clip(ratio) * 1 * (-1)


def test_cispo_masked_tokens_cannot_overflow():
    out = cispo()(inputs([0.0], [-1e4], [0.0], [False]))
    assert np.all(np.isfinite(out.loss_T)) and float(out.metrics_T["ratio"][0]) == 1.0


def test_grpo_is_pessimistic():
    objective = grpo(0.2, 0.26)
    # Advantage 1: above 1.26 the gradient is gone; below .8 it stays. Loss at ratio 2: -1.26.
    assert slope(objective, 2.0) == 0.0 and slope(objective, 0.5) == pytest.approx(-0.5)
    assert slope(objective, 0.5, advantage=-1.0) == 0.0
    assert slope(objective, 2.0, advantage=-1.0) == pytest.approx(2.0)
    out = objective(inputs(np.log(2.0) - 1, -1.0))
    assert float(out.loss_T[0]) == pytest.approx(-1.26, rel=1e-5)


def test_supervised_is_weighted_likelihood():
    out = supervised(inputs([-2.0, -3.0], [0.0, 0.0], [1.0, 0.5], [True, True]))
    np.testing.assert_allclose(out.loss_T, [2.0, 1.5])


@pytest.mark.parametrize("objective", [cispo(), grpo(), supervised])
def test_under_jit_and_vmap(objective):
    one = inputs([-1.0, -2.0], [-1.5, -1.0], [1.0, -1.0], [True, True])
    want = objective(one).loss_T
    np.testing.assert_allclose(jax.jit(objective)(one).loss_T, want, rtol=1e-6)
    stacked = jax.tree.map(lambda x: jnp.stack([x, x]), one)
    np.testing.assert_allclose(jax.vmap(objective)(stacked).loss_T, jnp.stack([want, want]), rtol=1e-6)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: cispo(-0.1, 5.0), "ratio_min=-0.1: at least 0 is expected"),
        (lambda: cispo(2.0, 1.0), "ratio_max=1.0: more than ratio_min=2.0 is expected"),
        (lambda: grpo(1.0), "clip_low=1.0: a value in .0, 1. is expected"),
        (lambda: grpo(0.2, -1.0), "clip_high=-1.0: at least 0 is expected"),
    ],
)
def test_refusals(make, message):
    with pytest.raises(ValueError, match=message):
        make()
