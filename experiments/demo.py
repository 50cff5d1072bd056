"""``make demo``: SERA trains a tiny policy on this CPU, and shows what came of it.

The same as ``python -m experiments.train --config=experiments/configs/textcraft_sera.py:tiny``, from
the beginning unless the run directory holds an unfinished run.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from absl import app, flags, logging
from rich.console import Console

from experiments.configs import textcraft_sera
from sera_jax.config import validate
from sera_jax.report.curves import plot_run
from sera_jax.report.progress import Progress
from sera_jax.report.summary import print_summary
from sera_jax.train import train

_WORKDIR = flags.DEFINE_string("workdir", "runs/demo", "Run directory, made if missing.")
_SEED = flags.DEFINE_integer("seed", 0, "Seed of the run.", lower_bound=0)


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {' '.join(argv[1:])}")
    logging.set_verbosity(logging.ERROR)  # orbax narrates every save
    console = Console()
    config = dataclasses.replace(textcraft_sera.make("tiny"), seed=_SEED.value)
    validate(config)
    workdir = Path(_WORKDIR.value)
    console.print(
        "[bold]SERA on a toy TextCraft world.[/bold] A policy of half a million parameters learns the "
        "protocol from imperfect demonstrations, then trains on its own trees: execution, delegation "
        "and rubric stages in turn. About six minutes on two cores; a stopped demo goes on where it was."
    )
    train(config, workdir, progress=Progress(console))
    plot_run(workdir / "metrics.jsonl", workdir / "curves.png")
    print_summary(workdir, console)


if __name__ == "__main__":
    app.run(main)
