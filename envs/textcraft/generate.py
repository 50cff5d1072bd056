"""Worlds: the published recipe graph, rebuilt from its rules, and toy worlds of any size."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Sequence

from envs.textcraft.world import MAX_INGREDIENTS, CraftWorld, Recipe

# The five domains in the order of the published generator, and how their base items are called.
_DOMAINS = {"metal": "m", "crystal": "c", "organic": "o", "arcane": "a", "tech": "t"}
_ORES = ("metal", "crystal")
_ITEMS_PER_TIER = 25
_VARIANTS = 10
_MAX_TIER = 12
_BASE_INGREDIENTS = {1: 1, 2: 2, 3: 2, 4: 2, 5: 2, 6: 2, 7: 2, 8: 3, 9: 3, 10: 3, 11: 3, 12: 4}
_YIELDS = {1: (2, 4), 2: (2, 3), 3: (1, 2), 4: (1, 2), 5: (1, 2)}  # later tiers make one
# Cross-domain items, made last: name -> (tier, domains in the order of their draws).
_CROSS = {
    "x10_mc": (10, ("metal", "crystal")),
    "x10_ot": (10, ("organic", "tech")),
    "x10_am": (10, ("arcane", "metal")),
    "x10_ct": (10, ("crystal", "tech")),
    "x11_mct": (11, ("metal", "crystal", "tech")),
    "x11_oam": (11, ("organic", "arcane", "metal")),
    "x11_act": (11, ("arcane", "crystal", "tech")),
    "x11_tca": (11, ("tech", "crystal", "arcane")),
    "x12_mcat": (12, ("metal", "crystal", "arcane", "tech")),
    "x12_oacm": (12, ("organic", "arcane", "crystal", "metal")),
    "x12_tcoa": (12, ("tech", "crystal", "organic", "arcane")),
    "x12_all": (12, ("metal", "crystal", "organic", "arcane", "tech")),
}


@functools.cache
def published_world() -> CraftWorld:
    """The released graph: 1,452 items, 50 of them base, 1,402 recipes, seed 42.

    Draws are made in the order of the released generator, so the graph is the same whatever the
    interpreter's hash seed.
    """
    rng = random.Random(42)
    tiers: dict[str, dict[int, list[str]]] = {domain: {} for domain in _DOMAINS}
    recipes: dict[str, Recipe] = {}
    item_tier: dict[str, int] = {}
    for domain, prefix in _DOMAINS.items():
        base = f"{prefix}{{}}_ore" if domain in _ORES else f"raw_{prefix}{{}}"
        # 25 entries of 10 names: the repeats act as weights of the draws below.
        tiers[domain][0] = [base.format(i % _VARIANTS) for i in range(_ITEMS_PER_TIER)]
        item_tier.update(dict.fromkeys(tiers[domain][0], 0))
        for tier in range(1, _MAX_TIER + 1):
            tiers[domain][tier] = []
            for i in range(max(1, _ITEMS_PER_TIER - tier // 3)):
                name = f"{prefix}{i % _VARIANTS}_i{tier}" + (f"_{tier}" if tier >= 6 else "")
                if name in item_tier:
                    name = f"{name}_{i}"
                recipes[name] = _published_recipe(rng, tiers[domain], tier)
                tiers[domain][tier].append(name)
                item_tier[name] = tier
    for name, (tier, domains) in _CROSS.items():
        ingredients = {}
        for domain in domains:
            item = rng.choice(tiers[domain][tier - 3])  # the item is drawn before its quantity
            ingredients[item] = rng.randint(1, 2)
        recipes[name] = Recipe(ingredients, 1)
        item_tier[name] = tier
    return CraftWorld(tuple(item_tier), tuple(item_tier.values()), recipes)


def _published_recipe(rng: random.Random, tiers: dict[int, list[str]], tier: int) -> Recipe:
    pool = [(item, tier - t) for t in range(max(0, tier - 2), tier) for item in tiers[t]]
    if tier >= 4:
        far = rng.choice(list(range(max(0, tier - 4), tier - 2)))
        pool.append((rng.choice(tiers[far]), tier - far))
    wanted = _BASE_INGREDIENTS[tier] + rng.randint(0, min(2, tier // 3))
    names = _weighted_draw(rng, pool, min(wanted, len(pool), MAX_INGREDIENTS))
    # A name that is drawn twice overwrites its quantity: some recipes end with fewer ingredients.
    ingredients = {name: rng.randint(1, 2 if tier <= 4 else 1) for name in names}
    low, high = _YIELDS.get(tier, (1, 1))
    return Recipe(ingredients, rng.randint(low, high))


def _weighted_draw(rng: random.Random, pool: Sequence[tuple[str, int]], count: int) -> list[str]:
    """``count`` places of the pool without replacement, weight 1 / (distance + 1)."""
    remaining, drawn = list(pool), []
    for _ in range(count):
        weights = [1.0 / (distance + 1) for _, distance in remaining]
        mark = rng.random() * sum(weights)
        totals = itertools.accumulate(weights)
        # Summed in order and compared with >=: the draw must fall as it did in the released data.
        place = next((i for i, total in enumerate(totals) if total >= mark), len(remaining) - 1)
        drawn.append(remaining.pop(place)[0])
    return drawn


def toy_world(
    seed: int,
    *,
    domains: int = 2,
    max_tier: int = 3,
    items_per_tier: int = 5,
    base_items: int | None = None,
    ingredients: Sequence[tuple[int, int]] = ((1, 1), (2, 2), (2, 2)),
    quantities: tuple[int, int] = (1, 2),
    yields: tuple[int, int] = (1, 2),
) -> CraftWorld:
    """A small world with one-word names such as ``a2c``: domain a, tier 2, third item.

    Args:
      seed: Fixes the recipe book.
      domains: Independent families of items.
      max_tier: Highest tier; base items are tier 0.
      items_per_tier: Items of each domain and tier.
      base_items: Base items of each domain; by default as many as ``items_per_tier``.
      ingredients: (fewest, most) ingredients by tier from 1; the last entry serves all higher tiers.
      quantities: (fewest, most) units of an ingredient for one execution.
      yields: (fewest, most) units that one execution makes.
    """
    base_items = items_per_tier if base_items is None else base_items
    if not all(1 <= size <= 26 for size in (items_per_tier, domains, base_items)):
        raise ValueError(
            f"items_per_tier={items_per_tier}, domains={domains}, base_items={base_items}: "
            "names are letters, 1 to 26 of each"
        )
    rng = random.Random(f"toy-{seed}")
    letters = "abcdefghijklmnopqrstuvwxyz"
    names: list[str] = []
    tier_of: list[int] = []
    recipes: dict[str, Recipe] = {}
    for d in range(domains):
        by_tier: list[list[str]] = []
        for tier in range(max_tier + 1):
            size = base_items if tier == 0 else items_per_tier
            items = [f"{letters[d]}{tier}{letters[i]}" for i in range(size)]
            for name in items if tier else ():
                low, high = ingredients[min(tier, len(ingredients)) - 1]
                # At least one ingredient is of the tier below: the tier is the depth of the recipe.
                first = rng.choice(by_tier[tier - 1])
                pool = [x for t in by_tier[max(0, tier - 2) : tier] for x in t if x != first]
                extra = rng.sample(pool, min(rng.randint(low, high) - 1, len(pool)))
                recipes[name] = Recipe(
                    {item: rng.randint(*quantities) for item in (first, *extra)}, rng.randint(*yields)
                )
            by_tier.append(items)
            names += items
            tier_of += [tier] * len(items)
    return CraftWorld(tuple(names), tuple(tier_of), recipes)
