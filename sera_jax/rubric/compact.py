"""A grammar of a few words for tiny policies.

    rubric   have 2 x w 6 ; made x w 2 ; turns 4 w 2 ; gate have 2 x .
    score    y n y gate y .

A criterion is words, ``w`` and an integer weight; the gate is required and comes last. A score has one
y or n for each criterion, in order, then the gate's. Anything else is a typed failure.
"""

from __future__ import annotations

from sera_jax.rubric.contexts import ScorerContext, WriterContext
from sera_jax.rubric.schema import ParsedScore, RubricError, ScoreError, normalized
from sera_jax.types import Criterion, Rubric

MAX_CRITERIA = 8


def parse_rubric(text: str) -> Rubric:
    """A normalised rubric from its compact form.

    Raises:
      RubricError: Not the grammar above, or 2 to 8 criteria with a positive total weight are not there.
    """
    words = text.split()
    if not words or words[-1] != ".":
        raise RubricError("the rubric does not end with '.'")
    parts = [part.split() for part in " ".join(words[:-1]).split(";")]
    *criteria_words, gate_words = parts
    if len(gate_words) < 2 or gate_words[0] != "gate":
        raise RubricError("the last part is not 'gate ...'")
    criteria = []
    for number, part in enumerate(criteria_words):
        if len(part) < 3 or part[-2] != "w" or not part[-1].isdecimal() or part[0] == "gate":
            raise RubricError(f"criterion {number}: {' '.join(part)!r} is not 'words w INTEGER'")
        criteria.append(Criterion(f"c{number}", float(part[-1]), " ".join(part[:-2])))
    if len(criteria) > MAX_CRITERIA:
        raise RubricError(f"{len(criteria)} criteria; at most {MAX_CRITERIA} are expected")
    return normalized(Rubric(tuple(criteria), " ".join(gate_words[1:]), procedure=" ".join(words)))


def render(rubric: Rubric) -> str:
    """The compact form, as it was written."""
    return rubric.procedure


def parse_score(text: str, rubric: Rubric) -> ParsedScore:
    """Reads a compact score.

    Raises:
      ScoreError: Not one y or n for each criterion, ``gate``, y or n, and a full stop.
    """
    words = text.split()
    marks, tail = words[: len(rubric.criteria)], words[len(rubric.criteria) :]
    if len(marks) != len(rubric.criteria) or any(mark not in ("y", "n") for mark in marks):
        raise ScoreError(f"{text!r}: {len(rubric.criteria)} marks of y or n are expected first")
    match tail:
        case ["gate", ("y" | "n") as gate, "."]:
            return ParsedScore(gate == "y", tuple(float(mark == "y") for mark in marks))
    raise ScoreError(f"{text!r}: 'gate y .' or 'gate n .' is expected after the marks")


def writer_messages(context: WriterContext) -> list[tuple[str, str]]:
    """One short message: what is asked of the child."""
    return [("user", f"rubric goal {context.goal.text} ; turns {context.max_turns} ;")]


def scorer_messages(context: ScorerContext) -> list[tuple[str, str]]:
    """The rubric and the evidence."""
    return [("user", f"score {render(context.rubric)} {context.evidence}")]
