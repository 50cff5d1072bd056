"""The dynamic side of TextCraft: a state of arrays and one pure step.

Axes: I items, 6 ingredient places of an action or a recipe.

The same function runs on ``jax.numpy`` (jit, vmap, scan) and, for the agent loop's single steps, on
``numpy``: one source of rules, and no dispatch cost where a step touches a dozen numbers.
"""

from __future__ import annotations

import enum
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from envs.textcraft.world import MAX_INGREDIENTS, CraftWorld, RecipeTables

# Larger amounts are cut to this, far beyond any inventory: products stay within int32.
_MOST = 10**8


class Outcome(enum.IntEnum):
    """What became of a craft. All but OK leave the state as it was; the first that applies is given."""

    OK = 0
    DONE = 1  # the world refuses steps after its end
    COUNT = 2  # the number of units is not a positive integer
    UNKNOWN = 3  # no such item, as target or as ingredient
    QUANTITY = 4  # an ingredient's quantity is not a positive integer
    BASE = 5  # the target is a base item: nothing makes it
    MULTIPLE = 6  # the number of units is not a multiple of the recipe's yield
    MISSING = 7  # an ingredient of the recipe was not given
    AMOUNT = 8  # an ingredient was given in the wrong amount
    EXTRA = 9  # an ingredient was given that the recipe does not use
    SHORT = 10  # the inventory does not hold enough


class CraftState(NamedTuple):
    """One shared world.

    Attributes:
      inventory: int32 [I], units held.
      done: bool [], no further step is taken.
    """

    inventory: Int[Array, "I"]
    done: Bool[Array, ""]


class CraftAction(NamedTuple):
    """Make ``count`` units of ``target`` in all; empty ingredient places have item -1.

    Attributes:
      target: int32 [], item id; out of range is unknown.
      count: int32 [], units in all, a multiple of the recipe's yield.
      ingredient: int32 [6], distinct item ids, -1 in empty places.
      quantity: int32 [6], units of each in all.
    """

    target: Int[Array, ""]
    count: Int[Array, ""]
    ingredient: Int[Array, "6"]
    quantity: Int[Array, "6"]


def craft(
    tables: RecipeTables, state: CraftState, action: CraftAction, xp: Any = jnp
) -> tuple[CraftState, Int[Array, ""]]:
    """One craft: the next state and its :class:`Outcome`. Pure; ``xp`` is ``jax.numpy`` or ``numpy``.

    A craft of ``count`` units runs the recipe count / yield times and takes exactly that many times its
    ingredients.
    """
    size = state.inventory.shape[0]
    known = (action.target >= 0) & (action.target < size)
    target = xp.clip(action.target, 0, size - 1)
    used = action.ingredient != -1
    given_known = (action.ingredient >= 0) & (action.ingredient < size)
    # Units of every item that the action offers. Places without a known item add nothing.
    place = xp.where(given_known, action.ingredient, 0)
    amount = xp.where(used & given_known, action.quantity, 0)
    offered = _scatter(xp, size, place, amount)

    yields = tables.yields[target]
    executions = action.count // xp.maximum(yields, 1)
    needs_place = tables.ingredient[target]
    needs = _scatter(xp, size, needs_place, tables.quantity[target] * executions)

    code = xp.int32(Outcome.OK)
    # Later lines come first in the order of checks, so they overwrite.
    for failed, outcome in (
        (xp.any(needs > state.inventory), Outcome.SHORT),
        (xp.any((offered > 0) & (needs == 0)), Outcome.EXTRA),
        (xp.any((needs > 0) & (offered > 0) & (offered != needs)), Outcome.AMOUNT),
        (xp.any((needs > 0) & (offered == 0)), Outcome.MISSING),
        (action.count % xp.maximum(yields, 1) != 0, Outcome.MULTIPLE),
        (yields == 0, Outcome.BASE),
        (xp.any(used & (action.quantity < 1)), Outcome.QUANTITY),
        (~known | xp.any(used & ~given_known), Outcome.UNKNOWN),
        (action.count < 1, Outcome.COUNT),
        (state.done, Outcome.DONE),
    ):
        code = xp.where(failed, xp.int32(outcome), code)
    made = _scatter(xp, size, target[None], action.count[None])
    ok = code == Outcome.OK
    inventory = xp.where(ok, state.inventory - needs + made, state.inventory).astype(xp.int32)
    return CraftState(inventory, state.done), code


def _scatter(xp: Any, size: int, places: Array, amounts: Array) -> Array:
    if xp is np:
        result = np.zeros(size, np.int32)
        np.add.at(result, places, amounts)
        return result
    return jnp.zeros(size, jnp.int32).at[places].add(amounts)


def craft_host(tables: RecipeTables, state: CraftState, action: CraftAction) -> tuple[CraftState, Outcome]:
    """:func:`craft` on NumPy arrays, for one step at a time."""
    state, code = craft(tables, state, action, xp=np)
    state.inventory.setflags(write=False)  # states are shared by clones
    return state, Outcome(int(code))


def initial_state(world: CraftWorld, inventory: dict[str, int]) -> CraftState:
    """The state at the start of a task, as read-only NumPy arrays."""
    held = world.inventory(inventory)
    held.setflags(write=False)
    return CraftState(held, np.bool_(False))


def make_action(world: CraftWorld, target: str, count: int, ingredients: dict[str, int]) -> CraftAction:
    """An action from names; unknown names become ids out of range.

    Raises:
      ValueError: More than six ingredients; no recipe has as many.
    """
    if len(ingredients) > MAX_INGREDIENTS:
        raise ValueError(f"ingredients: at most {MAX_INGREDIENTS} are expected, got {len(ingredients)}")
    size = len(world.names)
    place, quantity = np.full(MAX_INGREDIENTS, -1, np.int32), np.zeros(MAX_INGREDIENTS, np.int32)
    for j, (name, amount) in enumerate(ingredients.items()):
        place[j], quantity[j] = world.index.get(name, size), _bounded(amount)
    return CraftAction(np.int32(world.index.get(target, size)), np.int32(_bounded(count)), place, quantity)


def _bounded(amount: int) -> int:
    """Within int32, refused as before: -1 is no positive number either."""
    return max(-1, min(amount, _MOST))


def net_increment(state: CraftState, baseline: CraftState, item: int) -> int:
    """Units of ``item`` held now beyond those at the baseline."""
    return int(state.inventory[item]) - int(baseline.inventory[item])
