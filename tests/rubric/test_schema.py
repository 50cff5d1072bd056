"""JSON rubrics and scores: what is read, what is refused, and how a score is computed."""

import json

import pytest

from sera_jax.rubric.schema import (
    ParsedScore,
    RubricError,
    ScoreError,
    parse_rubric,
    parse_score,
    rubric_hash,
)
from sera_jax.rubric.score import score_value

ITEMS = [
    {"name": "amount", "weight": 3, "description": "two units are there"},
    {"name": "way", "weight": 1, "description": "no waste", "score_0": "half wasted"},
]
RUBRIC = {"rubric_items": ITEMS, "success_gate": "something was made", "failure_conditions": ["loops"]}
TEXT = json.dumps(RUBRIC)


def test_weights_are_normalised():
    rubric = parse_rubric(TEXT)
    assert [c.weight for c in rubric.criteria] == [0.75, 0.25]
    assert rubric.gate == "something was made" and rubric.failure_conditions == ("loops",)


@pytest.mark.parametrize(
    "text",
    [
        f"```json\n{TEXT}\n```",
        f"For {{project}}: here it is.\n{TEXT}\nGood luck.",
        TEXT.replace("]}", "],}"),
        f"{TEXT} trailing words",
    ],
)
def test_wrappers_are_tolerated(text):
    assert parse_rubric(text) == parse_rubric(TEXT)


def change(**changes):
    return json.dumps({**RUBRIC, **changes})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no object at all", "no JSON object"),
        (change(rubric_items=3), "rubric_items: a list is expected"),
        (change(rubric_items=ITEMS[:1]), "1 criteria; at least 2 are expected"),
        (change(rubric_items=[ITEMS[0], ITEMS[0]]), "two criteria have the same name"),
        (change(rubric_items=[ITEMS[0], {**ITEMS[1], "name": " "}]), r"rubric_items\[1\].name"),
        (change(rubric_items=[ITEMS[0], {**ITEMS[1], "weight": "1"}]), r"rubric_items\[1\].weight"),
        (change(rubric_items=[ITEMS[0], {**ITEMS[1], "weight": -1}]), r"weight: a number in \[0, 1e\+06\]"),
        (
            change(rubric_items=[{**i, "weight": 1e308} for i in ITEMS]),
            r"weight: a number in \[0, 1e\+06\]",
        ),
        (TEXT.replace('"weight": 3', '"weight": 1' + "0" * 400), r"weight: a number in \[0, 1e\+06\]"),
        ('{"rubric_items":' + "[" * 100_000, "nested too deeply"),
        (TEXT.replace("amount", "a\\ud83d"), "half a character"),
        (change(rubric_items=[{**i, "weight": 0} for i in ITEMS]), "all weights are 0"),
        (TEXT.replace('"weight": 3', '"weight": NaN'), "NaN is not a number"),
        (TEXT.replace('"success_gate"', '"rubric_items": [], "success_gate"'), "a key is there twice"),
    ],
)
def test_what_is_no_rubric(text, message):
    with pytest.raises(RubricError, match=message):
        parse_rubric(text)


def test_the_hash_names_the_content():
    rubric = parse_rubric(TEXT)
    assert rubric_hash(rubric) == rubric_hash(parse_rubric(f"```\n{TEXT}\n```"))
    assert rubric_hash(rubric) != rubric_hash(parse_rubric(change(success_gate="another")))
    assert len(rubric_hash(rubric)) == 64


def answer(success="true", scores=((("amount", 1)), ("way", 0.5)), extra=""):
    entries = ", ".join(f'{{"name": "{n}", "score": {s}}}' for n, s in scores)
    return f'{{"success": {success}, "criterion_scores": [{entries}]{extra}}}'


def test_a_score_is_the_gate_times_the_weighted_sum():
    rubric = parse_rubric(TEXT)
    parsed = parse_score(answer(), rubric)
    assert parsed == ParsedScore(True, (1.0, 0.5))
    assert score_value(rubric, parsed) == 0.875  # .75 * 1 + .25 * .5
    assert score_value(rubric, parse_score(answer("false"), rubric)) == 0.0
    # The order of the answer does not matter, and the model's own total is not read.
    swapped = parse_score(
        answer(scores=(("way", 0.5), ("amount", 1)), extra=', "final_score": 0.1'), rubric
    )
    assert score_value(rubric, swapped) == 0.875
    assert score_value(rubric, parse_score(answer('"false"'), rubric)) == 0.0  # "false" is false
    with pytest.raises(ValueError, match="1 criterion scores for 2 criteria"):
        score_value(rubric, ParsedScore(True, (1.0,)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"reason": "forgot"}', "success: true or false is expected, got None"),
        (answer("1"), "success: true or false is expected, got 1"),
        (answer(scores=(("amount", 1),)), "criteria missing or unknown: way"),
        (answer(scores=(("amount", 1), ("way", 1), ("style", 1))), "criteria missing or unknown: style"),
        (answer(scores=(("amount", 1), ("amount", 1))), "each criterion is expected once"),
        (answer(scores=(("amount", "NaN"), ("way", 1))), "NaN is not a number"),
        (answer(scores=(("amount", '"85%"'), ("way", 1))), "a number in .0, 1. is expected, got '85%'"),
        (answer(scores=(("amount", 2), ("way", 1))), "a number in .0, 1. is expected, got 2"),
        (answer(scores=(("amount", "true"), ("way", 1))), "a number in .0, 1. is expected, got True"),
        ('{"success": true, "success": false, "criterion_scores": []}', "a key is there twice"),
        ("{'success': True}", "no JSON object"),
    ],
)
def test_what_is_no_score(text, message):
    with pytest.raises(ScoreError, match=message):
        parse_score(text, parse_rubric(TEXT))
