"""The run directory: whose it is, and files that are whole or not there.

``config.json`` (settings, fingerprint, versions, commit), ``metrics.jsonl``, ``warm_start.jsonl``,
``ledger.json``, ``trees/``, ``evaluations/``, ``checkpoints/`` and ``curves.png``.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

import sera_jax
from sera_jax import config as config_lib
from sera_jax.config import Config


class RunMismatchError(RuntimeError):
    """The run directory was started with other settings; the message lists the differences."""


def claim_directory(config: Config, workdir: Path, own: Mapping[str, str | None]) -> None:
    """Writes ``config.json``, or refuses a directory that another configuration has begun.

    The record of the start stays; each resumption adds its commit and versions.

    Args:
      config: The run's settings.
      workdir: Its directory.
      own: Names of an objective and a schedule that were passed to the loop in place of the config's.

    Raises:
      RunMismatchError: Settings, objective or schedule differ; the message lists the differences.
    """
    path = workdir / "config.json"
    settings = config_lib.as_dict(config)
    source = {
        "versions": {
            "sera_jax": sera_jax.__version__,
            "jax": jax.__version__,
            "python": platform.python_version(),
        },
        "commit": current_commit(),
    }
    record = {"config": settings, "fingerprint": config_lib.fingerprint(config), "own": dict(own), **source}
    if path.exists():
        old = json.loads(path.read_text())
        if old["fingerprint"] != record["fingerprint"] or old["own"] != record["own"]:
            before, after = ({**r["config"], **r["own"]} for r in (old, record))
            changes = "\n  ".join(config_lib.difference(before, after))
            raise RunMismatchError(
                f"{workdir} was started with other settings; choose another --workdir, or restore:\n"
                f"  {changes}"
            )
        record = {**old, "config": settings, "resumed": [*old.get("resumed", []), source]}
    write_json(path, record)


def current_commit() -> str | None:
    """The commit of the source tree, None outside a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def write_json(path: Path, data: Any) -> None:
    """Writes ``path`` atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(data, indent=1, default=_plain) + "\n")
    os.replace(partial, path)


def _plain(value: Any) -> Any:
    if isinstance(value, (np.generic, np.ndarray, jax.Array)):
        return np.asarray(value).tolist()
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")
