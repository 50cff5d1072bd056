"""Checkpoints: arrays by orbax, the host's counters as JSON, both or neither.

A step is whole when orbax has finalized its directory; what a kill leaves behind is never restored, and
the next save clears it away.
"""

from __future__ import annotations

import shutil
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
        remains = [path.name for path in self._remains()]
        if remains:
            warnings.warn(
                f"{self._directory}: half-written steps are skipped: {', '.join(remains)}", stacklevel=3
            )

    def _remains(self) -> list[Path]:
        """Half-written steps: orbax's temporary directories, and steps that lack an item."""
        whole = {str(step) for step in self.steps()}
        return [
            path
            for path in sorted(self._directory.iterdir())
            if path.is_dir()
            and (path.name.isdigit() or ".orbax-checkpoint-tmp" in path.name)
            and path.name not in whole
        ]

    @staticmethod
    def _is_whole(path: Path) -> bool:
        items = (path / "state", path / "host")
        return all(item.is_dir() and any(item.iterdir()) for item in items)

    def steps(self) -> list[int]:
        """Whole steps, oldest first."""
        steps = sorted(self._manager.all_steps())
        return [step for step in steps if self._is_whole(self._directory / str(step))]

    def latest(self) -> int | None:
        """The newest whole step, None in an empty directory."""
        steps = self.steps()
        return steps[-1] if steps else None

    def save(self, step: int, state: Any, host: Mapping[str, Any]) -> None:
        """Saves one step; a step that is there already is left alone.

        Half-written steps are removed first: orbax refuses to write a step again while a part of it is
        there, and would count it among the steps to keep. One process saves at a time.
        """
        if step in self.steps():
            return
        remains = self._remains()
        for path in remains:
            shutil.rmtree(path)
        if remains:
            self._manager.reload()
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
