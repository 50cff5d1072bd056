"""The gradient does not depend on the device mesh."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sera_jax.learner.packing import pack
from sera_jax.learner.update import loss_sum
from sera_jax.objectives import cispo
from sera_jax.policy import qwen3
from sera_jax.policy.sharding import make_mesh, param_shardings, row_sharding
from sera_jax.types import Role, Sample

CFG = qwen3.tiny(
    48,
    num_layers=2,
    hidden_size=16,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=32,
    unroll=1,
)


def rows():
    rng = np.random.default_rng(0)
    samples = []
    for length in (12, 9, 16, 7, 11, 16, 5, 13):
        mask = np.arange(length) >= 3
        advantage = np.where(mask, rng.normal(), 0).astype(np.float32)
        logprobs = np.where(mask, -rng.uniform(2, 5, length), 0).astype(np.float32)
        roles = np.where(mask, Role.EXECUTE, Role.CONTEXT).astype(np.uint8)
        ids = rng.integers(0, 48, length).astype(np.int32)
        samples.append(Sample(ids, roles, mask, advantage, logprobs))
    return pack(samples, row_length=16, rows_multiple=8)[0]


@pytest.mark.parametrize("shape", [(8, 1, 1), (1, 8, 1), (1, 1, 2), (2, 2, 2)])
def test_loss_and_gradient_on_a_mesh_equal_one_device(shape):
    params = qwen3.init(jax.random.key(0), CFG)
    # The learner's loss: the mean over the trained tokens of the whole step.
    total = jax.value_and_grad(lambda p, r: loss_sum(p, CFG, cispo(), r)[0] / r.mask.sum())
    batch = jax.tree.map(jnp.asarray, rows())
    want_loss, want = jax.jit(total)(params, batch)
    assert max(float(jnp.abs(g).max()) for g in jax.tree.leaves(want)) > 0.1  # far above the tolerance
    mesh = make_mesh(shape, jax.devices()[: math.prod(shape)])
    placed = jax.device_put(params, param_shardings(CFG, mesh))
    spread = jax.tree.map(lambda x: jax.device_put(x, row_sharding(mesh)), batch)
    assert len(placed["embed"].sharding.device_set) == math.prod(shape)
    loss, gradient = jax.jit(total)(placed, spread)
    np.testing.assert_allclose(loss, want_loss, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(gradient), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
