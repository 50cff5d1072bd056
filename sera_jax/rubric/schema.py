"""Rubrics as JSON: parsing, validation, normalisation and the hash that freezes one.

The reader tolerates what models wrap around an object (code fences, prose, a trailing comma) and
nothing about its meaning: a duplicate key, NaN, a number in quotes or a wrong type is no rubric and no
score, never a guess.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from typing import Any

from sera_jax.types import Criterion, Failure, Rubric

MIN_CRITERIA = 2
MAX_WEIGHT = 1e6  # far above any sensible weight, far below where a sum could overflow
_SURROGATE = re.compile("[\ud800-\udfff]")


class RubricError(ValueError):
    """A text that is no rubric; ``failure`` is counted, the message says what is wrong."""

    def __init__(self, detail: str, failure: Failure = Failure.RUBRIC_PARSE):
        super().__init__(detail)
        self.failure = failure


class ScoreError(ValueError):
    """A text that is no score; ``failure`` is counted, the message says what is wrong."""

    def __init__(self, detail: str, failure: Failure = Failure.SCORE_PARSE):
        super().__init__(detail)
        self.failure = failure


@dataclasses.dataclass(frozen=True)
class ParsedScore:
    """A scorer's answer: the gate and one value in [0, 1] for each criterion, in the rubric's order."""

    gate: bool
    criteria: tuple[float, ...]


def rubric_to_dict(rubric: Rubric) -> dict[str, Any]:
    """Plain data in the wire schema."""
    return {
        "rubric_items": [dataclasses.asdict(criterion) for criterion in rubric.criteria],
        "success_gate": rubric.gate,
        "failure_conditions": list(rubric.failure_conditions),
        "scoring_procedure": rubric.procedure,
    }


def rubric_hash(rubric: Rubric) -> str:
    """sha256 of the canonical JSON form, 64 hexadecimal digits."""
    text = json.dumps(rubric_to_dict(rubric), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def normalized(rubric: Rubric) -> Rubric:
    """The rubric with weights that sum to 1.

    Raises:
      RubricError: Too few criteria, or weights that are negative, above 1e6, not numbers or all 0.
    """
    if len(rubric.criteria) < MIN_CRITERIA:
        raise RubricError(f"{len(rubric.criteria)} criteria; at least {MIN_CRITERIA} are expected")
    for criterion in rubric.criteria:
        if not 0 <= criterion.weight <= MAX_WEIGHT:  # also refuses NaN
            raise RubricError(f"criterion {criterion.name!r}: weight {criterion.weight} is not allowed")
    total = math.fsum(criterion.weight for criterion in rubric.criteria)
    if total <= 0:
        raise RubricError("all weights are 0")
    criteria = tuple(dataclasses.replace(c, weight=c.weight / total) for c in rubric.criteria)
    return dataclasses.replace(rubric, criteria=criteria)


def parse_rubric(text: str) -> Rubric:
    """A normalised rubric from a model's answer.

    Raises:
      RubricError: No object, a missing or mistyped field, duplicate names, or bad weights.
    """
    try:
        data = find_object(text)
    except ValueError as error:
        raise RubricError(str(error)) from error
    items = data.get("rubric_items")
    if not isinstance(items, list):
        raise RubricError("rubric_items: a list is expected")
    criteria = []
    for number, item in enumerate(items):
        where = f"rubric_items[{number}]"
        if not isinstance(item, dict):
            raise RubricError(f"{where}: an object is expected")
        name, description = item.get("name"), item.get("description")
        if not isinstance(name, str) or not name.strip():
            raise RubricError(f"{where}.name: a non-empty text is expected")
        if not isinstance(description, str) or not description.strip():
            raise RubricError(f"{where}.description: a non-empty text is expected")
        weight = item.get("weight", 0)
        if isinstance(weight, bool) or not isinstance(weight, (int, float)):
            raise RubricError(f"{where}.weight: a number is expected, got {weight!r}")
        if not 0 <= weight <= MAX_WEIGHT:  # compared before float(), which refuses huge integers
            raise RubricError(f"{where}.weight: a number in [0, {MAX_WEIGHT:g}] is expected")
        anchors = {key: str(item.get(key, "")) for key in ("score_0", "score_full")}
        criteria.append(Criterion(name.strip(), float(weight), description.strip(), **anchors))
    names = [criterion.name for criterion in criteria]
    if len(set(names)) != len(names):
        raise RubricError("two criteria have the same name")
    gate = data.get("success_gate", "")
    if not isinstance(gate, str):
        raise RubricError("success_gate: a text is expected")
    conditions = data.get("failure_conditions", [])
    conditions = conditions if isinstance(conditions, list) else [conditions]
    return normalized(
        Rubric(
            criteria=tuple(criteria),
            gate=gate,
            failure_conditions=tuple(map(str, conditions)),
            procedure=str(data.get("scoring_procedure", "")),
        )
    )


def parse_score(text: str, rubric: Rubric) -> ParsedScore:
    """Gate and criterion scores from a scorer's answer; its own total is not read.

    Criteria are matched by name; each must be scored exactly once with a number in [0, 1].

    Raises:
      ScoreError: Anything else.
    """
    try:
        data = find_object(text)
    except ValueError as error:
        raise ScoreError(str(error)) from error
    gate = data.get("success")
    if gate in ("true", "false"):
        gate = gate == "true"
    if not isinstance(gate, bool):
        raise ScoreError(f"success: true or false is expected, got {gate!r}")
    entries = data.get("criterion_scores")
    if not isinstance(entries, list):
        raise ScoreError("criterion_scores: a list is expected")
    scores: dict[str, float] = {}
    for number, entry in enumerate(entries):
        name = entry.get("name") if isinstance(entry, dict) else None
        value = entry.get("score") if isinstance(entry, dict) else None
        if not isinstance(name, str) or name.strip() in scores:
            raise ScoreError(f"criterion_scores[{number}].name: each criterion is expected once")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
            raise ScoreError(f"criterion {name!r}: a number in [0, 1] is expected, got {value!r}")
        scores[name.strip()] = float(value)
    wanted = [criterion.name for criterion in rubric.criteria]
    if set(scores) != set(wanted):
        odd = sorted(set(scores) ^ set(wanted))
        raise ScoreError(f"criteria missing or unknown: {', '.join(odd)}")
    return ParsedScore(gate, tuple(scores[name] for name in wanted))


def find_object(text: str) -> dict[str, Any]:
    """The JSON object in a model's answer: the whole text, a fenced block, or the first that parses.

    Raises:
      ValueError: There is none, it repeats a key, or it holds NaN or an infinity.
    """
    candidates = [text.strip(), *re.findall(r"```(?:json)?\s*\n(.*?)```", text, re.DOTALL)]
    candidates += [text[m.start() :] for m in re.finditer(r"\{", text)]
    for candidate in candidates:
        for attempt in (candidate, re.sub(r",(\s*[}\]])", r"\1", candidate)):
            try:
                value, _ = _DECODER.raw_decode(attempt.strip())
            except json.JSONDecodeError:
                continue
            except RecursionError:
                raise ValueError("the answer is nested too deeply") from None
            # An escaped half of a character parses, but no tokenizer can hold it.
            if _SURROGATE.search(json.dumps(value, ensure_ascii=False)):
                raise ValueError("the answer holds half a character (a lone surrogate)")
            if isinstance(value, dict):
                return value
    raise ValueError("no JSON object in the answer")


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    if len(set(keys)) != len(keys):
        raise ValueError(f"a key is there twice: {next(k for k in keys if keys.count(k) > 1)!r}")
    return dict(pairs)


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number")


_DECODER = json.JSONDecoder(object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
