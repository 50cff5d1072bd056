"""Evaluates the weights of a run: one greedy tree a task, success by the program.

    python -m experiments.evaluate --workdir=runs/demo [--step=60] [--count=256] [--split=test_easy]

Without ``--split`` the run's own held-out sets are used. ``--split`` names published records (test,
test_easy, dev, ...) for runs on the published world. An error counts as a failure. The results, one
record a task, go to ``evaluations/`` in the run directory.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import jax
from absl import app, flags, logging
from rich.console import Console
from rich.table import Table

from envs.textcraft import tasks as textcraft_tasks
from sera_jax.build import build
from sera_jax.config import from_config_dict
from sera_jax.evaluate import evaluate
from sera_jax.learner.checkpoint import Checkpointer, CheckpointError
from sera_jax.learner.update import TrainState, make_optimizer
from sera_jax.recursion.actors import PolicyActor
from sera_jax.report.progress import Progress
from sera_jax.rollout.local import LocalEngine
from sera_jax.run_directory import write_json

_WORKDIR = flags.DEFINE_string("workdir", None, "Run directory.", required=True)
_STEP = flags.DEFINE_integer("step", None, "Checkpoint; the newest by default.")
_COUNT = flags.DEFINE_integer("count", 256, "Most tasks of each set.", lower_bound=1)
_SPLIT = flags.DEFINE_string("split", None, "Published records, for runs on the published world.")
_TEMPERATURE = flags.DEFINE_float("temperature", 0.0, "0 is greedy, as reported.", lower_bound=0.0)


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {' '.join(argv[1:])}")
    logging.set_verbosity(logging.ERROR)
    console, workdir = Console(), Path(_WORKDIR.value)
    try:
        asyncio.run(run(workdir, console))
    except (CheckpointError, FileNotFoundError, ValueError) as error:
        console.print(f"[red]{error}[/red]", highlight=False, soft_wrap=True)
        sys.exit(2)


async def run(workdir: Path, console: Console) -> None:
    config = from_config_dict(json.loads((workdir / "config.json").read_text())["config"])
    parts = build(config)
    if _SPLIT.value is None:
        sets = parts.tasks.evaluation(_COUNT.value)
    elif config.environment.world == "toy":
        raise ValueError(f"--split={_SPLIT.value}: {workdir} is a run on a toy world; leave --split out")
    else:
        sets = {_SPLIT.value: list(textcraft_tasks.split(_SPLIT.value))[: _COUNT.value]}
    abstract = jax.eval_shape(lambda: TrainState.create(parts.init_params(config.seed), make_optimizer()))
    checkpointer = Checkpointer(workdir / "checkpoints", keep=config.run.keep_checkpoints)
    state, _ = checkpointer.restore(abstract, _STEP.value)
    version = int(state.version)
    engine = LocalEngine(
        state.params,
        parts.model,
        slots=config.rollout.slots,
        context_length=config.rollout.context_length,
        version=version,
        decode_chunk=config.rollout.decode_chunk,
    )
    table = Table(title=f"{workdir}, version {version}", title_justify="left")
    for column in ("set", "tasks", "solved", "by tier"):
        table.add_column(column, no_wrap=True)
    progress = Progress(console)
    for name, tasks in sets.items():
        progress.phase(name, len(tasks))
        result = await evaluate(
            config,
            parts.evaluation_tools(),
            PolicyActor(engine, config.seed),
            tasks,
            version=version,
            temperature=_TEMPERATURE.value,
            on_tree=lambda tree: progress.advance(),
        )
        suffix = "" if _TEMPERATURE.value == 0 else f"-t{_TEMPERATURE.value:g}"
        path = workdir / "evaluations" / f"{name}-{version:06d}-n{len(tasks)}{suffix}.json"
        write_json(path, {"version": version, "success": result.mean, "tasks": result.results()})
        tiers = "  ".join(f"{tier} {100 * value:.1f} %" for tier, value in result.by_tier().items())
        table.add_row(name, str(len(tasks)), f"{100 * result.mean:.1f} %", tiers)
    progress.close()
    console.print(table)


if __name__ == "__main__":
    app.run(main)
