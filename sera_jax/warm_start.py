"""A supervised start for tiny policies, on demonstrations that are imperfect on purpose.

A scripted agent plays training tasks through the real agent loop: it launches, writes rubrics and
scores, and errs at a set rate. Its outputs become supervised samples. So the policy knows the protocol
and a fair part of the work when reinforcement begins, and has something left to learn. Rubrics are of
mixed quality; scores are the program's grades of them, with extra examples in which half of the
children failed, because a scorer that is not right about failures flatters the policy later.
"""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import jax
import numpy as np

from envs.textcraft import oracle
from envs.textcraft.grading import Evidence
from sera_jax.build import Parts
from sera_jax.config import Config
from sera_jax.credit.roles import trained_mask
from sera_jax.labels.ledger import Ledger
from sera_jax.learner.packing import Rows, pack
from sera_jax.learner.update import TrainState, make_optimizer, make_update
from sera_jax.objectives import supervised
from sera_jax.recursion.actors import Call, ScriptedActor
from sera_jax.recursion.assignment import completion_sample
from sera_jax.recursion.loop import TreeRunner
from sera_jax.recursion.sampling import tree_spec
from sera_jax.report.metrics import MetricsWriter
from sera_jax.report.progress import Progress
from sera_jax.rubric import compact
from sera_jax.types import Completion, Failure, Purpose, Role, Sample, Stage, Task, Tree

_BLOCK = 400  # samples that are packed together: packing looks at every open row


async def warm_start(config: Config, parts: Parts, params: Any, progress: Progress, workdir: Path) -> Any:
    """Trains ``params`` on demonstrations for ``config.warm_start.steps`` steps and returns the result."""
    settings = config.warm_start
    samples = await demonstrations(config, parts, progress)
    rows = _pack_all(samples, config)
    optimizer = make_optimizer(
        learning_rate=settings.learning_rate,
        warmup_steps=settings.warmup_steps,
        decay_steps=settings.steps,
        weight_decay=0.01,
    )
    state = TrainState.create(params, optimizer)
    update = make_update(parts.model, supervised, optimizer, micro_rows=settings.rows)
    writer = MetricsWriter(workdir / "warm_start.jsonl")
    progress.phase("warm start", settings.steps)
    rng = np.random.default_rng(config.seed)
    order = np.zeros(0, np.int64)
    for step in range(settings.steps):
        if len(order) < settings.rows:
            order = np.concatenate([order, rng.permutation(len(rows.token_ids))])
        chosen, order = order[: settings.rows], order[settings.rows :]
        state, metrics = update(state, jax.tree.map(lambda x, c=chosen: x[c], rows))
        if step % 50 == 0 or step == settings.steps - 1:
            writer.write(step, "warm_start", metrics)
        progress.advance(f"loss {metrics['loss']:.3f}")
    writer.close()
    return state.params


def _pack_all(samples: list[Sample], config: Config) -> Rows:
    order = list(range(len(samples)))
    random.Random(config.seed).shuffle(order)
    blocks = [
        pack([samples[i] for i in order[k : k + _BLOCK]], row_length=config.learner.row_length)[0]
        for k in range(0, len(order), _BLOCK)
    ]
    return jax.tree.map(lambda *x: np.concatenate(x), *blocks)


async def demonstrations(config: Config, parts: Parts, progress: Progress) -> list[Sample]:
    """Supervised samples of every role from ``config.warm_start.trees`` scripted trees."""
    settings = config.warm_start
    spec = dataclasses.replace(
        tree_spec(config, Stage.EXECUTION), rubrics="launches", deadline_seconds=None
    )
    tools = dataclasses.replace(parts.tools, ledger=Ledger())  # scripted trees cost no labels
    progress.phase("demonstrations", settings.trees)
    samples: list[Sample] = []

    for number in range(settings.trees):
        task = demonstration_task(parts, number, config.seed)
        actor = demonstrator(config, parts, number)
        tree = await TreeRunner(tools, actor, spec).run(task, number, version=-1)
        check_demonstration(tree)
        samples.extend(tree_samples(tree))
        samples.extend(extra_scores(tree, parts, settings.scorer_examples, number, config.seed))
        progress.advance(f"{len(samples)} samples")
    return samples


def check_demonstration(tree: Tree) -> None:
    """A fault of the script or the protocol must not be taught.

    Raises:
      RuntimeError: A node, a rubric or a score of the tree failed; the message says how.
    """
    faults = [tree.error, *(node.error for node in tree.nodes)]
    records = [*(launch.rubric for launch in tree.launches), *(node.score for node in tree.nodes)]
    faults += [r.text for r in records if r is not None and r.failure == Failure.REQUEST]
    for fault in filter(None, faults):
        raise RuntimeError(f"a scripted tree of task {tree.task.id} failed: {fault}")


def demonstration_task(parts: Parts, number: int, seed: int) -> Task:
    """Task of a demonstration, from the training population."""
    toy = parts.tasks.toy
    if toy is None:
        return parts.tasks.training(number, 1)[0]
    return toy.task(toy.trained[number % len(toy.trained)], f"demo-{seed}-{number}")


def demonstrator(config: Config, parts: Parts, number: int) -> ScriptedActor:
    """The scripted agent of one tree; its rates differ from tree to tree."""
    settings, tools = config.warm_start, parts.tools
    rng = random.Random(f"demonstrator-{config.seed}-{number}")
    agent = oracle.OracleAgent(
        tools.environment.world,
        launch_probability=rng.choice((0.3, 0.7)),
        blind=True,
        ask=rng.choice((0.0, 0.3)),
        mistakes=oracle.Mistakes.of_rate(settings.mistake_rate * rng.choice((0.0, 1.0, 2.0))),
        seed=rng.getrandbits(32),
    )

    def write(call: Call) -> str:
        if call.purpose == Purpose.EXECUTE:
            return agent.reply(call.view, call.world, call.observation)
        if call.purpose == Purpose.RUBRIC:
            context = call.writer
            return oracle.write_rubric(context.goal.targets, context.max_turns, rng, settings.good_rubrics)
        rubric = call.scorer.rubric
        return oracle.write_score(
            [criterion.description for criterion in rubric.criteria], rubric.gate, call.scorer.evidence
        )

    return ScriptedActor(
        write,
        lambda text: tools.tokenizer.encode(text, strict=True),
        tools.tokenizer.im_end,
        config.rollout.context_length,
    )


def tree_samples(tree: Tree) -> list[Sample]:
    """All outputs of a scripted tree with advantage 1: turns, rubrics and scores."""
    samples = []
    for node in tree.nodes:
        roles = np.array(node.roles, np.uint8)
        mask = trained_mask(roles, Stage.EXECUTION)
        samples.append(
            Sample(
                token_ids=np.array(node.token_ids, np.int32),
                roles=roles,
                mask=mask,
                advantage=mask.astype(np.float32),
                logprobs=np.zeros(len(roles), np.float32),
                source=(tree.index, node.id),
            )
        )
        if node.score is not None and node.score.completion is not None:
            samples.append(completion_sample(node.score.prompt_ids, node.score.completion, Role.SCORE, 1.0))
    for launch in tree.launches:
        record = launch.rubric
        if record is not None and record.completion is not None:
            samples.append(completion_sample(record.prompt_ids, record.completion, Role.RUBRIC, 1.0))
    return samples


def extra_scores(tree: Tree, parts: Parts, count: int, number: int, seed: int) -> list[Sample]:
    """Scorer examples around the children of a tree: other rubrics, and ends that went otherwise.

    Half of the ends miss the goal by a little, which is where a scorer errs first.
    """
    rng = random.Random(f"scores-{seed}-{number}")
    tools, samples = parts.tools, []
    items = tools.environment.world.names
    for node in tree.nodes[1:]:
        ((item, wanted),) = node.goal.targets.items()
        for _ in range(count):
            rubric_text = oracle.write_rubric(node.goal.targets, 8, rng, good=0.6)
            net = rng.choice((rng.randint(0, wanted - 1), wanted + rng.choice((0, 0, 0, 1, 2))))
            made = {item: max(net, 1)} if net or rng.random() < 0.2 else {}
            for other in rng.sample(items, rng.randint(0, 3)):
                made.setdefault(other, rng.randint(1, 4))
            ordered = list(made.items())
            rng.shuffle(ordered)
            said = rng.choice(("done", "done", "fail", "nothing"))
            evidence = Evidence({item: net}, dict(ordered), rng.randint(1, 8), said).text()
            rubric = compact.parse_rubric(rubric_text)
            score = oracle.write_score([c.description for c in rubric.criteria], rubric.gate, evidence)
            prompt = tools.renderer.start([("user", f"score {rubric_text} {evidence}")])
            ids = (*tools.tokenizer.encode(score, strict=True), tools.tokenizer.im_end)
            completion = Completion(ids, (0.0,) * len(ids), "stop", -1)
            samples.append(completion_sample(prompt, completion, Role.SCORE, 1.0))
    return samples
