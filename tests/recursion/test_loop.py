"""The agent loop on scripted trees: what each stage makes, budgets, commits, failures."""

import asyncio
import dataclasses

import numpy as np
import pytest

from envs.base import LaunchRequest, TurnOutcome
from sera_jax.recursion.counterfactual import ForkBudget
from sera_jax.recursion.loop import TreeRunner
from sera_jax.recursion.sampling import sample_trees
from sera_jax.rubric.schema import rubric_hash
from sera_jax.types import Failure, Purpose, Role, Stage, StopReason
from tests.support import trees as T


def scripted(lines: dict[tuple[int, int], str], default: str = "finish done ."):
    """Replies by (depth, turn); rubrics and scores are fixed good ones."""

    def write(call):
        if call.purpose == Purpose.EXECUTE:
            return lines.get((call.view.depth, call.view.turn), default)
        if call.purpose == Purpose.RUBRIC:
            (item,) = call.writer.goal.targets
            return f"have 1 {item} w 6 ; turns 4 w 4 ; gate have 1 {item} ."
        return "y y gate y ."

    return write


def test_a_scripted_tree_solves_a_task_by_launching():
    tools = T.toolbox()
    tree = T.play(tools, T.oracle_actor(tools, launch_probability=1.0), T.spec())
    assert tree.success and not tree.error
    assert len(tree.launches) >= 2 and max(node.depth for node in tree.nodes) >= 1
    assert all(node.stop == StopReason.FINISHED for node in tree.nodes)


def test_tokens_are_append_only_and_roles_mark_what_was_written():
    tools = T.toolbox()
    tree = T.play(tools, T.oracle_actor(tools, launch_probability=1.0), T.spec())
    for node in tree.nodes:
        assert len(node.token_ids) == len(node.roles) == len(node.logprobs)
        covered = np.zeros(len(node.token_ids), bool)
        for turn in node.turns:
            covered[turn.start : turn.end] = True
            output = node.token_ids[turn.start : turn.end]
            assert tools.renderer.reply_text(output) == turn.reply
            for low, high in turn.launch_spans:
                assert turn.start <= low < high <= turn.end
                assert tools.tokenizer.decode(node.token_ids[low:high]).startswith("launch")
        roles = np.array(node.roles)
        written = (roles == Role.EXECUTE) | (roles == Role.LAUNCH)
        np.testing.assert_array_equal(written, covered)


def test_the_rubric_is_frozen_before_the_first_token_and_named_by_the_score():
    tools, order = T.toolbox(), []
    oracle = T.oracle_actor(tools, launch_probability=1.0)

    class Watching:
        context_length = oracle.context_length

        async def complete(self, call):
            # A writer knows the launch, never what came of it: its context is built before the child.
            goal = call.writer.goal.text if call.writer else call.view.goal.text if call.view else None
            order.append((call.purpose, goal))
            return await oracle.complete(call)

        async def end_session(self, session):
            pass

    tree = T.play(tools, Watching(), T.spec())
    for launch in tree.launches:
        written = order.index((Purpose.RUBRIC, launch.goal.text))
        first_token = order.index((Purpose.EXECUTE, launch.goal.text))
        assert written < first_token
        assert launch.rubric.hash == rubric_hash(launch.rubric.rubric)
        for child in launch.children:
            assert tree.nodes[child].score.rubric_hash == launch.rubric.hash


def test_a_child_that_did_not_finish_scores_zero_without_a_scorer_call():
    tools, asked = T.toolbox(), []

    def write(call):
        if call.purpose == Purpose.SCORE:
            asked.append(call)
        # The child asks for recipes until its turns are spent; never the same twice in a row.
        child = {(1, t): f"info a1{'abcde'[t % 5]} ." for t in range(8)}
        return scripted({(0, 0): "launch 1 a1a .", **child})(call)

    tree = T.play(tools, T.scripted_actor(tools, write), T.spec())
    child = tree.nodes[1]
    assert child.stop == StopReason.TURNS and child.success is False
    assert child.score.value == 0.0 and child.score.gated and not asked
    assert child.score.rubric_hash == tree.launches[0].rubric.hash


def test_the_budget_goes_1_9_17():
    budget = ForkBudget(branches=8, limit=16)
    seen = [budget.created]
    while budget.reserve():
        seen.append(budget.created)
    assert seen == [1, 9, 17]
    budget.release()
    assert budget.created == 9 and budget.reserve()
    assert not ForkBudget(branches=0, limit=16).reserve()


def test_rubric_stage_makes_two_groups_and_then_ordinary_launches():
    tools = T.toolbox()
    root = {(0, t): f"launch 1 a1{x} ." for t, x in enumerate("abc")}
    tree = T.play(tools, T.scripted_actor(tools, scripted(root)), T.spec(Stage.RUBRIC))
    assert [len(launch.children) for launch in tree.launches] == [8, 8, 1]
    assert [launch.is_group for launch in tree.launches] == [True, True, False]
    assert tree.counters["worlds"] == 17
    # The third launch has no group, so nothing to rank and no rubric.
    assert tree.launches[2].rubric is None
    assert all(tree.nodes[i].score is not None for i in tree.launches[0].children)


def test_branches_do_not_touch_each_other_and_branch_0_is_committed():
    tools = T.toolbox()
    recipe = T.WORLD.recipes["a1a"]
    ((base, needed),) = recipe.ingredients.items()

    def write(call):
        if call.purpose == Purpose.EXECUTE and call.view.depth == 1 and call.view.turn == 0:
            # Branch b is node b + 1; odd branches craft, even ones (0 among them) craft twice as much.
            branch = call.path[4] - 1
            times = 1 if branch % 2 else 2
            return f"craft {recipe.yields * times} a1a : {needed * times} {base} ."
        if call.purpose == Purpose.EXECUTE and call.view.depth == 0 and call.view.turn == 1:
            return "have ."
        return scripted({(0, 0): "launch 1 a1a ."})(call)

    task = T.toy_task()
    task = dataclasses.replace(task, data=dataclasses.replace(task.data, inventory={base: 50}))
    tree = T.play(tools, T.scripted_actor(tools, write), T.spec(Stage.RUBRIC), task)
    branches = [tree.nodes[i] for i in tree.launches[0].children]
    made = [int(node.evidence.split()[1]) for node in branches]  # net N a1a ; ...
    assert made == [recipe.yields * (1 if b % 2 else 2) for b in range(8)]
    # The parent goes on in branch 0's world: 50 base items less two executions.
    assert f"have {50 - 2 * needed} {base} {2 * recipe.yields} a1a ;" in tree.root.turns[1].observation


def test_sequential_launches_start_from_the_last_commit():
    tools = T.toolbox()
    held = []

    def write(call):
        if call.purpose == Purpose.EXECUTE and call.view.depth == 1 and call.view.turn == 0:
            held.append(T.WORLD.counts(call.world.state.inventory))
            recipe = T.WORLD.recipes["a1a"]
            ((base, needed),) = recipe.ingredients.items()
            return f"craft {recipe.yields} a1a : {needed} {base} ."
        return scripted({(0, 0): "launch 1 a1a , 1 a1a ."})(call)

    task = T.toy_task()
    ((base, _),) = T.WORLD.recipes["a1a"].ingredients.items()
    task = dataclasses.replace(task, data=dataclasses.replace(task.data, inventory={base: 50}))
    tree = T.play(tools, T.scripted_actor(tools, write), T.spec(Stage.RUBRIC), task)
    assert len(tree.launches) == 2 and len(held) == 16
    yields = T.WORLD.recipes["a1a"].yields
    assert all(h.get("a1a", 0) == 0 for h in held[:8])
    assert all(h["a1a"] == yields for h in held[8:])


def test_depth_limit_is_refused_with_a_text():
    tools = T.toolbox()
    lines = {(depth, 0): "launch 1 a1a ." for depth in range(4)}
    tree = T.play(tools, T.scripted_actor(tools, scripted(lines)), T.spec(Stage.DELEGATION))
    assert [node.depth for node in tree.nodes] == [0, 1, 2]
    deepest = tree.nodes[2].turns[0]
    assert deepest.outcome == "launch_depth" and deepest.observation == "err depth ;"
    assert deepest.launch_spans and not deepest.launches  # an attempt, and no child


def test_loop_guard_and_context_end_a_node():
    tools = T.toolbox()
    tree = T.play(tools, T.scripted_actor(tools, scripted({}, "have .")), T.spec())
    assert tree.root.stop == StopReason.LOOP and len(tree.root.turns) == 4
    long = T.spec(max_turns=100)
    lines = {(0, t): f"info a{1 + t % 3}{'abcde'[t % 5]} ." for t in range(100)}
    tree = T.play(tools, T.scripted_actor(tools, scripted(lines)), long)
    assert tree.root.stop == StopReason.CONTEXT and not tree.success


def test_a_rubric_that_cannot_be_read_is_counted_and_never_a_zero():
    tools = T.toolbox()

    def write(call):
        if call.purpose == Purpose.RUBRIC:
            return "have a1a ."
        return scripted({(0, 0): "launch 1 a1a ."})(call)

    tree = T.play(tools, T.scripted_actor(tools, write), T.spec())
    assert tree.launches[0].rubric.failure == Failure.RUBRIC_PARSE
    assert tree.nodes[1].score.value is None and tree.nodes[1].score.failure == Failure.NO_RUBRIC
    assert tree.counters["rubric_failed/rubric_parse"] == 1
    # In the rubric stage the launch runs once, and its budget comes back.
    tree = T.play(tools, T.scripted_actor(tools, write), T.spec(Stage.RUBRIC))
    assert len(tree.launches[0].children) == 1 and tree.counters["worlds"] == 1


def test_a_score_that_cannot_be_read_or_ended_is_counted_and_never_a_zero():
    tools = T.toolbox()
    for text, failure in (("y gate y .", Failure.SCORE_PARSE), ("y " * 30, Failure.TRUNCATED)):

        def write(call, text=text):
            if call.purpose == Purpose.SCORE:
                return text
            return scripted({(0, 0): "launch 1 a1a ."})(call)

        tree = T.play(tools, T.scripted_actor(tools, write), T.spec())
        assert tree.nodes[1].score.value is None and tree.nodes[1].score.failure == failure


def test_a_score_prompt_that_does_not_fit_is_counted_by_its_cause():
    tools = T.toolbox()

    def write(call):
        if call.purpose == Purpose.RUBRIC:
            # 5 x 16 + 3 x 18 words of criteria, 8 separators, 4 words of gate: 146 and an end token fit
            # behind a writer's prompt of 9; with 14 words of evidence they are more than the 160 there are.
            criteria = ["made a1a " * n + "w 1" for n in [7] * 5 + [8] * 3]
            return " ; ".join(criteria) + " ; gate made a1a ."
        return scripted({(0, 0): "launch 1 a1a ."})(call)

    tree = T.play(tools, T.scripted_actor(tools, write), T.spec(writer_tokens=150))
    assert tree.launches[0].rubric.failure is None
    score = tree.nodes[1].score
    assert score.value is None and score.failure == Failure.CONTEXT
    assert score.text.startswith("PromptTooLongError: a score prompt of ")


def test_an_engine_fault_ends_the_node_and_keeps_the_tree():
    tools = T.toolbox()
    oracle = T.scripted_actor(tools, scripted({(0, 0): "launch 1 a1a , 1 a1b ."}))

    class Faulty:
        context_length = oracle.context_length

        async def complete(self, call):
            if call.purpose == Purpose.EXECUTE and call.view.goal.text == "1 a1a":
                raise ConnectionError("the server went away")
            return await oracle.complete(call)

        async def end_session(self, session):
            pass

    tree = T.play(tools, Faulty(), T.spec())
    hurt, well = tree.nodes[1], tree.nodes[2]
    assert hurt.stop == StopReason.ERROR and "the server went away" in hurt.error
    assert hurt.success is None and hurt.score.value is None
    assert well.stop == StopReason.FINISHED and well.score.value is not None
    assert tree.root.stop == StopReason.FINISHED and not tree.error
    assert "stop error" in tree.root.turns[0].observation


def test_a_deadline_ends_a_tree_that_never_finishes():
    tools = T.toolbox()

    class Hanging:
        context_length = T.CONTEXT

        async def complete(self, call):
            await asyncio.sleep(60)

        async def end_session(self, session):
            pass

    tree = T.play(tools, Hanging(), T.spec(deadline_seconds=0.05))
    assert tree.root.stop == StopReason.DEADLINE and tree.error.startswith("deadline")


def test_a_deadline_while_scoring_is_counted_and_never_a_zero():
    tools = T.toolbox()
    child = {(1, t): f"info a1{'abcde'[t % 5]} ." for t in range(8)}
    # Node 1 finishes and waits for its score, node 2 runs out of turns.
    play = scripted({(0, 0): "launch 1 a1a , 1 a1b ."})
    base = T.scripted_actor(tools, lambda c: child[1, c.view.turn] if _is(c, "1 a1b") else play(c))

    class SlowScorer:
        context_length = T.CONTEXT

        async def complete(self, call):
            if call.purpose == Purpose.SCORE:
                await asyncio.sleep(60)
            return await base.complete(call)

        async def end_session(self, session):
            pass

    tree = T.play(tools, SlowScorer(), T.spec(deadline_seconds=0.5))
    waiting, unfinished = tree.nodes[1].score, tree.nodes[2].score
    assert not tree.error and waiting.value is None and waiting.failure == Failure.REQUEST
    assert unfinished.value == 0.0 and unfinished.gated
    assert tree.counters["score_failed/request"] == 1


def _is(call, goal):
    return call.purpose == Purpose.EXECUTE and call.view.goal.text == goal


@pytest.mark.parametrize("method", ["launch_spans", "verify", "evidence", "snapshot"])
def test_a_fault_of_the_environment_costs_the_tree_and_not_the_run(method, monkeypatch):
    tools = T.toolbox()

    def broken(*_):
        raise KeyError("a bug")

    monkeypatch.setattr(tools.environment, method, broken)
    tree = T.play(tools, T.scripted_actor(tools, scripted({(0, 0): "launch 1 a1a ."})), T.spec())
    assert tree.error == "fault: KeyError: 'a bug'" and not tree.success
    assert tree.counters["stop/error"] >= 1


def test_a_launch_of_nothing_goes_on_at_once(monkeypatch):
    tools = T.toolbox()

    def turn(view, world, reply):
        reports = yield LaunchRequest(())
        return TurnOutcome("", "finish", finished=True, message=f"{len(reports)} children")

    monkeypatch.setattr(tools.environment, "turn", turn)
    tree = T.play(tools, T.scripted_actor(tools, scripted({})), T.spec())
    assert tree.root.finish_message == "0 children" and not tree.launches


def test_a_completion_of_other_weights_is_refused():
    tools = T.toolbox()
    cfg, params = T.tiny_policy(tools)
    actor = T.policy_actor(cfg, params)  # serves version 0
    tree = asyncio.run(TreeRunner(tools, actor, T.spec()).run(T.toy_task(), 0, version=3))
    assert "a completion of version 0 came where version 3 is sampled" in tree.error
    tree = T.play(tools, T.policy_actor(cfg, params), T.spec())
    assert {turn.version for node in tree.nodes for turn in node.turns} == {0}


def test_a_task_that_is_there_twice_has_trees_of_its_own():
    tools = T.toolbox()
    cfg, params = T.tiny_policy(tools)
    task = T.toy_task()
    groups = asyncio.run(
        sample_trees(tools, T.policy_actor(cfg, params), T.spec(), [task, T.toy_task("a1b"), task], 2, 0)
    )
    assert [[tree.index for tree in group] for group in groups] == [[0, 1], [0, 1], [2, 3]]
    assert not any(tree.error for group in groups for tree in group)
    ids = [tuple(tree.root.token_ids) for tree in (*groups[0], *groups[2])]
    assert len(set(ids)) == 4


@pytest.mark.parametrize("stage", list(Stage))
def test_a_sampled_tree_is_a_function_of_its_seed(stage):
    tools = T.toolbox()
    cfg, params = T.tiny_policy(tools)
    first = [T.play(tools, T.policy_actor(cfg, params), T.spec(stage), index=i) for i in range(2)]
    again = [T.play(tools, T.policy_actor(cfg, params), T.spec(stage), index=i) for i in range(2)]
    other = T.play(tools, T.policy_actor(cfg, params, seed=1), T.spec(stage))
    ids = lambda tree: [node.token_ids for node in tree.nodes]
    assert [ids(t) for t in first] == [ids(t) for t in again]
    assert ids(first[0]) != ids(first[1]) and ids(first[0]) != ids(other)
