"""``metrics.jsonl``: one flat JSON object a line, the file that tables and plots read."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class MetricsWriter:
    """Appends metrics; every line is on disk when :meth:`write` returns.

    Args:
      path: The file.
      resume_from: Version from which a run goes on: lines of this and later versions are dropped,
        except evaluations of exactly this version, so that the file of a resumed run equals that of
        an uninterrupted one. None starts a new file.
    """

    def __init__(self, path: Path, resume_from: int | None = None):
        self._path = Path(path)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        kept = []
        if resume_from is not None and self._path.exists():
            # A kill can leave half a line at the end; it belongs to a step that will run again.
            for row in read_metrics(self._path):
                evaluation = str(row["kind"]).startswith("eval/")
                if row["version"] < resume_from or (evaluation and row["version"] == resume_from):
                    kept.append(json.dumps(row) + "\n")
        partial = self._path.with_name(f".{self._path.name}.partial")
        partial.write_text("".join(kept))
        os.replace(partial, self._path)
        self._file = self._path.open("a")

    def write(self, version: int, kind: str, values: Mapping[str, Any]) -> None:
        """Appends one line; a number that JSON cannot hold becomes null and is counted beside it."""
        row: dict[str, Any] = {"version": int(version), "kind": kind}
        bad = 0
        for name, value in values.items():
            if not isinstance(value, str):
                value = float(value)
                if not math.isfinite(value):
                    value, bad = None, bad + 1
            row[name] = value
        if bad:
            row["nonfinite_metrics"] = bad
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All whole lines of a metrics file, in order."""
    rows = []
    for line in Path(path).read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows
