"""From a configuration to the parts of a run: environment, tasks, tokenizer, policy, objective."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from envs.textcraft import tasks as textcraft_tasks
from envs.textcraft.generate import published_world, toy_world
from envs.textcraft.structured import StructuredTextCraft
from sera_jax.config import Config
from sera_jax.labels.ledger import Ledger
from sera_jax.objectives import Objective, cispo, grpo
from sera_jax.policy import qwen3
from sera_jax.policy.rendering import ChatMLRenderer, CompactRenderer
from sera_jax.policy.tokenizer import Tokenizer, word_tokenizer
from sera_jax.recursion.loop import Toolbox
from sera_jax.rubric.codec import CompactCodec, JsonCodec
from sera_jax.types import Task


class TaskSource:
    """Training tasks by version and held-out sets by name; functions of the seed alone.

    Args:
      config: The run's settings.
      environment: What is played.
    """

    def __init__(self, config: Config, environment: StructuredTextCraft):
        self._seed = config.seed
        self._environment = config.environment
        settings = config.environment
        self.toy: textcraft_tasks.ToyTasks | None = None
        self._train: Sequence[Task] = ()
        if settings.world == "toy":
            self.toy = textcraft_tasks.ToyTasks(
                environment.world,
                tiers=settings.toy_tiers,
                counts=settings.toy_counts,
                unseen_fraction=settings.toy_unseen_fraction,
                seed=settings.world_seed,
            )
        else:
            self._train = textcraft_tasks.split(f"train_{settings.train_tier}")

    def training(self, version: int, count: int) -> list[Task]:
        """Root tasks of the step at ``version``.

        All tasks are shuffled anew each epoch; ``version`` alone says where in it the step stands, so
        a resumed run goes on with the very tasks that it would have had. Toy tasks have an inventory of
        their own each time.
        """
        population = self._train if self.toy is None else self.toy.trained
        chosen = []
        for place in range(version * count, (version + 1) * count):
            epoch, offset = divmod(place, len(population))
            order = list(range(len(population)))
            random.Random(f"{self._seed}/epoch/{epoch}").shuffle(order)
            item = population[order[offset]]
            chosen.append(item if self.toy is None else self.toy.task(item, f"train-{self._seed}-{place}"))
        return chosen

    def evaluation(self, count: int) -> dict[str, list[Task]]:
        """Held-out sets of at most ``count`` tasks each.

        Toy: trained pairs with inventories that training never draws, and pairs that training never
        sees. Published: the dev records of the trained tier, or all of dev where it has none of it.
        """
        if self.toy is not None:
            return {
                name: [
                    self.toy.task(pairs[i % len(pairs)], f"eval-{i // len(pairs)}") for i in range(count)
                ]
                for name, pairs in (("trained_pairs", self.toy.trained), ("unseen_pairs", self.toy.unseen))
                if pairs and count
            }
        dev = textcraft_tasks.split("dev")
        same = [task for task in dev if task.tier == self._environment.train_tier]
        return {"dev": list(same or dev)[:count]} if count else {}


@dataclasses.dataclass
class Parts:
    """What :func:`build` makes."""

    tools: Toolbox
    tasks: TaskSource
    model: qwen3.Qwen3Config
    objective: Objective
    checkpoint: str | None

    def init_params(self, seed: int) -> Any:
        """The first weights: read from the checkpoint directory, or random."""
        if self.checkpoint is None:
            return jax.jit(qwen3.init, static_argnums=1)(jax.random.key(seed), self.model)
        from sera_jax.policy import hf

        return hf.load(self.checkpoint, self.model)

    def evaluation_tools(self) -> Toolbox:
        """The same tools with a ledger of their own: evaluation is not what training cost."""
        return dataclasses.replace(self.tools, ledger=Ledger())


def build(config: Config) -> Parts:
    """Builds the parts; reads a checkpoint's configuration and tokenizer, not yet its weights."""
    settings, policy = config.environment, config.policy
    if settings.world == "toy":
        world = toy_world(
            settings.world_seed,
            domains=settings.toy_domains,
            max_tier=settings.toy_max_tier,
            items_per_tier=settings.toy_items_per_tier,
        )
    else:
        world = published_world()
    environment = StructuredTextCraft(world, "compact" if policy.size == "tiny" else "prose")
    dtype = jnp.dtype(policy.dtype)
    if policy.size == "tiny":
        tokenizer = word_tokenizer(environment.vocabulary())
        model = qwen3.tiny(
            tokenizer.vocab_size,
            num_layers=policy.layers,
            hidden_size=policy.width,
            num_heads=policy.heads,
            num_kv_heads=policy.kv_heads,
            head_dim=policy.head_dim,
            intermediate_size=policy.ffn,
            dtype=dtype,
        )
        renderer: Any = CompactRenderer(tokenizer)
    else:
        from sera_jax.policy import hf

        assert policy.checkpoint is not None  # validated with the config
        tokenizer = Tokenizer.from_directory(policy.checkpoint)
        model = dataclasses.replace(hf.config_from_hf(policy.checkpoint), dtype=dtype, remat="full")
        renderer = ChatMLRenderer(tokenizer)
    codec: Any = CompactCodec() if config.rubric.codec == "compact" else JsonCodec()
    objective = (
        cispo(config.objective.ratio_min, config.objective.ratio_max)
        if config.objective.name == "cispo"
        else grpo()
    )
    return Parts(
        tools=Toolbox(environment, tokenizer, renderer, codec, Ledger()),
        tasks=TaskSource(config, environment),
        model=model,
        objective=objective,
        checkpoint=policy.checkpoint,
    )
