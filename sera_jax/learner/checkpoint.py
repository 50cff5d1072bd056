"""Checkpoints: arrays by orbax, the host's counters as JSON, both or neither.

A step is whole when orbax has finalized its directory; what a kill leaves behind is never restored.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp


class CheckpointError(RuntimeError):
    """A checkpoint that is not there or cannot be read."""


class Checkpointer:
    """Saves and restores (state, host data) by step.

    Args:
      directory: Where steps live; made if missing.
      keep: How many of the newest steps stay.
    """

    def __init__(self, directory: str | Path, keep: int = 2):
        if keep < 1:
            raise ValueError(f"keep={keep}: at least 1 is expected")
        self._directory = Path(directory).absolute()
        self._directory.mkdir(parents=True, exist_ok=True)
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=False)
        self._manager = ocp.CheckpointManager(
            self._directory, options=options, item_names=("state", "host")
        )
        self._warn_of_remains()

    def _warn_of_remains(self) -> None:
        whole = {str(step) for step in self._manager.all_steps()}
        remains = [
            path.name
            for path in sorted(self._directory.iterdir())
            if path.is_dir() and (path.name not in whole or not self._is_whole(path))
        ]
        if remains:
            warnings.warn(
                f"{self._directory}: half-written steps are skipped: {', '.join(remains)}", stacklevel=3
            )

    @staticmethod
    def _is_whole(path: Path) -> bool:
        return all((path / item).is_dir() for item in ("state", "host"))

    def steps(self) -> list[int]:
        """Whole steps, oldest first."""
        steps = sorted(self._manager.all_steps())
        return [step for step in steps if self._is_whole(self._directory / str(step))]

    def latest(self) -> int | None:
        """The newest whole step, None in an empty directory."""
        steps = self.steps()
        return steps[-1] if steps else None

    def save(self, step: int, state: Any, host: Mapping[str, Any]) -> None:
        """Saves one step; a step that is there already is left alone."""
        if step in self.steps():
            return
        arguments = ocp.args.Composite(
            state=ocp.args.StandardSave(state), host=ocp.args.JsonSave(dict(host))
        )
        self._manager.save(step, args=arguments, force=True)
        self._manager.wait_until_finished()

    def restore(self, abstract: Any, step: int | None = None) -> tuple[Any, dict[str, Any]]:
        """State and host data of ``step``, by default the newest.

        Args:
          abstract: Shapes, dtypes and, where wanted, shardings of the state; the mesh need not be the
            one that saved it.
          step: Which step.

        Raises:
          CheckpointError: There is no such step.
        """
        steps = self.steps()
        step = steps[-1] if step is None and steps else step
        if step is None or step not in steps:
            raise CheckpointError(f"{self._directory} has no step {step}; whole steps: {steps or 'none'}")
        if not any(getattr(x, "sharding", None) for x in jax.tree.leaves(abstract)):
            device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
            abstract = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), abstract
            )
        arguments = ocp.args.Composite(
            state=ocp.args.StandardRestore(abstract), host=ocp.args.JsonRestore()
        )
        restored = self._manager.restore(step, args=arguments)
        return restored["state"], dict(restored["host"])

    def close(self) -> None:
        """Waits for what is being written."""
        self._manager.close()
