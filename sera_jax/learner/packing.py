"""Samples into rows: several segments a row, each with its own positions.

The shift happens here and nowhere else: position t of a row holds token t as input and, where token
t + 1 belongs to the same segment, everything about token t + 1 as target (id, mask, advantage, sampler
log-prob, temperature).
"""

from __future__ import annotations

from collections.abc import Sequence

import flax.struct
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from sera_jax.types import Sample


class PackingError(ValueError):
    """A sample that cannot be packed; the message names its source."""


@flax.struct.dataclass
class Rows:
    """Packed rows, R by T; the fields from ``target_ids`` on describe token t + 1 of the segment.

    ``segment_ids`` count from 1 in each row; 0 is padding, where ``temperature`` is 1 and all else 0.
    """

    token_ids: Int[Array, "R T"]
    positions: Int[Array, "R T"]
    segment_ids: Int[Array, "R T"]
    target_ids: Int[Array, "R T"]
    mask: Bool[Array, "R T"]
    advantage: Float[Array, "R T"]
    old_logprobs: Float[Array, "R T"]
    temperature: Float[Array, "R T"]


def pack(
    samples: Sequence[Sample], *, row_length: int, rows_multiple: int = 1
) -> tuple[Rows, dict[str, float]]:
    """First-fit-decreasing: the longest sample first, each into the first row with room.

    A sample is cut after its last trained token, which saves work and changes no gradient; one without
    a trained token is left out and counted. Deterministic in the order of ``samples``.

    Args:
      samples: What to train.
      row_length: T.
      rows_multiple: Empty rows are added up to a multiple of this.

    Returns:
      Rows as NumPy arrays, and metrics: rows, share of positions in use, trained and context tokens,
      tokens cut, samples left out.

    Raises:
      PackingError: A sample is longer than a row even when cut, or its arrays differ in length.
      ValueError: row_length or rows_multiple below 1.
    """
    if row_length < 1:
        raise ValueError(f"row_length={row_length}: at least 1 is expected")
    if rows_multiple < 1:
        raise ValueError(f"rows_multiple={rows_multiple}: at least 1 is expected")
    lengths = [_trained_length(sample, row_length) for sample in samples]
    order = sorted((i for i, n in enumerate(lengths) if n), key=lambda i: -lengths[i])
    rows: list[list[int]] = []
    room: list[int] = []
    for i in order:
        place = next((r for r, free in enumerate(room) if free >= lengths[i]), None)
        if place is None:
            rows.append([])
            room.append(row_length)
            place = len(rows) - 1
        rows[place].append(i)
        room[place] -= lengths[i]
    num_rows = max(rows_multiple, -(-len(rows) // rows_multiple) * rows_multiple)
    shape = (num_rows, row_length)
    fields = {
        "token_ids": np.zeros(shape, np.int32),
        "positions": np.zeros(shape, np.int32),
        "segment_ids": np.zeros(shape, np.int32),
        "target_ids": np.zeros(shape, np.int32),
        "mask": np.zeros(shape, bool),
        "advantage": np.zeros(shape, np.float32),
        "old_logprobs": np.zeros(shape, np.float32),
        "temperature": np.ones(shape, np.float32),
    }
    for r, members in enumerate(rows):
        start = 0
        for segment, i in enumerate(members, start=1):
            sample, end = samples[i], start + lengths[i]
            here, before = slice(start, end), slice(start, end - 1)
            fields["token_ids"][r, here] = sample.token_ids[: lengths[i]]
            fields["positions"][r, here] = np.arange(lengths[i])
            fields["segment_ids"][r, here] = segment
            fields["target_ids"][r, before] = sample.token_ids[1 : lengths[i]]
            fields["mask"][r, before] = sample.mask[1 : lengths[i]]
            fields["advantage"][r, before] = sample.advantage[1 : lengths[i]]
            fields["old_logprobs"][r, before] = sample.logprobs[1 : lengths[i]]
            fields["temperature"][r, here] = sample.temperature
            start = end
    packed = sum(lengths)
    metrics = {
        "rows": float(num_rows),
        "fill": packed / (num_rows * row_length),
        "packed_tokens": float(packed),
        "cut_tokens": float(sum(len(s) for s, n in zip(samples, lengths, strict=True) if n) - packed),
        "samples_without_trained_tokens": float(sum(n == 0 for n in lengths)),
    }
    return Rows(**fields), metrics


def _trained_length(sample: Sample, row_length: int) -> int:
    """Tokens up to the last trained one; 0 when none is trained."""
    sizes = {
        name: len(getattr(sample, name)) for name in ("token_ids", "roles", "mask", "advantage", "logprobs")
    }
    if len(set(sizes.values())) != 1:
        raise PackingError(f"sample {sample.source}: arrays of one length are expected, got {sizes}")
    if len(sample) and sample.mask[0]:
        raise PackingError(
            f"sample {sample.source}: its first token is trained, but nothing comes before it to predict it"
        )
    (trained,) = np.nonzero(sample.mask)
    length = int(trained[-1]) + 1 if trained.size else 0
    if length > row_length:
        raise PackingError(
            f"sample {sample.source}: {length} tokens up to its last trained one do not fit "
            f"row_length={row_length}"
        )
    return length
