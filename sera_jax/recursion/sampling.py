"""Many trees at once: what each stage needs of a tree, and how a step's trees are gathered."""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Callable, Sequence

from sera_jax.config import Config
from sera_jax.recursion.actors import Actor
from sera_jax.recursion.loop import Toolbox, TreeRunner, TreeSpec
from sera_jax.types import Stage, Task, Tree


def tree_spec(config: Config, stage: Stage) -> TreeSpec:
    """What a training tree of ``stage`` is sampled for.

    Execution trees have a rubric for each launch where scores are the reward; delegation trees need the
    root's success alone; rubric trees have a rubric for each group of branches, and their launches run
    one after another so that each starts from the state that the last one committed.
    """
    rubrics = {
        Stage.EXECUTION: "launches" if config.credit.execution_reward == "rubric" else "none",
        Stage.DELEGATION: "none",
        Stage.RUBRIC: "groups",
    }[stage]
    forks = stage == Stage.RUBRIC
    return TreeSpec(
        stage=stage,
        max_turns=config.rollout.max_turns,
        max_depth=config.rollout.max_depth,
        max_tokens=config.rollout.max_tokens,
        temperature=config.rollout.temperature,
        rubrics=rubrics,
        branches=config.counterfactual.branches if forks else 0,
        budget=config.counterfactual.budget if forks else 0,
        sequential=forks,
        writer_tokens=config.rubric.writer_tokens,
        scorer_tokens=config.rubric.scorer_tokens,
        writer_temperature=config.rubric.writer_temperature,
        deadline_seconds=config.rollout.deadline_seconds,
    )


async def sample_trees(
    tools: Toolbox,
    actor: Actor,
    spec: TreeSpec,
    tasks: Sequence[Task],
    group_size: int,
    version: int,
    on_tree: Callable[[Tree], None] | None = None,
) -> list[list[Tree]]:
    """K = ``group_size`` trees for each of P tasks, as [P][K]; ``on_tree`` is called as each ends.

    A task that is there twice, where a step straddles two epochs, has trees of its own each time: their
    indices go on, and with them their sampling keys.
    """
    indices, seen = [], collections.Counter[str]()
    for task in tasks:
        indices.append(range(seen[task.id] * group_size, (seen[task.id] + 1) * group_size))
        seen[task.id] += 1

    async def one(task: Task, index: int) -> Tree:
        tree = await TreeRunner(tools, actor, spec).run(task, index, version)
        if on_tree is not None:
            on_tree(tree)
        return tree

    trees = await asyncio.gather(
        *(one(task, i) for task, group in zip(tasks, indices, strict=True) for i in group)
    )
    return [trees[p * group_size : (p + 1) * group_size] for p in range(len(tasks))]
