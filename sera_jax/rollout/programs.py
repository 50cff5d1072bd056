"""The compiled programs of the local engine: pure functions of weights, cache and a batch of rows.

A batch holds only the rows that have work. Each program gathers the first ``reach`` positions of the
rows' slots into a compact cache, works on that, and writes the new positions back, so that few active
rows do not pay for all slots, nor short sequences for the whole context. A row of length 0 is padding.

Axes: A rows of a batch, C new tokens of a row, N steps of a chunk, E stop ids; slots and cache as in
:mod:`sera_jax.policy.qwen3`.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt

from sera_jax.policy import qwen3
from sera_jax.policy.qwen3 import KVCache, Params, Qwen3Config


class Rows(NamedTuple):
    """What both programs know of a row.

    Attributes:
      slot: Its slot in the cache.
      start: Positions of it that are cached already.
      temperature: 0 is greedy.
      key: Raw key of its request.
    """

    slot: Int[Array, "A"]
    start: Int[Array, "A"]
    temperature: Float[Array, "A"]
    key: UInt[Array, "A 2"]


class DecodeRows(NamedTuple):
    """What decoding knows of a row besides :class:`Rows`.

    Attributes:
      token: The last token, sampled but not cached yet.
      index: Tokens sampled so far; the next is drawn with ``fold_in(key, index)``.
      left: Most tokens still to sample; 0 marks padding.
      stop: Ids that end the row, filled up with -1.
    """

    token: Int[Array, "A"]
    index: Int[Array, "A"]
    left: Int[Array, "A"]
    stop: Int[Array, "A E"]


def sample(
    logits_AxV: Float[Array, "A V"],
    temperature_A: Float[Array, "A"],
    key_Ax2: UInt[Array, "A 2"],
    index_A: Int[Array, "A"],
) -> tuple[Int[Array, "A"], Float[Array, "A"]]:
    """Draws one token a row by Gumbel-max, from softmax(logits / temperature).

    At temperature 0 the token is the argmax. Returns tokens and their log-probs under the softmax that
    was drawn from, at temperature 0 under the plain softmax.
    """
    greedy_A = temperature_A == 0
    scaled_AxV = logits_AxV.astype(jnp.float32) / jnp.where(greedy_A, 1.0, temperature_A)[:, None]

    def noise_of(key_2, index):
        key = jax.random.wrap_key_data(key_2, impl="threefry2x32")
        return jax.random.gumbel(jax.random.fold_in(key, index), logits_AxV.shape[1:], jnp.float32)

    def noisy():
        noise_AxV = jax.vmap(noise_of)(key_Ax2, index_A)
        return scaled_AxV + jnp.where(greedy_A[:, None], 0.0, noise_AxV)

    token_A = jnp.argmax(jax.lax.cond(jnp.all(greedy_A), lambda: scaled_AxV, noisy), axis=-1)
    chosen_A = jnp.take_along_axis(scaled_AxV, token_A[:, None], axis=-1)[:, 0]
    return token_A.astype(jnp.int32), chosen_A - jax.nn.logsumexp(scaled_AxV, axis=-1)


def _logits(params: Params, cfg: Qwen3Config, hidden_AxH: Array) -> Float[Array, "A V"]:
    return jax.lax.dot_general(
        hidden_AxH,
        qwen3.head(params, cfg),
        (((1,), (1,)), ((), ())),
        preferred_element_type=jnp.float32,
    )


def _over_layers(function, *caches: KVCache) -> KVCache:
    """Applies ``function`` to arrays [S, G, M, D], whichever way the layers are held."""
    if isinstance(caches[0].k, tuple):
        return jax.tree.map(function, *caches)
    return jax.tree.map(jax.vmap(function), *caches)


def _gather(cache: KVCache, slot_A: Array, reach: int) -> KVCache:
    """The first ``reach`` positions of some slots."""
    return _over_layers(lambda x: x[slot_A, :, :reach], cache)


def _write_back(
    cache: KVCache, rows: KVCache, slot_A: Array, start_A: Array, count_A: Array, width: int
) -> KVCache:
    """Copies positions ``start .. start + count - 1``, count <= width, of the rows into their slots."""
    offset_N = jnp.arange(width)
    at_AxN = start_A[:, None] + offset_N[None]

    def write(whole, part):
        new = jnp.take_along_axis(part, jnp.minimum(at_AxN, part.shape[2] - 1)[:, None, :, None], axis=2)
        # Positions that were not computed point past the end, where a scatter drops them.
        to_AxN = jnp.where(offset_N[None] < count_A[:, None], at_AxN, whole.shape[2])
        return whole.at[slot_A[:, None], :, to_AxN].set(new.transpose(0, 2, 1, 3), mode="drop")

    return _over_layers(write, cache, rows)


def prefill(
    params: Params,
    cfg: Qwen3Config,
    cache: KVCache,
    rows: Rows,
    token_ids_AxC: Int[Array, "A C"],
    length_A: Int[Array, "A"],
    *,
    reach: int,
) -> tuple[KVCache, Int[Array, "A"], Float[Array, "A"]]:
    """Appends up to C prompt tokens to each row and samples the completion's first token.

    ``reach`` is at least ``start + length`` of every row. Rows whose prompt goes on in a later call
    ignore their token.
    """
    part = _gather(cache, rows.slot, reach)
    hidden_AxH, part = qwen3.extend(params, cfg, part, token_ids_AxC, rows.start, length_A)
    cache = _write_back(cache, part, rows.slot, rows.start, length_A, token_ids_AxC.shape[1])
    first_A = jnp.zeros_like(rows.slot)
    token_A, logprob_A = sample(_logits(params, cfg, hidden_AxH), rows.temperature, rows.key, first_A)
    return cache, token_A, logprob_A


def decode(
    params: Params,
    cfg: Qwen3Config,
    cache: KVCache,
    rows: Rows,
    state: DecodeRows,
    *,
    steps: int,
    reach: int,
) -> tuple[KVCache, Int[Array, "A N"], Float[Array, "A N"], Int[Array, "A"], Int[Array, ""]]:
    """Samples up to ``steps`` tokens a row; ends early when every row has ended.

    ``reach`` is at least ``start + min(left, steps)`` of every row.

    Returns:
      The cache, tokens, their log-probs, how many of each row are valid, and the steps taken.
    """
    A = state.token.shape[0]
    part = _gather(cache, rows.slot, reach)

    def on(carry):
        step, _, _, live_A, *_ = carry
        return (step < steps) & jnp.any(live_A)

    def body(carry):
        step, part, token_A, live_A, count_A, tokens_AxN, logprobs_AxN = carry
        hidden_AxH, part = qwen3.extend(
            params, cfg, part, token_A[:, None], rows.start + count_A, live_A.astype(jnp.int32)
        )
        token_A, logprob_A = sample(
            _logits(params, cfg, hidden_AxH), rows.temperature, rows.key, state.index + count_A
        )
        tokens_AxN = jax.lax.dynamic_update_index_in_dim(tokens_AxN, token_A, step, axis=1)
        logprobs_AxN = jax.lax.dynamic_update_index_in_dim(logprobs_AxN, logprob_A, step, axis=1)
        count_A = count_A + live_A
        stopped_A = jnp.any(token_A[:, None] == state.stop, axis=-1)
        live_A = live_A & ~stopped_A & (count_A < state.left)
        return step + 1, part, token_A, live_A, count_A, tokens_AxN, logprobs_AxN

    live_A: Bool[Array, "A"] = state.left > 0
    empty_AxN = jnp.zeros((A, steps), jnp.int32)
    step, part, _, _, count_A, tokens_AxN, logprobs_AxN = jax.lax.while_loop(
        on,
        body,
        (
            jnp.int32(0),
            part,
            state.token,
            live_A,
            jnp.zeros(A, jnp.int32),
            empty_AxN,
            empty_AxN.astype(jnp.float32),
        ),
    )
    cache = _write_back(cache, part, rows.slot, rows.start, count_A, steps)
    return cache, tokens_AxN, logprobs_AxN, count_A, step


def copy_slots(cache: KVCache, source_A: Int[Array, "A"], target_A: Int[Array, "A"]) -> KVCache:
    """Copies whole slots; targets past the end are dropped, which makes padding."""
    return _over_layers(lambda x: x.at[target_A].set(x[source_A], mode="drop"), cache)
