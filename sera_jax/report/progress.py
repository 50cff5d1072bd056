"""Progress of a run in a terminal: what it is doing, how it is going, how long it will take."""

from __future__ import annotations

import time
from collections.abc import Mapping

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress

from sera_jax.types import Stage, Tree

_COLOURS = {Stage.EXECUTION: "cyan", Stage.DELEGATION: "magenta", Stage.RUBRIC: "yellow"}


class Progress:
    """One line that moves; where the output is no terminal, a line every few seconds.

    Args:
      console: Where to write; None writes nothing.
    """

    def __init__(self, console: Console | None = None):
        self._console = console
        self._bar: RichProgress | None = None
        self._task = None
        self._live = console is not None and console.is_terminal
        self._trees = self._wanted = self._done = self._total = 0
        self._head = self._status = ""
        self._said = 0.0
        self._began = time.monotonic()
        self._step_seconds: list[float] = []

    @classmethod
    def silent(cls) -> Progress:
        """Shows nothing."""
        return cls(None)

    # --- phases: a known number of small things --------------------------------------------------

    def phase(self, name: str, total: int) -> None:
        """Begins a phase of ``total`` parts."""
        self._stop_bar()
        self._head, self._done, self._total, self._said = name, 0, total, 0.0
        if self._live:
            self._bar = RichProgress(
                TextColumn("[bold]{task.description}"),
                BarColumn(bar_width=30),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.fields[status]}"),
                console=self._console,
            )
            self._task = self._bar.add_task(name, total=total, status="")
            self._bar.start()

    def advance(self, status: str = "") -> None:
        """One part of the phase is done."""
        self._done += 1
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done, status=status)
        elif self._console is not None:
            last = self._done == self._total
            if last or time.monotonic() - self._said > 10:
                self._said = time.monotonic()
                self._print(f"{self._head}: {self._done}/{self._total} {status}")

    # --- the loop -------------------------------------------------------------------------------

    def resumed(self, version: int) -> None:
        """Says that a run goes on."""
        self._print(f"resuming after {version} updates")

    def step(self, version: int, steps: int, stage: Stage, trees: int) -> None:
        """An optimizer step begins."""
        if self._head != "training":
            self.phase("training", steps)
        self._trees, self._wanted, self._done = 0, trees, version
        self._stage = stage
        self._show(stage)

    def tree(self, tree: Tree) -> None:
        """A tree has ended."""
        self._trees += 1
        if self._bar is not None:
            self._bar.update(
                self._task, status=f"{self._status} [dim]{self._trees}/{self._wanted} trees[/dim]"
            )

    def metrics(self, version: int, stage: Stage, metrics: Mapping[str, float], seconds: float) -> None:
        """An optimizer step is over."""
        self._step_seconds = [*self._step_seconds[-19:], seconds]
        left = (self._total - version - 1) * sum(self._step_seconds) / len(self._step_seconds)
        named = (
            ("success", "env/root_success"),
            ("child", "env/child_success"),
            ("score", "judge/score"),
            ("rank", "credit/rubric/accuracy"),
            ("gap", "learner/logprob_gap_mean"),
        )
        parts = [f"{name} {metrics[key]:.2f}" for name, key in named if key in metrics]
        if "tokens_per_second" in metrics:
            parts.append(f"{metrics['tokens_per_second']:,.0f} tok/s")
        parts.append(f"{seconds:.1f} s, {left / 60:.1f} min left")
        self._status = "  ".join(parts)
        self._done = version + 1
        self._show(stage)
        due = self._done == self._total or time.monotonic() - self._said > 10
        if self._bar is None and due:
            self._said = time.monotonic()
            self._print(f"step {self._done}/{self._total} {stage}: {self._status}")

    def evaluation(self, version: int, name: str, tasks: int) -> None:
        """An evaluation begins."""
        self._trees, self._wanted = 0, tasks
        self._status = f"evaluating {name}"

    def evaluated(self, version: int, name: str, success: float) -> None:
        """An evaluation is over."""
        self._print(f"after {version} updates: {name} {100 * success:.1f} % solved")

    def close(self) -> None:
        """Leaves the terminal as it was."""
        self._stop_bar()

    def _show(self, stage: Stage) -> None:
        if self._bar is not None:
            colour = _COLOURS[stage]
            self._bar.update(
                self._task,
                completed=self._done,
                description=f"[{colour}]{stage}[/{colour}]",
                status=self._status,
            )

    def _print(self, text: str) -> None:
        if self._console is not None:
            minutes = (time.monotonic() - self._began) / 60
            self._console.print(f"[dim]{minutes:5.1f} min[/dim]  {text}", highlight=False, soft_wrap=True)

    def _stop_bar(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
