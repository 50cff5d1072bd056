"""The scripted recursive agent solves the published Easy and Medium tasks through the real agent loop."""

import asyncio

import pytest

from envs.textcraft import oracle, tasks
from envs.textcraft.generate import published_world
from envs.textcraft.structured import StructuredTextCraft
from sera_jax.evaluate import evaluate
from sera_jax.labels.ledger import Ledger
from sera_jax.policy.rendering import CompactRenderer
from sera_jax.policy.tokenizer import word_tokenizer
from sera_jax.recursion.actors import ScriptedActor
from sera_jax.recursion.loop import Toolbox
from sera_jax.rubric.codec import CompactCodec
from sera_jax.types import StopReason


@pytest.mark.parametrize(("tier", "number"), [("easy", 147), ("medium", 213)])
def test_all_test_tasks_within_20_turns_and_depth_3(tier, number):
    from sera_jax.config import Config

    config = Config()
    assert (config.rollout.max_turns, config.rollout.max_depth) == (20, 3)
    world = published_world()
    environment = StructuredTextCraft(world, "compact")
    tokenizer = word_tokenizer(environment.vocabulary())
    tools = Toolbox(environment, tokenizer, CompactRenderer(tokenizer), CompactCodec(), Ledger())
    agent = oracle.OracleAgent(world, launch_probability=0.5)
    actor = ScriptedActor(
        lambda call: agent.reply(call.view, call.world, call.observation),
        lambda text: tokenizer.encode(text, strict=True),
        tokenizer.im_end,
        config.rollout.context_length,
    )
    result = asyncio.run(evaluate(config, tools, actor, tasks.split(f"test_{tier}")))
    assert len(result.success) == number and all(result.success.values())
    assert result.mean == 1.0 and result.by_tier() == {tier: 1.0}
    nodes = [node for tree in result.trees for node in tree.nodes]
    assert sum(len(tree.launches) for tree in result.trees) > 90
    assert max(node.depth for node in nodes) <= 3
    assert max(len(node.turns) for node in nodes) <= 20
    assert all(node.stop == StopReason.FINISHED for node in nodes)
    records = result.results()
    assert len(records) == number and all(r["success"] and not r["error"] for r in records)


def test_a_task_is_evaluated_once():
    from sera_jax.config import Config

    task = tasks.split("test")[0]
    with pytest.raises(ValueError, match=f"the id '{task.id}' is there twice"):
        asyncio.run(evaluate(Config(), None, None, [task, task]))
