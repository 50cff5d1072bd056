"""Checkpoints: whole or not there, bitwise, across meshes."""

import shutil
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from sera_jax.learner.checkpoint import Checkpointer, CheckpointError


def state(offset=0.0):
    values = jnp.arange(64.0).reshape(8, 8) / 3 + offset
    return {"w": values, "half": values.astype(jnp.bfloat16), "version": jnp.int32(7)}


def abstract():
    return jax.eval_shape(state)


def equal(a, b):
    return all(
        np.array_equal(np.asarray(x), np.asarray(y)) and x.dtype == y.dtype
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


def test_bitwise_round_trip_with_host_data(tmp_path):
    saver = Checkpointer(tmp_path, keep=2)
    assert saver.latest() is None
    saver.save(3, state(), {"ledger": {"verifier/execution/root/calls": 5}, "seed": 0})
    restored, host = Checkpointer(tmp_path).restore(abstract())
    assert equal(restored, state())
    assert host == {"ledger": {"verifier/execution/root/calls": 5}, "seed": 0}


def test_retention_and_choice_of_step(tmp_path):
    saver = Checkpointer(tmp_path, keep=2)
    for step in (1, 2, 3):
        saver.save(step, state(step), {"step": step})
    assert saver.steps() == [2, 3] and saver.latest() == 3
    restored, host = saver.restore(abstract(), step=2)
    assert host["step"] == 2 and equal(restored, state(2))
    saver.save(3, state(99), {"step": 99})  # a step that is there is left alone
    assert equal(saver.restore(abstract())[0], state(3))
    with pytest.raises(CheckpointError, match=r"has no step 1; whole steps: \[2, 3\]"):
        saver.restore(abstract(), step=1)


def test_an_empty_directory_has_nothing_to_restore(tmp_path):
    with pytest.raises(CheckpointError, match="has no step None; whole steps: none"):
        Checkpointer(tmp_path).restore(abstract())
    with pytest.raises(ValueError, match="keep=0: at least 1 is expected"):
        Checkpointer(tmp_path, keep=0)


def test_half_written_steps_are_skipped_with_a_warning(tmp_path):
    saver = Checkpointer(tmp_path, keep=3)
    saver.save(10, state(), {"step": 10})
    saver.save(20, state(1), {"step": 20})
    saver.close()
    break_steps(tmp_path)
    with pytest.warns(UserWarning, match=r"steps are skipped: 20, 30\.orbax-checkpoint-tmp-1$"):
        again = Checkpointer(tmp_path, keep=3)
    assert again.latest() == 10
    assert again.restore(abstract())[1]["step"] == 10


def break_steps(directory, item="host", emptied=False):
    """Step 20 loses one of its two items, and step 30 was being written."""
    shutil.rmtree(directory / "20" / item)
    if emptied:
        (directory / "20" / item).mkdir()
    (directory / "30.orbax-checkpoint-tmp-1").mkdir()
    (directory / "notes").mkdir()  # somebody's own: no step, neither named nor touched


@pytest.mark.parametrize(("item", "emptied"), [("host", False), ("state", False), ("state", True)])
def test_a_resumed_run_writes_half_written_steps_again(tmp_path, item, emptied):
    saver = Checkpointer(tmp_path, keep=2)
    saver.save(10, state(), {"step": 10})
    saver.save(20, state(1), {"step": 20})
    saver.close()
    break_steps(tmp_path, item, emptied)
    with pytest.warns(UserWarning, match="half-written"):
        again = Checkpointer(tmp_path, keep=2)
    again.save(20, state(2), {"step": "20 again"})
    # 10 is kept: the broken 20 did not count as one of the two.
    assert again.steps() == [10, 20]
    restored, host = again.restore(abstract())
    assert equal(restored, state(2)) and host == {"step": "20 again"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["10", "20", "notes"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Checkpointer(tmp_path, keep=2).latest() == 20


@pytest.mark.parametrize("devices", [1, 2])
def test_restore_on_another_mesh(tmp_path, devices):
    def sharded(count):
        mesh = jax.sharding.Mesh(np.array(jax.devices()[:count]), ("fsdp",))
        return lambda x: NamedSharding(mesh, PartitionSpec("fsdp") if x.ndim else PartitionSpec())

    place = sharded(4)
    saver = Checkpointer(tmp_path)
    saver.save(1, jax.tree.map(lambda x: jax.device_put(x, place(x)), state()), {})
    place = sharded(devices)
    wanted = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place(x)), abstract())
    restored, _ = saver.restore(wanted)
    assert equal(restored, state())
    assert restored["w"].sharding.num_devices == devices
