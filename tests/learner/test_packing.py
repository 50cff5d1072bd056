"""Samples into rows."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sera_jax.learner.packing import PackingError, pack
from sera_jax.types import Role, Sample


def sample(length, trained=(), start=10, source=(0, 0), advantage=1.0, temperature=1.0):
    mask = np.zeros(length, bool)
    mask[list(trained)] = True
    return Sample(
        token_ids=np.arange(start, start + length, dtype=np.int32),
        roles=np.where(mask, Role.EXECUTE, Role.CONTEXT).astype(np.uint8),
        mask=mask,
        advantage=np.where(mask, advantage, 0).astype(np.float32),
        logprobs=np.where(mask, -0.5, 0).astype(np.float32),
        temperature=temperature,
        source=source,
    )


def test_a_literal_row():
    # Lengths 4 (cut from 5: its last trained token is the fourth) and 3 share a row of 8.
    rows, metrics = pack([sample(3, [2], start=50), sample(5, [1, 3])], row_length=8)
    assert rows.token_ids.tolist() == [[10, 11, 12, 13, 50, 51, 52, 0]]
    assert rows.positions.tolist() == [[0, 1, 2, 3, 0, 1, 2, 0]]
    assert rows.segment_ids.tolist() == [[1, 1, 1, 1, 2, 2, 2, 0]]
    # Position t describes token t + 1 of its segment; the last of a segment describes nothing.
    assert rows.target_ids.tolist() == [[11, 12, 13, 0, 51, 52, 0, 0]]
    assert rows.mask.tolist() == [[True, False, True, False, False, True, False, False]]
    assert rows.advantage.tolist() == [[1, 0, 1, 0, 0, 1, 0, 0]]
    assert rows.old_logprobs.tolist() == [[-0.5, 0, -0.5, 0, 0, -0.5, 0, 0]]
    assert metrics["rows"] == 1 and metrics["cut_tokens"] == 1 and metrics["fill"] == 7 / 8


def test_first_fit_decreasing():
    # 5, 4, 3, 2 in rows of 7: 5 opens row 0, 4 opens row 1, 3 fits row 1, 2 fits row 0.
    rows, _ = pack([sample(n, [n - 1]) for n in (2, 3, 4, 5)], row_length=7)
    assert [np.bincount(r[r > 0]).tolist()[1:] for r in rows.segment_ids] == [[5, 2], [4, 3]]


def test_a_sample_without_trained_tokens_is_left_out_and_counted():
    rows, metrics = pack([sample(4), sample(3, [1])], row_length=8)
    assert metrics["samples_without_trained_tokens"] == 1 and int((rows.segment_ids > 0).sum()) == 2
    rows, metrics = pack([], row_length=8, rows_multiple=2)
    assert rows.token_ids.shape == (2, 8) and not rows.mask.any()


def test_rows_are_padded_to_a_multiple():
    rows, _ = pack([sample(5, [4])] * 3, row_length=5, rows_multiple=4)
    assert rows.token_ids.shape == (4, 5) and not rows.segment_ids[3].any()
    assert np.all(rows.temperature[3] == 1)


def test_temperature_follows_the_sample():
    rows, _ = pack([sample(3, [2], temperature=0.5), sample(2, [1])], row_length=8)
    assert rows.temperature.tolist() == [[0.5, 0.5, 0.5, 1, 1, 1, 1, 1]]


@given(st.lists(st.tuples(st.integers(2, 12), st.integers(1, 11)), max_size=20))
@settings(max_examples=40, deadline=None)
def test_every_trained_token_is_packed_once(shapes):
    samples = [sample(n, [min(t, n - 1)], start=100 * i) for i, (n, t) in enumerate(shapes)]
    rows, metrics = pack(samples, row_length=12)
    want = sorted(int(s.token_ids[s.mask][0]) for s in samples)
    assert sorted(rows.target_ids[rows.mask].tolist()) == want
    for tokens, segments, positions in zip(rows.token_ids, rows.segment_ids, rows.positions, strict=True):
        for segment in set(segments[segments > 0]):
            here = np.flatnonzero(segments == segment)
            assert np.all(np.diff(here) == 1) and positions[here].tolist() == list(range(len(here)))
            assert np.all(np.diff(tokens[here]) == 1)
    again, _ = pack(samples, row_length=12)
    np.testing.assert_array_equal(rows.token_ids, again.token_ids)
    assert metrics["packed_tokens"] == (rows.segment_ids > 0).sum()


def test_refusals():
    with pytest.raises(PackingError, match=r"sample \(3, 1\): 9 tokens .* do not fit row_length=8"):
        pack([sample(10, [8], source=(3, 1))], row_length=8)
    with pytest.raises(PackingError, match="its first token is trained"):
        pack([sample(3, [0])], row_length=8)
    odd = sample(3, [1])
    odd.logprobs = odd.logprobs[:2]
    with pytest.raises(PackingError, match="arrays of one length are expected"):
        pack([odd], row_length=8)
    for name in ("row_length", "rows_multiple"):
        with pytest.raises(ValueError, match=f"{name}=0: at least 1 is expected"):
            pack([], **{"row_length": 8, name: 0})
