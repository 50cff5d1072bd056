"""linear_cispo: implementations against the plain truth, masks, ragged chunks, refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.linear_cispo import ImplementationError, choose, linear_cispo, linear_logprob


def problem(tokens=8, hidden=4, vocabulary=10, seed=0, scale=1.0, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(seed), 4)
    return (
        (scale * jax.random.normal(keys[0], (tokens, hidden))).astype(dtype),
        jax.random.normal(keys[1], (vocabulary, hidden)).astype(dtype),
        jax.random.randint(keys[2], (tokens,), 0, vocabulary),
        jax.random.bernoulli(keys[3], 0.6, (tokens,)),
    )


def value_and_gradients(implementation, hidden, head, targets, mask, **options):
    weight = jnp.arange(1.0, len(targets) + 1) / len(targets)

    def total(hidden, head):
        logprob = linear_logprob(
            hidden, head, targets, mask_T=mask, implementation=implementation, **options
        )
        return jnp.sum(weight * logprob), logprob

    (_, logprob), gradients = jax.value_and_grad(total, argnums=(0, 1), has_aux=True)(hidden, head)
    return logprob, *gradients


JITTED = jax.jit(value_and_gradients, static_argnums=0, static_argnames=("chunk_size", "capacity"))


def assert_equal_to_reference(arguments, atol=2e-5, **options):
    want = JITTED("reference", *arguments)
    got = JITTED("xla", *arguments, **options)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(
            np.asarray(a, np.float32), np.asarray(b, np.float32), atol=atol, rtol=atol
        )


def test_a_literal_value():
    # Logits (2, 1, 0) at temperature 1/2 are (4, 2, 0): 4 - log(e^4 + e^2 + 1) = -.1429; at 1: -.4076.
    hidden, head = jnp.array([[1.0]]), jnp.array([[2.0], [1.0], [0.0]])
    for implementation in ("reference", "xla"):
        for temperature, want in ((1.0, -0.4076), (0.5, -0.1429)):
            got = linear_logprob(
                hidden,
                head,
                jnp.array([0]),
                temperature=temperature,
                implementation=implementation,
                chunk_size=2,
            )
            assert float(got[0]) == pytest.approx(want, abs=1e-4)


@pytest.mark.parametrize("chunk", [1, 3, 4, 10, 64])
def test_the_chunk_is_a_memory_knob_only(chunk):
    assert_equal_to_reference(problem(), chunk_size=chunk)


@pytest.mark.parametrize(("vocabulary", "chunk"), [(4099, 512), (997, 128), (7, 5), (1, 4), (4099, 4098)])
def test_vocabularies_that_no_chunk_divides(vocabulary, chunk):
    assert_equal_to_reference(problem(13, 8, vocabulary), chunk_size=chunk)


@given(st.sampled_from([(1, 5, 3), (7, 23, 4)]), st.floats(0.3, 3), st.integers(0, 99))
@settings(max_examples=12, deadline=None)
def test_drawn_values(shape, temperature, seed):
    tokens, vocabulary, chunk = shape
    arguments = problem(tokens, 6, vocabulary, seed)
    temperature = jnp.float32(temperature)
    want = JITTED("reference", *arguments, temperature=temperature)
    got = JITTED("xla", *arguments, temperature=temperature, chunk_size=chunk)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5, rtol=2e-5)


def test_untrained_tokens_have_no_value_and_no_gradient():
    hidden, head, targets, mask = problem()
    for implementation in ("reference", "xla"):
        logprob, d_hidden, _ = value_and_gradients(implementation, hidden, head, targets, mask)
        assert not np.any(np.asarray(logprob)[~np.asarray(mask)])
        assert not np.any(np.asarray(d_hidden)[~np.asarray(mask)])
        nothing = value_and_gradients(implementation, hidden, head, targets, jnp.zeros(8, bool))
        assert not any(np.any(x) for x in nothing)


def test_gathering_trained_rows_changes_nothing():
    hidden, head, targets, mask = problem(16, 4, 11)
    trained = int(mask.sum())
    for capacity in (trained, trained + 2):
        assert_equal_to_reference((hidden, head, targets, mask), chunk_size=4, capacity=capacity)
    with jax.debug_nans(False):  # a broken promise is seen
        broken = linear_logprob(
            hidden, head, targets, mask_T=mask, implementation="xla", capacity=trained - 1
        )
    assert int(np.isnan(np.asarray(broken)).sum()) == 1


def test_extreme_logits_stay_finite():
    hidden, head, targets, _ = problem(6, 4, 50, scale=1e4)
    mask = jnp.ones(6, bool)
    for implementation in ("reference", "xla"):
        values = value_and_gradients(implementation, hidden, head, targets, mask)
        assert all(np.all(np.isfinite(x)) for x in values)
    want = value_and_gradients("reference", hidden, head, targets, mask)[0]
    got = value_and_gradients("xla", hidden, head, targets, mask, chunk_size=7)[0]
    np.testing.assert_allclose(got, want, rtol=1e-5)


def test_bf16_inputs_accumulate_in_float32():
    arguments = problem(32, 64, 300, dtype=jnp.bfloat16)
    exact = value_and_gradients(
        "reference", *[jnp.asarray(a, jnp.float32) for a in arguments[:2]], *arguments[2:]
    )
    got = value_and_gradients("xla", *arguments, chunk_size=64)
    np.testing.assert_allclose(got[0], exact[0], atol=1e-2)
    for a, b in zip(got[1:], exact[1:], strict=True):
        assert a.dtype == jnp.bfloat16
        error = np.linalg.norm(np.asarray(a, np.float32) - b) / np.linalg.norm(b)
        assert error < 2e-2


def test_under_jit_and_vmap():
    hidden, head, targets, mask = problem()
    function = lambda h, t, m: linear_logprob(h, head, t, mask_T=m, implementation="xla", chunk_size=3)
    want = linear_logprob(hidden, head, targets, mask_T=mask, implementation="reference")
    np.testing.assert_allclose(jax.jit(function)(hidden, targets, mask), want, atol=1e-5)
    stack = lambda x: jnp.stack([x, x])
    got = jax.vmap(function)(stack(hidden), stack(targets), stack(mask))
    np.testing.assert_allclose(got, stack(want), atol=1e-5)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_cispo_loss_and_gradient(implementation):
    # One token, ratio 8 (gap ln 8), bound 5, advantage 1: d loss / d logprob = -5; ratio 1/8: -1/8.
    hidden, head, targets, _ = problem(1)
    mask = jnp.ones(1, bool)
    logprob = linear_logprob(hidden, head, targets, implementation=implementation)
    d_logprob = jax.grad(lambda h: linear_logprob(h, head, targets, implementation=implementation).sum())(
        hidden
    )
    for ratio, slope in ((8.0, -5.0), (0.125, -0.125)):
        old = logprob - jnp.log(ratio)
        loss = lambda h, old=old: linear_cispo(
            h, head, targets, old, jnp.ones(1), mask, implementation=implementation
        )
        (value, metrics), gradient = jax.value_and_grad(loss, has_aux=True)(hidden)
        assert float(metrics["ratio"][0]) == pytest.approx(ratio, rel=1e-5)
        assert float(value) == pytest.approx(slope * float(logprob[0]), rel=1e-4)
        np.testing.assert_allclose(gradient, slope * d_logprob, rtol=1e-4, atol=1e-6)


def test_the_denominator_counts_trained_tokens():
    hidden, head, targets, mask = problem()
    old = linear_logprob(hidden, head, targets)
    arguments = (hidden, head, targets, old, jnp.ones(8), mask)
    loss, _ = linear_cispo(*arguments)
    want = -np.asarray(old)[np.asarray(mask)].mean()  # ratio 1, advantage 1
    assert float(loss) == pytest.approx(float(want), rel=1e-5)
    half, _ = linear_cispo(*arguments, denominator=2.0 * float(mask.sum()))
    assert float(half) == pytest.approx(float(want) / 2, rel=1e-5)
    empty, _ = linear_cispo(*arguments[:5], jnp.zeros(8, bool))
    assert float(empty) == 0.0


def test_the_choice_of_implementation():
    assert choose(64, 200) == "reference" and choose(1024, 151936) == "xla"
    assert choose(1024, 151936, "reference") == "reference"
    for name in ("tpu", "gpu"):
        with pytest.raises(ImplementationError, match=f"implementation='{name}' is not available"):
            choose(8, 8, name)
    with pytest.raises(ImplementationError, match="implementation='cuda': one of reference, xla, tpu, gpu"):
        choose(8, 8, "cuda")
    hidden, head, targets, _ = problem()
    for option in ("chunk_size", "capacity"):
        with pytest.raises(ValueError, match=f"{option}=0: at least 1 is expected"):
            linear_logprob(hidden, head, targets, **{option: 0})
