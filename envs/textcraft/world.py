"""The static side of TextCraft: items and recipes as arrays.

Axes: I items, 6 ingredient places of a recipe.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Bool, Int

MAX_INGREDIENTS = 6


class RecipeTables(NamedTuple):
    """Recipes as arrays; place j of a recipe is empty where its quantity is 0.

    Attributes:
      ingredient: int32 [I, 6], item ids, 0 in empty places.
      quantity: int32 [I, 6], units of each ingredient for one execution.
      yields: int32 [I], units that one execution makes; 0 for a base item.
      is_base: bool [I].
    """

    ingredient: Int[Array, "I 6"]
    quantity: Int[Array, "I 6"]
    yields: Int[Array, "I"]
    is_base: Bool[Array, "I"]


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How one item is made: one execution turns ``ingredients`` into ``yields`` units."""

    ingredients: Mapping[str, int]
    yields: int


@dataclasses.dataclass(frozen=True, eq=False)
class CraftWorld:
    """Items in a fixed order, and one recipe for each that is not a base item.

    Attributes:
      names: Item names; an item's id is its place.
      tiers: Tier of each item, 0 for base items.
      recipes: By item name.
    """

    names: tuple[str, ...]
    tiers: tuple[int, ...]
    recipes: Mapping[str, Recipe]

    def __post_init__(self):
        if len(set(self.names)) != len(self.names):
            raise ValueError("names: every item is expected once")
        if len(self.tiers) != len(self.names):
            raise ValueError(
                f"tiers: one for each of {len(self.names)} items is expected, got {len(self.tiers)}"
            )
        known = set(self.names)
        for name, recipe in self.recipes.items():
            strangers = {name, *recipe.ingredients} - known
            if strangers:
                raise ValueError(f"recipe of {name!r}: unknown items {sorted(strangers)}")
            if not 1 <= len(recipe.ingredients) <= MAX_INGREDIENTS:
                raise ValueError(
                    f"recipe of {name!r}: 1 to {MAX_INGREDIENTS} ingredients are expected, "
                    f"got {len(recipe.ingredients)}"
                )
            if recipe.yields < 1:
                raise ValueError(f"recipe of {name!r}: yields={recipe.yields}, at least 1 is expected")
            for item, quantity in recipe.ingredients.items():
                if quantity < 1:
                    raise ValueError(f"recipe of {name!r}: {quantity} {item}, at least 1 is expected")
                if self.tier(item) >= self.tier(name):
                    # Planning goes down the tiers; this also rules out circles.
                    raise ValueError(
                        f"recipe of {name!r}: ingredient {item!r} of tier {self.tier(item)}, "
                        f"a tier below {self.tier(name)} is expected"
                    )

    @functools.cached_property
    def index(self) -> dict[str, int]:
        """Item id by name."""
        return {name: i for i, name in enumerate(self.names)}

    @functools.cached_property
    def tables(self) -> RecipeTables:
        """The recipes as NumPy arrays."""
        shape = (len(self.names), MAX_INGREDIENTS)
        ingredient, quantity = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        yields = np.zeros(len(self.names), np.int32)
        for name, recipe in self.recipes.items():
            i = self.index[name]
            yields[i] = recipe.yields
            for j, (item, count) in enumerate(recipe.ingredients.items()):
                ingredient[i, j], quantity[i, j] = self.index[item], count
        return RecipeTables(ingredient, quantity, yields, yields == 0)

    @property
    def base_items(self) -> tuple[str, ...]:
        """Items without a recipe, in order."""
        return tuple(name for name in self.names if name not in self.recipes)

    def tier(self, name: str) -> int:
        """Tier of an item."""
        return self.tiers[self.index[name]]

    def inventory(self, counts: Mapping[str, int]) -> np.ndarray:
        """int32 [I] from counts by name; raises ValueError naming an unknown item or a negative count."""
        result = np.zeros(len(self.names), np.int32)
        for name, count in counts.items():
            if name not in self.index:
                raise ValueError(f"inventory: unknown item {name!r}")
            if count < 0:
                raise ValueError(f"inventory: {count} of {name!r}, 0 or more are expected")
            result[self.index[name]] = count
        return result

    def counts(self, inventory: Sequence[int] | np.ndarray) -> dict[str, int]:
        """Counts by name of what an inventory holds, in item order."""
        held = np.asarray(inventory)
        return {self.names[i]: int(held[i]) for i in np.flatnonzero(held)}
