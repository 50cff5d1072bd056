"""The stage schedule: the version alone says what is trained.

Source: SERA (arXiv 2610.04902): execution, delegation and rubric take turns 16 : 2 : 2.
"""

from __future__ import annotations

import collections
import dataclasses

from sera_jax.types import Stage


class ScheduleError(ValueError):
    """A schedule that cannot be read or has ended; the message quotes it."""


@dataclasses.dataclass(frozen=True)
class Position:
    """Where a version stands.

    Attributes:
      version: Completed updates.
      stage: What the next update trains.
      cycle: Completed cycles.
      offset: Place within the cycle.
      step_in_stage: Place within the stage.
      stage_steps: Length of the stage.
    """

    version: int
    stage: Stage
    cycle: int
    offset: int
    step_in_stage: int
    stage_steps: int


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Stages in turn, repeated ``cycles`` times (-1: for ever)."""

    stages: tuple[tuple[Stage, int], ...]
    cycles: int = -1

    def __post_init__(self):
        if self.cycles == 0 or self.cycles < -1:
            raise ScheduleError(f"cycles={self.cycles}: -1 (for ever) or a positive number is expected")
        names = [stage for stage, _ in self.stages]
        if len(set(names)) != len(names):
            raise ScheduleError(f"schedule {self}: a stage is named twice")
        if Stage.EXECUTION not in names:
            raise ScheduleError(f"schedule {self}: it must contain execution")
        for stage, steps in self.stages:
            if steps < 1:
                raise ScheduleError(f"schedule {self}: {stage}:{steps} has no steps; leave the stage out")

    def __str__(self) -> str:
        return ",".join(f"{stage}:{steps}" for stage, steps in self.stages)

    @classmethod
    def parse(cls, text: str, cycles: int = -1) -> Schedule:
        """Reads ``execution:16,delegation:2,rubric:2``.

        Raises:
          ScheduleError: Anything else; the message quotes the part.
        """
        stages = []
        for part in text.split(","):
            name, colon, steps = part.strip().partition(":")
            if name not in list(Stage) or not colon or not steps.strip().isdecimal():
                raise ScheduleError(
                    f"schedule {text!r}: {part.strip()!r} is not STAGE:STEPS with a stage of "
                    f"{', '.join(Stage)}"
                )
            stages.append((Stage(name), int(steps)))
        return cls(tuple(stages), cycles)

    @property
    def cycle_length(self) -> int:
        """Updates of one cycle."""
        return sum(steps for _, steps in self.stages)

    def position(self, version: int) -> Position:
        """Where ``version`` stands.

        Raises:
          ScheduleError: A negative version, or one after the last cycle.
        """
        if version < 0:
            raise ScheduleError(f"version={version}: at least 0 is expected")
        if self.cycles > 0 and version >= self.cycles * self.cycle_length:
            raise ScheduleError(
                f"version={version}: the schedule {self} ends after {self.cycles} cycles of "
                f"{self.cycle_length}"
            )
        cycle, offset = divmod(version, self.cycle_length)
        before = 0
        for stage, steps in self.stages:
            if offset < before + steps:
                return Position(version, stage, cycle, offset, offset - before, steps)
            before += steps
        raise AssertionError("the offset lies within the cycle")

    def counts(self, steps: int) -> dict[Stage, int]:
        """Updates of each stage among the first ``steps``."""
        counter = collections.Counter(self.position(v).stage for v in range(steps))
        return {stage: counter[stage] for stage, _ in self.stages}
