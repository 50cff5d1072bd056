"""Prompts of the rubric writer and the scorer for language models.

Both are built from a context that is checked for leaks. A context that is too long loses its middle;
the instructions are never cut.
"""

from __future__ import annotations

import json
from typing import Any

from sera_jax.rubric.contexts import ScorerContext, WriterContext
from sera_jax.rubric.schema import rubric_to_dict

_CUT = "\n[... {count} characters left out ...]\n"

_WRITER_SYSTEM = """\
You are an agent who is about to hand a sub-task to a sub-agent. Before it starts, you fix the rubric by \
which its work will be scored. Say what a good result looks like for you: the sub-task is completed, you \
get the result that you need, nothing is made up, and no needless or harmful work is done. You do not \
know how the sub-agent will do; do not guess. Answer with one JSON object and nothing else."""

_WRITER_FORMAT = """\
Write the rubric in this form:
{"rubric_items": [{"name": "...", "weight": 0.3, "description": "...", "score_0": "what earns 0", \
"score_full": "what earns full marks"}],
 "success_gate": "what must hold, or the score is 0",
 "failure_conditions": ["..."],
 "scoring_procedure": "how to get from evidence to item scores"}
Write 4 to 8 items with different names. Weights are not negative and sum to 1. The gate is strict and \
can be checked from the sub-agent's steps and the final state. Every item is about this sub-task, not \
about work in general."""

_SCORER_SYSTEM = """\
You score the work of a sub-agent by a rubric that was fixed before it started. Use only the steps and \
the final state that you are shown. What is not shown did not happen. Do not change the rubric. Answer \
with one JSON object and nothing else."""

_SCORER_FORMAT = """\
Answer in this form:
{"success": true or false: does the success gate hold,
 "criterion_scores": [{"name": "name of the item", "score": a number from 0 to 1, "reason": "..."}],
 "reason": "..."}
Score every item of the rubric exactly once, by its name."""


def cut_middle(text: str, budget: int, head: float = 0.25) -> str:
    """``text`` within ``budget`` characters: its first quarter and last three quarters, with a mark.

    Raises:
      ValueError: The budget cannot hold the mark.
    """
    if len(text) <= budget:
        return text
    mark = _CUT.format(count=len(text))
    room = budget - len(mark)
    if room < 1:
        raise ValueError(f"budget={budget}: at least {len(mark) + 1} characters are expected")
    first = int(room * head)
    mark = _CUT.format(count=len(text) - room)
    return text[:first] + mark + text[len(text) - (room - first) :]


def _json(data: Any) -> str:
    return json.dumps(data, sort_keys=True, ensure_ascii=False)


def writer_messages(context: WriterContext, budget: int = 12_000) -> list[tuple[str, str]]:
    """System and user message; ``budget`` bounds the context, not the instructions."""
    history = "\n\n".join(f"[{role}]\n{text}" for role, text in context.history)
    place = {
        "parent_depth": context.parent_depth,
        "child_depth": context.child_depth,
        "parent_step": context.parent_turn,
    }
    sections = {
        "Your own task": context.parent_goal,
        "Place in the tree": _json(place),
        "Your conversation so far": history,
        "Your reply that launches the sub-agent": context.parent_reply,
        "What can be observed now": _json(context.snapshot),
        "The sub-task": context.goal.text + (f"\n{context.goal.context}" if context.goal.context else ""),
        "What the sub-agent can do": context.tools,
        "Its step budget": str(context.max_turns),
    }
    block = "\n\n".join(f"## {title}\n{body}" for title, body in sections.items())
    return [("system", _WRITER_SYSTEM), ("user", f"{cut_middle(block, budget)}\n\n{_WRITER_FORMAT}")]


def scorer_messages(context: ScorerContext, budget: int = 24_000) -> list[tuple[str, str]]:
    """System and user message; a long trajectory loses its middle."""
    steps = "\n".join(_json(step) for step in context.steps)
    end = {"finish_message": context.finish_message, "stop": context.stop, **context.snapshot}
    user = "\n\n".join(
        (
            f"## The rubric\n{_json(rubric_to_dict(context.rubric))}",
            f"## The sub-task\n{context.goal.text}",
            f"## What the sub-agent did\n{cut_middle(steps, budget)}",
            f"## How it ended\n{_json(end)}\n{context.evidence}",
            _SCORER_FORMAT,
        )
    )
    return [("system", _SCORER_SYSTEM), ("user", user)]
