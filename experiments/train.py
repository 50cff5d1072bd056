"""Trains a configuration.

    python -m experiments.train --config=experiments/configs/textcraft_sera.py:tiny --workdir=runs/tiny
        [--config.seed=1] [--config.run.steps=50] [--dry_run]

A run directory goes on from its last checkpoint; other settings in the same directory are refused with
a diff.
"""

from __future__ import annotations

import sys
from pathlib import Path

from absl import app, flags, logging
from ml_collections import config_flags
from rich.console import Console

from sera_jax import config as config_lib
from sera_jax.report.curves import plot_run
from sera_jax.report.progress import Progress
from sera_jax.report.summary import dry_run, print_summary
from sera_jax.run_directory import RunMismatchError
from sera_jax.train import train

_CONFIG = config_flags.DEFINE_config_file("config", None, "File and variant.", lock_config=True)
_WORKDIR = flags.DEFINE_string("workdir", None, "Run directory, made if missing.")
_DRY_RUN = flags.DEFINE_bool("dry_run", False, "Check and print what the run would be, then stop.")


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {' '.join(argv[1:])}")
    logging.set_verbosity(logging.ERROR)  # orbax narrates every save
    console = Console()
    try:
        config = config_lib.from_config_dict(_CONFIG.value)
    except config_lib.ConfigError as error:
        console.print(f"[red]Configuration:[/red] {error}", highlight=False, soft_wrap=True)
        sys.exit(2)
    workdir = Path(_WORKDIR.value)
    if _DRY_RUN.value:
        dry_run(config, workdir, console)
        return
    try:
        train(config, workdir, progress=Progress(console))
    except RunMismatchError as error:
        console.print(f"[red]{error}[/red]", highlight=False, soft_wrap=True)
        sys.exit(2)
    plot_run(workdir / "metrics.jsonl", workdir / "curves.png")
    print_summary(workdir, console)


if __name__ == "__main__":
    flags.mark_flags_as_required(["config", "workdir"])
    app.run(main)
