"""The protocol between an environment and the agent loop.

An environment is stateless beyond its static tables. What changes lives in a *state*, a fixed-shape
pytree of immutable arrays, held by a :class:`World`: nodes that share a world share its holder; a
branch gets a holder of its own with the same arrays, so a clone copies nothing.

A turn is a generator. It applies the reply's actions to the world, and where the reply launches
children it yields a :class:`LaunchRequest` and is resumed with one text per launch. So a protocol with
one command a turn and one with a whole code cell a turn look alike to the agent loop.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Mapping, Sequence
from typing import Any, Protocol


@dataclasses.dataclass(frozen=True)
class Goal:
    """What a node is asked to do.

    Attributes:
      text: The goal as the node reads it.
      targets: The same, structured and validated, e.g. ``{"c7_i2": 2}``; never re-parsed from ``text``.
      context: Free words of the parent for the child, may be empty.
    """

    text: str
    targets: Mapping[str, int]
    context: str = ""


@dataclasses.dataclass(frozen=True)
class Task:
    """A root problem.

    Attributes:
      id: Unique and stable.
      tier: Difficulty tier, e.g. ``easy``.
      goal: The root's goal.
      data: What the environment needs to build the initial state (environment-specific).
    """

    id: str
    tier: str
    goal: Goal
    data: Any


@dataclasses.dataclass
class World:
    """A mutable holder of one immutable state."""

    state: Any

    def clone(self) -> World:
        """A holder of its own on the same arrays."""
        return World(self.state)


@dataclasses.dataclass
class NodeView:
    """What an environment knows of one node.

    Attributes:
      goal: What the node is asked to do.
      depth: 0 at the root.
      max_depth: Nodes at this depth cannot launch.
      max_turns: Turn budget of the node.
      turn: Turns taken so far.
      baseline: State when the node was opened.
      memory: Environment-specific scratch that belongs to the node alone.
    """

    goal: Goal
    depth: int
    max_depth: int
    max_turns: int
    baseline: Any
    turn: int = 0
    memory: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def can_launch(self) -> bool:
        """Whether a child of this node would be within the depth limit."""
        return self.depth < self.max_depth


@dataclasses.dataclass(frozen=True)
class LaunchRequest:
    """Children that one reply asks for, in call order; the loop answers with one text each."""

    goals: tuple[Goal, ...]


@dataclasses.dataclass(frozen=True)
class TurnOutcome:
    """How a turn ended.

    Attributes:
      observation: Text for the next prompt; empty when the node finished.
      code: Name of the typed outcome.
      finished: The node issued finish.
      message: The finish message.
    """

    observation: str
    code: str
    finished: bool = False
    message: str = ""


TurnGenerator = Generator[LaunchRequest, Sequence[str], TurnOutcome]


class Environment(Protocol):
    """What the agent loop asks of an environment. All texts are host-side strings."""

    name: str
    tools: str  # what a node can do, in words, for rubric writers

    def reset(self, task: Task) -> World:
        """The initial world of ``task``."""
        ...

    def open(self, world: World, goal: Goal, depth: int, max_depth: int, max_turns: int) -> NodeView:
        """A node's view; its baseline is the world's state now."""
        ...

    def prompt(self, view: NodeView, world: World) -> list[tuple[str, str]]:
        """The node's first messages as (role, text), built from what is known at launch."""
        ...

    def turn(self, view: NodeView, world: World, reply: str) -> TurnGenerator:
        """Applies one reply; see the module docstring. Never raises for what a policy wrote."""
        ...

    def child_report(self, view: NodeView, child: NodeView, message: str, stop: str) -> str:
        """What the parent (``view``) reads about a child that ended; may merge the child's tallies."""
        ...

    def launch_spans(self, reply: str) -> tuple[tuple[int, int], ...]:
        """Character spans [start, end) of the statements of ``reply`` that launch."""
        ...

    def verify(self, view: NodeView, world: World, message: str) -> bool:
        """The program's verdict on a node that finished with ``message``; False on an empty one."""
        ...

    def snapshot(self, view: NodeView, world: World) -> Mapping[str, Any]:
        """Observable state as plain data, for rubric writers; holds no reward or success flag."""
        ...

    def evidence(self, view: NodeView, world: World, stop: str, message: str) -> str:
        """What a scorer sees of a node's end, compactly; holds no reward or success flag."""
        ...
