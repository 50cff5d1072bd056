"""Parity with ``transformers`` on tiny Qwen3 models; tests/golden/make_qwen3.py made the values."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sera_jax.policy import hf, qwen3

GOLDEN = Path(__file__).parents[1] / "golden"
NAMES = ("qwen3_tied", "qwen3_untied")


@jax.jit
def next_logprobs(hidden, head, ids):
    """Logits, and the log-prob of each token given those before it in its row; 0 for the first."""
    logits = jnp.einsum("rth,vh->rtv", hidden, head)
    logprobs = jax.nn.log_softmax(logits)[:, :-1]
    chosen = jnp.take_along_axis(logprobs, ids[:, 1:, None], axis=-1)[..., 0]
    return logits, jnp.pad(chosen, ((0, 0), (1, 0)))


forward = jax.jit(qwen3.forward, static_argnums=1)


@pytest.fixture(scope="module", params=NAMES)
def golden(request):
    directory = GOLDEN / request.param
    cfg = hf.config_from_hf(directory)
    cfg = qwen3.Qwen3Config(**{**vars(cfg), "dtype": jnp.float32})
    return cfg, hf.load(directory, cfg), np.load(directory / "reference.npz")


def test_the_configuration_is_the_one_that_was_made(golden):
    cfg, _, reference = golden
    tied = cfg.vocab_size == 53
    sizes = (cfg.hidden_size, cfg.intermediate_size, cfg.num_layers, cfg.num_heads, cfg.num_kv_heads)
    assert sizes == (24, 40, 2, 6, 2)
    # hidden / heads would be 4.
    assert cfg.head_dim == 10
    assert cfg.tie_embeddings == tied
    assert cfg.rope_theta == (1e4 if tied else 1e6)
    assert reference["lengths"].tolist() == [13, 7, 1]


def test_a_padded_batch_matches(golden):
    cfg, params, reference = golden
    ids, lengths = reference["ids"], reference["lengths"]
    positions = np.broadcast_to(np.arange(ids.shape[1], dtype=np.int32), ids.shape)
    mask = positions < lengths[:, None]
    hidden = forward(params, cfg, ids, positions, mask.astype(np.int32))
    logits, logprobs = next_logprobs(hidden, qwen3.head(params, cfg), ids)
    # The values are of order 1 and far from flat: agreement within 1e-4 means something.
    assert reference["logprobs"][mask].std() > 0.5
    np.testing.assert_allclose(hidden[mask], reference["hidden"][mask], rtol=0, atol=1e-4)
    np.testing.assert_allclose(logits[mask], reference["logits"][mask], rtol=0, atol=1e-4)
    np.testing.assert_allclose(logprobs[mask], reference["logprobs"][mask], rtol=0, atol=1e-4)


def test_sequences_packed_into_one_row_match(golden):
    cfg, params, reference = golden
    lengths = reference["lengths"]
    pack = lambda x: np.concatenate([x[row, :length] for row, length in enumerate(lengths)])[None]
    segments = np.repeat(np.arange(1, 4, dtype=np.int32), lengths)[None]
    positions = np.concatenate([np.arange(length, dtype=np.int32) for length in lengths])[None]
    hidden = forward(params, cfg, pack(reference["ids"]), positions, segments)
    np.testing.assert_allclose(hidden, pack(reference["hidden"]), rtol=0, atol=1e-4)


def test_cached_decoding_matches(golden):
    cfg, params, reference = golden
    ids, lengths = reference["ids"], reference["lengths"]
    prefill = jax.jit(qwen3.prefill, static_argnums=1)
    step = jax.jit(qwen3.decode_step, static_argnums=1)
    # 4 tokens at once, then one by one up to 7; the third sequence ends with its only token.
    cache = qwen3.make_cache(cfg, slots=3, length=8)
    hidden, cache = prefill(params, cfg, cache, ids[:, :4], np.minimum(lengths, 4))
    at_3 = np.stack([reference["hidden"][row, min(length, 4) - 1] for row, length in enumerate(lengths)])
    np.testing.assert_allclose(hidden, at_3, rtol=0, atol=1e-4)
    for t in range(4, 7):
        hidden, cache = step(params, cfg, cache, ids[:, t], np.full(3, t, np.int32))
        np.testing.assert_allclose(hidden[:2], reference["hidden"][:2, t], rtol=0, atol=1e-4)
