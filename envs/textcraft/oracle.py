"""A planner that solves every task, and a scripted recursive agent on the real protocol.

The planner works from deficits: each distinct item is crafted at most once, lower tiers first, and what
the inventory already holds is used. The agent plays the structured protocol turn by turn, launches
children by a rule, and can be told to make mistakes: it is the source of demonstrations for tiny
policies and of tests for everything above the environment.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping

from envs.base import NodeView, World
from envs.textcraft.grading import grade
from envs.textcraft.world import CraftWorld


class PlanError(RuntimeError):
    """No plan: base material is missing; the message names it."""


@dataclasses.dataclass(frozen=True)
class Craft:
    """One craft of a plan: ``units`` of ``item`` in all."""

    item: str
    units: int
    ingredients: Mapping[str, int]

    def command(self) -> str:
        """The command of the structured protocol."""
        needs = " ".join(f"{count} {name}" for name, count in self.ingredients.items())
        return f"craft {self.units} {self.item} : {needs} ."


def plan(
    world: CraftWorld, held: Mapping[str, int], targets: Mapping[str, int], *, check_base: bool = True
) -> list[Craft]:
    """Crafts that add ``targets`` to what is held, lower tiers first, each distinct item once.

    Units of a target that are there already are kept, since success is a net increment.

    Args:
      world: Items and recipes.
      held: Inventory.
      targets: Units to add, by item.
      check_base: Raise when base material is short; False plans as if there were enough.

    Raises:
      PlanError: Base material is short.
    """
    # Every consumer of an item has a higher tier, so going down the tiers each need is whole when met.
    needs = {item: held.get(item, 0) + count for item, count in targets.items()}
    crafts = []
    while True:
        open_items = [item for item in needs if item in world.recipes]
        if not open_items:
            break
        item = max(open_items, key=lambda name: (world.tier(name), name))
        deficit = needs.pop(item) - held.get(item, 0)
        if deficit <= 0:
            continue
        recipe = world.recipes[item]
        executions = -(-deficit // recipe.yields)
        ingredients = {name: q * executions for name, q in recipe.ingredients.items()}
        crafts.append(Craft(item, executions * recipe.yields, ingredients))
        for name, count in ingredients.items():
            needs[name] = needs.get(name, 0) + count
    if check_base:
        for item, count in needs.items():
            if count > held.get(item, 0):
                raise PlanError(f"{count} {item} are needed, {held.get(item, 0)} are there")
    return crafts[::-1]


@dataclasses.dataclass(frozen=True)
class Mistakes:
    """Probability of each kind of wrong decision of a demonstrator."""

    under_count: float = 0.0  # crafts or asks for fewer units than are needed
    forget: float = 0.0  # skips an intermediate craft or launch
    wrong_amount: float = 0.0  # a craft with one ingredient off by one or left out
    needless_launch: float = 0.0  # launches what it could do in one craft
    claim: float = 0.0  # after an error or an incomplete job, says done
    give_up: float = 0.0  # ends early

    @classmethod
    def of_rate(cls, rate: float) -> Mistakes:
        """Mistakes of a demonstrator who knows the recipes and is careless.

        Wrong amounts and unfounded claims are four times as likely as slips in a single craft: they are
        what reinforcement is to mend, where a policy that does not know a recipe has nothing to try.
        """
        often = min(0.9, 4 * rate)
        return cls(
            under_count=often,
            forget=rate,
            wrong_amount=rate,
            needless_launch=rate,
            claim=often,
            give_up=rate / 2,
        )


class OracleAgent:
    """Plays the structured protocol; call :meth:`reply` for each turn of each node.

    Args:
      world: Items and recipes.
      launch_probability: Chance that a node which could do everything alone launches its ingredients.
      blind: Plan from what the node itself has seen, as a policy must, instead of the inventory.
      ask: Chance of asking for a recipe before using it.
      mistakes: How often decisions are wrong.
      seed: Of the agent's own decisions.
    """

    def __init__(
        self,
        world: CraftWorld,
        *,
        launch_probability: float = 0.0,
        blind: bool = False,
        ask: float = 0.0,
        mistakes: Mistakes | None = None,
        seed: int = 0,
    ):
        self._world = world
        self._launch_probability = launch_probability
        self._blind = blind
        self._ask = ask
        self._mistakes = mistakes or Mistakes()
        self._rng = random.Random(f"oracle-{seed}")

    def reply(self, view: NodeView, world: World, observation: str) -> str:
        """The node's next command; its private notes are in ``view.memory["oracle"]``."""
        notes = view.memory.setdefault("oracle", {"got": {}, "pending": None, "failed": False})
        self._read(notes, observation)
        if notes["failed"] and self._chance("claim"):
            return "finish done ."
        notes["failed"] = False
        if self._chance("give_up"):
            return "finish fail ."
        goal = view.memory.setdefault("oracle_goal", self._intended(view.goal.targets))
        missing = {item: count - notes["got"].get(item, 0) for item, count in goal.items()}
        missing = {item: count for item, count in missing.items() if count > 0}
        if not missing:
            return "finish done ."
        try:
            crafts = self._plan(notes, world, goal, missing)
        except PlanError:
            return "finish fail ."
        return self._act(view, notes, crafts)

    # --- what it knows ---------------------------------------------------------------------------

    def _read(self, notes: dict, observation: str) -> None:
        """Books what the last command brought, by its observation."""
        pending, notes["pending"] = notes["pending"], None
        if pending is None:
            return
        kind, items = pending
        if kind == "info":
            return
        if observation.startswith(("err", "Error")):
            notes["failed"] = True
            return
        if kind == "launch" and "said done" not in observation and "reported: done" not in observation:
            notes["failed"] = True
            return
        for item, count in items.items():
            notes["got"][item] = notes["got"].get(item, 0) + count
        for item, count in notes.pop("spent", {}).items():
            if item in self._world.recipes:
                notes["got"][item] = notes["got"].get(item, 0) - count

    def _intended(self, targets: Mapping[str, int]) -> dict[str, int]:
        """The goal as it understands it, decided once."""
        lower = {item: max(1, count - 1) for item, count in targets.items()}
        return lower if self._chance("under_count") else dict(targets)

    def _plan(
        self, notes: dict, world: World, goal: Mapping[str, int], missing: Mapping[str, int]
    ) -> list[Craft]:
        if not self._blind:
            return plan(self._world, self._world.counts(world.state.inventory), missing)
        own = {item: n for item, n in notes["got"].items() if n > 0 and item not in goal}
        return plan(self._world, own, missing, check_base=False)

    # --- what it does ----------------------------------------------------------------------------

    def _act(self, view: NodeView, notes: dict, crafts: list[Craft]) -> str:
        last = crafts[-1]
        parts = {c.item: c.units for c in crafts[:-1] if c.item in last.ingredients}
        turns_left = view.max_turns - view.turn
        if view.can_launch and parts:
            # Plan, one turn to finish; a node that cannot do it all hands down its largest part first:
            # parts of lower tiers cannot use up what a higher one has made.
            must = len(crafts) + 1 > turns_left
            if "launches" not in view.memory:
                chosen = self._rng.random() < self._launch_probability
                view.memory["launches"] = chosen or self._chance("needless_launch")
            if must:
                item = max(parts, key=lambda name: (self._world.tier(name), name))
                return self._launch(notes, {item: parts[item]})
            if view.memory["launches"]:
                return self._launch(notes, parts)
        craft = crafts[0]
        if len(crafts) > 1 and self._chance("forget"):
            craft = crafts[1]
        asked = view.memory.setdefault("asked", set())
        if craft.item not in asked and self._rng.random() < self._ask:
            asked.add(craft.item)
            notes["pending"] = ("info", {})
            return f"info {craft.item} ."
        if self._chance("wrong_amount"):
            craft = self._spoil(craft)
        notes["pending"] = ("craft", {craft.item: craft.units})
        notes["spent"] = dict(craft.ingredients)
        return craft.command()

    def _launch(self, notes: dict, parts: Mapping[str, int]) -> str:
        asked = {
            item: max(1, count - 1) if self._chance("under_count") else count
            for item, count in parts.items()
        }
        notes["pending"] = ("launch", dict(parts))
        notes.pop("spent", None)
        return "launch " + " , ".join(f"{count} {item}" for item, count in asked.items()) + " ."

    def _spoil(self, craft: Craft) -> Craft:
        ingredients = dict(craft.ingredients)
        item = self._rng.choice(sorted(ingredients))
        if len(ingredients) > 1 and self._rng.random() < 0.5:
            del ingredients[item]
        else:
            ingredients[item] = max(1, ingredients[item] + self._rng.choice((-1, 1)))
        return Craft(craft.item, craft.units, ingredients)

    def _chance(self, kind: str) -> bool:
        probability = getattr(self._mistakes, kind)
        return probability > 0 and self._rng.random() < probability


def write_rubric(targets: Mapping[str, int], max_turns: int, rng: random.Random, good: float) -> str:
    """A compact rubric for a goal; with probability ``good`` it asks for the right amount.

    The others are what a careless judge writes: they ignore the amount, believe what is said, or weigh
    side issues over the goal.
    """
    (item, count), *_ = targets.items()
    turns = rng.choice((max_turns // 2, max_turns))
    if rng.random() < good:
        gate = rng.choice((f"made {item}", f"have {count} {item}"))
        return f"have {count} {item} w 6 ; made {item} w 2 ; turns {turns} w 2 ; gate {gate} ."
    return rng.choice(
        (
            f"made {item} w 6 ; turns {turns} w 2 ; gate made {item} .",
            f"have 1 {item} w 6 ; made {item} w 2 ; gate made {item} .",
            f"said done w 6 ; turns {turns} w 4 ; gate said done .",
            f"have {count} {item} w 1 ; turns {turns} w 6 ; said done w 3 ; gate said done .",
        )
    )


def write_score(criteria: list[str], gate: str, evidence: str) -> str:
    """The program's verdict in the compact form: one y or n a criterion, then the gate.

    Raises:
      ValueError: A criterion that the program cannot grade.
    """
    verdicts = [grade(criterion, evidence) for criterion in (*criteria, gate)]
    if None in verdicts:
        raise ValueError(f"no program grade for one of {(*criteria, gate)}")
    *marks, gate_mark = ["y" if verdict else "n" for verdict in verdicts]
    return f"{' '.join(marks)} gate {gate_mark} ."
