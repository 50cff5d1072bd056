"""From trees to weighted samples: the bridge between records and the array functions of ``credit``.

One function a stage. Each returns the samples of one optimizer step and metrics that say what was
trained and, by cause, what was left out: nothing missing ever counts as a reward of 0.

    execution   every node of every tree; reward = root success | child score (or verified success)
    delegation  every launching turn; reward = root success x leaf coverage
    rubric      every ranked group; reward = - mean hinge of its branches' scores
"""

from __future__ import annotations

import collections
from collections.abc import Sequence

import jax
import numpy as np

from sera_jax.config import Config
from sera_jax.credit.baselines import execution_advantage
from sera_jax.credit.depth import depth_weights
from sera_jax.credit.events import delegation_advantage, leaf_coverage
from sera_jax.credit.ranking import (
    rank_disc_reward,
    ranking_diagnostics,
    ranking_reward,
    rubric_advantage,
)
from sera_jax.credit.roles import trained_mask
from sera_jax.types import Completion, Launch, Node, Role, Sample, Stage, Tree

Metrics = dict[str, float]

# Compiled once a shape; the arrays below are padded to powers of two, so there are few shapes.
_execution_advantage = jax.jit(execution_advantage, static_argnames="baseline")
_leaf_coverage = jax.jit(leaf_coverage, static_argnames="num_events")
_delegation_advantage = jax.jit(delegation_advantage)
_ranking_reward = jax.jit(ranking_reward)
_rank_disc_reward = jax.jit(rank_disc_reward)
_ranking_diagnostics = jax.jit(ranking_diagnostics)
_rubric_advantage = jax.jit(rubric_advantage, static_argnames="scope")
_depth_weights = jax.jit(depth_weights, static_argnames="num_depths")


def _capacity(size: int) -> int:
    """The next power of two."""
    return 1 << max(size - 1, 0).bit_length()


def assign_credit(
    trees: Sequence[Sequence[Tree]], stage: Stage, config: Config
) -> tuple[list[Sample], Metrics]:
    """Samples of one step from its trees [P][K], depth weights included."""
    assign = {
        Stage.EXECUTION: execution_samples,
        Stage.DELEGATION: delegation_samples,
        Stage.RUBRIC: rubric_samples,
    }[stage]
    samples, metrics = assign(trees, config)
    if config.credit.depth_weights:
        apply_depth_weights(samples)
    metrics["samples"] = len(samples)
    return samples, metrics


def apply_depth_weights(samples: Sequence[Sample]) -> None:
    """Multiplies each advantage by the weight of its depth, in place."""
    if not samples:
        return
    size = len(samples)
    pad = (0, _capacity(size) - size)
    depth_S = np.pad(np.array([sample.depth for sample in samples], np.int32), pad)
    starts_S = np.pad(np.array([sample.starts_trajectory for sample in samples]), pad)
    # A depth limit of 8 is the most that a configuration allows.
    weight_S = _depth_weights(depth_S, starts_S, num_depths=10, valid_S=np.arange(len(depth_S)) < size)
    weight_S = np.asarray(weight_S)[:size]
    for sample, weight in zip(samples, weight_S, strict=True):
        sample.advantage = (sample.advantage * weight).astype(np.float32)


# --- execution ---------------------------------------------------------------------------------


def node_reward(node: Node, config: Config) -> float | None:
    """A node's execution reward, None when it has none and must leave the gradient.

    Root: verified success. Child: its score under the frozen rubric, or with
    ``credit.execution_reward="program"`` its own verified success.
    """
    if node.parent is None or config.credit.execution_reward == "program":
        return None if node.success is None else float(node.success)
    return None if node.score is None else node.score.value


def execution_samples(trees: Sequence[Sequence[Tree]], config: Config) -> tuple[list[Sample], Metrics]:
    """All nodes with a reward; a task whose advantages are all zero is skipped and counted."""
    samples: list[Sample] = []
    counts: collections.Counter[str] = collections.Counter()
    for group in trees:
        num_nodes = max(len(tree.nodes) for tree in group)
        shape = (len(group), num_nodes)
        reward_KxN, valid_KxN = np.zeros(shape, np.float32), np.zeros(shape, bool)
        depth_KxN = np.zeros(shape, np.int32)
        root_K = np.array([float(tree.success) for tree in group], np.float32)
        tree_valid_K = np.array([not tree.error for tree in group])
        for k, tree in enumerate(group):
            for n, node in enumerate(tree.nodes):
                reward, depth_KxN[k, n] = node_reward(node, config), node.depth
                if reward is None:
                    counts["nodes_without_reward"] += 1
                elif tree_valid_K[k]:
                    reward_KxN[k, n], valid_KxN[k, n] = reward, True
        # Padded to powers of two: the number of nodes varies, compiled shapes should not.
        pad = ((0, 0), (0, _capacity(num_nodes) - num_nodes))
        advantage_KxN = np.asarray(
            _execution_advantage(
                np.pad(reward_KxN, pad),
                root_K,
                np.pad(valid_KxN, pad),
                tree_valid_K,
                np.pad(depth_KxN, pad),
                baseline=config.credit.execution_baseline,
            )
        )[:, :num_nodes]
        counts["invalid_trees"] += int((~tree_valid_K).sum())
        if not np.any(advantage_KxN[valid_KxN]):
            counts[_homogeneous(root_K[tree_valid_K])] += 1
            continue
        for k, n in np.argwhere(valid_KxN):
            node = group[k].nodes[n]
            samples.append(
                _node_sample(
                    node,
                    trained_mask(np.array(node.roles, np.uint8), Stage.EXECUTION),
                    advantage_KxN[k, n],
                    depth=node.depth,
                    tree=group[k],
                    config=config,
                )
            )
    metrics = {f"execution/{name}": float(count) for name, count in counts.items()}
    return [s for s in samples if s.mask.any()], metrics


def _homogeneous(root: np.ndarray) -> str:
    if root.size < 2:
        return "tasks_single_tree"
    if root.all():
        return "tasks_all_succeeded"
    return "tasks_all_failed" if not root.any() else "tasks_tied"


# --- delegation --------------------------------------------------------------------------------


def delegation_samples(trees: Sequence[Sequence[Tree]], config: Config) -> tuple[list[Sample], Metrics]:
    """One sample for each turn that launched, or tried to (reward 0)."""
    samples: list[Sample] = []
    counts: collections.Counter[str] = collections.Counter()
    for group in trees:
        events = [_events(tree) for tree in group]
        width = max(map(len, events), default=0)
        counts["events"] += sum(map(len, events))
        counts["events_invalid"] += sum(
            not any(tree.launches[i].children for i in node.turns[t].launches)
            for tree, tree_events in zip(group, events, strict=True)
            for node, t in tree_events
        )
        if width == 0:
            counts["tasks_without_events"] += 1
            continue
        width = _capacity(width)
        reward_KxE = np.zeros((len(group), width), np.float32)
        valid_KxE = np.zeros((len(group), width), bool)
        tree_valid_K = np.array([not tree.error for tree in group])
        for k, (tree, tree_events) in enumerate(zip(group, events, strict=True)):
            if not tree_valid_K[k]:
                continue
            valid_KxE[k, : len(tree_events)] = True
            reward_KxE[k, : len(tree_events)] = float(tree.success) * event_coverage(tree, tree_events)
        advantage_KxE = np.asarray(_delegation_advantage(reward_KxE, valid_KxE, tree_valid_K))
        if not np.any(advantage_KxE[valid_KxE]):
            counts["tasks_tied"] += 1
            continue
        for k, tree_events in enumerate(events):
            seen: set[int] = set()
            for e, (node, t) in enumerate(tree_events):
                if not valid_KxE[k, e]:
                    continue
                turn = node.turns[t]
                launch_T = trained_mask(np.array(node.roles[: turn.end], np.uint8), Stage.DELEGATION)
                launch_T[: turn.start] = False
                samples.append(
                    _node_sample(
                        node,
                        launch_T,
                        advantage_KxE[k, e],
                        depth=node.depth,
                        tree=group[k],
                        config=config,
                        starts=node.id not in seen,
                    )
                )
                seen.add(node.id)
    metrics = {f"delegation/{name}": float(count) for name, count in counts.items()}
    return [s for s in samples if s.mask.any()], metrics


def _events(tree: Tree) -> list[tuple[Node, int]]:
    """The turns of a tree that wrote a launch, in node order."""
    return [(node, t.index) for node in tree.nodes for t in node.turns if t.launch_spans]


def event_coverage(tree: Tree, events: Sequence[tuple[Node, int]]) -> np.ndarray:
    """Share of the tree's leaves below each event's children, float32 [E]."""
    number = {(node.id, turn): e for e, (node, turn) in enumerate(events)}
    size = _capacity(len(tree.nodes))
    parent_N, event_N = np.full(size, -1, np.int32), np.full(size, -1, np.int32)
    valid_N = np.arange(size) < len(tree.nodes)
    for node in tree.nodes[1:]:
        parent_N[node.id] = node.parent
        launch = tree.launches[node.launch]
        event_N[node.id] = number.get((launch.parent, launch.turn), -1)
    coverage = _leaf_coverage(parent_N, event_N, valid_N, num_events=_capacity(len(events)))
    return np.asarray(coverage)[: len(events)]


# --- rubric ------------------------------------------------------------------------------------


def rubric_samples(trees: Sequence[Sequence[Tree]], config: Config) -> tuple[list[Sample], Metrics]:
    """One sample for each group whose rubric could be ranked."""
    counts: collections.Counter[str] = collections.Counter()
    groups = [
        (p, tree, launch)
        for p, group in enumerate(trees)
        for tree in group
        if not tree.error
        for launch in tree.launches
        if launch.is_group
    ]
    rewards, tasks, ranked, diagnostics = [], [], [], []
    for p, tree, launch in groups:
        arrays = group_arrays(tree, launch)
        values = _ranking_diagnostics(*arrays, margin=config.counterfactual.margin)
        if config.counterfactual.objective == "rank":
            reward, valid = _ranking_reward(*arrays, margin=config.counterfactual.margin)
        else:
            reward, valid = _rank_disc_reward(*arrays, margin=config.counterfactual.margin)
        if not valid:
            counts[_why_unranked(arrays)] += 1
            continue
        rewards.append(float(reward))
        tasks.append(p)
        ranked.append((tree, launch))
        diagnostics.append({name: float(value) for name, value in values._asdict().items()})
    metrics = {f"rubric/{name}": float(count) for name, count in counts.items()}
    metrics["rubric/groups"] = len(groups)
    metrics["rubric/groups_ranked"] = len(ranked)
    if not ranked:
        return [], metrics
    for name in diagnostics[0]:
        metrics[f"rubric/{name}"] = float(np.mean([d[name] for d in diagnostics]))
    metrics["rubric/reward"] = float(np.mean(rewards))
    pad = (0, _capacity(len(rewards)) - len(rewards))
    advantage_G = np.asarray(
        _rubric_advantage(
            np.pad(np.array(rewards, np.float32), pad),
            np.pad(np.ones(len(rewards), bool), pad),
            np.pad(np.array(tasks, np.int32), pad),
            scope=config.credit.rubric_baseline,
        )
    )[: len(rewards)]
    samples = [
        _rubric_sample(tree, launch, advantage, config)
        for (tree, launch), advantage in zip(ranked, advantage_G, strict=True)
    ]
    return samples, metrics


def group_arrays(tree: Tree, launch: Launch) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Scores [B], labels [B] and validity [B] of a group; a branch without either is not valid."""
    nodes = [tree.nodes[i] for i in launch.children]
    scores = [None if node.score is None else node.score.value for node in nodes]
    valid_B = np.array(
        [s is not None and node.success is not None for s, node in zip(scores, nodes, strict=True)]
    )
    score_B = np.array([0.0 if s is None else s for s in scores], np.float32)
    label_B = np.array([bool(node.success) for node in nodes])
    return score_B, label_B, valid_B


def _why_unranked(arrays: tuple[np.ndarray, np.ndarray, np.ndarray]) -> str:
    _, label_B, valid_B = arrays
    labels = label_B[valid_B]
    if labels.size < 2:
        return "groups_too_few_scores"
    return "groups_all_succeeded" if labels.all() else "groups_all_failed"


def _rubric_sample(tree: Tree, launch: Launch, advantage: float, config: Config) -> Sample:
    record = launch.rubric
    assert record is not None and record.completion is not None
    return completion_sample(
        record.prompt_ids,
        record.completion,
        Role.RUBRIC,
        advantage,
        depth=tree.nodes[launch.parent].depth + 1,
        temperature=config.rubric.writer_temperature,
        source=(tree.index, launch.id),
    )


# --- samples -----------------------------------------------------------------------------------


def completion_sample(
    prompt_ids: Sequence[int],
    completion: Completion,
    role: Role,
    advantage: float,
    *,
    depth: int = 0,
    temperature: float = 1.0,
    source: tuple[int, int] = (-1, -1),
) -> Sample:
    """A prompt and one completion of it, all of whose tokens are trained."""
    prompt, size = len(prompt_ids), len(prompt_ids) + len(completion.ids)
    roles = np.full(size, int(role), np.uint8)
    roles[:prompt] = int(Role.CONTEXT)
    mask = roles == int(role)
    logprobs = np.zeros(size, np.float32)
    logprobs[prompt:] = completion.logprobs
    return Sample(
        token_ids=np.array((*prompt_ids, *completion.ids), np.int32),
        roles=roles,
        mask=mask,
        advantage=np.where(mask, advantage, 0).astype(np.float32),
        logprobs=logprobs,
        depth=depth,
        temperature=temperature,
        source=source,
    )


def _node_sample(
    node: Node,
    mask: np.ndarray,
    advantage: float,
    *,
    depth: int,
    tree: Tree,
    config: Config,
    starts: bool = True,
) -> Sample:
    """The first ``len(mask)`` tokens of a node's record."""
    size = len(mask)
    return Sample(
        token_ids=np.array(node.token_ids[:size], np.int32),
        roles=np.array(node.roles[:size], np.uint8),
        mask=mask,
        advantage=np.where(mask, advantage, 0).astype(np.float32),
        logprobs=np.array(node.logprobs[:size], np.float32),
        depth=depth,
        starts_trajectory=starts,
        temperature=config.rollout.temperature,
        source=(tree.index, node.id),
    )
