"""Trees on disk: compressed JSON lines, one tree a line, with everything needed to replay a node."""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from sera_jax.types import Tree


def tree_to_dict(tree: Tree) -> dict[str, Any]:
    """Plain data of a tree; the task's own data stays with the environment, its id is enough."""
    task = {"id": tree.task.id, "tier": tree.task.tier, "goal": dataclasses.asdict(tree.task.goal)}
    return {
        "task": task,
        "index": tree.index,
        "version": tree.version,
        "stage": str(tree.stage),
        "success": tree.success,
        "error": tree.error,
        "counters": tree.counters,
        "nodes": [dataclasses.asdict(node) for node in tree.nodes],
        "launches": [dataclasses.asdict(launch) for launch in tree.launches],
    }


def write_trees(path: Path, trees: Iterable[Tree]) -> None:
    """Writes ``path`` atomically; the same trees give the same bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    # mtime=0: a resumed run's file equals the uninterrupted one's.
    with partial.open("wb") as raw, gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as file:
        for tree in trees:
            file.write(json.dumps(tree_to_dict(tree), separators=(",", ":")).encode() + b"\n")
    os.replace(partial, path)


def read_trees(path: Path) -> Iterator[dict[str, Any]]:
    """The plain data that :func:`write_trees` wrote, tree by tree."""
    with gzip.open(path, "rt") as file:
        for line in file:
            yield json.loads(line)
