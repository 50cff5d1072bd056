"""Where each parameter lies on a mesh with axes (data, fsdp, tensor).

The parameter table names a logical axis for every dimension; :data:`RULES` maps those to mesh axes.
Activations follow by propagation: rows are sharded over data and fsdp, see :func:`row_sharding`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from sera_jax.policy.qwen3 import Params, Qwen3Config, is_info, parameter_table

AXES = ("data", "fsdp", "tensor")

# Weights are cut over fsdp along the hidden axis, and over tensor along heads, feed-forward and vocabulary,
# so that each product needs one all-reduce over tensor at its end.
RULES: Mapping[str, str | None] = {
    "layer": None,
    "vocab": "tensor",
    "embed": "fsdp",
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
}


def make_mesh(
    shape: tuple[int, int, int] | None = None, devices: Sequence[jax.Device] | None = None
) -> Mesh:
    """A mesh of (data, fsdp, tensor) sizes; by default all devices on fsdp.

    Raises:
      ValueError: The sizes do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else list(devices)
    shape = (1, len(devices), 1) if shape is None else shape
    if math.prod(shape) != len(devices):
        raise ValueError(f"mesh shape={shape}: {math.prod(shape)} devices, but there are {len(devices)}")
    return Mesh(np.asarray(devices).reshape(shape), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def partition_spec(
    logical_axes: Sequence[str | None], rules: Mapping[str, str | None] = RULES
) -> PartitionSpec:
    """Mesh axes of one array.

    Raises:
      ValueError: A logical axis has no rule, or two dimensions fall on the same mesh axis.
    """
    physical: list[str | None] = []
    for name in logical_axes:
        if name is not None and name not in rules:
            raise ValueError(f"logical axis {name!r}: no rule; known are {', '.join(rules)}")
        axis = None if name is None else rules[name]
        if axis is not None and axis in physical:
            raise ValueError(f"logical axes {tuple(logical_axes)}: two dimensions on mesh axis {axis!r}")
        physical.append(axis)
    return PartitionSpec(*physical)


def param_shardings(cfg: Qwen3Config, mesh: Mesh, rules: Mapping[str, str | None] = RULES) -> Params:
    """A sharding for every parameter, with the structure of the parameters.

    Raises:
      ValueError: See :func:`partition_spec`; or a dimension does not divide over its mesh axis.
    """

    def sharding(path: Any, info: Any) -> NamedSharding:
        spec = partition_spec(info.logical_axes, rules)
        for size, axis in zip(info.shape, spec, strict=True):
            if axis is not None and size % mesh.shape[axis]:
                raise ValueError(
                    f"{jax.tree_util.keystr(path)}: a dimension of {size} does not divide over mesh axis "
                    f"{axis!r} of {mesh.shape[axis]}"
                )
        return NamedSharding(mesh, spec)

    return jax.tree_util.tree_map_with_path(sharding, parameter_table(cfg), is_leaf=is_info)


def row_sharding(mesh: Mesh) -> NamedSharding:
    """Packed rows [R, T]: rows over data and fsdp."""
    return NamedSharding(mesh, PartitionSpec(("data", "fsdp"), None))
