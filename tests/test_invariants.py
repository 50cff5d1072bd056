"""The contract of the method, on trees that a trained tiny policy samples in every stage."""

import asyncio
import dataclasses

import numpy as np
import pytest

from experiments.configs import textcraft_sera
from sera_jax.build import build
from sera_jax.credit.roles import trained_mask
from sera_jax.recursion.actors import PolicyActor
from sera_jax.recursion.assignment import assign_credit, group_arrays
from sera_jax.recursion.sampling import sample_trees, tree_spec
from sera_jax.report.progress import Progress
from sera_jax.rollout.local import LocalEngine
from sera_jax.rubric.schema import rubric_hash
from sera_jax.types import Role, Stage, StopReason
from sera_jax.warm_start import warm_start

CONFIG = textcraft_sera.make("smoke")


class Recording(PolicyActor):
    """Keeps every call and its completion, in order."""

    def __init__(self, engine, seed):
        super().__init__(engine, seed)
        self.calls = []

    async def complete(self, call):
        completion = await super().complete(call)
        self.calls.append((call, completion))
        return completion


@pytest.fixture(scope="module")
def sampled(tmp_path_factory):
    """Parts, and for each stage the trees [P][K] of a warm-started policy with the calls made."""
    parts = build(CONFIG)
    params = asyncio.run(
        warm_start(CONFIG, parts, parts.init_params(0), Progress.silent(), tmp_path_factory.mktemp("w"))
    )
    result = {}
    for stage in Stage:
        engine = LocalEngine(params, parts.model, slots=64, context_length=CONFIG.rollout.context_length)
        actor = Recording(engine, seed=0)
        tasks = parts.tasks.training(0, 3)
        trees = asyncio.run(sample_trees(parts.tools, actor, tree_spec(CONFIG, stage), tasks, 4, 0))
        result[stage] = (trees, actor.calls)
    return parts, result


def every_tree(trees):
    return [tree for group in trees for tree in group]


def test_the_policy_really_launches_writes_and_judges(sampled):
    _, stages = sampled
    for stage, (trees, _) in stages.items():
        assert sum(len(tree.launches) for tree in every_tree(trees)) >= 3, stage
    execution = every_tree(stages[Stage.EXECUTION][0])
    assert any(node.score and node.score.value is not None for t in execution for node in t.nodes)
    assert any(launch.is_group for t in every_tree(stages[Stage.RUBRIC][0]) for launch in t.launches)


def test_1_stages_train_disjoint_tokens_up_to_the_launch(sampled):
    _, stages = sampled
    for trees, _ in stages.values():
        for node in (node for tree in every_tree(trees) for node in tree.nodes):
            roles = np.array(node.roles, np.uint8)
            masks = {stage: trained_mask(roles, stage) for stage in Stage}
            np.testing.assert_array_equal(masks[Stage.DELEGATION] & ~masks[Stage.EXECUTION], False)
            assert not np.any(masks[Stage.RUBRIC])  # a node's own record holds no rubric
            assert not np.any(masks[Stage.EXECUTION] & (roles == Role.CONTEXT))
    for stage, (trees, _) in stages.items():
        samples, _ = assign_credit(trees, stage, CONFIG)
        allowed = {
            Stage.EXECUTION: {Role.EXECUTE, Role.LAUNCH},
            Stage.DELEGATION: {Role.LAUNCH},
            Stage.RUBRIC: {Role.RUBRIC},
        }[stage]
        assert {Role(int(r)) for s in samples for r in s.roles[s.mask]} <= allowed


def test_2_a_rubric_is_frozen_before_its_child_and_named_by_the_score(sampled):
    parts, stages = sampled
    for stage in (Stage.EXECUTION, Stage.RUBRIC):
        trees, calls = stages[stage]
        first_token, written = {}, {}
        for number, (call, _) in enumerate(calls):
            tree, kind = call.path[:4], call.path[-1]
            if kind == "execute":
                first_token.setdefault((tree, call.path[4]), number)
            elif kind == "rubric":
                written[tree, call.path[4]] = number
                # The prompt is a function of the goal and the budget: nothing of the child is in it.
                prompt = parts.tools.tokenizer.decode(call.ids)
                assert prompt.startswith(f"rubric goal {call.writer.goal.text} ; turns 8 ;")
        for tree in every_tree(trees):
            path = (tree.version, str(stage), tree.task.id, tree.index)
            for launch in tree.launches:
                if launch.rubric is None:
                    continue
                for child in launch.children:
                    if (path, child) in first_token:
                        assert written[path, launch.id] < first_token[path, child]
                    score = tree.nodes[child].score
                    if launch.rubric.rubric is not None and score is not None:
                        assert score.rubric_hash == launch.rubric.hash == rubric_hash(launch.rubric.rubric)


def test_3_equal_rewards_are_exactly_zero(sampled):
    _, stages = sampled
    trees, _ = stages[Stage.EXECUTION]
    program = dataclasses.replace(
        CONFIG, credit=dataclasses.replace(CONFIG.credit, execution_reward="program")
    )
    for group in trees:
        flat = [
            dataclasses.replace(t, nodes=[dataclasses.replace(n, success=True) for n in t.nodes])
            for t in group
        ]
        samples, metrics = assign_credit([flat], Stage.EXECUTION, program)
        assert samples == [] and metrics["execution/tasks_all_succeeded"] == 1


def test_6_token_in_token_out(sampled):
    parts, stages = sampled
    for trees, calls in stages.values():
        nodes = {
            (tree.version, str(tree.stage), tree.task.id, tree.index, node.id): node
            for tree in every_tree(trees)
            for node in tree.nodes
        }
        previous = {}
        for call, completion in calls:
            if call.path[-1] != "execute":
                continue
            key = call.path[:5]
            if key in previous:  # each prompt begins with the last prompt and its sampled ids, verbatim
                assert call.ids[: len(previous[key])] == previous[key]
            previous[key] = call.ids + completion.ids
            node = nodes[key]
            start = len(call.ids)
            assert tuple(node.token_ids[start : start + len(completion.ids)]) == completion.ids
            assert tuple(node.logprobs[start : start + len(completion.ids)]) == completion.logprobs
    assert parts.tools.tokenizer.im_end in stages[Stage.EXECUTION][0][0][0].root.token_ids


def test_7_branches_start_alike_and_branch_0_is_the_one_that_happened(sampled):
    _, stages = sampled
    groups = [
        (tree, launch)
        for tree in every_tree(stages[Stage.RUBRIC][0])
        for launch in tree.launches
        if launch.is_group
    ]
    assert groups
    for tree, launch in groups:
        branches = [tree.nodes[i] for i in launch.children]
        assert [node.branch for node in branches] == list(range(8))
        first = branches[0].turns[0].start
        assert len({tuple(node.token_ids[:first]) for node in branches}) == 1
        assert len({tuple(node.token_ids) for node in branches}) > 1  # keys differ, so do the branches
        observation = tree.nodes[launch.parent].turns[launch.turn].observation
        said = branches[0].finish_message.split()[:1]
        if branches[0].stop == StopReason.FINISHED and said and said[0] in ("done", "fail"):
            assert f"{launch.goal.text} said {said[0]} ;" in observation
        score_B, label_B, valid_B = group_arrays(tree, launch)
        assert len(score_B) == len(label_B) == len(valid_B) == 8


def test_10_the_budget_of_worlds(sampled):
    _, stages = sampled
    for tree in every_tree(stages[Stage.RUBRIC][0]):
        groups = sum(launch.is_group for launch in tree.launches)
        assert groups <= 2 and tree.counters["worlds"] == 1 + 8 * groups
    for stage in (Stage.EXECUTION, Stage.DELEGATION):
        assert all(tree.counters["worlds"] == 1 for tree in every_tree(stages[stage][0]))


def test_the_ledger_counts_what_was_asked(sampled):
    parts, stages = sampled
    ledger = parts.tools.ledger
    calls = [call for _, calls in stages.values() for call in calls]
    for purpose in ("execute", "rubric", "score"):
        asked = [(call, out) for call, out in calls if call.path[-1] == purpose]
        assert ledger.total("policy", purpose=purpose) == len(asked)
        assert ledger.total("policy", "tokens_out", purpose) == sum(len(out.ids) for _, out in asked)
        assert ledger.total("policy", "tokens_in", purpose) == sum(len(call.ids) for call, _ in asked)
    finished = sum(
        node.stop == StopReason.FINISHED
        for trees, _ in stages.values()
        for tree in every_tree(trees)
        for node in tree.nodes
    )
    assert ledger.total("verifier") == finished
