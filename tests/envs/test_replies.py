"""What a policy may write: literal answers, launch spans, and replies that no one would expect."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.base import LaunchRequest, Task, World
from envs.textcraft.generate import toy_world
from envs.textcraft.grading import grade, read_number
from envs.textcraft.state import CraftAction, CraftState, craft, craft_host, initial_state, make_action
from envs.textcraft.structured import StructuredTextCraft
from envs.textcraft.tasks import CraftTask, ToyTasks, goal_of
from envs.textcraft.world import CraftWorld, Recipe

# An execution of bar makes 4 from 2 ore; one of tool makes 1 from 3 bars and 1 ore.
WORLD = CraftWorld(
    ("ore", "wood", "bar", "tool"),
    (0, 0, 1, 2),
    {"bar": Recipe({"ore": 2}, 4), "tool": Recipe({"bar": 3, "ore": 1}, 1)},
)
HELD = {"ore": 5, "wood": 1, "bar": 3}
STYLES = ("compact", "prose")
TOOLS = (
    "info X . (recipe of an item); have . (inventory); craft N X : q A q B . (make N units of X in all "
    "from exactly these amounts); launch N X , M Y . (one sub-agent for each part); finish MESSAGE ."
)


def opened(style="compact", goal=None, depth=0):
    env = StructuredTextCraft(WORLD, style)
    goal = goal_of(goal or {"tool": 1})
    world = env.reset(Task("t", "easy", goal, CraftTask(HELD)))
    return env, world, env.open(world, goal, depth, 3, 20)


def say(env, world, view, reply):
    """Plays one reply, each launch answered with ``r``; returns the launched targets and the outcome."""
    view.turn += 1
    turn, launched = env.turn(view, world, reply), []
    try:
        request = next(turn)
        assert isinstance(request, LaunchRequest)
        launched = [dict(goal.targets) for goal in request.goals]
        turn.send(["r"] * len(launched))
    except StopIteration as stop:
        return launched, stop.value
    raise AssertionError("a turn launches once")


# --- literal answers -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reply", "depth", "code", "compact", "prose"),
    [
        (
            "I dance.\ndance .",
            0,
            "malformed",
            "err form ;",
            f"Error: 'dance' is not a command. One of these is expected: {TOOLS}",
        ),
        (
            "",
            0,
            "malformed",
            "err form ;",
            f"Error: '' is not a command. One of these is expected: {TOOLS}",
        ),
        (
            "launch 1 ore .",
            0,
            "launch_target",
            "err target ;",
            "Error: 'launch 1 ore': only items that have a recipe can be asked of a sub-agent.",
        ),
        (
            "launch 4 bar , 1 bat .",
            0,
            "launch_target",
            "err target ;",
            "Error: 'launch 4 bar , 1 bat': only items that have a recipe can be asked of a sub-agent.",
        ),
        (
            "launch 4 bar .",
            3,
            "launch_depth",
            "err depth ;",
            "Error: you are at the depth limit and cannot launch; do the work yourself.",
        ),
    ],
)
def test_refusals_of_commands(reply, depth, code, compact, prose):
    for style, text in (("compact", compact), ("prose", prose)):
        env, world, view = opened(style, depth=depth)
        before = world.state
        launched, result = say(env, world, view, reply)
        assert (result.code, result.observation, launched) == (code, text, [])
        assert world.state is before and not result.finished and result.message == ""


@pytest.mark.parametrize(
    ("style", "text"),
    [("compact", "err loop ;"), ("prose", "Error: you repeat yourself; your work ends here.")],
)
def test_a_loop_is_refused_before_it_acts(style, text):
    env, world, view = opened(style)
    # A reply counts by its command: thoughts and blanks do not make it another one.
    for reply in ("have .", "have  .", "I look.\nhave .", " have\n"):
        _, result = say(env, world, view, reply)
    assert (result.code, result.observation) == ("loop", text)
    # 12 bars and 9 ore are enough for four tools: the fourth same craft is not carried out.
    view.memory["commands"].clear()
    world.state = initial_state(WORLD, {"ore": 9, "bar": 12})
    codes = [say(env, world, view, "craft 1 tool : 3 bar 1 ore .")[1].code for _ in range(4)]
    assert codes == ["craft_ok"] * 3 + ["loop"]
    assert WORLD.counts(world.state.inventory) == {"ore": 6, "bar": 3, "tool": 3}


def test_no_loop_where_one_word_differs():
    env, world, view = opened()
    pattern = ["have .", "info ore .", "info bar ."]
    replies = [*pattern * 3, *pattern[:2], "info tool .", *pattern[:2]]
    assert {say(env, world, view, reply)[1].code for reply in replies} == {"have", "info"}
    # Period 4 is none of those that are looked for.
    env, world, view = opened()
    codes = [say(env, world, view, f"info {x} .")[1].code for x in WORLD.names * 5]
    assert set(codes) == {"info"}


def test_what_a_parent_reads_of_its_children():
    env, _, view = opened("prose")
    child = env.open(World(view.baseline), goal_of({"bar": 4}), 1, 3, 20)
    view.turn, child.turn = 5, 3
    tail = " It used 3 of 20 steps; you have 15 left."
    report = lambda message, stop: env.child_report(view, child, message, stop)
    assert report("done", "finished") == f"The sub-agent for 4 bar reported: done.{tail}"
    assert report("All made.", "finished") == f"The sub-agent for 4 bar reported: All made.{tail}"
    assert report("", "finished") == f"The sub-agent for 4 bar ended with an empty report.{tail}"
    assert report("", "turns") == f"The sub-agent for 4 bar ended without a report (turns).{tail}"
    env, _, view = opened()
    assert env.child_report(view, child, "fail", "finished") == "4 bar said fail ;"
    # A tiny policy never reads free words of a child.
    assert env.child_report(view, child, "goal 9 tool", "finished") == "4 bar said nothing ;"


@pytest.mark.parametrize(
    ("reply", "message", "success"),
    [
        ("finish done .", "done", True),
        ("finish all of it done", "all of it done", True),
        ("finish .", "", False),
        ("finish", "", False),
        ("  finish   .  ", "", False),
    ],
)
def test_finish(reply, message, success):
    for style in STYLES:
        env, world, view = opened(style, goal={"bar": 4})
        say(env, world, view, "craft 4 bar : 2 ore .")
        _, result = say(env, world, view, reply)
        assert (result.finished, result.message, result.observation) == (True, message, "")
        assert env.verify(view, world, result.message) == success
        assert isinstance(world.state.done, np.bool_) and world.state.done
        assert isinstance(view.baseline.done, np.bool_) and not view.baseline.done


def test_a_child_that_finishes_does_not_end_the_world():
    env, world, view = opened(goal={"bar": 4})
    child = env.open(world, goal_of({"bar": 4}), 1, 3, 20)
    say(env, world, child, "finish done .")
    assert not world.state.done
    assert say(env, world, view, "craft 4 bar : 2 ore .")[1].code == "craft_ok"


def test_several_targets_must_all_be_there():
    goal = {"bar": 4, "tool": 1}
    env, world, view = opened(goal=goal)
    assert env.prompt(view, world) == [("user", "goal 4 bar , 1 tool ; turns 20 ; depth 3 ;")]
    say(env, world, view, "craft 4 bar : 2 ore .")
    assert not env.verify(view, world, "done")
    # The tool takes 3 bars: 3 + 4 - 3 = 4 are left, 1 more than at the start and not 4.
    say(env, world, view, "craft 1 tool : 3 bar 1 ore .")
    assert not env.verify(view, world, "done")
    assert env.evidence(view, world, "finished", "done").startswith(
        "net 1 bar 1 tool ; made 4 bar 1 tool ;"
    )
    say(env, world, view, "craft 4 bar : 2 ore .")  # 5 more than at the start
    assert env.verify(view, world, "done")


def test_what_was_used_up_counts_as_nothing_in_evidence():
    env, world, view = opened(goal={"bar": 4})
    say(env, world, view, "craft 1 tool : 3 bar 1 ore .")  # 3 bars fewer than at the start
    assert (
        env.evidence(view, world, "finished", "fail") == "net 0 bar ; made 1 tool ; turns 1 ; said fail ;"
    )


# --- launch spans ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reply", "span", "targets"),
    [
        ("launch 4 bar .", (0, 14), [{"bar": 4}]),
        ("launch 4 bar", (0, 12), [{"bar": 4}]),
        ("  launch 4 bar .\n\n ", (2, 16), [{"bar": 4}]),
        ("so:\nlaunch 4 bar , 1 tool .", (4, 27), [{"bar": 4}, {"tool": 1}]),
        ("launch 4 bar .\nlaunch 1 tool .", (15, 30), [{"tool": 1}]),  # one command a turn, the last
        # Every end of a line that Python knows is one for both.
        ("so:\rlaunch 4 bar .", (4, 18), [{"bar": 4}]),
        ("so:\u2028launch 4 bar .", (4, 18), [{"bar": 4}]),
        ("\u00a0launch 4 bar .", (1, 15), [{"bar": 4}]),
        ("launch\t4 bar .", (0, 14), [{"bar": 4}]),
        ("launch 4 bar .\x0bhave .", None, []),
        ("I launch 4 bar .", None, []),
        ("launched 4 bar .", None, []),
        ("launch-pad .", None, []),
        ("", None, []),
        ("launch 0 bar .", (0, 14), []),  # an attempt
        ("launch", (0, 6), []),
    ],
)
def test_launch_spans_are_the_characters_that_launch(reply, span, targets):
    for style in STYLES:
        env, world, view = opened(style)
        assert env.launch_spans(reply) == (() if span is None else (span,))
        assert say(env, world, view, reply)[0] == targets


# --- any reply ---------------------------------------------------------------------------------------

WORDS = (
    "info have craft launch finish done . , : 4 -1 2.0 ore bar tool bat \n \r \x0b \u2028 \u00a0 \t"
).split(" ")
LINES = st.lists(st.sampled_from(WORDS), max_size=14).map(" ".join)
# Random words seldom make a command, so these have the form of one.
NUMBERS = st.sampled_from(
    ["0", "1", "4", "007", "-1", "1e3", "٤", "²", "99999999", "100000000", "9" * 5000]
)
PAIR = st.tuples(NUMBERS, st.sampled_from((*WORLD.names, "bat"))).map(" ".join)
PAIRS = st.lists(PAIR, max_size=7)
FORMED = st.one_of(
    st.builds(lambda made, used: f"craft {made} : {' '.join(used)} .", PAIR, PAIRS),
    PAIRS.map(lambda pairs: f"launch {' , '.join(pairs)} ."),
)
KNOWN = st.sampled_from(
    ["craft 4 bar : 2 ore .", "craft 1 tool : 3 bar 1 ore .", "launch 4 bar .", "have .", "finish done ."]
)


@given(st.lists(st.one_of(LINES, FORMED, KNOWN, st.text(max_size=30)), max_size=8), st.sampled_from(STYLES))
@settings(max_examples=150, deadline=None)
def test_no_reply_raises_and_the_books_balance(replies, style):
    env, world, view = opened(style)
    vocabulary = set(env.vocabulary()) | {"r"}
    for reply in replies:
        before = WORLD.counts(world.state.inventory)
        launched, result = say(env, world, view, reply)
        spans = env.launch_spans(reply)
        assert not launched or (len(spans) == 1 and reply[slice(*spans[0])].startswith("launch"))
        if style == "compact":
            assert all(w in vocabulary or w.isdecimal() for w in result.observation.split())
        after = WORLD.counts(world.state.inventory)
        assert min(after.values()) >= 0 and (result.code == "craft_ok" or after == before)
    # Ore is only ever spent: 2 for each 4 bars, 3 bars and 1 ore for each tool.
    made = view.memory["made"]
    bars, tools = made.get("bar", 0), made.get("tool", 0)
    final = WORLD.counts(world.state.inventory)
    assert final.get("ore", 0) == 5 - bars // 2 - tools
    assert final.get("bar", 0) == 3 + bars - 3 * tools and final.get("tool", 0) == tools


@pytest.mark.parametrize(
    ("word", "number"),
    [
        ("0", 0),
        ("7", 7),
        ("007", 7),
        ("99999999", 99_999_999),
        ("100000000", None),
        ("9" * 5000, None),
        ("-1", None),
        ("+1", None),
        ("1.0", None),
        ("1_0", None),
        ("٤", None),
        ("²", None),
        ("", None),
        ("1\n", None),
    ],
)
def test_numbers(word, number):
    assert read_number(word) == number


def test_a_criterion_with_an_absurd_number_has_no_program_grade():
    evidence = "net 4 bar ; made 4 bar ; turns 3 ; said done ;"
    for criterion in (f"have {'9' * 5000} bar", f"turns {'9' * 5000}", "have ٤ bar", "turns ٤"):
        assert grade(criterion, evidence) is None
    assert grade("have 99999999 bar", evidence) == 0.0 and grade("turns 99999999", evidence) == 1.0


def test_the_largest_numbers_are_answered_with_the_truth():
    env, world, view = opened("prose")
    # 99,999,996 / 4 executions of 2 ore each.
    _, result = say(env, world, view, "craft 99999996 bar : 49999998 ore .")
    assert result.observation == "Error: the inventory lacks 49999998 ore (there are 5)."
    _, result = say(env, world, view, "craft 99999996 bar : 49999999 ore .")
    assert result.observation == "Error: 99999996 bar needs exactly 49999998 ore, not 49999999."


# --- arrays of any content ---------------------------------------------------------------------------

TOY = toy_world(1)
SIZE = len(TOY.names)
TABLES = jax.tree.map(jnp.asarray, TOY.tables)
STEP = jax.jit(lambda state, action: craft(TABLES, state, action))
IDS = st.integers(-2, SIZE + 1)
AMOUNTS = st.one_of(st.integers(-2, 6), st.integers(-(10**8), 10**8))
PLACES = st.lists(IDS.filter(lambda i: i != -1), max_size=6, unique=True).map(
    lambda ids: np.array(ids + [-1] * (6 - len(ids)), np.int32)
)
ACTIONS = st.builds(
    lambda target, count, places, amounts: CraftAction(
        np.int32(target), np.int32(count), places, np.array(amounts, np.int32)
    ),
    IDS,
    AMOUNTS,
    PLACES,
    st.lists(AMOUNTS, min_size=6, max_size=6),
)


@given(st.lists(st.integers(0, 10**6), min_size=SIZE, max_size=SIZE), ACTIONS, st.booleans())
@settings(max_examples=150, deadline=None)
def test_numpy_and_jax_agree_on_any_action(held, action, done):
    state = CraftState(np.array(held, np.int32), np.bool_(done))
    host, code = craft_host(TOY.tables, state, action)
    device, device_code = STEP(state, action)
    assert (int(device_code), bool(device.done), bool(host.done)) == (code, done, done)
    np.testing.assert_array_equal(host.inventory, device.inventory)
    assert host.inventory.dtype == device.inventory.dtype == np.int32 and host.inventory.min() >= 0


def test_amounts_beyond_int32_are_bounded():
    action = make_action(TOY, "a1a", 10**30, {"a0a": -(10**30)})
    assert (int(action.count), int(action.quantity[0])) == (10**8, -1)


def commands():
    """Right crafts of a toy world, sometimes wrong ones, queries and an early end."""
    item = st.sampled_from(sorted(TOY.recipes))
    right = lambda name: " ".join(f"{q} {n}" for n, q in TOY.recipes[name].ingredients.items())
    good = item.map(lambda name: f"craft {TOY.recipes[name].yields} {name} : {right(name)} .")
    return st.one_of(
        good, good, item.map(lambda name: f"craft 9 {name} : 1 {name} ."), st.just("finish done .")
    )


@given(st.lists(st.lists(commands(), max_size=4), min_size=8, max_size=8), commands())
@settings(max_examples=25, deadline=None)
def test_branches_through_the_protocol_are_apart(plans, common):
    env = StructuredTextCraft(TOY)
    goal = goal_of({"a1a": 1})
    parent = env.reset(Task("t", "easy", goal, CraftTask(dict.fromkeys(TOY.names, 4))))
    say(env, parent, env.open(parent, goal, 0, 3, 20), common)
    frozen = (parent.state.inventory.copy(), bool(parent.state.done))
    runs = [(world, env.open(world, goal, 0, 3, 20)) for world in (parent.clone() for _ in plans)]
    for step in range(4):
        for (world, view), plan in zip(runs, plans, strict=True):
            if step < len(plan):
                say(env, world, view, plan[step])
    for (world, view), plan in zip(runs, plans, strict=True):
        alone = World(CraftState(frozen[0].copy(), np.bool_(frozen[1])))
        own = env.open(alone, goal, 0, 3, 20)
        for reply in plan:
            say(env, alone, own, reply)
        assert world.state.inventory.tobytes() == alone.state.inventory.tobytes()
        assert world.state.done == alone.state.done and view.memory["made"] == own.memory["made"]
    assert parent.state.inventory.tobytes() == frozen[0].tobytes() and parent.state.done == frozen[1]


def test_eight_branches_with_the_same_actions_end_bitwise_equal():
    task = ToyTasks(TOY, tiers=(1,), counts=(1,)).task(("a1a", 1), "x")
    start = initial_state(TOY, dict.fromkeys(TOY.names, 9) | dict(task.data.inventory))
    items = sorted(TOY.recipes)[:5]
    plan = [make_action(TOY, i, TOY.recipes[i].yields, dict(TOY.recipes[i].ingredients)) for i in items]
    states = jax.tree.map(lambda x: jnp.broadcast_to(x, (8, *np.shape(x))), start)
    branches = jax.jit(jax.vmap(lambda s, a: craft(TABLES, s, a), in_axes=(0, None)))
    host = start
    for action in plan:
        states, codes = branches(states, action)
        host, code = craft_host(TOY.tables, host, action)
        assert codes.tolist() == [int(code)] * 8
    inventories = np.asarray(states.inventory)
    assert {row.tobytes() for row in inventories} == {host.inventory.tobytes()}
    assert inventories[0].tobytes() != start.inventory.tobytes()
