"""Qwen3 as pure functions of a parameter pytree.

Axes: L layers, V vocabulary, H hidden, F feed-forward, Q query heads, G key/value heads, D head size;
R rows, T tokens, S cache slots, C new tokens of a slot, M cache length.

One table, :func:`parameter_table`, names every parameter's shape, dtype, logical axes, initializer and
Hugging Face name; initialisation, abstract parameters, shardings and checkpoint import derive from it.
Layers are stacked on a leading axis and scanned. RMSNorm, softmax and log-probs are computed in
float32 whatever the compute dtype.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

Params = dict[str, Any]

_REMAT = {
    "none": None,
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


@dataclasses.dataclass(frozen=True)
class Qwen3Config:
    """Sizes and numerics of a policy.

    Attributes:
      head_dim: Its own field: in the published models it is not hidden_size / num_heads.
      tie_embeddings: The output head is the embedding.
      dtype: Compute dtype; norms, softmax and log-probs stay float32.
      param_dtype: Storage dtype of the parameters.
      unroll: Layers unrolled per scan step; num_layers for tiny models, where a loop costs time.
      remat: ``none``, ``full`` or ``dots``: what a layer recomputes in the backward pass.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float = 1e6
    rms_eps: float = 1e-6
    tie_embeddings: bool = True
    dtype: Any = jnp.bfloat16
    param_dtype: Any = jnp.float32
    unroll: int = 1
    remat: str = "none"

    def __post_init__(self):
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "unroll",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: at least 1 is expected")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads={self.num_kv_heads}: a divisor of num_heads={self.num_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim}: rotary positions need an even size")
        if self.remat not in _REMAT:
            raise ValueError(f"remat={self.remat!r}: one of {', '.join(_REMAT)} is expected")

    @property
    def unrolled(self) -> bool:
        """Whether all layers are unrolled; the serving layout then holds each layer by itself."""
        return self.unroll >= self.num_layers


def tiny(vocab_size: int, **changes: Any) -> Qwen3Config:
    """About half a million parameters in float32: learns and samples quickly on a CPU."""
    sizes: dict[str, Any] = {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_layers": 4,
        "num_heads": 4,
        "num_kv_heads": 1,
        "head_dim": 32,
        "dtype": jnp.float32,
        "rope_theta": 1e4,
    }
    sizes.update(changes)
    sizes.setdefault("unroll", sizes["num_layers"])
    return Qwen3Config(vocab_size=vocab_size, **sizes)


def qwen3_0_6b(**changes: Any) -> Qwen3Config:
    """Qwen3-0.6B."""
    sizes: dict[str, Any] = {
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_layers": 28,
        "num_heads": 16,
        "num_kv_heads": 8,
        "head_dim": 128,
        "remat": "full",
    }
    return Qwen3Config(**{**sizes, **changes})


def qwen3_1_7b(**changes: Any) -> Qwen3Config:
    """Qwen3-1.7B."""
    return qwen3_0_6b(**{"hidden_size": 2048, "intermediate_size": 6144, **changes})


def qwen3_4b(**changes: Any) -> Qwen3Config:
    """Qwen3-4B-Instruct-2507, the policy of the paper; the first Qwen3-4B has ``rope_theta=1e6``."""
    sizes: dict[str, Any] = {
        "vocab_size": 151936,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_layers": 36,
        "num_heads": 32,
        "num_kv_heads": 8,
        "head_dim": 128,
        "rope_theta": 5e6,
        "remat": "full",
    }
    return Qwen3Config(**{**sizes, **changes})


# --- parameters --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class ArrayInfo:
    """One parameter.

    Attributes:
      shape: Its shape here, the layer axis first where there is one.
      dtype: Storage dtype.
      logical_axes: One name a dimension; :mod:`sera_jax.policy.sharding` maps them to mesh axes.
      initializer: ``normal`` (standard deviation 0.02), ``residual`` (0.02 / sqrt(2 L)) or ``ones``.
      hf_name: Hugging Face name; ``{layer}`` stands for the layer number.
      hf_transposed: Hugging Face stores a linear layer as [out, in]; here it is [in, out].
    """

    shape: tuple[int, ...]
    dtype: Any
    logical_axes: tuple[str | None, ...]
    initializer: str
    hf_name: str
    hf_transposed: bool = False


def parameter_table(cfg: Qwen3Config) -> dict[str, Any]:
    """A pytree of :class:`ArrayInfo` with the structure of the parameters."""
    L, V, H, F = cfg.num_layers, cfg.vocab_size, cfg.hidden_size, cfg.intermediate_size
    QD, GD, D = cfg.num_heads * cfg.head_dim, cfg.num_kv_heads * cfg.head_dim, cfg.head_dim

    def layer(shape, axes, initializer, name, transposed=False):
        return ArrayInfo(
            (L, *shape),
            cfg.param_dtype,
            ("layer", *axes),
            initializer,
            f"model.layers.{{layer}}.{name}.weight",
            transposed,
        )

    table: dict[str, Any] = {
        "embed": ArrayInfo(
            (V, H), cfg.param_dtype, ("vocab", "embed"), "normal", "model.embed_tokens.weight"
        ),
        "norm": ArrayInfo((H,), cfg.param_dtype, (None,), "ones", "model.norm.weight"),
        "layers": {
            "attn_norm": layer((H,), (None,), "ones", "input_layernorm"),
            "mlp_norm": layer((H,), (None,), "ones", "post_attention_layernorm"),
            "q": layer((H, QD), ("embed", "heads"), "normal", "self_attn.q_proj", True),
            "k": layer((H, GD), ("embed", "kv_heads"), "normal", "self_attn.k_proj", True),
            "v": layer((H, GD), ("embed", "kv_heads"), "normal", "self_attn.v_proj", True),
            "o": layer((QD, H), ("heads", "embed"), "residual", "self_attn.o_proj", True),
            "q_norm": layer((D,), (None,), "ones", "self_attn.q_norm"),
            "k_norm": layer((D,), (None,), "ones", "self_attn.k_norm"),
            "gate": layer((H, F), ("embed", "mlp"), "normal", "mlp.gate_proj", True),
            "up": layer((H, F), ("embed", "mlp"), "normal", "mlp.up_proj", True),
            "down": layer((F, H), ("mlp", "embed"), "residual", "mlp.down_proj", True),
        },
    }
    if not cfg.tie_embeddings:
        table["head"] = ArrayInfo((V, H), cfg.param_dtype, ("vocab", "embed"), "normal", "lm_head.weight")
    return table


def is_info(x: Any) -> bool:
    """Whether ``x`` is a leaf of the parameter table."""
    return isinstance(x, ArrayInfo)


def abstract(cfg: Qwen3Config) -> Params:
    """Shapes and dtypes of the parameters."""
    return jax.tree.map(
        lambda i: jax.ShapeDtypeStruct(i.shape, i.dtype), parameter_table(cfg), is_leaf=is_info
    )


def init(key: Array, cfg: Qwen3Config) -> Params:
    """Random parameters; each depends on the key and its own place in the table."""
    infos, structure = jax.tree.flatten(parameter_table(cfg), is_leaf=is_info)
    scale = {"normal": 0.02, "residual": 0.02 / math.sqrt(2 * cfg.num_layers)}

    def make(number: int, info: ArrayInfo) -> Array:
        if info.initializer == "ones":
            return jnp.ones(info.shape, info.dtype)
        noise = jax.random.normal(jax.random.fold_in(key, number), info.shape, jnp.float32)
        return (scale[info.initializer] * noise).astype(info.dtype)

    return jax.tree.unflatten(structure, [make(n, info) for n, info in enumerate(infos)])


def parameter_count(cfg: Qwen3Config) -> int:
    """Number of parameters."""
    infos = jax.tree.leaves(parameter_table(cfg), is_leaf=is_info)
    return sum(math.prod(info.shape) for info in infos)


def head(params: Params, cfg: Qwen3Config) -> Float[Array, "V H"]:
    """The output head; logits are ``hidden @ head.T``."""
    return params["embed"] if cfg.tie_embeddings else params["head"]


# --- layers ------------------------------------------------------------------------------------


def rms_norm(x: Float[Array, "*b h"], gain: Float[Array, "h"], eps: float) -> Float[Array, "*b h"]:
    """x / sqrt(mean(x^2) + eps) * gain, in float32; the result has the dtype of ``x``."""
    x32 = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    gain = gain.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + gain.shape)
    return (x32 * scale * gain).astype(x.dtype)


def rope_tables(
    positions: Int[Array, "*b t"], cfg: Qwen3Config
) -> tuple[Float[Array, "*b t d2"], Float[Array, "*b t d2"]]:
    """Cosine and sine of the rotary angles, float32, half a head wide."""
    half = cfg.head_dim // 2
    frequency = cfg.rope_theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    # float32 on purpose: in bfloat16 position 257 is already 256.
    angle = positions[..., None].astype(jnp.float32) * frequency.reshape((1,) * positions.ndim + (half,))
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Rotary positions, half-split layout; x is [..., T, heads, D], the tables [..., T, D/2]."""
    low, high = jnp.split(x, 2, axis=-1)
    cos, sin = cos[..., None, :], sin[..., None, :]
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)


def _fuse(layer: Mapping[str, Array], cfg: Qwen3Config) -> dict[str, Array]:
    """A layer's weights as they are multiplied: fewer, wider products, in the compute dtype.

    At tiny sizes the number of operations is what costs. Works on one layer and on stacked layers.
    """
    join = lambda *names: jnp.concatenate([layer[n].astype(cfg.dtype) for n in names], axis=-1)
    gain = lambda name, heads: jnp.repeat(layer[name].astype(jnp.float32)[..., None, :], heads, axis=-2)
    return {
        "attn_norm": layer["attn_norm"].astype(jnp.float32),
        "mlp_norm": layer["mlp_norm"].astype(jnp.float32),
        "qkv": join("q", "k", "v"),
        # The scale of the attention scores rides on the queries' gain.
        "qk_norm": jnp.concatenate(
            [gain("q_norm", cfg.num_heads) / math.sqrt(cfg.head_dim), gain("k_norm", cfg.num_kv_heads)],
            axis=-2,
        ),
        "o": layer["o"].astype(cfg.dtype),
        "gate_up": join("gate", "up"),
        "down": layer["down"].astype(cfg.dtype),
    }


def _project(x: Array, layer: Mapping[str, Array], cos: Array, sin: Array, cfg: Qwen3Config):
    """Scaled queries [B, T, Q, D], keys and values [B, T, G, D] of a block's inputs, positions applied."""
    Q, G, D = cfg.num_heads, cfg.num_kv_heads, cfg.head_dim
    qkv = rms_norm(x, layer["attn_norm"], cfg.rms_eps) @ layer["qkv"]
    qk, v = jnp.split(qkv, [(Q + G) * D], axis=-1)
    qk = qk.reshape(*x.shape[:-1], Q + G, D).astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(qk), axis=-1, keepdims=True) + cfg.rms_eps)
    qk = rotate(qk * scale * layer["qk_norm"][None, None], cos, sin).astype(cfg.dtype)
    q, k = jnp.split(qk, [Q], axis=-2)
    return q, k, v.reshape(*x.shape[:-1], G, D)


def _mlp(x: Array, layer: Mapping[str, Array], cfg: Qwen3Config) -> Array:
    h = rms_norm(x, layer["mlp_norm"], cfg.rms_eps)
    gate, up = jnp.split(h @ layer["gate_up"], 2, axis=-1)
    return x + (jax.nn.silu(gate) * up) @ layer["down"]


def _attend(q: Array, k: Array, v: Array, mask: Array, cfg: Qwen3Config) -> Array:
    """Grouped-query attention; q [B, T, Q, D], k, v [B, G, M, D], mask [B, T, M] -> [B, T, Q * D]."""
    B, T = q.shape[:2]
    G, M, D = k.shape[1:]
    group = cfg.num_heads // G
    # Fold the query heads of a group into rows: two plain batched matrix products, no repeated keys.
    q = q.reshape(B, T, G, group, D).transpose(0, 2, 3, 1, 4).reshape(B * G, group * T, D)
    k, v = k.reshape(B * G, M, D), v.reshape(B * G, M, D)
    scores = jax.lax.dot_general(
        q, k, (((2,), (2,)), ((0,), (0,))), preferred_element_type=jnp.float32
    ).reshape(B, G, group, T, M)
    scores = jnp.where(mask[:, None, None], scores, -1e30)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype).reshape(B * G, group * T, M)
    out = jax.lax.dot_general(weights, v, (((2,), (1,)), ((0,), (0,))))
    return out.reshape(B, G, group, T, D).transpose(0, 3, 1, 2, 4).reshape(B, T, G * group * D)


def _attend_causal(q: Array, k: Array, v: Array, segment_ids: Array, cfg: Qwen3Config) -> Array:
    """Causal attention within segments of a row; q [R, T, Q, D], k, v [R, T, G, D] -> [R, T, Q * D]."""
    T = q.shape[1]
    if T >= 512 and jax.default_backend() in ("gpu", "tpu"):
        mask = segment_ids[:, None, :, None] == segment_ids[:, None, None, :]
        out = jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=True, scale=1.0)
        return out.reshape(*out.shape[:2], -1)
    k, v = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
    # Blocks of query rows skip the keys to their right; at most 8, to keep the program small.
    step = max(64, -(-T // 8))
    outputs = []
    for low in range(0, T, step):
        high = min(low + step, T)
        causal = jnp.arange(low, high)[None, :, None] >= jnp.arange(high)[None, None, :]
        same = segment_ids[:, low:high, None] == segment_ids[:, None, :high]
        outputs.append(_attend(q[:, low:high], k[:, :, :high], v[:, :, :high], causal & same, cfg))
    return jnp.concatenate(outputs, axis=1)


def forward(
    params: Params,
    cfg: Qwen3Config,
    token_ids_RxT: Int[Array, "R T"],
    positions_RxT: Int[Array, "R T"],
    segment_ids_RxT: Int[Array, "R T"],
) -> Float[Array, "R T H"]:
    """Hidden states after the final norm, in the compute dtype.

    Args:
      params: See :func:`parameter_table`.
      cfg: Sizes.
      token_ids_RxT: Packed rows.
      positions_RxT: Position of each token within its segment.
      segment_ids_RxT: Attention stays within equal ids; 0 is padding.
    """
    chex.assert_rank([token_ids_RxT, positions_RxT, segment_ids_RxT], 2)
    chex.assert_equal_shape([token_ids_RxT, positions_RxT, segment_ids_RxT])
    cos, sin = rope_tables(positions_RxT, cfg)

    def block(x, layer):
        layer = _fuse(layer, cfg)
        q, k, v = _project(x, layer, cos, sin, cfg)
        x = x + _attend_causal(q, k, v, segment_ids_RxT, cfg) @ layer["o"]
        return _mlp(x, layer, cfg), None

    if cfg.remat != "none":
        block = jax.checkpoint(block, policy=_REMAT[cfg.remat])
    x = params["embed"][token_ids_RxT].astype(cfg.dtype)
    x, _ = jax.lax.scan(block, x, params["layers"], unroll=min(cfg.unroll, cfg.num_layers))
    return rms_norm(x, params["norm"], cfg.rms_eps)


# --- serving -----------------------------------------------------------------------------------


class KVCache(NamedTuple):
    """Keys and values in the compute dtype, one slot a sequence.

    Each is [L, S, G, M, D], heads before positions so that attention multiplies them as they lie; or,
    where the layers are unrolled, a tuple of L arrays [S, G, M, D], which are updated in place.
    """

    k: Any
    v: Any


def make_cache(cfg: Qwen3Config, slots: int, length: int) -> KVCache:
    """An empty cache."""
    shape = (slots, cfg.num_kv_heads, length, cfg.head_dim)

    def zeros():
        if cfg.unrolled:
            return tuple(jnp.zeros(shape, cfg.dtype) for _ in range(cfg.num_layers))
        return jnp.zeros((cfg.num_layers, *shape), cfg.dtype)

    return KVCache(zeros(), zeros())


def serving_params(params: Params, cfg: Qwen3Config) -> Params:
    """Weights laid out for :func:`extend`: cast and fused once instead of at every token."""
    layers = params["layers"]
    if _is_serving(params):
        return params
    if cfg.unrolled:
        each = [jax.tree.map(lambda x, i=i: x[i], layers) for i in range(cfg.num_layers)]
        fused: Any = tuple(_fuse(layer, cfg) for layer in each)
    else:
        fused = _fuse(layers, cfg)
    tables = {n: params[n].astype(cfg.dtype) for n in ("embed", "head") if n in params}
    return {**tables, "norm": params["norm"].astype(jnp.float32), "layers": fused}


def _is_serving(params: Params) -> bool:
    return isinstance(params["layers"], tuple) or "qkv" in params["layers"]


def extend(
    params: Params,
    cfg: Qwen3Config,
    cache: KVCache,
    token_ids_SxC: Int[Array, "S C"],
    start_S: Int[Array, "S"],
    length_S: Int[Array, "S"],
) -> tuple[Float[Array, "S H"], KVCache]:
    """Appends up to C tokens to each slot.

    Tokens go to positions ``start .. start + length - 1`` and attend to everything before them. A slot
    of length 0 keeps its cache, and its hidden state is meaningless.

    Args:
      params: As trained, or as :func:`serving_params` lays them out, which is faster.
      cfg: Sizes.
      cache: See :func:`make_cache`.
      token_ids_SxC: New tokens, from the left; what follows ``length`` is ignored.
      start_S: Tokens already in each slot.
      length_S: New tokens of each slot; ``start + length`` may not exceed the cache's length, because
        what would lie behind its end is dropped.

    Returns:
      The hidden state of each slot's last new token, after the final norm, and the cache.
    """
    S, C = token_ids_SxC.shape
    chex.assert_shape([start_S, length_S], (S,))
    params = serving_params(params, cfg)
    M = jax.tree.leaves(cache)[0].shape[-2]
    offset_C = jnp.arange(C)
    positions_SxC = start_S[:, None] + offset_C[None]
    new_SxC = offset_C[None] < length_S[:, None]
    # Positions that are not written point past the end, where a scatter drops them.
    write_SxC = jnp.where(new_SxC, positions_SxC, M)
    mask_SxCxM = jnp.arange(M)[None, None] <= positions_SxC[..., None]
    cos, sin = rope_tables(positions_SxC, cfg)
    slot_Sx1 = jnp.arange(S)[:, None]

    def block(x, scanned):
        layer, k_cache, v_cache = scanned
        q, k, v = _project(x, layer, cos, sin, cfg)
        k_cache = k_cache.at[slot_Sx1, :, write_SxC].set(k, mode="drop")
        v_cache = v_cache.at[slot_Sx1, :, write_SxC].set(v, mode="drop")
        x = x + _attend(q, k_cache, v_cache, mask_SxCxM, cfg) @ layer["o"]
        return _mlp(x, layer, cfg), (k_cache, v_cache)

    x = params["embed"][token_ids_SxC]
    if cfg.unrolled:
        written = []
        for scanned in zip(params["layers"], cache.k, cache.v, strict=True):
            x, pair = block(x, scanned)
            written.append(pair)
        k, v = zip(*written, strict=True)
    else:
        x, (k, v) = jax.lax.scan(block, x, (params["layers"], cache.k, cache.v), unroll=cfg.unroll)
    last_S = jnp.maximum(length_S - 1, 0)
    x = jnp.take_along_axis(x, last_S[:, None, None], axis=1)[:, 0]
    return rms_norm(x, params["norm"], cfg.rms_eps), KVCache(k, v)


def prefill(
    params: Params,
    cfg: Qwen3Config,
    cache: KVCache,
    token_ids_SxC: Int[Array, "S C"],
    length_S: Int[Array, "S"],
) -> tuple[Float[Array, "S H"], KVCache]:
    """:func:`extend` from the beginning of each slot."""
    return extend(params, cfg, cache, token_ids_SxC, jnp.zeros_like(length_S), length_S)


def decode_step(
    params: Params,
    cfg: Qwen3Config,
    cache: KVCache,
    token_S: Int[Array, "S"],
    position_S: Int[Array, "S"],
) -> tuple[Float[Array, "S H"], KVCache]:
    """:func:`extend` by one token."""
    return extend(params, cfg, cache, token_S[:, None], position_S, jnp.ones_like(position_S))
