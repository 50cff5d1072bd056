"""Tasks: the published records and their splits, and toy tasks with fresh inventories."""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import json
import lzma
import random
from collections.abc import Mapping, Sequence

from envs.base import Goal, Task
from envs.textcraft.world import CraftWorld

TIERS = ("easy", "medium", "hard", "extreme")
_DEV = {"easy": 34, "hard": 33, "extreme": 33}


@dataclasses.dataclass(frozen=True)
class CraftTask:
    """What the world of a task starts from.

    Attributes:
      inventory: Units held at the start.
      gold: Published plan as (item, executions, ingredients in all, units made), may be empty.
    """

    inventory: Mapping[str, int]
    gold: tuple[tuple[str, int, Mapping[str, int], int], ...] = ()


def goal_of(targets: Mapping[str, int], context: str = "") -> Goal:
    """A goal from validated targets; ``goal 2 x 1 y`` in words is ``2 x , 1 y``."""
    text = " , ".join(f"{count} {item}" for item, count in targets.items())
    return Goal(text=text, targets=dict(targets), context=context)


@functools.cache
def records(split: str) -> tuple[Task, ...]:
    """The published records of ``train`` (2,522) or ``val`` (632), in the order of the file."""
    path = importlib.resources.files("envs.textcraft.data") / f"{split}.jsonl.xz"
    tasks = []
    with path.open("rb") as raw, lzma.open(raw, "rt") as lines:
        for line in lines:
            record = json.loads(line)
            misc = record["misc"]
            gold = tuple(
                (step["target"][0], step["target"][1], step["ingredients"], step["result_count"])
                for step in misc["gold_trajectory"]
            )
            tasks.append(
                Task(
                    id=record["id"],
                    tier=misc["difficulty"],
                    goal=goal_of(misc["target_items"]),
                    data=CraftTask(misc["initial_inventory"], gold),
                )
            )
    return tuple(tasks)


@functools.cache
def dev_ids() -> frozenset[str]:
    """100 records of the train file that training never uses: 34 easy, 33 hard, 33 extreme."""
    chosen: list[str] = []
    for tier, count in _DEV.items():
        ids = sorted(task.id for task in records("train") if task.tier == tier)
        chosen += random.Random(f"dev-{tier}").sample(ids, count)
    return frozenset(chosen)


def split(name: str) -> tuple[Task, ...]:
    """A split by name.

    ``train_easy`` .. ``train_extreme`` and ``train_all`` (without dev), ``dev`` (100), ``test`` (632)
    and ``test_easy`` .. ``test_extreme``. ``train_medium`` has the 852 records of the paper.

    Raises:
      ValueError: An unknown name.
    """
    part, _, tier = name.partition("_")
    if part == "dev" and not tier:
        return tuple(task for task in records("train") if task.id in dev_ids())
    if part == "train" and tier in (*TIERS, "all"):
        tasks = (task for task in records("train") if task.id not in dev_ids())
    elif part == "test" and tier in (*TIERS, "", "all"):
        tasks = iter(records("val"))
    else:
        raise ValueError(
            f"split {name!r}: dev, test, test_<tier>, train_all or train_<tier> is expected, "
            f"with a tier of {', '.join(TIERS)}"
        )
    return tuple(task for task in tasks if tier in ("", "all", task.tier))


def base_needs(world: CraftWorld, item: str, count: int) -> dict[str, int]:
    """Base units for ``count`` units of ``item`` as if every recipe made one: the published rule."""
    if item not in world.recipes:
        return {item: count}
    needs: dict[str, int] = {}
    for ingredient, quantity in world.recipes[item].ingredients.items():
        for base, units in base_needs(world, ingredient, count * quantity).items():
            needs[base] = needs.get(base, 0) + units
    return needs


def fresh_inventory(world: CraftWorld, item: str, count: int, rng: random.Random) -> dict[str, int]:
    """Base materials for a task: need + U{0..max(1, need // 2)} of each, and 1 to 3 distractors."""
    inventory = {
        base: need + rng.randint(0, max(1, need // 2))
        for base, need in sorted(base_needs(world, item, count).items())
    }
    for _ in range(rng.randint(1, 3)):
        inventory.setdefault(rng.choice(world.base_items), rng.randint(1, 5))
    return inventory


class ToyTasks:
    """(item, count) pairs of a world, split into trained and unseen ones, with fresh inventories.

    Args:
      world: Where they are crafted.
      tiers: Tiers of the root targets.
      counts: Target counts.
      unseen_fraction: Share of pairs that training never sees.
      seed: Fixes the split, apart from the run's seed.
    """

    def __init__(
        self,
        world: CraftWorld,
        *,
        tiers: Sequence[int],
        counts: Sequence[int],
        unseen_fraction: float = 0.2,
        seed: int = 0,
    ):
        self._world = world
        pairs = [
            (item, count)
            for item in world.names
            if item in world.recipes and world.tier(item) in tiers
            for count in counts
        ]
        if not pairs:
            raise ValueError(f"tiers={tuple(tiers)}: the world has no craftable item of these tiers")
        if min(counts) < 1:
            raise ValueError(f"counts={tuple(counts)}: positive integers are expected")
        if not 0 <= unseen_fraction < 1:
            raise ValueError(f"unseen_fraction={unseen_fraction}: 0 or more and less than 1 is expected")
        random.Random(f"pairs-{seed}").shuffle(pairs)
        unseen = round(unseen_fraction * len(pairs))
        self.unseen = tuple(pairs[:unseen])
        self.trained = tuple(pairs[unseen:])

    def task(self, pair: tuple[str, int], name: str) -> Task:
        """The task of a pair with the inventory that ``name`` draws."""
        item, count = pair
        inventory = fresh_inventory(self._world, item, count, random.Random(f"{name}/{item}/{count}"))
        return Task(
            id=f"toy.{item}.{count}.{name}",
            tier=f"tier{self._world.tier(item)}",
            goal=goal_of({item: count}),
            data=CraftTask(inventory),
        )
