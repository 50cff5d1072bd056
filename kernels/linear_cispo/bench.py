"""Memory and time of the chunked log-probs against the plain form, in one run.

    python -m kernels.linear_cispo.bench [--out experiments/results/bench/linear_cispo.md]

Forward and backward to hidden states and head, float32. Memory is XLA's own count of temporary buffers
of the compiled program; the gradients themselves are outputs and not counted, for either form.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels.linear_cispo.api import chunk_for, linear_logprob

TOKENS, HIDDEN, VOCABULARY = 1024, 256, 151_936
REPEATS = 3


def problem(vocabulary: int) -> tuple[Any, ...]:
    """Hidden states, head, targets and token weights of one size."""
    keys = jax.random.split(jax.random.key(0), 4)
    hidden = jax.random.normal(keys[0], (TOKENS, HIDDEN))
    head = jax.random.normal(keys[1], (vocabulary, HIDDEN)) / np.sqrt(HIDDEN)
    targets = jax.random.randint(keys[2], (TOKENS,), 0, vocabulary)
    return hidden, head, targets, jax.random.normal(keys[3], (TOKENS,)) / TOKENS


def compiled(implementation: str, arguments: tuple[Any, ...], **options: Any) -> Any:
    """The compiled value and gradients."""

    def total(hidden, head, targets, weight):
        logprob = linear_logprob(hidden, head, targets, implementation=implementation, **options)
        return jnp.sum(weight * logprob), logprob

    function = jax.value_and_grad(total, argnums=(0, 1), has_aux=True)
    return jax.jit(function).lower(*arguments).compile()


def best_seconds(run: Callable[[], Any]) -> float:
    """The shortest of a few runs after one that is not counted."""
    jax.block_until_ready(run())
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        jax.block_until_ready(run())
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def measure(vocabulary: int) -> list[str]:
    """Table rows of one vocabulary."""
    arguments = problem(vocabulary)
    forms = {"plain": ("reference", {}), f"chunks of {chunk_for(vocabulary):,}": ("xla", {})}
    rows, plain = [], None
    for name, (implementation, options) in forms.items():
        program = compiled(implementation, arguments, **options)
        memory = program.memory_analysis().temp_size_in_bytes / 2**20
        seconds = best_seconds(lambda program=program: program(*arguments))
        (_, logprob), gradients = program(*arguments)
        if plain is None:
            plain = (memory, seconds, logprob, gradients)
        error = float(jnp.abs(logprob - plain[2]).max())
        slope = max(float(jnp.abs(a - b).max()) for a, b in zip(gradients, plain[3], strict=True))
        rows.append(
            f"| {vocabulary:,} | {name} | {memory:,.1f} | {memory / plain[0]:.4f} | {seconds:.2f} | "
            f"{seconds / plain[1]:.2f} | {error:.1e} | {slope:.1e} |"
        )
    return rows


def main() -> None:
    """Prints the table and writes it where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[VOCABULARY, 151_937, 32_768])
    arguments = parser.parse_args()
    command = "python -m kernels.linear_cispo.bench"
    lines = [
        "# linear_cispo: chunked against plain",
        "",
        f"`{command}`; T = {TOKENS:,}, H = {HIDDEN}, float32, forward and backward to hidden and head, "
        f"best of {REPEATS}. {os.cpu_count()} CPU cores ({platform.machine()}), "
        f"Python {platform.python_version()}, jax {jax.__version__}.",
        "",
        "Temporaries are XLA's count for the compiled program, without the gradients, which are outputs. "
        "Differences are the largest absolute ones from the plain form. 151,937 is divided by no chunk.",
        "",
        "| V | form | temporaries, MiB | of plain | seconds | of plain | log-prob diff | gradient diff |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for vocabulary in arguments.vocabularies:
        lines += measure(vocabulary)
    text = "\n".join(lines) + "\n"
    print(text)
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(text)


if __name__ == "__main__":
    main()
