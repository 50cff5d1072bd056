"""One optimizer step: packed rows in, new weights out.

The loss is the mean over all trained tokens of the step, whatever the split into micro-batches: every
micro-batch divides its sum by the same global count. One program handles one micro-batch and
accumulates gradients, so any number of rows runs without another compilation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Int

from kernels.linear_cispo import linear_logprob
from sera_jax.learner.packing import Rows
from sera_jax.objectives.base import LossInputs, Objective
from sera_jax.policy import qwen3


@flax.struct.dataclass
class TrainState:
    """Weights, optimizer state and the version: the number of completed updates."""

    params: Any
    opt_state: Any
    version: Int[Array, ""]

    @classmethod
    def create(cls, params: Any, optimizer: optax.GradientTransformation) -> TrainState:
        """The state before the first update."""
        # A copy: the first update donates these buffers, and the caller may still hold `params`.
        params = jax.tree.map(jnp.array, params)
        return cls(params, optimizer.init(params), jnp.zeros((), jnp.int32))


def make_optimizer(
    *,
    learning_rate: float = 3e-6,
    beta1: float = 0.9,
    beta2: float = 0.95,
    eps: float = 1e-8,
    weight_decay: float = 0.017,
    clip_norm: float = 1.0,
    warmup_steps: int = 1,
    decay_steps: int | None = None,
) -> optax.GradientTransformation:
    """AdamW with decoupled decay on all parameters after a clip of the global norm.

    The learning rate rises linearly over ``warmup_steps`` updates, the first of which already has
    learning_rate / warmup_steps, and stays; with ``decay_steps`` it falls to 0 by a half cosine.
    """

    def schedule(count: Array) -> Array:
        factor = jnp.minimum(1.0, (count + 1) / max(1, warmup_steps))
        if decay_steps is not None:
            done = jnp.clip((count - warmup_steps) / max(1, decay_steps - warmup_steps), 0.0, 1.0)
            factor = factor * 0.5 * (1 + jnp.cos(jnp.pi * done))
        return learning_rate * factor

    return optax.chain(
        optax.clip_by_global_norm(clip_norm),
        optax.adamw(schedule, b1=beta1, b2=beta2, eps=eps, weight_decay=weight_decay),
    )


def row_logprobs(params: Any, cfg: qwen3.Qwen3Config, rows: Rows) -> Array:
    """Log-probs of the targets, float32 [R, T], 0 where not trained."""
    hidden = qwen3.forward(params, cfg, rows.token_ids, rows.positions, rows.segment_ids)
    R, T, H = hidden.shape
    return linear_logprob(
        hidden.reshape(R * T, H),
        qwen3.head(params, cfg),
        rows.target_ids.reshape(-1),
        mask_T=rows.mask.reshape(-1),
        temperature=rows.temperature.reshape(-1),
    ).reshape(R, T)


def loss_sum(
    params: Any, cfg: qwen3.Qwen3Config, objective: Objective, rows: Rows
) -> tuple[Array, dict[str, Array]]:
    """Sum of per-token losses over trained tokens, and what the update reports."""
    logprob = row_logprobs(params, cfg, rows).reshape(-1)
    mask = rows.mask.reshape(-1)
    old = rows.old_logprobs.reshape(-1)
    out = objective(LossInputs(logprob, old, rows.advantage.reshape(-1), mask))
    masked = lambda x: jnp.where(mask, x, 0.0)
    report = {f"{name}_sum": masked(value).sum() for name, value in out.metrics_T.items()}
    report |= {f"{name}_max": masked(value).max() for name, value in out.metrics_T.items()}
    report["gap"] = masked(logprob - old)  # per token: its quantiles need them all
    report["logprob_sum"] = masked(logprob).sum()
    return masked(out.loss_T).sum(), jax.lax.stop_gradient(report)


Update = Callable[[TrainState, Rows], tuple[TrainState, dict[str, float]]]


def make_update(
    cfg: qwen3.Qwen3Config,
    objective: Objective,
    optimizer: optax.GradientTransformation,
    *,
    micro_rows: int,
) -> Update:
    """Builds ``update(state, rows) -> (state, metrics)``; ``state`` is donated.

    The version advances by one whatever happens. Without a trained token, or with a gradient that is
    not finite, weights and optimizer state stay as they are and a metric says so.

    Args:
      cfg: The policy.
      objective: Per-token loss.
      optimizer: See :func:`make_optimizer`.
      micro_rows: Rows of one forward and backward pass; rows are padded to a multiple of it.
    """
    grad = jax.value_and_grad(loss_sum, has_aux=True)

    def accumulate(params, total, rows, count):
        (loss, report), gradient = grad(params, cfg, objective, rows)
        total = jax.tree.map(lambda t, g: t + g.astype(t.dtype) / count, total, gradient)
        return total, loss / count, report

    def apply(state, gradient, live):
        norm = optax.tree.norm(gradient)
        good = jnp.isfinite(norm) & live
        updates, opt_state = optimizer.update(gradient, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        keep = lambda new, old: jnp.where(good, new, old)
        return (
            TrainState(
                params=jax.tree.map(keep, params, state.params),
                opt_state=jax.tree.map(keep, opt_state, state.opt_state),
                version=state.version + 1,
            ),
            norm,
            good,
        )

    accumulate = jax.jit(accumulate, donate_argnums=(1,))
    apply = jax.jit(apply, donate_argnums=(0,))
    zeros = jax.jit(lambda p: jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), p))

    def update(state: TrainState, rows: Rows) -> tuple[TrainState, dict[str, float]]:
        count = int(np.asarray(rows.mask).sum())
        rows = pad_rows(rows, micro_rows)
        gradient, losses, reports = zeros(state.params), [], []
        for start in range(0, rows.token_ids.shape[0], micro_rows):
            micro = jax.tree.map(lambda x, s=start: x[s : s + micro_rows], rows)
            if not micro.mask.any():
                continue  # nothing to learn here, in the trunk or the head
            gradient, loss, report = accumulate(state.params, gradient, micro, np.float32(max(count, 1)))
            losses.append(loss)
            reports.append((report, micro.mask.reshape(-1)))
        state, norm, good = apply(state, gradient, np.bool_(count > 0))
        return state, _summarize(losses, reports, count, float(norm), bool(good))

    return update


def pad_rows(rows: Rows, multiple: int) -> Rows:
    """Adds empty rows up to a multiple."""
    missing = -rows.token_ids.shape[0] % multiple

    def pad(x: Array, value: float) -> np.ndarray:
        return np.pad(np.asarray(x), ((0, missing), (0, 0)), constant_values=value)

    padded = jax.tree.map(lambda x: pad(x, 0), rows)
    return padded.replace(temperature=pad(rows.temperature, 1))  # a temperature of 0 would divide


def _summarize(
    losses: list[Array], reports: list[Any], count: int, norm: float, good: bool
) -> dict[str, float]:
    metrics = {
        "trained_tokens": float(count),
        "loss": float(sum(map(float, losses))),
        "grad_norm": norm,
        "skipped_nonfinite": float(count > 0 and not good),
        "skipped_no_trained_tokens": float(count == 0),
    }
    if not count:
        return metrics
    gap = np.abs(np.concatenate([np.asarray(r["gap"])[mask] for r, mask in reports]))
    metrics |= {
        "logprob": sum(float(r["logprob_sum"]) for r, _ in reports) / count,
        "logprob_gap_mean": float(gap.mean()),
        "logprob_gap_p99": float(np.quantile(gap, 0.99)),
        "logprob_gap_max": float(gap.max()),
    }
    for name in sorted(reports[0][0]):
        values = [float(r[name]) for r, _ in reports] if name not in ("gap", "logprob_sum") else []
        if name.endswith("_sum") and values:
            metrics[f"{name.removesuffix('_sum')}_mean"] = sum(values) / count
        elif name.endswith("_max"):
            metrics[name] = max(values)
    return metrics
