"""Greedy evaluation: one tree a task, root success by the program; an error counts as a failure.

Evaluation trees are sampled at temperature 0 without rubrics. With ``scored=True`` every launch also
gets a rubric and a score, so that the evaluator itself can be measured against the program's labels
(see :mod:`sera_jax.report.diagnostics`).
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence

from sera_jax.config import Config
from sera_jax.recursion.actors import Actor
from sera_jax.recursion.loop import Toolbox
from sera_jax.recursion.sampling import sample_trees, tree_spec
from sera_jax.types import Stage, Task, Tree


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Root success on one set of tasks.

    Attributes:
      success: Success by task id; a tree that ended in an error is a failure.
      tiers: Tier by task id.
      trees: The trees, in task order.
    """

    success: Mapping[str, bool]
    tiers: Mapping[str, str]
    trees: Sequence[Tree]

    @property
    def mean(self) -> float:
        """Task-weighted success in [0, 1]; NaN for an empty set."""
        return sum(self.success.values()) / len(self.success) if self.success else float("nan")

    def by_tier(self) -> dict[str, float]:
        """Success by tier."""
        values = collections.defaultdict(list)
        for task, success in self.success.items():
            values[self.tiers[task]].append(success)
        return {tier: sum(v) / len(v) for tier, v in sorted(values.items())}

    def results(self) -> list[dict[str, object]]:
        """One plain record a task, as written to disk."""
        return [
            {
                "task": tree.task.id,
                "tier": tree.task.tier,
                "success": self.success[tree.task.id],
                "nodes": len(tree.nodes),
                "turns": sum(len(node.turns) for node in tree.nodes),
                "stop": str(tree.root.stop),
                "error": tree.error,
            }
            for tree in self.trees
        ]


async def evaluate(
    config: Config,
    tools: Toolbox,
    actor: Actor,
    tasks: Sequence[Task],
    *,
    version: int = 0,
    temperature: float = 0.0,
    scored: bool = False,
    on_tree: Callable[[Tree], None] | None = None,
) -> Evaluation:
    """Plays each task once; duplicate task ids are refused.

    Args:
      config: Limits of nodes and trees.
      tools: See :class:`~sera_jax.recursion.loop.Toolbox`.
      actor: Who plays.
      tasks: What is played.
      version: Version of the weights, recorded in the trees.
      temperature: 0 for the reported numbers.
      scored: Also write and apply a rubric for each launch.
      on_tree: Called as each tree ends.

    Raises:
      ValueError: Two tasks have the same id.
    """
    ids = [task.id for task in tasks]
    if len(set(ids)) != len(ids):
        twice = next(i for i, n in collections.Counter(ids).items() if n > 1)
        raise ValueError(f"tasks: the id {twice!r} is there twice; each task is evaluated once")
    spec = dataclasses.replace(
        tree_spec(config, Stage.EXECUTION),
        temperature=temperature,
        rubrics="launches" if scored else "none",
    )
    trees = await sample_trees(tools, actor, spec, tasks, 1, version, on_tree)
    flat = [tree for (tree,) in trees]
    return Evaluation(
        success={tree.task.id: tree.success and not tree.error for tree in flat},
        tiers={tree.task.id: tree.task.tier for tree in flat},
        trees=flat,
    )
