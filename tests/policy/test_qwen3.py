"""The Qwen3 policy: packing, padding, cached decoding, numerics, refusals, shardings."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sera_jax.policy import qwen3, sharding

# hidden / heads is 16, head_dim 8: they are independent. Two query heads share a key/value head.
SMALL = qwen3.tiny(
    31, hidden_size=64, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8
)


def random_params(cfg):
    """Weights made large, so that attention is far from uniform and gains are not 1."""
    draw = np.random.default_rng(0)
    centre = jax.tree.map(
        lambda i: i.initializer == "ones", qwen3.parameter_table(cfg), is_leaf=qwen3.is_info
    )
    noisy = lambda one, x: jnp.asarray(one + 0.15 * draw.normal(size=x.shape), x.dtype)
    return jax.tree.map(noisy, centre, qwen3.abstract(cfg))


def random_ids(shape, seed=0, vocab=31):
    return np.random.default_rng(seed).integers(0, vocab, shape).astype(np.int32)


def run_alone(params, cfg, ids):
    """Hidden states [T, H] of one unpacked, unpadded sequence."""
    ids = np.asarray(ids)[None]
    positions = np.arange(ids.shape[1], dtype=np.int32)[None]
    return forward(params, cfg, ids, positions, np.ones_like(ids))[0]


forward = jax.jit(qwen3.forward, static_argnums=1)
extend = jax.jit(qwen3.extend, static_argnums=1)
prefill = jax.jit(qwen3.prefill, static_argnums=1)
decode_step = jax.jit(qwen3.decode_step, static_argnums=1)


@pytest.fixture(scope="module")
def params():
    return random_params(SMALL)


# --- an independent forward ----------------------------------------------------------------------


def numpy_forward(params, cfg, ids):
    """Qwen3 in float64 with loops over heads and positions, written from the model's description."""
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    norm = lambda x, g: x / np.sqrt((x * x).mean(-1, keepdims=True) + cfg.rms_eps) * g
    T, D = len(ids), cfg.head_dim
    angle = np.arange(T)[:, None] / cfg.rope_theta ** (np.arange(0, D, 2) / D)

    def rope(x):  # [T, D]: dimension i pairs with i + D/2
        cos, sin = (np.concatenate([f(angle)] * 2, -1) for f in (np.cos, np.sin))
        return x * cos + np.concatenate([-x[:, D // 2 :], x[:, : D // 2]], -1) * sin

    x = p["embed"][ids]
    for i in range(cfg.num_layers):
        w = {name: value[i] for name, value in p["layers"].items()}
        h = norm(x, w["attn_norm"])
        outputs = []
        for head in range(cfg.num_heads):
            kv = head // (cfg.num_heads // cfg.num_kv_heads)
            q = rope(norm((h @ w["q"])[:, head * D : (head + 1) * D], w["q_norm"]))
            k = rope(norm((h @ w["k"])[:, kv * D : (kv + 1) * D], w["k_norm"]))
            v = (h @ w["v"])[:, kv * D : (kv + 1) * D]
            scores = q @ k.T / math.sqrt(D)
            scores[np.triu_indices(T, 1)] = -np.inf
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            outputs.append(weights / weights.sum(-1, keepdims=True) @ v)
        x = x + np.concatenate(outputs, -1) @ w["o"]
        h = norm(x, w["mlp_norm"])
        gate = h @ w["gate"]
        x = x + (gate / (1 + np.exp(-gate)) * (h @ w["up"])) @ w["down"]
    return norm(x, p["norm"])


@pytest.mark.parametrize("unroll", [1, 2])
def test_forward_equals_an_independent_float64_forward(params, unroll):
    cfg = dataclasses.replace(SMALL, unroll=unroll)
    ids = random_ids(23)
    np.testing.assert_allclose(run_alone(params, cfg, ids), numpy_forward(params, cfg, ids), atol=2e-5)


def test_causal_blocks_change_nothing():
    # 150 tokens are three blocks of at most 64 query rows.
    cfg = dataclasses.replace(SMALL, num_layers=1, unroll=1)
    params, ids = random_params(cfg), random_ids(150)
    np.testing.assert_allclose(run_alone(params, cfg, ids), numpy_forward(params, cfg, ids), atol=2e-5)


# --- packing -------------------------------------------------------------------------------------


def test_packed_rows_equal_separate_rows(params):
    a, b, c = random_ids(7, 1), random_ids(12, 2), random_ids(4, 3)
    T = 32
    ids, positions, segments = (np.zeros((2, T), np.int32) for _ in range(3))
    for row, start, number, part in ((0, 0, 1, a), (0, 7, 2, b), (1, 0, 5, c)):
        where = slice(start, start + len(part))
        ids[row, where], positions[row, where] = part, np.arange(len(part))
        segments[row, where] = number
    packed = forward(params, SMALL, ids, positions, segments)
    np.testing.assert_allclose(packed[0, :7], run_alone(params, SMALL, a), atol=1e-5)
    np.testing.assert_allclose(packed[0, 7:19], run_alone(params, SMALL, b), atol=1e-5)
    np.testing.assert_allclose(packed[1, :4], run_alone(params, SMALL, c), atol=1e-5)


def test_padding_changes_nothing_and_has_no_gradient(params):
    ids = random_ids((1, 9))
    positions = np.arange(9, dtype=np.int32)[None]
    pad = lambda x, value: np.pad(x, ((0, 1), (0, 5)), constant_values=value)

    def loss(p, ids, positions, segments):
        hidden = qwen3.forward(p, SMALL, ids, positions, segments)
        return jnp.sum(jnp.where((segments > 0)[..., None], hidden, 0.0) ** 2), hidden

    grad = jax.jit(jax.grad(loss, has_aux=True))
    gradient, hidden = grad(params, ids, positions, np.ones_like(ids))
    padded_gradient, padded = grad(params, pad(ids, 30), pad(positions, 0), pad(np.ones_like(ids), 0))
    np.testing.assert_allclose(padded[0, :9], hidden[0], atol=1e-5)
    assert np.isfinite(padded).all()
    jax.tree.map(
        lambda g, h: np.testing.assert_allclose(g, h, atol=1e-4 * float(np.abs(h).max() + 1)),
        padded_gradient,
        gradient,
    )


def test_forward_under_vmap_equals_rows(params):
    ids = random_ids((3, 1, 6))
    positions = np.broadcast_to(np.arange(6, dtype=np.int32), ids.shape)
    one = lambda i, p: qwen3.forward(params, SMALL, i, p, jnp.ones_like(i))
    each = jax.jit(jax.vmap(one))(ids, positions)
    np.testing.assert_allclose(each[1, 0], run_alone(params, SMALL, ids[1, 0]), atol=1e-5)


# --- cache ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("unroll", [1, 2])
@pytest.mark.parametrize("serving", [False, True])
def test_cached_decoding_equals_the_full_forward_over_64_tokens(params, unroll, serving):
    cfg = dataclasses.replace(SMALL, unroll=unroll)
    served = qwen3.serving_params(params, cfg) if serving else params
    # Prompts of 5 and 11 tokens side by side: neither sees the other's padding.
    ids, prompt = random_ids((2, 75)), np.array([5, 11], np.int32)
    cache = qwen3.make_cache(cfg, 2, 80)
    hidden, cache = extend(served, cfg, cache, ids[:, :16], np.zeros(2, np.int32), prompt)
    expected = np.stack([run_alone(params, cfg, row) for row in ids])
    np.testing.assert_allclose(hidden, expected[np.arange(2), prompt - 1], atol=1e-4)
    for i in range(64):
        token = ids[np.arange(2), prompt + i][:, None]
        hidden, cache = extend(served, cfg, cache, token, prompt + i, np.ones(2, np.int32))
        np.testing.assert_allclose(hidden, expected[np.arange(2), prompt + i], atol=1e-4)


def test_a_slot_of_length_zero_keeps_its_cache(params):
    cache = qwen3.make_cache(SMALL, 2, 8)
    _, cache = prefill(params, SMALL, cache, random_ids((2, 4)), np.array([4, 4], np.int32))
    _, after = extend(
        params, SMALL, cache, random_ids((2, 1), 9), np.array([4, 4], np.int32), np.array([0, 1], np.int32)
    )
    for old, new in zip(jax.tree.leaves(cache), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(old[0], new[0])
        assert np.abs(np.asarray(old[1] - new[1])).max() > 0


def test_stale_entries_behind_the_position_are_not_read(params):
    fresh, used = qwen3.make_cache(SMALL, 1, 8), qwen3.make_cache(SMALL, 1, 8)
    one = np.ones(1, np.int32)
    _, used = prefill(params, SMALL, used, random_ids((1, 8), 4), 8 * one)
    ids = random_ids((1, 3), 5)
    expected, fresh = prefill(params, SMALL, fresh, ids, 3 * one)
    actual, used = prefill(params, SMALL, used, ids, 3 * one)
    np.testing.assert_allclose(actual, expected, atol=1e-6)
    step = lambda cache: decode_step(params, SMALL, cache, 7 * one, 3 * one)[0]
    np.testing.assert_allclose(step(used), step(fresh), atol=1e-6)


# --- numerics ------------------------------------------------------------------------------------


def test_bfloat16_compute_is_near_float32_and_keeps_its_dtype(params):
    cfg = dataclasses.replace(SMALL, dtype=jnp.bfloat16)
    ids = random_ids(20)
    hidden = run_alone(params, cfg, ids)
    assert hidden.dtype == jnp.bfloat16
    exact = run_alone(params, SMALL, ids)
    error = np.abs(np.asarray(hidden, np.float32) - exact).max()
    # bfloat16 has 8 bits: 2^-8 of values up to about 4, through two layers.
    assert 0 < error < 0.15 * np.abs(exact).max()
    cache = qwen3.make_cache(cfg, 1, 8)
    assert cache.k[0].dtype == jnp.bfloat16
    last, _ = extend(params, cfg, cache, ids[None, :8], np.zeros(1, np.int32), np.full(1, 8, np.int32))
    assert last.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.float32(last[0]), np.float32(hidden[7]), atol=0.1)


@pytest.mark.parametrize("remat", ["full", "dots"])
def test_remat_changes_no_gradient(params, remat):
    ids = random_ids((1, 6))
    positions = np.arange(6, dtype=np.int32)[None]

    def gradient(cfg):
        loss = lambda p: jnp.sum(qwen3.forward(p, cfg, ids, positions, jnp.ones_like(ids)) ** 2)
        return jax.jit(jax.grad(loss))(params)

    expected = gradient(SMALL)
    actual = gradient(dataclasses.replace(SMALL, remat=remat, unroll=1))
    close = lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * float(np.abs(b).max() + 1))
    jax.tree.map(close, actual, expected)


def test_rms_norm_literal():
    # mean square of (3, 4) is 12.5; 3 / sqrt(12.5) = 0.848528, 4 / sqrt(12.5) = 1.131371, times (1, 2).
    out = qwen3.rms_norm(jnp.array([3.0, 4.0]), jnp.array([1.0, 2.0]), 0.0)
    np.testing.assert_allclose(out, [0.848528, 2.262742], rtol=1e-6)


def test_rotation_literal():
    # head_dim 2 has one frequency, 1: position 1 turns (1, 0) to (cos 1, sin 1).
    cfg = qwen3.tiny(8, head_dim=2)
    cos, sin = qwen3.rope_tables(jnp.array([0, 1]), cfg)
    out = qwen3.rotate(jnp.array([[[1.0, 0.0]], [[1.0, 0.0]]]), cos, sin)
    np.testing.assert_allclose(out[:, 0], [[1.0, 0.0], [0.540302, 0.841471]], atol=1e-6)


# --- table and configuration ---------------------------------------------------------------------


def test_head_dim_is_its_own_field():
    # hidden 12 with 3 heads would give 4; the heads are 8 wide all the same.
    cfg = qwen3.tiny(16, hidden_size=12, num_heads=3, num_kv_heads=1, head_dim=8, num_layers=1)
    shapes = jax.tree.map(lambda x: x.shape, qwen3.abstract(cfg))["layers"]
    assert (shapes["q"], shapes["o"]) == ((1, 12, 24), (1, 24, 12))
    assert (shapes["k"], shapes["v"], shapes["q_norm"]) == ((1, 12, 8), (1, 12, 8), (1, 8))
    params, ids = random_params(cfg), random_ids(6, vocab=16)
    np.testing.assert_allclose(run_alone(params, cfg, ids), numpy_forward(params, cfg, ids), atol=2e-5)


@pytest.mark.parametrize(
    ("cfg", "count"),
    [
        # vocab*H + L*(2*H*heads*128 + 2*H*kv*128 + 3*H*F + 2*H + 2*128) + H
        # 151936*1024 + 28*(2*1024*2048 + 2*1024*1024 + 3*1024*3072 + 2304) + 1024
        (qwen3.qwen3_0_6b(), 596_049_920),
        # 151936*2048 + 28*(2*2048*2048 + 2*2048*1024 + 3*2048*6144 + 4352) + 2048
        (qwen3.qwen3_1_7b(), 1_720_574_976),
        # 151936*2560 + 36*(2*2560*4096 + 2*2560*1024 + 3*2560*9728 + 5376) + 2560
        (qwen3.qwen3_4b(), 4_022_468_096),
    ],
)
def test_published_sizes(cfg, count):
    assert qwen3.parameter_count(cfg) == count


def test_abstract_init_and_table_agree():
    cfg = dataclasses.replace(SMALL, tie_embeddings=False, param_dtype=jnp.bfloat16)
    params = qwen3.init(jax.random.key(0), cfg)
    abstract = qwen3.abstract(cfg)
    same = jax.tree.map(lambda x, a: (x.shape, x.dtype) == (a.shape, a.dtype), params, abstract)
    assert all(jax.tree.leaves(same))
    assert qwen3.head(params, cfg) is params["head"]
    assert qwen3.head(params, SMALL) is params["embed"]
    # Residual outputs start smaller: 0.02 / sqrt(2 * 2 layers) = 0.01.
    std = lambda x: float(np.std(np.asarray(x, np.float32)))
    assert std(params["embed"]) == pytest.approx(0.02, rel=0.1)
    assert std(params["layers"]["o"]) == pytest.approx(0.01, rel=0.1)
    assert (np.asarray(params["layers"]["q_norm"]) == 1).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 4, "num_kv_heads": 3}, "num_kv_heads=3: a divisor of num_heads=4"),
        ({"head_dim": 7}, "head_dim=7: rotary positions need an even size"),
        ({"num_layers": 0, "unroll": 1}, "num_layers=0: at least 1"),
        ({"remat": "some"}, "remat='some': one of none, full, dots"),
    ],
)
def test_bad_sizes_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        qwen3.tiny(16, **changes)


def test_forward_refuses_unequal_shapes(params):
    with pytest.raises(AssertionError, match="shape"):
        qwen3.forward(params, SMALL, random_ids((1, 4)), random_ids((1, 5)), random_ids((1, 4)))


# --- shardings -----------------------------------------------------------------------------------


def test_sharded_forward_equals_one_device(params):
    mesh = sharding.make_mesh((2, 2, 2), jax.devices()[:8])
    cfg = qwen3.tiny(32, num_kv_heads=2, hidden_size=64, num_layers=1)
    params = random_params(cfg)
    ids, positions = random_ids((4, 6), vocab=32), np.tile(np.arange(6, dtype=np.int32), (4, 1))
    placed = jax.device_put(params, sharding.param_shardings(cfg, mesh))
    rows = jax.device_put((ids, positions, np.ones_like(ids)), sharding.row_sharding(mesh))
    assert placed["layers"]["q"].sharding.shard_shape((1, 64, 128)) == (1, 32, 64)
    actual = forward(placed, cfg, *rows)
    np.testing.assert_allclose(actual[3], run_alone(params, cfg, ids[3]), atol=1e-5)


def test_shardings_refuse_collisions_unknown_axes_and_remainders():
    with pytest.raises(ValueError, match="two dimensions on mesh axis 'tensor'"):
        sharding.partition_spec(("heads", "mlp"))
    with pytest.raises(ValueError, match="logical axis 'depth': no rule"):
        sharding.partition_spec(("depth",))
    mesh = sharding.make_mesh((1, 2, 4), jax.devices()[:8])
    with pytest.raises(ValueError, match=r"\['embed'\]: a dimension of 31 does not divide"):
        sharding.param_shardings(SMALL, mesh)
    with pytest.raises(ValueError, match="6 devices, but there are 8"):
        sharding.make_mesh((1, 2, 3), jax.devices()[:8])
