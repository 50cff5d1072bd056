"""SERA's training loop.

One step of :func:`train`, at version v = number of completed updates:

1. **Stage.** v selects execution, delegation or rubric training (:mod:`sera_jax.schedule`).
2. **Tasks.** P root tasks, a function of the seed and v alone (:mod:`sera_jax.build`).
3. **Trees.** K recursive trees a task from the rollout engine: launches, frozen rubrics, scores, and in
   the rubric stage B counterfactual branches from cloned states (:mod:`sera_jax.recursion.loop`).
4. **Credit.** Rewards, leave-one-out baselines, depth weights, trained tokens: trees become weighted
   samples (:mod:`sera_jax.recursion.assignment`, on the array functions of :mod:`sera_jax.credit`).
5. **Update.** Samples are packed into rows; one CISPO step on the global token mean
   (:mod:`sera_jax.learner`, :mod:`sera_jax.objectives`).
6. **Sync.** The engine serves version v + 1; no later token comes from older weights.
7. **Record.** Metrics, trees, ledger, evaluation, checkpoint: a run killed anywhere goes on from its
   last checkpoint to the same result.

Steps 3, 6 and 7 have effects; 4 and 5 are functions of arrays. Everything here can be called from a
notebook: an objective or a schedule of your own is an argument of :func:`train`.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from sera_jax.build import Parts, build
from sera_jax.config import Config
from sera_jax.evaluate import Evaluation, evaluate
from sera_jax.labels.ledger import Ledger
from sera_jax.learner.checkpoint import Checkpointer
from sera_jax.learner.packing import Rows, pack
from sera_jax.learner.update import TrainState, make_optimizer, make_update
from sera_jax.objectives.base import Objective
from sera_jax.recursion.actors import PolicyActor
from sera_jax.recursion.assignment import assign_credit
from sera_jax.recursion.records import write_trees
from sera_jax.recursion.sampling import sample_trees, tree_spec
from sera_jax.report.diagnostics import tree_metrics
from sera_jax.report.metrics import MetricsWriter
from sera_jax.report.progress import Progress
from sera_jax.rollout.local import LocalEngine
from sera_jax.run_directory import claim_directory, write_json
from sera_jax.schedule import Schedule
from sera_jax.types import Sample, Stage, Tree
from sera_jax.warm_start import warm_start

####################################################################################################
# The loop
####################################################################################################


def train(
    config: Config,
    workdir: str | Path,
    *,
    objective: Objective | None = None,
    schedule: Schedule | None = None,
    progress: Progress | None = None,
) -> TrainState:
    """Trains until ``config.run.steps`` updates are done, from the last checkpoint if there is one.

    Args:
      config: See :mod:`sera_jax.config`.
      workdir: The run directory; made if missing.
      objective: A per-token loss of your own in place of ``config.objective``.
      schedule: A schedule of your own in place of ``config.schedule``.
      progress: Where progress is shown; None for silence.

    Returns:
      The final state, on the host's devices.

    Raises:
      sera_jax.run_directory.RunMismatchError: The run directory belongs to a run with other settings.
    """
    return asyncio.run(
        train_async(config, workdir, objective=objective, schedule=schedule, progress=progress)
    )


async def train_async(
    config: Config,
    workdir: str | Path,
    *,
    objective: Objective | None = None,
    schedule: Schedule | None = None,
    progress: Progress | None = None,
) -> TrainState:
    """:func:`train` for a caller that already has an event loop, such as a notebook."""
    run = await start_run(config, Path(workdir), objective, schedule, progress or Progress.silent())
    try:
        if run.is_new:
            await record_evaluation(run)
            run.save()
        while run.version < config.run.steps:
            await step(run)
            done = run.version == config.run.steps
            if done or (config.run.eval_every and run.version % config.run.eval_every == 0):
                await record_evaluation(run)
            if done or run.version % config.run.checkpoint_every == 0:
                run.save()
    finally:
        run.close()
    return run.state


# Counts of one step that a resumed run repeats exactly.
_ENGINE_COUNTS = ("requests", "prefill_tokens", "prefill_tokens_saved", "sampled_tokens")


async def step(run: Run) -> dict[str, float]:
    """One optimizer step, the numbered stages of the module docstring; returns its metrics."""
    config, version, clock = run.config, run.version, Clock()

    # 1, 2. Stage and tasks.
    position = run.schedule.position(version)
    stage = position.stage
    tasks = run.parts.tasks.training(version, config.rollout.tasks_per_step)
    run.progress.step(version, config.run.steps, stage, len(tasks) * config.rollout.group_size)

    # 3. Trees.
    engine_before = run.engine.metrics()
    trees = await sample_trees(
        run.parts.tools,
        run.actor,
        tree_spec(config, stage),
        tasks,
        config.rollout.group_size,
        version,
        on_tree=run.progress.tree,
    )
    check_trees(trees, version)
    clock.lap("rollout")
    engine_after = run.engine.metrics()
    tokens = {k: engine_after[k] - engine_before.get(k, 0.0) for k in _ENGINE_COUNTS}

    # 4. Credit.
    samples, credit_metrics = assign_credit(trees, stage, config)
    clock.lap("credit")

    # 5. Update.
    learner_metrics = run.update(samples, version)
    clock.lap("update")

    # 6. Sync.
    await run.engine.update_weights(run.state.params, run.version)
    clock.lap("sync")

    # 7. Record.
    metrics = {
        **tree_metrics(trees, run.parts.tools.environment),
        **{f"credit/{k}": v for k, v in credit_metrics.items()},
        **{f"learner/{k}": v for k, v in learner_metrics.items()},
        **{f"engine/{k}": v for k, v in tokens.items()},
        **{f"labels/{k}": v for k, v in run.parts.tools.ledger.totals().items()},
    }
    run.record(version, stage, trees, metrics, clock)
    return metrics


class RolloutError(RuntimeError):
    """No tree of a step is usable; the message names the cause."""


def check_trees(trees: Sequence[Sequence[Tree]], version: int) -> None:
    """Single failed trees are counted and left out; if all failed, the engine or a limit is to blame."""
    errors = collections.Counter(tree.error for group in trees for tree in group)
    if "" not in errors:
        cause, count = errors.most_common(1)[0]
        raise RolloutError(f"all trees of version {version} failed, {count} of them with: {cause}")


async def record_evaluation(run: Run) -> dict[str, Evaluation]:
    """Evaluates the weights now served on every held-out set, greedily, and writes the results."""
    results = {}
    for name, tasks in run.parts.tasks.evaluation(run.config.run.eval_tasks).items():
        run.progress.evaluation(run.version, name, len(tasks))
        result = await evaluate(
            run.config,
            run.parts.evaluation_tools(),
            run.actor,
            tasks,
            version=run.version,
            scored=run.config.credit.execution_reward == "rubric",
            on_tree=run.progress.tree,
        )
        results[name] = result
        path = run.workdir / "evaluations" / f"{name}-{run.version:06d}.json"
        write_json(path, {"version": run.version, "success": result.mean, "tasks": result.results()})
        trees = [[tree] for tree in result.trees]
        run.writer.write(
            run.version,
            f"eval/{name}",
            {
                "success": result.mean,
                **{f"success/{tier}": value for tier, value in result.by_tier().items()},
                **tree_metrics(trees, run.parts.tools.environment),
            },
        )
        run.progress.evaluated(run.version, name, result.mean)
    return results


####################################################################################################
# A run: what the loop holds between steps
####################################################################################################


@dataclasses.dataclass
class Run:
    """Everything that lives as long as the loop."""

    config: Config
    workdir: Path
    parts: Parts
    schedule: Schedule
    state: TrainState
    engine: LocalEngine
    actor: PolicyActor
    writer: MetricsWriter
    checkpointer: Checkpointer
    progress: Progress
    update_rows: Callable[[TrainState, Rows], tuple[TrainState, Mapping[str, Any]]]
    is_new: bool

    @property
    def version(self) -> int:
        """Completed updates."""
        return int(self.state.version)

    def update(self, samples: Sequence[Sample], version: int) -> dict[str, float]:
        """Packs and applies one update; without a trained token only the version advances."""
        learner = self.config.learner
        if not samples:
            self.state = self.state.replace(version=self.state.version + 1)
            return {"trained_tokens": 0.0, "skipped_no_samples": 1.0}
        rows, packing_metrics = pack(
            samples, row_length=learner.row_length, rows_multiple=learner.micro_rows
        )
        self.state, metrics = self.update_rows(self.state, rows)
        assert self.version == version + 1
        return {**packing_metrics, **{name: float(value) for name, value in metrics.items()}}

    def record(
        self,
        version: int,
        stage: Stage,
        trees: Sequence[Sequence[Tree]],
        metrics: Mapping[str, float],
        clock: Clock,
    ) -> None:
        """Writes one step's metrics and trees."""
        every = self.config.run.save_trees_every
        if every and version % every == 0:
            path = self.workdir / "trees" / f"{version:06d}.jsonl.gz"
            write_trees(path, (tree for group in trees for tree in group))
        clock.lap("record")
        self.writer.write(version, "train", {"stage": str(stage), **metrics, **clock.metrics()})
        rate = metrics["engine/sampled_tokens"] / clock.part("rollout")
        self.progress.metrics(version, stage, {**metrics, "tokens_per_second": rate}, clock.total)

    def save(self) -> None:
        """Checkpoints the state and the host's counters."""
        write_json(self.workdir / "ledger.json", self.parts.tools.ledger.to_dict())
        host = {"ledger": self.parts.tools.ledger.to_dict(), "seed": self.config.seed}
        self.checkpointer.save(self.version, self.state, host)

    def close(self) -> None:
        """Finishes writing."""
        self.checkpointer.close()
        self.writer.close()
        self.progress.close()


async def start_run(
    config: Config,
    workdir: Path,
    objective: Objective | None,
    schedule: Schedule | None,
    progress: Progress,
) -> Run:
    """Builds the parts of a run, new or from its last checkpoint."""
    workdir.mkdir(parents=True, exist_ok=True)
    own = {
        "own_objective": objective and objective.__qualname__,
        "own_schedule": schedule and str(schedule),
    }
    claim_directory(config, workdir, own)
    parts = build(config)
    optimizer = make_optimizer(**dataclasses.asdict(config.optimizer))
    checkpointer = Checkpointer(workdir / "checkpoints", keep=config.run.keep_checkpoints)

    params = parts.init_params(config.seed)
    state = TrainState.create(params, optimizer)
    is_new = checkpointer.latest() is None
    if is_new:
        if config.warm_start.steps:
            params = await warm_start(config, parts, params, progress, workdir)
            state = TrainState.create(params, optimizer)
    else:
        state, host = checkpointer.restore(jax.eval_shape(lambda: state))
        parts.tools.ledger = Ledger.from_dict(host["ledger"])
        progress.resumed(int(state.version))
    writer = MetricsWriter(workdir / "metrics.jsonl", resume_from=None if is_new else int(state.version))

    engine = LocalEngine(
        state.params,
        parts.model,
        slots=config.rollout.slots,
        context_length=config.rollout.context_length,
        version=int(state.version),
        decode_chunk=config.rollout.decode_chunk,
    )
    update_rows = make_update(
        parts.model,
        objective or parts.objective,
        optimizer,
        micro_rows=config.learner.micro_rows,
    )
    return Run(
        config=config,
        workdir=workdir,
        parts=parts,
        schedule=schedule or Schedule.parse(config.schedule),
        state=state,
        engine=engine,
        actor=PolicyActor(engine, config.seed),
        writer=writer,
        checkpointer=checkpointer,
        progress=progress,
        update_rows=update_rows,
        is_new=is_new,
    )


####################################################################################################
# Seconds
####################################################################################################


class Clock:
    """Seconds by part of a step."""

    def __init__(self):
        self._start = self._last = time.perf_counter()
        self._laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        """Ends a part."""
        now = time.perf_counter()
        self._laps[name], self._last = now - self._last, now

    @property
    def total(self) -> float:
        """Seconds since the step began."""
        return time.perf_counter() - self._start

    def part(self, name: str) -> float:
        """Seconds of one part."""
        return self._laps[name]

    def metrics(self) -> dict[str, float]:
        """``seconds/<part>`` and ``seconds/total``: the only metrics that a resumed run may change."""
        laps = {f"seconds/{name}": value for name, value in self._laps.items()}
        return {**laps, "seconds/total": self.total}
