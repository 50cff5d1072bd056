"""Toolboxes on a toy world, scripted actors, and trees sampled from a tiny policy."""

from __future__ import annotations

import asyncio
import random

import jax
import jax.numpy as jnp

from envs.textcraft import oracle, tasks
from envs.textcraft.generate import toy_world
from envs.textcraft.structured import StructuredTextCraft
from sera_jax.labels.ledger import Ledger
from sera_jax.policy import qwen3
from sera_jax.policy.rendering import CompactRenderer
from sera_jax.policy.tokenizer import word_tokenizer
from sera_jax.recursion.actors import Call, PolicyActor, ScriptedActor
from sera_jax.recursion.loop import Toolbox, TreeRunner, TreeSpec
from sera_jax.rollout.local import LocalEngine
from sera_jax.rubric.codec import CompactCodec
from sera_jax.types import Purpose, Stage, Task, Tree

WORLD = toy_world(0)
CONTEXT = 160


def toolbox() -> Toolbox:
    environment = StructuredTextCraft(WORLD, "compact")
    tokenizer = word_tokenizer(environment.vocabulary())
    return Toolbox(environment, tokenizer, CompactRenderer(tokenizer), CompactCodec(), Ledger())


def toy_task(item: str = "a3a", count: int = 2, name: str = "test") -> Task:
    return tasks.ToyTasks(WORLD, tiers=(1, 2, 3), counts=(1, 2)).task((item, count), name)


def spec(stage: Stage = Stage.EXECUTION, **changes) -> TreeSpec:
    settings = {"max_turns": 8, "max_depth": 2, "max_tokens": 24, "writer_tokens": 40, "scorer_tokens": 20}
    settings |= {
        Stage.EXECUTION: {"rubrics": "launches"},
        Stage.DELEGATION: {},
        Stage.RUBRIC: {"rubrics": "groups", "branches": 8, "budget": 16, "sequential": True},
    }[stage]
    return TreeSpec(stage=stage, **{**settings, **changes})


def oracle_actor(tools: Toolbox, seed: int = 0, good: float = 1.0, **agent) -> ScriptedActor:
    """The scripted agent in the policy's place, with program-graded scores."""
    scripted = oracle.OracleAgent(WORLD, blind=True, seed=seed, **agent)
    rng = random.Random(seed)

    def write(call: Call) -> str:
        if call.purpose == Purpose.EXECUTE:
            return scripted.reply(call.view, call.world, call.observation)
        if call.purpose == Purpose.RUBRIC:
            return oracle.write_rubric(call.writer.goal.targets, call.writer.max_turns, rng, good)
        rubric = call.scorer.rubric
        criteria = [criterion.description for criterion in rubric.criteria]
        return oracle.write_score(criteria, rubric.gate, call.scorer.evidence)

    return scripted_actor(tools, write)


def scripted_actor(tools: Toolbox, write) -> ScriptedActor:
    encode = lambda text: tools.tokenizer.encode(text, strict=True)
    return ScriptedActor(write, encode, tools.tokenizer.im_end, CONTEXT)


def play(tools: Toolbox, actor, tree_spec: TreeSpec, task: Task | None = None, index: int = 0) -> Tree:
    return asyncio.run(TreeRunner(tools, actor, tree_spec).run(task or toy_task(), index, version=0))


def tiny_policy(tools: Toolbox, seed: int = 0):
    cfg = qwen3.tiny(
        tools.tokenizer.vocab_size,
        num_layers=2,
        hidden_size=32,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        intermediate_size=64,
        dtype=jnp.float32,
    )
    return cfg, qwen3.init(jax.random.key(seed), cfg)


def policy_actor(cfg, params, seed: int = 0, slots: int = 16) -> PolicyActor:
    return PolicyActor(LocalEngine(params, cfg, slots=slots, context_length=CONTEXT), seed)
