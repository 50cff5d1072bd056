"""Speed of the local engine on this machine, as a table.

    python -m experiments.bench.engine [--repeats=3] [--slots=64]

The policy has 0.85M parameters: 4 layers, width 128, 4 query and 2 key/value heads of 32, feed-forward
384, vocabulary 512, float32. Rows of the table:

* decode: 64 concurrent requests of 16 prompt + 128 output tokens;
* turns: 64 sessions x 6 turns of 10 new prompt + 8 output tokens, as in a tree search;
* uneven turns: the same with 1 to 16 output tokens, so that sessions fall out of step.

Cold is the first round, compilation included; warm is the best of the later ones.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable

import jax
import numpy as np
from absl import app, flags
from rich.console import Console
from rich.table import Table

from sera_jax.policy import qwen3
from sera_jax.rollout.engine import Request, SamplingParams, derive_key
from sera_jax.rollout.local import LocalEngine

_REPEATS = flags.DEFINE_integer("repeats", 3, "Warm rounds; the best counts.", lower_bound=1)
_SLOTS = flags.DEFINE_integer("slots", 64, "Slots of the engine.", lower_bound=1)
_CHUNK = flags.DEFINE_integer("decode_chunk", 8, "Tokens between two looks at new requests.", lower_bound=1)

Workload = Callable[[LocalEngine, int], Awaitable[int]]


def bench_config() -> qwen3.Qwen3Config:
    """The policy that is measured."""
    return qwen3.tiny(512, num_kv_heads=2, intermediate_size=384)


async def decode(engine: LocalEngine, round_: int) -> int:
    """64 requests of 16 + 128 tokens; returns the tokens sampled."""

    async def one(i: int) -> int:
        ids = tuple(np.random.default_rng(i).integers(0, 512, 16).tolist())
        completion = await engine.generate(Request(ids, SamplingParams(128), derive_key(round_, i)))
        return len(completion.ids)

    return sum(await asyncio.gather(*map(one, range(64))))


def turns(low: int, high: int) -> Workload:
    """64 sessions x 6 turns of 10 new tokens and ``low`` to ``high`` output tokens."""

    async def run(engine: LocalEngine, round_: int) -> int:
        async def one(i: int) -> int:
            draw, ids, total = np.random.default_rng(i), [], 0
            for turn in range(6):
                ids += draw.integers(0, 512, 10).tolist()
                request = Request(
                    tuple(ids),
                    SamplingParams(int(draw.integers(low, high + 1))),
                    derive_key(round_, i, turn),
                    session=f"{round_}/{i}",
                )
                completion = await engine.generate(request)
                ids += completion.ids
                total += len(completion.ids)
            await engine.end_session(f"{round_}/{i}")
            return total

        return sum(await asyncio.gather(*map(one, range(64))))

    return run


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds of the first and of the best later round, tokens of one, and the engine's counters."""

    cold: float
    warm: float
    tokens: int
    metrics: dict[str, float]


def measure(workload: Workload, repeats: int, slots: int, decode_chunk: int) -> Timing:
    """Runs a workload on an engine of its own."""
    cfg = bench_config()
    engine = LocalEngine(
        qwen3.init(jax.random.key(0), cfg),
        cfg,
        slots=slots,
        context_length=160,
        decode_chunk=decode_chunk,
    )

    async def rounds() -> tuple[list[float], int]:
        seconds, tokens = [], 0
        for round_ in range(repeats + 1):
            start = time.perf_counter()
            tokens = await workload(engine, round_)
            seconds.append(time.perf_counter() - start)
        return seconds, tokens

    (cold, *warm), tokens = asyncio.run(rounds())
    return Timing(cold, min(warm), tokens, engine.metrics())


def main(argv: list[str]) -> None:
    """Prints the table."""
    del argv
    table = Table("workload", "cold s", "warm s", "tokens/s", "programs", "row use", "saved prefill")
    for name, workload in (("decode", decode), ("turns", turns(8, 8)), ("uneven turns", turns(1, 16))):
        t = measure(workload, _REPEATS.value, _SLOTS.value, _CHUNK.value)
        prompt = t.metrics["prefill_tokens"] + t.metrics["prefill_tokens_saved"]
        table.add_row(
            name,
            f"{t.cold:.2f}",
            f"{t.warm:.3f}",
            f"{t.tokens / t.warm:,.0f}",
            f"{t.metrics['programs']:.0f}",
            f"{t.metrics['row_use']:.2f}",
            f"{t.metrics['prefill_tokens_saved'] / prompt:.0%}",
        )
    Console().print(table)


if __name__ == "__main__":
    app.run(main)
