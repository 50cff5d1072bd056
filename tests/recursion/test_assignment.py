"""From trees to samples: what each stage trains, exact zeros, and what is left out by cause."""

import dataclasses

import numpy as np
import pytest

from experiments.configs import textcraft_sera
from sera_jax.recursion import assignment
from sera_jax.types import Role, ScoreRecord, Stage
from tests.support import trees as T

CONFIG = dataclasses.replace(
    textcraft_sera.make("smoke"),
    credit=dataclasses.replace(textcraft_sera.make("smoke").credit, execution_baseline="root"),
)


def with_credit(**changes):
    return dataclasses.replace(CONFIG, credit=dataclasses.replace(CONFIG.credit, **changes))


@pytest.fixture(scope="module")
def imperfect():
    """K = 8 trees of one task by an agent that errs, one list a stage."""
    from envs.textcraft.oracle import Mistakes

    def group(stage):
        tools = T.toolbox()
        return [
            T.play(
                tools,
                T.oracle_actor(
                    tools,
                    seed=k,
                    good=0.5,
                    launch_probability=0.9,
                    mistakes=Mistakes(under_count=0.15, claim=0.5, wrong_amount=0.05, give_up=0.02),
                ),
                T.spec(stage),
                index=k,
            )
            for k in range(8)
        ]

    return {stage: group(stage) for stage in Stage}


def sampled(stage):
    """Trees of a random tiny policy: short, mostly failing, but real."""
    tools = T.toolbox()
    cfg, params = T.tiny_policy(tools)
    return [T.play(tools, T.policy_actor(cfg, params), T.spec(stage), index=k) for k in range(2)]


def all_roles(samples):
    return {Role(int(r)) for s in samples for r in s.roles[s.mask]}


def test_stages_train_disjoint_tokens_up_to_the_launch(imperfect):
    trained = {}
    for stage in Stage:
        samples, _ = assignment.assign_credit([imperfect[stage]], stage, CONFIG)
        assert samples, stage
        trained[stage] = all_roles(samples)
        for sample in samples:
            assert sample.mask.any() and not sample.mask[0]
            assert not np.any(sample.advantage[~sample.mask])
            context = (sample.roles == Role.CONTEXT) | (sample.roles == Role.SCORE)
            assert not np.any(sample.mask & context)
    assert trained[Stage.EXECUTION] == {Role.EXECUTE, Role.LAUNCH}
    assert trained[Stage.DELEGATION] == {Role.LAUNCH}
    assert trained[Stage.RUBRIC] == {Role.RUBRIC}


@pytest.mark.parametrize("stage", list(Stage))
def test_trees_of_a_random_policy_obey_the_same_masks(stage):
    group = sampled(stage)
    for tree in group:
        for node in tree.nodes:
            mask = assignment.trained_mask(np.array(node.roles, np.uint8), stage)
            logprobs = np.array(node.logprobs)
            # Every trained token was sampled: it has a log-prob; every context token has 0.
            assert np.all(logprobs[np.array(node.roles) == Role.CONTEXT] == 0)
            if stage == Stage.EXECUTION:
                assert np.all(logprobs[mask] < 0)
    samples, metrics = assignment.assign_credit([group], stage, CONFIG)
    assert metrics["samples"] == len(samples)


def relabel(trees, roots, scores=None):
    """Copies with root successes, and one score for all children."""
    result = []
    for tree, root in zip(trees, roots, strict=True):
        nodes = [dataclasses.replace(node) for node in tree.nodes]
        nodes[0].success = bool(root)
        for node in nodes[1:]:
            node.score = ScoreRecord("h", scores, gate=True)
        result.append(dataclasses.replace(tree, nodes=nodes))
    return result


def test_identical_rewards_are_exactly_zero_and_the_task_is_skipped(imperfect):
    trees = imperfect[Stage.EXECUTION]
    # Children score 1.0 as all roots succeed: every difference is 1 - 1.
    same = relabel(trees, [1] * 8, 1.0)
    samples, metrics = assignment.assign_credit([same], Stage.EXECUTION, CONFIG)
    assert samples == [] and metrics["execution/tasks_all_succeeded"] == 1
    # Per depth, 0.2 everywhere: exactly 0 although 0.2 is not exact in float32.
    tied = relabel(trees, [0] * 8, 0.2)
    samples, metrics = assignment.assign_credit(
        [tied], Stage.EXECUTION, with_credit(execution_baseline="per_depth")
    )
    assert samples == [] and metrics["execution/tasks_all_failed"] == 1


def test_execution_advantages_are_the_published_ones(imperfect):
    launching = [tree for tree in imperfect[Stage.EXECUTION] if len(tree.nodes) > 1][:3]
    trees = [dataclasses.replace(t, index=k) for k, t in enumerate(relabel(launching, [1, 0, 0], 0.8))]
    config = with_credit(depth_weights=False)
    samples, _ = assignment.assign_credit([trees], Stage.EXECUTION, config)
    by_source = {s.source: s.advantage[s.mask] for s in samples}
    # Root of tree 0: 1 - (0 + 0)/2 = 1. Roots of trees 1 and 2: 0 - (1 + 0)/2 = -1/2.
    np.testing.assert_allclose(by_source[0, 0], 1.0)
    np.testing.assert_allclose(by_source[1, 0], -0.5)
    # Children of tree 0: 0.8 - 0 = 0.8; of tree 1: 0.8 - 1/2 = 0.3.
    children = {t: [a for (k, n), a in by_source.items() if k == t and n] for t in (0, 1)}
    assert children[0] and children[1]
    np.testing.assert_allclose(np.concatenate(children[0]), 0.8, rtol=1e-6)
    np.testing.assert_allclose(np.concatenate(children[1]), 0.3, rtol=1e-6)


def test_a_failed_score_leaves_the_gradient_and_is_counted(imperfect):
    trees = relabel(imperfect[Stage.EXECUTION][:2], [1, 0], None)
    samples, metrics = assignment.assign_credit([trees], Stage.EXECUTION, CONFIG)
    assert {node for _, node in (s.source for s in samples)} == {0}
    children = sum(len(tree.nodes) - 1 for tree in trees)
    assert metrics["execution/nodes_without_reward"] == children > 0


def test_one_valid_tree_has_no_signal_at_its_root(imperfect):
    trees = relabel(imperfect[Stage.EXECUTION][:2], [1, 1], 1.0)
    trees[1] = dataclasses.replace(trees[1], error="deadline: ")
    samples, metrics = assignment.assign_credit([trees], Stage.EXECUTION, CONFIG)
    assert samples == [] and metrics["execution/tasks_single_tree"] == 1
    assert metrics["execution/invalid_trees"] == 1


def test_a_program_reward_needs_no_score(imperfect):
    trees = imperfect[Stage.EXECUTION]
    config = with_credit(execution_reward="program")
    child = next(node for tree in trees for node in tree.nodes[1:])
    assert assignment.node_reward(child, config) == float(child.success)


def test_leaf_coverage_of_a_tree():
    # The root launches A and B in one turn; A launches C and D in one. Leaves: B, C, D.
    tools = T.toolbox()

    def write(call):
        if call.purpose == "execute" and call.view.depth == 0 and call.view.turn == 0:
            return "launch 1 a2a , 1 a1b ."
        if call.purpose == "execute" and call.view.goal.text == "1 a2a" and call.view.turn == 0:
            return "launch 1 a1b , 1 a1a ."
        return "finish done ."

    tree = T.play(tools, T.scripted_actor(tools, write), T.spec(Stage.DELEGATION))
    events = assignment._events(tree)
    assert [(node.id, turn) for node, turn in events] == [(0, 0), (1, 0)]
    np.testing.assert_allclose(assignment.event_coverage(tree, events), [1.0, 2 / 3], rtol=1e-6)
    # R = 1: event rewards 1 and 2/3, mean 5/6; the other trees have means 0 and 0 (failed roots).
    tree.nodes[0].success = True
    failed = [
        dataclasses.replace(tree, index=k, nodes=[dataclasses.replace(n) for n in tree.nodes])
        for k in (1, 2)
    ]
    for other in failed:
        other.nodes[0].success = False
    samples, metrics = assignment.assign_credit(
        [[tree, *failed]], Stage.DELEGATION, with_credit(depth_weights=False)
    )
    assert metrics["delegation/events"] == 6 and len(samples) == 6
    got = {s.source: float(s.advantage[s.mask][0]) for s in samples}
    assert got[0, 0] == pytest.approx(1.0) and got[0, 1] == pytest.approx(2 / 3)
    # Tree 1's events: 0 - (5/6 + 0)/2 = -0.4167.
    assert got[1, 0] == pytest.approx(-5 / 12) and got[1, 1] == pytest.approx(-5 / 12)
    # Only the launch itself is trained.
    for sample in samples:
        text = tools.tokenizer.decode(sample.token_ids[sample.mask])
        assert text.startswith("launch") and text.endswith(".")


def test_an_attempt_without_children_is_an_event_of_reward_zero():
    tools = T.toolbox()
    write = lambda call: "launch 0 a1a ." if call.view.turn == 0 else "finish done ."
    tree = T.play(tools, T.scripted_actor(tools, write), T.spec(Stage.DELEGATION))
    tree.nodes[0].success = True
    _, metrics = assignment.assign_credit([[tree, tree]], Stage.DELEGATION, CONFIG)
    assert metrics["delegation/events_invalid"] == 2 and metrics["delegation/tasks_tied"] == 1


def test_rubric_samples_are_ranked_groups_and_homogeneous_ones_are_counted(imperfect):
    trees = imperfect[Stage.RUBRIC]
    samples, metrics = assignment.assign_credit([trees], Stage.RUBRIC, with_credit(depth_weights=False))
    groups = [(tree, launch) for tree in trees for launch in tree.launches if launch.is_group]
    assert metrics["rubric/groups"] == len(groups)
    skipped = sum(
        v for k, v in metrics.items() if k.startswith("rubric/groups_") and k != "rubric/groups_ranked"
    )
    assert metrics["rubric/groups_ranked"] + skipped == len(groups)
    assert len(samples) == metrics["rubric/groups_ranked"] > 1
    # Leave-one-out advantages of a batch sum to 0 up to rounding.
    assert sum(float(s.advantage[s.mask][0]) for s in samples) == pytest.approx(0, abs=1e-5)
    for sample, (tree, launch) in zip(
        samples,
        [(t, x) for t, x in groups if len(set(assignment.group_arrays(t, x)[1].tolist())) == 2],
        strict=True,
    ):
        assert sample.source == (tree.index, launch.id)
        text = T.toolbox().tokenizer.decode(sample.token_ids[sample.mask], skip_special=True)
        assert text == launch.rubric.text


def test_depth_weights_multiply_advantages():
    # n_0 = 2, t_0 = 2, n_1 = 4, t_1 = 4: n = 6, sum = 1 + 1, w_0 = 6/2/2 = 1.5, w_1 = 6/2/4 = .75.
    from sera_jax.types import Completion

    sample = lambda depth: assignment.completion_sample(
        (1, 2), Completion((3,), (-1.0,), "stop", 0), Role.EXECUTE, 1.0, depth=depth
    )
    samples = [sample(0), sample(0), *(sample(1) for _ in range(4))]
    assignment.apply_depth_weights(samples)
    assert [float(s.advantage[2]) for s in samples] == [1.5, 1.5, 0.75, 0.75, 0.75, 0.75]
    assert all(np.all(s.advantage[:2] == 0) for s in samples)
