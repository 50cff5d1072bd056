"""The compact grammar, prompts, and what may not reach a writer or scorer."""

import pytest

from sera_jax.rubric import compact, prompts
from sera_jax.rubric.contexts import LeakError, ScorerContext, WriterContext
from sera_jax.rubric.schema import ParsedScore, RubricError, ScoreError
from sera_jax.rubric.score import score_value
from sera_jax.types import Goal

TEXT = "have 2 x w 6 ; made x w 2 ; turns 4 w 2 ; gate have 2 x ."


def test_a_compact_rubric():
    rubric = compact.parse_rubric(TEXT)
    assert [c.description for c in rubric.criteria] == ["have 2 x", "made x", "turns 4"]
    assert [c.weight for c in rubric.criteria] == [0.6, 0.2, 0.2]
    assert rubric.gate == "have 2 x" and compact.render(rubric) == TEXT


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "does not end with"),
        (TEXT[:-2], "does not end with"),
        ("have 2 x w 6 ; made x w 2 .", "the last part is not 'gate ...'"),
        ("have 2 x w 6 ; made x w 2 ; gate .", "the last part is not 'gate ...'"),
        ("have 2 x ; made x w 2 ; gate made x .", "criterion 0: 'have 2 x' is not"),
        ("have 2 x w -1 ; made x w 2 ; gate made x .", "criterion 0"),
        ("have 2 x w 6 ; gate have 2 x .", "1 criteria; at least 2 are expected"),
        ("have 2 x w 2000000 ; made x w 2 ; gate made x .", "weight 2000000.0 is not allowed"),
        (f"made x w {'9' * 309} ; made x w {'9' * 309} ; gate made x .", "is not allowed"),
        ("have 2 x w 0 ; made x w 0 ; gate made x .", "all weights are 0"),
        ("made x w 1 ; " * 9 + "gate made x .", "9 criteria; at most 8 are expected"),
        ("gate x w 1 ; made x w 1 ; gate made x .", "criterion 0"),
    ],
)
def test_what_is_no_compact_rubric(text, message):
    with pytest.raises(RubricError, match=message):
        compact.parse_rubric(text)


def test_a_compact_score():
    rubric = compact.parse_rubric(TEXT)
    parsed = compact.parse_score("y n y gate y .", rubric)
    assert parsed == ParsedScore(True, (1.0, 0.0, 1.0))
    assert score_value(rubric, parsed) == pytest.approx(0.8)  # .6 + .2
    assert score_value(rubric, compact.parse_score("y y y gate n .", rubric)) == 0.0


@pytest.mark.parametrize("text", ["", "y n gate y .", "y n y y gate y .", "y n y gate y", "y n y gate x ."])
def test_what_is_no_compact_score(text):
    with pytest.raises(ScoreError, match="expected"):
        compact.parse_score(text, compact.parse_rubric(TEXT))


def writer(**changes):
    values = {
        "parent_goal": "make a ship",
        "parent_depth": 0,
        "child_depth": 1,
        "parent_turn": 2,
        "history": (("system", "rules"), ("user", "make a ship")),
        "parent_reply": "launch 2 x .",
        "snapshot": {"inventory": {"y": 3}},
        "goal": Goal("2 x", {"x": 2}, "be quick"),
        "tools": "info, craft",
        "max_turns": 8,
    }
    return WriterContext(**{**values, **changes})


def scorer(**changes):
    values = {
        "rubric": compact.parse_rubric(TEXT),
        "goal": Goal("2 x", {"x": 2}),
        "evidence": "net 2 x ; made 2 x ; turns 3 ; said done ;",
        "steps": ({"step": 0, "reply": "craft", "observation": "ok"},),
        "stop": "finished",
        "finish_message": "done",
        "snapshot": {"inventory": {"x": 2}},
    }
    return ScorerContext(**{**values, **changes})


def test_compact_messages_are_short():
    assert compact.writer_messages(writer()) == [("user", "rubric goal 2 x ; turns 8 ;")]
    ((_, text),) = compact.scorer_messages(scorer())
    assert text == f"score {TEXT} net 2 x ; made 2 x ; turns 3 ; said done ;"


def test_prompts_hold_what_is_known_and_how_to_answer():
    (_, system), (_, user) = prompts.writer_messages(writer())
    for part in ("make a ship", "launch 2 x .", '"y": 3', "2 x\nbe quick", "info, craft", "rubric_items"):
        assert part in user
    assert "JSON" in system
    (_, _), (_, user) = prompts.scorer_messages(scorer())
    for part in ("have 2 x", "craft", "net 2 x", "criterion_scores", '"stop": "finished"'):
        assert part in user


def test_long_contexts_lose_their_middle_and_keep_the_instructions():
    long = writer(history=(("user", "a" * 20_000 + "middle" + "b" * 20_000),))
    (_, _), (_, user) = prompts.writer_messages(long, budget=4_000)
    assert len(user) < 4_000 + 1_500 and "middle" not in user and "characters left out" in user
    assert "make a ship" in user and "4 to 8 items" in user and "Its step budget" in user
    steps = tuple({"step": i, "reply": "x" * 500} for i in range(100))
    (_, _), (_, user) = prompts.scorer_messages(scorer(steps=steps), budget=5_000)
    assert '"step": 0' in user and '"step": 99' in user and '"step": 40' not in user
    assert "criterion_scores" in user


def test_cut_middle():
    # 60 characters, budget 40: the mark has 29, so 11 stay: 2 from the start, 9 from the end.
    text = "".join(chr(ord("0") + i % 10) for i in range(60))
    cut = prompts.cut_middle(text, 48)
    assert len(cut) <= 48 and cut.startswith(text[:2]) and cut.endswith(text[-6:])
    assert prompts.cut_middle(text, 60) == text
    with pytest.raises(ValueError, match="budget=5: at least"):
        prompts.cut_middle(text, 5)


@pytest.mark.parametrize("key", ["reward", "root_success", "label", "verified", "Verifier"])
def test_outcomes_may_not_reach_a_writer_or_scorer(key):
    with pytest.raises(LeakError, match=rf"snapshot\.info\.{key} must not reach"):
        writer(snapshot={"info": {key: 1}})
    with pytest.raises(LeakError, match=rf"steps\[0\]\.{key} must not reach"):
        scorer(steps=({key: 0},))
