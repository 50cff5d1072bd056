"""What a set of trees says, in two voices that are never mixed.

``env/*`` is what the environment's program says: root success and verified child success. ``judge/*``
is what the policy's own evaluator says: scores, and how often they agree with the program. When scores
rise and verified success does not, the evaluator is being flattered.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

import numpy as np

from sera_jax.types import Node, StopReason, Tree


def tree_metrics(trees: Sequence[Sequence[Tree]], environment: Any) -> dict[str, float]:
    """Metrics of trees [P][K]; a value that has no data is left out.

    ``judge/scorer_right_succeeded`` and ``judge/scorer_right_failed`` are the shares of scored children,
    by verified success, for which the scorer's gate and every mark equal the program's grade of the
    same rubric on the same evidence; they need an environment with ``grade``.
    ``judge/accuracy_succeeded`` and ``judge/accuracy_failed`` compare the score, cut at one half, with
    verified success itself, over all children with both.
    """
    flat = [tree for group in trees for tree in group]
    metrics: dict[str, float] = {"trees": len(flat), "trees_invalid": sum(bool(t.error) for t in flat)}
    valid = [tree for tree in flat if not tree.error]
    nodes = [node for tree in valid for node in tree.nodes]
    children = [node for node in nodes if node.parent is not None]
    if valid:
        metrics["env/root_success"] = float(np.mean([tree.success for tree in valid]))
        metrics["nodes_per_tree"] = len(nodes) / len(valid)
        metrics["turns_per_node"] = float(np.mean([len(node.turns) for node in nodes]))
        metrics["tokens_per_node"] = float(np.mean([len(node.token_ids) for node in nodes]))
        metrics["depth_max"] = max(node.depth for node in nodes)
        metrics["launches_per_tree"] = sum(len(tree.launches) for tree in valid) / len(valid)
    verified = [float(node.success) for node in children if node.success is not None]
    if verified:
        metrics["env/child_success"] = float(np.mean(verified))
    metrics |= _scores(children, valid, environment)
    metrics |= _counts(flat)
    return metrics


def _scores(children: Sequence[Node], trees: Sequence[Tree], environment: Any) -> dict[str, float]:
    scored = [n for n in children if n.score is not None and n.score.value is not None]
    labelled = [n for n in scored if n.success is not None]
    metrics: dict[str, float] = {"judge/scored_children": len(scored)}
    if not labelled:
        return metrics
    score = np.array([n.score.value for n in labelled])
    label = np.array([bool(n.success) for n in labelled])
    metrics["judge/score"] = float(score.mean())
    metrics["judge/score_minus_verified"] = float(score.mean() - label.mean())
    for name, chosen in (("succeeded", label), ("failed", ~label)):
        if chosen.any():
            right = (score[chosen] >= 0.5) == label[chosen]
            metrics[f"judge/accuracy_{name}"] = float(right.mean())
    if label.any() and (~label).any():
        gap = score[label][:, None] - score[~label][None, :]
        metrics["judge/score_label_auc"] = float(((gap > 0) + 0.5 * (gap == 0)).mean())
    grade = getattr(environment, "grade", None)
    if grade is None:
        return metrics
    by_label: dict[bool, list[float]] = {True: [], False: []}
    for tree in trees:
        for launch in tree.launches:
            rubric = launch.rubric.rubric if launch.rubric is not None else None
            for child in launch.children:
                node = tree.nodes[child]
                score = node.score
                if rubric is None or score is None or score.value is None or score.gated:
                    continue
                program = [grade(c.description, node.evidence) for c in rubric.criteria]
                gate = grade(rubric.gate, node.evidence)
                if None in program or gate is None or node.success is None:
                    continue
                same = tuple(program) == score.criteria and bool(gate) == score.gate
                by_label[node.success].append(float(same))
    for name, values in (("succeeded", by_label[True]), ("failed", by_label[False])):
        metrics[f"judge/scorer_checked_{name}"] = len(values)
        if values:
            metrics[f"judge/scorer_right_{name}"] = float(np.mean(values))
    return metrics


def _counts(trees: Sequence[Tree]) -> dict[str, float]:
    total: collections.Counter[str] = collections.Counter()
    for tree in trees:
        total.update(tree.counters)
    for reason in StopReason:  # always there, so that a plot of a rare one starts at 0
        total.setdefault(f"stop/{reason}", 0)
    return {f"count/{name}": float(count) for name, count in sorted(total.items())}
