"""What a rubric writer and a scorer may know. Neither ever sees a reward, a label or a verifier's word."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from sera_jax.types import Goal, Rubric

_FORBIDDEN = ("reward", "success", "label", "verified", "verifier")


class LeakError(ValueError):
    """A field that would tell a writer or scorer the outcome; the message names it."""


def _refuse_leaks(data: Any, path: str) -> None:
    if isinstance(data, Mapping):
        for key, value in data.items():
            if any(word in str(key).lower() for word in _FORBIDDEN):
                raise LeakError(f"{path}.{key} must not reach a rubric writer or scorer")
            _refuse_leaks(value, f"{path}.{key}")
    elif isinstance(data, (list, tuple)):
        for number, value in enumerate(data):
            _refuse_leaks(value, f"{path}[{number}]")


@dataclasses.dataclass(frozen=True)
class WriterContext:
    """Everything known at launch, before the child's first token.

    Attributes:
      parent_goal: Goal of the launching node.
      parent_depth, child_depth, parent_turn: Where in the tree.
      history: The parent's messages before the launching reply, as (role, text).
      parent_reply: The launching reply.
      snapshot: Observable state of the environment.
      goal: The child's goal.
      tools: What the child can do, in words.
      max_turns: The child's turn budget.
    """

    parent_goal: str
    parent_depth: int
    child_depth: int
    parent_turn: int
    history: tuple[tuple[str, str], ...]
    parent_reply: str
    snapshot: Mapping[str, Any]
    goal: Goal
    tools: str
    max_turns: int

    def __post_init__(self):
        _refuse_leaks(self.snapshot, "snapshot")


@dataclasses.dataclass(frozen=True)
class ScorerContext:
    """A child's work and the rubric that was frozen before it.

    Attributes:
      rubric: The frozen rubric.
      goal: The child's goal.
      evidence: The environment's compact summary of its end.
      steps: Its turns as plain data.
      stop, finish_message: How it ended.
      snapshot: Observable state at its end.
    """

    rubric: Rubric
    goal: Goal
    evidence: str
    steps: tuple[Mapping[str, Any], ...]
    stop: str
    finish_message: str
    snapshot: Mapping[str, Any]

    def __post_init__(self):
        _refuse_leaks(self.snapshot, "snapshot")
        _refuse_leaks(self.steps, "steps")
