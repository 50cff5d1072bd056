"""The update step: what it must not depend on, and what it must refuse to do."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from sera_jax.learner.packing import pack
from sera_jax.learner.update import TrainState, loss_sum, make_optimizer, make_update
from sera_jax.objectives import LossOutputs, cispo
from sera_jax.policy import qwen3
from sera_jax.types import Role, Sample

CFG = qwen3.tiny(
    50, num_layers=2, hidden_size=16, num_heads=2, num_kv_heads=1, head_dim=8, intermediate_size=32
)
PARAMS = jax.tree.map(lambda x: x * 4 if x.ndim > 1 else x, qwen3.init(jax.random.key(0), CFG))


def samples(seed=0, count=7):
    rng = np.random.default_rng(seed)
    result = []
    for i in range(count):
        length = int(rng.integers(6, 16))
        roles = np.full(length, int(Role.CONTEXT), np.uint8)
        roles[4:] = int(Role.EXECUTE)
        mask = roles == Role.EXECUTE
        result.append(
            Sample(
                token_ids=rng.integers(0, 50, length).astype(np.int32),
                roles=roles,
                mask=mask,
                advantage=np.where(mask, rng.normal(), 0).astype(np.float32),
                logprobs=np.where(mask, -rng.uniform(2, 5, length), 0).astype(np.float32),
                source=(0, i),
            )
        )
    return result


def gradient(rows, micro_rows=None):
    """Gradient of the global token mean, by the learner's own accumulation when micro_rows is given."""
    count = rows.mask.sum()
    if micro_rows is None:
        total = lambda p: loss_sum(p, CFG, cispo(), jax.tree.map(jnp.asarray, rows))[0] / count
        return jax.grad(total)(PARAMS)
    lr = 1.0  # plain gradient descent: the step is the gradient
    update = make_update(CFG, cispo(), optax.sgd(lr), micro_rows=micro_rows)
    state, _ = update(TrainState.create(PARAMS, optax.sgd(lr)), rows)
    return jax.tree.map(lambda before, after: before - after, PARAMS, state.params)


def assert_close(a, b, atol=1e-5):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, atol=atol)


@pytest.fixture(scope="module")
def truth():
    """One sample a row, nothing packed."""
    return gradient(pack(samples(), row_length=16)[0])


@pytest.mark.parametrize("row_length", [16, 40, 128])
def test_gradient_does_not_depend_on_packing_or_padding(truth, row_length):
    assert_close(gradient(pack(samples(), row_length=row_length)[0]), truth)


@pytest.mark.parametrize("micro_rows", [1, 2, 3, 8])
def test_gradient_does_not_depend_on_micro_batches(truth, micro_rows):
    assert_close(gradient(pack(samples(), row_length=16)[0], micro_rows), truth)


def test_gradient_does_not_depend_on_the_order_of_samples(truth):
    assert_close(gradient(pack(samples()[::-1], row_length=40)[0], 2), truth)


def test_the_loss_is_a_global_token_mean():
    # Losses 1 on 2 tokens and 4 on 8 tokens: (2 * 1 + 8 * 4)/10 = 3.4, not (1 + 4)/2 = 2.5.
    def literal(inputs):
        return LossOutputs(inputs.advantage_T + 0 * inputs.logprob_T, {})

    def one(tokens, loss):
        mask = np.arange(tokens + 1) > 0
        advantage = np.where(mask, loss, 0).astype(np.float32)
        zeros = np.zeros(tokens + 1)
        return Sample(
            zeros.astype(np.int32), zeros.astype(np.uint8), mask, advantage, zeros.astype(np.float32)
        )

    rows, _ = pack([one(2, 1.0), one(8, 4.0)], row_length=9)
    for micro_rows in (1, 2):
        update = make_update(CFG, literal, optax.sgd(0.1), micro_rows=micro_rows)
        _, metrics = update(TrainState.create(PARAMS, optax.sgd(0.1)), rows)
        assert metrics["loss"] == pytest.approx(3.4, rel=1e-6) and metrics["trained_tokens"] == 10


def test_tokens_that_are_not_trained_have_exactly_no_gradient():
    rows, _ = pack(samples(), row_length=16)
    nothing = rows.replace(mask=np.zeros_like(rows.mask))
    total = lambda p: loss_sum(p, CFG, cispo(), jax.tree.map(jnp.asarray, nothing))[0]
    assert not any(np.any(g) for g in jax.tree.leaves(jax.grad(total)(PARAMS)))
    # What context tokens carry as advantage or log-prob is never looked at.
    wild = rows.replace(
        advantage=np.where(rows.mask, rows.advantage, 1e3).astype(np.float32),
        old_logprobs=np.where(rows.mask, rows.old_logprobs, 77.0).astype(np.float32),
    )
    assert_close(gradient(wild), gradient(rows), atol=0)


def test_an_update_without_trained_tokens_advances_the_version_only():
    optimizer = make_optimizer(learning_rate=0.1)
    update = make_update(CFG, cispo(), optimizer, micro_rows=2)
    state, metrics = update(TrainState.create(PARAMS, optimizer), pack([], row_length=8)[0])
    assert int(state.version) == 1 and metrics["skipped_no_trained_tokens"] == 1
    assert_close(state.params, PARAMS, atol=0)


def test_a_gradient_that_is_not_finite_is_skipped_and_counted():
    def explode(inputs):
        return LossOutputs(inputs.logprob_T * jnp.inf, {})

    optimizer = make_optimizer(learning_rate=0.1)
    with jax.debug_nans(False):
        update = make_update(CFG, explode, optimizer, micro_rows=8)
        start = TrainState.create(PARAMS, optimizer)
        before = jax.tree.map(np.array, start.opt_state)
        state, metrics = update(start, pack(samples(), row_length=16)[0])
    assert int(state.version) == 1 and metrics["skipped_nonfinite"] == 1
    assert_close(state.params, PARAMS, atol=0)
    assert_close(state.opt_state, before, atol=0)


def test_the_first_update_learns_and_the_clip_holds():
    optimizer = make_optimizer(learning_rate=0.1, warmup_steps=10, weight_decay=0.0)
    update = make_update(CFG, cispo(), optimizer, micro_rows=8)
    state, metrics = update(TrainState.create(PARAMS, optimizer), pack(samples(), row_length=16)[0])
    moved = max(
        float(jnp.abs(a - b).max())
        for a, b in zip(jax.tree.leaves(state.params), jax.tree.leaves(PARAMS), strict=True)
    )
    # Adam's first step is the learning rate, here a tenth of it; clipping cannot change its size.
    assert 0.005 < moved <= 0.0101 and metrics["grad_norm"] > 0


def test_metrics_of_unchanged_weights():
    from sera_jax.learner.update import row_logprobs

    rows, _ = pack(samples(), row_length=16)
    own = np.asarray(row_logprobs(PARAMS, CFG, jax.tree.map(jnp.asarray, rows)))
    rows = rows.replace(old_logprobs=np.where(rows.mask, own, 0).astype(np.float32))
    update = make_update(CFG, cispo(), optax.sgd(0.1), micro_rows=4)
    _, metrics = update(TrainState.create(PARAMS, optax.sgd(0.1)), rows)
    assert metrics["logprob_gap_max"] < 1e-5 and metrics["clipped_mean"] == 0
    assert metrics["ratio_mean"] == pytest.approx(1, abs=1e-5)
    assert metrics["ratio_max"] == pytest.approx(1, abs=1e-4)
