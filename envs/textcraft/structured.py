"""The ``structured`` protocol: one short command a turn.

    info X .                 recipe of an item
    have .                   the inventory
    craft N X : q A q B .    make N units of X in all, from q units in all of each ingredient
    launch N X , M Y .       one child for each part; they share this world
    finish done .            end, with any message; an empty one never succeeds

Words are separated by spaces, numbers have at most eight digits. In the ``compact`` style, for tiny
policies, a reply is the command and observations are a few words; in the ``prose`` style, for language
models, the command is the reply's last line and texts are sentences. Nothing a policy writes raises: it
is answered with what is wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from envs.base import Goal, LaunchRequest, NodeView, Task, TurnGenerator, TurnOutcome, World
from envs.textcraft import prose
from envs.textcraft.grading import Evidence, grade, read_number
from envs.textcraft.state import Outcome, craft_host, initial_state, make_action, net_increment
from envs.textcraft.tasks import goal_of
from envs.textcraft.world import MAX_INGREDIENTS, CraftWorld

# One word for each refusal of a craft, in compact observations.
ERROR_WORDS: dict[Outcome, str] = {
    Outcome.DONE: "over",
    Outcome.COUNT: "count",
    Outcome.UNKNOWN: "unknown",
    Outcome.QUANTITY: "quantity",
    Outcome.BASE: "base",
    Outcome.MULTIPLE: "multiple",
    Outcome.MISSING: "missing",
    Outcome.AMOUNT: "amount",
    Outcome.EXTRA: "extra",
    Outcome.SHORT: "short",
}
_STOPS = ("turns", "context", "loop", "error", "deadline", "cancelled")


class StructuredTextCraft:
    """TextCraft under the structured protocol; see :class:`envs.base.Environment`.

    Args:
      world: Items and recipes.
      style: ``compact`` or ``prose``.
    """

    name = "textcraft"

    def __init__(self, world: CraftWorld, style: str = "compact"):
        if style not in ("compact", "prose"):
            raise ValueError(f"style={style!r}: 'compact' or 'prose' is expected")
        self.world = world
        self.style = style
        self.tools = prose.TOOLS

    def vocabulary(self) -> list[str]:
        """Every word of compact texts except integers: protocol, rubrics, evidence, then items."""
        words = "info have craft launch finish done fail goal turns depth base makes ok err said".split()
        words += "rubric score made gate w y n net none stop nothing form target loop ; . , :".split()
        words += list(ERROR_WORDS.values()) + list(_STOPS)
        return list(dict.fromkeys([*words, *self.world.names]))

    # --- life of a world and its nodes ----------------------------------------------------------

    def reset(self, task: Task) -> World:
        """See :class:`envs.base.Environment`."""
        return World(initial_state(self.world, dict(task.data.inventory)))

    def open(self, world: World, goal: Goal, depth: int, max_depth: int, max_turns: int) -> NodeView:
        """See :class:`envs.base.Environment`."""
        return NodeView(
            goal=goal,
            depth=depth,
            max_depth=max_depth,
            max_turns=max_turns,
            baseline=world.state,
            memory={"made": {}, "commands": []},
        )

    def prompt(self, view: NodeView, world: World) -> list[tuple[str, str]]:
        """See :class:`envs.base.Environment`. A child cannot tell from it how it will be scored."""
        if self.style == "compact":
            left = view.max_depth - view.depth
            return [("user", f"goal {view.goal.text} ; turns {view.max_turns} ; depth {left} ;")]
        return prose.messages(view)

    def turn(self, view: NodeView, world: World, reply: str) -> TurnGenerator:
        """See :class:`envs.base.Environment`."""
        low, high = _command_span(reply)
        words = reply[low:high].split()
        if words and words[-1].endswith("."):  # language models glue the full stop to the last word
            words[-1] = words[-1].removesuffix(".")
            words = [word for word in words if word]
        command = " ".join(words)
        commands = view.memory["commands"]
        commands.append(command)
        if _loops(commands):
            return self._refuse("loop", "loop", command)
        match words:
            case ["info", item]:
                return TurnOutcome(self._info(item), "info")
            case ["have"]:
                return TurnOutcome(self._have(world), "have")
            case ["craft", *rest]:
                return self._craft(view, world, rest, command)
            case ["launch", *rest]:
                return (yield from self._launch(view, rest, command))
            case ["finish", *message]:
                if view.depth == 0:
                    world.state = world.state._replace(done=np.bool_(True))
                return TurnOutcome("", "finish", finished=True, message=" ".join(message))
        return self._refuse("form", "malformed", command)
        yield  # a generator even where it launches nothing

    def child_report(self, view: NodeView, child: NodeView, message: str, stop: str) -> str:
        """See :class:`envs.base.Environment`; what the child's subtree made counts for the parent."""
        for item, count in child.memory["made"].items():
            view.memory["made"][item] = view.memory["made"].get(item, 0) + count
        finished = stop == "finished"
        if self.style == "compact":
            # Free words of a child could hold anything; a tiny policy reads its first word.
            said = f"said {_first(message)}" if finished else f"stop {stop}"
            return f"{child.goal.text} {said} ;"
        return prose.child_report(child, message, stop, view.max_turns - view.turn)

    # --- commands -------------------------------------------------------------------------------

    def _info(self, item: str) -> str:
        if self.style == "prose":
            return prose.info(self.world, item)
        if item not in self.world.index:
            return f"err {ERROR_WORDS[Outcome.UNKNOWN]} ;"
        if item not in self.world.recipes:
            return f"{item} base ;"
        recipe = self.world.recipes[item]
        needs = " ".join(f"{count} {name}" for name, count in recipe.ingredients.items())
        return f"{item} : {needs} ; makes {recipe.yields} ;"

    def _have(self, world: World) -> str:
        counts = self.world.counts(world.state.inventory)
        if self.style == "prose":
            return prose.have(counts)
        return f"have {' '.join(f'{count} {name}' for name, count in counts.items()) or 'none'} ;"

    def _craft(self, view: NodeView, world: World, words: list[str], command: str) -> TurnOutcome:
        match words:
            case [number, target, ":", *pairs] if pairs and len(pairs) % 2 == 0:
                ingredients = {}
                for amount, item in zip(pairs[::2], pairs[1::2], strict=True):
                    quantity = read_number(amount)
                    if quantity is None or item in ingredients:
                        return self._refuse("form", "malformed", command)
                    ingredients[item] = quantity
            case _:
                return self._refuse("form", "malformed", command)
        count = read_number(number)
        if count is None or len(ingredients) > MAX_INGREDIENTS:
            return self._refuse("form", "malformed", command)
        action = make_action(self.world, target, count, ingredients)
        world.state, outcome = craft_host(self.world.tables, world.state, action)
        if outcome != Outcome.OK:
            text = prose.craft_error(self.world, outcome, target, count, ingredients, world.state)
            compact = f"err {ERROR_WORDS[outcome]} ;"
            return TurnOutcome(
                compact if self.style == "compact" else text, f"craft_{outcome.name.lower()}"
            )
        made = view.memory["made"]
        made[target] = made.get(target, 0) + count
        text = "ok ;" if self.style == "compact" else f"Crafted {count} {target}."
        return TurnOutcome(text, "craft_ok")

    def _launch(self, view: NodeView, words: list[str], command: str) -> TurnGenerator:
        goals = []
        for part in " ".join(words).split(","):
            match part.split():
                case [number, item] if count := read_number(number):
                    if item not in self.world.recipes:
                        return self._refuse("target", "launch_target", command)
                    goals.append(goal_of({item: count}))
                case _:
                    return self._refuse("form", "malformed", command)
        if not view.can_launch:
            return self._refuse("depth", "launch_depth", command)
        reports = yield LaunchRequest(tuple(goals))
        joint = " " if self.style == "compact" else "\n"
        return TurnOutcome(joint.join(reports), "launch")

    def _refuse(self, word: str, code: str, command: str) -> TurnOutcome:
        text = f"err {word} ;" if self.style == "compact" else prose.refusal(code, command)
        return TurnOutcome(text, code)

    # --- verdicts and evidence ------------------------------------------------------------------

    def launch_spans(self, reply: str) -> tuple[tuple[int, int], ...]:
        """See :class:`envs.base.Environment`: the command, when it is a launch.

        A launch that is refused is an attempt and has its span too.
        """
        low, high = _command_span(reply)
        return ((low, high),) if reply[low:high].split()[:1] == ["launch"] else ()

    def verify(self, view: NodeView, world: World, message: str) -> bool:
        """Net increment of every target since the node was opened, and a non-empty message."""
        if not message.strip():
            return False
        return all(
            net_increment(world.state, view.baseline, self.world.index[item]) >= count
            for item, count in view.goal.targets.items()
        )

    def snapshot(self, view: NodeView, world: World) -> Mapping[str, Any]:
        """See :class:`envs.base.Environment`."""
        return {"inventory": self.world.counts(world.state.inventory)}

    def evidence(self, view: NodeView, world: World, stop: str, message: str) -> str:
        """See :mod:`envs.textcraft.grading`."""
        net = {
            item: max(0, net_increment(world.state, view.baseline, self.world.index[item]))
            for item in view.goal.targets
        }
        said = _first(message) if stop == "finished" else "nothing"
        return Evidence(net, dict(view.memory["made"]), view.turn, said).text()

    def grade(self, criterion: str, evidence: str) -> float | None:
        """The program's grade of a compact criterion, for measuring scorers; see ``grading``."""
        return grade(criterion, evidence)


def _command_span(reply: str) -> tuple[int, int]:
    """Character span [start, end) of the last line that is not blank, without the blanks around it.

    What is executed and what is trained as a launch must be the same characters, so both come from here.
    """
    body = reply.rstrip()
    line = body.splitlines()[-1].lstrip() if body else ""
    return len(body) - len(line), len(body)


def _first(message: str) -> str:
    """``done``, ``fail``, or ``nothing`` for any other message."""
    words = message.split()
    return words[0] if words and words[0] in ("done", "fail") else "nothing"


def _loops(commands: list[str]) -> bool:
    """Whether the last four repetitions of a pattern of period 1, 2 or 3 are identical."""
    for period in (1, 2, 3):
        tail = commands[-4 * period :]
        if len(tail) == 4 * period and tail == tail[:period] * 4:
            return True
    return False
