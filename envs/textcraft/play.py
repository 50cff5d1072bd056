"""Play a task in a terminal: ``python -m envs.textcraft.play --task test:67 --agent oracle``.

The same recursive driver, without any engine, serves the tests: children run one after another.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable

from envs.base import Goal, NodeView, Task, World
from envs.textcraft import tasks as tasks_lib
from envs.textcraft.generate import published_world, toy_world
from envs.textcraft.oracle import OracleAgent
from envs.textcraft.structured import StructuredTextCraft

Reply = Callable[[NodeView, World, str], str]


@dataclasses.dataclass
class Played:
    """What a driven tree came to."""

    success: bool = False
    nodes: int = 0
    turns: int = 0
    launches: int = 0
    deepest: int = 0
    longest: int = 0


def drive(
    env: StructuredTextCraft,
    task: Task,
    reply: Reply,
    *,
    max_turns: int = 20,
    max_depth: int = 3,
    show: Callable[[str], None] | None = None,
) -> Played:
    """Plays one task recursively."""
    world, played = env.reset(task), Played()
    played.success = _node(env, world, task.goal, 0, max_turns, max_depth, reply, played, show)[2]
    return played


def _node(
    env: StructuredTextCraft,
    world: World,
    goal: Goal,
    depth: int,
    max_turns: int,
    max_depth: int,
    reply: Reply,
    played: Played,
    show: Callable[[str], None] | None,
) -> tuple[NodeView, str, bool, str]:
    view = env.open(world, goal, depth, max_depth, max_turns)
    indent, say = "  " * depth, show or (lambda text: None)
    played.nodes += 1
    played.deepest = max(played.deepest, depth)
    for role, text in env.prompt(view, world):
        say(f"{indent}[{role}] {text}")
    observation = ""
    while view.turn < max_turns:
        text = reply(view, world, observation)
        view.turn += 1
        played.turns += 1
        played.longest = max(played.longest, view.turn)
        say(f"{indent}> {text}")
        turn, answers = env.turn(view, world, text), None
        while True:
            try:
                request = turn.send(answers)
            except StopIteration as stop:
                outcome = stop.value
                break
            answers = []
            for child_goal in request.goals:
                played.launches += 1
                child, message, _, why = _node(
                    env, world, child_goal, depth + 1, max_turns, max_depth, reply, played, show
                )
                answers.append(env.child_report(view, child, message, why))
        if outcome.finished:
            return view, outcome.message, env.verify(view, world, outcome.message), "finished"
        observation = outcome.observation
        say(f"{indent}{observation}")
        if outcome.code == "loop":
            return view, "", False, "loop"
    return view, "", False, "turns"


def find_task(name: str) -> tuple[StructuredTextCraft, Task]:
    """``test:67`` (a split and a place in it) or ``toy:3`` with their environment.

    Raises:
      ValueError: No such task.
    """
    split, _, number = name.partition(":")
    if not number.isdecimal():
        raise ValueError(f"task {name!r}: SPLIT:NUMBER is expected, for example test:67 or toy:3")
    if split == "toy":
        world = toy_world(0)
        toy = tasks_lib.ToyTasks(world, tiers=(2, 3), counts=(1, 2))
        pairs = [*toy.trained, *toy.unseen]
        if int(number) >= len(pairs):
            raise ValueError(f"task {name!r}: toy has {len(pairs)} tasks, counted from 0")
        return StructuredTextCraft(world, "prose"), toy.task(pairs[int(number)], "play")
    tasks = tasks_lib.split(split)
    if int(number) >= len(tasks):
        raise ValueError(f"task {name!r}: {split} has {len(tasks)} tasks, counted from 0")
    return StructuredTextCraft(published_world(), "prose"), tasks[int(number)]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", default="test:67", help="SPLIT:NUMBER, or toy:NUMBER")
    parser.add_argument("--agent", choices=("human", "oracle"), default="human")
    parser.add_argument("--launch", type=float, default=0.5, help="how often the oracle launches by choice")
    arguments = parser.parse_args()
    try:
        env, task = find_task(arguments.task)
    except ValueError as error:
        parser.error(str(error))
    if arguments.agent == "oracle":
        reply = OracleAgent(env.world, launch_probability=arguments.launch).reply
    else:
        reply = lambda view, world, observation: input(f"[depth {view.depth}] command: ")
    try:
        played = drive(env, task, reply, show=print)
    except (EOFError, KeyboardInterrupt):
        parser.exit(1, "\nStopped before the end of the task.\n")
    print(f"{'Success' if played.success else 'No success'}: {played}")


if __name__ == "__main__":
    main()
