"""The stage schedule."""

import pytest

from sera_jax.schedule import Schedule, ScheduleError
from sera_jax.types import Stage

SERA = "execution:16,delegation:2,rubric:2"


def test_positions_of_one_cycle():
    schedule = Schedule.parse(SERA)
    stages = [schedule.position(v).stage for v in range(21)]
    assert stages[:16] == [Stage.EXECUTION] * 16
    assert stages[16:20] == [Stage.DELEGATION] * 2 + [Stage.RUBRIC] * 2
    assert stages[20] == Stage.EXECUTION
    position = schedule.position(39)
    assert (position.cycle, position.offset, position.step_in_stage, position.stage_steps) == (1, 19, 1, 2)
    assert str(schedule) == SERA and schedule.cycle_length == 20


@pytest.mark.parametrize(
    ("text", "steps", "counts"),
    [
        # 250 = 12 cycles of 20 and 10: E 12 * 16 + 10 = 202, D and R 12 * 2 = 24.
        (SERA, 250, [202, 24, 24]),
        (SERA, 400, [320, 40, 40]),
        # 250 = 13 cycles of 18 and 16: E 13 * 16 + 16 = 224, R 26.
        ("execution:16,rubric:2", 250, [224, 26]),
        ("execution:16,rubric:2", 400, [356, 44]),
        # 250 = 15 cycles of 16 and 10: E 15 * 12 + 10 = 190, D 60.
        ("execution:12,delegation:4", 250, [190, 60]),
        ("execution:12,delegation:4", 400, [300, 100]),
        ("execution:1", 250, [250]),
    ],
)
def test_stage_counts_of_the_published_variants(text, steps, counts):
    assert list(Schedule.parse(text).counts(steps).values()) == counts


def test_a_finite_schedule_ends():
    schedule = Schedule.parse("execution:2,rubric:1", cycles=2)
    assert schedule.position(5).stage == Stage.RUBRIC
    with pytest.raises(ScheduleError, match="version=6: the schedule .* ends after 2 cycles of 3"):
        schedule.position(6)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("execution", "'execution' is not STAGE:STEPS"),
        (
            "execution:16,judge:2",
            "'judge:2' is not STAGE:STEPS with a stage of execution, delegation, rubric",
        ),
        ("execution:-1", "'execution:-1' is not STAGE:STEPS"),
        ("execution:0", "execution:0 has no steps"),
        ("execution:1,execution:2", "a stage is named twice"),
        ("rubric:2", "it must contain execution"),
        ("", "'' is not STAGE:STEPS"),
    ],
)
def test_bad_schedules_are_refused(text, message):
    with pytest.raises(ScheduleError, match=message):
        Schedule.parse(text)


def test_bad_cycles_and_versions_are_refused():
    for cycles in (0, -2):
        with pytest.raises(ScheduleError, match=f"cycles={cycles}: -1 .* or a positive number is expected"):
            Schedule.parse(SERA, cycles)
    with pytest.raises(ScheduleError, match="version=-1: at least 0 is expected"):
        Schedule.parse(SERA).position(-1)
