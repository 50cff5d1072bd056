"""A run as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import Patch

from sera_jax.report.metrics import read_metrics

_STAGE_COLOURS = {"delegation": "#e7d4f2", "rubric": "#fdf0c4"}
_PANELS = (
    (
        "Root success (program)",
        (("env/root_success", "sampled, training tasks"),),
        ("eval/trained_pairs", "eval/unseen_pairs", "eval/dev"),
    ),
    (
        "Children: what the judge says and what is true",
        (("judge/score", "mean score"), ("env/child_success", "verified success")),
        (),
    ),
    (
        "The judge against the program",
        (
            ("credit/rubric/accuracy", "ranking accuracy"),
            ("judge/scorer_right_succeeded", "scorer right, succeeded"),
            ("judge/scorer_right_failed", "scorer right, failed"),
        ),
        (),
    ),
    (
        "Learner",
        (("learner/grad_norm", "gradient norm"), ("learner/logprob_gap_max", "largest log-prob gap")),
        (),
    ),
)


def plot_run(metrics_path: Path, png_path: Path) -> None:
    """Draws success, judge, ranking and learner curves over versions, with bands for the stages.

    Faint points are single steps, lines are means over 9 steps of the same series; a series without
    data is left out.
    """
    rows = read_metrics(metrics_path)
    steps = [row for row in rows if row["kind"] == "train"]
    figure, axes = plt.subplots(2, 2, figsize=(12, 7.5), constrained_layout=True)
    for axis, (title, series, evaluations) in zip(axes.flat, _PANELS, strict=True):
        for row in steps:
            if colour := _STAGE_COLOURS.get(row["stage"]):
                axis.axvspan(row["version"] - 0.5, row["version"] + 0.5, color=colour, lw=0, zorder=0)
        for number, (name, label) in enumerate(series):
            _line(axis, steps, name, label, f"C{number}")
        for number, kind in enumerate(evaluations):
            points = [(r["version"], r["success"]) for r in rows if r["kind"] == kind]
            if points:
                label = f"greedy, {kind.removeprefix('eval/').replace('_', ' ')}"
                axis.plot(*zip(*points, strict=True), "o--", color=f"C{number + 1}", label=label)
        axis.set_title(title)
        axis.set_xlabel("version (completed updates)")
        axis.grid(alpha=0.25)
        if title == "Learner":
            axis.set_yscale("symlog", linthresh=1e-4)
        else:
            axis.set_ylim(-0.02, 1.02)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=8)
    bands = [Patch(color=colour, label=f"{stage} stage") for stage, colour in _STAGE_COLOURS.items()]
    figure.legend(handles=bands, loc="outside lower right", ncols=2, fontsize=8, frameon=False)
    figure.savefig(png_path, dpi=110)
    plt.close(figure)


def _line(axis: Any, steps: list[dict[str, Any]], name: str, label: str, colour: str) -> None:
    points = [(row["version"], row[name]) for row in steps if row.get(name) is not None]
    if not points:
        return
    versions, values = zip(*points, strict=True)
    axis.plot(versions, values, ".", color=colour, alpha=0.3, ms=4)
    smooth = [
        sum(values[max(0, i - 4) : i + 5]) / len(values[max(0, i - 4) : i + 5]) for i in range(len(values))
    ]
    axis.plot(versions, smooth, "-", color=colour, lw=1.8, label=label)
