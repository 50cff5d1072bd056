"""State, structured protocol, evidence: literal states and texts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.base import LaunchRequest, Task, World
from envs.textcraft.generate import toy_world
from envs.textcraft.grading import Evidence, grade, parse_evidence
from envs.textcraft.state import (
    CraftAction,
    CraftState,
    Outcome,
    craft,
    craft_host,
    initial_state,
    make_action,
)
from envs.textcraft.structured import StructuredTextCraft
from envs.textcraft.tasks import CraftTask, goal_of
from envs.textcraft.world import CraftWorld, Recipe

# Two executions of bar make 8 from 4 ore; a tool takes 3 bars and 1 ore.
WORLD = CraftWorld(
    ("ore", "wood", "bar", "tool"),
    (0, 0, 1, 2),
    {"bar": Recipe({"ore": 2}, 4), "tool": Recipe({"bar": 3, "ore": 1}, 1)},
)
HELD = {"ore": 5, "wood": 1, "bar": 3}


def env(style="compact"):
    return StructuredTextCraft(WORLD, style)


def opened(style="compact", goal=None, depth=0, max_depth=3, held=HELD):
    e = env(style)
    world = e.reset(Task("t", "easy", goal_of(goal or {"tool": 1}), CraftTask(held)))
    return e, world, e.open(world, goal_of(goal or {"tool": 1}), depth, max_depth, 20)


def say(e, world, view, reply, answers=()):
    """Plays one reply; returns launches and the outcome."""
    view.turn += 1
    turn, launched = e.turn(view, world, reply), ()
    try:
        request = next(turn)
        assert isinstance(request, LaunchRequest)
        launched = request.goals
        turn.send(list(answers))
    except StopIteration as stop:
        return launched, stop.value
    raise AssertionError("a turn launches once")


CASES = [
    ("craft 8 bar : 4 ore .", Outcome.OK, "ok ;", "Crafted 8 bar."),
    (
        "craft 0 bar : 4 ore .",
        Outcome.COUNT,
        "err count ;",
        "Error: 0 units of bar: a positive number is expected.",
    ),
    ("craft 4 bat : 2 ore .", Outcome.UNKNOWN, "err unknown ;", "Error: unknown item bat."),
    ("craft 4 bar : 2 oar .", Outcome.UNKNOWN, "err unknown ;", "Error: unknown item oar."),
    (
        "craft 4 bar : 0 ore .",
        Outcome.QUANTITY,
        "err quantity ;",
        "Error: 0 ore: positive amounts are expected.",
    ),
    (
        "craft 1 ore : 1 wood .",
        Outcome.BASE,
        "err base ;",
        "Error: ore is a raw material; nothing makes it.",
    ),
    (
        "craft 3 bar : 2 ore .",
        Outcome.MULTIPLE,
        "err multiple ;",
        "Error: bar comes 4 at a time; 3 is not a multiple of that.",
    ),
    ("craft 1 tool : 3 bar .", Outcome.MISSING, "err missing ;", "Error: the recipe also needs 1 ore."),
    ("craft 8 bar : 2 ore .", Outcome.AMOUNT, "err amount ;", "Error: 8 bar needs exactly 4 ore, not 2."),
    (
        "craft 4 bar : 2 ore 1 wood .",
        Outcome.EXTRA,
        "err extra ;",
        "Error: the recipe of bar does not use wood.",
    ),
    (
        "craft 12 bar : 6 ore .",
        Outcome.SHORT,
        "err short ;",
        "Error: the inventory lacks 6 ore (there are 5).",
    ),
]


@pytest.mark.parametrize(("command", "outcome", "compact", "prose"), CASES)
def test_every_craft_outcome_has_its_code_and_texts(command, outcome, compact, prose):
    for style, text in (("compact", compact), ("prose", prose)):
        e, world, view = opened(style)
        before = world.state
        _, result = say(e, world, view, command)
        assert result.observation == text and result.code == f"craft_{outcome.name.lower()}"
        changed = not np.array_equal(world.state.inventory, before.inventory)
        assert changed == (outcome == Outcome.OK)
    if outcome == Outcome.OK:
        assert WORLD.counts(world.state.inventory) == {"ore": 1, "wood": 1, "bar": 11}


def test_the_world_refuses_steps_after_its_end():
    e, world, view = opened()
    _, result = say(e, world, view, "finish done .")
    assert result.finished and result.message == "done"
    _, result = say(e, world, view, "craft 4 bar : 2 ore .")
    assert result.observation == "err over ;" and result.code == "craft_done"
    e, world, view = opened("prose")
    say(e, world, view, "finish done .")
    _, result = say(e, world, view, "craft 4 bar : 2 ore .")
    assert result.observation == "Error: the task is over; nothing can be crafted any more."


@pytest.mark.parametrize(
    ("reply", "code", "compact"),
    [
        ("", "malformed", "err form ;"),
        ("dance .", "malformed", "err form ;"),
        ("craft bar : 2 ore .", "malformed", "err form ;"),
        ("craft 4 bar .", "malformed", "err form ;"),
        ("craft four bar : 2 ore .", "malformed", "err form ;"),
        ("craft 4 bar : 2 ore 2 ore .", "malformed", "err form ;"),
        ("craft 4 bar : ore 2 .", "malformed", "err form ;"),
        ("craft 4 bar : " + " ".join(f"1 x{i}" for i in range(7)) + " .", "malformed", "err form ;"),
        ("info .", "malformed", "err form ;"),
        ("launch .", "malformed", "err form ;"),
        ("launch 0 bar .", "malformed", "err form ;"),
        ("launch 2.0 bar .", "malformed", "err form ;"),
        ("launch -1 bar .", "malformed", "err form ;"),
        ("launch 1 bar , 2 .", "malformed", "err form ;"),
        ("launch 1 ore .", "launch_target", "err target ;"),
        ("launch 1 bat .", "launch_target", "err target ;"),
    ],
)
def test_what_is_malformed_is_answered_and_launches_nothing(reply, code, compact):
    for style in ("compact", "prose"):
        e, world, view = opened(style)
        launched, result = say(e, world, view, reply)
        assert result.code == code and not launched and not result.finished
        assert (
            result.observation == compact
            if style == "compact"
            else result.observation.startswith("Error: ")
        )


def test_queries():
    e, world, view = opened()
    assert say(e, world, view, "info tool .")[1].observation == "tool : 3 bar 1 ore ; makes 1 ;"
    assert say(e, world, view, "info ore .")[1].observation == "ore base ;"
    assert say(e, world, view, "info bat .")[1].observation == "err unknown ;"
    for reply in ("info tool", "info tool.", "  info  tool ."):
        assert say(e, world, view, reply)[1].observation == "tool : 3 bar 1 ore ; makes 1 ;"
    assert say(e, world, view, "have .")[1].observation == "have 5 ore 1 wood 3 bar ;"
    e, world, view = opened("prose")
    assert (
        say(e, world, view, "I look.\ninfo tool .")[1].observation
        == "One execution turns 3 bar, 1 ore into 1 tool."
    )
    assert say(e, world, view, "info bat .")[1].observation == "There is no item called bat."
    assert say(e, world, view, "have .")[1].observation == "Inventory: 5 ore, 1 wood, 3 bar."


def test_launches_are_structured_and_reports_come_back():
    e, world, view = opened()
    launched, result = say(
        e, world, view, "launch 4 bar , 1 tool .", ["4 bar said done ;", "1 tool stop turns ;"]
    )
    assert [g.targets for g in launched] == [{"bar": 4}, {"tool": 1}]
    assert result.observation == "4 bar said done ; 1 tool stop turns ;" and result.code == "launch"


def test_a_launch_beyond_the_depth_limit_is_refused():
    e, world, view = opened(depth=3)
    launched, result = say(e, world, view, "launch 4 bar .")
    assert not launched and (result.observation, result.code) == ("err depth ;", "launch_depth")
    e, world, view = opened("prose", depth=3)
    text = say(e, world, view, "launch 4 bar .")[1].observation
    assert text == "Error: you are at the depth limit and cannot launch; do the work yourself."
    assert "launch" not in e.prompt(view, world)[0][1]


def test_launch_spans():
    assert env().launch_spans("launch 4 bar .") == ((0, 14),)
    text = "launch it, I say\nso:\n  launch 4 bar , 1 tool .\n"
    ((low, high),) = env("prose").launch_spans(text)
    assert text[low:high] == "launch 4 bar , 1 tool ."
    assert env().launch_spans("craft 4 bar : 2 ore .") == ()
    assert env().launch_spans("launch 4 bar .\nhave .") == ()  # only the last line is a command


@pytest.mark.parametrize(
    "pattern", [["have ."], ["have .", "info ore ."], ["have .", "info ore .", "info bar ."]]
)
def test_the_loop_guard(pattern):
    e, world, view = opened()
    codes = [say(e, world, view, reply)[1].code for reply in pattern * 4]
    assert codes[-1] == "loop" and "loop" not in codes[:-1]


def test_verifier_is_a_net_increment_with_a_message():
    e, world, view = opened(goal={"bar": 4})
    assert not e.verify(view, world, "done")  # 3 bars were there before
    say(e, world, view, "craft 4 bar : 2 ore .")
    assert e.verify(view, world, "done") and not e.verify(view, world, "  ")
    # Using them up again counts against it; a node opened now has its own baseline.
    child = e.open(world, goal_of({"bar": 4}), 1, 3, 20)
    assert not e.verify(child, world, "done")
    say(e, world, view, "craft 1 tool : 3 bar 1 ore .")
    assert not e.verify(view, world, "done")


def test_evidence_shows_amounts_and_no_verdict():
    e, world, view = opened(goal={"bar": 4}, depth=1)
    say(e, world, view, "craft 4 bar : 2 ore .")
    child = e.open(world, goal_of({"tool": 1}), 2, 3, 20)
    child.memory["made"]["tool"] = 1
    child.turn = 2
    assert e.child_report(view, child, "done", "finished") == "1 tool said done ;"
    text = e.evidence(view, world, "finished", "done indeed")
    assert text == "net 4 bar ; made 4 bar 1 tool ; turns 1 ; said done ;"
    assert parse_evidence(text) == Evidence({"bar": 4}, {"bar": 4, "tool": 1}, 1, "done")
    assert e.evidence(view, world, "turns", "").endswith("said nothing ;")
    assert e.child_report(view, child, "", "turns") == "1 tool stop turns ;"
    assert set(e.snapshot(view, world)) == {"inventory"}
    with pytest.raises(ValueError, match="not evidence"):
        parse_evidence("net 4 ; made none ;")


@pytest.mark.parametrize(
    ("criterion", "want"),
    [
        ("have 4 bar", 1.0),
        ("have 5 bar", 0.0),
        ("have 1 tool", 0.0),
        ("made bar", 1.0),
        ("made tool", 0.0),
        ("turns 3", 1.0),
        ("turns 2", 0.0),
        ("said done", 1.0),
        ("said fail", 0.0),
        ("be kind", None),
        ("have four bar", None),
    ],
)
def test_grades(criterion, want):
    assert grade(criterion, "net 4 bar ; made 4 bar ; turns 3 ; said done ;") == want


def test_prose_prompts_say_what_counts():
    e, world, view = opened("prose")
    (_, system), (_, user) = e.prompt(view, world)
    assert "on top of what the inventory already holds" in system and "launch N X , M Y ." in system
    assert "1 tool" in user and "20 steps" in user
    e, world, view = opened()
    assert e.prompt(view, world) == [("user", "goal 1 tool ; turns 20 ; depth 3 ;")]
    with pytest.raises(ValueError, match="style='loud': 'compact' or 'prose' is expected"):
        StructuredTextCraft(WORLD, "loud")


def test_the_vocabulary_holds_every_compact_word():
    e, _world, _view = opened()
    words = set(e.vocabulary())
    texts = [compact for _, _, compact, _ in CASES]
    texts += [
        "tool : 3 bar 1 ore ; makes 1 ;",
        "ore base ;",
        "have none ;",
        "4 bar said done ;",
        "stop turns",
    ]
    texts += [
        "have 2 bar w 6 ; made bar w 2 ; turns 4 w 2 ; gate have 2 bar .",
        "y n y gate y .",
        "score rubric goal",
    ]
    for text in texts:
        assert all(word in words or word.isdecimal() for word in text.split()), text


# --- arrays ------------------------------------------------------------------------------------------

TOY = toy_world(1)
CRAFTABLE = sorted(TOY.recipes)


@st.composite
def craft_actions(draw):
    """Mostly right crafts, sometimes bent."""
    item = draw(st.sampled_from(CRAFTABLE))
    recipe = TOY.recipes[item]
    times = draw(st.integers(0, 3))
    ingredients = {n: q * times for n, q in recipe.ingredients.items()}
    bend = draw(st.integers(0, 5))
    count = recipe.yields * times + (bend == 1)
    if bend == 2:
        ingredients[draw(st.sampled_from(TOY.names))] = draw(st.integers(-1, 3))
    if bend == 3:
        ingredients.pop(next(iter(ingredients)))
    return make_action(TOY, "nothing" if bend == 4 else item, count, ingredients)


TABLES = jax.tree.map(jnp.asarray, TOY.tables)
ON_DEVICE = jax.jit(lambda state, action: craft(TABLES, state, action))


@given(
    st.lists(st.integers(0, 6), min_size=len(TOY.names), max_size=len(TOY.names)),
    craft_actions(),
    st.booleans(),
)
@settings(max_examples=80, deadline=None)
def test_numpy_and_jax_step_alike(held, action, done):
    state = CraftState(np.array(held, np.int32), np.bool_(done))
    host, code = craft_host(TOY.tables, state, action)
    device, device_code = ON_DEVICE(state, action)
    assert int(device_code) == code
    np.testing.assert_array_equal(host.inventory, device.inventory)
    assert host.inventory.min() >= 0


@given(st.lists(st.lists(craft_actions(), max_size=5), min_size=8, max_size=8))
@settings(max_examples=20, deadline=None)
def test_clones_never_touch_each_other_or_the_parent(plans):
    parent = World(initial_state(TOY, dict.fromkeys(TOY.names, 4)))
    before = parent.state.inventory.copy()
    branches = [parent.clone() for _ in plans]
    # All branches advance in turns; each must end as if it had been alone.
    for step in range(5):
        for branch, plan in zip(branches, plans, strict=True):
            if step < len(plan):
                branch.state, _ = craft_host(TOY.tables, branch.state, plan[step])
    for branch, plan in zip(branches, plans, strict=True):
        alone = World(initial_state(TOY, dict.fromkeys(TOY.names, 4)))
        for action in plan:
            alone.state, _ = craft_host(TOY.tables, alone.state, action)
        np.testing.assert_array_equal(branch.state.inventory, alone.state.inventory)
    np.testing.assert_array_equal(parent.state.inventory, before)
    with pytest.raises(ValueError, match="read-only"):
        branches[0].state.inventory[0] = 9


def test_many_states_step_in_one_call():
    states = CraftState(jnp.full((3, len(TOY.names)), 4, jnp.int32), jnp.array([False, False, True]))
    item = CRAFTABLE[0]
    recipe = TOY.recipes[item]
    good = make_action(TOY, item, recipe.yields, dict(recipe.ingredients))
    bad = make_action(TOY, "nothing", 1, {})
    actions = CraftAction(*[jnp.stack(x) for x in zip(good, bad, good, strict=True)])
    after, codes = jax.vmap(lambda s, a: craft(TABLES, s, a))(states, actions)
    assert codes.tolist() == [Outcome.OK, Outcome.UNKNOWN, Outcome.DONE]
    assert int(after.inventory[0, TOY.index[item]]) == 4 + recipe.yields
    np.testing.assert_array_equal(after.inventory[1:], states.inventory[1:])


def test_more_than_six_ingredients_are_refused():
    with pytest.raises(ValueError, match="at most 6 are expected, got 7"):
        make_action(TOY, CRAFTABLE[0], 1, dict.fromkeys(TOY.names[:7], 1))
