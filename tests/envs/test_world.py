"""Worlds, records, tasks and the planner, against the published data."""

import collections
import json
import os
import random
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from envs.textcraft import tasks as T
from envs.textcraft.generate import published_world, toy_world
from envs.textcraft.oracle import Mistakes, OracleAgent, PlanError, plan, write_rubric, write_score
from envs.textcraft.play import drive, find_task
from envs.textcraft.state import CraftAction, CraftState, Outcome, craft
from envs.textcraft.structured import StructuredTextCraft
from envs.textcraft.world import MAX_INGREDIENTS, CraftWorld, Recipe

WORLD = published_world()
RECORDS = (*T.records("train"), *T.records("val"))


def test_the_published_graph():
    assert (len(WORLD.names), len(WORLD.recipes), len(WORLD.base_items)) == (1452, 1402, 50)
    tiers = collections.Counter(WORLD.tiers)
    want = [50, 125, 125, 120, 120, 120, 115, 115, 115, 110, 114, 114, 109]
    assert [tiers[t] for t in range(13)] == want
    assert WORLD.names[:2] == ("m0_ore", "m1_ore") and "m0_i6_6_10" in WORLD.index
    assert max(len(r.ingredients) for r in WORLD.recipes.values()) == 6


def test_every_step_of_every_gold_plan_is_a_recipe_of_the_generated_graph():
    steps, seen = 0, set()
    for task in RECORDS:
        for item, executions, ingredients, made in task.data.gold:
            recipe = WORLD.recipes[item]
            assert ingredients == {n: q * executions for n, q in recipe.ingredients.items()}
            assert made == recipe.yields * executions
            steps += 1
            seen.add(item)
    assert (len(RECORDS), steps, max(len(t.data.gold) for t in RECORDS)) == (3154, 202_814, 549)
    # The plans show 1,386 of the 1,402 recipes; the others are of items of tier 1.
    assert len(seen) == 1386 and {WORLD.tier(item) for item in set(WORLD.recipes) - seen} == {1}


def test_splits():
    count = lambda name: len(T.split(name))
    assert count("train_medium") == 852 and count("test") == 632 and count("dev") == 100
    assert [count(f"test_{t}") for t in T.TIERS] == [147, 213, 136, 136]
    # 588, 544 and 538 records less the 34, 33 and 33 of dev.
    assert [count(f"train_{t}") for t in T.TIERS] == [554, 852, 511, 505]
    published = collections.Counter(task.tier for task in T.records("train"))
    assert [published[t] for t in T.TIERS] == [588, 852, 544, 538]
    dev = collections.Counter(task.tier for task in T.split("dev"))
    assert dev == {"easy": 34, "hard": 33, "extreme": 33}
    train = {task.id for task in T.split("train_all")}
    assert not train & T.dev_ids() and len(train) == 2422
    assert {task.id for task in T.split("dev")} == T.dev_ids()
    assert not {task.id for task in T.split("test")} & (train | T.dev_ids())
    by_tier = [{task.id for task in T.split(f"train_{t}")} for t in T.TIERS]
    assert set.union(*by_tier) == train and sum(map(len, by_tier)) == 2422
    targets = lambda name: {item for task in T.split(name) for item in task.goal.targets}
    assert not (targets("train_all") | targets("dev")) & targets("test")
    for bad in ("val", "train", "test_huge", "dev_easy"):
        with pytest.raises(ValueError, match=f"split '{bad}': dev, test"):
            T.split(bad)


# --- all gold plans in one vmapped run -------------------------------------------------------------

LIMIT = 32  # steps of one segment of a plan


def segments():
    """Every plan cut into segments of 32 steps, each with the inventory that it starts from.

    A segment starts where the one before it must end, and the test compares all ends, so the segments
    together are the whole plan.
    """
    starts, actions, ends, wanted = [], [], [], []
    size = len(WORLD.names)
    for task in RECORDS:
        inventory = WORLD.inventory(task.data.inventory)
        gold = task.data.gold
        for low in range(0, len(gold), LIMIT):
            part = gold[low : low + LIMIT]
            target = np.zeros(LIMIT, np.int32)
            count = np.zeros(LIMIT, np.int32)
            item = np.full((LIMIT, MAX_INGREDIENTS), -1, np.int32)
            amount = np.zeros((LIMIT, MAX_INGREDIENTS), np.int32)
            starts.append(inventory.copy())
            for s, (name, _, ingredients, made) in enumerate(part):
                target[s], count[s] = WORLD.index[name], made
                for j, (ingredient, units) in enumerate(ingredients.items()):
                    item[s, j], amount[s, j] = WORLD.index[ingredient], units
                    inventory[WORLD.index[ingredient]] -= units
                inventory[target[s]] += made
            actions.append((target, count, item, amount))
            ends.append(inventory.copy())
            wanted.append(len(part))
        ((name, units),) = task.goal.targets.items()
        # Success is a net increment, and a task starts with base items alone.
        assert all(WORLD.tier(item) == 0 for item in task.data.inventory)
        assert inventory[WORLD.index[name]] >= units and inventory.min() >= 0
    assert size == len(starts[0])
    columns = [np.stack(x) for x in zip(*actions, strict=True)]
    return np.stack(starts), CraftAction(*columns), np.stack(ends), np.array(wanted)


@pytest.fixture(scope="module")
def all_plans():
    return segments()


def test_every_gold_plan_replays_to_success_in_one_vmapped_run(all_plans):
    starts, actions, ends, wanted = all_plans
    tables = jax.tree.map(jnp.asarray, WORLD.tables)

    @jax.jit
    @jax.vmap
    def replay(inventory, actions):
        def step(state, action):
            state, code = craft(tables, state, action)
            return state, code

        state, codes = jax.lax.scan(step, CraftState(inventory, jnp.array(False)), actions)
        return state.inventory, codes

    begin = time.perf_counter()
    # Chunks of one shape bound the memory of the scatters.
    chunk, results = 512, []
    pad = -len(starts) % chunk
    padded = jax.tree.map(lambda x: np.concatenate([x, x[:pad]]), (starts, actions))
    for low in range(0, len(padded[0]), chunk):
        part = jax.tree.map(lambda x, low=low: x[low : low + chunk], padded)
        results.append(jax.tree.map(np.asarray, replay(*part)))
    inventory = np.concatenate([r[0] for r in results])[: len(starts)]
    codes = np.concatenate([r[1] for r in results])[: len(starts)]
    print(f"{len(RECORDS)} plans, {wanted.sum()} crafts: {time.perf_counter() - begin:.1f} s")
    live = np.arange(LIMIT)[None] < wanted[:, None]
    assert np.all(codes[live] == Outcome.OK)
    # The rest of a segment asks for 0 units and is refused.
    assert np.all(codes[~live] == Outcome.COUNT)
    np.testing.assert_array_equal(inventory, ends)


def test_wrong_variants_of_every_plan_are_refused_with_their_code(all_plans):
    starts, actions, _, _ = all_plans
    tables = jax.tree.map(jnp.asarray, WORLD.tables)
    first = CraftAction(*[jnp.asarray(column[:, 0]) for column in actions])
    states = CraftState(jnp.asarray(starts), jnp.zeros(len(starts), bool))
    run = jax.jit(jax.vmap(lambda s, a: craft(tables, s, a)))

    # One unit short: the inventory holds one less of the first ingredient than is needed.
    row = jnp.arange(len(starts))
    short = states.inventory.at[row, first.ingredient[:, 0]].set(first.quantity[:, 0] - 1)
    after, codes = run(CraftState(short, states.done), first)
    assert np.all(codes == Outcome.SHORT)
    np.testing.assert_array_equal(after.inventory, short)

    # A wrong multiple: one unit more than the yield allows, where the yield is more than one.
    yields = tables.yields[first.target]
    many = np.asarray(yields > 1)
    firsts = np.cumsum([0, *(-(-len(task.data.gold) // LIMIT) for task in RECORDS)])[:-1]
    assert np.all(many[firsts])  # the first craft of each record is of tier 1, which makes 2 to 4
    codes = np.asarray(run(states, first._replace(count=first.count + 1))[1])
    assert np.all(codes[many] == Outcome.MULTIPLE)
    # Twice the units from the same ingredients: a right multiple, a wrong amount.
    codes = np.asarray(run(states, first._replace(count=2 * first.count))[1])
    assert np.all(codes == Outcome.AMOUNT)

    # An extra ingredient: the target itself is never its own ingredient.
    free = jnp.argmax(first.ingredient == -1, axis=1)
    extra = first._replace(
        ingredient=first.ingredient.at[row, free].set(first.target),
        quantity=first.quantity.at[row, free].set(1),
    )
    assert np.all(run(states, extra)[1] == Outcome.EXTRA)
    # A missing one: the first place emptied.
    fewer = first._replace(ingredient=first.ingredient.at[:, 0].set(-1))
    assert np.all(run(states, fewer)[1] == Outcome.MISSING)


# --- toy worlds and tasks ----------------------------------------------------------------------------


DIGEST = """
import json
from envs.textcraft.generate import published_world, toy_world
from envs.textcraft.tasks import ToyTasks, dev_ids
toy = toy_world(3, domains=2, max_tier=4, items_per_tier=6)
tasks = ToyTasks(toy, tiers=(2, 3), counts=(1, 2), seed=5)
drawn = [tasks.task(pair, name) for pair in tasks.trained for name in ("x", "y")]
books = [
    [[n, list(r.ingredients.items()), r.yields] for n, r in world.recipes.items()]
    for world in (toy, published_world())
]
starts = [[task.id, list(task.data.inventory.items())] for task in drawn]
print(json.dumps([books, tasks.trained, tasks.unseen, starts, sorted(dev_ids())]))
"""


def test_worlds_and_tasks_are_the_same_in_every_process():
    outputs = set()
    for seed in ("0", "1", "77"):
        env = {**os.environ, "PYTHONHASHSEED": seed}
        result = subprocess.run([sys.executable, "-c", DIGEST], capture_output=True, text=True, env=env)
        assert result.returncode == 0, result.stderr
        outputs.add(result.stdout)
    (output,) = outputs
    books, trained, _, starts, dev = json.loads(output)
    # 2 domains x 4 tiers x 6 items; 80 % of 2 domains x 2 tiers x 6 items x 2 counts = 38.4.
    assert [len(book) for book in books] == [48, 1402]
    assert (len(trained), len(starts), len(dev)) == (38, 76, 100)
    here = [[n, [[*i] for i in r.ingredients.items()], r.yields] for n, r in WORLD.recipes.items()]
    assert books[1] == here


def test_toy_tasks_split_pairs_and_hold_enough():
    world = toy_world(0)
    toy = T.ToyTasks(world, tiers=(2, 3), counts=(1, 2), unseen_fraction=0.2)
    # 2 domains x 2 tiers x 5 items x 2 counts = 40 pairs, a fifth of them unseen.
    assert (len(toy.trained), len(toy.unseen)) == (32, 8)
    assert not set(toy.trained) & set(toy.unseen)
    for pair in (*toy.trained, *toy.unseen):
        a, b = toy.task(pair, "a"), toy.task(pair, "b")
        assert a.id != b.id and a == toy.task(pair, "a")
        plan(world, a.data.inventory, a.goal.targets)  # raises without a plan
    with pytest.raises(ValueError, match=r"tiers=\(9,\): the world has no craftable item"):
        T.ToyTasks(world, tiers=(9,), counts=(1,))
    with pytest.raises(ValueError, match=r"counts=\(1, 0\): positive integers are expected"):
        T.ToyTasks(world, tiers=(2,), counts=(1, 0))
    with pytest.raises(ValueError, match=r"unseen_fraction=1.0: 0 or more and less than 1"):
        T.ToyTasks(world, tiers=(2,), counts=(1,), unseen_fraction=1.0)


def test_base_needs_ignore_yields():
    world = CraftWorld(
        ("ore", "bar", "tool"),
        (0, 1, 2),
        {"bar": Recipe({"ore": 2}, 4), "tool": Recipe({"bar": 3, "ore": 1}, 1)},
    )
    # 2 tools: 6 bars as if each took 2 ore = 12, and 2 ore: 14.
    assert T.base_needs(world, "tool", 2) == {"ore": 14}


def test_bad_worlds_are_refused():
    with pytest.raises(ValueError, match="names: every item is expected once"):
        CraftWorld(("a", "a"), (0, 0), {})
    with pytest.raises(ValueError, match=r"recipe of 'a': unknown items \['b'\]"):
        CraftWorld(("a",), (0,), {"a": Recipe({"b": 1}, 1)})
    with pytest.raises(ValueError, match="1 to 6 ingredients are expected, got 0"):
        CraftWorld(("a",), (0,), {"a": Recipe({}, 1)})
    with pytest.raises(ValueError, match="inventory: unknown item 'x'"):
        WORLD.inventory({"x": 1})
    with pytest.raises(ValueError, match="inventory: -1 of 'm0_ore', 0 or more are expected"):
        WORLD.inventory({"m0_ore": -1})
    with pytest.raises(ValueError, match="tiers: one for each of 2 items is expected, got 1"):
        CraftWorld(("a", "b"), (0,), {})
    with pytest.raises(ValueError, match="recipe of 'b': yields=0, at least 1 is expected"):
        CraftWorld(("a", "b"), (0, 1), {"b": Recipe({"a": 1}, 0)})
    with pytest.raises(ValueError, match="recipe of 'b': 0 a, at least 1 is expected"):
        CraftWorld(("a", "b"), (0, 1), {"b": Recipe({"a": 0}, 1)})
    with pytest.raises(ValueError, match="ingredient 'b' of tier 1, a tier below 1 is expected"):
        CraftWorld(("a", "b"), (0, 1), {"b": Recipe({"b": 1}, 1)})
    for name in ("items_per_tier", "domains", "base_items"):
        with pytest.raises(ValueError, match=f"{name}=27.*names are letters, 1 to 26 of each"):
            toy_world(0, **{name: 27})
    assert len(toy_world(0, base_items=3).base_items) == 2 * 3  # two domains


# --- planner and scripted agent ------------------------------------------------------------------------


def test_a_plan_uses_what_is_there_and_keeps_the_targets():
    world = CraftWorld(
        ("ore", "bar", "tool"),
        (0, 1, 2),
        {"bar": Recipe({"ore": 2}, 4), "tool": Recipe({"bar": 3, "ore": 1}, 1)},
    )
    # One more tool on top of the one there: 3 bars, 1 held: 2 missing, one execution of 4.
    crafts = plan(world, {"ore": 5, "bar": 1, "tool": 1}, {"tool": 1})
    assert [c.command() for c in crafts] == ["craft 4 bar : 2 ore .", "craft 1 tool : 3 bar 1 ore ."]
    with pytest.raises(PlanError, match="3 ore are needed, 2 are there"):
        plan(world, {"ore": 2, "bar": 1}, {"tool": 1})


def test_the_planner_solves_every_published_task():
    crafts, below = 0, 0
    for task in RECORDS:
        held = collections.Counter(task.data.inventory)
        gold = {item: made for item, _, _, made in task.data.gold}
        planned = plan(WORLD, task.data.inventory, task.goal.targets)
        for c in planned:
            recipe = WORLD.recipes[c.item]
            times, rest = divmod(c.units, recipe.yields)
            assert rest == 0 and times >= 1
            assert c.ingredients == {n: q * times for n, q in recipe.ingredients.items()}
            held.subtract(c.ingredients)
            assert all(held[n] >= 0 for n in c.ingredients), (task.id, c)
            held[c.item] += c.units
        ((name, units),) = task.goal.targets.items()
        assert held[name] >= units
        # The same items as the published plan, each once, and never more units of one.
        made = {c.item: c.units for c in planned}
        assert len(made) == len(planned) and made.keys() == gold.keys()
        assert all(made[item] <= gold[item] for item in gold)
        crafts, below = crafts + len(planned), below + (made != gold)
    # The published plans make more than is needed of some item in 1,536 of the 3,154 tasks.
    assert (crafts, below) == (202_814, 1536)


@pytest.mark.parametrize(("tier", "number"), [("easy", 147), ("medium", 213)])
@pytest.mark.parametrize("style", ["compact", "prose"])
def test_the_scripted_agent_solves_the_test_tasks(tier, number, style):
    env = StructuredTextCraft(WORLD, style)
    agent = OracleAgent(WORLD, launch_probability=0.5)
    played = [drive(env, task, agent.reply) for task in T.split(f"test_{tier}")]
    assert sum(p.success for p in played) == len(played) == number
    assert sum(p.launches for p in played) > 100
    assert max(p.longest for p in played) <= 20 and max(p.deepest for p in played) <= 3


def test_mistakes_cost_success():
    world = toy_world(0)
    toy = T.ToyTasks(world, tiers=(2, 3), counts=(1, 2))
    env = StructuredTextCraft(world)

    def success(rate):
        agent = OracleAgent(world, blind=True, launch_probability=0.5, mistakes=Mistakes.of_rate(rate))
        tasks = [toy.task(pair, str(i)) for pair in toy.trained for i in range(4)]
        return np.mean([drive(env, t, agent.reply, max_turns=8, max_depth=2).success for t in tasks])

    assert success(0.0) > 0.97
    assert 0.1 < success(0.1) < 0.8


def test_rubrics_and_scores_of_the_demonstrator():
    rng = random.Random(0)
    rubric = write_rubric({"x": 2}, 8, rng, good=1.0)
    assert rubric.startswith("have 2 x w 6 ; made x w 2 ; turns ")
    assert all("have 2 x w 6" not in write_rubric({"x": 2}, 8, rng, good=0.0) for _ in range(20))
    evidence = "net 1 x ; made 1 x ; turns 3 ; said done ;"
    assert write_score(["have 2 x", "made x"], "said done", evidence) == "n y gate y ."
    with pytest.raises(ValueError, match="no program grade"):
        write_score(["be kind"], "said done", evidence)


def test_play_finds_tasks_and_refuses_others():
    _, task = find_task("test:67")
    assert task.id == "textcraft_synth.val.67"
    for bad, message in (
        ("test", "SPLIT:NUMBER is expected"),
        ("test:9999", "test has 632 tasks"),
        ("test:-1", "SPLIT:NUMBER is expected"),
        ("nowhere:1", "split 'nowhere': dev, test, test_<tier>"),
        ("toy:40", "toy has 40 tasks, counted from 0"),
    ):
        with pytest.raises(ValueError, match=message):
            find_task(bad)


def test_the_play_command():
    command = [sys.executable, "-m", "envs.textcraft.play", "--task"]
    result = subprocess.run([*command, "toy:3", "--agent", "oracle"], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1].startswith("Success: Played(success=True, nodes=")
    assert "> finish done ." in result.stdout
    # A person who stops; three steps are answered before.
    typed = "have .\ndance .\ncraft 1 x : 1 y .\n"
    result = subprocess.run([*command, "toy:3"], capture_output=True, text=True, input=typed)
    assert result.returncode == 1 and "Stopped before the end of the task." in result.stderr
    assert "Inventory: " in result.stdout and "'dance' is not a command" in result.stdout
    assert "Error: unknown item x, y." in result.stdout and "Traceback" not in result.stderr
    result = subprocess.run([*command, "toy:x"], capture_output=True, text=True)
    assert result.returncode == 2 and "SPLIT:NUMBER is expected" in result.stderr
