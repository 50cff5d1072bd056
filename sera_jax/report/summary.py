"""What a run came to, and what a run would be, as tables in a terminal."""

from __future__ import annotations

import collections
import json
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from sera_jax import config as config_lib
from sera_jax.build import build
from sera_jax.config import Config
from sera_jax.policy import qwen3
from sera_jax.report.metrics import read_metrics
from sera_jax.schedule import Schedule


def print_summary(workdir: Path, console: Console) -> None:
    """Evaluation before and after, what each stage did, and where everything is."""
    rows = read_metrics(workdir / "metrics.jsonl")
    console.print(_evaluations(rows))
    console.print(_stages(rows))
    ledger = json.loads((workdir / "ledger.json").read_text())
    verifier: collections.Counter[str] = collections.Counter()
    for key, count in ledger.items():
        source, stage, purpose, field = key.split("/")
        if source == "verifier" and field == "calls":
            verifier[f"{purpose} ({stage})"] += count
    calls = ", ".join(f"{n:,} {name}" for name, n in sorted(verifier.items())) or "none"
    console.print(f"Verifier calls: {calls}", highlight=False, soft_wrap=True)
    console.print(
        f"Curves: {workdir / 'curves.png'}   metrics: {workdir / 'metrics.jsonl'}   trees: "
        f"{workdir / 'trees'}   checkpoints: {workdir / 'checkpoints'}",
        highlight=False,
        soft_wrap=True,
    )


_EVALUATED = (
    ("root success", "success"),
    ("verified child success", "env/child_success"),
    ("mean score", "judge/score"),
    ("score minus verified success", "judge/score_minus_verified"),
    ("scorer = program, succeeded children", "judge/scorer_right_succeeded"),
    ("scorer = program, failed children", "judge/scorer_right_failed"),
    ("score >= 1/2 for succeeded children", "judge/accuracy_succeeded"),
    ("score < 1/2 for failed children", "judge/accuracy_failed"),
)


def _evaluations(rows: list[dict[str, Any]]) -> Table:
    kinds = list(dict.fromkeys(row["kind"] for row in rows if row["kind"].startswith("eval/")))
    ends = {}
    for kind in kinds:
        mine = [row for row in rows if row["kind"] == kind]
        ends[kind] = (mine[0], mine[-1])
    first, last = next(iter(ends.values())) if ends else ({"version": 0}, {"version": 0})
    table = Table(
        title=f"Held-out tasks, greedy: after {first['version']} and after {last['version']} updates",
        title_justify="left",
    )
    table.add_column("")
    for kind in kinds:
        table.add_column(kind.removeprefix("eval/").replace("_", " "), justify="right", no_wrap=True)
    for label, key in _EVALUATED:
        cells = [[_number(row.get(key)) for row in ends[kind]] for kind in kinds]
        if any(any(pair) for pair in cells):
            table.add_row(label, *(f"{before or '-'} -> {after or '-'}" for before, after in cells))
    return table


_PER_STAGE = (
    ("updates", "version", np.size),
    ("updates with trained tokens", "learner/trained_tokens", np.count_nonzero),
    ("trained tokens", "learner/trained_tokens", np.sum),
    ("samples", "credit/samples", np.sum),
    ("mean gradient norm", "learner/grad_norm", np.mean),
    ("largest log-prob gap, sampler to learner", "learner/logprob_gap_max", np.max),
    ("groups ranked", "credit/rubric/groups_ranked", np.sum),
    ("mean ranking accuracy", "credit/rubric/accuracy", np.mean),
    ("seconds a step", "seconds/total", np.mean),
)


_COUNTS = (np.size, np.count_nonzero, np.sum)


def _stages(rows: list[dict[str, Any]]) -> Table:
    train = [row for row in rows if row["kind"] == "train"]
    stages = list(dict.fromkeys(row["stage"] for row in train))
    table = Table(title="What each stage did", title_justify="left")
    table.add_column("")
    for stage in stages:
        table.add_column(stage, justify="right", no_wrap=True)
    for label, key, reduce in _PER_STAGE:
        cells = []
        for stage in stages:
            values = [r[key] for r in train if r["stage"] == stage and r.get(key) is not None]
            value = float(reduce(values)) if values else None
            cells.append(_number(int(value) if value is not None and reduce in _COUNTS else value))
        table.add_row(label, *cells)
    return table


def _number(value: float | None) -> str:
    """Counts whole, rates and norms to three digits."""
    if value is None:
        return ""
    if value == int(value) and (abs(value) >= 2 or isinstance(value, int)):
        return f"{int(value):,}"
    return f"{value:.3f}" if abs(value) >= 1e-3 or value == 0 else f"{value:.1e}"


def dry_run(config: Config, workdir: Path, console: Console) -> None:
    """Builds all parts but the weights, prints the arithmetic, and writes the resolved config."""
    parts = build(config)
    rollout, model = config.rollout, parts.model
    schedule = Schedule.parse(config.schedule)
    counts = ", ".join(f"{n} {stage}" for stage, n in schedule.counts(config.run.steps).items())
    parameters = qwen3.parameter_count(model)
    cache = 2 * model.num_layers * rollout.slots * rollout.context_length
    cache *= model.num_kv_heads * model.head_dim * np.dtype(model.dtype).itemsize
    table = Table(
        title=f"{config.name}, fingerprint {config_lib.fingerprint(config)}", title_justify="left"
    )
    table.add_column("")
    table.add_column("how much", justify="right", no_wrap=True)
    for label, value in (
        ("updates", f"{config.run.steps:,} ({counts})"),
        ("trees a step", f"{rollout.tasks_per_step} tasks x {rollout.group_size} trees"),
        ("parameters", f"{parameters:,}"),
        ("weights, gradients, moments", f"{16 * parameters / 2**30:.2f} GiB"),
        ("serving copy of weights", f"{np.dtype(model.dtype).itemsize * parameters / 2**30:.2f} GiB"),
        ("engine cache", f"{cache / 2**30:.2f} GiB ({rollout.slots} slots x {rollout.context_length})"),
        ("tokens of a micro-batch", f"{config.learner.micro_rows * config.learner.row_length:,}"),
    ):
        table.add_row(label, value)
    console.print(table)
    workdir.mkdir(parents=True, exist_ok=True)
    path = workdir / "config.dry_run.json"
    path.write_text(json.dumps(config_lib.as_dict(config), indent=1) + "\n")
    console.print(f"Resolved settings: {path}", highlight=False, soft_wrap=True)
