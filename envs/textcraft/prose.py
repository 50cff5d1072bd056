"""Sentences for language models: instructions, observations and refusals of the structured protocol."""

from __future__ import annotations

from collections.abc import Mapping

from envs.base import NodeView
from envs.textcraft.state import CraftState, Outcome
from envs.textcraft.world import CraftWorld

TOOLS = (
    "info X . (recipe of an item); have . (inventory); craft N X : q A q B . (make N units of X in all "
    "from exactly these amounts); launch N X , M Y . (one sub-agent for each part); finish MESSAGE ."
)

_SYSTEM = """\
You craft items from raw materials. Everything you need can be made from the inventory, though \
intermediate items may have to be crafted first. The amounts you are asked for come on top of what the \
inventory already holds: if it holds 3 and you are asked for 2, there must be 5 in the end.

Answer every message with your thoughts, if you have any, and then exactly one command on the last line:

info X .                 shows the recipe of item X
have .                   shows the inventory
craft N X : q A q B .    makes N units of X in all; N must be a multiple of what one execution of the \
recipe makes, and q is the exact amount in all of each ingredient
finish MESSAGE .         ends your work; say in the message what you made or why you could not

Words and numbers are separated by single spaces. A recipe that makes 2 at a time and needs 1 A gives 6 \
units with: craft 6 X : 3 A ."""

_LAUNCH = """

You can hand parts of the work to sub-agents, and you are encouraged to:

launch N X , M Y .       one sub-agent for each part between commas: here one makes N of X, another M of Y

Sub-agents work in the same inventory as you, know nothing of your conversation, have a step budget of \
their own and can launch sub-agents themselves. You wait until all have ended and then read what each \
reported. Parts that do not depend on each other can be launched together."""


def messages(view: NodeView) -> list[tuple[str, str]]:
    """A node's first messages."""
    system = _SYSTEM + (_LAUNCH if view.can_launch else "")
    context = f"\n\nFrom the agent that asks you: {view.goal.context}" if view.goal.context else ""
    wanted = ", ".join(f"{count} {item}" for item, count in view.goal.targets.items())
    user = f"Craft on top of what is there: {wanted}.{context}\n\nYou have {view.max_turns} steps."
    return [("system", system), ("user", user)]


def info(world: CraftWorld, item: str) -> str:
    """The answer to ``info``."""
    if item not in world.index:
        return f"There is no item called {item}."
    if item not in world.recipes:
        return f"{item} is a raw material; nothing makes it."
    recipe = world.recipes[item]
    needs = ", ".join(f"{count} {name}" for name, count in recipe.ingredients.items())
    return f"One execution turns {needs} into {recipe.yields} {item}."


def have(counts: Mapping[str, int]) -> str:
    """The answer to ``have``."""
    return "Inventory: " + (", ".join(f"{n} {name}" for name, n in counts.items()) or "empty") + "."


def craft_error(
    world: CraftWorld,
    outcome: Outcome,
    target: str,
    count: int,
    ingredients: Mapping[str, int],
    state: CraftState,
) -> str:
    """Why a craft was refused, naming the offending thing and what is right."""
    recipe = world.recipes.get(target)
    needs: dict[str, int] = {}
    if recipe is not None:
        needs = {n: q * (count // recipe.yields) for n, q in recipe.ingredients.items()}
    match outcome:
        case Outcome.DONE:
            return "Error: the task is over; nothing can be crafted any more."
        case Outcome.COUNT:
            return f"Error: {count} units of {target}: a positive number is expected."
        case Outcome.UNKNOWN:
            unknown = [name for name in (target, *ingredients) if name not in world.index]
            return f"Error: unknown item {', '.join(unknown)}."
        case Outcome.QUANTITY:
            wrong = [f"{n} {name}" for name, n in ingredients.items() if n < 1]
            return f"Error: {', '.join(wrong)}: positive amounts are expected."
        case Outcome.BASE:
            return f"Error: {target} is a raw material; nothing makes it."
        case Outcome.MULTIPLE:
            assert recipe is not None
            return f"Error: {target} comes {recipe.yields} at a time; {count} is not a multiple of that."
        case Outcome.MISSING:
            missing = [f"{n} {name}" for name, n in needs.items() if name not in ingredients]
            return f"Error: the recipe also needs {', '.join(missing)}."
        case Outcome.AMOUNT:
            wrong = [
                f"{needs[name]} {name}, not {n}"
                for name, n in ingredients.items()
                if n != needs.get(name, n)
            ]
            return f"Error: {count} {target} needs exactly {'; '.join(wrong)}."
        case Outcome.EXTRA:
            extra = [name for name in ingredients if name not in needs]
            return f"Error: the recipe of {target} does not use {', '.join(extra)}."
        case Outcome.SHORT:
            held = {name: int(state.inventory[world.index[name]]) for name in needs}
            short = [f"{n} {name} (there are {held[name]})" for name, n in needs.items() if held[name] < n]
            return f"Error: the inventory lacks {', '.join(short)}."
    raise ValueError(f"{outcome!r} is no refusal")


def refusal(code: str, command: str) -> str:
    """Why a command was not carried out."""
    return {
        "malformed": f"Error: {command!r} is not a command. One of these is expected: {TOOLS}",
        "loop": "Error: you repeat yourself; your work ends here.",
        "launch_target": f"Error: {command!r}: only items that have a recipe can be asked of a sub-agent.",
        "launch_depth": "Error: you are at the depth limit and cannot launch; do the work yourself.",
    }[code]


def child_report(child: NodeView, message: str, stop: str, turns_left: int) -> str:
    """What a parent reads about a child that ended."""
    wanted = ", ".join(f"{count} {item}" for item, count in child.goal.targets.items())
    if stop != "finished":
        said = f"ended without a report ({stop})"
    else:
        said = f"reported: {message.rstrip('. ')}" if message.strip() else "ended with an empty report"
    return (
        f"The sub-agent for {wanted} {said}. It used {child.turn} of {child.max_turns} steps; "
        f"you have {turns_left} left."
    )
